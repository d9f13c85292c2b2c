"""Will it fit? What a training step needs, whether a memory holds it, and the cheapest plan where it does not.

    python -m experiments.plan target=mymodel:factory machine=h100 memory=24GiB
    python -m experiments.plan workload=gpt2_medium machine=h100 memory=16GiB
    python -m experiments.plan program=step.json machine=my_machine.yaml memory=0.6

Nothing is planned where the step fits. Else published methods and the planner ``best`` plan within ``seconds``, and the
cheapest plan is recommended; of plans that cost about as much, that which costs least if kernel times are others
than modelled (times.py).

The run directory holds report.html (opens alone), plan.json (where there is a plan), memory.png, timeline.json (for
Perfetto), results.jsonl and summary.json. Its path is the last line printed. Exit status 1: it does not fit.
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
from agents.floor import Floor, floor
from agents.host import host_needed
from agents.learned.best import HUGE, LOADING
from agents.planner import small
from agents.search.annealing import everything
from agents.search.other_times import ForFaster, TimesError
from experiments.common import cli, report
from experiments.common.endings import expected_errors
from experiments.common.report import Row
from experiments.plan import capture, times
from experiments.plan.answer import Answer, Best, Largest, Times
from experiments.plan.capture import Step
from experiments.plan.how_to_run import checkpoints, fit_call
from experiments.plan.max_batch import MOST, BatchError
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
# Of the published methods: quick ones that see to it that each family has a fair plan, whatever the time; the slowest.
FIRST, LAST = ("tensile", "autoswap_swdoa", "tflms", "superneurons", "activation_budget"), ("capuchin",)
SEARCH_NAME, FASTER_NAME, LESS_NAME = "search", "for faster kernels", "less fragmented"  # as PUBLISHED
CAPTURE, FLOOR, LARGEST = "capturing", "the floor", "the largest batch"  # what else is done
# Of the seconds: of all published methods of a kind, of each; of the search, in less memory, of the largest batch.
KIND, EACH, SEARCH, LESS, FASTER, BATCHES = 0.15, 0.15, 0.5, 0.3, 0.1, 0.15
PER_KERNEL, LEAST, LONGEST = 2e-3, 2.0, 30.0  # seconds by default: by the kernels, within these
QUICK = ("autoswap_doa", "memonger")
TRIES = 16  # of planners, in which the search for the largest batch usually comes to its end
GAPS, DETAIL = 800, 0.15  # of a floor of its own, beside that of the search
WAIT = 3  # times the seconds: how long the floor may take, and until when the largest batch is captured
PARTS = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6)  # of the limit, within which a plan that the card's allocator serves is sought
FIXED = "a program file has the batch that it was captured with"

Task = tuple[Program, Machine, int]


@cli.entry("plan")
def main(cfg: DictConfig) -> Path:
    began = time.monotonic()
    machine, mode, seed = cli.machine(cfg), cli.choice(cfg, "mode", MODES), cli.integer(cfg, "seed")
    seconds = cli.number(cfg, "seconds") if cfg.seconds is not None else None
    most_overhead, look = cli.number(cfg, "largest_overhead"), cli.choice(cfg, "largest", (True, False))
    workload, wanted = workload_of(cfg), cfg.memory if cfg.memory is not None else machine.memory_bytes
    memory = None if is_fraction(wanted) else size_bytes(wanted, "memory")  # of the card; a fraction is of the tensors
    known = times.read(cfg, machine, workload is not None)
    workload = times.with_step(workload, known)
    todo = stages(mode, known.error)
    with report.staged(todo) as begin:
        begin(CAPTURE)
        if workload is None:
            program = times.lasting(cli.program(cfg, machine), known)
            # Of what stands beside the tensors of a file only the allocator and the context are known.
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
                families += [] if more is None else [replace(more, row=report.certified(more.row, bound))]
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
    """What is done for plans of ``mode``, in order, and about how long it takes, of the seconds of planning."""
    kinds = {family: KIND for kind, family in PUBLISHED.items() if mode in (kind, "joint")}
    faster = {FASTER_NAME: FASTER} if error is not None else {}
    return {CAPTURE: 1.0, **kinds, SEARCH_NAME: SEARCH, **faster,
            FLOOR: DETAIL, LARGEST: BATCHES}  # fmt: skip


def workload_of(cfg: DictConfig) -> dict[str, Any] | None:
    """The workload to capture; None: a program file is planned.

    Raises:
        UsageError: nothing is named, or two things are.
    """
    named = cfg.workload.get("family") != "module" or cfg.workload.get("name") != "module"
    if sum((cfg.program is not None, cfg.target is not None, named)) != 1:
        raise cli.UsageError("what to plan is named by one of target=, workload= and program=")
    if cfg.program is not None:
        return None
    workload = cli.plain(cfg.workload)
    return workload if named else {**workload, "name": str(cfg.target).replace(":", ".")}


def get_ready(machine: Machine, mode: str) -> None:
    """Imports and compiles what is needed later, so that it is not timed."""
    from experiments.plan import page  # noqa: F401  # Matplotlib

    for name in ("annealing", "lp_round"):
        report.warm_up(machine, name, mode)


def answered(
    task: Task, origins: Origins | None, mode: str, families: list[Best], bound: Floor, size: Largest, began: float,
    known: Times | None = None,
) -> Answer:  # fmt: skip
    """All that was found; which plan is recommended: ``times.recommended``."""
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
    plans = (everything(program, kind, 0) for kind in kinds)  # that empty every gap
    nearest = min(Engine(program, machine, limit).score(p).required_bytes for p in plans) if nothing else None
    host = host_needed(program, machine, limit, mode) if nothing and families else None
    return Answer(
        program, machine, limit, mode, page, alone, tuple(families), best, bound.least_bytes, nearest,
        bound.overhead if proven else None, size, time.monotonic() - began, times=known,
        spread=others.spread(plan) if others is not None and plan is not None else None, host=host,
    )  # fmt: skip


def with_code(a: Answer, plan: Plan, step: Step, cfg: DictConfig, out: Path) -> Answer:
    """The answer with the code that runs its plan."""
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
    none = report.certified(report.score("none", program, answer.machine, answer.limit, 0, answer.mode)[0], bound)
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
    """The best plan of each family of methods that may have plans of ``mode``, and the floor under all; ``begin`` is
    told the name of each. Where the times have an error, a search plans for the fast end of it, too.

    Where the step fits, or it is proven that no plan does, none is made.
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
    search = report.made("best", mode=mode, seconds=SEARCH * seconds, seed=seed)
    found.append(best_of(SEARCH_NAME, [search], task, mode, seed))
    if error is not None and not huge and (starts := [b.plan for b in found if b.plan is not None]):
        begin(FASTER_NAME)
        faster = ForFaster(starts, error, None, mode, small(program), seed, FASTER * seconds)
        found.append(best_of(FASTER_NAME, [faster], task, mode, seed))
    begin(FLOOR)
    floors: list[Floor] = [getattr(search, "floor", None) or quick]
    with suppress(TimeUp), within(min(WAIT * seconds, LONGEST)):
        floors.append(floor(program, machine, limit, mode, GAPS, DETAIL, False, WAIT * seconds))
    bound = max(floors, key=lambda f: (not f.feasible, f.iteration_ns))
    return [replace(b, row=report.certified(b.row, bound) if b.row else None) for b in found], bound


