"""The YAML files and the defaults in the code are the same."""

from pathlib import Path

import yaml

from agents.learned.dqn_config import config_from
from agents.learned.planner import DQN, DQNPaper

AGENTS = Path(__file__).parents[2] / "configs" / "agent"


def test_agent_configs_are_the_defaults():
    for planner in (DQN, DQNPaper):
        values = yaml.safe_load((AGENTS / f"{planner.name}.yaml").read_text())
        assert config_from(values, planner.kind) == planner().config
