"""Checks whether a training step fits in device memory, and finds the cheapest plan if it does not.

    python -m experiments.plan target=mymodel:factory machine=h100 memory=24GiB
    python -m experiments.plan workload=gpt2_medium machine=h100 memory=16GiB
    python -m experiments.plan program=step.json machine=my_machine.yaml memory=0.6

If the step does not fit, published methods and the planner ``best`` plan within ``seconds``. The cheapest plan is
recommended; among plans of similar cost, the one most robust to errors of the kernel times (times.py).

The run directory holds report.html (self-contained), plan.json (if a plan exists), memory.png, timeline.json (for
Perfetto), results.jsonl and summary.json. Its path is the last line printed. Exit status 1: the step does not fit.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

import agents
from agents.deadline import TimeUp, within
from agents.floor import UNPROVEN, Floor, floor
from agents.host import host_needed
from agents.learned.best import HUGE, LOADING
from agents.planner import small
from agents.search.annealing import everything
from agents.search.other_times import ForFaster, TimesError
from experiments.common import cli, report
from experiments.common.errors import expected_errors
from experiments.common.report import Row
from experiments.plan import capture, times
from experiments.plan.answer import Answer, Best, Largest, Times
from experiments.plan.capture import SCALE, BatchError, Step
from experiments.plan.usage import checkpoints, fit_call
from experiments.plan.words import rounded_up, slowest, verdict
from simulator import simulate
from simulator.compiled.engine import Engine
from simulator.files import write_json, write_text
from simulator.limits import is_fraction, limit_bytes, size_bytes
from simulator.machine import PRESETS, Machine
from simulator.modes import MODES
from simulator.plan import Plan
from simulator.pool.device_memory import DevicePeak, of_program, under_plan
from simulator.pool.packed import packed_bytes
from simulator.program import Program
from simulator.report import Origins, report as page_of
from simulator.timeline import Timeline

PUBLISHED = {"swap": "swap, published", "recompute": "recompute, published", "joint": "both, published"}
# Published methods: quick ones, which run even if the time is up, so that each family has a plan; the slowest.
FIRST = ("tensile", "autoswap_swdoa", "tflms", "superneurons", "activation_budget")
LAST = ("capuchin",)
# further families
SEARCH_NAME = "search"
FASTER_NAME = "for faster kernels"
TIGHTER = "less fragmented"
# other stages
CAPTURE = "capturing"
FLOOR = "the floor"
LARGEST = "the largest batch"
# Shares of the time: published methods of one kind, one method, search, lower limits, faster kernels, largest batch.
KIND_SHARE = 0.15
METHOD_SHARE = 0.15
SEARCH_SHARE = 0.5
TIGHTER_SHARE = 0.3
FASTER_SHARE = 0.1
BATCHES_SHARE = 0.15
# default time in s: per kernel, minimum, maximum
PER_KERNEL = 2e-3
LEAST = 2.0
LONGEST = 30.0
QUICK = ("autoswap_doa", "memonger")
TRIES = 16  # planner calls that the search for the largest batch usually needs
# of a second floor besides the search's
GAPS = 800
DETAIL = 0.15
TIMEOUT_FACTOR = 3  # multiple of the time: bound for the floor, deadline for capturing the largest batch
LIMIT_FRACTIONS = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6)  # of the limit: tried until PyTorch's allocator serves a plan
FIXED_BATCH = "a program file has a fixed batch size"

Task = tuple[Program, Machine, int]


@cli.entry("plan")
def main(cfg: DictConfig) -> Path:
    """Plans the step and returns the run directory; exits with status 1 if nothing fits."""
    start = time.monotonic()
    machine = cli.machine(cfg)
    mode = cli.choice(cfg, "mode", MODES)
    seed = cli.integer(cfg, "seed")
    seconds = cli.number(cfg, "seconds") if cfg.seconds is not None else None
    most_overhead = cli.number(cfg, "largest_overhead")
    search = cli.choice(cfg, "largest", (True, False))
    workload = selected_workload(cfg)
    setting = cfg.memory if cfg.memory is not None else machine.memory_bytes
    memory = None if is_fraction(setting) else size_bytes(setting, "memory")  # of the device; a fraction is of tensors
    step_times = times.read(cfg, machine, workload is not None)
    if workload is not None and step_times.step_ns is not None:
        workload["iteration_ms"] = step_times.step_ns / 1e6
    stage_shares = stages(mode, step_times.error)
    with report.track_stages(stage_shares) as begin:
        begin(CAPTURE)
        if workload is None:
            program = times.rescaled(cli.program(cfg, machine), step_times)
            # For a program file, only allocator and context overheads are known.
            step = Step(program, None, of_program(program, machine.context_bytes, memory), "", (), ())
        else:
            step = capture.step(workload, machine, memory)
        warm_up(machine, mode)
        program = step.program
        card = step.card
        step_times = replace(step_times, said=f"{step_times.said} {step.arithmetic}".strip())
        limit = limit_bytes(cfg.memory, program, "memory") if card is None or memory is None else card.limit
        task = program, machine, limit
        seconds = seconds or min(max(PER_KERNEL * len(program.kernels), LEAST), LONGEST)
        with report.RunDirectory(cli.path(cfg, "out"), f"plan-{program.name}") as out:
            families, bound = make_plans(task, mode, seconds, seed, begin, step_times.error)
            families = with_memory(families, card)
            if card is not None and needs_less_memory(families):
                tighter = plan_tighter(task, card, mode, seed, TIGHTER_SHARE * seconds)
                families += [] if tighter is None else [replace(tighter, row=report.with_bounds(tighter.row, bound))]
            begin(LARGEST)
            why = FIXED_BATCH if workload is None else ""
            extra = card.beside if card and memory else 0
            size = largest_batch(workload if search else None, task, mode, most_overhead, seconds, why, memory, extra)
            answer = make_answer(task, step.origins, mode, families, bound, size, start, step_times)
            answer = replace(answer, card=card, memory=memory, budget=seconds, slowest=slowest(step, machine))
            if answer.best is not None and answer.best.plan is not None:
                answer = with_code(answer, answer.best.plan, step, cfg, out)
            write(out, cfg, answer, bound)
    from experiments.plan.page import render_text

    report.console().print(render_text(answer))
    print(out)
    if not answer.fits and answer.best is None and HydraConfig.get().mode != RunMode.MULTIRUN:
        sys.exit(1)
    return out


def stages(mode: str, error: TimesError | None = None) -> dict[str, float]:
    """Returns the stages of planning in ``mode``, in order, with their expected shares of the time."""
    kinds = {family: KIND_SHARE for kind, family in PUBLISHED.items() if mode in (kind, "joint")}
    faster = {FASTER_NAME: FASTER_SHARE} if error is not None else {}
    return {CAPTURE: 1.0, **kinds, SEARCH_NAME: SEARCH_SHARE, **faster, FLOOR: DETAIL, LARGEST: BATCHES_SHARE}


def selected_workload(cfg: DictConfig) -> dict[str, Any] | None:
    """Returns the workload to capture, or None if a program file is planned.

    Raises:
        UsageError: not exactly one of target=, workload= and program= is given.
    """
    named = cfg.workload.get("family") != "module" or cfg.workload.get("name") != "module"
    if sum((cfg.program is not None, cfg.target is not None, named)) != 1:
        raise cli.UsageError("specify exactly one of target=, workload= and program=")
    if cfg.program is not None:
        return None
    workload = cli.to_dict(cfg.workload)
    return workload if named else {**workload, "name": str(cfg.target).replace(":", ".")}


def warm_up(machine: Machine, mode: str) -> None:
    """Imports and compiles everything that is used later, to keep it out of timings."""
    from experiments.plan import page  # noqa: F401  # Matplotlib

    for name in ("annealing", "lp_round"):
        report.warm_up(machine, name, mode)


def make_answer(
    task: Task,
    origins: Origins | None,
    mode: str,
    families: list[Best],
    bound: Floor,
    size: Largest,
    start: float,
    step_times: Times | None = None,
) -> Answer:
    """Assembles the answer; ``times.recommended`` selects the recommended plan."""
    program, machine, limit = task
    perturbed = None if step_times is None else times.perturbed_times(task, step_times.error)
    best = times.recommended([b for b in families if b.served], perturbed)
    proven = bool(families) and bound.feasible
    plan = best.plan if best is not None else None
    unplanned = simulate(program, Plan(), machine, program.peak_bytes)
    planned = best.timeline if best is not None and plan is not None and (plan.decisions or plan.variants) else None
    page = page_of(
        program,
        machine,
        limit,
        packed_bytes(planned or unplanned, limit, machine.alignment),
        unplanned,
        planned,
        plan,
        bound.iteration_ns if proven else None,
        origins,
    )
    infeasible = program.peak_bytes > limit and best is None
    kinds = ("swap", "joint") if mode == "joint" else (mode,)
    plans = (everything(program, kind, 0) for kind in kinds)  # plans that evict in every gap
    nearest = min(Engine(program, machine, limit).score(p).required_bytes for p in plans) if infeasible else None
    host = host_needed(program, machine, limit, mode) if infeasible and families else None
    return Answer(
        program,
        machine,
        limit,
        mode,
        page,
        unplanned,
        tuple(families),
        best,
        bound.least_bytes,
        nearest,
        bound.overhead if proven else None,
        size,
        time.monotonic() - start,
        times=step_times,
        spread=perturbed.spread(plan) if perturbed is not None and plan is not None else None,
        host=host,
    )


def with_code(a: Answer, plan: Plan, step: Step, cfg: DictConfig, out: Path) -> Answer:
    """Adds the code that runs the recommended plan to the answer."""
    overrides = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    name = a.machine.name
    if not (PRESETS / f"{name}.yaml").exists() or Machine.load(name) != a.machine:
        name = overrides.get("machine", name)
    memory = cfg.memory if cfg.memory is not None else a.memory
    call = fit_call(cfg.target, memory, name, out.absolute())
    equivalent = checkpoints(a.program, a.machine, a.limit, plan, step.origins, step.modules)
    return replace(a, run_code=call, checkpoints=equivalent)


def write(out: Path, cfg: DictConfig, answer: Answer, bound: Floor) -> None:
    """Writes the run directory."""
    from experiments.plan.page import render_html
    from experiments.plotting import plots

    program = answer.program
    best = answer.best
    baseline = report.with_bounds(report.score("none", program, answer.machine, answer.limit, 0, answer.mode)[0], bound)
    plan = best.plan if best else None
    if plan is not None:
        plan.save(out / "plan.json")
    write_json(out / "timeline.json", (answer.after or answer.before).perfetto(program))
    planner = plan.planner if plan else ""
    plots.memory_curve(out / "memory.png", answer.before, answer.after, answer.machine.name, planner, answer.limit)
    write_text(out / "report.html", render_html(answer, report.command()))
    rows = [baseline, *(b.row for b in answer.families if b.row is not None)]
    report.write_rows(out / "results.jsonl", rows)
    report.write_summary(
        out / "summary.json",
        cfg,
        program,
        rows,
        verdict=verdict(answer),
        fits=answer.fits,
        recommended=best.row["planner"] if best and best.row else None,
        least_bytes=answer.least_bytes,
        reached_bytes=answer.reached_bytes,
        floor=answer.floor,
        largest=asdict(answer.largest),
        memory=answer.memory,
        card=asdict(answer.card) if answer.card else None,
        card_planned=answer.card_planned,
        peak=asdict(answer.page.without),
        peak_planned=asdict(answer.page.under) if best else None,
        packed_bytes=answer.page.packed_bytes if best else None,
        families=[
            {"family": b.family, "planner": b.row["planner"] if b.row else None, "left_out": b.skipped}
            for b in answer.families
        ],
        host_bytes=answer.host,
        seconds=answer.seconds,
        times=asdict(answer.times) if answer.times else None,
        overheads=asdict(answer.spread) if answer.spread else None,
    )


# ------------------------------------------------------------------------------------ planning


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
    first = QUICK if huge else FIRST
    for kind, family in PUBLISHED.items():
        if mode in (kind, "joint"):
            names = [name for name in report.heuristics() if agents.PLANNERS[name].moves in (kind, "joint")]
            names.sort(key=lambda name: first.index(name) if name in first else len(first) + (name in LAST))
            begin(family)
            bests.append(best_of(family, names, task, kind, seed, METHOD_SHARE * seconds, KIND_SHARE * seconds, first))
    begin(SEARCH_NAME)
    search = report.make("best", mode=mode, seconds=SEARCH_SHARE * seconds, seed=seed)
    bests.append(best_of(SEARCH_NAME, [search], task, mode, seed))
    if error is not None and not huge and (starts := [b.plan for b in bests if b.plan is not None]):
        begin(FASTER_NAME)
        faster = ForFaster(starts, error, None, mode, small(program), seed, FASTER_SHARE * seconds)
        bests.append(best_of(FASTER_NAME, [faster], task, mode, seed))
    begin(FLOOR)
    floors: list[Floor] = [getattr(search, "floor", None) or quick_floor]
    with suppress(TimeUp), within(min(TIMEOUT_FACTOR * seconds, LONGEST)):
        floors.append(floor(program, machine, limit, mode, GAPS, DETAIL, UNPROVEN, TIMEOUT_FACTOR * seconds))
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
        required: names that are never skipped and may take WAIT times as long.
    """
    start = time.monotonic()
    skipped = []
    huge = len(task[0].kernels) >= HUGE
    rows: list[tuple[Row, Plan | None, Timeline | None]] = []
    for method in planners:
        planner = method
        if isinstance(planner, str):
            planner = report.make(planner, seed=seed, mode=mode, seconds=each_s, min_bytes=small(task[0]))
        is_late = time.monotonic() - start > total_s and planner.name not in required
        if is_late and (huge or any(row["feasible"] for row, *_ in rows)):
            skipped.append(planner.name)
            continue
        has_budget = not isinstance(method, str) or "seconds" in agents.options(method) or (huge and method in QUICK)
        try:
            with within(None if has_budget else TIMEOUT_FACTOR * each_s if planner.name in required else each_s):
                rows.append(report.score_with(planner, *task, seed, mode))
        except TimeUp:
            skipped.append(planner.name)
    elapsed_s = time.monotonic() - start
    if not rows:
        return Best(family, None, None, None, elapsed_s, tuple(skipped))
    row, plan, timeline = min(rows, key=lambda entry: _rank(*entry[:2]))
    return Best(family, row, None if timeline is None else plan, timeline, elapsed_s, tuple(skipped))


