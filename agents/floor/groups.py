"""Merging of consecutive kernels into groups, so that the floor of large programs is solved in seconds.

A group of one kernel is exact: the compute stream waits, then the kernel runs. In a larger group, waits and kernels
form one step in which everything happens in the best order (``transfers``). Short kernels are merged, so that
transfers are misplaced by little time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from simulator.program import Program

MIXTURES = (1.0, 0.75, 0.5, 0.25, 0.0)


class Groups:
    """Consecutive kernels merged into about ``most`` groups; kernels in ``alone`` are groups of their own.

    Attributes:
        first, last: first and last kernel of each group.
        of: int64[n], the group of each kernel.
    """

    def __init__(self, program: Program, most: int, alone: Collection[int] = ()) -> None:
        duration = [k.duration_ns for k in program.kernels]
        low, high = -1.0, float(sum(duration))  # maximum ns of a merged group; -1: no merging
        begins = _begins(duration, low, set(alone))
        if len(begins) > most:
            for _ in range(20):
                middle = (max(low, 0.0) + high) / 2
                begins = _begins(duration, middle, set(alone))
                low, high = (low, middle) if len(begins) <= most else (middle, high)
            begins = _begins(duration, high, set(alone))
        self.first = begins
        self.last = [b - 1 for b in [*begins[1:], len(duration)]]
        self.of: NDArray[np.int64] = np.repeat(np.arange(len(begins)), np.diff([*begins, len(duration)]))

    def __len__(self) -> int:
        return len(self.first)

    def single(self, group: int) -> bool:
        """Returns whether the group has exactly one kernel."""
        return self.first[group] == self.last[group]

    def touched(self, kernels: Iterable[int]) -> list[int]:
        """Returns the distinct groups of the given kernels."""
        return list(dict.fromkeys(self.of[list(kernels)].tolist()))

    def heaviest(self, load: NDArray[np.int64], least: NDArray[np.int64], limit: int) -> list[int]:
        """Returns the kernels that get a memory constraint: the heaviest of each group, if above ``limit``.

        "Heaviest" is evaluated with everything evictable resident (``load``, int64[n] bytes), with everything evicted
        (``least``), and for mixtures of the two.
        """
        found: set[int] = set()
        for part in MIXTURES:
            of = part * load + (1 - part) * least
            found |= {a + int(of[a : b + 1].argmax()) for a, b in zip(self.first, self.last, strict=True)}
        return sorted(k for k in found if load[k] > limit)


def _begins(duration: list[int], most: float, alone: set[int]) -> list[int]:
    """Returns the first kernel of each group, with at most ``most`` ns per merged group."""
    found, total, fixed = [0], float(duration[0]), 0 in alone
    for k in range(1, len(duration)):
        if fixed or k in alone or total + duration[k] > most:
            found.append(k)
            total, fixed = 0.0, k in alone
        total += duration[k]
    return found
