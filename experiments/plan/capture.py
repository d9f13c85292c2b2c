"""Captured steps of ``experiments.plan``, and the same step at any batch size.

Each capture is the program as it runs on the machine's GPU, with the update buckets of ``fit``. The first capture
imports PyTorch. If the kernels of a step do not depend on its batch, tensor sizes are affine in the batch, and captures
at two batches determine them at any other (``Batches``). Peaks without a plan are then exact, and planners get a
program without a capture per tried batch. Durations are also taken as affine; rooflines are only piecewise affine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from experiments.common.bisection import largest
from simulator.machine import Machine
from simulator.pool.device_memory import DevicePeak
from simulator.program import Program
from simulator.report import Origins

if TYPE_CHECKING:  # avoids importing PyTorch
    from executor.capture.captured import Captured
    from executor.capture.early_update import InBackward

SHOWN = 100  # operators from one display of the number of captured operators to the next
UNIT = 64  # tokens: GPU kernels of attention pad sequences to such multiples
SCALE = 1024  # multiple of the original batch: upper bound of the search


class BatchError(ValueError):
    """Raised if the batch size of a step cannot be changed; the message gives the reason in one sentence."""


@dataclass(frozen=True)
class Batches:
    """Step at any batch size, interpolated from captures at two batch sizes.

    Raises:
        BatchError: the kernels of the two captures differ in more than sizes and durations.
    """

    batch: int  # examples
    program: Program  # captured at batch ``batch``
    larger_batch: int
    larger: Program  # captured at batch ``larger_batch``
    other_bytes: tuple[int, int] = (0, 0)  # device memory not used by tensors, at the two batches
    what: str = "batch"  # the size that differs
    unit: int = 1  # sizes are multiples of it

    def __post_init__(self) -> None:
        if _structure(self.program) != _structure(self.larger):
            # PyTorch omits broadcasts and copies of a dimension of 1.
            hint = (
                "; plan a batch of 2 to see larger ones"
                if 1 in (self.batch, self.larger_batch)
                else "; plan each alone"
            )
            raise BatchError(
                f"the step's kernels differ between {self.what} {self.batch} and {self.larger_batch}{hint}"
            )

    def interpolated(self, batch: int) -> Program:
        """Returns the step at a batch size."""
        size = partial(self._size, batch)
        tensors = tuple(
            replace(t, nbytes=size(t.nbytes, u.nbytes))
            for t, u in zip(self.program.tensors, self.larger.tensors, strict=True)
        )
        scaled = ("duration_ns", "workspace", "flops", "bytes")
        kernels = tuple(
            replace(k, variants=(), **{name: size(getattr(k, name), getattr(u, name)) for name in scaled})
            for k, u in zip(self.program.kernels, self.larger.kernels, strict=True)
        )
        return Program(self.program.name, tensors, kernels)

    def peak_bytes(self, batch: int) -> int:
        """Returns the peak in bytes at a batch size, without a plan."""
        if self._has_squares:
            return self.interpolated(batch).peak_bytes
        small, large = self._live
        return int(np.ceil(small + (large - small) * ((batch - self.batch) / (self.larger_batch - self.batch))).max())

    def room(self, limit: int, batch: int) -> int:
        """Returns the bytes of ``limit`` that are left for tensors at a batch size."""
        return max(limit - self._size(batch, *self.other_bytes), 0)

    def _size(self, batch: int, small: int, large: int) -> int:
        """Interpolates a quantity from its values at the two captured batches.

        It is affine in the batch, or proportional to its square (attention scores, similarities in a batch).
        """
        if self._is_square(small, large):
            return round(small * (batch / self.batch) ** 2)
        return max(small + round((large - small) * (batch - self.batch) / (self.larger_batch - self.batch)), 0)

    def largest(self, limit: int) -> int:
        """Returns the largest batch whose peak fits ``limit`` bytes, up to SCALE times the original; 0 if none."""

        def fits(units: int) -> bool:
            batch = units * self.unit
            return self.peak_bytes(batch) <= self.room(limit, batch)

        own = self.batch // self.unit
        return self.unit * largest(fits, own, SCALE * own)

    def largest_planned(
        self, plan_overhead: Callable[[Program, int], float | None], limit: int, least: int, most_overhead: float
    ) -> int:
        """Returns the largest batch with a plan of at most ``most_overhead``, to a relative precision of 1 / 32.

        Args:
            plan_overhead: returns the overhead of a plan for a program within a number of bytes; None without a plan.
            limit: bytes that the tensors may take.
            least: a batch that fits without a plan; 0: none.
            most_overhead: maximum overhead as a fraction.
        """

        def fits(units: int) -> bool:
            batch = units * self.unit
            if batch <= least:
                return True
            available = self.room(limit, batch)
            overhead = plan_overhead(self.interpolated(batch), available) if available else None
            return overhead is not None and overhead <= most_overhead

        return self.unit * largest(fits, max(least // self.unit, 1), SCALE * self.batch // self.unit, part=32)

    def accumulated(self, limit: int) -> tuple[int, int, float] | None:
        """Returns the fewest micro-batches that make up the original batch and fit without a plan.

        The gradients of all parameters are held between micro-batches.

        Returns:
            Size and number of micro-batches, and their overhead over the ideal time; None if none fit, or without an
            optimizer.
        """
        phases = {k.phase for k in self.program.kernels}
        gradients = sum(t.nbytes for t in self.program.tensors if t.kind == "parameter")
        if "optimizer" not in phases or self.batch == 1:
            return None
        largest_micro = largest(
            lambda batch: self.peak_bytes(batch) + gradients <= self.room(limit, batch), self.batch - 1, self.batch - 1
        )
        if not largest_micro:
            return None
        count = -(-self.batch // largest_micro)
        micro_batch = -(-self.batch // count)
        micro_ns = sum(k.duration_ns for k in self.interpolated(micro_batch).kernels if k.phase != "optimizer")
        update_ns = sum(k.duration_ns for k in self.program.kernels if k.phase == "optimizer")
        return micro_batch, count, (micro_ns * self.batch / micro_batch + update_ns) / max(self.program.ideal_ns, 1) - 1

    def _is_square(self, small: int, large: int) -> bool:
        """Returns whether a quantity is proportional to the square of the batch."""
        return small != 0 and large * self.batch**2 == small * self.larger_batch**2

    @cached_property
    def _has_squares(self) -> bool:
        tensors = zip(self.program.tensors, self.larger.tensors, strict=True)
        kernels = zip(self.program.kernels, self.larger.kernels, strict=True)
        return any(self._is_square(t.nbytes, u.nbytes) for t, u in tensors) or any(
            self._is_square(k.workspace, u.workspace) for k, u in kernels
        )

    @cached_property
    def _live(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return tuple(np.array(p.live_bytes, float) for p in (self.program, self.larger))


def _structure(program: Program) -> tuple[Any, ...]:
    return (
        [(t.kind, t.persistent) for t in program.tensors],
        [(k.name, k.inputs, k.outputs, k.recomputable) for k in program.kernels],
    )


def rescaled(larger: Program, program: Program, ratio: float = 2.0) -> Program:
    """Rescales the durations of the step at another batch to those of ``program``, which may be measured.

    Kernels that are identical in both (parameter updates) determine the scale; without such kernels, the other step is
    taken to last ``ratio`` times as long.
    """
    if _structure(larger) != _structure(program) or not larger.ideal_ns:
        return larger
    pairs = [
        (k.duration_ns, u.duration_ns)
        for k, u in zip(program.kernels, larger.kernels, strict=True)
        if (k.flops, k.bytes) == (u.flops, u.bytes)
    ]
    program_ns, larger_ns = (sum(times) for times in zip(*pairs, strict=True)) if pairs else (0, 0)
    if not program_ns or not larger_ns:
        program_ns = round(ratio * program.ideal_ns)
        larger_ns = larger.ideal_ns
    return larger.with_durations([round(k.duration_ns * program_ns / larger_ns) for k in larger.kernels])


class Issue(NamedTuple):
    """Form in which the executor issues a planned step on a GPU.

    Attributes:
        obstacle: why it cannot be one CUDA graph; "" if it can.
        needs_fused: whether it can with ``fused=True`` for the optimizer only.
    """

    obstacle: str = ""
    needs_fused: bool = False


NO_OBSTACLE = Issue()


class Step(NamedTuple):
    """Captured step with the data that planning needs."""

    program: Program
    origins: Origins | None  # None for a program file
    card: DevicePeak | None  # device memory, for the given capacity if any; None: unknown
    arithmetic: str  # a sentence on the data types
    types: tuple[str, ...]  # data type of each kernel
    issue: Issue  # how the executor issues the step on a GPU
    modules: tuple[str, ...]  # paths of the callable modules
    in_backward: bool = False  # whether the optimizer's update is in the backward pass
    early: Step | None = None  # the same step with its update in the backward pass, if both orders are wanted
    obstacle: str = ""  # why the update cannot be there, if both orders are wanted
    changed: Program | None = None  # program of the step after the change that ``obstacle`` names; None: unknown
    item_bytes: tuple[int, ...] = ()  # bytes per element of each tensor, 0: unknown; (): all unknown


def step(
    workload: Mapping[str, Any],
    machine: Machine,
    memory_bytes: int | None,
    in_backward: InBackward = False,
    show: Callable[[str], object] = str,
) -> Step:
    """Captures a workload at its own batch.

    Args:
        workload: a configuration (experiments/workloads).
        memory_bytes: device memory; None: only tensors count.
        in_backward: whether the optimizer's update is in the backward pass; "auto" returns both orders.
        show: callback, receives how far the capture is.
        machine: Machine to plan for.

    Returns:
        The captured step.

    Raises:
        WorkloadError, CaptureError, FormatError: the workload is invalid or cannot be captured.
    """
    from executor.capture.early_update import early_update, with_early_update
    from executor.capture.recorder import watched
    from experiments import workloads

    def show_operators(count: int) -> None:
        if count % SHOWN == 0:
            show(f"{count:,} operators")

    with watched(show_operators):
        captured = workloads.load(workload, machine, as_cuda=True)
    if in_backward != "auto":
        return _step(with_early_update(captured, in_backward), machine, memory_bytes)
    found = early_update(captured)
    early = None if found.captured is None else _step(found.captured, machine, memory_bytes)
    late = _step(captured, machine, memory_bytes)
    return late._replace(early=early, obstacle=found.cause, changed=found.changed)


def _step(captured: Captured, machine: Machine, memory_bytes: int | None) -> Step:
    from torch import nn

    from executor.training import graph

    model = captured.modules[0][0] if captured.modules else nn.Module()
    modules = tuple(name for name, m in model.named_modules() if name and type(m).forward is not nn.Module.forward)
    card = _card(captured, machine, memory_bytes)
    reason = graph.obstacle(captured, numbers_of_optimizers=False)
    metas = {t: node.meta.get("tensor_meta") for node, t in reversed(captured.values.items())}
    item_bytes = {t: meta.dtype.itemsize for t, meta in metas.items() if meta is not None}
    return Step(
        captured.program,
        captured.origins,
        card,
        captured.arithmetic(machine),
        captured.dtypes(machine),
        Issue(reason or "", reason is None and graph.obstacle(captured) is not None),
        modules,
        captured.early_update,
        item_bytes=tuple(item_bytes.get(t, 0) for t in range(len(captured.program.tensors))),
    )


def batches(
    workload: Mapping[str, Any],
    machine: Machine,
    memory_bytes: int | None,
    program: Program,
    other_bytes: int,
    in_backward: bool = False,
) -> Batches:
    """Captures a workload at twice its own batch, and returns the step at any batch.

    Args:
        workload, machine, memory_bytes: as in ``step``.
        program: the step at its own batch.
        other_bytes: bytes of device memory not used by its tensors.
        in_backward: whether the optimizer's update is in the backward pass, as in ``program``.

    Returns:
        The step at any batch size.

    Raises:
        BatchError, WorkloadError, CaptureError, FormatError: the batch cannot be changed.
    """
    from executor.capture.early_update import with_early_update
    from experiments import workloads

    batch = workloads.batch_of(workload, workloads.build(workload))
    captured = with_early_update(workloads.load(workload, machine, 2 * batch, as_cuda=True), in_backward)
    card = None if memory_bytes is None else _card(captured, machine, memory_bytes)
    larger_other_bytes = card.beside if card is not None else 0
    return Batches(batch, program, 2 * batch, rescaled(captured.program, program), (other_bytes, larger_other_bytes))


def sequences(
    workload: Mapping[str, Any],
    machine: Machine,
    memory_bytes: int | None,
    program: Program,
    other_bytes: int,
    in_backward: bool = False,
) -> tuple[Batches, int | None]:
    """Captures a workload at half its own sequence length, and returns the step at any.

    Half the length is within the positions of the model, which are the second result (None: not limited).

    Args:
        workload, machine, memory_bytes, program, other_bytes, in_backward: as in ``batches``.

    Returns:
        The step at any sequence length, and the largest length of the model or None.

    Raises:
        BatchError, WorkloadError, CaptureError, FormatError: the sequence length cannot be changed.
    """
    from executor.capture.early_update import with_early_update
    from experiments import workloads

    length, longest = workloads.length_of_workload(workload, workloads.build(workload))
    if length < 2 or length % 2:
        raise BatchError(f"a sequence of {length} tokens cannot be halved: choose an even length")
    captured = with_early_update(workloads.load(workload, machine, as_cuda=True, length=length // 2), in_backward)
    card = None if memory_bytes is None else _card(captured, machine, memory_bytes)
    shorter = rescaled(captured.program, program, 0.5)
    other = card.beside if card is not None else 0
    unit = 1 if length % UNIT else UNIT
    return Batches(length, program, length // 2, shorter, (other_bytes, other), "sequence length", unit), longest


def check(
    workload: Mapping[str, Any],
    machine: Machine,
    batch: int,
    peak_bytes: int,
    in_backward: bool = False,
    what: str = "batch",
) -> None:
    """Captures a workload at a batch; raises BatchError unless its peak is ``peak_bytes``, and as ``batches`` does.

    Args:
        workload: settings of the workload.
        machine: machine to capture for.
        batch: size to capture.
        peak_bytes: expected peak in bytes.
        in_backward: as in ``batches``.
        what: "batch" or "sequence length", of which ``batch`` is the size.
    """
    from executor.capture.early_update import with_early_update
    from experiments import workloads

    size = {"batch": batch} if what == "batch" else {"length": batch}
    captured = workloads.load(workload, machine, as_cuda=True, **size)
    peak = with_early_update(captured, in_backward).program.peak_bytes
    if peak != peak_bytes:
        raise BatchError(
            f"the peak at {what} {batch} is {peak:,} bytes, but {peak_bytes:,} were predicted: try a {what} by hand"
        )


def _card(captured: Captured, machine: Machine, memory_bytes: int | None) -> DevicePeak | None:
    """Returns the device memory peak; if it is unknown: None without a capacity, else raises WorkloadError."""
    from executor.device_memory import card_peak
    from experiments.workloads import WorkloadError

    try:
        return card_peak(captured, machine, memory_bytes=memory_bytes)
    except ValueError as error:
        if memory_bytes is None:
            return None
        raise WorkloadError(f"memory: cannot compute the device memory of this step: {error}") from error