def with_memory(families: Sequence[Best], card: DevicePeak | None) -> list[Best]:
    """Evaluates the device memory of each family's plan.

    A plan fragments memory differently from the unplanned step, so a plan whose tensors fit may still not run.
    """
    if card is None:
        return list(families)
    return [b if b.timeline is None else replace(b, card=under_plan(card, b.timeline)) for b in families]


def needs_less_memory(families: Sequence[Best]) -> bool:
    """Returns whether an unserved plan beats all served plans by more than ``times.ROOM``."""
    least = {
        served: min((b.overhead for b in families if b.served == served), default=math.inf) for served in (True, False)
    }
    return least[False] < least[True] - times.ROOM


def plan_tighter(task: Task, card: DevicePeak, mode: str, seed: int, seconds: float) -> Best | None:
    """Returns the first plan of ``best``, over decreasing limits, that PyTorch's allocator serves; None without one.

    Args:
        seconds: total time.
    """
    start = time.monotonic()
    (program, machine, limit) = task
    for share in LIMIT_FRACTIONS:
        planner = report.make("best", seed=seed, mode=mode, seconds=seconds / len(LIMIT_FRACTIONS))
        (best,) = with_memory([best_of(TIGHTER, [planner], (program, machine, int(share * limit)), mode, seed)], card)
        if best.served:
            return replace(best, seconds=time.monotonic() - start)
        if best.plan is None:
            return None
    return None


