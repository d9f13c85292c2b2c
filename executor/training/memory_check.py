"""Compares the memory of the first step with the program: storage sizes and the allocator's statistics.

The memory limit is enforced in bytes of the program. It does not hold on the device if a storage is larger than its
program tensor or if the allocator uses more than the ledger; steps are slow if the allocator has to retry. Each case
causes one warning after the first step. Sizes are compared after rounding up to the allocator's 512 bytes. Tensors of
the batch belong to the caller and are not compared.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executor.memory import ALIGNMENT
from executor.training.work import StepState


@dataclass(frozen=True)
class Allocator:
    """Statistics of PyTorch's caching allocator for the first step.

    Attributes:
        others: bytes in use before the step that do not belong to the program.
        peak_bytes: peak bytes in use during the step, without ``others``.
        ledger_bytes: peak bytes by the ledger.
        retries: number of allocations retried after the cache was emptied (``num_alloc_retries``).
    """

    others: int
    peak_bytes: int
    ledger_bytes: int
    retries: int


def allocator_stats(device: torch.device) -> dict[str, Any] | None:
    """Returns ``torch.cuda.memory_stats``, or None if the device's allocator keeps no statistics."""
    return torch.cuda.memory_stats(device) if device.type == "cuda" else None


def reset_peak(device: torch.device) -> None:
    """Restarts the allocator's statistics of peaks, so that an earlier, higher peak does not hide the step's."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


class FirstStepObserver:
    """Observer of the first completed step; it then removes itself from the step's work list.

    Attributes:
        over: whether a step has completed.
    """

    def __init__(self, state: StepState) -> None:
        self._state = state
        self.is_done = False
        self._differing: dict[str, tuple[int, int]] = {}
        self._before: dict[str, Any] | None = None
        self._others = self._peak_bytes = self._ledger_bytes = 0
        for i, item in enumerate(state.work):  # appends an observing call to each item
            if item.calls:
                call = state.calls.unused_slot, self._observe, lambda table, i=i: (table, i), dict[str, Any]()
                state.work[i] = item._replace(calls=(*item.calls, call))

    def begin(self) -> None:
        """Starts observing a step."""
        state = self._state
        self._differing = {}
        for b in state.bindings:
            if b.block is None:
                self._compare(b.name, b.device_tensor, state.order.program.tensors[b.tensor].nbytes)
        reset_peak(state.device)
        self._before = allocator_stats(state.device)
        if self._before is not None:
            self._others = self._before["allocated_bytes.all.current"] - state.blocks.used
        self._peak_bytes = 0
        self._ledger_bytes = state.blocks.used

    def _compare(self, name: str, tensor: Tensor, nbytes: int) -> None:
        real = tensor.untyped_storage().nbytes()
        if -(-real // ALIGNMENT) != -(-nbytes // ALIGNMENT):
            self._differing.setdefault(name, (real, nbytes))

    def _observe(self, table: list[Any], i: int) -> Any:
        order = self._state.order
        calls = self._state.calls
        used = self._state.blocks.used
        for b in order.items[i].step.allocates:
            owner = order.schedule.blocks[b].owner
            for value in (table[slot] for slot in calls.slots_of_block.get(b, ()) if owner >= 0):
                if isinstance(value, Tensor):
                    self._compare(order.program.tensors[owner].name, value, order.program.tensors[owner].nbytes)
        if self._before is not None and (now := allocator_stats(self._state.device)) is not None:
            self._peak_bytes = max(self._peak_bytes, now["allocated_bytes.all.current"])
        self._ledger_bytes = max(self._ledger_bytes, used)
        return table[calls.unused_slot]

    def end(self, limit: int) -> tuple[Allocator | None, dict[str, tuple[int, int]]]:
        """Ends the observation, warns about differences and returns them.

        Args:
            limit: memory limit in bytes, for the warnings.

        Returns:
            ``allocator`` and ``differing`` of PlannedStep.
        """
        self.is_done = True
        for i, item in enumerate(self._state.work):
            if item.calls:
                self._state.work[i] = item._replace(calls=item.calls[:-1])
        if self._differing:
            excess = sum(real - nbytes for real, nbytes in self._differing.values())
            name, (real, nbytes) = max(self._differing.items(), key=lambda item: abs(item[1][0] - item[1][1]))
            warnings.warn(
                f"{len(self._differing)} storages are not as large as in the program, {excess:+,} bytes in all: {name} "
                f"has {real:,} and not {nbytes:,} bytes; the limit holds only in bytes of the program",
                stacklevel=3,
            )
        now = allocator_stats(self._state.device)
        before = self._before
        if before is None or now is None:
            return None, self._differing
        self._peak_bytes = max(self._peak_bytes, now["allocated_bytes.all.peak"])  # includes peaks within kernels
        retries = now["num_alloc_retries"] - before["num_alloc_retries"]
        rounding = ALIGNMENT * len(self._state.order.program.tensors)
        stats = Allocator(self._others, self._peak_bytes - self._others, self._ledger_bytes, retries)
        if stats.peak_bytes > stats.ledger_bytes * 1.02 + rounding:
            warnings.warn(
                f"the first step had {stats.peak_bytes:,} bytes in use on the device, and {stats.ledger_bytes:,} in "
                f"the program; the limit of {limit:,} holds only in bytes of the program",
                stacklevel=3,
            )
        if retries:
            warnings.warn(
                f"in the first step the allocator ran out of memory {retries} times and retried with an empty cache "
                f"(num_alloc_retries), which is slow; with {self._others:,} bytes of other memory in use, the limit of "
                f"{limit:,} is too large for this device: plan for a smaller one",
                stacklevel=3,
            )
        return stats, self._differing
