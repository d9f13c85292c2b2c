"""The candidate gaps of a program and the plan that moves start from: the Python side of plan_moves.py."""

from __future__ import annotations

import copy
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from simulator.compiled.encoding import AFTER, BEFORE, KIND, RECOMPUTE, SWAP, TENSOR, WHEN, Ints, rows_for
from simulator.modes import KEPT, RECOMPUTED, SWAPPED, ways_to_empty
from simulator.moves import plan_moves
from simulator.moves.plan_moves import Gaps, PlanArrays, Scratch
from simulator.program import Gap, Program
from simulator.residency import residency

Floats = NDArray[np.float64]


class Moves:
    """The candidate gaps of a program, the present plan of the search, and the one that it tries.

    Args:
        weights: float64[m, 4], how likely each way (SWAPPED, RECOMPUTED, KEPT) of each of the m gaps of
            ``program.gaps(min_bytes)`` is picked; None: all alike.

    Attributes:
        gaps: those that can be emptied in at least one way.
        weights: float64[len(gaps), 4], as above; may be changed.
        limit: bytes, which the residency of a proposed plan keeps within; may be changed.
    """

    def __init__(
        self, program: Program, limit: int, mode: str, min_bytes: int, seed: int, weights: Floats | None = None
    ) -> None:
        gaps = program.gaps(min_bytes)
        ways = [ways_to_empty(program, gap, mode) for gap in gaps]
        kept = [i for i, w in enumerate(ways) if w]
        self.gaps = [gaps[i] for i in kept]
        self.index = {(g.tensor, g.before): i for i, g in enumerate(self.gaps)}
        m = len(kept)
        self._live_bytes = np.array(program.live_bytes, np.int64)
        self._gaps = Gaps(
            np.array([program.tensors[g.tensor].nbytes for g in self.gaps], np.int64),
            np.zeros((m, KEPT + 1, 6), np.int64), np.zeros((m, KEPT + 1)),
            np.array([g.after for g in self.gaps], np.int64),
            np.array([since_write(program, g) for g in self.gaps], np.int64), _earlier(program, self.gaps),
        )  # fmt: skip
        self.weights = self._gaps.weights
        for way in (SWAPPED, RECOMPUTED, KEPT):
            have = [i for i, j in enumerate(kept) if way in ways[j]]
            self._gaps.ways[have, way] = rows_for([self.gaps[i] for i in have], way)
            self.weights[have, way] = 1.0 if weights is None else weights[[kept[i] for i in have], way]
        self.limit = limit
        self._own(seed)

    def _own(self, seed: int) -> None:
        """What no two searches share."""
        self._rng = np.random.default_rng(seed).integers(1, 2**63, 1, dtype=np.uint64)
        self._now, self._tried = self._empty(), self._empty()
        room = len(self.gaps) + 2 * plan_moves.PRUNE + 8
        self._scratch = Scratch(np.full(room, -1, np.int64), np.empty(6, np.int64), np.empty_like(self.rows))

    def _empty(self) -> PlanArrays:
        first, m = self.weights.argmax(1), len(self.gaps)
        return PlanArrays(self._gaps.ways[np.arange(m), first], np.zeros(m, np.bool_), self._live_bytes.copy())

    @property
    def rows(self) -> Ints:
        """int64[len(gaps), 6]: a row per gap, whether it is in use or not."""
        return self._now.rows

    @property
    def on(self) -> NDArray[np.bool_]:
        """bool[len(gaps)]: gaps that the plan empties."""
        return self._now.on

    @property
    def load(self) -> NDArray[np.int64]:
        """int64[n]: planned residency per kernel."""
        return self._now.load

    def fork(self, seed: int) -> Moves:
        """Moves of the same gaps, with a plan and random numbers of their own; the weights are shared."""
        out = copy.copy(self)
        out._own(seed)
        return out

    def takes(self, rows: Ints | None) -> TypeGuard[Ints]:
        """Is there a plan of ``rows``, and are they all of candidates, which moves may change?"""
        return (
            rows is not None
            and bool(np.isin(rows[:, KIND], (SWAP, RECOMPUTE)).all())
            and all(key in self.index for key in map(tuple, rows[:, [TENSOR, BEFORE]].tolist()))
        )

    def reset(self, rows: Ints) -> None:
        """Makes this the plan of ``rows`` (int64[k, 6]), of gaps that are candidates."""
        self._now = self._empty()
        which = [self.index[key] for key in map(tuple, rows[:, [TENSOR, BEFORE]].tolist())]
        self._now.rows[which], self._now.on[which] = rows, True
        early = (rows[:, KIND] == RECOMPUTE) & (rows[:, WHEN] >= 0)
        where = np.stack([rows[:, AFTER], np.where(early, rows[:, WHEN], rows[:, BEFORE])], 1)
        self._now.load[:] = residency(self._live_bytes, where, self._gaps.nbytes[which])
        self._scratch.differ[0] = -1

    def plan(self) -> Ints:
        """int64[k, 6]: the rows in use, a copy."""
        return self.rows[self.on]

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arguments of ``plan_moves.propose``."""
        gaps = self._gaps._replace(weights=self.weights)
        return self._rng, self.limit, gaps, self._now, self._tried, self._scratch

    def propose(self) -> Ints | None:
        """int64[k, 6]: a neighbouring plan whose residency fits, a copy; None when ``TRIES`` moves in a row did not."""
        rows = plan_moves.propose(*self.arrays)
        return self.proposed(rows).copy() if rows >= 0 else None

    def proposed(self, rows: int) -> Ints:
        """int64[rows, 6]: the plan that was proposed last, of so many rows; to be read before the next."""
        return self._scratch.plan[:rows]

    def accept(self) -> None:
        """Goes to the plan that was proposed last."""
        self._now, self._tried = self._tried, self._now


def since_write(program: Program, gap: Gap) -> int:
    """Kernels from the last write of the content that a gap empties to the gap, and not over its own end."""
    n, t = len(program.kernels), gap.tensor
    back = [(gap.after - w) % n for w in program.writes[t] if w <= gap.after or program.tensors[t].persistent]
    return min([*back, (gap.after - gap.before) % n])


def _earlier(program: Program, gaps: list[Gap]) -> NDArray[np.int64]:
    """int64[gaps]: the gap of the same tensor before each, of the iteration before where it lives that long; or -1."""
    out = np.full(len(gaps), -1, dtype=np.int64)
    of: dict[int, list[int]] = {}
    for i in sorted(range(len(gaps)), key=lambda i: gaps[i].after):
        of.setdefault(gaps[i].tensor, []).append(i)
    for t, mine in of.items():
        for i, j in zip(mine, mine[-1:] + mine, strict=False):
            if i != mine[0] or program.tensors[t].persistent:
                out[i] = j
    return out
