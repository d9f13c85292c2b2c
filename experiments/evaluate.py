"""Scores planners, or an existing plan, over a range of limits and compares them with the certified lower bound.

    python -m experiments.evaluate workload=vgg16 limits=[0.8,0.6] planners=[autoswap_swdoa,annealing]
    python -m experiments.evaluate program=step.json plan=plan.json limits=[0.6]
    python -m experiments.evaluate program=profiled.json plan=plan.json retime=true limits=[0.6]
    python -m experiments.evaluate workload=my_net.yaml machine=my_machine.yaml limits=[24GiB,80%]
    python -m experiments.evaluate workload.algorithms=true workspace=true limits=[0.8,0.6] planners=[superneurons]
    python -m experiments.evaluate -m workload=vgg16,resnet50 limits=[0.8,0.7,0.6,0.5,0.4,0.3] planners=all

The run directory holds summary.json, results.jsonl (a row per planner and limit) and overhead.png. Its path
is the last line printed. No planner is trained.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import as_completed
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

import agents
from agents.floor import Floor, floor
from agents.heuristics.workspace import relaxed
from experiments.common import cli, report, workers
from experiments.common.report import Row
from experiments.figures import label as network_label
from simulator.compiled import warm
from simulator.limits import limit_bytes
from simulator.machine import Machine
from simulator.modes import MODES
from simulator.plan import Plan
from simulator.program import Program

FLOOR = "the floor"  # pseudo-planner of the floor's tasks
# Queued first, slowest to fastest, so that no core idles at the end.
SLOW = sorted((p for p, facts in agents.PLANNERS.items() if facts.slow), key=lambda p: -agents.PLANNERS[p].slow)

Task = tuple[str, int]  # planner or FLOOR, limit


@cli.entry("evaluate")
def main(cfg: DictConfig) -> Path:
    """Scores the planners at every limit and returns the run directory."""
    machine = cli.machine(cfg)
    seed = cli.integer(cfg, "seed")
    jobs = cli.jobs(cfg)
    mode = cli.choice(cfg, "mode", (None, *MODES))
    scale = cli.choice(cfg, "scale", ("log", "linear"))
    options = {
        "mode": mode,
        "calls": cli.integer(cfg, "calls", least=1) if cfg.calls is not None else None,
        "seconds": cli.number(cfg, "seconds") if cfg.seconds is not None else None,
        "min_bytes": cli.size(cfg, "min_bytes") if cfg.min_bytes is not None else None,
    }
    workspace = cli.choice(cfg, "workspace", (True, False, "least"))
    plan_file = cli.path(cfg, "plan")
    plan = Plan.load(plan_file) if plan_file is not None else None
    names = report.planner_names(cli.values(cfg, "planners"), **options) if plan is None else []
    program = cli.program(cfg, machine, "limits")
    if workspace and not any(kernel.variants for kernel in program.kernels):
        hint = "" if cfg.program is not None else "; workload.algorithms=true adds those of convolutions"
        raise cli.UsageError(f"workspace: no kernel of {program.name!r} has several algorithms{hint}")
    limits = [limit_bytes(value, program, "limits") for value in cli.values(cfg, "limits")]
    limits = sorted(set(limits), reverse=True)
    if plan is not None and cli.choice(cfg, "retime", (True, False)):
        plan = plan.retimed(program)
    elif plan is not None:
        plan.check(program)
    from experiments.plotting import plots  # slow import of Matplotlib, overlaps with compilation

    options_text = (f", mode={mode}" if mode else "") + (f", workspace={str(workspace).lower()}" if workspace else "")
    with report.RunDirectory(cli.path(cfg, "out"), f"evaluate-{program.name}") as out:
        if plan is not None:
            rows = [
                report.with_bounds(
                    report.score_plan(plan, program, machine, limit, seed, mode, workspace),
                    floor_under(program, machine, limit, mode, bool(workspace or plan.variants)),
                )
                for limit in report.track(limits, "scoring the plan within")
            ]
        else:
            rows = score_all(program, machine, limits, names, seed, jobs, {**options, "workspace": workspace})
        task = f"{network_label(program.name)}, {network_label(machine.name)}{options_text}"
        plots.overhead_by_limit(out / "overhead.png", rows, f"{task}: {plots.leaders(rows)}", scale)
        report.write_rows(out / "results.jsonl", rows)
        report.write_summary(out / "summary.json", cfg, program, rows)
    report.console().print(report.table(rows, limits=True))
    print(out)
    return out


def floor_under(program: Program, machine: Machine, limit: int, mode: str | None, variants: bool) -> Floor:
    """Returns the floor of a mode; with ``variants``, of plans with any kernel algorithms."""
    bound = floor(relaxed(program) if variants else program, machine, limit, mode or "joint")
    return replace(bound, overhead=bound.iteration_ns / program.ideal_ns - 1 if program.ideal_ns else 0.0)


def score_all(
    program: Program,
    machine: Machine,
    limits: list[int],
    names: list[str],
    seed: int,
    jobs: int,
    options: dict[str, Any],
) -> list[Row]:
    """Returns a row for every limit and planner, in that order; shows a progress bar on stderr.

    Args:
        options: planner options, as in ``report.score``.
        program, machine: Task.
        limits: Memory limits in bytes.
        names: Planners.
        seed: Seed of the planners.
        jobs: Number of worker processes.
    """
    queue = sorted(names, key=lambda name: SLOW.index(name) if name in SLOW else len(SLOW))
    tasks = [(name, limit) for name in [FLOOR, *queue] for limit in reversed(limits)]  # tight limits take longest
    results: dict[Task, Any] = {}
    with report.progress() as bar:
        progress_task = bar.add_task("starting", total=len(tasks))
        for task, result in _run_tasks(tasks, jobs, (program, machine, seed, options)):
            results[task] = result
            bar.update(progress_task, advance=1, description=f"scored {task[0]}")
    return [report.with_bounds(results[name, limit], results[FLOOR, limit]) for limit in limits for name in names]


def _run_tasks(tasks: list[Task], jobs: int, shared: tuple[Any, ...]) -> Iterator[tuple[Task, Row | Floor]]:
    """Yields every task with its result as it finishes.

    Quick tasks run in this process until worker processes pay off; ``jobs`` workers run the rest. Floors come first
    while the simulator is still compiling.
    """
    tasks = list(tasks)
    spent = 0.0
    _start_worker(*shared)
    while tasks and (jobs == 1 or (tasks[-1][0] not in SLOW and spent < 2.0)):
        floors = [i for i, (name, _) in enumerate(tasks) if name == FLOOR]
        task = tasks.pop(floors[-1] if floors and warm.busy() else -1)
        _warm_up(task[0])
        begin = time.process_time()
        yield task, _run_task(*task)
        spent += time.process_time() - begin
    if not tasks:
        return
    with workers.Pool(min(jobs, len(tasks)), _start_worker, shared) as pool:
        futures = {pool.submit(_run_task, *task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()


_worker: dict[str, Any] = {}  # state shared by the tasks of a worker process


def _start_worker(program: Program, machine: Machine, seed: int, options: dict[str, Any]) -> None:
    _worker.update(program=program, machine=machine, seed=seed, options=options, warm={FLOOR})


def _warm_up(name: str) -> None:
    if name not in _worker["warm"]:
        report.warm_up(_worker["machine"], name, _worker["options"]["mode"])
        _worker["warm"].add(name)


def _run_task(name: str, limit: int) -> Row | Floor:
    program, machine, seed, options = (_worker[key] for key in ("program", "machine", "seed", "options"))
    if name == FLOOR:
        return floor_under(program, machine, limit, options["mode"], bool(options.get("workspace")))
    _warm_up(name)
    # Planners run in parallel, so each uses one process.
    return report.score(name, program, machine, limit, seed, jobs=1, **options)[0]


if __name__ == "__main__":
    main()
