"""Trains the DQN from scratch on several named programs and tests its greedy policy on programs that it never sees.

``experiments.train_dqn`` without a workload calls ``train_unseen``. Every training task is also repeated with slower
links, so that the start plans differ in overhead. All walks start at the plan that evicts every tensor (``empty``), and
no pretrained network takes part. The run directory contains unseen.json (all points), unseen.png and weights.pt. Until
then it holds checkpoint.pt (network, replay buffer and walkers, up to 0.6 GB with the default settings), written at
every point and at Ctrl-C: a run resumed with ``resume=RUN`` equals an uninterrupted one.
"""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig
from rich import box
from rich.table import Table

from envs.tasks import load
from experiments.common import cli, report
from experiments.common.resume import SETTINGS, DelayedStop, checkpoint_of, resumable, run_path
from experiments.common.tracking import tracker_class
from simulator.files import write_json
from simulator.machine import Machine

if TYPE_CHECKING:
    from agents.learned.dqn import DQN
    from agents.learned.edit_net import EditNet
    from envs.edit.task import EditTask

RESULT = "unseen.json"
RANDOM = "random ranking"
ABLATION = "without the network (output 0)"  # the greedy policy with its network's output replaced by zeros
HEAD = "supervised head of the same network"


@dataclass(frozen=True)
class Several:
    """Settings ``several`` of configs/train_dqn.yaml."""

    train: tuple[Any, ...]  # names of tasks: vgg16-45 is the program vgg16 in 45 % of its peak
    test: tuple[Any, ...]
    links: tuple[Any, ...]  # factors of the link's bandwidth, each for every training task
    calls: int  # simulator calls of the greedy policy on a test task
    seeds: int  # seeds of the greedy policy
    every: int  # training iterations between two points


def train_unseen(cfg: DictConfig) -> Path:
    """Trains, tests every ``several.every`` iterations, and returns the run directory; raises UsageError."""
    from agents.learned.checkpoint import save_weights  # PyTorch is slow to import
    from agents.learned.dqn import DQN
    from agents.learned.dqn_config import Args
    from agents.learned.optimization import one_thread
    from experiments.plotting.plots import unseen_learning

    args = cli.dataclass_from_config(Args, cfg.agent, "agent")
    several = read_several(cfg)
    seed = cli.integer(cfg, "seed")
    tracker = tracker_class(cfg)
    one_thread()
    screen = report.console()
    log = report.console(stderr=True)
    resume = checkpoint_of(cli.path(cfg, "resume"))
    begin = time.process_time()
    directory = report.RunDirectory(run_path(cfg, resume, RESULT), f"unseen-seed{seed}", finished=RESULT)
    with resumable(directory) as out:
        with log.status("compiling the simulator"):
            training = [make_task(name, float(factor), args) for name in several.train for factor in several.links]
            tests = [make_task(name, 1.0, args) for name in several.test]
        dqn = DQN(training, [0.0] * len(training), args, seed)
        levels = {
            RANDOM: test(tests, None, several, "uniform"),
            ABLATION: test(tests, without_output(dqn.net), several, "q"),
        }
        checkpoint = out / "checkpoint.pt"
        identity = {"several": json.dumps(cli.to_dict(cfg.several))}
        points: list[dict[str, Any]] = []
        if resume is not None:
            points += json.loads(dqn.load(resume, **identity)["points"])
            begin -= points[-1]["cpu_s"]
        write_json(out / SETTINGS, report.run_info(cfg), indent=1)  # for resume=
        with (
            closing(tracker(out, cli.to_dict(cfg))) as scalars,
            report.progress(log) as bar,
            DelayedStop() as stop,
        ):
            bar_task = bar.add_task("training", total=args.iterations, completed=len(dqn.history))

            def add_point(trainer: DQN) -> None:
                overheads = test(tests, trainer.net, several, "q")
                points.append(
                    {
                        "iterations": len(trainer.history),
                        "calls": trainer.calls,
                        "target_syncs": trainer.updates // args.target_every,
                        "cpu_s": round(time.process_time() - begin, 1),
                        "overheads": overheads,
                    }
                )
                scalars.log_scalars(trainer.calls, {"greedy/overhead": mean(overheads)})

            def watch(trainer: DQN) -> None:
                text = f"training, greedy policy {mean(points[-1]['overheads']):.1%} on unseen programs"
                bar.update(bar_task, completed=len(trainer.history), description=text)
                is_point = len(trainer.history) % several.every == 0 or len(trainer.history) == args.iterations
                if is_point:
                    add_point(trainer)
                if is_point or stop.stopping:
                    trainer.save(checkpoint, **identity, **trainer.replay_state(), points=json.dumps(points))
                stop.raise_if_stopped()

            for point in points:  # of the resumed run
                scalars.log_scalars(point["calls"], {"greedy/overhead": mean(point["overheads"])})
            if not points:
                add_point(dqn)
            net = dqn.train(watch)
        levels[HEAD] = test(tests, net, several, "improves")
        floors = [floor_of(task) for task in tests]
        save_weights(net, out / "weights.pt")
        unseen_learning(out / "unseen.png", points, levels, [str(name) for name in several.test], fmean(floors))
        result = {"several": cli.to_dict(cfg.several), "floors": floors, "levels": levels, "points": points}
        write_json(out / RESULT, {**report.run_info(cfg), **result}, indent=1)
        for file in (checkpoint, out / SETTINGS):
            file.unlink(missing_ok=True)
    screen.print(table(several, floors, levels, points))
    print(out)
    return out


