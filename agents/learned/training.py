"""Training loop of either DQN on one task: steps, checkpoints and the best plan."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from agents.learned.checkpoint import must_match, read_training_state, restoring, write_training_state
from agents.learned.dqn_config import RENAMED
from agents.planner import Infeasible, min_bytes_hint
from simulator import Plan
from simulator.machine import Machine
from simulator.modes import least_residency
from simulator.program import Program


class Episode(NamedTuple):
    """Log entry of a finished episode, or of one iteration of ``dqn``."""

    episode: int  # number of the episode or iteration, from 1
    overhead: float  # of its plan (iteration: mean of its ended episodes); NaN in a dead end or without ended episodes
    feasible: bool  # whether it found a plan that fits
    best_overhead: float  # so far; NaN before the first feasible plan
    epsilon: float  # NaN for Stable-Baselines3
    loss: float  # mean over the updates since the last entry; NaN without updates and for Stable-Baselines3
    steps: int
    simulator_calls: int  # cumulative


@dataclass(frozen=True)
class DQNResult:
    """Best plan found, the final greedy policy's plan (None: a dead end), and the episodes."""

    best: Plan
    greedy: Plan | None
    history: list[Episode]
    simulator_calls: int


class Trainer(ABC):
    """Stepwise training on one task.

    Attributes:
        program, machine, limit: the task; the limit is in bytes.
        config: hyperparameters.
        history: log entries.
        best, best_overhead: best plan so far and its overhead.

    Args:
        length: name of the hyperparameter that may change when a run is resumed.
        entries: key of ``history`` in a checkpoint.
    """

    def __init__(
        self, program: Program, machine: Machine, limit: int, config: Any, seed: int, length: str, entries: str
    ) -> None:
        self.program = program
        self.machine = machine
        self.limit = limit
        self.config = config
        self.seed = seed
        self.history: list[Episode] = []
        self.best: Plan | None = None
        self.best_overhead = math.nan
        self._length = length
        self._entries = entries

    @property
    def episodes(self) -> int:
        """Number of log entries."""
        return len(self.history)

    @property
    @abstractmethod
    def simulator_calls(self) -> int:
        """Number of simulator calls made so far."""

    @property
    def done(self) -> bool:
        """Whether training is complete."""
        return bool(self.episodes >= getattr(self.config, self._length))

    @abstractmethod
    def step(self) -> list[Episode]:
        """Advances training by one step and returns the new log entries."""

    @abstractmethod
    def greedy(self) -> Plan | None:
        """Returns the greedy policy's plan, or None if the policy reaches a dead end."""

    @abstractmethod
    def greedy_overhead(self) -> float:
        """Returns the overhead of the greedy policy's plan (NaN in a dead end); the training state is unchanged."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Returns the state for ``restore``, without the history and the best plan."""

    @abstractmethod
    def restore(self, state: dict[str, Any]) -> None:
        """Restores the training state that ``state`` returned."""

    def _identity(self) -> dict[str, Any]:
        """Returns the entries that a checkpoint of the same run must match; the run's length may differ."""
        return {
            "config": asdict(self.config) | {self._length: 1},
            "seed": self.seed,
            "limit": self.limit,
            "program": self.program.fingerprint,
            "machine": json.dumps(self.machine.to_dict()),
        }

    def save(self, path: Path) -> None:
        """Writes a checkpoint atomically."""
        write_training_state(
            path,
            {
                **self._identity(),
                **self.state(),
                self._entries: [list(e) for e in self.history],
                "best": json.dumps(self.best.to_dict()) if self.best else "",
                "best_overhead": self.best_overhead,
            },
        )

    def load(self, path: Path) -> None:
        """Restores a checkpoint; raises TrainingStateError if the file belongs to another run."""
        state = read_training_state(path)
        if isinstance(state.get("config"), dict):  # an older file lacks newer keys
            config = {RENAMED.get(key, key): value for key, value in state["config"].items()}
            state["config"] = asdict(type(self.config)()) | config | {self._length: 1}
        must_match(path, state, self._identity())
        with restoring(path):
            self.restore(state)
            self.history = [Episode(*e) for e in state[self._entries]]
            self.best = Plan.from_dict(json.loads(state["best"])) if state["best"] else None
            self.best_overhead = state["best_overhead"]


def train(
    trainer: Trainer,
    checkpoint: Path | None = None,
    resume: Path | None = None,
    on_episode: Callable[[Episode], None] = lambda _: None,
    on_step: Callable[[Trainer], None] = lambda _: None,
) -> DQNResult:
    """Trains an agent to plan one program under one limit.

    Args:
        trainer: the training to run.
        checkpoint: file for the training state, written every ``checkpoint_every`` episodes and at the end.
        resume: checkpoint of the same run to continue from.
        on_episode: called after every episode (on resuming, also with the earlier ones).
        on_step: called before the first step and after each.

    Returns:
        The best plan, the greedy policy's plan and the history.

    Raises:
        Infeasible: if no feasible plan was found.
        TrainingStateError: if ``resume`` cannot be used.
    """
    fits = trainer.program.peak_bytes <= trainer.limit
    if resume is not None:
        trainer.load(resume)
    for episode in trainer.history:
        on_episode(episode)
    on_step(trainer)
    every = trainer.config.checkpoint_every
    saved = trainer.episodes // every
    while not trainer.done and not fits:
        new_episodes = trainer.step()
        try:
            for episode in new_episodes:
                on_episode(episode)
        except KeyboardInterrupt:  # between two steps the state is consistent
            if checkpoint is not None:
                trainer.save(checkpoint)
            raise
        on_step(trainer)
        if checkpoint is not None and trainer.episodes // every > saved:
            saved = trainer.episodes // every
            trainer.save(checkpoint)
    if checkpoint is not None:
        trainer.save(checkpoint)
    greedy = trainer.greedy()
    best = greedy if fits else trainer.best
    if best is None:
        raise Infeasible(f"no feasible plan for {trainer.limit:,} bytes in {trainer.episodes} episodes; raise either")
    return DQNResult(best, greedy, trainer.history, trainer.simulator_calls)


def check_reachable(program: Program, limit: int, min_bytes: int, mode: str) -> None:
    """Raises Infeasible if evicting in every gap does not reach the limit (recomputation chains not counted)."""
    if (smallest := least_residency(program, min_bytes, mode)) > limit:
        raise Infeasible(
            f"{program.name} cannot run in {limit:,} bytes: with every eligible tensor evicted between uses it still "
            f"needs {smallest:,} bytes{min_bytes_hint(program, limit, min_bytes)}"
        )
