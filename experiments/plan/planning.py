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
from agents.floor import Floor, floor, refined_floor
from agents.learned.best import HUGE
from agents.planner import small
from agents.search.retimed import ForFaster, TimesError
from experiments.common import report
from experiments.common.errors import expected_errors
from experiments.common.report import Row
from experiments.plan import capture, times
from experiments.plan.answer import Best, Largest
from experiments.plan.capture import SCALE, BatchError
from experiments.plan.words import rounded_up
from simulator.deadline import TimeUp, within
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.pool.device_memory import DevicePeak, planned_peak
from simulator.program import Program
from simulator.timeline import Timeline

Task = tuple[Program, Machine, int]
PUBLISHED = {"swap": "swap, published", "recompute": "recompute, published", "joint": "both, published"}  # families


class Stage(StrEnum):
    """Stages of planning beside those of the published methods, and names of their families."""

    CAPTURE = "capturing"
    ORDER = "order of the update"
    SEARCH = "search"
    FASTER = "for faster kernels"
    TIGHTER = "less fragmented"
    FLOOR = "the floor"
    LARGEST = "the largest batch"
    LONGEST = "the longest sequence"
    WHAT_IF = "what if"


@dataclass(frozen=True)
class Effort:
    """Division of the planning time; shares are fractions of it and sum to 1 with three kinds of published methods.

    A stage that ends early leaves its time to the search and the floor.

    Attributes:
        kernel_s, least_s, longest_s: default planning time: per kernel, and its bounds.
        first, first_if_huge: published methods that are quick, the quickest first; they run even if the time is up, as
            long as their family has no plan.
        first_s: least time in s of such a method.
        last: published methods that are slow.
        order_share: first plans for both orders of the update.
        kind_share: all published methods of one kind.
        method_share: one published method.
        search_share: the planner ``best``.
        faster_share: search for a plan that stays good if kernels are faster than predicted.
        tighter_share: search for a plan that PyTorch's allocator serves within the memory.
        tighter_limits: fractions of the limit at which that search plans, until a plan is served.
        batch_share: plans at other batches.
        batch_plans: planner calls that the search for the largest batch usually needs.
        floor_share: a second floor besides the search's (``refined_floor``).
        timeout_factor: multiple of the planning time after which the largest batch is not captured.
    """

    kernel_s: float = 3e-3
    least_s: float = 3.0
    longest_s: float = 45.0
    first: tuple[str, ...] = ("autoswap_swdoa", "tflms", "memonger", "activation_budget", "checkpoint_blocks")
    first_s: float = 1.0
    last: tuple[str, ...] = ("tensile", "superneurons", "capuchin")
    first_if_huge: tuple[str, ...] = ("autoswap_doa", "memonger", "checkpoint_blocks")
    order_share: float = 0.08
    kind_share: float = 0.1
    method_share: float = 0.05
    search_share: float = 0.32
    faster_share: float = 0.04
    tighter_share: float = 0.07
    tighter_limits: tuple[float, ...] = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6)
    batch_share: float = 0.06
    batch_plans: int = 16
    floor_share: float = 0.13
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
        Stage.ORDER: EFFORT.order_share,
        **dict.fromkeys(families_of(mode).values(), EFFORT.kind_share),
        Stage.SEARCH: EFFORT.search_share,
        **({} if error is None else {Stage.FASTER: EFFORT.faster_share}),
        Stage.FLOOR: EFFORT.floor_share,
        Stage.LARGEST: EFFORT.batch_share,
        Stage.LONGEST: EFFORT.batch_share,
        Stage.WHAT_IF: EFFORT.batch_share,
    }


