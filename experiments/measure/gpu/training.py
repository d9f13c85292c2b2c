"""Trains real steps under a plan and a memory cap; compares their times and losses with eager steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from statistics import median
from typing import Any

import torch

from executor import CaptureError, PlannedStep
from executor.capture.profile import shape_of
from experiments.measure.conditions import deterministic, sampled_conditions
from experiments.measure.gpu.pytorch_baselines import build_eager_step, uncounted_bytes
from experiments.measure.networks import Network, allocated_bytes, build, cap_memory, free_cache, time_in_turns
from simulator import Machine, Plan, Program, Swap
from simulator.plan import PlanError
from simulator.schedule import lower

# Memory caps as multiples of a plan's limit, smallest first: allocators round sizes up and keep fragments.
CAPS = (1.02, 1.1, 1.25)


@dataclass(frozen=True)
class Case:
    """A workload at a limit in bytes."""

    workload: str
    program: Program
    fraction: float
    limit: int


def without_batch_swaps(case: Case, plan: Plan) -> tuple[Case, Plan]:
    """Returns the case and plan without swaps of the batch, because a graph has its own copy of the batch.

    The limit is raised if the reduced plan needs more memory.
    """
    tensors = case.program.tensors
    decisions = tuple(d for d in plan.decisions if not (isinstance(d, Swap) and tensors[d.tensor].kind == "input"))
    plan = replace(plan, decisions=decisions)
    return replace(case, limit=max(case.limit, lower(case.program, plan).required_bytes)), plan


@cache
def eager_bits(name: str, device: str) -> dict[str, Any]:
    """Returns losses of eager steps, whether they repeat bit by bit, and the non-deterministic operators."""
    with deterministic() as operators:
        first_losses, second_losses = (losses(build(name, device).step) for _ in range(2))
    return {"losses": second_losses, "equal": first_losses == second_losses, "nondeterministic": operators}


@dataclass(frozen=True)
class Training:
    """Training of a workload under a plan.

    Attributes:
        graph: replay the planned step as a CUDA graph; on the CPU it runs kernel by kernel.
    """

    device: str
    case: Case
    plan: Plan
    machine: Machine
    graph: bool = False

    def within_cap(self, run: Callable[[float], dict[str, Any]]) -> dict[str, Any]:
        """Returns the row of ``run`` with the smallest of CAPS under which its steps run, or the reason of failure."""
        failed = ""
        for cap in CAPS if self.device == "cuda" else (1.0,):
            try:
                return {**run(cap), "cap": cap}
            except (RuntimeError, PlanError) as error:  # includes StepError and torch.OutOfMemoryError
                failed = f"within {cap} times the limit: {error}"
        return {"failed": failed}

    @contextmanager
    def step(self, cap: float) -> Iterator[tuple[PlannedStep, Network, Callable[[bool], None]]]:
        """Caps PyTorch's memory at ``cap`` times the limit, in addition to what is reserved, and builds a planned step.

        A graph gets no cap, because its memory is one driver allocation of which PyTorch counts whole segments per
        tensor.

        Yields:
            The step, its network, and a function that sets (True) or lifts (False) the cap.

        Raises:
            CaptureError: if the captured step differs from the profiled one.
        """
        free_cache()
        case = self.case
        graph = self.graph and self.device == "cuda"
        cap_bytes = cap * case.limit + (torch.cuda.memory_reserved() if self.device == "cuda" else 0)

        def set_cap(is_capped: bool) -> None:
            cap_memory(cap_bytes if is_capped and not graph else None, self.device)

        try:
            network = build(case.workload, self.device)
            captured = network.captured(self.machine)
            if shape_of(captured.program).fingerprint != shape_of(case.program).fingerprint:
                raise CaptureError(
                    f"{case.workload}: the captured step differs from the profiled one; profile it on this host"
                )
            set_cap(True)
            captured = replace(captured, program=case.program)
            with PlannedStep(captured, self.plan, self.machine, case.limit, graph=graph) as step:
                yield step, network, set_cap
        finally:
            set_cap(False)

    def losses(self, cap: float) -> dict[str, Any]:
        """Returns the losses of the first steps, with PyTorch's memory capped at ``cap`` times the limit."""
        with self.step(cap) as (step, network, _):
            return {"losses": losses(lambda: step(*network.batch))}

    def beside_eager(self, cap: float, count: int) -> dict[str, Any]:
        """Times ``count`` capped steps that alternate with eager steps (see ``time_beside_eager``).

        Args:
            cap: memory cap as in ``step``.
            count: steps to time.

        Returns:
            the entries of ``time_beside_eager`` with bytes of memory.
        """
        eager = build_eager_step(self.case.workload, self.device)
        free_cache()
        held_bytes = allocated_bytes(self.device)
        with self.step(cap) as (step, network, set_cap):
            row = time_beside_eager(step, network.batch, eager, count, self.device, held_bytes, set_cap)
        row |= {"held": held_bytes, "pinned_bytes": step.pinned_bytes}
        if step.graph and (captured := step.graph.graph):
            row |= {"footprint": captured.footprint, "captures": step.graph.captures}
            row["device_peak"] += uncounted_bytes(step)
        return row


def time_beside_eager(
    step: PlannedStep,
    batch: tuple[Any, ...],
    eager: Callable[[], Any],
    count: int,
    device: str,
    held_bytes: int,
    on_turn: Callable[[bool], object] = bool,
) -> dict[str, Any]:
    """Times planned steps that alternate with eager steps.

    Arguments as in ``time_in_turns``.

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
    with sampled_conditions(device) as clocks:
        times, eager_times, peak = time_in_turns(planned, eager, count, device, held_bytes, on_turn)
    ledger = step.graph.peak_bytes if step.graph and step.graph.graph else step.peak_bytes
    row = {
        "measured_ns": median(times),
        "eager_ns": median(eager_times),
        "host_ns": median(hosts),
        "ledger": ledger,
        "clocks": clocks,
    }
    return {**row, "device_peak": peak} if device == "cuda" else row


def losses(step: Callable[[], Any]) -> list[float]:
    """Returns the losses of the first three steps, always with the same random numbers."""
    torch.manual_seed(1)
    return [float(step()) for _ in range(3)]
