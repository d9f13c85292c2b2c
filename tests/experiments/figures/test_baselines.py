"""Tests the baselines of the named tasks: a random episode, missing plans, and the table in envs/README.md."""

import json
import math
import re

import gymnasium
import pytest

import envs  # noqa: F401  # registers the environments
from envs.tasks import TASKS
from experiments.figures.baselines import Baselines, _cell, _mean, random_episode
from tests.experiments.conftest import ROOT, figure_settings


def test_a_random_episode_is_reproducible() -> None:
    env = gymnasium.make("GpuMemory/vgg16-45-v1")
    first, second, other = (random_episode(env, seed) for seed in (3, 3, 4))
    assert first == second != other and first[1] > 10


def test_a_dead_end_is_above_every_plan() -> None:
    assert _mean([1.0, 3.0]) == 2.0 and _mean([1.0, None]) == _mean([]) == math.inf
    assert _cell([1.0, 3.0, None]) == "2.00 (1.00 to 3.00), 1 dead ends"
    assert (_cell([]), _cell([None]), _cell([0.1])) == ("–", "dead end", "0.10")


def test_every_task_of_both_environments_has_a_row() -> None:
    tasks = Baselines().tasks(figure_settings("baselines"))
    assert {(task["task"], task.get("family")) for task in tasks} == {
        (name, family) for name in TASKS for family in (None, "GpuMemory", "GpuMemoryEdit")
    }


@pytest.mark.parametrize("name", TASKS)
def test_the_page_of_the_environments_has_the_numbers_of_the_table(name: str) -> None:
    rows = json.loads((ROOT / "experiments" / "results" / "baselines.json").read_text())["rows"]
    found = {
        (row.get("family"), agent): values
        for row in rows
        if row["task"] == name
        for agent, values in row["found"].items()
    }
    keys = [("GpuMemory", "random"), ("GpuMemoryEdit", "random"), (None, "best heuristic"), (None, "floor")]
    line = next(
        line for line in (ROOT / "envs" / "README.md").read_text().splitlines() if line.startswith(f"| `{name}`")
    )
    printed = [float(cell) for cell in re.split(r"\s*\|\s*", line)[5:9]]
    assert printed == pytest.approx([_mean(found[key]) for key in keys], abs=0.0501, rel=0.003)
