"""The hyperparameters of dqn.py, and those of the paper's plain form."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from simulator.modes import MODES

POOLS = ("sum", "mean")  # of the graph state
RENAMED = {  # keys of older versions
    "walks": "num_envs", "size": "embedding_size", "rounds": "message_passing_steps", "replay": "buffer_size",
    "followers": "mutations", "leave": "mutation_rate", "prior": "belady_temperature (1 / prior; null where it was 0)",
}  # fmt: skip


@dataclass(frozen=True)
class DQNConfig:
    """Hyperparameters; the names are the keys of configs/agent/*.yaml."""

    episodes: int = 160
    mode: str = "joint"  # swap, recompute or joint
    min_bytes: int = 2**20
    num_envs: int = 8
    features: int = 8
    embedding_size: int = 16  # p
    message_passing_steps: int = 3  # T
    pool: str = "mean"
    mixing: bool = True
    n_step: int = 1000  # longer than an episode: the whole return
    double: bool = True
    target_every: int = 100  # updates; 0: no target network
    optimizer: str = "adam"  # adam or sgd
    learning_rate: float = 2e-3
    batch_size: int = 32
    update_every: int = 8  # transitions of the ε-greedy walks
    buffer_size: int = 10_000  # transitions
    priority: float = 0.0  # exponent of prioritised replay; 0: uniform
    reward_scale: float = 10.0
    epsilon_start: float = 1.0
    epsilon_end: float = 0.02
    explore: float = 0.3  # fraction of the episodes
    mutations: int = 8  # mutated walks per step of the others
    mutation_rate: float = 0.015
    elites: int = 4
    belady_temperature: float | None = 0.05  # of the random actions; None: uniform
    checkpoint_every: int = 100  # episodes

    def __post_init__(self) -> None:
        for name, allowed in (("mode", MODES), ("pool", POOLS), ("optimizer", ("adam", "sgd")), ("features", (6, 8))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}: expected one of {allowed}, got {getattr(self, name)!r}")
        for name in ("episodes", "num_envs", "embedding_size", "message_passing_steps", "n_step", "batch_size",
                     "update_every", "buffer_size", "elites"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if self.belady_temperature is not None and self.belady_temperature <= 0:
            raise ValueError(f"belady_temperature: expected a number above 0 or null, got {self.belady_temperature}")


def config_from(values: dict[str, Any]) -> DQNConfig:
    """A DQNConfig from a configuration dictionary.

    Raises:
        ValueError: an unknown key or a value of the wrong type, named.
    """
    known = {f.name: f for f in fields(DQNConfig)}
    out: dict[str, Any] = {}
    for key, value in values.items():
        if key in RENAMED:
            raise ValueError(f"agent.{key}: this key is agent.{RENAMED[key]} now")
        if key not in known:
            raise ValueError(f"agent.{key}: unknown key")
        kind = type(known[key].default)
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if type(value) is not kind and not (value is None and "None" in str(known[key].type)):
            raise ValueError(f"agent.{key}: expected {kind.__name__}, got {value!r}")
        out[key] = value
    try:
        return DQNConfig(**out)
    except ValueError as error:
        raise ValueError(f"agent.{error}") from None


def by_todays_names(values: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of a training state, which may have been written under older names."""
    out = {RENAMED.get(key, key).partition(" ")[0]: value for key, value in values.items()}
    if "prior" in values:
        out["belady_temperature"] = 1 / values["prior"] if values["prior"] else None
    return out


PAPER = {
    "episodes": 300, "mode": "joint", "num_envs": 1, "features": 6, "embedding_size": 32, "message_passing_steps": 4,
    "pool": "sum", "mixing": False, "n_step": 1, "double": False, "target_every": 0, "optimizer": "sgd",
    "learning_rate": 1e-4,
    "update_every": 1, "reward_scale": 1.0, "epsilon_end": 0.0, "explore": 1.0, "mutations": 0, "mutation_rate": 0.0,
    "belady_temperature": None,
}  # fmt: skip
