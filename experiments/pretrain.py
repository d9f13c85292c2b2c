"""Captures programs and trains the shipped weights of the policy (expert_iteration.py) or the DQN (pretrain_edits.py).

    python -m experiments.pretrain out=runs/pretrain
    python -m experiments.pretrain out=runs/pretrain seed=1 training.width=32
    python -m experiments.pretrain out=runs/pretrain agent=dqn dqn.message_passing=false

Files already in ``out`` are reused, so an interrupted run continues: programs/ and times/ (kernel times of each
program's tasks); edits.jsonl (tasks of the DQN); lessons-0.jsonl (annealing's plans, a line per task); lessons-1.jsonl
(with the plans of the first network's search); structure2vec-<seed>/ and dqn-<seed>/ (training state, log.jsonl,
weights). See agents/learned/README.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from omegaconf import DictConfig
from rich.progress import Progress, TaskID

from experiments.common import cli, report, workers
from experiments.common.errors import resumable
from experiments.pretrain_tasks import LIMITS, Network, capture_one, count_timed, draw_machine, task_program, task_rng
from simulator.files import FormatError
from simulator.machine import Machine
from simulator.settings import at_least, check, read

if TYPE_CHECKING:
    from agents.learned.expert_iteration import Lesson


def words_of(typed: list[str]) -> list[str]:
    """Returns the command line's words with ``agent=`` renamed to ``network=``, because agent is a config group."""
    return [f"network={word[6:]}" if word.startswith("agent=") else word for word in typed]


@cli.entry("pretrain", prepare=words_of)
@resumable
def main(cfg: DictConfig) -> None:
    """Captures the programs and trains the network that ``agent=`` selects."""
    sets = [read_set(i, entry) for i, entry in enumerate(cli.values(cfg, "sets"))]
    held_out = set(cli.values(cfg, "held_out"))
    unknown = held_out - {name for _, networks in sets for network in networks for name in network["family"]}
    if unknown:
        raise cli.UsageError(f"held_out: no network in sets has family {sorted(unknown)[0]!r}; remove it")
    tasks_each = cli.integer(cfg, "tasks", 1)
    seed = cli.integer(cfg, "data_seed")
    net_seed = cli.integer(cfg, "seed")
    rounds = cli.integer(cfg, "rounds")
    pool = cli.launcher(cfg)
    out = cli.path(cfg, "out") or Path("runs/pretrain")
    edits = cli.choice(cfg, "network", ("policy", "dqn")) == "dqn"
    counts = cli.values(cfg, "dqn_programs")
    fits = len(counts) == len(sets) and all(type(n) is int and 0 <= n <= sets[i][0] for i, n in enumerate(counts))
    if edits and not fits:
        raise cli.UsageError(f"dqn_programs: expected one integer per set, at most its programs, got {counts}")

    from agents.learned import expert_iteration as learning  # slow to import; configuration errors come first
    from agents.learned.checkpoint import save_weights
    from agents.learned.dqn_config import Args
    from agents.learned.optimization import one_thread

    settings = cli.dataclass_from_config(learning.Training, cfg.training, "training")
    args = cli.dataclass_from_config(Args, cfg.dqn, "dqn")
    one_thread()
    folder = out / f"structure2vec-{net_seed}"
    for subfolder in (out / "programs", out / "times", *(() if edits else (folder,))):
        subfolder.mkdir(parents=True, exist_ok=True)
    with report.lock_directory(out):
        drawn_from = [networks for programs, networks in sets for _ in range(programs)]  # networks per program
        count = len(drawn_from)
        offsets = [sum(programs for programs, _ in sets[:k]) for k in range(len(sets))]
        ids = [i for k, n in enumerate(counts) for i in range(offsets[k], offsets[k] + n)] if edits else range(count)
        todo = [(out, drawn_from[i], seed, i, tasks_each) for i in ids if count_timed(out, i) < tasks_each]
        run(capture_one, todo, pool, "capturing programs", lambda _: None)
        if edits:
            from experiments import pretrain_edits

            jobs = [(out, seed, i, j) for i in ids for j in range(tasks_each)]
            append(out / "edits.jsonl", pretrain_edits.prepare, jobs, pool, "preparing tasks")
            print(pretrain_edits.train(out, args, net_seed, cli.path(cfg, "weights")))
            return
        tasks = [(out, seed, i, j) for j in range(tasks_each) for i in range(count)]  # a larger ``tasks`` appends
        append(out / "lessons-0.jsonl", plan_one, tasks, pool, "planning tasks")

        log = report.console(stderr=True)
        net = None
        for round_ in range(rounds + 1):
            if round_ and net is not None:
                guide = folder / f"round-{round_ - 1}.pt"
                save_weights(net, guide)
                lines = (out / f"lessons-{round_ - 1}.jsonl").read_text().splitlines()
                guided = [(out, line, guide, i) for i, line in enumerate(lines)]
                append(out / f"lessons-{round_}.jsonl", improve_plans, guided, pool, "planning tasks with the network")
            lessons = [lesson for lesson in read_lessons(out, round_) if lesson.is_useful]
            validation = [lesson for lesson in lessons if lesson.program.name in held_out][:48]  # name = family
            examples = [learning.Example(lesson) for lesson in lessons if lesson.program.name not in held_out]
            if not examples or not validation:
                raise cli.UsageError(
                    f"{out}: no tasks to train on, or none to validate on: increase the programs of sets"
                )
            if net is None:
                net = learning.network(examples, settings, net_seed)
            log.print(f"round {round_}: {len(examples)} training tasks, {len(validation)} validation tasks")

            bar = report.progress(log)
            task = bar.add_task("training", total=settings.epochs)

            def watch(entry: dict[str, Any], round_: int = round_, bar: Progress = bar, task: TaskID = task) -> None:
                bar.update(task, completed=entry["epoch"])
                log.print(
                    f"epoch {entry['epoch']}: loss {entry['loss']:.4f}, {entry['validation']:.3f} points above the best"
                )
                with (folder / "log.jsonl").open("a") as file:
                    file.write(json.dumps({"round": round_, **entry}) + "\n")

            state = folder / f"state-{round_}.pt"
            with bar:
                net = learning.train(net, examples, validation, settings, net_seed + 1000 * round_, state, watch)
        weights = cli.path(cfg, "weights") or folder / "policy.pt"
        save_weights(net, weights)
        print(weights)


