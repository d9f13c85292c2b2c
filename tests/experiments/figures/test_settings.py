"""Tests settings of every figure: valid defaults and rejected values."""

import json
from typing import Any

import pytest

from experiments import reproduce
from experiments.common import cli
from tests.experiments.conftest import figure_settings


@pytest.mark.parametrize("name", [name for name in reproduce.names() if name != "learning"])
def test_a_figure_has_tasks(name: str) -> None:
    figure = reproduce.figure(name)
    assert figure.name == name == figure_settings(name).name
    tasks, quick_tasks = (figure.tasks(figure_settings(name, quick)) for quick in (False, True))
    assert 0 < len(quick_tasks) < len(tasks)
    for task in tasks:
        assert json.loads(json.dumps(task)) == task
    assert len({json.dumps(task) for task in tasks}) == len(tasks)


def test_all_skips_figures_that_take_hours_or_need_runs_or_extras() -> None:
    on_demand = {name for name in reproduce.names() if reproduce.figure(name).on_demand}
    hours = {"baselines", "compiled", "compiled_gpu", "dqn_equation5", "dqn_paper", "learning", "torchtune"}
    assert on_demand == hours


TASK = {"workload": "mlp", "machine": "gtx1080ti", "limit": 0.8, "split": "test", "fingerprint": "0123456789ab"}


@pytest.mark.parametrize(
    ("name", "wrong", "named"),
    [
        ("smartpool_table1", {"networks": ["vgg12"]}, "'vgg12'"),
        ("smartpool_fig10", {"networks": []}, "networks"),
        ("smartpool_fig10", {"batches": [1.5]}, "figure.batches"),
        ("smartpool_fig10", {"overheads": [-0.1]}, "figure.overheads"),
        ("smartpool_fig10", {"pool": "cnmem"}, "pool"),
        ("smartpool_fig11", {"evaluations": 3}, "evaluations"),
        ("smartpool_fig2", {"iterations": 2}, "iterations"),
        ("smartpool_fig8", {"limits": [648]}, "figure.limits"),
        ("smartpool_fig9", {"limits": [True]}, "figure.limits"),
        ("smartpool_optimality", {"leave": [1]}, "figure.leave"),
        ("home_table2", {"networks": ["vgg19"]}, "'vgg19'"),
        ("home_table2", {"resolution": 1}, "figure.resolution"),
        ("home_table2", {"slower": 0}, "slower"),
        ("home_fig6", {"shares": [0]}, "figure.shares"),
        ("home_fig7", {"batches": {"vgg16": 1}}, "figure.batches.vgg16"),
        ("home_table3", {"share": 0.5}, "figure.share"),
        ("tensile_table1", {"batch": 0}, "batch"),
        ("tensile_times", {"networks": ["mobilenet"]}, "at least two"),
        ("superneurons_alexnet", {"shown": ["livenes"]}, "'liveness'"),
        ("superneurons_table3", {"batches": [0]}, "figure.batches"),
        ("superneurons_table4", {"captured": "bound"}, "'bound'"),
        ("superneurons_table5", {"methods": ["own"]}, "superneurons"),
        ("dqn_fig5", {"groups": [["vgg61"]]}, "vgg61"),
        ("dqn_fig5", {"calls": 1}, "calls"),
        ("core", {"tasks": {"small": {**TASK, "workload": "vgg61"}}}, "figure.tasks.small.workload"),
        ("core", {"tasks": {"small": {**TASK, "limit": 40}}}, "small.limit"),
        ("core", {"tasks": {"small": {**TASK, "split": "both"}}}, "figure.tasks.small"),
        ("core", {"agents": {"x": {"planner": "anealing"}}}, "'annealing'"),
        ("core", {"agents": {"x": {"target": "nowhere:Mine"}}}, "figure.agents.x"),
        ("measured", {"parts": ["peak"]}, "'peaks'"),
        ("compiled", {"limits": [2]}, "figure.limits"),
        ("compiled", {"networks": [{"kind": "bert"}]}, "bert"),
        ("learning", {"runs": "/nowhere"}, "figure.runs"),
    ],
)
def test_bad_settings_are_refused(name: str, wrong: dict[str, Any], named: str) -> None:
    config = figure_settings(name)
    for key, value in wrong.items():  # replaces mappings instead of merging them
        config[key] = value
    with pytest.raises(cli.UsageError, match=named):
        reproduce.figure(name).tasks(config)
