"""Compares machine costs, replays, planned steps and baselines with their predictions in 15 minutes on a GPU.

    python -m experiments.validate_gpu.probe [out=DIR] [backend=cuda|host] [step=1|2] [section …]    (make gpu STEP=1)

Each section runs in its own process with a share of the time, so a section that fails or breaks CUDA does not stop the
next one. Every measurement is printed next to its prediction and appended to DIR/probe.jsonl immediately;
DIR/probe.json collects all rows. ``backend=host`` runs all sections on small networks without a GPU.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

# Must be set before PyTorch is imported (reason: ENVIRONMENT in conditions.py).
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import numpy as np
import torch

import agents
from executor import CaptureError, PlannedStep, StepError, open_backend, replay
from executor.calibrate import calibrate
from executor.capture.profile import Cache, Profile, with_profile
from executor.capture.profiler import measure
from executor.memory.engines import line
from executor.replay.backend import Backend, Stream
from experiments.measure.gpu.pytorch_baselines import build_eager_step
from experiments.measure.gpu.stages import base_machine, with_host
from experiments.measure.gpu.traces import copy_speeds, traced
from experiments.measure.gpu.training import Case, time_beside_eager, without_batch_swaps
from experiments.measure.networks import MIB, build, get_planner, limit_of
from experiments.measure.settings import BACKENDS, UsageError, check_known, values_of
from simulator import Machine, Plan, Program, simulate
from simulator.files import read_json, write_json
from simulator.schedule import lower

FORMAT = "probe/1"
COMMITTED = Path(__file__).resolve().parents[1] / "results" / "gpu_h200"  # the run that the predictions come from
RESNET = "resnet50_imagenet_bf16"
LLAMA = "llama_bf16"
GPT2 = "gpt2_medium_bf16"
TINY = {RESNET: "tiny_resnet", LLAMA: "tiny_gpt2", GPT2: "tiny_gpt2"}  # with backend=host
# Predicted machine figures: measured on an H200 in the second run.
COSTS = {
    "launch_ns": 1400,
    "graph_launch_ns": 520,
    "event_ns": 0,
    "wait_ns": 100,
    "queue_depth": 1022,
    "h2d_bytes_per_s": 55_500_000_000,
    "d2h_bytes_per_s": 55_400_000_000,
    "h2d_latency_ns": 7600,
    "d2h_latency_ns": 7600,
    "issue_ns": 12_000,
}
ROUND_TRIP_NS = 10_000  # overhead of a copy between two kernels of a graph; traces showed gaps of 17 us with latency
COUNT = 200
LONG_NS = 20_000
REHEARSAL = 4  # factor on a section's seconds with backend=host, on a shared CPU
AIMS = (1.0, 0.97, 0.94, 0.88)  # fractions of the limit to plan for, tried until the graph's memory fits the limit
STEPS = {"cuda": 16, "cpu": 4}


@dataclass(frozen=True)
class Probe:
    """One run of one section.

    Attributes:
        out: results folder.
        backend: "cuda", or "host" for a small run without a GPU.
        until: end of the section's time, in ``time.monotonic`` seconds.
    """

    section: str
    out: Path
    backend: str
    until: float

    @property
    def device(self) -> str:
        """PyTorch device type: "cuda" or "cpu"."""
        return "cuda" if self.backend == "cuda" else "cpu"

    @property
    def machine(self) -> Machine:
        """Machine measured by section ``costs``, or ``base`` before that section has run."""
        path = self.out / "machine.yaml"
        return Machine.load(path) if path.exists() else self.base

    @property
    def base(self) -> Machine:
        """Preset of the GPU (CUDA) or the simulated machine of the host backend."""
        return base_machine(self.device)

    def network(self, name: str) -> str:
        """Returns the network's name, or its tiny stand-in with backend=host."""
        return name if self.backend == "cuda" else TINY[name]

    def row(self, label: str, predicted: object, measured: object, **info: Any) -> None:
        """Prints a measurement next to its prediction and appends the row to probe.jsonl."""
        append_row(self.out, section=self.section, what=label, predicted=predicted, measured=measured, **info)
        text = ", ".join(f"{key} {_short(value)}" for key, value in info.items() if not isinstance(value, (dict, list)))
        numbers = f"predicted {_short(predicted)}, measured {_short(measured)}"
        print(f"{self.section:10} {label}: {numbers}{'; ' if text else ''}{text}", flush=True)

    def record_failure(self, label: str, error: object) -> None:
        """Records a failed measurement with its reason."""
        append_row(self.out, section=self.section, what=label, failed=str(error)[:400])
        print(f"{self.section:10} {label}: failed: {error}", flush=True)

    def seconds_left(self) -> float:
        """Returns the seconds left for this section."""
        return self.until - time.monotonic()

    def attempt(self, label: str, measurement: Callable[[], object]) -> None:
        """Runs a measurement; records its failure, or that no time is left for it."""
        if self.seconds_left() < 5:
            return self.record_failure(label, "no time left")
        try:
            measurement()
        except Exception as error:  # continue with the next one
            self.record_failure(label, line(error))