@dataclass(frozen=True)
class ProgramSet:
    """Entry of ``sets``: the number of programs, and the networks to draw them from."""

    programs: int = at_least(1)
    networks: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        check(self)
        if not self.networks:
            raise ValueError("networks: expected at least one network")


def read_set(i: int, entry: object) -> tuple[int, list[Network]]:
    """Returns the number of programs and the networks of entry ``i``; raises FormatError that names the entry."""
    where = f"sets[{i}]"
    chosen = read(ProgramSet, entry, where)
    return chosen.programs, [check_network(f"{where}.networks[{j}]", one) for j, one in enumerate(chosen.networks)]


def check_network(location: str, entry: Any) -> Network:
    """Returns the possible values of each setting as lists; raises UsageError naming ``location``."""
    if not isinstance(entry, dict) or not isinstance(entry.get("family"), str):
        raise cli.UsageError(f"{location}: expected a mapping with family, got {entry!r}")
    lists = {str(key): value if isinstance(value, list) else [value] for key, value in entry.items()}
    for key, values in lists.items():
        if not values:
            raise cli.UsageError(f"{location}.{key}: expected at least one value")
    return lists


def run(
    fn: Callable[[Any], Any], tasks: Sequence[Any], pool: tuple[str, int | None], text: str, done: Callable[[Any], None]
) -> None:
    """Calls ``done`` with the result of each task, in order, with a progress bar.

    ``pool``: launcher and number of parallel workers (common/workers.py); ("processes", 1) runs in this process.
    """
    if not tasks:
        return
    waiting: dict[int, Any] = {}
    next_index = 0
    with report.progress() as bar:
        bar_task = bar.add_task(text, total=len(tasks))
        local = ((i, fn(task)) for i, task in enumerate(tasks))
        for i, result in local if pool == ("processes", 1) else workers.results(*pool, fn, [(task,) for task in tasks]):
            if isinstance(result, Exception):
                raise result
            waiting[i] = result
            while next_index in waiting:
                done(waiting.pop(next_index))
                next_index += 1
            bar.advance(bar_task)


def append(path: Path, fn: Callable[[Any], Any], jobs: Sequence[Any], pool: tuple[str, int | None], text: str) -> None:
    """Appends the results of all jobs, in order, to a file of JSON lines; jobs that have a line are skipped."""
    lines = path.read_text().splitlines(True) if path.exists() else []
    complete = [line for line in lines if line.endswith("\n")]
    if len(complete) < len(lines):  # the last line is incomplete; otherwise untouched: another training may read it
        path.write_text("".join(complete))
    with path.open("a") as file:

        def add(entry: Any) -> None:
            file.write(json.dumps(entry, separators=(",", ":")) + "\n")
            file.flush()

        run(fn, jobs[len(complete) :], pool, text, add)


def plan_one(task: tuple[Path, int, int, int]) -> dict[str, Any]:
    """Returns the teacher's plans of a random task, a line of lessons-0.jsonl; no plans if none is feasible."""
    from agents.learned.expert_iteration import first_plans, reachable
    from simulator.modes import MODES

    out, seed, i, j = task
    rng = task_rng(seed, i, j)
    machine = draw_machine(rng)
    program = task_program(out, i, j)
    mode = "joint" if rng.random() < 0.8 else rng.choice([m for m in MODES if m != "joint"])
    limit = reachable(program, machine, int(rng.uniform(*LIMITS) * program.peak_bytes), mode)
    plans = first_plans(program, machine, limit, mode)
    return {
        "program": i,
        "task": j,
        "machine": machine.to_dict(),
        "limit": limit,
        "mode": mode,
        "plans": [[ns, rows.tolist()] for ns, rows in plans],
    }


def improve_plans(task: tuple[Path, str, Path, int]) -> dict[str, Any]:
    """Returns a line of the next lessons: a task's plans, with the plans of the search that the network guides."""
    from agents.learned.expert_iteration import better_plans
    from agents.learned.policy_net import trained

    out, line, weights, seed = task
    entry: dict[str, Any] = json.loads(line)
    lesson = lesson_of(out, entry)
    if lesson.is_useful:
        entry["plans"] = [[ns, rows.tolist()] for ns, rows in better_plans(trained(weights), lesson, seed)]
    return entry


def read_lessons(out: Path, round_: int) -> list[Lesson]:
    """Returns all lessons of a round; raises FormatError naming the line."""
    path = out / f"lessons-{round_}.jsonl"
    lessons = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            lessons.append(lesson_of(out, json.loads(line)))
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{path}: line {number} is not a task with plans ({error}); delete the file") from None
    return lessons


def lesson_of(out: Path, entry: dict[str, Any]) -> Lesson:
    """Parses a line of the plans file into a Lesson."""
    from agents.learned.expert_iteration import Lesson

    machine = Machine.from_dict(entry["machine"])
    program = task_program(out, entry["program"], entry["task"])
    plans = [(int(ns), np.array(rows, np.int64).reshape(-1, 6)) for ns, rows in entry["plans"]]
    return Lesson(program, machine, int(entry["limit"]), str(entry["mode"]), plans)


if __name__ == "__main__":
    main()
