"""A training on one task, of either form of the DQN: episodes until there are enough, checkpoints, the best plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from agents.learned.dqn_config import DQNConfig, PaperConfig
from agents.planner import Infeasible, held_back
from envs.task import Task
from simulator import Machine, Plan, Program, Swap
from simulator.compiled.engine import rows_of

if TYPE_CHECKING:
    from agents.learned import dqn, dqn_paper

    Trainer = dqn.Trainer | dqn_paper.Trainer


class Episode(NamedTuple):
    """What is logged of one finished episode; of `dqn`, of those of a step, the median."""

    episode: int  # how many have ended
    overhead: float  # of its plan; nan in a dead end
    feasible: bool
    best_overhead: float  # so far; nan before the first feasible one
    epsilon: float
    loss: float  # mean over the updates since the last episode ended; nan where there was none
    steps: int
    simulator_calls: int  # in all


@dataclass(frozen=True)
class DQNResult:
    """The best plan found, the final greedy policy's (None: a dead end), and the episodes."""

    best: Plan
    greedy: Plan | None
    history: list[Episode]
    episodes: int
    simulator_calls: int


def train(
    program: Program, machine: Machine, limit: int, config: DQNConfig | PaperConfig, seed: int = 0,
    checkpoint: Path | None = None, resume: Path | None = None, on_episode: Callable[[Episode], None] | None = None,
    planner: str = "dqn", on_step: Callable[[Trainer], None] | None = None,
    made: Callable[..., Trainer] | None = None,
) -> DQNResult:  # fmt: skip
    """Trains an agent to plan one program under one limit.

    Args:
        checkpoint: where to write the state of the run every ``checkpoint_every`` episodes and at the end.
        resume: a checkpoint of the same run to continue from; the result is that of an unbroken run. It may get another
            number of episodes; what is left of the exploration then goes by that.
        on_episode: called after every episode (on resuming, also with the earlier ones).
        on_step: called before the first step and after each.
        made: the trainer's class, of task, config, seed and planner; None: that of the config.

    Raises:
        Infeasible: no plan is feasible at the limit, or none was found.
        TrainingStateError: ``resume`` cannot be used.
    """
    task = Task(program, machine, limit, config.min_bytes, config.mode)
    check_reachable(task, config.min_bytes)
    trainer = (made or trainer_of(config))(task, config, seed, planner)
    if resume is not None:
        trainer.load(resume)
    for episode in trainer.history:
        if on_episode:
            on_episode(episode)
    if on_step:
        on_step(trainer)
    saved = trainer.episodes // config.checkpoint_every
    while not trainer.done and program.peak_bytes > limit:
        finished = trainer.step()
        try:
            for episode in finished:
                if on_episode:
                    on_episode(episode)
        except KeyboardInterrupt:  # between two steps, where the run can go on
            if checkpoint is not None:
                trainer.save(checkpoint)
            raise
        if on_step:
            on_step(trainer)
        if checkpoint is not None and trainer.episodes // config.checkpoint_every > saved:
            saved = trainer.episodes // config.checkpoint_every
            trainer.save(checkpoint)
    if checkpoint is not None:
        trainer.save(checkpoint)
    greedy = trainer.greedy()
    best = greedy if program.peak_bytes <= limit else trainer.best
    if best is None:
        raise Infeasible(f"none of {trainer.episodes} episodes found a plan that fits {limit:,} bytes")
    return DQNResult(best, greedy, trainer.history, trainer.episodes, task.engine.calls)


def trainer_of(config: DQNConfig | PaperConfig) -> Callable[..., Trainer]:
    """The class that a configuration is of."""
    from agents.learned import dqn, dqn_paper  # both know the episodes of this module

    return dqn.Trainer if isinstance(config, DQNConfig) else dqn_paper.Trainer


def check_reachable(task: Task, min_bytes: int) -> None:
    """Raises Infeasible where not even swapping everything out in every gap would fit.

    A recomputed tensor is away in the same gap but costs its chain's memory, so this bounds all modes.
    """
    smallest = int(task.engine.residency(rows_of(Swap(*gap) for gap in task.graph.gaps)).max())
    if smallest > task.limit:
        raise Infeasible(
            f"{task.program.name} cannot run in {task.limit:,} bytes: with every candidate tensor swapped out "
            f"whenever it is not in use it still needs {smallest:,} bytes"
            f"{held_back(task.program, task.limit, min_bytes)}"
        )
