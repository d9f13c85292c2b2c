"""Tests benchmark suites: settings, a small task run through the public interface, and scores."""

from typing import Any

import numpy as np
import pytest
from omegaconf import DictConfig

from experiments.benchmark import __main__ as benchmark
from experiments.common.cli import UsageError
from experiments.figures import core, program
from simulator import Machine
from simulator.files import write_json

MLP = "gtx1080ti"


def settings(**changes: Any) -> DictConfig:
    pin = program("mlp", Machine.load(MLP)).fingerprint[:12]
    task = {"workload": "mlp", "machine": MLP, "limit": 0.8, "split": "test", "fingerprint": pin}
    return DictConfig(
        {
            "tasks": {"small": task},
            "agents": {
                "annealing": {"planner": "annealing", "min_bytes": 1},
                "capuchin": {"planner": "capuchin"},
                "published": {"planner": "published"},
            },
            "calls": [50],
            "seconds": [0.05],
            "seeds": [0, 1],
            "beside": False,
            **changes,
        }
    )


def test_a_task_as_a_user_runs_it() -> None:
    (task,) = core.Core().tasks(settings())
    row = {**task, **core.Core().run(task, Machine.load("h100"))}
    runs = row["runs"]
    assert [(run["agent"], run["calls"], run["seconds"], run["seed"]) for run in runs] == [
        ("annealing", 50, None, 0),
        ("annealing", 50, None, 1),
        ("annealing", None, 0.05, 0),
        ("annealing", None, 0.05, 1),
        ("capuchin", None, None, 0),
        ("capuchin", None, None, 1),
        ("published", None, None, 0),
    ]
    assert all(run["gap"] >= 0 for run in runs if run["gap"] is not None)
    assert all(0 < run["simulator_calls"] <= 50 for run in runs[:2]) and not any(run["late"] for run in runs[:2])
    assert runs[-1]["gap"] <= runs[-2]["gap"]  # Capuchin is among the published heuristics
    with pytest.raises(UsageError, match=r"small\.fingerprint"):  # a different program
        core.Core().run({**task, "fingerprint": "0123456789ab"}, Machine.load("h100"))
    _, cells, _ = core.Core().format_text([row])
    assert {"50 calls", "0.05 s", "–"} == {line[0] for line in cells}


def row(split: str, gaps: dict[str, list[float | None]]) -> core.Row:
    runs = [
        {
            "agent": agent,
            "calls": 100,
            "seconds": None,
            "seed": i,
            "gap": gap,
            "late": False,
            "plan_s": 0.5,
            "simulator_calls": 120,
        }
        for agent, values in gaps.items()
        for i, gap in enumerate(values)
    ]
    return {"task": split, "split": split, "fingerprint": "0123456789ab", "runs": runs}


def test_scores() -> None:
    rows = [
        row("train", {"annealing": [1.0, 2.0], "dqn": [None, 5.0]}),
        row("test", {"annealing": [3.0, 400.0], "dqn": [7.0, 9.0]}),
    ]
    by_key = core.scores(rows)
    np.testing.assert_array_equal(by_key["annealing", (100, None)], [[1, 2], [3, core.WITHOUT]])
    np.testing.assert_array_equal(by_key["dqn", (100, None)], [[core.WITHOUT, 5], [7, 9]])
    # The middle half of 1, 2, 3, 100 is 2 and 3.
    assert core.iqm(by_key["annealing", (100, None)]) == 2.5
    low, high = core.interval(by_key["annealing", (100, None)])
    assert 1 <= low < 2.5 < high <= core.WITHOUT
    assert core.interval(np.full((3, 2), 4.0)) == (4.0, 4.0)
    _, (first, second), _ = core.Core().format_text(rows)
    assert first[:3] == ["100 calls", "simulated annealing", "2.50"] and first[4] == "51.50"
    assert second[1:3] == ["DQN", "8.00"] and second[-1] == "1"


def test_an_agent_of_ones_own_beside_the_results_that_are_there(tmp_path, monkeypatch) -> None:
    (tmp_path / "ownagent.py").write_text(
        "import agents\n\n\nclass Mine:\n    name = 'mine'\n\n    def __init__(self, calls=9):\n"
        "        self.simulator_calls, self.calls = 0, calls\n\n    def plan(self, program, machine, limit):\n"
        "        self.simulator_calls = self.calls\n"
        "        return agents.make('capuchin').plan(program, machine, limit)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (task,) = core.Core().tasks(settings(agents={"ownagent:Mine": {"target": "ownagent:Mine"}}, beside=True))
    task_keys = {key: task[key] for key in ("task", *sorted(core._TASK))}
    old = row("test", {"annealing": [1.0, 2.0], "ownagent:Mine": [9.0, 9.0]})["runs"]
    write_json(tmp_path / "core.json", {"rows": [{**task_keys, "runs": old}, {**task_keys, "limit": 0.7, "runs": old}]})
    monkeypatch.setattr(core, "RESULTS", tmp_path)
    runs = core.Core().run(task, Machine.load("h100"))["runs"]
    assert [(run["agent"], run["calls"]) for run in runs] == [
        ("ownagent:Mine", 50),
        ("annealing", 100),
        ("annealing", 100),
    ]
    assert runs[0]["simulator_calls"] == 50 and runs[0]["gap"] >= 0


def test_which_agents_are_asked_for() -> None:
    stored = {"agents": {"annealing": {"planner": "annealing"}}}

    def pick(agents: Any, suite: str = "core") -> dict[str, Any] | None:
        return benchmark.requested_agents(DictConfig({"agents": agents}), suite, stored)

    assert pick(None) is None
    assert pick("annealing") == stored["agents"]
    assert pick(["annealing", "my.module:Mine"]) == {**stored["agents"], "my.module:Mine": {"target": "my.module:Mine"}}
    with pytest.raises(UsageError, match="agents: 'anealing'"):
        pick("anealing")
    with pytest.raises(UsageError, match=r"agents.*checkmate"):
        pick("annealing", "checkmate")
    for key in ("agents", "out"):
        config = {"agents": None, "quick": False, "jobs": None, "out": None, key: "annealing"}
        with pytest.raises(UsageError, match=rf"{key}.*speed"):
            benchmark.speed(DictConfig(config))
