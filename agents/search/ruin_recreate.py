"""Ruin and recreate for recompute-only plans: a greedy plan, of which a part is undone and made again, many times.

After Schrimpf et al., "Record Breaking Optimization Results Using the Ruin and Recreate Principle" (Journal of
Computational Physics, 2000), with the published greedy rule for choosing tensors to drop. A plan that only recomputes
waits for nothing: its time is that of its chains, its planned residency says whether it fits. The excess of a plan is
its bytes above the limit, summed over the kernels.

Recreate: at the kernel with the largest excess, of all gaps that are open there, make the one change (drop, drop and
keep, change between the two, fill) that takes the most excess away per ns of iteration time it adds; until there is
no excess. Then undo every decision whose removal, or other way of recovery, fits and is faster. Ruin: take decisions
out, either a few anywhere or some of one neighbourhood in the program. Read on in ``RuinRecreate.search``.
"""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from agents.planner import Rows, rows_for
from simulator.compiled.encoding import EXTRA
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.modes import KEPT, RECOMPUTED, STAYS, ways_to_empty
from simulator.program import Program

FILLED, DROP, KEEP = STAYS, RECOMPUTED, KEPT  # what a plan does with a gap
NEAR_BEST = 1e-3  # of the ideal time: a plan that is worse than the best by less may be ruined next
NEAR, FEW, ANY = 12, 5, 0.7  # ruins: largest neighbourhood, most decisions anywhere, share of a neighbourhood

State = NDArray[np.int64]  # (gaps,)


class RuinRecreate:
    """The search on one program under one limit.

    Args:
        limit: bytes.
        min_bytes: tensors below this size stay.
        calls: simulator calls at most.
        patience: rounds without a better plan, after which it stops.

    Attributes:
        calls: simulator calls made.
    """

    def __init__(
        self, program: Program, machine: Machine, limit: int, min_bytes: int, calls: int, patience: int, seed: int
    ) -> None:
        self.gaps = [g for g in program.gaps(min_bytes) if ways_to_empty(program, g, "recompute")]
        self.limit, self.budget, self.patience = limit, calls, patience
        self.engine = Engine(program, machine, 2**62, iterations=1)  # each iteration of such a plan is like the first
        self._rows = rows_for(self.gaps, RECOMPUTED)
        _, self._after, self._before = np.array(self.gaps, np.int64).reshape(-1, 3).T
        self._rng = random.Random(seed)

    @property
    def calls(self) -> int:
        """Simulator calls so far."""
        return self.engine.calls

    def search(self) -> Rows | None:
        """int64[n, 6]: the best plan found, None where none fits."""
        best: State | None = None
        best_ns = 0
        # The greedy steps of different kinds fail at different limits.
        for start in (FILLED, KEEP, DROP):
            for ways in ((DROP, KEEP), (KEEP,), (DROP,)):
                state = np.full(len(self.gaps), start, dtype=np.int64)
                ns = self._recreate(state, ways)
                if ns is not None and (best is None or ns < best_ns):
                    best, best_ns = state, ns
            if best is not None:
                break
        if best is None:
            return None
        dull, now = 0, best
        near = int(NEAR_BEST * max(self.engine.program.ideal_ns, 1))
        while dull < self.patience and self.calls < self.budget and best_ns > self.engine.program.ideal_ns:
            state = now.copy()
            self._ruin(state)
            ns = self._recreate(state, (DROP, KEEP), 1.0, best_ns + 4 * near)
            dull += 1
            if ns is not None and ns <= best_ns + near:
                now = state
                if ns < best_ns:
                    best, best_ns, dull = state, ns, 0
        return self.rows(best)

    def rows(self, state: State) -> Rows:
        """int64[n, 6]: the rows of a state."""
        on = state != FILLED
        rows: Rows = self._rows[on]
        rows[:, EXTRA] = state[on] == KEEP
        return rows

    def _excess(self, state: State) -> tuple[NDArray[np.int64], int]:
        """int64[kernels]: bytes above the limit; iteration time."""
        ns = self.engine.score(self.rows(state)).iteration_ns
        return np.maximum(self.engine.last_residency() - self.limit, 0), ns

    def _ruin(self, state: State) -> None:
        on = np.flatnonzero(state != FILLED).tolist()
        rng = self._rng
        if rng.random() < 0.5:
            at = self.gaps[rng.choice(on)].after
            near = sorted(on, key=lambda i: abs(self.gaps[i].after - at))[: rng.randint(1, NEAR)]
            out = [i for i in near if rng.random() < ANY]
        else:
            out = rng.sample(on, min(len(on), rng.randint(1, FEW)))
        state[out] = FILLED

    def _recreate(self, state: State, ways: tuple[int, ...], noise: float = 0.0, hope: int | None = None) -> int | None:
        """Makes ``state`` fit, then faster; its iteration time, or None where no change takes excess away.

        Args:
            noise: the worth of a change is multiplied by a random number from 1 to 1 + ``noise``.
            hope: a plan that takes longer is left as it is; None: none.
        """
        excess, ns = self._excess(state)
        while excess.any():
            total, best_worth = int(excess.sum()), 0.0
            k = int(excess.argmax())
            for i in np.flatnonzero((self._after <= k) & (k <= self._before)).tolist():
                old = int(state[i])
                for way in (*ways, FILLED):
                    if way == old:
                        continue
                    state[i] = way
                    left, then_ns = self._excess(state)
                    worth = (total - int(left.sum())) / max(then_ns - ns, 1) * (1.0 + noise * self._rng.random())
                    if worth > best_worth:
                        best_worth, change, after = worth, (i, way), (left, then_ns)
                state[i] = old
            if best_worth <= 0.0:
                return None
            state[change[0]] = change[1]
            excess, ns = after
        return self._prune(state, ns) if hope is None or ns <= hope else ns

    def _prune(self, state: State, ns: int) -> int:
        """Undoes what is not needed; the iteration time then."""
        better = True
        while better:
            better = False
            order = np.flatnonzero(state != FILLED).tolist()
            self._rng.shuffle(order)
            for i in order:
                old = int(state[i])
                for way in (FILLED, KEEP if old == DROP else DROP):
                    state[i] = way
                    excess, then_ns = self._excess(state)
                    if then_ns < ns and not excess.any():
                        ns, better = then_ns, True
                        break
                    state[i] = old
        return ns
