"""A linear program whose least value is taken from its dual, so that it is a bound whatever the solver's tolerances.

Every column goes from 0 to a finite bound. Weak duality: for any multipliers u <= 0 of the inequalities A x <= b and v
of the equations D x = e, and every x that keeps them, c x >= u b + v e + the least of (c - u A - v D) x over the box of
x. The solver's multipliers make it tight.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # SciPy takes as long to import as all else here: it is, where a program is solved
    from scipy.sparse import csr_matrix

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

    def _matrix(self, rows: Sequence[Row]) -> tuple[csr_matrix, NDArray[np.float64]]:
        from scipy.sparse import csr_matrix

        columns = np.array([c for terms, _ in rows for c, _ in terms], dtype=np.int64)
        values = np.array([v for terms, _ in rows for _, v in terms], dtype=np.float64)
        ends = np.cumsum([0, *(len(terms) for terms, _ in rows)])
        matrix = csr_matrix((values, columns, ends), shape=(len(rows), len(self.cost)))
        return matrix, np.array([right for _, right in rows], dtype=np.float64)
