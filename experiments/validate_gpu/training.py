"""Trains real steps under a plan and a memory cap; compares their times and losses with eager steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from executor import CaptureError, PlannedStep
from executor.capture.profile import shape_of
from experiments.validate_gpu.conditions import deterministic, watched
from experiments.validate_gpu.largest_batch import CAPS
from experiments.validate_gpu.networks import Network, build, cap_memory, give_back, in_turns
from experiments.validate_gpu.pytorch_baselines import eager_beside
from simulator import Machine, Plan, Program, Swap
from simulator.plan import PlanError
from simulator.schedule import lower

BITS = 3  # steps whose losses are compared


@dataclass(frozen=True)
class Case:
    """A workload at a limit in bytes."""

    workload: str
    program: Program
    fraction: float
    limit: int


def batch_stays(case: Case, plan: Plan) -> tuple[Case, Plan]:
    """Returns the case and plan without swaps of the batch, because a graph has its own copy of the batch.

    The limit is raised if the reduced plan needs more memory.
    """
    tensors = case.program.tensors
    kept = tuple(d for d in plan.decisions if not (isinstance(d, Swap) and tensors[d.tensor].kind == "input"))
    plan = replace(plan, decisions=kept)
    return replace(case, limit=max(case.limit, lower(case.program, plan).required_bytes)), plan


def eager_bits(name: str, device: str) -> dict[str, Any]:
    """Returns losses of eager steps, whether they repeat bit by bit, and the non-deterministic operators."""
    with deterministic() as loose:
        first, again = (losses(build(name, device).step) for _ in range(2))
    return {"losses": again, "equal": first == again, "loose": loose}


def train_capped(
    device: str, case: Case, plan: Plan, machine: Machine, run: Callable[..., dict[str, Any]], **options: Any
) -> dict[str, Any]:
    """Calls ``run`` with the smallest of CAPS under which its steps run; returns its row or the reason of failure."""
    failed = ""
    for cap in CAPS if device == "cuda" else (1.0,):
        try:
            return {**run(device, case, plan, machine, cap, **options), "cap": cap}
        except (RuntimeError, PlanError) as error:  # includes StepError and torch.OutOfMemoryError
            failed = f"within {cap} times the limit: {error}"
    return {"failed": failed}


@contextmanager
def capped_step(
    device: str, case: Case, plan: Plan, machine: Machine, cap: float, graph: bool
) -> Iterator[tuple[PlannedStep, Network, Callable[[bool], None]]]:
    """Caps PyTorch's memory at ``cap`` times the limit, in addition to what is reserved, and builds a planned step.

    A graph gets no cap, because its memory is one driver allocation of which PyTorch counts whole segments per tensor.
    On the CPU the step runs kernel by kernel.

    Yields:
        The step, its network, and a function that sets (True) or lifts (False) the cap.

    Raises:
        CaptureError: if the captured step differs from the profiled one.
    """
    give_back()
    graph = graph and device == "cuda"
    most = cap * case.limit + (torch.cuda.memory_reserved() if device == "cuda" else 0)

    def limit(on: bool) -> None:
        cap_memory(most if on and not graph else None, device)

    try:
        network = build(case.workload, device)
        captured = network.captured(machine)
        if shape_of(captured.program).fingerprint != shape_of(case.program).fingerprint:
            raise CaptureError(
                f"{case.workload}: the captured step differs from the profiled one; profile it on this host"
            )
        limit(True)
        with PlannedStep(replace(captured, program=case.program), plan, machine, case.limit, graph=graph) as step:
            yield step, network, limit
    finally:
        limit(False)


def losses_only(
    device: str, case: Case, plan: Plan, machine: Machine, cap: float, graph: bool = False
) -> dict[str, Any]:
    """Returns the losses of the first steps under a plan, with PyTorch's memory capped at ``cap`` times the limit."""
    with capped_step(device, case, plan, machine, cap, graph) as (step, network, _):
        return {"losses": losses(lambda: step(*network.batch))}


def timed_beside(
    device: str, case: Case, plan: Plan, machine: Machine, cap: float, count: int, graph: bool = False
) -> dict[str, Any]:
    """Times capped steps under a plan that alternate with eager steps (see ``beside_eager``).

    Args:
        cap: memory cap as a multiple of the limit.
        count: measured steps of each kind.
        graph: replay the planned step as a CUDA graph and report its memory; on the CPU it runs kernel by kernel.
    """
    eager = eager_beside(case.workload, device)
    give_back()
    held = torch.cuda.memory_allocated() if device == "cuda" else 0
    with capped_step(device, case, plan, machine, cap, graph) as (step, network, limit):
        found = beside_eager(step, network.batch, eager, count, device, held, limit)
    found |= {"held": held, "pinned_bytes": step.pinned_bytes}
    if step.graph and (made := step.graph.graph):
        found |= {"footprint": made.footprint, "captures": step.graph.captures}
        found["device_peak"] += made.footprint - made.counted_bytes
    return found


def beside_eager(
    step: PlannedStep, batch: tuple[Any, ...], eager: Callable[[], Any], count: int, device: str, held: int,
    turn: Callable[[bool], object] = bool,
) -> dict[str, Any]:  # fmt: skip
    """Times planned steps that alternate with eager steps.

    Arguments as in ``in_turns``.

    Returns:
        Median ns of planned and eager steps and of the host's issue time per planned step (on the CPU: the whole
        step), peaks in bytes by the ledger and by PyTorch (CUDA), and the GPU's clocks.
    """
    hosts: list[int] = []

    def planned() -> Any:
        begin = time.perf_counter_ns()
        loss = step(*batch)
        hosts.append(time.perf_counter_ns() - begin)
        return loss

    losses(planned)  # creates the optimizer state and captures the graph
    with watched(device) as clocks:
        times, others, peak = in_turns(planned, eager, count, device, held, turn)
    ledger = step.graph.peak_bytes if step.graph and step.graph.graph else step.peak_bytes
    found = {"measured_ns": median(times), "eager_ns": median(others), "host_ns": median(hosts), "ledger": ledger,
             "clocks": clocks}  # fmt: skip
    return {**found, "device_peak": peak} if device == "cuda" else found


def losses(step: Callable[[], Any]) -> list[float]:
    """Returns the losses of the first BITS steps, always with the same random numbers."""
    torch.manual_seed(1)
    return [float(step()) for _ in range(BITS)]
