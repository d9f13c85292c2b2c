"""Results of ``experiments.plan``: the best plans, the largest batch, and all data on its page."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from agents.search.retimed import Spread, TimesError
from experiments.common.report import Row
from experiments.plan.capture import NO_OBSTACLE, Issue
from experiments.plan.usage import Checkpoints
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.pool.device_memory import DevicePeak
from simulator.program import Program
from simulator.report import Report, Unit
from simulator.timeline import Timeline


@dataclass(frozen=True)
class Times:
    """Kernel times and their uncertainty."""

    step_ns: int | None  # a measured step to which the times are scaled; None: not given
    error: TimesError | None  # error of the times; None: unknown or zero
    note: str  # a sentence or two about the error


@dataclass(frozen=True)
class Best:
    """Best plan of a family of methods; ``plan`` and ``timeline`` are None if no plan was found."""

    family: str
    row: Row | None  # of results.jsonl; without a plan, that of the first method
    plan: Plan | None
    timeline: Timeline | None
    seconds: float  # total time of the family's methods
    skipped: tuple[str, ...] = ()  # methods skipped for lack of time
    # Bytes of device memory under the plan, and whether the device has room for them; None: tensors only.
    card: tuple[int, bool] | None = None

    @property
    def served(self) -> bool:
        """Whether a plan exists for whose blocks the device has room."""
        return self.timeline is not None and (self.card is None or self.card[1])

    @property
    def overhead(self) -> float:
        """Overhead of the plan; infinite without one."""
        return float("inf") if self.timeline is None else self.timeline.overhead


@dataclass(frozen=True)
class Largest:
    """Largest batches, and micro-batches for gradient accumulation."""

    batch: int | None = None  # batch size of the given step; None: unknown
    without: int = 0  # largest batch without a plan; 0: none
    # Largest batch found for which ``planner`` has a plan with an overhead of at most ``most_overhead``; None: not
    # searched.
    planned: int | None = None
    planner: str = ""
    most_overhead: float = 0.0  # as a fraction of the ideal time
    checked: bool = False  # whether a capture confirmed the peak at ``without``
    # Size and number of micro-batches that make up the original batch and fit without a plan, including held
    # gradients; None: not found or not needed.
    micro: tuple[int, int] | None = None
    micro_overhead: float = 0.0  # of the micro-batches over the ideal time
    most: int = 0  # upper bound of the search
    least: int = 1  # smallest size that was tried; larger ones are its multiples
    sufficient_s: float | None = None  # planning time that would extend the search; None: the search finished
    obstacle: str = ""  # why the batch cannot be changed; "" if it can

    def including(self, best: Best | None) -> Largest:
        """Returns these results with the plan of the given batch, if it is within ``most_overhead``.

        Args:
            best: recommended plan of the given batch; None: no plan.
        """
        if self.batch is None or best is None or best.row is None or best.overhead > self.most_overhead:
            return self
        if self.planned is None or self.planned >= self.batch:
            return self
        return replace(self, planned=self.batch, planner=best.row["planner"])


@dataclass(frozen=True)
class Change:
    """Row of the table *What if*: a change of the step, alone or together with a plan."""

    name: str
    nbytes: int  # device memory in bytes, or that of tensors if only they are known
    overhead: float  # time over that of the step as it is in unlimited memory, minus 1
    exactness: str  # how the trained bits differ from those of the step as it is
    fits: bool


@dataclass(frozen=True)
class Order:
    """Place of the optimizer's update: after the backward pass, or in it.

    Pairs are for the update after the backward pass and in it.
    """

    in_backward: bool  # whether the answer is for the update in the backward pass
    peak_bytes: tuple[int, int] | None = None  # without a plan; None: only one order is known
    overheads: tuple[float, float] | None = None  # of the first plans, which decide; None: not needed
    obstacle: str = ""  # why the update cannot be in the backward pass, and what to change
    changed: tuple[int, float] | None = None  # peak after that change, and overhead of a first plan; None: unknown


@dataclass(frozen=True)
class Answer:
    """Result of ``experiments.plan``."""

    program: Program
    machine: Machine
    limit: int
    mode: str
    page: Report  # of the recommended plan, or of the unplanned step if no plan is recommended
    before: Timeline  # without a plan
    families: tuple[Best, ...]  # rows of the table; empty if planning is not needed or not possible
    best: Best | None  # recommended plan; None if the step fits without a plan or no plan was found
    least_bytes: int  # certified lower bound of the feasible limits
    reached_bytes: int | None  # smallest limit for which a plan was found
    floor: float | None  # certified lower bound of the overhead; None if unknown
    largest: Largest
    seconds: float  # total wall-clock time
    sequence: Largest = Largest()  # as ``largest``, of the sequence length  # frozen
    what_if: tuple[Change, ...] = ()  # empty: not computed
    folder: Path | None = None  # absolute path of the run directory; None: unknown
    card: DevicePeak | None = None  # breakdown of device memory without a plan; None if unknown
    # Device memory in bytes, of which ``limit`` is left for tensors; None if the limit is a peak fraction.
    memory: int | None = None
    times: Times | None = None
    spread: Spread | None = None  # overhead of the plan under perturbed kernel times; None if unknown or without a plan
    budget: float = 0.0  # planning time in seconds
    host: int | None = None  # host memory with which a plan exists; None if host memory is not the bottleneck
    slowest: tuple[list[str], list[list[str]]] = ([], [])  # headers and rows of the table of the slowest kernels
    issue: Issue = NO_OBSTACLE
    order: Order = Order(in_backward=False)
    run_code: str = ""  # Python code that trains under the recommended plan
    checkpoints: Checkpoints | None = None  # equivalent of the plan in plain PyTorch; None if it has no equivalent

    @cached_property
    def size(self) -> Unit:
        """Size unit used on the page: that of the step, with enough digits to distinguish the compared values."""
        required, available = self.required_and_available
        distinct = [(required, available), (self.limit, self.reached_bytes or self.least_bytes)]
        return Unit.for_sizes(required, distinct=distinct)

    @property
    def after(self) -> Timeline | None:
        """Timeline of the step under the recommended plan; None without one."""
        return None if self.best is None else self.best.timeline

    @property
    def required_and_available(self) -> tuple[int, int]:
        """Required and available bytes, of the device or, if ``memory`` is None, of tensors only."""
        if self.card is None or self.memory is None:
            return self.program.peak_bytes, self.limit
        return self.card.nbytes, self.memory

    @property
    def fits(self) -> bool:
        """Whether the step fits without a plan."""
        return self.program.peak_bytes <= self.limit

    @property
    def card_planned(self) -> int | None:
        """Device memory under the recommended plan: its blocks, as the executor places them, and the other parts."""
        return None if self.best is None or self.best.card is None else self.best.card[0]