def read_several(cfg: DictConfig) -> Several:
    """Returns the settings ``several``; raises UsageError that names the key."""
    lists: dict[str, Any] = {}
    for key in ("train", "test", "links"):
        value = cli.to_dict(cfg.several)[key]
        if not isinstance(value, list) or not value:
            raise cli.UsageError(f"several.{key}: expected a list with at least one entry, got {value!r}")
        lists[key] = tuple(value)
    for factor in lists["links"]:
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 0 < factor < float("inf"):
            raise cli.UsageError(f"several.links: expected numbers above 0, got {factor!r}")
    programs = {key: {cli.named_task(f"several.{key}", name)[0] for name in lists[key]} for key in ("train", "test")}
    shared = programs["train"] & programs["test"]
    if shared:
        raise cli.UsageError(
            f"several.test: {min(shared)!r} is in several.train, too, and would not be unseen; remove it"
        )
    counts: dict[str, Any] = {key: cli.integer(cfg, f"several.{key}", least=1) for key in ("calls", "seeds", "every")}
    return Several(**lists, **counts)


def make_task(name: object, factor: float, args: Any) -> EditTask:
    """Returns the task of a name.

    Args:
        name: task, such as "vgg16-45".
        factor: scales the bandwidth of the machine's link.
        args: settings of the agent, with ``mode`` and ``min_bytes``.

    Raises:
        UsageError: The name is unknown, or the task has no feasible start.
    """
    from envs.edit.starts import empty
    from envs.edit.task import EditTask

    key, fraction = cli.named_task("several", name)
    program, machine = load(key)
    try:
        limit = int(fraction * program.peak_bytes)
        return EditTask(program, with_link(machine, factor), limit, args.mode, args.min_bytes, empty)
    except ValueError as error:
        raise cli.UsageError(f"several: {name}: {error}") from None


def with_link(machine: Machine, factor: float) -> Machine:
    """Returns the machine with all bandwidths of its link scaled by ``factor``."""
    names = ("d2h_bytes_per_s", "h2d_bytes_per_s", "duplex_d2h_bytes_per_s", "duplex_h2d_bytes_per_s")
    scaled: dict[str, Any] = {name: int(getattr(machine, name) * factor) for name in names}
    return replace(machine, **scaled)


def without_output(net: EditNet) -> EditNet:
    """Returns a copy of the network whose outputs for an edit are zero, so that all edits rank equally."""
    ablated = copy.deepcopy(net)
    for parameter in (ablated.out.weight, ablated.out.bias, ablated.lift):
        parameter.data.zero_()
    return ablated


def test(tasks: Sequence[EditTask], net: EditNet | None, several: Several, ranks: str) -> list[list[float]]:
    """Returns the overhead of the plan found with ``several.calls`` simulator calls, by task and seed.

    Args:
        tasks: tasks to plan.
        net: network that ranks the edits; None: none.
        several: settings with the seeds and the number of calls.
        ranks: ranking of edits, as in the planner ``dqn``.
    """
    from agents.learned.dqn_planner import DQN as Planner

    overheads = []
    for task in tasks:
        row = []
        for seed in range(several.seeds):
            task.engine.calls = task.start_calls  # the planner counts them to divide its budget
            planner = Planner(mode=task.mode, ranks=ranks, min_bytes=task.min_bytes, seed=seed)
            rows = planner.search(task, net, several.calls)
            row.append(task.engine.score(rows).iteration_ns / task.ideal_ns - 1)
        overheads.append(row)
    return overheads


def floor_of(task: EditTask) -> float:
    """Returns the certified lower bound of the overhead."""
    from agents.floor import floor

    return floor(task.program, task.machine, task.limit, mode=task.mode).overhead


def mean(overheads: Sequence[Sequence[float]]) -> float:
    """Returns the mean over tasks and seeds."""
    return fmean(value for row in overheads for value in row)


def table(
    several: Several, floors: Sequence[float], levels: dict[str, list[list[float]]], points: list[dict[str, Any]]
) -> Table:
    """Returns a table of overheads by test task: controls, and the greedy policy before and after the training."""
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    out.add_column(f"overhead after {several.calls} calls", no_wrap=True)
    for name in (*several.test, "mean"):
        out.add_column(str(name), justify="right", no_wrap=True)
    rows = {
        **{name: levels[name] for name in (RANDOM, ABLATION)},
        "greedy policy, before": points[0]["overheads"],
        "greedy policy, trained": points[-1]["overheads"],
        HEAD: levels[HEAD],
    }
    out.add_row("floor", *(report.percent(value) for value in (*floors, fmean(floors))), style="italic")
    for name, overheads in rows.items():
        out.add_row(name, *(report.percent(fmean(row)) for row in overheads), report.percent(mean(overheads)))
    return out
