"""Linear programs with a bound from the dual solution, valid regardless of solver tolerances.

Every column ranges from 0 to a finite bound. Weak duality: for any multipliers u <= 0 of the inequalities A x <= b and
v of the equations D x = e, and every feasible x, c x >= u b + v e + min over the box of (c - u A - v D) x. The
solver's multipliers make the bound tight.
"""

from __future__ import annotations

import heapq
import itertools
import time
from _thread import start_new_thread
from collections.abc import Iterable, Sequence
from threading import Event
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # SciPy is slow to import, so it is imported when a program is solved
    from scipy.sparse import csr_matrix

MIN_GAIN = 1e-4  # fraction of the bound: below this gain, further rows are not worth another solve
INTEGRAL = 1e-5  # integrality tolerance of a sum, above the solver's tolerance of its columns
WAKE_S = 0.2  # seconds until a thread that waits for a solve looks for signals
OPTIONS = {  # of HiGHS
    "output_flag": False,
    "solver": "simplex",  # a warm start needs a basis
    "simplex_dual_edge_weight_strategy": 1,  # Devex
    "primal_feasibility_tolerance": 1e-9,
    "dual_feasibility_tolerance": 1e-9,
}

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
        self.lazy_rows: list[Row] = []  # rows that rarely bind

    def column(self, upper: float = 1.0, cost: float = 0.0) -> int:
        """Adds a column with bounds 0 and ``upper`` and this cost; returns its index."""
        self.cost.append(cost)
        self.upper.append(upper)
        return len(self.cost) - 1

    def columns(self, count: int, upper: float = 1.0) -> list[int]:
        """Adds ``count`` columns of cost 0 with bounds 0 and ``upper``; returns their indices."""
        return [self.column(upper) for _ in range(count)]

    def row(self, terms: Iterable[tuple[int, float]], right: float) -> None:
        """Adds sum(coefficient * column) <= right; ``terms``: (column, coefficient)."""
        self.rows.append((list(terms), right))

    def equation(self, terms: Iterable[tuple[int, float]], right: float) -> None:
        """Adds sum(coefficient * column) = right; ``terms``: (column, coefficient)."""
        self.equations.append((list(terms), right))