def best_of(
    family: str, planners: Sequence[str | agents.Planner], task: Task, mode: str, seed: int, each: float = math.inf,
    together: float = math.inf, sure: Sequence[str] = (),
) -> Best:  # fmt: skip
    """The best plan that some planners make.

    Args:
        planners: names, or planners that are made.
        mode: of the plans.
        each: seconds of each of the names; one that takes longer and has no budget is broken off.
        together: seconds from the beginning after which no other is asked, once there is a plan.
        sure: those that are asked nevertheless, and have WAIT times as long.
    """
    begin, out, huge = time.monotonic(), [], len(task[0].kernels) >= HUGE
    rows: list[tuple[Row, Plan | None, Timeline | None]] = []
    for asked in planners:
        planner = asked
        if isinstance(planner, str):
            planner = report.made(planner, seed=seed, mode=mode, seconds=each, min_bytes=small(task[0]))
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
    """The families, with what the card counts under the plan of each: a plan leaves holes of other sizes than the step
    alone does, so that one whose tensors fit may not run."""
    if card is None:
        return list(families)
    return [b if b.timeline is None else replace(b, card=under_plan(card, b.timeline)) for b in families]


def wants_less(families: Sequence[Best]) -> bool:
    """Whether the cheapest plan is not served, and those that are cost ``times.ROOM`` more or are none."""
    least = {served: min((b.overhead for b in families if b.served == served), default=math.inf)
             for served in (True, False)}  # fmt: skip
    return least[False] < least[True] - times.ROOM


def tightened(task: Task, card: CardPeak, mode: str, seed: int, seconds: float) -> Best | None:
    """The first plan that the card's allocator serves, of ``best`` within parts of the limit; None: there is none.

    Args:
        seconds: of all of them.
    """
    began, (program, machine, limit) = time.monotonic(), task
    for part in PARTS:
        planner = report.made("best", seed=seed, mode=mode, seconds=seconds / len(PARTS))
        (best,) = judged([best_of(LESS_NAME, [planner], (program, machine, int(part * limit)), mode, seed)], card)
        if best.served:
            return replace(best, seconds=time.monotonic() - began)
        if best.plan is None:
            return None
    return None


def _rank(row: Row | None, plan: Plan | None) -> tuple[float, int]:
    """The least first: by time as far as it differs, then by decisions. Those without a plan come last."""
    if row is None or plan is None or not row["feasible"]:
        return math.inf, 0
    return round(row["overhead"] / times.TIE), len(plan.decisions)


def largest_batch(
    workload: Mapping[str, Any] | None, task: Task, mode: str, most_overhead: float, seconds: float, why: str = "",
    memory: int | None = None, beside: int = 0,
) -> Largest:  # fmt: skip
    """The largest batch without a plan and with one; see ``Largest``.

    Args:
        workload: None: the batch is not to be changed, and ``why`` not.
        seconds: of all planning; the largest batch is captured, too, unless WAIT times as long have passed.
        memory: of the card, for tensors and what stands beside them; None: the limit is the tensors'.
        beside: bytes of that at the own batch.
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
            """Overhead of the first plan that costs little enough."""
            nonlocal planner, tries, stopped
            if not floor(step, machine, room, mode, detail=0.0).feasible:
                return None
            for name in (FIRST[0], "best"):
                stopped = stopped or time.monotonic() >= until
                if not stopped:
                    tries += 1
                    made = report.made(name, mode=mode, seconds=BATCHES * seconds / 10, min_bytes=small(step))
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
