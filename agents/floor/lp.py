"""Linear programs with a bound from the dual solution, valid regardless of solver tolerances.

Every column ranges from 0 to a finite bound. Weak duality: for any multipliers u <= 0 of the inequalities A x <= b and
v of the equations D x = e, and every feasible x, c x >= u b + v e + min over the box of (c - u A - v D) x. The
solver's multipliers make the bound tight.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # SciPy is slow to import, so it is imported when a program is solved
    from scipy.sparse import csr_matrix

ENOUGH = 1e-4  # fraction of the bound: cutting stops below this gain per round
BROKEN = 1e-7  # violation tolerance of rows
WHOLE = 1e-5  # integrality tolerance
FINE = 20.0  # penalty of a violated sum, in units of the root bound
DEVEX = 1  # simplex_dual_edge_weight_strategy
TOLERANCES = {"primal_feasibility_tolerance": 1e-9, "dual_feasibility_tolerance": 1e-9}
OPTIONS = {"output_flag": False, "solver": "simplex", "simplex_dual_edge_weight_strategy": DEVEX, **TOLERANCES}

Terms = Sequence[tuple[int, float]]  # (column, coefficient)
Row = tuple[Terms, float]  # sum of coefficient x column <= right side


class Solution(NamedTuple):
    """Result of a solve."""

    bound: float  # certified lower bound
    x: NDArray[np.float64]  # solver's optimum, within its tolerances


class Linear:
    """Minimization of sum(cost * column) subject to rows."""

    def __init__(self) -> None:
        self.cost: list[float] = []
        self.upper: list[float] = []
        self.rows: list[Row] = []
        self.equations: list[Row] = []
        self.rarely: list[Row] = []  # rows that rarely bind

    def new(self, upper: float = 1.0, cost: float = 0.0) -> int:
        """Adds a column with bounds 0 and ``upper``."""
        self.cost.append(cost)
        self.upper.append(upper)
        return len(self.cost) - 1

    def many(self, count: int, upper: float = 1.0) -> list[int]:
        """Adds ``count`` columns."""
        return [self.new(upper) for _ in range(count)]

    def row(self, terms: Iterable[tuple[int, float]], right: float) -> None:
        """Adds sum(coefficient * column) <= right."""
        self.rows.append((list(terms), right))

    def equation(self, terms: Iterable[tuple[int, float]], right: float) -> None:
        """Adds sum(coefficient * column) = right."""
        self.equations.append((list(terms), right))


class Solver:
    """HiGHS on a linear program, warm-started from the previous optimum.

    Args:
        linear: columns, equations and rows; later additions to it do not reach the solver.
        until: deadline on ``time.monotonic()``; solves past it raise TimeoutError.
    """

    def __init__(self, linear: Linear, until: float = np.inf) -> None:
        import highspy

        self.cost, self.upper, count = np.array(linear.cost), np.array(linear.upper), len(linear.equations)
        self.matrix, self.high = matrix_of([*linear.equations, *linear.rows], len(self.cost))
        self.low = np.concatenate([self.high[:count], np.full(len(linear.rows), -np.inf)])
        self._until = until
        self.work = 0.0  # steps of the simplex times rows, so far
        self._highs = highspy.Highs()
        for option, value in OPTIONS.items():
            self._highs.setOptionValue(option, value)
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = len(self.cost), len(self.low)
        lp.col_cost_, lp.col_lower_, lp.col_upper_ = self.cost, np.zeros_like(self.upper), self.upper
        lp.row_lower_, lp.row_upper_ = self.low, self.high
        part, matrix = lp.a_matrix_, self.matrix
        part.format_ = highspy.MatrixFormat.kRowwise
        part.start_, part.index_, part.value_ = matrix.indptr, matrix.indices, matrix.data
        self._highs.passModel(lp)
        self._rarely, self._most = matrix_of(linear.rarely, len(self.cost))  # rarely binding rows not added yet

    def _column(self, upper: float, cost: float) -> int:
        """Adds a column with bounds 0 and ``upper``, in no row yet."""
        self._highs.addCol(cost, 0.0, upper, 0, np.empty(0, np.int32), np.empty(0))
        self.cost, self.upper = np.append(self.cost, cost), np.append(self.upper, upper)
        self.matrix.resize(len(self.low), len(self.cost))
        return len(self.cost) - 1

    def _rows(self, matrix: csr_matrix, right: NDArray[np.float64]) -> None:
        """Adds the rows matrix @ x <= right."""
        from scipy.sparse import vstack

        low, start = np.full(len(right), -np.inf), matrix.indptr[:-1].astype(np.int32)
        self._highs.addRows(len(right), low, right, matrix.nnz, start, matrix.indices, matrix.data)
        self.matrix = vstack([self.matrix, matrix], format="csr")
        self.low, self.high = np.concatenate([self.low, low]), np.concatenate([self.high, right])

    def optimum(self) -> Solution | None:
        """Returns the optimum, or None if the program is infeasible.

        Rarely binding rows are added only when violated, until the gain becomes small.

        Raises:
            RuntimeError: the solver failed.
        """
        found = self._optimum()
        while found is not None:
            broken = self._rarely @ found.x[: self._rarely.shape[1]] - self._most > BROKEN
            if not broken.any():
                break
            self._rows(self._rarely[broken], self._most[broken])
            self._rarely, self._most = self._rarely[~broken], self._most[~broken]
            before, found = found.bound, self._optimum()
            if found is not None and found.bound < before + ENOUGH * abs(before):
                break
        return found

    def _optimum(self) -> Solution | None:
        from highspy import HighsModelStatus

        if self._until < np.inf:  # HiGHS accumulates the time of all solves
            left = max(self._until - time.monotonic(), 0.0)
            self._highs.setOptionValue("time_limit", self._highs.getRunTime() + left)
        self._highs.run()
        self.work += self._highs.getInfo().simplex_iteration_count * len(self.low)
        status = self._highs.getModelStatus()
        if status in (HighsModelStatus.kInfeasible, HighsModelStatus.kUnboundedOrInfeasible):  # every column is bounded
            return None
        if status == HighsModelStatus.kTimeLimit:
            raise TimeoutError
        found = self._highs.getSolution()
        if not found.dual_valid:
            raise RuntimeError(f"HiGHS failed on the floor's linear program: {self._highs.modelStatusToString(status)}")
        return Solution(self.bound(np.array(found.row_dual)), np.array(found.col_value))

    def bound(self, multipliers: NDArray[np.float64]) -> float:
        """Returns a lower bound on the cost of every x, for any multipliers of the rows.

        Positive multipliers apply to left sides and negative ones to right sides; those of a missing side count as 0.
        """
        side = np.where(multipliers > 0, self.low, self.high)
        y = np.where(np.isfinite(side), multipliers, 0.0)
        reduced = self.cost - self.matrix.T @ y
        return float((y * np.where(np.isfinite(side), side, 0.0)).sum() + (np.minimum(reduced, 0.0) * self.upper).sum())

    def cut(self, knapsacks: Sequence[Row], rounds: int, work: float = np.inf) -> Solution | None:
        """Returns the optimum with mixed-integer rounding cuts.

        Args:
            knapsacks: rows over 0/1 columns that hold in every plan; cuts are derived from them.
            work: budget of simplex steps times rows after the first optimum; no round starts beyond it.
        """
        found = self.optimum()
        self.work = 0.0
        for _ in range(rounds):
            if found is None or self.work > work:
                break
            new = [cut for row in knapsacks if (cut := rounded(row, found.x)) is not None]
            if not new:
                break
            self._rows(*matrix_of(new, len(self.cost)))
            before, found = found.bound, self.optimum()
            if found is None or found.bound < before + ENOUGH * max(1.0, abs(before)):
                break
        return found

    def branch(
        self, root: Solution, whole: Sequence[tuple[Terms, float]], nodes: int, work: float = np.inf
    ) -> Solution:
        """Returns the optimum with integer sums of columns, as far as branch and bound proves within its node limit.

        The least bound of the leaves is a bound. Sums may be violated at a price that no optimum pays, so that every
        leaf has a dual solution.

        Args:
            whole: the sums, each with its weight in the branching choice.
            work: budget as in ``cut``, reduced by the work done there.
        """
        from highspy import HighsBasisStatus

        if nodes <= 0 or not whole:
            return root
        slack = self._column(1.0, FINE * max(1.0, root.bound))
        root = Solution(root.bound, np.append(root.x, 0.0))
        matrix, weight = matrix_of(whole, len(self.cost))
        count = itertools.count()
        pairs: dict[int, int] = {}  # sum: index of its upper-bound row; the next row is its lower bound
        limits: dict[int, float] = {}  # right sides of the currently active branching rows
        leaves = [(root.bound, next(count), dict[int, float](), root, self._highs.getBasis())]
        while nodes > 0 and self.work <= work:
            bound, _, rights, found, basis = leaves[0]
            sums = matrix @ found.x
            off = np.abs(sums - np.round(sums))
            if off.max() < WHOLE:
                break
            i = int((weight * np.where(off < WHOLE, 0, off)).argmax())
            terms, low = whole[i][0], float(np.floor(sums[i]))
            if i not in pairs:
                off_by = (slack, -float(len(terms)) - 1)
                pairs[i] = len(self.low)
                both: list[Row] = [([*((c, s * f) for c, f in terms), off_by], np.inf) for s in (1.0, -1.0)]
                self._rows(*matrix_of(both, len(self.cost)))
            heapq.heappop(leaves)
            for row, right in ((pairs[i], low), (pairs[i] + 1, -low - 1)):
                child = {**rights, row: min(right, rights.get(row, np.inf))}
                for k in limits.keys() | child.keys():
                    if limits.get(k) != child.get(k):
                        self.high[k] = child.get(k, np.inf)
                        self._highs.changeRowBounds(k, -np.inf, self.high[k])
                limits = child
                # Warm start from the parent's optimum; rows added since are non-binding in it.
                basis.row_status += [HighsBasisStatus.kBasic] * (len(self.low) - len(basis.row_status))
                self._highs.setBasis(basis)
                solved = self.optimum()
                mine = basis if solved is None else self._highs.getBasis()
                solved = solved or Solution(bound, found.x)
                heapq.heappush(leaves, (max(bound, solved.bound), next(count), child, solved, mine))
            nodes -= 2
        return Solution(leaves[0][0], root.x)


def matrix_of(rows: Sequence[Row], columns: int) -> tuple[csr_matrix, NDArray[np.float64]]:
    """Returns the sparse matrix (repeated columns of a row summed) and the right sides."""
    from scipy.sparse import csr_matrix

    at = np.array([c for terms, _ in rows for c, _ in terms], dtype=np.int32)
    values = np.array([v for terms, _ in rows for _, v in terms], dtype=np.float64)
    ends = np.cumsum([0, *(len(terms) for terms, _ in rows)]).astype(np.int32)
    matrix = csr_matrix((values, at, ends), shape=(len(rows), columns))
    matrix.sum_duplicates()
    return matrix, np.array([right for _, right in rows], dtype=np.float64)


def rounded(row: Row, x: NDArray[np.float64]) -> Row | None:
    """Returns the most violated mixed-integer rounding cut of ``row`` at x, or None if none is violated.

    Columns above 1/2 in x are complemented, and the row is divided by one of its coefficients.

    Source: Marchand and Wolsey, "Aggregation and mixed integer rounding to solve MIPs" (Operations Research 2001),
    without aggregation.
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
