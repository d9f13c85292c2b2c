"""The paper's deep Q-network as a planner: it trains when it is asked for a plan (training.py, which needs PyTorch)."""

from __future__ import annotations

from agents.learned.dqn_config import PaperConfig, config_from
from agents.learned.dqn_planner import TITLE
from agents.planner import MIB, PlannerInfo
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program


class DQNPaper:
    """``agents.make("dqn_paper")``. ``config`` stands for all other options but ``seed``."""

    facts = PlannerInfo(
        "dqn_paper", "DQN, as in the paper", TITLE, family="learned", slot=2, place=260, moves="joint", learned=True
    )  # fmt: skip
    name = facts.key

    def __init__(
        self, seed: int = 0, min_bytes: int = MIB, mode: str | None = None, episodes: int | None = None,
        config: PaperConfig | None = None,
    ):  # fmt: skip
        given = {"mode": mode, "episodes": episodes, "min_bytes": min_bytes}
        self.seed = seed
        self.config = config or config_from({k: v for k, v in given.items() if v is not None}, PaperConfig)
        self.simulator_calls = 0

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """Trains and returns the best plan found; raises Infeasible."""
        from agents.learned import dqn_paper
        from agents.learned.training import train

        result = train(dqn_paper.Trainer.on(program, machine, limit, self.config, self.seed))
        self.simulator_calls = result.simulator_calls
        return result.best
