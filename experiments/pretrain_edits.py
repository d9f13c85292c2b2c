"""Pretraining of the DQN: makes tasks with start plans and trains one Q-network on all of them (agents/learned/dqn.py).

``experiments.pretrain agent=dqn`` captures the programs and calls this module. A task is a program on a random machine
under a random limit. Its start plans come from the policy, the best heuristic and short annealing runs, so that walkers
see plans of varying quality. The reward's reference is the overhead of a longer run. Tasks in which that run gains
little are left out. ``edits.jsonl`` has a line per task.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from agents.learned.checkpoint import save_weights
from agents.learned.dqn import DQN
from agents.learned.dqn_config import Args
from agents.learned.expert_iteration import reachable
from agents.planner import MIB, Rows
from agents.search.annealing import everything
from agents.search.local_search import anneal
from envs.edit.starts import policy, policy_plans
from envs.edit.task import EditTask
from envs.tasks import load
from experiments.common import report
from experiments.pretrain_tasks import LIMITS, draw_machine, load_program, task_program, task_rng
from simulator.machine import Machine

LOG_EVERY = 50  # iterations between log lines and between checkpoints


def prepare(job: tuple[Path, int, int, int]) -> dict[str, Any]:
    """Returns the line of a random task: limit, start plans (empty: the task is left out) and reference."""
    out, seed, i, j = job
    entry: dict[str, Any] = {"program": i, "task": j, "starts": []}
    if len(load_program(out, i).gaps(MIB)) > 600:
        return entry
    rng = task_rng(seed, i, j)
    machine = draw_machine(rng)
    program = task_program(out, i, j)
    limit = reachable(program, machine, int(rng.uniform(*LIMITS) * program.peak_bytes), "joint")
    try:
        task = EditTask(program, machine, limit, "joint", MIB, policy)
    except ValueError:  # no tensor can be evicted, or no plan fits
        return entry
    return {**entry, "machine": machine.to_dict(), "limit": limit, **_starts(task)}


def _starts(task: EditTask) -> dict[str, Any]:
    """Returns the start plans and the reference (points) of a task."""
    plans = [(start.iteration_ns, start.rows) for start in task.starts]
    rows = everything(task.program, task.mode, task.min_bytes)
    score = task.engine.score(rows)
    uniform_moves = task.moves.fork(0)
    uniform_moves.weights = np.where(task.moves.weights > 0, 1.0, 0.0)
    cold = 3e-5
    for k, calls in enumerate((60, 300, 2000) if score.feasible else ()):
        better, ns = anneal(uniform_moves, task.engine, rows, score.iteration_ns, calls, 3e-3, cold, k)
        plans.append((ns, better))
    best_ns, best_rows = min(plans, key=lambda plan: plan[0])
    _, reference_ns = anneal(task.moves, task.engine, best_rows, best_ns, 4000, 1e-3, cold, seed=9)

    def points(ns: int) -> float:
        return 100 * (ns / task.ideal_ns - 1)

    reference = points(reference_ns)
    is_useful = points(task.starts[0].iteration_ns) - reference > 0.05 and reference < 60.0
    near_rows = [rows.tolist() for ns, rows in plans if ns > task.ideal_ns and points(ns) < reference + 25.0]
    return {"reference": reference, "starts": near_rows if is_useful else []}


def task_of(out: Path, entry: dict[str, Any]) -> tuple[EditTask, float]:
    """Returns the task of a line and its reference."""
    starts = [np.array(rows, np.int64).reshape(-1, 6) for rows in entry["starts"]]

    def stored_starts(task: EditTask) -> list[Rows]:
        policy_plans(task, samples=0)  # sets priors and move weights
        return starts

    program = task_program(out, entry["program"], entry["task"])
    task = EditTask(program, Machine.from_dict(entry["machine"]), int(entry["limit"]), "joint", MIB, stored_starts)
    return task, float(entry["reference"])


def named_tasks() -> list[tuple[EditTask, float]]:
    """Returns tasks of the train split with their references; they are added to the random tasks."""
    tasks = []
    for name, fractions in {"vgg16": (0.35, 0.4, 0.45, 0.55), "resnet50": (0.3, 0.4, 0.5)}.items():
        program, machine = load(name)
        for fraction in fractions:
            task = EditTask(program, machine, int(fraction * program.peak_bytes), "joint", MIB, policy)
            tasks.append((task, float(_starts(task)["reference"])))
    return tasks


def train(out: Path, args: Args, seed: int, weights: Path | None) -> Path:
    """Trains on the tasks of ``edits.jsonl`` and the named ones, resuming if interrupted; returns the weights' path."""
    lines = [json.loads(line) for line in (out / "edits.jsonl").read_text().splitlines()]
    pairs = [*(task_of(out, entry) for entry in lines if entry["starts"]), *named_tasks()]
    folder = out / f"dqn{'' if args.message_passing else '_flat'}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    state = folder / "state.pt"
    log = report.console(stderr=True)
    dqn = DQN([task for task, _ in pairs], [reference for _, reference in pairs], args, seed)
    if state.exists():
        dqn.load(state)
    log.print(f"{len(pairs)} tasks")
    with report.progress(log) as bar, (folder / "log.jsonl").open("a") as file:
        bar_task = bar.add_task("training", total=args.iterations, completed=len(dqn.history))

        def watch(dqn: DQN) -> None:
            bar.update(bar_task, completed=len(dqn.history))
            if len(dqn.history) % LOG_EVERY and len(dqn.history) < args.iterations:
                return
            recent = dqn.history[-LOG_EVERY:]
            keys = sorted({key for row in recent for key in row} - {"task", "calls"})
            means = {key: round(statistics.fmean(row[key] for row in recent if key in row), 5) for key in keys}
            file.write(json.dumps({"iteration": len(dqn.history), "calls": dqn.calls, **means}) + "\n")
            file.flush()
            dqn.save(state)

        net = dqn.train(watch)
    path = weights or folder / "dqn.pt"
    save_weights(net, path)
    return path