class Solver:
    """HiGHS on a linear program, warm-started from the previous optimum.

    Args:
        linear: columns, equations and rows; later additions to it do not reach the solver.
        deadline: deadline on ``time.monotonic()``; solves past it raise TimeoutError.
    """

    def __init__(self, linear: Linear, deadline: float = np.inf) -> None:
        import highspy

        self.cost = np.array(linear.cost)
        self.upper = np.array(linear.upper)
        count = len(linear.equations)
        self.matrix, self.high = matrix_of([*linear.equations, *linear.rows], len(self.cost))
        self.low = np.concatenate([self.high[:count], np.full(len(linear.rows), -np.inf)])
        self._deadline = deadline
        self.work = 0.0  # steps of the simplex times rows, so far
        self._highs = highspy.Highs()
        self._highs.HandleUserInterrupt = True  # it looks for cancelSolve
        for option, value in OPTIONS.items():
            self._highs.setOptionValue(option, value)
        lp = highspy.HighsLp()
        lp.num_col_ = len(self.cost)
        lp.num_row_ = len(self.low)
        lp.col_cost_ = self.cost
        lp.col_lower_ = np.zeros_like(self.upper)
        lp.col_upper_ = self.upper
        lp.row_lower_ = self.low
        lp.row_upper_ = self.high
        part = lp.a_matrix_
        matrix = self.matrix
        part.format_ = highspy.MatrixFormat.kRowwise
        part.start_ = matrix.indptr
        part.index_ = matrix.indices
        part.value_ = matrix.data
        self._highs.passModel(lp)
        self._lazy, self._lazy_right = matrix_of(linear.lazy_rows, len(self.cost))  # rarely binding rows not added yet

    def _column(self, upper: float, cost: float) -> int:
        """Adds a column with bounds 0 and ``upper``, in no row yet."""
        self._highs.addCol(cost, 0.0, upper, 0, np.empty(0, np.int32), np.empty(0))
        self.cost, self.upper = np.append(self.cost, cost), np.append(self.upper, upper)
        self.matrix.resize(len(self.low), len(self.cost))
        return len(self.cost) - 1

    def _rows(self, matrix: csr_matrix, right: NDArray[np.float64]) -> None:
        """Adds the rows matrix @ x <= right."""
        from scipy.sparse import vstack

        low = np.full(len(right), -np.inf)
        start = matrix.indptr[:-1].astype(np.int32)
        self._highs.addRows(len(right), low, right, matrix.nnz, start, matrix.indices, matrix.data)
        self.matrix = vstack([self.matrix, matrix], format="csr")
        self.low, self.high = np.concatenate([self.low, low]), np.concatenate([self.high, right])

    def optimum(self) -> Solution | None:
        """Returns the optimum, or None if the program is infeasible.

        Rarely binding rows are added only when violated, until the gain becomes small.

        Raises:
            RuntimeError: the solver failed.
        """
        solution = self._optimum()
        while solution is not None:
            is_violated = self._lazy @ solution.x[: self._lazy.shape[1]] - self._lazy_right > 1e-7
            if not is_violated.any():
                break
            self._rows(self._lazy[is_violated], self._lazy_right[is_violated])
            self._lazy = self._lazy[~is_violated]
            self._lazy_right = self._lazy_right[~is_violated]
            old_bound = solution.bound
            solution = self._optimum()
            if solution is not None and solution.bound < old_bound + MIN_GAIN * abs(old_bound):
                break
        return solution

    def _optimum(self) -> Solution | None:
        from highspy import HighsModelStatus

        if self._deadline < np.inf:  # HiGHS accumulates the time of all solves
            remaining = max(self._deadline - time.monotonic(), 0.0)
            self._highs.setOptionValue("time_limit", self._highs.getRunTime() + remaining)
        self._run()
        self.work += self._highs.getInfo().simplex_iteration_count * len(self.low)
        status = self._highs.getModelStatus()
        if status in (HighsModelStatus.kInfeasible, HighsModelStatus.kUnboundedOrInfeasible):  # every column is bounded
            return None
        if status == HighsModelStatus.kTimeLimit:
            raise TimeoutError
        solution = self._highs.getSolution()
        if not solution.dual_valid:
            raise RuntimeError(
                f"HiGHS failed on the floor's linear program: {self._highs.modelStatusToString(status)}; report it"
            )
        return Solution(self.bound(np.array(solution.row_dual)), np.array(solution.col_value))

    def _run(self) -> None:
        """Solves in another thread, so that Ctrl-C and the deadline of ``within`` reach this one and end the solve."""
        ended = Event()  # an interrupted Thread.join takes its thread for ended

        stop: BaseException | None = None

        def solve() -> None:
            nonlocal stop
            try:
                self._highs.run()
            except BaseException as error:
                stop = error
            finally:
                ended.set()

        start_new_thread(solve, ())
        while not ended.is_set():
            try:
                while not ended.wait(WAKE_S):  # a signal just before the thread blocks does not wake it
                    pass
            except BaseException as error:  # TimeUp repeats; Ctrl-C comes before it
                self._highs.cancelSolve()
                stop = error if stop is None or isinstance(error, KeyboardInterrupt) else stop
        if stop is not None:
            raise stop

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
            rounds: maximum number of rounds of cuts.
            work: budget of simplex steps times rows after the first optimum; no round starts beyond it.

        Returns:
            The optimum of the last round; None if the program is infeasible.
        """
        solution = self.optimum()
        self.work = 0.0
        for _ in range(rounds):
            if solution is None or self.work > work:
                break
            # Each round cuts off the present optimum.
            cuts = [cut for row in knapsacks if (cut := rounding_cut(row, solution.x)) is not None]
            if not cuts:
                break
            self._rows(*matrix_of(cuts, len(self.cost)))
            old_bound = solution.bound
            solution = self.optimum()
            if solution is None or solution.bound < old_bound + MIN_GAIN * max(1.0, abs(old_bound)):
                break
        return solution

    def branch(
        self, root: Solution, integer_sums: Sequence[tuple[Terms, float]], nodes: int, work: float = np.inf
    ) -> Solution:
        """Returns the optimum with integer sums of columns, as far as branch and bound proves within its node limit.

        The least bound of the leaves is a bound. Sums may be violated at a price that no optimum pays, so that every
        leaf has a dual solution.

        Args:
            root: optimum without branching.
            integer_sums: the sums, each with its weight in the branching choice.
            nodes: node limit.
            work: budget as in ``cut``, reduced by the work done there.
        """
        from highspy import HighsBasisStatus

        if nodes <= 0 or not integer_sums:
            return root
        # A violated sum costs 20 times the root's bound, which no optimum pays.
        slack = self._column(1.0, 20.0 * max(1.0, root.bound))
        root = Solution(root.bound, np.append(root.x, 0.0))
        matrix, weight = matrix_of(integer_sums, len(self.cost))
        count = itertools.count()
        pairs: dict[int, int] = {}  # sum: index of its upper-bound row; the next row is its lower bound
        limits: dict[int, float] = {}  # right sides of the currently active branching rows
        leaves = [(root.bound, next(count), dict[int, float](), root, self._highs.getBasis())]
        while nodes > 0 and self.work <= work:
            bound, _, rights, parent, basis = leaves[0]
            sums = matrix @ parent.x
            distance = np.abs(sums - np.round(sums))
            if distance.max() < INTEGRAL:
                break
            # Branches on the heaviest sum that is far from an integer: sum <= low, or sum >= low + 1.
            i = int((weight * np.where(distance < INTEGRAL, 0, distance)).argmax())
            terms = integer_sums[i][0]
            low = float(np.floor(sums[i]))
            if i not in pairs:
                # The rows stay in the solver for all nodes. A right side of infinity turns a row off.
                slack_term = (slack, -float(len(terms)) - 1)
                pairs[i] = len(self.low)
                rows: list[Row] = [([*((c, s * f) for c, f in terms), slack_term], np.inf) for s in (1.0, -1.0)]
                self._rows(*matrix_of(rows, len(self.cost)))
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
                child_basis = basis if solved is None else self._highs.getBasis()
                # A child without an optimum keeps its parent's bound, which is valid for it too.
                solved = solved or Solution(bound, parent.x)
                heapq.heappush(leaves, (max(bound, solved.bound), next(count), child, solved, child_basis))
            nodes -= 2
        return Solution(leaves[0][0], root.x)


def matrix_of(rows: Sequence[Row], columns: int) -> tuple[csr_matrix, NDArray[np.float64]]:
    """Returns the sparse matrix (repeated columns of a row summed) and the right sides."""
    from scipy.sparse import csr_matrix

    indices = np.array([c for terms, _ in rows for c, _ in terms], dtype=np.int32)
    values = np.array([v for terms, _ in rows for _, v in terms], dtype=np.float64)
    ends = np.cumsum([0, *(len(terms) for terms, _ in rows)]).astype(np.int32)
    matrix = csr_matrix((values, indices, ends), shape=(len(rows), columns))
    matrix.sum_duplicates()
    return matrix, np.array([right for _, right in rows], dtype=np.float64)


def rounding_cut(row: Row, x: NDArray[np.float64]) -> Row | None:
    """Returns the most violated mixed-integer rounding cut of ``row`` at x, or None if none is violated.

    Columns above 1/2 in x are complemented, and the row is divided by one of its coefficients.

    Source: Marchand and Wolsey, "Aggregation and mixed integer rounding to solve MIPs" (Operations Research 2001),
    without aggregation.
    """
    columns = np.array([c for c, _ in row[0]])
    a = np.array([v for _, v in row[0]])
    value = x[columns]
    # Dividing by a fractional column's coefficient makes that coefficient an integer, which rounding leaves as it is.
    is_fractional = (value > 1e-6) & (value < 1 - 1e-6)
    is_flipped = value > 0.5
    b = row[1] - a[is_flipped].sum()
    a = np.where(is_flipped, -a, a)
    value = np.where(is_flipped, 1 - value, value)
    best = 1e-4
    cut = None
    for step in np.unique(np.abs(a[is_fractional])):
        for divisor in (step, step / 2, step / 4):
            fraction = b / divisor - np.floor(b / divisor)
            if not divisor or not 0.01 < fraction < 0.99:  # else f is large or the gain small
                continue
            scaled = a / divisor
            floors = np.floor(scaled)
            f = floors + np.maximum(0.0, scaled - floors - fraction) / (1 - fraction)
            right = np.floor(b / divisor)
            violation = (f @ value - right) / max(float(np.linalg.norm(f)), 1e-9)
            if violation > best:
                coefficients = np.where(is_flipped, -f, f)
                terms = [(int(c), float(v)) for c, v in zip(columns, coefficients, strict=True) if v]
                best = violation
                cut = (terms, float(right - f[is_flipped].sum()) + 1e-9)
    return cut
