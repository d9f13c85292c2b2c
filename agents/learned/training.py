"""A training on one task, of any form of the DQN: episodes until there are enough, checkpoints, the best plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from agents.planner import Infeasible, held_back
from envs.task import Task
from simulator import Plan, Swap
from simulator.compiled.engine import rows_of
from simulator.program import Program


class Episode(NamedTuple):
    """Log entry of a finished episode of dqn_paper, or of an iteration of dqn."""

    episode: int  # or iteration: how many have ended
    overhead: float  # of its plan, in the mean of the episodes that ended; nan in a dead end, and if none ended
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


class Trainer(Protocol):
    """A training that moves step by step.

    Attributes:
        program: planned under ``limit`` bytes. history: entries so far. episodes: how many of them there are.
        checkpoint_every: entries. simulator_calls: so far. done: whether there are enough. best: plan found so far.
    """

    program: Program
    limit: int
    history: list[Episode]
    checkpoint_every: int

    @property
    def episodes(self) -> int: ...
    @property
    def simulator_calls(self) -> int: ...
    @property
    def done(self) -> bool: ...
    @property
    def best(self) -> Plan | None: ...

    def step(self) -> list[Episode]:
        """Moves on; the entries that this ended."""

    def greedy(self) -> Plan | None:
        """The greedy policy's plan; None in a dead end."""

    def greedy_overhead(self) -> float:
        """Its overhead, for a curve; NaN in a dead end."""

    def save(self, path: Path) -> None:
        """Writes a checkpoint, whole or not at all."""

    def load(self, path: Path) -> None:
        """Continues from a checkpoint; raises TrainingStateError."""


def train(
    trainer: Trainer, checkpoint: Path | None = None, resume: Path | None = None,
    on_episode: Callable[[Episode], None] | None = None, on_step: Callable[[Trainer], None] | None = None,
) -> DQNResult:  # fmt: skip
    """Trains an agent to plan one program under one limit.

    Args:
        checkpoint: where to write the state of the run every ``checkpoint_every`` episodes and at the end.
        resume: a checkpoint of the same run to continue from.
        on_episode: called after every episode (on resuming, also with the earlier ones).
        on_step: called before the first step and after each.

    Raises:
        Infeasible: no plan was found.
        TrainingStateError: ``resume`` cannot be used.
    """
    fits = trainer.program.peak_bytes <= trainer.limit
    if resume is not None:
        trainer.load(resume)
    for episode in trainer.history:
        if on_episode:
            on_episode(episode)
    if on_step:
        on_step(trainer)
    saved = trainer.episodes // trainer.checkpoint_every
    while not trainer.done and not fits:
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
        if checkpoint is not None and trainer.episodes // trainer.checkpoint_every > saved:
            saved = trainer.episodes // trainer.checkpoint_every
            trainer.save(checkpoint)
    if checkpoint is not None:
        trainer.save(checkpoint)
    greedy = trainer.greedy()
    best = greedy if fits else trainer.best
    if best is None:
        raise Infeasible(f"none of {trainer.episodes} episodes found a plan that fits {trainer.limit:,} bytes")
    return DQNResult(best, greedy, trainer.history, trainer.episodes, trainer.simulator_calls)


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
