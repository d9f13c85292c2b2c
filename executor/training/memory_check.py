"""What the first step really takes, beside what the program says: every storage's bytes, and the allocator's figures.

A limit holds in bytes of the program. Where a storage is larger than the program's tensor, or the allocator has more in
use than the ledger, it does not hold on the device; where the allocator has to ask again, steps are slow. Each is one
warning after the first step, and stays to be read. Sizes are the same where the allocator's are, which are multiples of
512 bytes. Tensors of the batch are the caller's and are left out.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executor.memory import ALIGNMENT
from executor.training.work import StepState

TOLERANCE = 0.02  # of the ledger's peak


@dataclass(frozen=True)
class Allocator:
    """The first step by PyTorch's caching allocator.

    Attributes:
        others: bytes in use before it that are none of the program's.
        peak_bytes: the most in use in it, ``others`` left out.
        ledger_bytes: the most by the ledger.
        retries: how often it gave back all it had cached and asked the driver again (``num_alloc_retries``).
    """

    others: int
    peak_bytes: int
    ledger_bytes: int
    retries: int


def allocator_stats(device: torch.device) -> dict[str, Any] | None:
    """``torch.cuda.memory_stats``; None where the allocator keeps no figures."""
    return torch.cuda.memory_stats(device) if device.type == "cuda" else None


class Watch:
    """Looks at the first step that comes to its end; then it is gone from the step's work.

    Attributes:
        over: there was one.
    """

    def __init__(self, state: StepState) -> None:
        order, calls = state.order, state.calls
        self._work, self._blocks, self._device, self._out = state.work, state.blocks, state.device, calls.nothing
        self._differing: dict[str, tuple[int, int]] = {}
        tensors, memory = order.program.tensors, order.schedule.blocks
        self._bound = [(b, tensors[b.tensor].nbytes) for b in state.bindings if b.block is None]
        self._born = [
            tuple((s, tensors[memory[b].owner]) for b in item.step.allocates if memory[b].owner >= 0
                  for s in calls.of.get(b, ()))
            for item in order.items
        ]  # fmt: skip
        self._rounding = ALIGNMENT * len(tensors)
        self._before: dict[str, Any] | None = None
        self._others = self._most = self._ledger = 0
        self.over = False
        for i, item in enumerate(self._work):  # after the calls of each item there is one that looks
            if item.calls:
                look = self._out, self._look, lambda table, i=i: (table, i), dict[str, Any]()
                self._work[i] = item._replace(calls=(*item.calls, look))

    def begin(self) -> None:
        """A step begins."""
        self._differing.clear()
        for b, nbytes in self._bound:
            self._compare(b.name, b.own, nbytes)
        self._before = allocator_stats(self._device)
        if self._before is not None:
            self._others = self._before["allocated_bytes.all.current"] - self._blocks.used
        self._most, self._ledger = 0, self._blocks.used

    def _compare(self, name: str, tensor: Tensor, nbytes: int) -> None:
        real = tensor.untyped_storage().nbytes()
        if -(-real // ALIGNMENT) != -(-nbytes // ALIGNMENT):
            self._differing.setdefault(name, (real, nbytes))

    def _look(self, table: list[Any], i: int) -> Any:
        for slot, tensor in self._born[i]:
            if isinstance(table[slot], Tensor):
                self._compare(tensor.name, table[slot], tensor.nbytes)
        if self._before is not None and (now := allocator_stats(self._device)) is not None:
            self._most = max(self._most, now["allocated_bytes.all.current"])
        self._ledger = max(self._ledger, self._blocks.used)
        return table[self._out]

    def end(self, limit: int) -> tuple[Allocator | None, dict[str, tuple[int, int]]]:
        """The step has come to its end: what was found is said, and returned (PlannedStep's attributes)."""
        self.over = True
        for i, item in enumerate(self._work):
            if item.calls:
                self._work[i] = item._replace(calls=item.calls[:-1])
        if self._differing:
            more = sum(real - nbytes for real, nbytes in self._differing.values())
            name, (real, nbytes) = max(self._differing.items(), key=lambda item: abs(item[1][0] - item[1][1]))
            warnings.warn(
                f"{len(self._differing)} storages are not as large as the program says, in all {more:+,} bytes: {name} "
                f"has {real:,} and not {nbytes:,}; the limit holds in the program's bytes only",
                stacklevel=3,
            )
        now, before = allocator_stats(self._device), self._before
        if before is None or now is None:
            return None, self._differing
        if now["allocated_bytes.all.peak"] > before["allocated_bytes.all.peak"]:  # within kernels, too
            self._most = max(self._most, now["allocated_bytes.all.peak"])
        retries = now["num_alloc_retries"] - before["num_alloc_retries"]
        found = Allocator(self._others, self._most - self._others, self._ledger, retries)
        if found.peak_bytes > found.ledger_bytes * (1 + TOLERANCE) + self._rounding:
            warnings.warn(
                f"the first step had {found.peak_bytes:,} bytes in use on the device, the program counts "
                f"{found.ledger_bytes:,}; the limit of {limit:,} holds in the program's bytes only",
                stacklevel=3,
            )
        if retries:
            warnings.warn(
                f"in the first step the allocator found no memory {retries} times and asked again with an empty cache "
                f"(num_alloc_retries), which is slow; beside {self._others:,} bytes of others the limit of {limit:,} "
                "is too much for this device",
                stacklevel=3,
            )
        return found, self._differing
