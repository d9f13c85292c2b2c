"""Common parts of all planners: the interface, candidate gaps with their planned residency, and the final check.

Planned residency is the load per kernel that a plan intends: a tensor is absent from the end of ``after`` to the
start of ``before``, as if transfers took no time. A plan of swaps fits a limit if and only if its planned residency
does: slow transfers delay kernels but need no more memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from simulator.compiled.encoding import Row, columns_of, decisions_of, row_of, rows_for
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.modes import Choice, evictions, least_residency
from simulator.plan import Plan
from simulator.program import Gap, Program
from simulator.residency import residency
from simulator.settings import at_least as at_least, check, one_of as one_of, positive as positive

MIB = 2**20
LEAST = 20  # minimum simulator calls of a search

Rows = NDArray[np.int64]  # (n, 6), its columns named in simulator/compiled/encoding.py
NO_ROWS: Rows = np.empty((0, 6), np.int64)

Family = Literal[
    "swap: AutoSwap", "swap: other heuristics", "recompute", "swap and recompute", "search", "learned", "other"
]


@dataclass(frozen=True)
class PlannerInfo:
    """Metadata of a planner: one entry for each key that its class serves, in its ``facts``.

    Attributes:
        key: name in ``agents.PLANNERS``, on command lines and in results.
        label: display name.
        paper: publication.
        family: family of methods; members share hues in plots.
        slot: index of hue and marker within the family, from 0; None: a spare one. A learned planner's policy uses the
            next slot.
        place: sort key in tables, in steps of 10; a new planner goes last.
        moves: mode (simulator.modes.MODES) that covers every plan it can return; "": its plan is empty.
        options: constructor options that turn the class into this planner.
        slow: scheduling priority when many planners are started; 0: in order.
        learned: whether it needs training.
        addressed: its plan is valid only for the addresses it was made with, so that workspaces must not change.
    """

    key: str
    label: str
    paper: str = ""
    family: Family = "other"
    slot: int | None = None
    place: int = 1000
    moves: str = "joint"
    options: Mapping[str, str] = field(default_factory=dict)
    slow: int = 0
    learned: bool = False
    addressed: bool = False


class Infeasible(Exception):
    """Raised if a planner finds no plan that fits the limit; the message gives the reason in one sentence."""


class Planner(Protocol):
    """Plans one program on one machine under one limit.

    Attributes:
        name: key in ``agents.PLANNERS``.
        simulator_calls: simulator calls of the last ``plan``, including the final check.
    """

    name: str
    simulator_calls: int

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """Returns a plan that fits ``limit`` (bytes, persistent tensors included).

        Raises:
            Infeasible: the planner finds none.
        """
        ...


@dataclass(eq=False)
class RowsPlanner:
    """Base class of planners: a subclass is a dataclass of its options and returns the rows of a plan in ``choose``.

    Args:
        min_bytes: tensors smaller than this stay in device memory.
        seed: random seed; deterministic methods ignore it.
    """

    facts: ClassVar[PlannerInfo | tuple[PlannerInfo, ...]]
    _: KW_ONLY
    min_bytes: int = MIB
    seed: int = 0
    name: str = field(init=False)
    simulator_calls: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        check(self)
        infos = self.facts if isinstance(self.facts, tuple) else (self.facts,)
        self.name = next(f.key for f in infos if all(getattr(self, key) == word for key, word in f.options.items()))

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """Returns the plan that ``choose`` finds; raises Infeasible if no plan fits ``limit``."""
        engine = Engine(program, machine, limit)
        return self.finish(engine, self.choose(engine))

    def finish(self, engine: Engine, rows: Rows) -> Plan:
        """Calls the module's ``finish`` with the engine's program, machine and limit."""
        return finish(self, engine.program, engine.machine, engine.limit, engine, rows)

    def choose(self, engine: Engine) -> Rows:
        """Returns the rows of a plan for the engine's program, machine and limit; raises Infeasible if it has none."""
        raise NotImplementedError

    def reachable(self, engine: Engine, gaps: Sequence[Gap]) -> Candidates:
        """Returns ``gaps`` as candidates; raises Infeasible if emptying all of them does not reach the limit."""
        candidates = Candidates(engine.program, gaps)
        if candidates.least_bytes > engine.limit:
            raise self.beyond_reach(engine, candidates.least_bytes)
        return candidates

    def beyond_reach(self, engine: Engine, min_limit: int | None) -> Infeasible:
        """Returns the Infeasible to raise; ``min_limit``: the smallest reachable limit in bytes, None if unknown."""
        return infeasible(self, engine.program, engine.limit, min_limit, engine.calls)


class NoPlan(RowsPlanner):
    """The empty plan, if the limit allows it. Options are ignored."""

    facts = PlannerInfo("none", "no plan", "", "search", 0, 0, "")

    def choose(self, engine: Engine) -> Rows:
        """Returns no rows."""
        return NO_ROWS


