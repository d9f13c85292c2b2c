"""Classes of alike gaps: gaps that repeated parts of a program (transformer blocks, stages of a CNN) have in common.

Gaps are alike if their tensors and the kernels around their accesses look the same. Only the program is used: no period
has to be known, parts of different length may be repeated, and each of them forms classes of its own.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.program import Gap, Program


@dataclass(frozen=True)
class ClassOptions:
    """Which gaps are alike, and how often classes move; a change alters the plans of every search."""

    neighbors: int = 1  # kernels before and after an access that alike gaps have in common
    many: int = 8  # members from which a class counts as repetition
    prob: float = 0.7  # of a class move, if every gap belonged to a class of ``many`` members
    min_repetition: float = 0.5  # repetition below which no class moves are made
    chance_power: float = 0.5  # exponent of bytes x time of a class in its chance to be moved


OPTIONS = ClassOptions()
_NUMBER = re.compile(r"[._]?\d+")


class Classes(NamedTuple):
    """Partition of m gaps into C classes; members of class c: ``members[begin[c]:begin[c + 1]]``, in program order."""

    begin: NDArray[np.int64]  # (C + 1,)
    members: NDArray[np.int64]  # (m,) gaps
    slots: NDArray[np.int64]  # (m,) position of each gap in ``members``
    owners: NDArray[np.int64]  # (m,) class of each gap
    chances: NDArray[np.float64]  # (C,) probability of each class to be moved
    repetition: float  # share of the gaps' bytes x time in classes of ``ClassOptions.many`` members or more

    @property
    def prob(self) -> float:
        """Probability that a move is one of a class; 0 for programs of little repetition."""
        return OPTIONS.prob * self.repetition if self.repetition >= OPTIONS.min_repetition else 0.0


def gap_classes(program: Program, gaps: Sequence[Gap]) -> Classes:
    """Returns the classes of alike gaps, in the order of their first members."""
    groups: dict[Hashable, list[int]] = {}
    for i in sorted(range(len(gaps)), key=lambda i: gaps[i].after):
        groups.setdefault(_signature(program, gaps[i]), []).append(i)
    sizes = np.array([len(group) for group in groups.values()], np.int64)
    members = np.array([i for group in groups.values() for i in group], np.int64)
    owners = np.repeat(np.arange(len(groups)), sizes)
    byte_ns = np.array([program.tensors[gaps[i].tensor].nbytes * program.gap_ns(gaps[i]) for i in members], np.float64)
    weights = np.bincount(owners, byte_ns, len(groups))
    chances = weights**OPTIONS.chance_power
    return Classes(
        begin=np.concatenate([[0], sizes.cumsum()]),
        members=members,
        slots=np.argsort(members),
        owners=owners[np.argsort(members)],
        chances=chances / max(chances.sum(), 1.0),
        repetition=float(weights[sizes >= OPTIONS.many].sum() / max(weights.sum(), 1.0)),
    )


def _signature(program: Program, gap: Gap) -> Hashable:
    """Returns what alike gaps have in common."""
    tensor = program.tensors[gap.tensor]
    # A name tells modules apart only if it is a path, in which numbers count the repeated modules.
    path = _NUMBER.sub("", tensor.name) if "." in tensor.name else ""
    wraps = gap.after >= gap.before
    accesses = [gap.after, gap.before]
    if not tensor.persistent:
        accesses.append(program.accesses[gap.tensor][0])
    surroundings = tuple(_surroundings(program, k) for k in accesses)
    return tensor.kind, tensor.nbytes, tensor.persistent, path, wraps, surroundings


def _surroundings(program: Program, kernel: int) -> Hashable:
    """Returns the phase of a kernel and the names of its neighbors and itself; "" beyond the program's ends."""
    n = len(program.kernels)
    around = range(kernel - OPTIONS.neighbors, kernel + OPTIONS.neighbors + 1)
    return program.kernels[kernel].phase, *(program.kernels[k].name if 0 <= k < n else "" for k in around)
