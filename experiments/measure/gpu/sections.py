"""Sections of the probe: each measures one subject and records every measurement beside its prediction.

The predictions are the machine figures and results of the second run on an H200 (experiments/results/gpu_h200).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agents.planner import MIB
from executor import CaptureError, PlannedStep, StepError, open_backend, replay
from executor.calibrate import calibrate
from executor.capture.profile import Cache, Profile, with_profile
from executor.capture.profiler import measure
from executor.memory.engines import line
from executor.replay.backend import Backend, Stream
from experiments.measure.gpu.pytorch_baselines import build_eager_step
from experiments.measure.gpu.stages import Run, base_machine, run_stages, with_host
from experiments.measure.gpu.traces import copy_speeds, traced
from experiments.measure.gpu.training import Case, time_beside_eager, without_batch_swaps
from experiments.measure.networks import allocated_bytes, build, get_planner, limit_of
from experiments.measure.record import Record
from experiments.measure.settings import parse
from simulator import Machine, Plan, Program, simulate
from simulator.files import write_json
from simulator.schedule import lower

COMMITTED = Path(__file__).resolve().parents[2] / "results" / "gpu_h200"
# Network of a section -> its name, and its stand-in with backend=host.
NETWORKS = {
    "resnet": ("resnet50_imagenet_bf16", "tiny_resnet"),
    "llama": ("llama_bf16", "tiny_gpt2"),
    "gpt2": ("gpt2_medium_bf16", "tiny_gpt2"),
}
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


@dataclass(frozen=True)
class Probe(Run):
    """One run of one section; its rows have ``section``, ``what``, ``predicted``, ``measured`` and details."""

    section: str

    @property
    def base(self) -> Machine:
        """Preset of the GPU (CUDA) or the simulated machine of the host backend."""
        return base_machine(self.settings.device)

    @property
    def machine(self) -> Machine:
        """Machine measured by section ``costs``, or ``base`` before that section has run."""
        path = self.record.out / "machine.yaml"
        return Machine.load(path) if path.exists() else self.base

    def network(self, name: str) -> str:
        """Returns the name of a section's network, or of its tiny stand-in with backend=host."""
        return NETWORKS[name][self.settings.backend == "host"]

    def add(self, what: str, **entries: Any) -> None:
        """Adds a row of this section, unless an earlier command did."""
        key = {"section": self.section, "what": what}
        if not self.record.has(**key):
            self.record.add(**key, **entries)

    def measure(self, what: str, function: Callable[[], dict[str, Any]]) -> None:
        """Adds the row of a measurement, as ``Record.measure`` does."""
        self.record.measure({"section": self.section, "what": what}, function)


def costs(probe: Probe) -> None:
    """Calibrates the machine and measures the overhead of a copy between two kernels of a CUDA graph."""
    if probe.record.has(section=probe.section, what="issue_ns"):
        return
    settings = probe.settings
    base = probe.base
    with open_backend(settings.backend, base) as backend:
        nbytes = 2**28 if settings.backend == "cuda" else 2**20
        result = calibrate(backend, base, nbytes, seconds=probe.record.seconds_left() / 3)
        trips = {d: round_trip_ns(backend, result.machine, d) for d in ("d2h", "h2d")}
    result = with_host(result, base, settings.device)
    result.save(probe.record.out / "machine.yaml")
    for figure, predicted in COSTS.items():
        probe.add(figure, predicted=predicted, measured=getattr(result.machine, figure))
    for direction, ns in trips.items():
        # Traces showed gaps of 17 us, which include the latency.
        probe.add(f"round trip by {direction} in a graph, ns beyond the copy", predicted=10_000, measured=ns)


def round_trip_ns(
    backend: Backend, machine: Machine, direction: Stream, count: int = 200, kernel_ns: int = 20_000
) -> float:
    """Returns the overhead of a copy between two dependent kernels of a graph, in ns.

    Kernel, 1 MiB copy and kernel depend on each other. The overhead is the median gap between the kernels minus the
    predicted copy time.

    Args:
        count: number of kernels.
        kernel_ns: duration of each.
    """
    backend.task = f"round trips by {direction}"

    def trips() -> None:
        for slot in range(count):
            backend.spin(kernel_ns, slot=slot)
            backend.wait(direction, backend.record("compute"))
            backend.copy(direction, 0, 0, MIB)
            backend.wait("compute", backend.record(direction))

    with backend.arena(MIB, MIB, count):
        launch = backend.graph(trips)
        for _ in range(2):  # the first replay uploads the graph
            launch()
            backend.synchronize()
        log = backend.log()
    gaps = log.begin[1:].astype(np.int64) - log.end[:-1].astype(np.int64)
    return float(np.median(gaps)) - (machine.d2h_ns(MIB) if direction == "d2h" else machine.h2d_ns(MIB))


def pools(probe: Probe) -> None:
    """Captures a graph with one nested memory pool per operator (CUDA only)."""

    def correct() -> dict[str, Any]:
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
        count = sum(torch.equal(result, x * (i + 2)) for i, result in enumerate(results))
        del graph, results  # must be freed before the pools
        return {"predicted": 12, "measured": count}

    if probe.settings.backend == "cuda":
        probe.measure("operators whose private pool holds the correct result after a replay", correct)


