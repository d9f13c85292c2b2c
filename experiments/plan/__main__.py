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

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from agents.floor import Floor
from agents.host import host_needed
from agents.learned.best import LOADING
from agents.search.annealing import everything
from experiments.common import cli, report
from experiments.plan import capture, planning, times, what_if
from experiments.plan.answer import Answer, Best, Largest, Order, Times
from experiments.plan.capture import NO_OBSTACLE, Step
from experiments.plan.planning import EFFORT, Stage, Task
from experiments.plan.usage import checkpoints, fit_call
from experiments.plan.words import slowest, verdict
from simulator import simulate
from simulator.compiled.engine import Engine
from simulator.files import write_json, write_text
from simulator.limits import is_fraction, limit_bytes, size_bytes
from simulator.machine import PRESETS, Machine
from simulator.modes import MODES
from simulator.plan import Plan
from simulator.pool.device_memory import of_program
from simulator.pool.packed import packed_bytes
from simulator.program import Program
from simulator.report import Origins, report as page_of

if TYPE_CHECKING:  # avoids importing PyTorch
    from executor.capture.early_update import InBackward


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
    in_backward = cli.choice(cfg, "optimizer_in_backward", ("auto", True, False))
    if workload is None and in_backward != "auto":
        raise cli.UsageError(
            "optimizer_in_backward: a program file has one order of its kernels; capture the step (target= or "
            "workload=), or leave this out"
        )
    step_times = times.read(cfg, machine, workload is not None)

    stages = planning.stages(mode, step_times.error)
    with report.track_stages(stages) as begin:
        begin(Stage.CAPTURE)
        step = read_step(cfg, workload, machine, memory, step_times, in_backward, partial(begin, Stage.CAPTURE))
        seconds = seconds or EFFORT.default_s(step.program)
        warm_up(machine, mode, seconds)
        stages[Stage.CAPTURE] = (time.monotonic() - start) / seconds
        limit_of = partial(tensor_limit, cfg.memory, memory, step.program)
        begin(Stage.ORDER)
        step, update_order = choose_order(step, machine, limit_of, mode, EFFORT.order_share * seconds, seed)
        program = step.program
        card = step.card
        as_graph = not step.issue.obstacle
        task = program, machine, limit_of(step)
        with report.RunDirectory(cli.path(cfg, "out"), f"plan-{program.name}") as out:
            families, bound = planning.make_plans(task, mode, seconds, seed, begin, step_times.error)
            families = planning.with_memory(families, card, machine.alignment, as_graph)
            if card is not None and planning.needs_less_memory(families):
                tighter = planning.plan_tighter(task, card, mode, seed, EFFORT.tighter_share * seconds, as_graph)
                families += [] if tighter is None else [replace(tighter, row=report.with_bounds(tighter.row, bound))]
            begin(Stage.LARGEST)
            size = Largest()
            longest = Largest()
            half = None
            if search and workload is None:
                size = Largest(obstacle="a program file has a fixed batch size")
            elif search and workload is not None:
                other_bytes = card.beside if card and memory else 0
                sizes = partial(
                    planning.largest_batch,
                    workload,
                    task,
                    mode,
                    most_overhead,
                    seconds,
                    memory,
                    other_bytes,
                    step.in_backward,
                )
                size, half = sizes()
                begin(Stage.LONGEST)
                longest = planning.longest_sequence(workload, sizes)
            answer = replace(
                make_answer(task, step.origins, mode, families, bound, size, start, step_times),
                folder=out.absolute(),
                times=replace(step_times, note=f"{step_times.note} {step.arithmetic}".strip()),
                card=card,
                memory=memory,
                budget=seconds,
                slowest=slowest(step, machine),
                issue=step.issue,
                order=update_order,
            )
            answer = with_code(answer, step, cfg, out)
            answer = replace(answer, largest=size.including(answer.best), sequence=longest.including(answer.best))
            if not answer.fits:
                begin(Stage.WHAT_IF)
                answer = replace(answer, what_if=tuple(what_if.changes(answer, step, half, seconds, seed)))
            answer = replace(answer, seconds=time.monotonic() - start)
            write(out, cfg, answer, bound)

    from experiments.plan.page import render_text

    report.console().print(render_text(answer))
    print(out)
    if not answer.fits and answer.best is None and HydraConfig.get().mode != RunMode.MULTIRUN:
        sys.exit(1)
    return out


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