def first_overhead(task: Task, mode: str, seconds: float, seed: int) -> float:
    """Returns the overhead of a plan that takes about ``seconds`` to find; infinite without one."""
    program, _, limit = task
    if program.peak_bytes <= limit:
        return 0.0
    if not floor(*task, mode, detail=0.0).feasible:
        return math.inf
    planner = report.make("best", mode=mode, seconds=seconds, seed=seed)
    return best_of(Stage.ORDER, [planner], task, mode, seed).overhead


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
        task: Program, machine and limit.
        seed: Seed of the planners.
    """
    program, machine, limit = task
    quick_floor = floor(program, machine, limit, mode, detail=0.0)
    if program.peak_bytes <= limit or not quick_floor.feasible:
        return [], quick_floor
    start = time.monotonic()
    bests = []
    huge = len(program.kernels) >= HUGE
    first = EFFORT.first_if_huge if huge else EFFORT.first

    def order(name: str) -> int:
        if name in first:
            return first.index(name)
        return len(first) + (1 + EFFORT.last.index(name) if name in EFFORT.last else 0)

    for kind, family in families_of(mode).items():
        begin(family)
        names = [name for name in report.heuristics() if agents.PLANNERS[name].moves in (kind, "joint")]
        each_s = EFFORT.method_share * seconds
        total_s = EFFORT.kind_share * seconds
        bests.append(best_of(family, sorted(names, key=order), task, kind, seed, each_s, total_s, first))

    def remaining_s(share: float) -> float:
        """Returns the time in s until ``share`` of the planning time has passed."""
        return start + share * seconds - time.monotonic()

    begin(Stage.SEARCH)
    search_end = len(bests) * EFFORT.kind_share + EFFORT.search_share
    search_s = max(remaining_s(search_end), EFFORT.search_share * seconds / 2)
    search = report.make("best", mode=mode, seconds=search_s, seed=seed)
    bests.append(best_of(Stage.SEARCH, [search], task, mode, seed))
    starts = [b.plan for b in bests if b.plan is not None]
    if error is not None and starts and not huge:
        begin(Stage.FASTER)
        faster = ForFaster(starts, error, None, mode, small(program), seed, EFFORT.faster_share * seconds)
        bests.append(best_of(Stage.FASTER, [faster], task, mode, seed))
    begin(Stage.FLOOR)
    floors: list[Floor] = [getattr(search, "floor", None) or quick_floor]
    floor_end = search_end + EFFORT.faster_share + EFFORT.floor_share
    floor_s = max(remaining_s(floor_end), EFFORT.floor_share * seconds)
    with suppress(TimeUp):
        floors.append(refined_floor(*task, mode, floor_s))
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
        family: name of the family that the planners belong to.
        planners: names, or planner objects.
        task: program, machine and limit.
        mode: mode of the plans.
        seed: seed of the planners.
        each_s: time in s after which a named planner is aborted.
        total_s: time in s of all named planners.
        required: names that run even if ``total_s`` is over, as long as no plan exists.
    """
    start = time.monotonic()
    skipped = []
    huge = len(task[0].kernels) >= HUGE
    rows: list[tuple[Row, Plan | None, Timeline | None]] = []
    for method in planners:
        planner = method
        if isinstance(planner, str):
            planner = report.make(planner, seed=seed, mode=mode, seconds=each_s, min_bytes=small(task[0]))
        limit_s: float | None = None
        if isinstance(method, str) and not (huge and method in EFFORT.first_if_huge):
            remaining_s = start + total_s - time.monotonic()
            if method in required and not any(row["feasible"] for row, *_ in rows):
                remaining_s = max(remaining_s, 0.0) + max(each_s, EFFORT.first_s)
                limit_s = remaining_s
            else:
                limit_s = min(remaining_s, each_s)
            if limit_s <= 0:
                skipped.append(planner.name)
                continue
        try:
            with within(None if limit_s == math.inf else limit_s):
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
        families: the best plan of each family.
        card: device memory without a plan; None: only tensors count.
        alignment: alignment of addresses in bytes (``Machine.alignment``).
        as_graph: as in ``planned_peak``.

    Returns:
        the plans in the same order, with ``card`` set unless ``card`` is None.
    """
    if card is None:
        return list(families)
    return [
        b if b.timeline is None else replace(b, card=planned_peak(card, b.timeline, alignment, as_graph))
        for b in families
    ]


def needs_less_memory(families: Sequence[Best]) -> bool:
    """Returns whether an unserved plan beats all served plans by more than ``times.ROOM``."""
    served, unserved = (
        min((b.overhead for b in families if b.served == is_served), default=math.inf) for is_served in (True, False)
    )
    return unserved < served - times.ROOM


def plan_tighter(task: Task, card: DevicePeak, mode: str, seed: int, seconds: float, as_graph: bool) -> Best | None:
    """Returns the first plan of ``best``, over decreasing limits, for which the device has room; None without one.

    Args:
        task: program, machine and the limit of which decreasing shares are tried.
        card: device memory without a plan.
        mode: mode of the plans.
        seed: seed of the planner.
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
    in_backward: bool = False,
    what: str = "batch",
) -> tuple[Largest, Program | None]:
    """Searches for the largest batch without a plan and with one.

    Args:
        workload: settings of the workload.
        task: program, machine and limit.
        mode: swap, recompute or joint.
        most_overhead: largest overhead of a plan that counts.
        seconds: planning time; the largest batch is also captured, unless ``timeout_factor`` times as long has passed.
        memory: device memory in bytes, for tensors and everything else; None: the limit applies to tensors only.
        other_bytes: bytes of device memory not used by tensors, at the original batch.
        in_backward: whether the optimizer's update is in the backward pass, as in the task.
        what: "batch" or "sequence length": the size that is searched for.

    Returns:
        The results, and the step at half its batch (None: unknown).
    """
    program, machine, limit = task
    limit = memory or limit
    half = None
    most = None
    capture_deadline = time.monotonic() + EFFORT.timeout_factor * seconds
    planning_s = EFFORT.batch_share * seconds
    plans = 0
    timed_out = False
    try:
        if what == "batch":
            steps = capture.batches(workload, machine, memory, program, other_bytes, in_backward)
            half = steps.interpolated(steps.batch // 2) if steps.batch > 1 else None
        else:
            steps, most = capture.sequences(workload, machine, memory, program, other_bytes, in_backward)
        most = most or SCALE * steps.batch
        deadline = time.monotonic() + planning_s

        def plan_overhead(step: Program, available: int) -> float | None:
            """Returns the overhead of the first plan of at most ``most_overhead``, or None."""
            nonlocal plans, timed_out
            timed_out = timed_out or time.monotonic() >= deadline
            if timed_out:
                return None
            plans += 1
            overhead = first_overhead((step, machine, available), mode, planning_s / EFFORT.batch_plans, 0)
            return overhead if overhead <= most_overhead else None

        most -= most % steps.unit
        without = min(steps.largest(limit), most)
        planned = min(steps.largest_planned(plan_overhead, limit, without, most_overhead), most)
        if checked := bool(without) and time.monotonic() < capture_deadline:
            capture.check(workload, machine, without, steps.peak_bytes(without), in_backward, what)
        micro = steps.accumulated(limit) if what == "batch" and without < steps.batch else None
    except (BatchError, *expected_errors()) as error:
        return Largest(obstacle=str(error)), half
    found = Largest(
        batch=steps.batch,
        without=without,
        planned=planned,
        planner="best" if planned > without else "",
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