def copies(probe: Probe) -> None:
    """Measures swap-outs beside kernels, from streams and in graphs with few and many branches (CUDA only)."""
    if probe.settings.backend == "cuda":
        for form, label, speed in copy_speeds(probe.record.out):
            machine = probe.machine if form == "streams" else probe.machine.in_graph()
            probe.add(f"bytes/s of swap-outs, {label}: {form}", predicted=machine.d2h_bytes_per_s, measured=speed)


# ------------------------------------------------------------------------------------------- plans


def replays(probe: Probe) -> None:
    """Replays plans as graphs: the committed plans of the second run and plans from fast planners."""
    machine = probe.machine
    with open_backend(probe.settings.backend, machine) as backend:

        def replayed(program: Program, limit: int, make_plan: Callable[[], Plan], checked: bool) -> dict[str, Any]:
            plan = make_plan()
            times = replay(program, plan, machine, limit, backend)
            return {
                "predicted": times.predicted_ns,
                "measured": times.iteration_ns,
                "error": times.error,
                "checks": replay(program, plan, machine, limit, backend, 2, mode="check").checks if checked else 0,
                "footprint": times.footprint,
                "limit": limit,
            }

        for i, (label, *task) in enumerate(replay_tasks(probe, machine)):
            probe.measure(label, partial(replayed, *task, checked=not i))  # one check of the contents suffices


def replay_tasks(probe: Probe, machine: Machine) -> Iterator[tuple[str, Program, int, Callable[[], Plan]]]:
    """Yields (name, program, limit in bytes, function that returns the plan) of each replay."""
    folder = COMMITTED / "graphs"
    names = [probe.network(name) for name in ("resnet", "llama", "gpt2")]
    if probe.settings.backend == "host":
        programs = {names[0]: build(names[0], "cpu").captured(machine).program}
    else:
        programs = {name: Program.load(folder / f"program-{name}.json.gz") for name in names}
        for file in sorted(folder.glob("plan-*.json")):
            program = programs[file.stem.split("-")[1]]
            plan = Plan.load(file).retimed(program)  # only one profile per network is committed
            limit = max(plan.limit, lower(program, plan).required_bytes)
            yield file.stem, program, limit, lambda plan=plan: plan  # type: ignore[misc]
    program = programs[names[0]]
    for fraction in (0.7, 0.5):
        limit = limit_of(program, fraction)
        for planner in ("capuchin", "superneurons", "autoswap_swdoa", "lp_round"):
            plan_now = partial(_planned, planner, program, machine, limit)
            yield f"{names[0]} {fraction} {planner}", program, limit, plan_now


def _planned(planner: str, program: Program, machine: Machine, limit: int) -> Plan:
    return get_planner(planner, program, calls=2000).plan(program, machine, limit)


def planned_steps(probe: Probe) -> None:
    """Times planned steps of the section's network, per kernel and as a graph, against eager steps."""
    profiles: dict[str, Profile] = {}
    for fraction, graph in ((0.7, True), (0.7, False), (0.5, True)):
        time_planned(probe, probe.network(probe.section), fraction, graph, profiles)


def time_planned(probe: Probe, name: str, fraction: float, graph: bool, profiles: dict[str, Profile]) -> None:
    """Times a planned step against eager steps and records the row.

    Args:
        name: network name.
        fraction: limit as a fraction of the activation peak.
        graph: whether the step runs as a CUDA graph. If its memory exceeds the limit, the step is planned again for
            less than the limit.
        profiles: measured profiles by network; a missing one is measured and added.
    """
    label = f"{name} {fraction} {'as a graph' if graph else 'kernel by kernel'}"
    device = probe.settings.device
    machine = probe.machine
    costs = machine.in_graph() if graph else machine

    def measured() -> dict[str, Any]:
        eager = build_eager_step(name, device)
        held_bytes = allocated_bytes(device)
        network = build(name, device)
        try:
            captured = network.captured(machine, check=not profiles)
        except CaptureError as error:
            probe.add(f"{name}: comparison with the eager step", failed=line(error))
            captured = network.captured(machine, check=False)
        if name not in profiles:
            cache: Cache = "step" if device == "cuda" else "hot"
            profiles[name] = measure(captured, device, machine.name, 3, cache=cache)
        program = with_profile(captured.program, profiles[name])
        captured = replace(captured, program=program)
        limit = limit_of(program, fraction)
        reasons = []
        for aim in (1.0, 0.97, 0.94, 0.88) if graph else (1.0,):
            plan = get_planner("annealing", program, iterations=50).plan(program, costs, int(aim * limit))
            case = Case(name, program, fraction, limit)
            if graph:
                case, plan = without_batch_swaps(case, plan)
            try:
                with PlannedStep(captured, plan, machine, case.limit, graph=graph) as step:
                    steps = 16 if device == "cuda" else 4
                    times = time_beside_eager(step, network.batch, eager, steps, device, held_bytes)
                    if device == "cuda":
                        save(program, plan, lambda: step(*network.batch))
            except StepError as error:
                reasons.append(f"planned for {aim:.0%}: {line(error)}")
                continue
            ns = times["measured_ns"]
            return {
                "predicted": simulate(program, plan, costs, case.limit).iteration_ns,
                "measured": ns,
                "limit": case.limit,
                "planned_for": aim,
                "ideal_ns": program.ideal_ns,
                "kernels": len(program.kernels),
                "eager_ns": times["eager_ns"],
                "to_eager": ns / times["eager_ns"],
                "host_ns": times["host_ns"],
                "peak": times["ledger"],
                **({"allocated": times["device_peak"]} if device == "cuda" else {}),
            }
        return {"failed": "; ".join(reasons)[:400]}

    def save(program: Program, plan: Plan, step: Callable[[], object]) -> None:
        saved = probe.record.out / f"{name}-{fraction}{'' if graph else '-kernels'}"
        program.save(f"{saved}-program.json.gz")
        plan.save(f"{saved}-plan.json")
        try:
            write_json(f"{saved}-trace.json.gz", traced(step, 3, probe.record.out))
        except Exception as error:  # the measurement is complete without it
            probe.add(f"trace of {label}", failed=line(error))

    probe.measure(label, measured)