def read_step(
    cfg: DictConfig,
    workload: dict[str, Any] | None,
    machine: Machine,
    memory: int | None,
    step_times: Times,
    in_backward: InBackward,
    show: Callable[[str], None],
) -> Step:
    """Captures the workload, or reads the program file, with kernel times scaled to a measured step.

    Args:
        cfg: settings of the command.
        workload: settings of the workload; None: a program file.
        machine: machine to plan for.
        memory: device memory in bytes, or None.
        step_times: kernel times to use.
        in_backward: whether the update is in the backward pass.
        show: callback, receives how far the capture is.

    Returns:
        The captured step.
    """
    if workload is None:
        program = times.rescaled(cli.program(cfg, machine), step_times)
        # For a program file, only allocator and context overheads are known.
        return Step(program, None, of_program(program, machine.context_bytes, memory), "", (), NO_OBSTACLE, ())
    if step_times.step_ns is not None:
        workload["iteration_ms"] = step_times.step_ns / 1e6
    return capture.step(workload, machine, memory, in_backward, show)


def tensor_limit(typed: Any, memory: int | None, whole: Program, step: Step) -> int:
    """Returns the bytes that a step's tensors may take.

    Args:
        typed: memory= of the command.
        memory: device memory in bytes; None if ``typed`` is a fraction.
        whole: the program whose peak a fraction refers to.
    """
    if step.card is None or memory is None:
        return limit_bytes(typed, whole, "memory")
    return step.card.limit if step.issue.obstacle else step.card.graph_limit


def choose_order(
    step: Step, machine: Machine, limit_of: Callable[[Step], int], mode: str, seconds: float, seed: int
) -> tuple[Step, Order]:
    """Returns the step in the order of its kernels for which a first plan is faster, and what decided.

    Args:
        step: step as captured.
        machine: machine to plan for.
        limit_of: returns the bytes that a step's tensors may take.
        mode: mode of the plans.
        seconds: time of both first plans.
        seed: seed of the searches.
    """

    def overhead(step: Step, program: Program) -> float:
        return planning.first_overhead((program, machine, limit_of(step)), mode, seconds / 2, seed)

    if step.program.peak_bytes <= limit_of(step) or step.early is None:
        is_trained = any(kernel.phase == "optimizer" for kernel in step.program.kernels)
        if step.program.peak_bytes <= limit_of(step) or not is_trained:
            return step, Order(step.in_backward)
        changed = None if step.changed is None else (step.changed.peak_bytes, overhead(step, step.changed))
        return step, Order(step.in_backward, obstacle=step.obstacle, changed=changed)
    early = step.early
    overheads = overhead(step, step.program), overhead(early, early.program)
    peaks = step.program.peak_bytes, early.program.peak_bytes
    is_faster = overheads[1] < overheads[0] - times.TIE
    return early if is_faster else step, Order(is_faster, peaks, overheads)


def warm_up(machine: Machine, mode: str, seconds: float) -> None:
    """Imports and compiles everything that planning for ``seconds`` uses, to keep it out of timings."""
    from experiments.plan import page  # noqa: F401  # Matplotlib

    # ``best`` imports PyTorch if it has the time.
    for name in ("annealing", "lp_round", *(["best"] if seconds >= LOADING else [])):
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
    plan = best.plan if best is not None else None
    proven = bool(families) and bound.feasible
    unplanned = simulate(program, Plan(), machine, program.peak_bytes)
    planned = best.timeline if best is not None and plan is not None and (plan.decisions or plan.variants) else None
    packed = packed_bytes(planned or unplanned, limit, machine.alignment)
    floor_ns = bound.iteration_ns if proven else None
    reached_bytes = host = None
    if program.peak_bytes > limit and best is None:
        engine = Engine(program, machine, limit)
        kinds = ("swap", "joint") if mode == "joint" else (mode,)
        emptied = [engine.score(everything(program, kind, 0)) for kind in kinds]  # plans that evict in every gap
        reached_bytes = min(score.required_bytes for score in emptied)
        host = host_needed(program, machine, limit, mode) if families else None
    return Answer(
        program=program,
        machine=machine,
        limit=limit,
        mode=mode,
        page=page_of(program, machine, limit, packed, unplanned, planned, plan, floor_ns, origins),
        before=unplanned,
        families=tuple(families),
        best=best,
        least_bytes=bound.least_bytes,
        reached_bytes=reached_bytes,
        floor=bound.overhead if proven else None,
        largest=size,
        seconds=time.monotonic() - start,
        times=step_times,
        spread=perturbed.spread(plan) if perturbed is not None and plan is not None else None,
        host=host,
    )


