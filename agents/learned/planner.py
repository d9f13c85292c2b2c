"""The deep Q-network as a planner: it trains when it is asked for a plan (dqn.py, which needs PyTorch)."""

from __future__ import annotations

from typing import Any, ClassVar

from agents.learned.dqn_config import PAPER, DQNConfig, config_from
from agents.planner import MIB, PlannerInfo
from agents.search.mutation import Mutation
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

TITLE = '"GPU memory management for neural networks using deep Q-network"'


def without_network(config: DQNConfig, seed: int, calls: int | None = None, seconds: float | None = None) -> Mutation:
    """What an agent is compared with: its search with the network never asked and never trained."""
    temperature = config.belady_temperature
    options: dict[str, Any] = {"proposals": "uniform"} if temperature is None else {"temperature": temperature}
    if config.mutations:
        options |= {"elites": config.elites, "rate": config.mutation_rate}
    return Mutation(calls, seconds, config.mode, config.min_bytes, seed, **options)


class DQN:
    """``agents.make("dqn")``: trains when asked for a plan. ``config`` stands for all other options but ``seed``."""

    facts = PlannerInfo(
        "dqn", "DQN", f"after {TITLE}", family="learned", slot=0, place=250, moves="joint", learned=True
    )
    name = facts.key
    defaults: ClassVar[dict[str, Any]] = {}

    def __init__(
        self, seed: int = 0, min_bytes: int = MIB, mode: str | None = None, episodes: int | None = None,
        config: DQNConfig | None = None,
    ):  # fmt: skip
        given = {"mode": mode, "episodes": episodes, "min_bytes": min_bytes}
        values = {**self.defaults, **{k: v for k, v in given.items() if v is not None}}
        self.seed, self.config = seed, config or config_from(values)
        self.simulator_calls = 0

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """Trains and returns the best plan found; raises Infeasible."""
        from agents.learned.dqn import train

        result = train(program, machine, limit, self.config, self.seed, planner=self.name)
        self.simulator_calls = result.simulator_calls
        return result.best


class DQNPaper(DQN):
    """The paper's plain form."""

    facts = PlannerInfo(
        "dqn_paper", "DQN, as in the paper", TITLE, family="learned", slot=2, place=260, moves="joint", learned=True
    )  # fmt: skip
    name = facts.key
    defaults: ClassVar[dict[str, Any]] = PAPER
