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
from experiments.plan.capture import MOST, BatchError, Step
from experiments.plan.usage import checkpoints, fit_call
from experiments.plan.words import rounded_up, slowest, verdict
from simulator import simulate
from simulator.compiled.engine import Engine
from simulator.files import write_json, write_text
from simulator.limits import is_fraction, limit_bytes, size_bytes
from simulator.machine import PRESETS, Machine
from simulator.modes import MODES
from simulator.plan import Plan
from simulator.pool.card import CardPeak, of_program, under_plan
from simulator.pool.packed import packed_bytes
from simulator.program import Program
from simulator.report import Origins, report as page_of
from simulator.timeline import Timeline

PUBLISHED = {"swap": "swap, published", "recompute": "recompute, published", "joint": "both, published"}
# Published methods: quick ones, which run even if the time is up, so that each family has a plan; the slowest.
FIRST, LAST = ("tensile", "autoswap_swdoa", "tflms", "superneurons", "activation_budget"), ("capuchin",)
SEARCH_NAME, FASTER_NAME, LESS_NAME = "search", "for faster kernels", "less fragmented"  # further families
CAPTURE, FLOOR, LARGEST = "capturing", "the floor", "the largest batch"  # other stages
# Shares of the time: published methods of one kind, one method, search, lower limits, faster kernels, largest batch.
KIND, EACH, SEARCH, LESS, FASTER, BATCHES = 0.15, 0.15, 0.5, 0.3, 0.1, 0.15
PER_KERNEL, LEAST, LONGEST = 2e-3, 2.0, 30.0  # default time in s: per kernel, minimum, maximum
QUICK = ("autoswap_doa", "memonger")
TRIES = 16  # planner calls that the search for the largest batch usually needs
GAPS, DETAIL = 800, 0.15  # of a second floor besides the search's
WAIT = 3  # multiple of the time: bound for the floor, deadline for capturing the largest batch
PARTS = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6)  # of the limit: tried until PyTorch's allocator serves a plan
FIXED = "a program file has a fixed batch size"

Task = tuple[Program, Machine, int]


@cli.entry("plan")
def main(cfg: DictConfig) -> Path:
    """Plans the step and returns the run directory; exits with status 1 if nothing fits."""
    began = time.monotonic()
    machine, mode, seed = cli.machine(cfg), cli.choice(cfg, "mode", MODES), cli.integer(cfg, "seed")
    seconds = cli.number(cfg, "seconds") if cfg.seconds is not None else None
    most_overhead, look = cli.number(cfg, "largest_overhead"), cli.choice(cfg, "largest", (True, False))
    workload, wanted = workload_of(cfg), cfg.memory if cfg.memory is not None else machine.memory_bytes
    memory = None if is_fraction(wanted) else size_bytes(wanted, "memory")  # of the device; a fraction is of tensors
    known = times.read(cfg, machine, workload is not None)
    if workload is not None and known.step_ns is not None:
        workload["iteration_ms"] = known.step_ns / 1e6
    todo = stages(mode, known.error)
    with report.track_stages(todo) as begin:
        begin(CAPTURE)
        if workload is None:
            program = times.lasting(cli.program(cfg, machine), known)
            # For a program file, only allocator and context overheads are known.
            step = Step(program, None, of_program(program, machine.context_bytes, memory), "", (), ())
        else:
            step = capture.step(workload, machine, memory)
        get_ready(machine, mode)
        program, card = step.program, step.card
        known = replace(known, said=f"{known.said} {step.arithmetic}".strip())
        limit = limit_bytes(cfg.memory, program, "memory") if card is None or memory is None else card.limit
        task = program, machine, limit
        seconds = seconds or min(max(PER_KERNEL * len(program.kernels), LEAST), LONGEST)
        with report.RunDirectory(cli.path(cfg, "out"), f"plan-{program.name}") as out:
            families, bound = planned(task, mode, seconds, seed, begin, known.error)
            families = judged(families, card)
            if card is not None and wants_less(families):
                more = tightened(task, card, mode, seed, LESS * seconds)
                families += [] if more is None else [replace(more, row=report.with_bounds(more.row, bound))]
            begin(LARGEST)
            why = FIXED if workload is None else ""
            beside = card.beside if card and memory else 0
            size = largest_batch(workload if look else None, task, mode, most_overhead, seconds, why, memory, beside)
            answer = answered(task, step.origins, mode, families, bound, size, began, known)
            answer = replace(answer, card=card, memory=memory, budget=seconds, slowest=slowest(step, machine))
            if answer.best is not None and answer.best.plan is not None:
                answer = with_code(answer, answer.best.plan, step, cfg, out)
            write(out, cfg, answer, bound)
    from experiments.plan.page import shown

    report.console().print(shown(answer))
    print(out)
    if not answer.fits and answer.best is None and HydraConfig.get().mode != RunMode.MULTIRUN:
        sys.exit(1)
    return out


