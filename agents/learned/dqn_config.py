"""The hyperparameters of dqn.py, and those of the paper's plain form."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from agents.learned.structure2vec import POOLS
from envs.graph import MODES


@dataclass(frozen=True)
class DQNConfig:
    """Hyperparameters; the names are the keys of configs/agent/*.yaml."""

    episodes: int = 600
    mode: str = "swap"  # swap, recompute or joint
    min_bytes: int = 2**20
    walks: int = 8
    features: int = 8
    size: int = 16  # p
    rounds: int = 3  # T
    pool: str = "mean"
    mixing: bool = True
    n_step: int = 1000  # longer than an episode: the whole return
    double: bool = True
    target_every: int = 100  # updates; 0: no target network
    optimizer: str = "adam"  # adam or sgd
    learning_rate: float = 2e-3
    batch_size: int = 32
    update_every: int = 8  # transitions of the ε-greedy walks
    replay: int = 10_000  # transitions
    priority: float = 0.0  # exponent of prioritised replay; 0: uniform
    reward_scale: float = 10.0
    epsilon_start: float = 1.0
    epsilon_end: float = 0.02
    explore: float = 0.3  # fraction of the episodes
    followers: int = 8  # walks after the best one, per step of the others
    leave: float = 0.015
    elites: int = 4
    prior: float = 20.0
    checkpoint_every: int = 100  # episodes

    def __post_init__(self) -> None:
        for name, allowed in (("mode", MODES), ("pool", POOLS), ("optimizer", ("adam", "sgd")), ("features", (6, 8))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected one of {allowed}, got {getattr(self, name)!r}")
        for name in ("episodes", "walks", "size", "rounds", "n_step", "batch_size", "update_every", "replay",
                     "elites"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")


def config_from(values: dict[str, Any]) -> DQNConfig:
    """A DQNConfig from a configuration dictionary.

    Raises:
        ValueError: an unknown key or a value of the wrong type, named.
    """
    known = {f.name: f for f in fields(DQNConfig)}
    out = {}
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"agent.{key}: unknown key")
        kind = type(known[key].default)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not kind:
            raise ValueError(f"agent.{key}: expected {kind.__name__}, got {value!r}")
        out[key] = value
    try:
        return DQNConfig(**out)
    except ValueError as error:
        raise ValueError(f"agent.{error}") from None


PAPER = {
    "episodes": 300, "mode": "joint", "walks": 1, "features": 6, "size": 32, "rounds": 4, "pool": "sum",
    "mixing": False, "n_step": 1, "double": False, "target_every": 0, "optimizer": "sgd", "learning_rate": 1e-4,
    "update_every": 1, "reward_scale": 1.0, "epsilon_end": 0.0, "explore": 1.0, "followers": 0, "leave": 0.0,
    "prior": 0.0,
}  # fmt: skip
