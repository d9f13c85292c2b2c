"""Portfolio planner: runs several methods within a time budget and returns the best plan.

It begins with the plans of thinning.py, whatever the budget, so that it has a plan from the start. ``shares`` is the
table of the methods that follow and their shares of the time, by mode, program and time budget. Searches that converge
early are restarted. In repetitive programs annealing moves classes of gaps, from the best plan so far. LP rounding
continues from it, too, after a search of its own. README.md shows the table.

Other processes may leave this one a fraction of the processor. The methods are those that suit the processor time
within the budget, since a network or a linear program would take all of it.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from agents.floor import Floor
from agents.learned.policy import PolicySearch
from agents.planner import LEAST, NO_ROWS, Infeasible, PlannerInfo, Rows, RowsPlanner, at_least, one_of, positive, small
from agents.search.annealing import Annealing
from agents.search.budgeted import SLACK
from agents.search.lp_round import LPRound
from agents.search.rerun_search import RerunSearch
from agents.search.thinning import thinned
from simulator.compiled import warm
from simulator.compiled.encoding import rows_of
from simulator.compiled.engine import Engine, simulate
from simulator.deadline import TimeUp, within
from simulator.decisions import Recompute
from simulator.machine import Machine
from simulator.modes import MODES
from simulator.moves.classes import gap_classes
from simulator.plan import Plan

LOADING = 6.0  # seconds below which PyTorch is not loaded for the network alone
HUGE = 50_000  # kernels from which the network and restarted searches take too long


@dataclass(frozen=True)
class PortfolioOptions:
    """Division of the budget among the methods."""

    first_share: float = 0.1  # of the time, for plans of thinning.py after the first that fits
    # Annealing of repetitive programs before LP rounding: share of the time, first and last temperature, and whether
    # classes are moved. The first run keeps what is good in the start plan; all end cold, because exchanges within a
    # class change the time little.
    classes: tuple[tuple[float, float, float, bool], ...] = (
        (0.35, 3e-4, 1e-6, True),
        (0.25, 3e-5, 1e-7, True),
        (0.2, 1e-5, 1e-7, False),
    )
    measured_s: float = 0.02  # seconds from which the share of the processor is known
    lp_s: float = 3.0  # seconds from which the LP solution is accurate enough to guide a search
    search_s: float = 2e-3  # seconds of a search per kernel, at least 1 s in all
    max_searches: int = 16  # upper bound of the searches in a share of the time
    hot: tuple[float, ...] = (3e-3, 3e-2, 1e-2)  # first temperatures of successive restarts
    cold: float = 3e-5  # last temperature of all restarts
    kicks: int = 60  # of rerun_search without a time budget
    seed_step: int = 1_000  # difference between the seeds of two methods, which add small numbers to theirs


OPTIONS = PortfolioOptions()


class Share(NamedTuple):
    """One method of the portfolio, its share of the time (or of the calls), and its options if it is annealing."""

    method: str
    fraction: float
    hot: float = OPTIONS.hot[0]  # first temperature
    cold: float = OPTIONS.cold  # last temperature
    by_class: bool = True  # whether classes of gaps are moved


def shares(mode: str, kernels: int, seconds: float | None, network: bool, repetitive: bool = False) -> list[Share]:
    """Returns the methods and their shares, which sum to 1.

    Args:
        mode: "swap", "recompute" or "joint".
        kernels: number of kernels of the program.
        seconds: processor time of one core within the budget; None: unlimited.
        network: whether PyTorch is loaded, or the time allows it.
        repetitive: whether the program has classes of alike gaps.
    """
    search = "policy_search" if network and not repetitive else "annealing"
    solver = seconds is None or seconds >= OPTIONS.lp_s
    if kernels >= HUGE:
        return [Share("annealing", 0.25), Share("lp_round", 0.75)]
    if repetitive and mode != "recompute":
        runs = [Share("annealing", *run) for run in OPTIONS.classes]
        if seconds is not None and seconds < max(OPTIONS.lp_s, OPTIONS.search_s * kernels):
            return [runs[0]._replace(fraction=1.0)]
        return [*runs, Share("lp_round", 1 - sum(run.fraction for run in runs))]
    if mode == "recompute":
        rounding = [Share("lp_round", 0.2)] if solver else []
        return [Share(search, 0.1), *rounding, Share("rerun_search", 0.7 if solver else 0.9)]
    fraction = 0.5 if solver else 1.0
    rounds = 1
    if seconds is not None:
        search_s = max(OPTIONS.search_s * kernels, 1.0)
        rounds = min(max(int(fraction * seconds / search_s), 1), OPTIONS.max_searches)
    searches = [Share(search, fraction / rounds, OPTIONS.hot[i % len(OPTIONS.hot)]) for i in range(rounds)]
    return [*searches, Share("lp_round", 0.5)] if solver else searches


@dataclass(eq=False)
class Best(RowsPlanner):
    """Portfolio of the methods of ``shares``, run one after the other.

    Args:
        seconds: wall-clock budget, exceeded by at most a tenth plus one second, or by the time to compile code and make
            the first plan. The plan then depends on the computer.
        calls: approximate simulator budget instead of ``seconds``. If both are None, each method uses its own default,
            and the plan is the same on any computer.
        mode: "swap", "recompute" or "joint".
        min_bytes: size in bytes below which tensors stay resident; None: ``planner.small``.
        jobs: parallel runs, one per core; None: all cores.

    Attributes:
        floor: certified lower bound of the mode, if ``lp_round`` was among the methods; else None.
        best_ns: method -> iteration time (ns) of the best plan after its turn, or None without a plan.
    """

    facts = PlannerInfo("best", "best", family="search", slot=7, place=300, moves="joint", slow=2)

    seconds: float | None = positive(None)
    calls: int | None = at_least(LEAST, None)
    mode: str = one_of(MODES, "joint")
    min_bytes: int | None = None  # type: ignore[assignment]
    jobs: int | None = at_least(1, None)
    floor: Floor | None = field(init=False, default=None)
    best_ns: dict[str, int | None] = field(init=False, default_factory=dict)

    def choose(self, engine: Engine) -> Rows:
        """Returns the best plan found; raises Infeasible if the floor excludes every plan or no method finds one."""
        share_end = 0.0
        program = engine.program
        machine = engine.machine
        limit = engine.limit
        self.floor = None
        self.best_ns = {}
        if program.peak_bytes <= limit:
            return NO_ROWS
        if self.seconds is not None:
            _compile_search(machine)
        began = time.monotonic()
        processor_began = time.process_time()
        min_bytes = small(program) if self.min_bytes is None else self.min_bytes
        until = None if self.seconds is None else began + OPTIONS.first_share * self.seconds
        best, best_ns = thinned(engine, self.mode, min_bytes, until)
        # The final check takes one more call.
        calls = None if self.calls is None else self.calls - 1 - engine.calls
        reason = ""
        repetitive = gap_classes(program, program.gaps(min_bytes)).prob > 0
        seconds = self.seconds
        elapsed = time.monotonic() - began
        if seconds is not None and elapsed > OPTIONS.measured_s:
            seconds *= min((time.process_time() - processor_began) / elapsed, 1.0)
        network = "torch" in sys.modules or seconds is None or seconds >= LOADING
        for turn, share in enumerate(shares(self.mode, len(program.kernels), seconds, network, repetitive)):
            share_end += share.fraction
            remaining_s = None if self.seconds is None else began + share_end * self.seconds - time.monotonic()
            if best is not None and remaining_s is not None and remaining_s <= 0:
                continue
            planner = self._make_planner(share, turn, min_bytes, calls, remaining_s)
            if isinstance(planner, LPRound) or (repetitive and isinstance(planner, Annealing)):
                planner.first = best
            if isinstance(planner, Annealing):
                planner.by_class = share.by_class
            try:
                with within(None if remaining_s is None else max(remaining_s, 0.0) + SLACK):
                    rows = rows_of(planner.plan(program, machine, limit).decisions)
                ns = engine.score(rows).iteration_ns
                if ns < best_ns:
                    best = rows
                    best_ns = ns
            except Infeasible as error:
                reason = str(error).removeprefix(f"{planner.name}: ")
            except TimeUp:
                reason = reason or f"found no plan for {program.name!r} within {self.seconds} s"
            engine.calls += planner.simulator_calls
            self.floor = getattr(planner, "floor", self.floor)
            self.best_ns[share.method] = None if best is None else best_ns
            if self.floor is not None and (not self.floor.feasible or best_ns <= self.floor.iteration_ns):
                break
        if best is None:
            self.simulator_calls = engine.calls
            raise Infeasible(f"{self.name}: {reason}; raise the limit, or allow more time")
        return best

    def _make_planner(
        self, share: Share, turn: int, min_bytes: int, calls: int | None, remaining_s: float | None
    ) -> Annealing | LPRound | PolicySearch | RerunSearch:
        """Returns the planner of a method, with its share of ``calls`` or the seconds ``remaining_s``."""
        seconds = None if remaining_s is None else max(remaining_s, 1e-2)
        if share.method == "rerun_search":
            # Either the kicks or the seconds end the search; the other number is no limit in practice.
            if seconds is None:
                return RerunSearch(seconds=1e6, kicks=OPTIONS.kicks, min_bytes=min_bytes, seed=self.seed)
            return RerunSearch(seconds, kicks=10**6, min_bytes=min_bytes, seed=self.seed)
        share_calls = None if calls is None else max(int(share.fraction * calls), LEAST)
        seed = self.seed + OPTIONS.seed_step * turn
        budgets: dict[str, Any] = {"calls": share_calls, "seconds": seconds, "jobs": self.jobs}
        if share.method == "lp_round":
            return LPRound(mode=self.mode, min_bytes=min_bytes, seed=seed, **budgets)
        kind = PolicySearch if share.method == "policy_search" else Annealing
        return kind(mode=self.mode, hot=share.hot, cold=share.cold, min_bytes=min_bytes, seed=seed, **budgets)


def _compile_search(machine: Machine) -> None:
    """Compiles or loads the code of annealing: a search that is interrupted in compilation would never get beyond."""
    tiny = warm.TINY
    simulate(tiny, warm.SWAPPED, machine, 2 * tiny.peak_bytes)  # first, since the next line covers plans of swaps, too
    simulate(tiny, Plan((Recompute(0, 1, 3),)), machine, 2 * tiny.peak_bytes)
    Annealing(calls=LEAST, min_bytes=1).plan(tiny, machine, tiny.peak_bytes - 1)
