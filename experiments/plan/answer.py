"""What ``experiments.plan`` found: the best plans, the largest batch, and all that its page shows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from agents.search.other_times import Spread, TimesError
from experiments.common.report import Row
from experiments.plan.how_to_run import Checkpoints
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.pool.card import CardPeak
from simulator.program import Program
from simulator.report import Report, Unit
from simulator.timeline import Timeline


@dataclass(frozen=True)
class Times:
    """What is known of the kernel times.

    Attributes:
        step_ns: a measured step, to which they are scaled; None: there is none.
        error: None: not known, or there is none.
        said: a sentence or two about it.
    """

    step_ns: int | None
    error: TimesError | None
    said: str


@dataclass(frozen=True)
class Best:
    """The best plan of a family of methods.

    Attributes:
        row: of results.jsonl; of a family without a plan that of the method which came nearest.
        plan, timeline: None if there is none.
        seconds: that all methods of the family took.
        left_out: methods that there was no time for.
        card: bytes that the card counts under the plan, and whether its allocator serves it; None: only tensors count.
    """

    family: str
    row: Row | None
    plan: Plan | None
    timeline: Timeline | None
    seconds: float
    left_out: tuple[str, ...] = ()
    card: tuple[int, bool] | None = None

    @property
    def served(self) -> bool:
        """There is a plan, and it fits the card, not its tensors alone."""
        return self.timeline is not None and (self.card is None or self.card[1])

    @property
    def overhead(self) -> float:
        """Of the plan; infinite without one."""
        return float("inf") if self.timeline is None else self.timeline.overhead


@dataclass(frozen=True)
class Largest:
    """The largest batch, and smaller ones whose gradients are added up.

    Attributes:
        own: examples of the step as it was given; None: not known.
        without: the largest batch without a plan; 0: none.
        planned: the largest batch found that fits with a plan of ``planner`` at an overhead of at most
            ``most_overhead``; None: not looked for.
        checked: the peak at ``without`` was captured, too, and is as foretold.
        micro: size and number of micro-batches that make up the own batch and fit without a plan, gradients held;
            None: there are none, or nothing needs to be split. They cost ``micro_overhead`` of the ideal time.
        most: nothing larger was looked at.
        goes_on: seconds of planning with which the search for ``planned`` gets further; None: it came to its end.
        why: why nothing is known, a sentence; "" if it is.
    """

    own: int | None = None
    without: int = 0
    planned: int | None = None
    planner: str = ""
    most_overhead: float = 0.0
    checked: bool = False
    micro: tuple[int, int] | None = None
    micro_overhead: float = 0.0
    most: int = 0
    goes_on: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Answer:
    """What ``experiments.plan`` found.

    Attributes:
        page: under the recommended plan; without one, of the step as it is.
        before, after: the step without a plan, and under the recommended one; None without one.
        families: in the order of the table; empty if nothing is to be planned.
        best: the one that is recommended; None: it fits without a plan, or with none.
        least_bytes: no plan fits less memory. reached_bytes: the smallest limit with a plan that was found.
        floor: no plan has a lower overhead; None: not known.
        seconds: of wall-clock time, all in all. budget: of planning.
        card: the parts of what the card counts without a plan; None: not known.
        memory: bytes of the card, of which ``limit`` is left for tensors; None: the limit is a fraction of their peak.
        spread: what the recommended plan costs under other times; None: there is no plan, or it is not known.
        host: bytes of host memory with which there is a plan; None: it is not the host that is too small.
        slowest: heads and rows of the table of the slowest kernels.
        run_it: lines of Python that train under the recommended plan.
        checkpoints: the recommended plan as plain PyTorch does it; None: it does more than that.
    """

    program: Program
    machine: Machine
    limit: int
    mode: str
    page: Report
    before: Timeline
    families: tuple[Best, ...]
    best: Best | None
    least_bytes: int
    reached_bytes: int | None
    floor: float | None
    largest: Largest
    seconds: float
    card: CardPeak | None = None
    memory: int | None = None
    times: Times | None = None
    spread: Spread | None = None
    budget: float = 0.0
    host: int | None = None
    slowest: tuple[list[str], list[list[str]]] = ([], [])
    run_it: str = ""
    checkpoints: Checkpoints | None = None

    @cached_property
    def size(self) -> Unit:
        """All sizes are said in one unit, with digits that tell apart what is compared."""
        need, there = self.compared
        apart = [(need, there), (self.limit, self.reached_bytes or self.least_bytes)]
        return Unit.of(need, there, self.program.peak_bytes, apart=apart)

    @property
    def after(self) -> Timeline | None:
        """The step under the recommended plan; None without one."""
        return None if self.best is None else self.best.timeline

    @property
    def compared(self) -> tuple[int, int]:
        """What is needed without a plan, and what there is: of the card or, where that is not asked, of tensors."""
        if self.card is None or self.memory is None:
            return self.program.peak_bytes, self.limit
        return self.card.nbytes, self.memory

    @property
    def fits(self) -> bool:
        """Without a plan."""
        return self.program.peak_bytes <= self.limit

    @property
    def card_planned(self) -> int | None:
        """What the card counts under the recommended plan: its blocks by PyTorch's allocator, the rest as without."""
        return None if self.best is None or self.best.card is None else self.best.card[0]
