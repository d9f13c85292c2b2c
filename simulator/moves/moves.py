"""Candidate gaps of a program and the current plan of a search: the Python interface of plan_moves.py."""

from __future__ import annotations

import copy
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from simulator.compiled.encoding import AFTER, BEFORE, KIND, RECOMPUTE, SWAP, TENSOR, WHEN, Ints, rows_for
from simulator.modes import Choice, evictions
from simulator.moves import plan_moves
from simulator.moves.classes import gap_classes
from simulator.moves.plan_moves import Gaps, PlanArrays, Scratch
from simulator.program import Gap, Program
from simulator.residency import residency

Floats = NDArray[np.float64]


class Moves:
    """Candidate gaps of a program, the current plan of the search, and the proposed plan.

    Args:
        weights: float64 (m, 4), relative probability of each ``Choice`` in each of the m gaps of
            ``program.gaps(min_bytes)``; None: uniform.
        by_class: Whether classes of alike gaps are moved together if the program is repetitive.

    Attributes:
        gaps: Gaps that can be emptied in at least one way.
        weights: float64 (gaps, 4), as above; may be changed.
        limit: Largest residency of a proposed plan in bytes; may be changed.
    """

    def __init__(
        self,
        program: Program,
        limit: int,
        mode: str,
        min_bytes: int,
        seed: int,
        weights: Floats | None = None,
        by_class: bool = True,
    ) -> None:
        gaps = program.gaps(min_bytes)
        choices = [evictions(program, gap, mode) for gap in gaps]
        usable = [i for i in range(len(gaps)) if choices[i]]
        self.gaps = [gaps[i] for i in usable]
        self.index = {(g.tensor, g.before): i for i, g in enumerate(self.gaps)}
        m = len(usable)
        self._live_bytes = np.array(program.live_bytes, np.int64)
        classes = gap_classes(program, self.gaps)
        self._gaps = Gaps(
            np.array([program.tensors[g.tensor].nbytes for g in self.gaps], np.int64),
            np.zeros((m, len(Choice), 6), np.int64),
            np.zeros((m, len(Choice))),
            np.array([g.after for g in self.gaps], np.int64),
            np.array([since_write(program, g) for g in self.gaps], np.int64),
            _earlier(program, self.gaps),
            classes,
            classes.prob if by_class else 0.0,
        )
        self.weights = self._gaps.weights
        for choice in Choice:
            allowed = [i for i, j in enumerate(usable) if choice in choices[j]]
            self._gaps.choice_rows[allowed, choice] = rows_for([self.gaps[i] for i in allowed], choice)
            self.weights[allowed, choice] = 1.0 if weights is None else weights[[usable[i] for i in allowed], choice]
        self.limit = limit
        self._init_private(seed)

    def _init_private(self, seed: int) -> None:
        """Creates the attributes that searches do not share."""
        self._rng = np.random.default_rng(seed).integers(1, 2**63, 1, dtype=np.uint64)
        self._current, self._proposal = self._empty(), self._empty()
        capacity = len(self.gaps) + 2 * plan_moves.OPTIONS.prunes + 8
        self._scratch = Scratch(np.full(capacity, -1, np.int64), np.empty(6, np.int64), np.empty_like(self.rows))

    def _empty(self) -> PlanArrays:
        first = self.weights.argmax(1)
        m = len(self.gaps)
        return PlanArrays(self._gaps.choice_rows[np.arange(m), first], np.zeros(m, np.bool_), self._live_bytes.copy())

    @property
    def rows(self) -> Ints:
        """Rows of all gaps, in use or not, int64 (gaps, 6)."""
        return self._current.rows

    @property
    def on(self) -> NDArray[np.bool_]:
        """Gaps in which the plan evicts the tensor, bool (gaps,)."""
        return self._current.on

    @property
    def load(self) -> NDArray[np.int64]:
        """Planned residency, int64 (kernels,)."""
        return self._current.load

    @property
    def class_prob(self) -> float:
        """Probability that a move is one of a class of alike gaps; 0 if the program is not repetitive."""
        return self._gaps.class_prob

    def fork(self, seed: int) -> Moves:
        """Returns moves of the same gaps with a separate plan and random state; the weights are shared."""
        out = copy.copy(self)
        out._init_private(seed)
        return out

    def accepts(self, rows: Ints | None) -> TypeGuard[Ints]:
        """Returns whether ``rows`` is a plan of candidate gaps, which moves can change."""
        return (
            rows is not None
            and bool(np.isin(rows[:, KIND], (SWAP, RECOMPUTE)).all())
            and all(key in self.index for key in map(tuple, rows[:, [TENSOR, BEFORE]].tolist()))
        )

    def reset(self, rows: Ints) -> None:
        """Sets the current plan to ``rows``, int64 (k, 6), of candidate gaps."""
        self._current = self._empty()
        indices = [self.index[key] for key in map(tuple, rows[:, [TENSOR, BEFORE]].tolist())]
        self._current.rows[indices] = rows
        self._current.on[indices] = True
        is_early = (rows[:, KIND] == RECOMPUTE) & (rows[:, WHEN] >= 0)
        bounds = np.stack([rows[:, AFTER], np.where(is_early, rows[:, WHEN], rows[:, BEFORE])], 1)
        self._current.load[:] = residency(self._live_bytes, bounds, self._gaps.nbytes[indices])
        self._scratch.differ[0] = -1

    def plan(self) -> Ints:
        """Returns a copy of the rows in use, int64 (k, 6)."""
        return self.rows[self.on]

    @property
    def arrays(self) -> tuple[Any, ...]:
        """First arguments of ``plan_moves.propose``: random state, limit, gaps, both plans and work arrays."""
        gaps = self._gaps._replace(weights=self.weights)
        return self._rng, self.limit, gaps, self._current, self._proposal, self._scratch

    def propose(self) -> Ints | None:
        """Returns a copy of a neighbor plan that fits, int64 (k, 6); None if no move leads to one."""
        rows = plan_moves.propose(*self.arrays, self.class_prob)
        return self.proposed(rows).copy() if rows >= 0 else None

    def proposed(self, rows: int) -> Ints:
        """Returns the last proposed plan, int64 (rows, 6); valid until the next proposal."""
        return self._scratch.plan[:rows]

    def accept(self) -> None:
        """Makes the last proposed plan the current one."""
        self._current, self._proposal = self._proposal, self._current


def since_write(program: Program, gap: Gap) -> int:
    """Returns the number of kernels from the last write of a gap's tensor, or the gap's previous end, to the gap."""
    n = len(program.kernels)
    t = gap.tensor
    distances = [(gap.after - w) % n for w in program.writes[t] if w <= gap.after or program.tensors[t].persistent]
    return min([*distances, (gap.after - gap.before) % n])


def _earlier(program: Program, gaps: list[Gap]) -> NDArray[np.int64]:
    """Returns int64 (gaps,) the previous gap of the same tensor, of the previous iteration if persistent; or -1."""
    earlier = np.full(len(gaps), -1, dtype=np.int64)
    by_tensor: dict[int, list[int]] = {}
    for i in sorted(range(len(gaps)), key=lambda i: gaps[i].after):
        by_tensor.setdefault(gaps[i].tensor, []).append(i)
    for t, group in by_tensor.items():
        for i, j in zip(group, group[-1:] + group, strict=False):
            if i != group[0] or program.tensors[t].persistent:
                earlier[i] = j
    return earlier