def _rank(row: Row | None, plan: Plan | None) -> tuple[float, int]:
    """Returns a sort key: overhead up to TIE, then number of decisions; infeasible plans last."""
    if row is None or plan is None or not row["feasible"]:
        return math.inf, 0
    return round(row["overhead"] / times.TIE), len(plan.decisions)


def largest_batch(
    workload: Mapping[str, Any] | None,
    task: Task,
    mode: str,
    most_overhead: float,
    seconds: float,
    reason: str = "",
    memory: int | None = None,
    other_bytes: int = 0,
) -> Largest:
    """Searches for the largest batch without a plan and with one; see ``Largest``.

    Args:
        workload: None: the batch cannot be changed, for the reason ``reason``.
        seconds: time of all planning; the largest batch is also captured, unless WAIT times as long have passed.
        memory: device memory in bytes, for tensors and everything else; None: the limit applies to tensors only.
        other_bytes: bytes of device memory not used by tensors, at the original batch.
    """
    program, machine, limit = task
    limit = memory or limit
    if workload is None:
        return Largest(why=reason)
    capture_deadline = time.monotonic() + TIMEOUT_FACTOR * seconds
    planner = ""
    tries = 0
    timed_out = False
    try:
        steps = capture.batches(workload, machine, memory, program, other_bytes)
        deadline = time.monotonic() + BATCHES_SHARE * seconds

        def plan_overhead(step: Program, available: int) -> float | None:
            """Returns the overhead of the first plan of at most ``most_overhead``, or None."""
            nonlocal planner, tries, timed_out
            if not floor(step, machine, available, mode, detail=0.0).feasible:
                return None
            for name in (FIRST[0], "best"):
                timed_out = timed_out or time.monotonic() >= deadline
                if not timed_out:
                    tries += 1
                    searcher = report.make(name, mode=mode, seconds=BATCHES_SHARE * seconds / 10, min_bytes=small(step))
                    row, *_ = report.score_with(searcher, step, machine, available, 0, mode)
                    if row["feasible"] and row["overhead"] <= most_overhead:
                        planner = name
                        return float(row["overhead"])
            return None

        without = steps.largest(limit)
        with_plan = steps.largest_planned(plan_overhead, limit, without, most_overhead)
        if checked := bool(without) and time.monotonic() < capture_deadline:
            capture.check(workload, machine, without, steps.peak_bytes(without))
        micro = steps.accumulated(limit) if without < steps.batch else None
    except (BatchError, *expected_errors()) as error:
        return Largest(why=str(error))
    extended_s = rounded_up(max(2.0, TRIES / max(tries, 1)) * seconds) if timed_out else None
    cost = micro[2] if micro else 0.0
    return Largest(
        steps.batch,
        without,
        with_plan,
        planner,
        most_overhead,
        checked,
        micro and micro[:2],
        cost,
        SCALE * steps.batch,
        extended_s,
    )


if __name__ == "__main__":
    main()
