"""Plans a step within a planning time: each family of methods, the certified floor, and the largest batch."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import agents
from agents.deadline import TimeUp, within
from agents.floor import Floor, floor, refined_floor
from agents.learned.best import HUGE, LOADING
from agents.planner import small
from agents.search.retimed import ForFaster, TimesError
from experiments.common import report
from experiments.common.errors import expected_errors
from experiments.common.report import Row
from experiments.plan import capture, times
from experiments.plan.answer import Best, Largest
from experiments.plan.capture import SCALE, BatchError
from experiments.plan.words import rounded_up
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.pool.device_memory import DevicePeak, in_graph, under_plan
from simulator.program import Program
from simulator.timeline import Timeline

Task = tuple[Program, Machine, int]
PUBLISHED = {"swap": "swap, published", "recompute": "recompute, published", "joint": "both, published"}  # families


class Stage(StrEnum):
    """Stages of planning beside those of the published methods, and names of their families."""

    CAPTURE = "capturing"
    SEARCH = "search"
    FASTER = "for faster kernels"
    TIGHTER = "less fragmented"
    FLOOR = "the floor"
    LARGEST = "the largest batch"
    LONGEST = "the longest sequence"
    WHAT_IF = "what if"


@dataclass(frozen=True)
class Effort:
    """Division of the planning time; shares are fractions of it.

    Attributes:
        kernel_s, least_s, longest_s: default planning time: per kernel, and its bounds.
        first, first_if_huge: published methods that are quick; they run even if the time is up, so that each family
            has a plan.
        kind_share: all published methods of one kind.
        method_share: one published method.
        search_share: the planner ``best``.
        faster_share: search for faster kernels.
        tighter_share: search for a plan that PyTorch's allocator serves.
        tighter_limits: fractions of the limit at which that search plans, until a plan is served.
        batch_share: plans at other batches.
        batch_plans: planner calls that the search for the largest batch usually needs.
        floor_share: a second floor besides the search's (``refined_floor``).
        timeout_factor: multiple of the planning time after which the floor, and the capture of the largest batch, are
            given up.
    """

    kernel_s: float = 2e-3
    least_s: float = 2.0
    longest_s: float = 30.0
    first: tuple[str, ...] = (
        "tensile",
        "autoswap_swdoa",
        "tflms",
        "superneurons",
        "activation_budget",
        "checkpoint_blocks",
    )
    first_if_huge: tuple[str, ...] = ("autoswap_doa", "memonger", "checkpoint_blocks")
    kind_share: float = 0.15
    method_share: float = 0.15
    search_share: float = 0.5
    faster_share: float = 0.1
    tighter_share: float = 0.3
    tighter_limits: tuple[float, ...] = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6)
    batch_share: float = 0.15
    batch_plans: int = 16
    floor_share: float = 0.15
    timeout_factor: float = 3

    def default_s(self, program: Program) -> float:
        """Returns the default planning time in s."""
        return min(max(self.kernel_s * len(program.kernels), self.least_s), self.longest_s)


EFFORT = Effort()


def families_of(mode: str) -> dict[str, str]:
    """Returns the families of published methods in ``mode`` by their kind of decision."""
    return {kind: family for kind, family in PUBLISHED.items() if mode in (kind, "joint")}


def stages(mode: str, error: TimesError | None = None) -> dict[str, float]:
    """Returns the stages of planning in ``mode``, in order, with their expected shares of the time."""
    return {
        Stage.CAPTURE: 1.0,
        **dict.fromkeys(families_of(mode).values(), EFFORT.kind_share),
        Stage.SEARCH: EFFORT.search_share,
        **({} if error is None else {Stage.FASTER: EFFORT.faster_share}),
        Stage.FLOOR: EFFORT.floor_share,
        Stage.LARGEST: EFFORT.batch_share,
        Stage.LONGEST: EFFORT.batch_share,
        Stage.WHAT_IF: EFFORT.batch_share,
    }


def make_plans(
    task: Task,
    mode: str,
    seconds: float,
    seed: int,
    begin: Callable[[str], object] = str,
    error: TimesError | None = None,
) -> tuple[list[Best], Floor]:
    """Returns the best plan of each family of methods for ``mode``, and the floor of all plans.

    No plan is made if the step fits, or if the floor proves that no plan does.

    Args:
        seconds: planning time.
        begin: callback, receives the name of each stage.
        error: error of the kernel times; if given, another search plans for the fast end of its range.
    """
    program, machine, limit = task
    quick_floor = floor(program, machine, limit, mode, detail=0.0)
    if program.peak_bytes <= limit or not quick_floor.feasible:
        return [], quick_floor
    if seconds >= LOADING:
        report.warm_up(machine, "best", mode)  # PyTorch is loaded
    bests = []
    huge = len(program.kernels) >= HUGE
    first = EFFORT.first_if_huge if huge else EFFORT.first

    def order(name: str) -> int:
        # Capuchin is the slowest.
        return first.index(name) if name in first else len(first) + (name == "capuchin")

    for kind, family in families_of(mode).items():
        begin(family)
        names = [name for name in report.heuristics() if agents.PLANNERS[name].moves in (kind, "joint")]
        each_s = EFFORT.method_share * seconds
        total_s = EFFORT.kind_share * seconds
        bests.append(best_of(family, sorted(names, key=order), task, kind, seed, each_s, total_s, first))
    begin(Stage.SEARCH)
    search = report.make("best", mode=mode, seconds=EFFORT.search_share * seconds, seed=seed)
    bests.append(best_of(Stage.SEARCH, [search], task, mode, seed))
    starts = [b.plan for b in bests if b.plan is not None]
    if error is not None and starts and not huge:
        begin(Stage.FASTER)
        faster = ForFaster(starts, error, None, mode, small(program), seed, EFFORT.faster_share * seconds)
        bests.append(best_of(Stage.FASTER, [faster], task, mode, seed))
    begin(Stage.FLOOR)
    floors: list[Floor] = [getattr(search, "floor", None) or quick_floor]
    timeout_s = EFFORT.timeout_factor * seconds
    with suppress(TimeUp), within(min(timeout_s, EFFORT.longest_s)):
        floors.append(refined_floor(*task, mode, EFFORT.floor_share * seconds, timeout_s))
    bound = max(floors, key=lambda f: (not f.feasible, f.iteration_ns))
    return [replace(b, row=report.with_bounds(b.row, bound) if b.row else None) for b in bests], bound


def best_of(
    family: str,
    planners: Sequence[str | agents.Planner],
    task: Task,
    mode: str,
    seed: int,
    each_s: float = math.inf,
    total_s: float = math.inf,
    required: Sequence[str] = (),
) -> Best:
    """Returns the best plan of several planners.

    Args:
        planners: names, or planner objects.
        mode: mode of the plans.
        each_s: time in s per named planner; a planner without a budget option is aborted after it.
        total_s: time in s after which, once a plan exists, the remaining planners are skipped.
        required: names that are never skipped and may take ``timeout_factor`` times as long.
    """
    start = time.monotonic()
    skipped = []
    huge = len(task[0].kernels) >= HUGE
    rows: list[tuple[Row, Plan | None, Timeline | None]] = []
    for method in planners:
        planner = method
        if isinstance(planner, str):
            planner = report.make(planner, seed=seed, mode=mode, seconds=each_s, min_bytes=small(task[0]))
        is_required = planner.name in required
        is_late = time.monotonic() - start > total_s and not is_required
        if is_late and (huge or any(row["feasible"] for row, *_ in rows)):
            skipped.append(planner.name)
            continue
        has_budget = (
            not isinstance(method, str)
            or "seconds" in agents.options(method)
            or (huge and method in EFFORT.first_if_huge)
        )
        try:
            with within(None if has_budget else EFFORT.timeout_factor * each_s if is_required else each_s):
                rows.append(report.score_with(planner, *task, seed, mode))
        except TimeUp:
            skipped.append(planner.name)
    elapsed_s = time.monotonic() - start
    if not rows:
        return Best(family, None, None, None, elapsed_s, tuple(skipped))
    row, plan, timeline = min(rows, key=lambda entry: _rank(*entry[:2]))
    return Best(family, row, None if timeline is None else plan, timeline, elapsed_s, tuple(skipped))


def _rank(row: Row, plan: Plan | None) -> tuple[float, int]:
    """Returns a sort key: overhead up to TIE, then number of decisions; infeasible plans last."""
    if plan is None or not row["feasible"]:
        return math.inf, 0
    return round(row["overhead"] / times.TIE), len(plan.decisions)


def with_memory(families: Sequence[Best], card: DevicePeak | None, alignment: int, as_graph: bool) -> list[Best]:
    """Evaluates the device memory of each family's plan, as the executor runs it.

    Args:
        card: device memory without a plan; None: only tensors count.
        alignment: alignment of addresses in bytes (``Machine.alignment``).
        as_graph: whether the step is one CUDA graph, whose blocks have packed addresses. Otherwise PyTorch's allocator
            chooses them, so a plan whose tensors fit may still not run.
    """
    if card is None:
        return list(families)

    def peak(timeline: Timeline) -> tuple[int, bool]:
        return in_graph(card, timeline, alignment) if as_graph else under_plan(card, timeline)

    return [b if b.timeline is None else replace(b, card=peak(b.timeline)) for b in families]


def needs_less_memory(families: Sequence[Best]) -> bool:
    """Returns whether an unserved plan beats all served plans by more than ``times.ROOM``."""
    served, unserved = (
        min((b.overhead for b in families if b.served == is_served), default=math.inf) for is_served in (True, False)
    )
    return unserved < served - times.ROOM


def plan_tighter(task: Task, card: DevicePeak, mode: str, seed: int, seconds: float, as_graph: bool) -> Best | None:
    """Returns the first plan of ``best``, over decreasing limits, for which the device has room; None without one.

    Args:
        seconds: total time.
        as_graph: as in ``with_memory``.
    """
    start = time.monotonic()
    program, machine, limit = task
    for share in EFFORT.tighter_limits:
        planner = report.make("best", seed=seed, mode=mode, seconds=seconds / len(EFFORT.tighter_limits))
        tighter = program, machine, int(share * limit)
        families = [best_of(Stage.TIGHTER, [planner], tighter, mode, seed)]
        (best,) = with_memory(families, card, machine.alignment, as_graph)
        if best.served:
            return replace(best, seconds=time.monotonic() - start)
        if best.plan is None:
            return None
    return None


def largest_batch(
    workload: Mapping[str, Any],
    task: Task,
    mode: str,
    most_overhead: float,
    seconds: float,
    memory: int | None = None,
    other_bytes: int = 0,
    what: str = "batch",
) -> tuple[Largest, Program | None]:
    """Searches for the largest batch without a plan and with one; see ``Largest``.

    Returns:
        The results, and the step at half its batch (None: unknown).

    Args:
        seconds: planning time; the largest batch is also captured, unless ``timeout_factor`` times as long has passed.
        memory: device memory in bytes, for tensors and everything else; None: the limit applies to tensors only.
        other_bytes: bytes of device memory not used by tensors, at the original batch.
        what: "batch" or "sequence length": the size that is searched for.
    """
    program, machine, limit = task
    limit = memory or limit
    half = None
    most = None
    capture_deadline = time.monotonic() + EFFORT.timeout_factor * seconds
    planning_s = EFFORT.batch_share * seconds
    planner = ""
    plans = 0
    timed_out = False
    try:
        if what == "batch":
            steps = capture.batches(workload, machine, memory, program, other_bytes)
            half = steps.interpolated(steps.batch // 2) if steps.batch > 1 else None
        else:
            steps, most = capture.sequences(workload, machine, memory, program, other_bytes)
        most = most or SCALE * steps.batch
        deadline = time.monotonic() + planning_s

        def plan_overhead(step: Program, available: int) -> float | None:
            """Returns the overhead of the first plan of at most ``most_overhead``, or None."""
            nonlocal planner, plans, timed_out
            if not floor(step, machine, available, mode, detail=0.0).feasible:
                return None
            for name in (EFFORT.first[0], "best"):
                timed_out = timed_out or time.monotonic() >= deadline
                if timed_out:
                    continue
                plans += 1
                searcher = report.make(name, mode=mode, seconds=planning_s / 10, min_bytes=small(step))
                row, *_ = report.score_with(searcher, step, machine, available, 0, mode)
                if row["feasible"] and row["overhead"] <= most_overhead:
                    planner = name
                    return float(row["overhead"])
            return None

        most -= most % steps.unit
        without = min(steps.largest(limit), most)
        planned = min(steps.largest_planned(plan_overhead, limit, without, most_overhead), most)
        if checked := bool(without) and time.monotonic() < capture_deadline:
            capture.check(workload, machine, without, steps.peak_bytes(without), what)
        micro = steps.accumulated(limit) if what == "batch" and without < steps.batch else None
    except (BatchError, *expected_errors()) as error:
        return Largest(obstacle=str(error)), half
    found = Largest(
        batch=steps.batch,
        without=without,
        planned=planned,
        planner=planner,
        most_overhead=most_overhead,
        checked=checked,
        micro=micro and micro[:2],
        micro_overhead=micro[2] if micro else 0.0,
        most=most,
        least=steps.unit,
        sufficient_s=rounded_up(max(2.0, EFFORT.batch_plans / max(plans, 1)) * seconds) if timed_out else None,
    )
    return found, half


def longest_sequence(workload: Mapping[str, Any], search: Callable[..., tuple[Largest, Program | None]]) -> Largest:
    """Returns the longest sequences, or an empty result for a workload without token ids.

    Args:
        search: ``largest_batch`` without its last argument.
    """
    from experiments import workloads

    try:
        workloads.length_of_workload(workload, workloads.build(workload))
    except workloads.WorkloadError:
        return Largest()
    return search(what="sequence length")[0]
