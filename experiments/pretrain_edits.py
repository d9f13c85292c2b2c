"""Pretraining of the DQN: one Q-network over many tasks with start plans (agents/learned/dqn.py).

``experiments.pretrain agent=dqn`` calls it after capturing programs. A task is a program on a randomly drawn machine
and limit. Start plans come from the policy, the best heuristic and short annealing runs, to cover bad and good plans;
a longer annealing run sets the reference of the rewards. Tasks in which that run gains less than ``LEAST_GAIN`` are
skipped. ``edits.jsonl`` has a line per task.
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
from experiments.pretrain_tasks import LIMITS, captured, drawn_machine, on_task, task_rng
from simulator.machine import Machine

MOST_GAPS = 600  # per task
LEAST_GAIN, MOST_OVERHEAD = 0.05, 60.0  # points: minimum gain over the policy's best plan, maximum overhead
RUNS = ((60, 3e-3), (300, 3e-3), (2000, 3e-3))  # calls and initial temperature of annealing for start plans
LONG, HOT, COLD, SEED = 4000, 1e-3, 3e-5, 9  # annealing run for the reference
NEAR = 25.0  # largest overhead of a start plan above the reference, in points
NAMED = {"vgg16": (0.35, 0.4, 0.45, 0.55), "resnet50": (0.3, 0.4, 0.5)}  # fixed tasks of the train split
EVERY = 50  # iterations between log lines and checkpoints


def prepare(job: tuple[Path, int, int, int]) -> dict[str, Any]:
    """Returns the line of a drawn task: limit, start plans and reference; without start plans if it is skipped."""
    out, seed, i, j = job
    entry: dict[str, Any] = {"program": i, "task": j, "starts": []}
    if len(captured(out, i).gaps(MIB)) > MOST_GAPS:
        return entry
    rng = task_rng(seed, i, j)
    machine, program = drawn_machine(rng), on_task(out, i, j)
    limit = reachable(program, machine, int(rng.uniform(*LIMITS) * program.peak_bytes), "joint")
    try:
        task = EditTask(program, machine, limit, "joint", MIB, policy)
    except ValueError:  # no eviction candidates, or infeasible
        return entry
    return {**entry, "machine": machine.to_dict(), "limit": limit, **_starts(task)}


def _starts(task: EditTask) -> dict[str, Any]:
    """Returns start plans and reference (in points) of a task."""
    found = [(start.iteration_ns, start.rows) for start in task.starts]
    rows = everything(task.program, task.mode, task.min_bytes)
    score = task.engine.score(rows)
    even = task.moves.fork(0)
    even.weights = np.where(task.moves.weights > 0, 1.0, 0.0)
    for k, (calls, hot) in enumerate(RUNS if score.feasible else ()):
        better, ns = anneal(even, task.engine, rows, score.iteration_ns, calls, hot, COLD, k)
        found.append((ns, better))
    first, first_rows = min(found, key=lambda one: one[0])
    _, least = anneal(task.moves, task.engine, first_rows, first, LONG, HOT, COLD, SEED)

    def points(ns: int) -> float:
        return 100 * (ns / task.ideal_ns - 1)

    reference = points(least)
    teaches = points(task.starts[0].iteration_ns) - reference > LEAST_GAIN and reference < MOST_OVERHEAD
    kept = [rows.tolist() for ns, rows in found if ns > task.ideal_ns and points(ns) < reference + NEAR]
    return {"reference": reference, "starts": kept if teaches else []}


def task_of(out: Path, entry: dict[str, Any]) -> tuple[EditTask, float]:
    """Returns the task of a line and its reference."""
    starts = [np.array(rows, np.int64).reshape(-1, 6) for rows in entry["starts"]]

    def given(task: EditTask) -> list[Rows]:
        policy_plans(task, samples=0)  # sets the policy's probabilities
        return starts

    program = on_task(out, entry["program"], entry["task"])
    task = EditTask(program, Machine.from_dict(entry["machine"]), int(entry["limit"]), "joint", MIB, given)
    return task, float(entry["reference"])


def named_tasks() -> list[tuple[EditTask, float]]:
    """Returns the tasks of ``NAMED`` with their references."""
    found = []
    for name, fractions in NAMED.items():
        program, machine = load(name)
        for fraction in fractions:
            task = EditTask(program, machine, int(fraction * program.peak_bytes), "joint", MIB, policy)
            found.append((task, float(_starts(task)["reference"])))
    return found


def train(out: Path, args: Args, seed: int, weights: Path | None) -> Path:
    """Trains on the tasks of ``edits.jsonl`` and the named ones, resuming if possible; returns the weights file."""
    lines = [json.loads(line) for line in (out / "edits.jsonl").read_text().splitlines()]
    pairs = [*(task_of(out, entry) for entry in lines if entry["starts"]), *named_tasks()]
    folder = out / f"dqn{'' if args.message_passing else '_flat'}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    state, log = folder / "state.pt", report.console(stderr=True)
    dqn = DQN([task for task, _ in pairs], [reference for _, reference in pairs], args, seed)
    if state.exists():
        dqn.load(state)
    log.print(f"{len(pairs)} tasks")
    with report.progress(log) as bar, (folder / "log.jsonl").open("a") as file:
        shown = bar.add_task("training", total=args.iterations, completed=len(dqn.history))

        def watch(dqn: DQN) -> None:
            bar.update(shown, completed=len(dqn.history))
            if len(dqn.history) % EVERY and len(dqn.history) < args.iterations:
                return
            last = dqn.history[-EVERY:]
            keys = sorted({key for row in last for key in row} - {"task", "calls"})
            means = {key: round(statistics.fmean(row[key] for row in last if key in row), 5) for key in keys}
            file.write(json.dumps({"iteration": len(dqn.history), "calls": dqn.calls, **means}) + "\n")
            file.flush()
            dqn.save(state)

        net = dqn.train(watch)
    path = weights or folder / "dqn.pt"
    save_weights(net, path)
    return path
