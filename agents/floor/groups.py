"""What the floor merges so that large programs are solved in seconds: consecutive kernels, into groups.

A group of one kernel is exact: the compute stream waits for a time, and then the kernel runs. In a group of several,
waits and kernels are one step, in which everything happens in the best order (``transfers``). Kernels are merged
where they are short, so that a transfer can be misplaced by little time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from simulator.program import Program

MIXTURES = (1.0, 0.75, 0.5, 0.25, 0.0)


class Groups:
    """Consecutive kernels, merged into about ``most`` groups; those of ``alone`` are groups of their own.

    Attributes:
        first, last: per group, its kernels.
        of: int64[n], the group of each kernel.
    """

    def __init__(self, program: Program, most: int, alone: Collection[int] = ()) -> None:
        duration = [k.duration_ns for k in program.kernels]
        low, high = -1.0, float(sum(duration))  # ns that a group of several may take; -1: nothing is merged
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
        """Is it one kernel?"""
        return self.first[group] == self.last[group]

    def touched(self, kernels: Iterable[int]) -> list[int]:
        """The groups of some kernels, each once."""
        return list(dict.fromkeys(self.of[list(kernels)].tolist()))

    def heaviest(self, load: NDArray[np.int64], least: NDArray[np.int64], limit: int) -> list[int]:
        """Kernels whose memory is looked at: the heaviest ones of each group when all that can be away is there
        (``load``, bytes per kernel), when none of it is (``least``) and in between; of these, those above ``limit``."""
        found: set[int] = set()
        for part in MIXTURES:
            of = part * load + (1 - part) * least
            found |= {a + int(of[a : b + 1].argmax()) for a, b in zip(self.first, self.last, strict=True)}
        return sorted(k for k in found if load[k] > limit)


def _begins(duration: list[int], most: float, alone: set[int]) -> list[int]:
    """The first kernel of each group, where groups of several take at most so many ns."""
    found, total, fixed = [0], float(duration[0]), 0 in alone
    for k in range(1, len(duration)):
        if fixed or k in alone or total + duration[k] > most:
            found.append(k)
            total, fixed = 0.0, k in alone
        total += duration[k]
    return found