def stages(mode: str, error: TimesError | None = None) -> dict[str, float]:
    """Returns the stages of planning in ``mode``, in order, with their expected shares of the time."""
    kinds = {family: KIND for kind, family in PUBLISHED.items() if mode in (kind, "joint")}
    faster = {FASTER_NAME: FASTER} if error is not None else {}
    return {CAPTURE: 1.0, **kinds, SEARCH_NAME: SEARCH, **faster, FLOOR: DETAIL, LARGEST: BATCHES}


def workload_of(cfg: DictConfig) -> dict[str, Any] | None:
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


def get_ready(machine: Machine, mode: str) -> None:
    """Imports and compiles everything that is used later, to keep it out of timings."""
    from experiments.plan import page  # noqa: F401  # Matplotlib

    for name in ("annealing", "lp_round"):
        report.warm_up(machine, name, mode)


def answered(
    task: Task, origins: Origins | None, mode: str, families: list[Best], bound: Floor, size: Largest, began: float,
    known: Times | None = None,
) -> Answer:  # fmt: skip
    """Assembles the answer; ``times.recommended`` selects the recommended plan."""
    program, machine, limit = task
    others = None if known is None else times.other_times(task, known.error)
    best = times.recommended([b for b in families if b.served], others)
    proven = bool(families) and bound.feasible
    plan = best.plan if best is not None else None
    alone = simulate(program, Plan(), machine, program.peak_bytes)
    under = best.timeline if best is not None and plan is not None and (plan.decisions or plan.variants) else None
    page = page_of(
        program, machine, limit, packed_bytes(under or alone, limit, machine.alignment), alone, under, plan,
        bound.iteration_ns if proven else None, origins,
    )  # fmt: skip
    nothing = program.peak_bytes > limit and best is None
    kinds = ("swap", "joint") if mode == "joint" else (mode,)
    plans = (everything(program, kind, 0) for kind in kinds)  # plans that evict in every gap
    nearest = min(Engine(program, machine, limit).score(p).required_bytes for p in plans) if nothing else None
    host = host_needed(program, machine, limit, mode) if nothing and families else None
    return Answer(
        program, machine, limit, mode, page, alone, tuple(families), best, bound.least_bytes, nearest,
        bound.overhead if proven else None, size, time.monotonic() - began, times=known,
        spread=others.spread(plan) if others is not None and plan is not None else None, host=host,
    )  # fmt: skip


def with_code(a: Answer, plan: Plan, step: Step, cfg: DictConfig, out: Path) -> Answer:
    """Adds the code that runs the recommended plan to the answer."""
    typed = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    name = a.machine.name
    if not (PRESETS / f"{name}.yaml").exists() or Machine.load(name) != a.machine:
        name = typed.get("machine", name)
    memory = cfg.memory if cfg.memory is not None else a.memory
    call = fit_call(cfg.target, memory, name, out.absolute())
    plain = checkpoints(a.program, a.machine, a.limit, plan, step.origins, step.modules)
    return replace(a, run_it=call, checkpoints=plain)


