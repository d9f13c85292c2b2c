"""Captures of the workload of ``experiments.plan``: at its own batch, at twice that, and at the largest found.

Each capture is the program as it runs on the machine's GPU, with the update buckets of ``fit``. The first capture
imports PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.plan.max_batch import BatchError, Batches, on_its_scale
from simulator.machine import Machine
from simulator.pool.card import CardPeak
from simulator.program import Program
from simulator.report import Origins

if TYPE_CHECKING:  # avoids importing PyTorch
    from executor.capture.captured import Captured


class Step(NamedTuple):
    """Captured step with the data that planning needs.

    Attributes:
        card: device memory, for the given capacity if any; None: unknown.
        arithmetic: a sentence on the data types.
        types: data type of each kernel.
        modules: paths of the callable modules.
    """

    program: Program
    origins: Origins | None  # None for a program file
    card: CardPeak | None
    arithmetic: str
    types: tuple[str, ...]
    modules: tuple[str, ...]


def step(workload: Mapping[str, Any], machine: Machine, memory_bytes: int | None) -> Step:
    """Captures a workload at its own batch.

    Args:
        workload: a configuration (experiments/workloads).
        memory_bytes: device memory; None: only tensors count.

    Raises:
        WorkloadError, CaptureError, FormatError: the workload is invalid or cannot be captured.
    """
    from torch import nn

    from experiments import workloads

    captured = workloads.load(workload, machine, as_cuda=True)
    model = captured.modules[0][0] if captured.modules else nn.Module()
    modules = tuple(name for name, m in model.named_modules() if name and type(m).forward is not nn.Module.forward)
    card = _card(captured, machine, memory_bytes)
    return Step(
        captured.program, captured.origins, card, captured.arithmetic(machine), captured.types(machine), modules
    )


def batches(
    workload: Mapping[str, Any], machine: Machine, memory_bytes: int | None, program: Program, beside: int
) -> Batches:
    """Captures a workload at twice its own batch, and returns the step at any batch.

    Args:
        workload, machine, memory_bytes: as in ``step``.
        program: the step at its own batch.
        beside: bytes of device memory not used by its tensors.

    Raises:
        BatchError, WorkloadError, CaptureError, FormatError: the batch cannot be changed.
    """
    from experiments import workloads

    own = workloads.batch_of(workload, workloads.build(workload))
    captured = workloads.load(workload, machine, 2 * own, as_cuda=True)
    card = None if memory_bytes is None else _card(captured, machine, memory_bytes)
    more = card.beside if card is not None else 0
    return Batches(own, program, 2 * own, on_its_scale(captured.program, program), (beside, more))


def check(workload: Mapping[str, Any], machine: Machine, batch: int, peak_bytes: int) -> None:
    """Captures a workload at a batch; raises BatchError unless its peak is ``peak_bytes``, and as ``batches`` does."""
    from experiments import workloads

    found = workloads.load(workload, machine, batch, as_cuda=True).program.peak_bytes
    if found != peak_bytes:
        raise BatchError(f"the peak at batch {batch} is {found:,} bytes, but {peak_bytes:,} were predicted")


def _card(captured: Captured, machine: Machine, memory_bytes: int | None) -> CardPeak | None:
    """Returns the device memory peak; if it is unknown: None without a capacity, else raises WorkloadError."""
    from executor.card import card_peak
    from experiments.workloads import WorkloadError

    try:
        return card_peak(captured, machine, memory_bytes=memory_bytes)
    except ValueError as error:
        if memory_bytes is None:
            return None
        raise WorkloadError(f"memory: cannot compute the device memory of this step: {error}") from error
