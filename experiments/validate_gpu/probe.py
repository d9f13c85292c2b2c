"""Decides in 15 minutes on a GPU whether costs, replays, planned steps and rivals are as predicted.

    python -m experiments.validate_gpu.probe [out=DIR] [backend=cuda|host] [step=1|2] [section …]    (make gpu STEP=1)

It prints the sections with their questions and predictions, then runs them in order, each in a process of its own
with its share of the time: a section that fails, or breaks CUDA, leaves a row that says so and the next one follows.
Every measurement is printed beside its prediction and is a line of DIR/probe.jsonl at once; all are gathered in
DIR/probe.json. ``backend=host`` rehearses all of it in small without a GPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Before PyTorch is imported: experiments/validate_gpu/conditions.py says why.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch

import agents
from executor import PlannedStep, StepError, open_backend, replay
from executor.calibrate import calibrate
from executor.capture.profile import Cache, Profile, measure, with_profile
from executor.memory.engines import line
from executor.replay.backend import Backend, Stream
from experiments.validate_gpu.networks import MIB, build, limit_of, made, reads_numbers
from experiments.validate_gpu.pytorch_baselines import eager_beside
from experiments.validate_gpu.settings import BACKENDS, UsageError, check_known, values_of
from experiments.validate_gpu.stages import base_machine, with_host
from experiments.validate_gpu.training import Case, batch_stays, beside_eager
from simulator import Machine, Plan, Program, simulate
from simulator.files import read_json, write_json
from simulator.schedule import lower

FORMAT = "probe/1"
COMMITTED = Path(__file__).resolve().parents[1] / "results" / "gpu_h200"  # of the runs that the predictions are from
RESNET, LLAMA, GPT2 = "resnet50_imagenet_bf16", "llama_bf16", "gpt2_medium_bf16"
TINY = {RESNET: "tiny_resnet", LLAMA: "tiny_gpt2", GPT2: "tiny_gpt2"}  # in a rehearsal
# On an H200: the second run's figures.
COSTS = {"launch_ns": 1400, "graph_launch_ns": 520, "event_ns": 0, "wait_ns": 100, "queue_depth": 1022,
         "h2d_bytes_per_s": 55_500_000_000, "d2h_bytes_per_s": 55_400_000_000, "h2d_latency_ns": 7600,
         "d2h_latency_ns": 7600, "issue_ns": 12_000}  # fmt: skip
ROUND_TRIP_NS = 10_000  # that a graph adds to a copy between two kernels; traces had gaps of 17 us with its latency
COUNT, LONG_NS = 200, 20_000
REHEARSAL = 4  # times the seconds of a section, on a CPU that others use, too
AIMS = (1.0, 0.97, 0.94, 0.88)  # of a limit: what is planned for until the graph's memory is within it
STEPS = {"cuda": 16, "cpu": 4}


@dataclass(frozen=True)
class Probe:
    """A run of one section.

    Attributes:
        out: folder of the results.
        backend: "cuda", or "host" for a rehearsal.
        until: when the section's time is over, by ``time.monotonic``.
    """

    section: str
    out: Path
    backend: str
    until: float

    @property
    def device(self) -> str:
        """PyTorch's name of the device."""
        return "cuda" if self.backend == "cuda" else "cpu"

    @property
    def machine(self) -> Machine:
        """What section ``costs`` measured, else the preset (CUDA) or the machine that the host plays."""
        own = self.out / "machine.yaml"
        return Machine.load(own) if own.exists() else self.base

    @property
    def base(self) -> Machine:
        """Figures that are not measured."""
        return base_machine(self.device)

    def network(self, name: str) -> str:
        """The network, or a tiny one in a rehearsal."""
        return name if self.backend == "cuda" else TINY[name]

    def row(self, what: str, predicted: object, measured: object, **more: Any) -> None:
        """Prints a measurement beside its prediction, and keeps it."""
        row = {"section": self.section, "what": what, "predicted": predicted, "measured": measured, **more}
        keep(self.out, row)
        rest = ", ".join(f"{key} {_short(value)}" for key, value in more.items() if not isinstance(value, (dict, list)))
        numbers = f"predicted {_short(predicted)}, measured {_short(measured)}"
        print(f"{self.section:10} {what}: {numbers}{'; ' if rest else ''}{rest}", flush=True)

    def failed(self, what: str, error: object) -> None:
        """Says in a row why there is no measurement."""
        keep(self.out, {"section": self.section, "what": what, "failed": str(error)[:400]})
        print(f"{self.section:10} {what}: failed: {error}", flush=True)

    def left(self) -> float:
        """Seconds that the section still has."""
        return self.until - time.monotonic()