def write(out: Path, cfg: DictConfig, answer: Answer, bound: Floor) -> None:
    """Writes the run directory."""
    from experiments.plan.page import html
    from experiments.plotting import plots

    program, best = answer.program, answer.best
    none = report.with_bounds(report.score("none", program, answer.machine, answer.limit, 0, answer.mode)[0], bound)
    plan = best.plan if best else None
    if plan is not None:
        plan.save(out / "plan.json")
    write_json(out / "timeline.json", (answer.after or answer.before).perfetto(program))
    planner = plan.planner if plan else ""
    plots.memory_curve(out / "memory.png", answer.before, answer.after, answer.machine.name, planner, answer.limit)
    write_text(out / "report.html", html(answer, report.command()))
    rows = [none, *(b.row for b in answer.families if b.row is not None)]
    report.write_rows(out / "results.jsonl", rows)
    report.write_summary(
        out / "summary.json", cfg, program, rows, verdict=verdict(answer), fits=answer.fits,
        recommended=best.row["planner"] if best and best.row else None, least_bytes=answer.least_bytes,
        reached_bytes=answer.reached_bytes, floor=answer.floor, largest=asdict(answer.largest), memory=answer.memory,
        card=asdict(answer.card) if answer.card else None, card_planned=answer.card_planned,
        peak=asdict(answer.page.without), peak_planned=asdict(answer.page.under) if best else None,
        packed_bytes=answer.page.packed_bytes if best else None,
        families=[{"family": b.family, "planner": b.row["planner"] if b.row else None, "left_out": b.left_out}
                  for b in answer.families],
        host_bytes=answer.host, seconds=answer.seconds, times=asdict(answer.times) if answer.times else None,
        overheads=asdict(answer.spread) if answer.spread else None,
    )  # fmt: skip


# ------------------------------------------------------------------------------------ planning


