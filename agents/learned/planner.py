"""The deep Q-networks as planners: they train when they are asked for a plan (training.py, which needs PyTorch)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from agents.learned.dqn_config import DQNConfig, PaperConfig, config_from
from agents.planner import MIB, PlannerInfo, check_budget
from agents.search.mutation import Mutation
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

TITLE = '"GPU memory management for neural networks using deep Q-network"'


def without_network(
    config: DQNConfig | PaperConfig, seed: int, calls: int | None = None, seconds: float | None = None
) -> Mutation:
    """The search that an agent is compared with, which knows no network; of the paper's form as it explores."""
    options: dict[str, Any] = {"proposals": "uniform"} if isinstance(config, PaperConfig) else {}
    return Mutation(calls, seconds, config.mode, config.min_bytes, seed, **options)


class _Trained:
    """Trains when asked for a plan. ``config`` stands for all other options but ``seed``."""

    facts: PlannerInfo
    name: str
    kind: type[Any]

    def __init__(
        self, seed: int = 0, min_bytes: int = MIB, mode: str | None = None, episodes: int | None = None,
        config: Any = None,
    ):  # fmt: skip
        given = {"mode": mode, "episodes": episodes, "min_bytes": min_bytes}
        self.seed = seed
        self.config = config or config_from({k: v for k, v in given.items() if v is not None}, self.kind)
        self.simulator_calls = 0

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """Trains and returns the best plan found; raises Infeasible."""
        from agents.learned.training import train

        result = train(program, machine, limit, self.config, self.seed, planner=self.name)
        self.simulator_calls = result.simulator_calls
        return result.best


class DQN(_Trained):
    """``agents.make("dqn")``.

    Args:
        calls: simulator calls, the most: one of an episode, and of each plan that the policy decodes.
        init, elites: dqn_config.py.
    """

    facts = PlannerInfo(
        "dqn", "DQN", f"after {TITLE}", family="learned", slot=0, place=250, moves="joint", learned=True
    )
    name = facts.key
    kind = DQNConfig

    def __init__(
        self, seed: int = 0, min_bytes: int = MIB, mode: str | None = None, episodes: int | None = None,
        calls: int | None = None, init: str | None = None, elites: int | None = None, config: DQNConfig | None = None,
    ):  # fmt: skip
        check_budget(calls)
        super().__init__(seed, min_bytes, mode, episodes, config)
        if calls is not None:
            samples = min(self.config.samples, calls // 5)
            drawn = 0 if (init or self.config.init) == "scratch" else samples + 1
            self.config = replace(self.config, samples=samples, episodes=calls - drawn)
        changes: dict[str, Any] = {k: v for k, v in (("init", init), ("elites", elites)) if v is not None}
        self.config = replace(self.config, **changes)


class DQNPaper(_Trained):
    """The paper's plain form."""

    facts = PlannerInfo(
        "dqn_paper", "DQN, as in the paper", TITLE, family="learned", slot=2, place=260, moves="joint", learned=True
    )  # fmt: skip
    name = facts.key
    kind = PaperConfig


def controls(config: DQNConfig, seed: int, calls: int) -> dict[str, DQN]:
    """What the DQN is compared with in as many simulator calls: the same without what was learned elsewhere, and the
    same without what is learned here."""
    changes: dict[str, dict[str, Any]] = {
        "dqn, from scratch": {"init": "scratch"},
        "dqn, nothing learned": {"elites": 0},
    }
    return {name: DQN(seed, calls=calls, config=replace(config, **change)) for name, change in changes.items()}