def with_code(a: Answer, step: Step, cfg: DictConfig, out: Path) -> Answer:
    """Adds the code that runs the step to the answer, if it needs a plan or another order of its update."""
    plan = a.best.plan if a.best is not None else None
    if plan is None and not (a.fits and step.in_backward):
        return a
    overrides = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    name = a.machine.name
    if not (PRESETS / f"{name}.yaml").exists() or Machine.load(name) != a.machine:
        name = overrides.get("machine", name)
    memory = cfg.memory if cfg.memory is not None else a.memory
    call = fit_call(cfg.target, memory, name, None if plan is None else out.absolute(), step.in_backward)
    if plan is None:
        return replace(a, run_code=call)
    equivalent = checkpoints(a.program, a.machine, a.limit, plan, step.origins, step.modules)
    return replace(a, run_code=call, checkpoints=equivalent)


def write(out: Path, cfg: DictConfig, answer: Answer, bound: Floor) -> None:
    """Writes the run directory."""
    from experiments.plan.page import render_html
    from experiments.plotting import plots

    program = answer.program
    baseline = report.with_bounds(report.score("none", program, answer.machine, answer.limit, 0, answer.mode)[0], bound)
    plan = answer.best.plan if answer.best else None
    if plan is not None:
        plan.save(out / "plan.json")
    write_json(out / "timeline.json", (answer.after or answer.before).perfetto(program))
    planner = plan.planner if plan else ""
    plots.memory_curve(out / "memory.png", answer.before, answer.after, answer.machine.name, planner, answer.limit)
    write_text(out / "report.html", render_html(answer, report.command()))
    rows = [baseline, *(b.row for b in answer.families if b.row is not None)]
    report.write_rows(out / "results.jsonl", rows)
    report.write_summary(out / "summary.json", cfg, program, rows, **summary(answer))


def summary(a: Answer) -> dict[str, Any]:
    """Returns the entries of summary.json about the answer."""
    # The keys of two records are older than the names of their fields.
    keys = {"batch": "own", "sufficient_s": "goes_on", "obstacle": "why", "note": "said"}

    def entry(record: Any) -> dict[str, Any] | None:
        return {keys.get(key, key): value for key, value in asdict(record).items()} if record else None

    return {
        "verdict": verdict(a),
        "fits": a.fits,
        "recommended": a.best.row["planner"] if a.best and a.best.row else None,
        "least_bytes": a.least_bytes,
        "reached_bytes": a.reached_bytes,
        "floor": a.floor,
        "order": entry(a.order),
        "largest": entry(a.largest),
        "longest": entry(a.sequence),
        "what_if": list(map(asdict, a.what_if)),
        "memory": a.memory,
        "card": entry(a.card),
        "card_planned": a.card_planned,
        "peak": entry(a.page.without),
        "peak_planned": entry(a.best and a.page.under),
        "packed_bytes": a.best and a.page.packed_bytes,
        "families": [
            {"family": b.family, "planner": b.row["planner"] if b.row else None, "left_out": b.skipped}
            for b in a.families
        ],
        "host_bytes": a.host,
        "seconds": a.seconds,
        "times": entry(a.times),
        "overheads": entry(a.spread),
    }


if __name__ == "__main__":
    main()