def append_row(out: Path, **row: Any) -> None:
    """Appends a row to the folder's probe.jsonl."""
    with (out / "probe.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def _short(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


# ------------------------------------------------------------------------------------------- sections


def costs(probe: Probe) -> None:
    """Calibrates the machine and measures the overhead of a copy between two kernels of a CUDA graph."""
    base = probe.base
    with open_backend(probe.backend, base) as backend:
        result = calibrate(backend, base, 2**28 if probe.backend == "cuda" else 2**20, seconds=probe.seconds_left() / 3)
        trips = {d: round_trip_ns(backend, result.machine, d) for d in ("d2h", "h2d")}
    result = with_host(result, base, probe.device)
    result.save(probe.out / "machine.yaml")
    for figure, predicted in COSTS.items():
        probe.row(figure, predicted, getattr(result.machine, figure))
    for direction, ns in trips.items():
        probe.row(f"round trip by {direction} in a graph, ns beyond the copy", ROUND_TRIP_NS, ns)


def round_trip_ns(backend: Backend, machine: Machine, direction: Stream) -> float:
    """Returns the overhead of a copy between two dependent kernels of a graph, in ns.

    Kernel, 1 MiB copy and kernel depend on each other. The overhead is the median gap between the kernels minus the
    predicted copy time.
    """
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
    """Captures a graph with one nested memory pool per operator."""
    if probe.backend == "cuda":
        x = torch.randn(2**20, device="cuda")
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        pools = []
        results = []
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for i in range(12):
                pools.append(torch.cuda.MemPool(no_split=True))
                with torch.cuda.use_mem_pool(pools[-1]):
                    results.append(x * (i + 2))
        graph.replay()
        torch.cuda.synchronize()
        right = sum(torch.equal(result, x * (i + 2)) for i, result in enumerate(results))
        probe.row("operators whose private pool holds the correct result after a replay", 12, right)
        del graph, results  # must be freed before the pools


def copies(probe: Probe) -> None:
    """Measures the speed of swap-outs beside kernels, from streams and in graphs with few and many branches."""
    if probe.backend == "cuda":
        for form, label, speed in copy_speeds(probe.out):
            machine = probe.machine if form == "streams" else probe.machine.in_graph()
            probe.row(f"bytes/s of swap-outs, {label}: {form}", machine.d2h_bytes_per_s, speed)


def replays(probe: Probe) -> None:
    """Replays plans as graphs: the committed plans of the second run and plans from fast planners."""
    machine = probe.machine
    with open_backend(probe.backend, machine) as backend:

        def measured(label: str, program: Program, plan: Plan, limit: int, first: bool) -> None:
            times = replay(program, plan, machine, limit, backend)
            checks = replay(program, plan, machine, limit, backend, 2, mode="check").checks if first else 0
            probe.row(
                label,
                times.predicted_ns,
                times.iteration_ns,
                error=times.error,
                checks=checks,
                footprint=times.footprint,
                limit=limit,
            )

        for i, (label, *parts) in enumerate(_plans(probe, machine)):
            probe.attempt(label, partial(measured, label, *parts, first=not i))


def _plans(probe: Probe, machine: Machine) -> Iterator[tuple[str, Program, Plan, int]]:
    """Yields (name, program, plan, limit in bytes) of each replay."""
    folder = COMMITTED / "graphs"
    if probe.backend == "host":
        network = build(TINY[RESNET], "cpu")
        programs = {TINY[RESNET]: network.captured(machine).program}
    else:
        names = (RESNET, LLAMA, GPT2)
        programs = {name: Program.load(folder / f"program-{name}.json.gz") for name in names}
        for file in sorted(folder.glob("plan-*.json")):
            program = programs[file.stem.split("-")[1]]
            plan = Plan.load(file).retimed(program)  # only one profile per network is committed
            yield file.stem, program, plan, max(plan.limit, lower(program, plan).required_bytes)
    for name, program in list(programs.items())[:1]:
        for fraction in (0.7, 0.5):
            for planner in ("capuchin", "superneurons", "autoswap_swdoa", "lp_round"):
                limit = limit_of(program, fraction)
                try:
                    plan = get_planner(planner, program, calls=2000).plan(program, machine, limit)
                except (agents.Infeasible, ImportError) as error:
                    probe.record_failure(f"{name} {fraction} {planner}", line(error))
                    continue
                yield f"{name} {fraction} {planner}", program, plan, limit


def steps(name: str) -> Callable[[Probe], None]:
    """Returns the section that times a network's planned steps (per kernel and as a graph) against eager steps."""

    def section(probe: Probe) -> None:
        profiles: dict[str, Profile] = {}
        for fraction, graph in ((0.7, True), (0.7, False), (0.5, True)):
            planned(probe, probe.network(name), fraction, graph, profiles)

    return section


def planned(probe: Probe, name: str, fraction: float, graph: bool, profiles: dict[str, Profile]) -> None:
    """Times a planned step against eager steps and records the row.

    If the graph's memory exceeds the limit, the step is planned again for the next fraction in AIMS.

    Args:
        name: network name.
        fraction: limit as a fraction of the activation peak.
        graph: whether the step runs as a CUDA graph.
        profiles: measured profiles by network; a missing one is measured and added.
    """
    label = f"{name} {fraction} {'as a graph' if graph else 'kernel by kernel'}"
    device = probe.device
    machine = probe.machine
    costs = machine.in_graph() if graph else machine

    def measured() -> None:
        eager = build_eager_step(name, device)
        held_bytes = torch.cuda.memory_allocated() if device == "cuda" else 0
        network = build(name, device)
        try:
            captured = network.captured(machine, check=not profiles)
        except CaptureError as error:
            probe.record_failure(f"{name}: comparison with the eager step", line(error))
            captured = network.captured(machine, check=False)
        if name not in profiles:
            cache: Cache = "step" if device == "cuda" else "hot"
            profiles[name] = measure(captured, device, machine.name, 3, cache=cache)
        program = with_profile(captured.program, profiles[name])
        captured = replace(captured, program=program)
        limit = limit_of(program, fraction)
        reasons = []
        for aim in AIMS if graph else AIMS[:1]:
            plan = get_planner("annealing", program, iterations=50).plan(program, costs, int(aim * limit))
            case = Case(name, program, fraction, limit)
            if graph:
                case, plan = without_batch_swaps(case, plan)
            try:
                with PlannedStep(captured, plan, machine, case.limit, graph=graph) as step:
                    times = time_beside_eager(step, network.batch, eager, STEPS[device], device, held_bytes)
                    if device == "cuda":
                        save(program, plan, lambda: step(*network.batch))
            except StepError as error:
                reasons.append(f"planned for {aim:.0%}: {line(error)}")
                continue
            predicted = simulate(program, plan, costs, case.limit).iteration_ns
            ns = times["measured_ns"]
            peaks = {"peak": times["ledger"], **({"allocated": times["device_peak"]} if device == "cuda" else {})}
            probe.row(
                label,
                predicted,
                ns,
                limit=case.limit,
                planned_for=aim,
                ideal_ns=program.ideal_ns,
                kernels=len(program.kernels),
                eager_ns=times["eager_ns"],
                to_eager=ns / times["eager_ns"],
                host_ns=times["host_ns"],
                **peaks,
            )
            return
        probe.record_failure(label, "; ".join(reasons))

    def save(program: Program, plan: Plan, step: Callable[[], object]) -> None:
        saved = probe.out / f"{name}-{fraction}{'' if graph else '-kernels'}"
        program.save(f"{saved}-program.json.gz")
        plan.save(f"{saved}-plan.json")
        try:
            write_json(f"{saved}-trace.json.gz", traced(step, 3, probe.out))
        except Exception as error:  # the measurement is complete without it
            probe.record_failure(f"trace of {label}", line(error))

    probe.attempt(label, measured)


def rivals(probe: Probe) -> None:
    """Compares PyTorch's memory-saving methods with a planned step at equal peak memory."""
    methods = ["ours", "checkpoint", "offload", *(["compile"] if probe.backend == "cuda" else []), "save_on_cpu"]
    words = "limits=0.7", f"methods={','.join(methods)}", "planners=", "train=", "graph="
    for label, row in run_validation(probe, LLAMA, "profile,plan,compare", *words):
        extra = {key: row.get(key) for key in ("eager_ns", "overhead", "measured_peak", "limit", "setting")}
        probe.row(label, "fastest" if row["method"] == "ours" else "slower than ours", row["measured_ns"], **extra)


def largest(probe: Probe) -> None:
    """Finds the largest batch of each method within the memory that eager training needs for its own batch."""
    for label, row in run_validation(probe, RESNET, "largest", "methods=eager,ours,checkpoint"):
        predicted = {"ours": ">= 2 x eager", "eager": row["own_batch"]}.get(row["method"], "less than ours")
        probe.row(label, predicted, row["batch"], time_over=row["time_over"], cap=row["cap"])


def run_validation(probe: Probe, network: str, stages: str, *words: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs experiments.validate_gpu on one network and yields (label, row) of the last stage.

    Failed rows are recorded, not yielded. The command gets the section's remaining time.
    """
    name = probe.network(network)
    machine = probe.out / "machine.yaml"
    out = probe.out / probe.section
    kind = stages.rpartition(",")[2]
    preset = probe.base.name if probe.backend == "cuda" else "h200"
    command = [
        sys.executable,
        "-m",
        "experiments.validate_gpu",
        f"backend={probe.backend}",
        f"out={out}",
        f"machine={machine if machine.exists() else preset}",
        f"workloads={name}",
        f"stages={stages}",
        f"seconds={max(10, probe.seconds_left() - 5):.0f}",
        *words,
    ]
    subprocess.run(command, check=False)
    results = out / "results.json"
    for row in read_json(results)["rows"] if results.exists() else ():
        if row["kind"] == kind:
            label = f"{name} {row['fraction']} {row['method']}" if "fraction" in row else f"{name} {row['method']}"
            if "failed" in row:
                probe.record_failure(label, row["failed"])
            else:
                yield label, row


# ------------------------------------------------------------------------------------------- the command


@dataclass(frozen=True)
class Section:
    """One part of the probe: its command (step 1 or 2), its time in seconds, its question and its prediction."""

    step: int
    seconds: int
    run: Callable[[Probe], None]
    question: str
    prediction: str


FASTER = "<= 1.02 x prediction, <= eager as a graph, peak <= limit"
SECTIONS = {
    "costs": Section(1, 40, costs, "launches, events, waits, queue, link", "COSTS; a round trip adds 10 us"),
    "pools": Section(1, 15, pools, "one memory pool per captured operator", "12 of 12"),
    "copies": Section(1, 20, copies, "what slows copies down in a graph", "streams 55 GB/s; graphs 45 to 51"),
    "replays": Section(1, 80, replays, "replays as one CUDA graph", "error <= 2 % on average, <= 5 % at worst"),
    "resnet": Section(1, 120, steps(RESNET), "planned against eager steps of ResNet-50", FASTER),
    "llama": Section(1, 120, steps(LLAMA), "planned against eager steps of Llama", FASTER),
    "gpt2": Section(2, 95, steps(GPT2), "planned against eager steps of GPT-2", FASTER),
    "rivals": Section(2, 210, rivals, "PyTorch's methods at equal peak (Llama, 70 %)", "ours is the fastest"),
    "largest": Section(2, 95, largest, "the largest batch of ResNet-50", "ours >= 2 x eager"),
}


@dataclass(frozen=True)
class Options:
    """Command-line keys.

    Attributes:
        out: results folder.
        backend: "cuda" or "host".
        step: run only the sections of command 1 or 2; 0: of both.
        seconds: if positive, run the one named section in this process for at most this time.
    """

    out: str = "runs/gpu"
    backend: str = "cuda"
    step: int = 0
    seconds: float = 0.0


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status: 0 if every section ended normally."""
    words = sys.argv[1:] if words is None else words
    names = [word for word in words if "=" not in word]
    try:
        options = Options(**values_of(Options, [word for word in words if "=" in word]))
        for key, value, allowed in (
            ("backend", options.backend, BACKENDS),
            ("step", options.step, (0, 1, 2)),
            ("section", tuple(names), SECTIONS),
        ):
            check_known(key, value, allowed)
        if options.backend == "cuda" and not torch.cuda.is_available():
            raise UsageError("no CUDA GPU found; backend=host runs a small probe without one")
    except UsageError as error:
        print(error, str(__doc__).splitlines()[2].strip(), sep="\nusage: ", file=sys.stderr)
        return 2
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    if options.seconds:
        (name,) = names
        SECTIONS[name].run(Probe(name, out, options.backend, time.monotonic() + options.seconds))
        return 0
    chosen = names or [name for name, section in SECTIONS.items() if options.step in (0, section.step)]
    return run_sections(chosen, out, options.backend)


def run_sections(names: Sequence[str], out: Path, backend: str) -> int:
    """Runs each section in its own process and updates probe.json; unused time carries over to the next section."""
    for name in names:
        section = SECTIONS[name]
        print(f"{name:10}{section.seconds:4} s  {section.question}: {section.prediction}")
    end = time.monotonic()
    status = 0
    for name in names:
        end = end + SECTIONS[name].seconds * (REHEARSAL if backend == "host" else 1)
        begin = time.monotonic()
        seconds = end - begin
        print(f"== {name}, at most {seconds:.0f} s", flush=True)
        command = [
            sys.executable,
            "-m",
            "experiments.validate_gpu.probe",
            f"out={out}",
            f"backend={backend}",
            name,
            f"seconds={seconds:.0f}",
        ]
        with subprocess.Popen(command, start_new_session=True) as process:
            try:
                exit_status = process.wait(seconds)
                failed = f"its process ended with status {exit_status}" if exit_status else ""
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)  # including its child processes
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                failed = f"stopped after {seconds:.0f} s"
        if failed:
            status = 1
            append_row(out, section=name, failed=failed)
            print(f"{name:10} failed: {failed}", flush=True)
        append_row(out, section=name, seconds=round(time.monotonic() - begin, 1))
        gather(out, backend)
    print(f"results are in {out / 'probe.json'}; {shutil.make_archive(str(out), 'gztar', out)} has all files")
    return status


def gather(out: Path, backend: str) -> None:
    """Writes probe.json from the rows of probe.jsonl."""
    device = torch.cuda.get_device_name() if backend == "cuda" else "host"
    rows = [json.loads(text) for text in (out / "probe.jsonl").read_text().splitlines()]
    document = {"format": FORMAT, "device": device, "torch": torch.__version__, "rows": rows}
    write_json(out / "probe.json", document, indent=1)


if __name__ == "__main__":
    sys.exit(main())
