"""Score planners, or an existing plan, over a range of limits; no training.

    python -m experiments.evaluate workload=vgg16 limits=[0.8,0.6] planners=[autoswap_swdoa,annealing]
    python -m experiments.evaluate program=step.json plan=plan.json limits=[0.6]

The run directory holds summary.json, results.jsonl (a row per planner and limit) and overhead.png. Its path
is the last line printed.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from omegaconf import DictConfig

from experiments import cli, plots, report
from experiments.report import Row
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program


@cli.entry("evaluate")
def main(cfg: DictConfig) -> None:
    machine = cli.machine(cfg)
    seed = cli.integer(cfg, "seed")
    jobs = cli.jobs(cfg)
    plan_file = cli.path(cfg, "plan")
    plan = Plan.load(plan_file) if plan_file is not None else None
    names = report.planner_names(cli.values(cfg, "planners")) if plan is None else []
    program = cli.program(cfg, machine)
    limits = [cli.limit_bytes(value, program, "limits") for value in cli.values(cfg, "limits")]
    limits = sorted(set(limits), reverse=True)
    if plan is not None:
        plan.check(program)

    with report.RunDirectory(cli.path(cfg, "out"), f"evaluate-{program.name}") as out:
        if plan is not None:
            rows = [report.score_plan(plan, program, machine, limit, seed) for limit in limits]
        else:
            rows = score_all(program, machine, limits, names, seed, jobs)
        title = f"{program.name} on {machine.name}: overhead against the limit"
        plots.overhead_by_limit(out / "overhead.png", rows, title)
        report.write_rows(out / "results.jsonl", rows)
        report.write_summary(out / "summary.json", cfg, program, rows)
    report.console().print(report.table(rows, limits=True))
    print(out)


def score_all(
    program: Program, machine: Machine, limits: list[int], names: list[str], seed: int, jobs: int
) -> list[Row]:
    """A row for every limit and planner, in that order, with a progress bar on stderr."""
    tasks = list(itertools.product(limits, names))
    rows: dict[tuple[int, str], Row] = {}
    bar = report.progress()
    with bar:
        task = bar.add_task("starting", total=len(tasks))
        for key, row in _scored(tasks, program, machine, seed, min(jobs, len(tasks))):
            rows[key] = row
            bar.update(task, advance=1, description=f"scored {key[1]}")
    return [rows[key] for key in tasks]


def _scored(
    tasks: list[tuple[int, str]], program: Program, machine: Machine, seed: int, jobs: int
) -> Iterator[tuple[tuple[int, str], Row]]:
    if jobs == 1:
        _start_worker(program, machine, seed)
        yield from ((task, _score(*task)) for task in tasks)
        return
    # Spawned, not forked: the progress bar is a thread.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, context, _start_worker, (program, machine, seed)) as pool:
        futures = {pool.submit(_score, *task): task for task in tasks}
        for future in as_completed(futures):
            yield futures[future], future.result()


_worker: dict[str, Any] = {}  # what every task of a worker process shares


def _start_worker(program: Program, machine: Machine, seed: int) -> None:
    report.warm_up(machine)
    _worker.update(program=program, machine=machine, seed=seed)


def _score(limit: int, name: str) -> Row:
    return report.score(name, _worker["program"], _worker["machine"], limit, _worker["seed"])[0]


if __name__ == "__main__":
    main()
