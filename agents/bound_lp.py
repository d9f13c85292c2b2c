"""A linear program whose least value is taken from its dual, so that it is a bound whatever the solver's tolerances.

Every column goes from 0 to a finite bound. Weak duality: for any multipliers u <= 0 of the inequalities A x <= b and v
of the equations D x = e, and every x that keeps them, c x >= u b + v e + the least of (c - u A - v D) x over the box of
x. The solver's multipliers make it tight.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # SciPy takes as long to import as all else here: it is, where a program is solved
    from scipy.sparse import csr_matrix

ENOUGH = 1e-4  # of the bound: a round of cuts that gains less is the last
WHOLE = 1e-5  # a sum so far from a whole number is one
FINE = 20.0  # price of a sum that is off, in bounds of the root
TOLERANCES = {"primal_feasibility_tolerance": 1e-9, "dual_feasibility_tolerance": 1e-9}

Terms = Sequence[tuple[int, float]]  # (column, coefficient), each column at most once
Row = tuple[Terms, float]  # sum of coefficient x column <= right side


class Solution(NamedTuple):
    """What a solver found."""

    bound: float  # no x costs less
    x: NDArray[np.float64]  # its own, to its tolerances


class Linear:
    """Minimise the sum of cost x column within the rows."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.rows: list[Row] = []
        self.equations: list[Row] = []

    def new(self, upper: float = 1.0, cost: float = 0.0) -> int:
        """Another column, from 0 to ``upper``."""
        self.cost.append(cost)
        self.upper.append(upper)
        return len(self.cost) - 1

    def many(self, count: int, upper: float = 1.0, cost: float = 0.0) -> NDArray[np.int64]:
        """``count`` of them."""
        self.cost += [cost] * count
        self.upper += [upper] * count
        return np.arange(len(self.cost) - count, len(self.cost))

    def row(self, terms: Iterable[tuple[int, float]], right: float) -> None:
        """sum of coefficient x column <= right."""
        self.rows.append((list(terms), right))

    def equation(self, terms: Iterable[tuple[int, float]], right: float) -> None:
        """sum of coefficient x column = right."""
        self.equations.append((list(terms), right))

    def solve(self, more: Sequence[Row] = ()) -> Solution | None:
        """The optimum with ``more`` rows; None where the solver finds that there is none.

        Raises:
            RuntimeError: the solver gave up.
        """
        from scipy.optimize import linprog

        c, upper = np.array(self.cost), np.array(self.upper)
        a, b = self._matrix([*self.rows, *more])
        d, e = self._matrix(self.equations)
        box = np.stack([np.zeros_like(upper), upper], 1)
        found = linprog(c, a, b, d, e, box, method="highs", options=TOLERANCES)
        if found.status == 2:  # infeasible
            return None
        if found.x is None:
            raise RuntimeError(f"the linear program of the floor was not solved: {found.message}")
        u, v = np.minimum(found.ineqlin.marginals, 0.0), found.eqlin.marginals
        reduced = c - a.T @ u - d.T @ v
        return Solution(float(u @ b + v @ e + (np.minimum(reduced, 0.0) * upper).sum()), found.x)

    def cut(self, knapsacks: Sequence[Row], rounds: int) -> Solution | None:
        """The optimum with rows that follow from ``knapsacks`` (rows that hold for columns of 0 and 1 in every plan):
        they are rounded where that cuts off the optimum so far."""
        found = self.solve()
        for _ in range(rounds):
            if found is None:
                break
            new = [row for row in (rounded(row, found.x) for row in knapsacks) if row is not None]
            if not new:
                break
            before = found.bound
            self.rows += new
            found = self.solve()
            if found is None or found.bound < before + ENOUGH * max(1.0, abs(before)):
                break
        return found

    def branch(self, root: Solution, whole: Sequence[tuple[Terms, float]], nodes: int) -> Solution:
        """The optimum where sums of columns are whole numbers, as far as branch and bound proves it with so many nodes.

        The least bound of the leaves is a bound; a sum may be off at a price that no optimum pays, so that every leaf
        has a dual solution.

        Args:
            whole: the sums, and what weighs in the choice of one to branch on.
        """
        slack = self.new(1.0, FINE * max(1.0, root.bound))
        root = Solution(root.bound, np.append(root.x, 0.0))
        matrix, _ = self._matrix([(terms, 0.0) for terms, _ in whole])
        weight = np.array([w for _, w in whole])
        count = itertools.count()
        leaves: list[tuple[float, int, tuple[Row, ...], Solution]] = [(root.bound, next(count), (), root)]
        while nodes > 0 and len(whole):
            bound, _, rows, found = leaves[0]
            sums = matrix @ found.x
            off = np.abs(sums - np.round(sums))
            if off.max() < WHOLE:
                break
            i = int((weight * np.where(off < WHOLE, 0, off)).argmax())
            terms, low = whole[i][0], float(np.floor(sums[i]))
            heapq.heappop(leaves)
            for sign, right in ((1.0, low), (-1.0, -low - 1)):
                more = (*rows, ([*((c, sign * f) for c, f in terms), (slack, -float(len(terms)) - 1)], right))
                child = self.solve(more)
                if child is None:
                    child = Solution(bound, found.x)
                heapq.heappush(leaves, (max(bound, child.bound), next(count), more, child))
            nodes -= 2
        return Solution(leaves[0][0], root.x)

    def _matrix(self, rows: Sequence[Row]) -> tuple[csr_matrix, NDArray[np.float64]]:
        from scipy.sparse import csr_matrix

        columns = np.array([c for terms, _ in rows for c, _ in terms], dtype=np.int64)
        values = np.array([v for terms, _ in rows for _, v in terms], dtype=np.float64)
        ends = np.cumsum([0, *(len(terms) for terms, _ in rows)])
        matrix = csr_matrix((values, columns, ends), shape=(len(rows), len(self.cost)))
        return matrix, np.array([right for _, right in rows], dtype=np.float64)


def rounded(row: Row, x: NDArray[np.float64]) -> Row | None:
    """Of the rows that follow from ``row`` for columns of 0 and 1 by mixed-integer rounding, the one that cuts off x
    most; None where none does.

    Marchand and Wolsey, "Aggregation and mixed integer rounding to solve MIPs" (Operations Research 2001), without
    aggregation: columns above 1/2 in x are replaced by 1 - column; the row is divided by one of its coefficients.
    """
    columns = np.array([c for c, _ in row[0]])
    a, at = np.array([v for _, v in row[0]]), x[columns]
    some = (at > 1e-6) & (at < 1 - 1e-6)
    turned = at > 0.5
    b = row[1] - a[turned].sum()
    a, at = np.where(turned, -a, a), np.where(turned, 1 - at, at)
    best, found = 1e-4, None
    for step in np.unique(np.abs(a[some])):
        for divisor in (step, step / 2, step / 4):
            part = b / divisor - np.floor(b / divisor)
            if not divisor or not 0.01 < part < 0.99:
                continue
            scaled = a / divisor
            whole = np.floor(scaled)
            f = whole + np.maximum(0.0, scaled - whole - part) / (1 - part)
            right = np.floor(b / divisor)
            off = (f @ at - right) / max(float(np.linalg.norm(f)), 1e-9)
            if off > best:
                back = np.where(turned, -f, f)
                terms = [(int(c), float(v)) for c, v in zip(columns, back, strict=True) if v]
                best, found = off, (terms, float(right - f[turned].sum()) + 1e-9)
    return found