def planned(
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
    quick = floor(program, machine, limit, mode, detail=0.0)
    if program.peak_bytes <= limit or not quick.feasible:
        return [], quick
    if seconds >= LOADING:
        report.warm_up(machine, "best", mode)  # PyTorch is loaded
    found = []
    huge = len(program.kernels) >= HUGE
    first = QUICK if huge else FIRST
    for kind, family in PUBLISHED.items():
        if mode in (kind, "joint"):
            names = [name for name in report.heuristics() if agents.PLANNERS[name].moves in (kind, "joint")]
            names.sort(key=lambda name: first.index(name) if name in first else len(first) + (name in LAST))
            begin(family)
            found.append(best_of(family, names, task, kind, seed, EACH * seconds, KIND * seconds, first))
    begin(SEARCH_NAME)
    search = report.make("best", mode=mode, seconds=SEARCH * seconds, seed=seed)
    found.append(best_of(SEARCH_NAME, [search], task, mode, seed))
    if error is not None and not huge and (starts := [b.plan for b in found if b.plan is not None]):
        begin(FASTER_NAME)
        faster = ForFaster(starts, error, None, mode, small(program), seed, FASTER * seconds)
        found.append(best_of(FASTER_NAME, [faster], task, mode, seed))
    begin(FLOOR)
    floors: list[Floor] = [getattr(search, "floor", None) or quick]
    with suppress(TimeUp), within(min(WAIT * seconds, LONGEST)):
        floors.append(floor(program, machine, limit, mode, GAPS, DETAIL, UNPROVEN, WAIT * seconds))
    bound = max(floors, key=lambda f: (not f.feasible, f.iteration_ns))
    return [replace(b, row=report.with_bounds(b.row, bound) if b.row else None) for b in found], bound


def best_of(
    family: str, planners: Sequence[str | agents.Planner], task: Task, mode: str, seed: int, each: float = math.inf,
    together: float = math.inf, sure: Sequence[str] = (),
) -> Best:  # fmt: skip
    """Returns the best plan of several planners.

    Args:
        planners: names, or planner objects.
        mode: mode of the plans.
        each: time in s per named planner; a planner without a budget option is aborted after it.
        together: time in s after which, once a plan exists, the remaining planners are skipped.
        sure: names that are never skipped and may take WAIT times as long.
    """
    begin, out, huge = time.monotonic(), [], len(task[0].kernels) >= HUGE
    rows: list[tuple[Row, Plan | None, Timeline | None]] = []
    for asked in planners:
        planner = asked
        if isinstance(planner, str):
            planner = report.make(planner, seed=seed, mode=mode, seconds=each, min_bytes=small(task[0]))
        late = time.monotonic() - begin > together and planner.name not in sure
        if late and (huge or any(row["feasible"] for row, *_ in rows)):
            out.append(planner.name)
            continue
        budget = not isinstance(asked, str) or "seconds" in agents.options(asked) or (huge and asked in QUICK)
        try:
            with within(None if budget else WAIT * each if planner.name in sure else each):
                rows.append(report.score_with(planner, *task, seed, mode))
        except TimeUp:
            out.append(planner.name)
    spent = time.monotonic() - begin
    if not rows:
        return Best(family, None, None, None, spent, tuple(out))
    row, plan, timeline = min(rows, key=lambda entry: _rank(*entry[:2]))
    return Best(family, row, None if timeline is None else plan, timeline, spent, tuple(out))


def judged(families: Sequence[Best], card: CardPeak | None) -> list[Best]:
    """Evaluates the device memory of each family's plan.

    A plan fragments memory differently from the unplanned step, so a plan whose tensors fit may still not run.
    """
    if card is None:
        return list(families)
    return [b if b.timeline is None else replace(b, card=under_plan(card, b.timeline)) for b in families]


def wants_less(families: Sequence[Best]) -> bool:
    """Returns whether an unserved plan beats all served plans by more than ``times.ROOM``."""
    least = {served: min((b.overhead for b in families if b.served == served), default=math.inf)
             for served in (True, False)}  # fmt: skip
    return least[False] < least[True] - times.ROOM


def tightened(task: Task, card: CardPeak, mode: str, seed: int, seconds: float) -> Best | None:
    """Returns the first plan of ``best``, over decreasing limits, that PyTorch's allocator serves; None without one.

    Args:
        seconds: total time.
    """
    began, (program, machine, limit) = time.monotonic(), task
    for part in PARTS:
        planner = report.make("best", seed=seed, mode=mode, seconds=seconds / len(PARTS))
        (best,) = judged([best_of(LESS_NAME, [planner], (program, machine, int(part * limit)), mode, seed)], card)
        if best.served:
            return replace(best, seconds=time.monotonic() - began)
        if best.plan is None:
            return None
    return None


def _rank(row: Row | None, plan: Plan | None) -> tuple[float, int]:
    """Returns a sort key: overhead up to TIE, then number of decisions; infeasible plans last."""
    if row is None or plan is None or not row["feasible"]:
        return math.inf, 0
    return round(row["overhead"] / times.TIE), len(plan.decisions)


def largest_batch(
    workload: Mapping[str, Any] | None, task: Task, mode: str, most_overhead: float, seconds: float, why: str = "",
    memory: int | None = None, beside: int = 0,
) -> Largest:  # fmt: skip
    """Searches for the largest batch without a plan and with one; see ``Largest``.

    Args:
        workload: None: the batch cannot be changed, for the reason ``why``.
        seconds: time of all planning; the largest batch is also captured, unless WAIT times as long have passed.
        memory: device memory in bytes, for tensors and everything else; None: the limit applies to tensors only.
        beside: bytes of device memory not used by tensors, at the original batch.
    """
    program, machine, limit = task
    limit = memory or limit
    if workload is None:
        return Largest(why=why)
    end, planner, tries, stopped = time.monotonic() + WAIT * seconds, "", 0, False
    try:
        steps = capture.batches(workload, machine, memory, program, beside)
        until = time.monotonic() + BATCHES * seconds

        def costs(step: Program, room: int) -> float | None:
            """Returns the overhead of the first plan of at most ``most_overhead``, or None."""
            nonlocal planner, tries, stopped
            if not floor(step, machine, room, mode, detail=0.0).feasible:
                return None
            for name in (FIRST[0], "best"):
                stopped = stopped or time.monotonic() >= until
                if not stopped:
                    tries += 1
                    made = report.make(name, mode=mode, seconds=BATCHES * seconds / 10, min_bytes=small(step))
                    row, *_ = report.score_with(made, step, machine, room, 0, mode)
                    if row["feasible"] and row["overhead"] <= most_overhead:
                        planner = name
                        return float(row["overhead"])
            return None

        without = steps.largest(limit)
        with_plan = steps.largest_planned(costs, limit, without, most_overhead)
        if checked := bool(without) and time.monotonic() < end:
            capture.check(workload, machine, without, steps.peak_bytes(without))
        micro = steps.accumulated(limit) if without < steps.own else None
    except (BatchError, *expected_errors()) as error:
        return Largest(why=str(error))
    goes_on = rounded_up(max(2.0, TRIES / max(tries, 1)) * seconds) if stopped else None
    cost = micro[2] if micro else 0.0
    return Largest(steps.own, without, with_plan, planner, most_overhead, checked, micro and micro[:2], cost,
                   MOST * steps.own, goes_on)  # fmt: skip


if __name__ == "__main__":
    main()
