"""A training on one task, of either DQN: steps until there are enough, checkpoints, the best plan."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from agents.learned.checkpoint import must_match, read_training_state, restoring, write_training_state
from agents.learned.dqn_config import by_todays_names
from agents.planner import Infeasible, held_back
from simulator import Plan
from simulator.machine import Machine
from simulator.modes import least_residency
from simulator.program import Program


class Episode(NamedTuple):
    """Log entry of a finished episode, or of an iteration of dqn."""

    episode: int  # or iteration: how many have ended
    overhead: float  # of its plan, in the mean of the episodes that ended; nan in a dead end, and if none ended
    feasible: bool
    best_overhead: float  # so far; nan before the first feasible one
    epsilon: float  # nan of Stable-Baselines3, and the loss
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


class Trainer(ABC):
    """A training on one task that moves step by step.

    Attributes:
        program: planned on ``machine`` under ``limit`` bytes. config: hyperparameters.
        history: entries so far. checkpoint_every: entries. simulator_calls: so far. done: whether there are enough.
        best, best_overhead: plan found so far.

    Args:
        length: name of the hyperparameter that a continued run may change.
        entries: key of ``history`` in a checkpoint.
    """

    def __init__(
        self, program: Program, machine: Machine, limit: int, config: Any, seed: int, length: str, entries: str
    ) -> None:
        self.program, self.machine, self.limit, self.config, self.seed = program, machine, limit, config, seed
        self.checkpoint_every: int = config.checkpoint_every
        self.history: list[Episode] = []
        self.best: Plan | None = None
        self.best_overhead = math.nan
        self._length, self._entries = length, entries

    @property
    def episodes(self) -> int:
        """How many entries there are."""
        return len(self.history)

    @property
    @abstractmethod
    def simulator_calls(self) -> int: ...

    @property
    @abstractmethod
    def done(self) -> bool: ...

    @abstractmethod
    def step(self) -> list[Episode]:
        """Moves on; returns the entries that this ended."""

    @abstractmethod
    def greedy(self) -> Plan | None:
        """Returns the greedy policy's plan; None in a dead end."""

    @abstractmethod
    def greedy_overhead(self) -> float:
        """Returns the greedy policy's overhead, NaN in a dead end; the training is not affected."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Returns what ``restore`` continues from, beside the history and the best plan."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Continues from a ``state``."""

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with to be of this run; it may be longer."""
        return {"config": asdict(self.config) | {self._length: 1}, "seed": self.seed, "limit": self.limit,
                "program": self.program.fingerprint, "machine": json.dumps(self.machine.to_dict())}  # fmt: skip

    def save(self, path: Path) -> None:
        """Writes a checkpoint, whole or not at all."""
        write_training_state(path, {
            **self._identity(), **self.state(), self._entries: [list(e) for e in self.history],
            "best": json.dumps(self.best.to_dict()) if self.best else "", "best_overhead": self.best_overhead,
        })  # fmt: skip

    def load(self, path: Path) -> None:
        """Continues from a checkpoint; raises TrainingStateError if the file is of another run."""
        state = read_training_state(path)
        if isinstance(state.get("config"), dict):  # an older file lacks newer keys
            state["config"] = asdict(type(self.config)()) | by_todays_names(state["config"]) | {self._length: 1}
        must_match(path, state, self._identity())
        with restoring(path):
            self.restore(state)
            self.history = [Episode(*e) for e in state[self._entries]]
            self.best = Plan.from_dict(json.loads(state["best"])) if state["best"] else None
            self.best_overhead = state["best_overhead"]


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


def check_reachable(program: Program, limit: int, min_bytes: int, mode: str) -> None:
    """Raises Infeasible if not even emptying every gap would fit; recomputation chains may need more."""
    if (smallest := least_residency(program, min_bytes, mode)) > limit:
        raise Infeasible(
            f"{program.name} cannot run in {limit:,} bytes: with every candidate tensor away whenever it is not in use "
            f"it still needs {smallest:,} bytes{held_back(program, limit, min_bytes)}"
        )