def keep(out: Path, row: dict[str, Any]) -> None:
    """Appends a row to the folder's probe.jsonl."""
    with (out / "probe.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def _short(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


# ------------------------------------------------------------------------------------------- sections


def costs(probe: Probe) -> None:
    """Calibrates the machine, and measures what a graph adds to a copy between two kernels."""
    base = probe.base
    with open_backend(probe.backend, base) as backend:
        found = calibrate(backend, base, 2**28 if probe.backend == "cuda" else 2**20, seconds=probe.left() / 3)
        trips = {d: round_trip_ns(backend, found.machine, d) for d in ("d2h", "h2d")}
    found = with_host(found, base, probe.device)
    found.save(probe.out / "machine.yaml")
    for figure, predicted in COSTS.items():
        probe.row(figure, predicted, getattr(found.machine, figure))
    for direction, ns in trips.items():
        probe.row(f"round trip by {direction} in a graph, ns beyond the copy", ROUND_TRIP_NS, ns)


def round_trip_ns(backend: Backend, machine: Machine, direction: Stream) -> float:
    """ns that pass in a graph between two kernels, of which the second waits for a copy of 1 MiB that waits for the
    first, beyond what the copy takes."""
    backend.task = f"round trips by {direction}"

    def trips() -> None:
        for slot in range(COUNT):
            backend.spin(LONG_NS, slot=slot)
            backend.wait(direction, backend.record("compute"))
            backend.copy(direction, 0, 0, MIB)
            backend.wait("compute", backend.record(direction))

    with backend.arena(MIB, MIB, COUNT):
        launch = backend.graph(trips)
        for _ in range(2):
            launch()
            backend.synchronize()
        log = backend.log()
    gaps = log.begin[1:].astype(np.int64) - log.end[:-1].astype(np.int64)
    return float(np.median(gaps)) - (machine.d2h_ns(MIB) if direction == "d2h" else machine.h2d_ns(MIB))


def pools(probe: Probe) -> None:
    """A memory pool for each operator of a capture, nested in it; then a small planned step as a graph."""
    if probe.backend == "cuda":
        x = torch.randn(2**20, device="cuda")
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        own, results = [], []
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for i in range(12):
                own.append(torch.cuda.MemPool(no_split=True))
                with torch.cuda.use_mem_pool(own[-1]):
                    results.append(x * (i + 2))
        graph.replay()
        torch.cuda.synchronize()
        right = sum(torch.equal(result, x * (i + 2)) for i, result in enumerate(results))
        probe.row("operators whose pool of their own holds what a replay computes", 12, right)
        del graph, results  # before the pools
    planned(probe, "tiny_resnet", 0.8, True, {})


def replays(probe: Probe) -> None:
    """Replays plans as graphs: those committed with the second run, and those that planners make in seconds."""
    machine = probe.machine
    with open_backend(probe.backend, machine) as backend:
        for i, (what, program, plan, limit) in enumerate(_plans(probe, machine)):
            if probe.left() < 5:
                probe.failed(what, "no time left")
                continue
            try:
                found = replay(program, plan, machine, limit, backend)
                checks = replay(program, plan, machine, limit, backend, 2, mode="check").checks if not i else 0
                probe.row(what, found.predicted_ns, found.iteration_ns, error=found.error, checks=checks,
                          footprint=found.footprint, limit=limit)  # fmt: skip
            except Exception as error:  # the next plan may do
                probe.failed(what, line(error))


def _plans(probe: Probe, machine: Machine) -> Iterator[tuple[str, Program, Plan, int]]:
    """(name, program, plan, limit) of what is replayed."""
    folder = COMMITTED / "graphs"
    if probe.backend == "host":
        net = build(TINY[RESNET], "cpu")
        programs = {TINY[RESNET]: net.captured(machine).program}
    else:
        names = (RESNET, LLAMA, GPT2)
        programs = {name: Program.load(folder / f"program-{name}.json.gz") for name in names}
        for file in sorted(folder.glob("plan-*.json")):
            program = programs[file.stem.split("-")[1]]
            plan = Plan.load(file).retimed(program)  # of a network, one profile is kept
            yield file.stem, program, plan, max(plan.limit, lower(program, plan).required_bytes)
    for name, program in list(programs.items())[:1]:
        for fraction in (0.7, 0.5):
            for planner in ("capuchin", "superneurons", "autoswap_swdoa", "lp_round"):
                limit = limit_of(program, fraction)
                try:
                    plan = made(planner, program, calls=2000).plan(program, machine, limit)
                except (agents.Infeasible, ImportError) as error:
                    probe.failed(f"{name} {fraction} {planner}", line(error))
                    continue
                yield f"{name} {fraction} {planner}", program, plan, limit


def steps(name: str) -> Callable[[Probe], None]:
    """Section: planned steps of a network, kernel by kernel and as a graph, in turns with eager steps."""

    def section(probe: Probe) -> None:
        profiles: dict[bool, Profile] = {}
        for fraction, graph in ((0.7, True), (0.7, False), (0.5, True)):
            if probe.left() > 5:
                planned(probe, probe.network(name), fraction, graph, profiles)
            else:
                probe.failed(_what(name, fraction, graph), "no time left")

    return section


def _what(name: str, fraction: float, graph: bool) -> str:
    return f"{name} {fraction} {'as a graph' if graph else 'kernel by kernel'}"


def planned(probe: Probe, name: str, fraction: float, graph: bool, profiles: dict[bool, Profile]) -> None:
    """A planned step beside eager steps. Where the graph's memory is over the limit, it is planned for less.

    Args:
        profiles: of the network as it is, and with an optimizer that a graph can hold; what is missing is measured.
    """
    what, device, machine = _what(name, fraction, graph), probe.device, probe.machine
    try:
        eager = eager_beside(name, device)
        held = torch.cuda.memory_allocated() if device == "cuda" else 0
        capturable = graph and reads_numbers(name)
        network = build(name, device, capturable=capturable)
        captured = network.captured(machine)
        if capturable not in profiles:
            cache: Cache = "step" if device == "cuda" else "hot"
            profiles[capturable] = measure(captured, device, machine.name, 3, cache=cache)
        program = with_profile(captured.program, profiles[capturable])
        captured, limit = replace(captured, program=program), limit_of(program, fraction)
        reasons = []
        for aim in AIMS if graph else AIMS[:1]:
            plan = made("annealing", program, iterations=50).plan(program, machine, int(aim * limit))
            case = Case(name, program, fraction, limit)
            if graph:
                case, plan = batch_stays(case, plan)
            try:
                with PlannedStep(captured, plan, machine, case.limit, graph=graph) as step:
                    found = beside_eager(step, network.batch, eager, STEPS[device], device, held)
            except StepError as error:
                reasons.append(f"planned for {aim:.0%}: {line(error)}")
                continue
            predicted, ns = simulate(program, plan, machine, case.limit).iteration_ns, found["measured_ns"]
            probe.row(what, predicted, ns, limit=case.limit, planned_for=aim, ideal_ns=program.ideal_ns,
                      kernels=len(program.kernels), eager_ns=found["eager_ns"], to_eager=ns / found["eager_ns"],
                      host_ns=found["host_ns"], peak=found["ledger"],
                      **({"allocated": found["device_peak"]} if device == "cuda" else {}))  # fmt: skip
            return
        probe.failed(what, "; ".join(reasons))
    except Exception as error:  # the next row may do
        probe.failed(what, line(error))


def rivals(probe: Probe) -> None:
    """What PyTorch offers, at the same peak as a planned step."""
    methods = ["ours", "checkpoint", "offload", *(["compile"] if probe.backend == "cuda" else []), "save_on_cpu"]
    words = "limits=0.7", f"methods={','.join(methods)}", "planners=", "train=", "graph="
    for what, r in validated(probe, LLAMA, "profile,plan,compare", *words):
        more = {key: r.get(key) for key in ("eager_ns", "overhead", "measured_peak", "limit", "setting")}
        probe.row(what, "fastest" if r["method"] == "ours" else "slower than ours", r["measured_ns"], **more)


def largest(probe: Probe) -> None:
    """The largest batch within the memory that eager needs for its own."""
    for what, r in validated(probe, RESNET, "largest", "methods=eager,ours,checkpoint"):
        predicted = {"ours": ">= 2 x eager", "eager": r["own_batch"]}.get(r["method"], "less than ours")
        probe.row(what, predicted, r["batch"], time_over=r["time_over"], cap=r["cap"])


def validated(probe: Probe, network: str, stages: str, *words: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs experiments.validate_gpu on one network, with the section's time; yields what each row of the last stage is
    of, and the row. Rows that failed are kept."""
    name, machine = probe.network(network), probe.out / "machine.yaml"
    out, kind = probe.out / probe.section, stages.rpartition(",")[2]
    preset = probe.base.name if probe.backend == "cuda" else "h200"
    command = [sys.executable, "-m", "experiments.validate_gpu", f"backend={probe.backend}", f"out={out}",
               f"machine={machine if machine.exists() else preset}",
               f"workloads={name}", f"stages={stages}", f"seconds={max(10, probe.left() - 5):.0f}", *words]  # fmt: skip
    subprocess.run(command, check=False)
    results = out / "results.json"
    for r in read_json(results)["rows"] if results.exists() else ():
        if r["kind"] == kind:
            what = f"{name} {r['fraction']} {r['method']}" if "fraction" in r else f"{name} {r['method']}"
            if "failed" in r:
                probe.failed(what, r["failed"])
            else:
                yield what, r


# ------------------------------------------------------------------------------------------- the command


@dataclass(frozen=True)
class Section:
    """A part of the run: which of the two commands does it, its share of seconds, what it asks and expects."""

    step: int
    seconds: int
    run: Callable[[Probe], None]
    question: str
    prediction: str


FASTER = "<= 1.02 x prediction, <= eager as a graph, peak <= limit"
SECTIONS = {
    "costs": Section(1, 55, costs, "pauses, events, waits, queue, link", "as in COSTS; a round trip adds 10 us"),
    "pools": Section(1, 25, pools, "a memory pool per operator of a capture", "12 of 12; peak <= limit"),
    "replays": Section(1, 80, replays, "replays as one CUDA graph", "error <= 2 % in the mean, <= 5 % worst"),
    "resnet": Section(1, 120, steps(RESNET), "planned steps of ResNet-50 beside eager", FASTER),
    "llama": Section(1, 120, steps(LLAMA), "planned steps of Llama beside eager", FASTER),
    "gpt2": Section(2, 95, steps(GPT2), "planned steps of GPT-2 beside eager", FASTER),
    "rivals": Section(2, 210, rivals, "PyTorch's methods at equal peak (Llama, 70 %)", "ours is the fastest"),
    "largest": Section(2, 95, largest, "the largest batch of ResNet-50", "ours >= 2 x eager"),
}


@dataclass(frozen=True)
class Asked:
    """Keys of the command line; ``seconds``: of the one section that is run in this process, not in one of its own."""

    out: str = "runs/gpu"
    backend: str = "cuda"
    step: int = 0
    seconds: float = 0.0


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns its exit status: 0 if every section has ended by itself."""
    words = sys.argv[1:] if words is None else words
    names = [word for word in words if "=" not in word]
    try:
        asked = Asked(**values_of(Asked, [word for word in words if "=" in word]))
        for key, value, known in (("backend", asked.backend, BACKENDS), ("step", asked.step, (0, 1, 2)),
                                  ("section", tuple(names), SECTIONS)):  # fmt: skip
            check_known(key, value, known)
        if asked.backend == "cuda" and not torch.cuda.is_available():
            raise UsageError("there is no CUDA GPU here; backend=host rehearses the probe without one")
    except UsageError as error:
        print(error, str(__doc__).splitlines()[2].strip(), sep="\nusage: ", file=sys.stderr)
        return 2
    out = Path(asked.out)
    out.mkdir(parents=True, exist_ok=True)
    if asked.seconds:
        (name,) = names
        SECTIONS[name].run(Probe(name, out, asked.backend, time.monotonic() + asked.seconds))
        return 0
    chosen = names or [name for name, section in SECTIONS.items() if asked.step in (0, section.step)]
    return in_order(chosen, out, asked.backend)


def in_order(names: Sequence[str], out: Path, backend: str) -> int:
    """Prints the sections, runs each in a process of its own, gathers probe.json. The next gets time that is left."""
    for name in names:
        section = SECTIONS[name]
        print(f"{name:10}{section.seconds:4} s  {section.question}: {section.prediction}")
    end, status = time.monotonic(), 0
    for name in names:
        end, begin = end + SECTIONS[name].seconds * (REHEARSAL if backend == "host" else 1), time.monotonic()
        seconds = end - begin
        print(f"== {name}, at most {seconds:.0f} s", flush=True)
        command = [sys.executable, "-m", "experiments.validate_gpu.probe", f"out={out}", f"backend={backend}", name,
                   f"seconds={seconds:.0f}"]  # fmt: skip
        with subprocess.Popen(command, start_new_session=True) as process:
            try:
                done = process.wait(seconds)
                failed = f"its process ended with status {done}" if done else ""
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)  # with what it has started
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                failed = f"stopped after {seconds:.0f} s"
        if failed:
            status = 1
            keep(out, {"section": name, "failed": failed})
            print(f"{name:10} failed: {failed}", flush=True)
        keep(out, {"section": name, "seconds": round(time.monotonic() - begin, 1)})
        gather(out, backend)
    print(f"results are in {out / 'probe.json'}")
    return status


def gather(out: Path, backend: str) -> None:
    """Writes probe.json from the rows until now."""
    device = torch.cuda.get_device_name() if backend == "cuda" else "host"
    rows = [json.loads(text) for text in (out / "probe.jsonl").read_text().splitlines()]
    found = {"format": FORMAT, "device": device, "torch": torch.__version__, "rows": rows}
    write_json(out / "probe.json", found, indent=1)


if __name__ == "__main__":
    sys.exit(main())