class Candidates:
    """The gaps that a planner chooses from, as arrays.

    Attributes:
        gaps: m gaps.
        nbytes: int64[m], size of each gap's tensor.
        rows: int64[m, 6], the swaps that empty the gaps, with prefetch times left to the simulator.
        absent: bool[m, n], the kernels at which each gap is open.
        live_bytes: int64[n], the program's live bytes per kernel.
        least_bytes: bytes, the peak that remains when every gap is emptied: the smallest reachable limit.
    """

    def __init__(self, program: Program, gaps: Sequence[Gap]) -> None:
        self.gaps = list(gaps)
        self.live_bytes = np.array(program.live_bytes, dtype=np.int64)
        self.nbytes = np.array([program.tensors[g.tensor].nbytes for g in gaps], dtype=np.int64)
        self._spans = columns_of(self.gaps)[:, 1:]
        self.least_bytes = int(self.residency(np.ones(len(self.gaps), dtype=bool)).max())

    def __len__(self) -> int:
        return len(self.gaps)

    @cached_property
    def rows(self) -> Rows:
        """Swaps that empty the gaps, with prefetch times left to the simulator."""
        return rows_for(self.gaps, Choice.SWAPPED)

    @cached_property
    def absent(self) -> NDArray[np.bool_]:
        """Mask of the kernels at which each gap is open."""
        (after, before), k = self._spans.T[:, :, None], np.arange(len(self.live_bytes))
        absent: NDArray[np.bool_] = np.where(after < before, (after < k) & (k < before), (after < k) | (k < before))
        return absent

    def residency(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns int64[n], the load per kernel with the ``chosen`` gaps (bool[m], or their indices) emptied."""
        return residency(self.live_bytes, self._spans[chosen], self.nbytes[chosen])

    def prefix(self, order: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
        """Returns the shortest prefix of ``order`` that reaches the residency ``limit``, which all of it must reach."""

        def fits(count: int) -> bool:
            return bool(self.residency(order[:count]).max() <= limit)

        return order[: bisect_left(range(len(order)), True, key=fits)]


def is_open(gap: Gap, k: int) -> bool:
    """Returns whether a gap is open at kernel ``k``."""
    return gap.after < k < gap.before if gap.after < gap.before else not gap.before <= k <= gap.after


def eviction_rows(program: Program, gap: Gap, mode: str) -> list[Row]:
    """Returns the rows that can empty ``gap`` in ``mode``: a swap, a recomputation, a recomputation with ``keep``.

    The list is empty if ``mode`` and the program allow none of them.
    """
    return [row_of(gap, kind) for kind in evictions(program, gap, mode)]


def finish(planner: Planner, program: Program, machine: Machine, limit: int, engine: Engine, rows: Rows) -> Plan:
    """Returns the plan of ``rows`` (int64[n, 6]) after the engine has confirmed that it fits.

    Raises:
        Infeasible: the plan does not fit.
    """
    score = engine.score(rows)
    if not score.feasible:
        raise infeasible(planner, program, limit, score.required_bytes, engine.calls)
    planner.simulator_calls = engine.calls
    return Plan.of(program, decisions_of(rows), planner.name, limit, machine.name)


def check_budget(calls: int | None = None, seconds: float | None = None, jobs: int | None = None) -> None:
    """Validates a search budget; None: not given. Raises ValueError if it is too small."""
    if calls is not None and calls < LEAST:
        raise ValueError(f"calls: expected at least {LEAST}, got {calls}")
    if seconds is not None and not seconds > 0:
        raise ValueError(f"seconds: expected more than 0, got {seconds}")
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs: expected at least 1, got {jobs}")


def infeasible(planner: Planner, program: Program, limit: int, min_limit: int | None, calls: int = 0) -> Infeasible:
    """Returns the Infeasible exception that names the smallest reachable limit, and records the calls on the planner.

    Args:
        planner: Planner that found no plan.
        program: Program to be planned.
        limit: memory limit in bytes.
        min_limit: smallest limit that the planner can reach, in bytes; None if unknown.
        calls: simulator calls made so far.
    """
    planner.simulator_calls = calls
    min_bytes = getattr(planner, "min_bytes", 0)
    is_known = min_limit is not None and min_limit > limit
    reason = f"the smallest limit it can reach is {min_limit:,} bytes" if is_known else "it found no plan that fits"
    if min_bytes and not program.gaps(min_bytes) and program.gaps():
        reason = "it can evict no tensor"
    return Infeasible(
        f"{planner.name}: {program.name!r} cannot be planned within {limit:,} bytes (peak "
        f"{program.peak_bytes:,}); {reason}{min_bytes_hint(program, limit, min_bytes)}"
    )


def min_bytes_hint(program: Program, limit: int, min_bytes: int) -> str:
    """Returns a hint for error messages if a smaller ``min_bytes`` makes ``limit`` (bytes) feasible, else ''.

    The hint names the largest value that works. It is also given if every evictable tensor is too small.
    """
    sizes = sorted({program.tensors[gap.tensor].nbytes for gap in program.gaps()})
    excluded = [nbytes for nbytes in sizes if nbytes < min_bytes]
    if not excluded or least_residency(program, min_bytes) <= limit:
        return ""
    helpful = bisect_left(excluded, True, key=lambda nbytes: least_residency(program, nbytes) > limit)
    if helpful == 0 and len(excluded) < len(sizes):
        return ""  # no value of min_bytes reaches the limit
    subject = "every evictable tensor is" if len(excluded) == len(sizes) else "some evictable tensors are"
    hint = f"try min_bytes={excluded[helpful - 1]}" if helpful else f"the largest has {excluded[-1]:,} bytes"
    return f", because {subject} smaller than min_bytes ({min_bytes:,} bytes): {hint}"


def small(program: Program) -> int:
    """Returns the default ``min_bytes``: 1 MiB, or a thousandth of the peak of a small program."""
    return min(MIB, program.peak_bytes // 1000)
