"""Hyperparameters of both DQNs (dqn.py, dqn_paper.py) and their validation."""

from __future__ import annotations

from dataclasses import dataclass

from agents.planner import LEAST
from simulator.modes import MODES
from simulator.settings import at_least, check, one_of

POOLS = ("sum", "mean")  # pooling of node states into the graph state
RENAMED = {  # keys of older versions
    "walks": "num_envs",
    "size": "embedding_size",
    "rounds": "message_passing_steps",
    "replay": "buffer_size",
    "neighbours": "neighbors",
}


@dataclass(frozen=True)
class PaperConfig:
    """Hyperparameters of dqn_paper.py; names match the keys of configs/agent/dqn_paper.yaml.

    Defaults marked with a section are the paper's; the paper does not give the others.
    """

    episodes: int = at_least(1, 300)  # l
    mode: str = one_of(MODES, "joint")  # section 4.5: offload, remove
    min_bytes: int = 2**20
    num_envs: int = at_least(1, 1)  # Algorithm 1: one episode after another
    features: int = one_of((6, 8), 6)  # section 4.4.1
    embedding_size: int = at_least(1, 32)  # p
    message_passing_steps: int = at_least(1, 4)  # T, section 4.4
    pool: str = one_of(POOLS, "sum")  # equation 2
    mixing: bool = False  # equation 3 as printed
    gamma: float = 1.0  # equation 5, without a value; the undiscounted return is −overhead
    n_step: int = at_least(1, 1)  # equation 5
    double: bool = False  # equation 5
    target_every: int = 0  # updates; equation 5: no target network
    optimizer: str = one_of(("adam", "sgd"), "sgd")  # Algorithm 1, line 13
    learning_rate: float = 1e-4
    batch_size: int = at_least(1, 32)
    update_every: int = at_least(1, 1)  # transitions; Algorithm 1, line 13: at every step
    buffer_size: int = at_least(1, 10_000)  # transitions
    reward_scale: float = 1.0
    epsilon_start: float = 1.0  # Algorithm 1, line 7: e > episode / l
    epsilon_end: float = 0.0
    explore: float = 1.0  # fraction of the episodes
    checkpoint_every: int = 100  # episodes
    weights: str = ""  # section 4.4.2: checkpoint of another program's training to fine-tune

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True)
class Args:
    """Hyperparameters of dqn.py; names match the keys of configs/agent/dqn.yaml, whose values are for one task."""

    iterations: int = at_least(1, 3000)  # each runs ``passes`` forward passes on one task, then the updates
    init: str = one_of(("pretrained", "scratch"), "scratch")  # pretrained: on other programs
    mode: str = one_of(MODES, "joint")
    min_bytes: int = 2**20  # size in bytes below which tensors stay resident
    message_passing: bool = True  # whether the network has rounds of structure2vec
    width: int = at_least(1, 32)  # of the network's layers
    walkers: int = at_least(1, 12)  # per task
    passes: int = at_least(1, 16)  # forward passes per iteration
    tries: int = at_least(1, 6)  # maximum edits tried per forward pass
    neighbors: int = at_least(1, 32)  # candidate edits per forward pass (M)
    least_calls: int = at_least(1, 100)  # range of the simulator budget of an episode, drawn log-uniformly
    most_calls: int = 2000
    gamma: float = 0.97  # discount per tried edit
    n_step: int = at_least(1, 2)  # forward passes in an n-step return
    buffer_size: int = at_least(1, 240)  # iterations that the replay buffer holds
    learning_starts: int = 20  # iterations before the first update
    updates: int = at_least(1, 6)  # per iteration
    batch_size: int = at_least(1, 24)  # states
    learning_rate: float = 1e-3  # initial value; it decays linearly to a twentieth of that
    weight_decay: float = 1e-4
    target_every: int = at_least(1, 150)  # updates between copies to the target network
    auxiliary: float = 0.1  # weight of the auxiliary losses
    shaping: float = 0.3  # reward weight of the current plan relative to the best plan
    coldest: float = 1e-3  # range of the temperatures of Boltzmann exploration, in units of Q
    hottest: float = 3e-2
    least_epsilon: float = 0.02  # range of ε over the walkers
    most_epsilon: float = 0.3
    uniform: float = 0.25  # fraction of the walkers that act randomly
    priority_exponent: float = 0.6
    importance_exponent: float = 0.7
    greedy_calls: int = 1000  # simulator calls of the greedy policy's plan
    checkpoint_every: int = at_least(1, 20)  # iterations

    def __post_init__(self) -> None:
        """Raises ValueError that names the first value out of range."""
        check(self)
        if self.most_calls < self.least_calls:
            raise ValueError(f"most_calls: expected at least {self.least_calls}, got {self.most_calls}")
        if self.greedy_calls < LEAST:
            raise ValueError(f"greedy_calls: expected at least {LEAST}, got {self.greedy_calls}")


def renamed_key_message(key: str) -> str:
    """Returns a message with the new name of a renamed key, or '' for any other key."""
    return f"this key was renamed to agent.{RENAMED[key]}" if key in RENAMED else ""