# ------------------------------------------------------------------------------------------- presets of validate_gpu


def rivals(probe: Probe) -> None:
    """Compares PyTorch's memory-saving methods with a planned step at equal peak memory."""
    compiled = "compile," * (probe.settings.backend == "cuda")
    words = "limits=0.7", f"methods=ours,checkpoint,offload,{compiled}save_on_cpu", "planners=", "train=", "graph="
    for label, row in validated(probe, "llama", "profile,plan,compare", *words):
        predicted = "fastest" if row["method"] == "ours" else "slower than ours"
        details = {key: row.get(key) for key in ("eager_ns", "overhead", "measured_peak", "limit", "setting")}
        probe.add(label, predicted=predicted, measured=row["measured_ns"], **details)


def largest(probe: Probe) -> None:
    """Finds the largest batch of each method within the memory that eager training needs for its own batch."""
    for label, row in validated(probe, "resnet", "largest", "methods=eager,ours,checkpoint"):
        predicted = {"ours": ">= 2 x eager", "eager": row["own_batch"]}.get(row["method"], "less than ours")
        probe.add(label, predicted=predicted, measured=row["batch"], time_over=row["time_over"], cap=row["cap"])


def validated(probe: Probe, network: str, stages: str, *words: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs stages of validate_gpu on one network, in the section's remaining time, and yields their last rows.

    Yields:
        (label, row) of each successful row of the last stage; failed rows are recorded instead.
    """
    name = probe.network(network)
    measured = probe.record.out / "machine.yaml"
    preset = probe.base.name if probe.settings.backend == "cuda" else "h200"
    out = probe.record.out / probe.section
    words = (
        f"backend={probe.settings.backend}",
        f"machine={measured if measured.exists() else preset}",
        f"workloads={name}",
        f"stages={stages}",
        f"seconds={max(10, probe.record.seconds_left() - 5):.0f}",
        *words,
    )
    run_stages(parse(words), words, out)
    for row in Record(out, 0.0).rows:
        if row["kind"] == stages.rpartition(",")[2]:
            label = f"{name} {row['fraction']} {row['method']}" if "fraction" in row else f"{name} {row['method']}"
            if "failed" in row:
                probe.add(label, failed=row["failed"])
            else:
                yield label, row


# ------------------------------------------------------------------------------------------- table


@dataclass(frozen=True)
class Section:
    """One part of the probe: its command (step 1 or 2), its time in seconds, its question and its prediction."""

    step: int
    seconds: int
    run: Callable[[Probe], None]
    question: str
    prediction: str

    def limit_s(self, backend: str) -> int:
        """Returns the time limit in seconds; a rehearsal shares a CPU and has four times as much."""
        return self.seconds * (4 if backend == "host" else 1)


def _section_of_steps(step: int, seconds: int, name: str) -> Section:
    prediction = "<= 1.02 x prediction, <= eager as a graph, peak <= limit"
    return Section(step, seconds, planned_steps, f"planned against eager steps of {name}", prediction)


SECTIONS = {
    "costs": Section(1, 40, costs, "launches, events, waits, queue, link", "COSTS; a round trip adds 10 us"),
    "pools": Section(1, 15, pools, "one memory pool per captured operator", "12 of 12"),
    "copies": Section(1, 20, copies, "what slows copies down in a graph", "streams 55 GB/s; graphs 45 to 51"),
    "replays": Section(1, 80, replays, "replays as one CUDA graph", "error <= 2 % on average, <= 5 % at worst"),
    "resnet": _section_of_steps(1, 120, "ResNet-50"),
    "llama": _section_of_steps(1, 120, "Llama"),
    "gpt2": _section_of_steps(2, 95, "GPT-2"),
    "rivals": Section(2, 210, rivals, "PyTorch's methods at equal peak (Llama, 70 %)", "ours is the fastest"),
    "largest": Section(2, 95, largest, "the largest batch of ResNet-50", "ours >= 2 x eager"),
}
