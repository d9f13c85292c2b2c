"""Every figure's settings: what its YAML asks for, and what is refused."""

import json
from typing import Any

import pytest

from experiments import figures, reproduce
from experiments.common import cli
from tests.experiments.conftest import figure_settings


@pytest.mark.parametrize("name", [name for name in reproduce.names() if name != "learning"])
def test_a_figure_has_tasks_words_and_a_table(name: str) -> None:
    made = reproduce.figure(name)
    assert made.name == name == figure_settings(name).name
    assert '"' in made.about or "No paper has this figure" in made.about, "the first paragraph quotes the title"
    every, few = (made.tasks(figure_settings(name, quick)) for quick in (False, True))
    assert 0 < len(few) < len(every)
    for task in every:
        assert json.loads(json.dumps(task)) == task
    assert len({json.dumps(task) for task in every}) == len(every)
    own = {"compiled", "compiled_gpu"}  # networks
    for network in {task["network"] for task in every if "network" in task and name not in own} - {
        "un_11",
        "resnet50_184",
    }:
        assert "name" in figures.workload(network)


def test_all_leaves_out_what_takes_hours_or_needs_runs() -> None:
    on_demand = {name for name in reproduce.names() if reproduce.figure(name).on_demand}
    assert on_demand == {"compiled", "compiled_gpu", "learning"}


TASK = {"workload": "mlp", "machine": "gtx1080ti", "limit": 0.8, "split": "test", "fingerprint": "0123456789ab"}


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("smartpool_table1", {"networks": ["vgg12"]}, "there is no workload 'vgg12'; the nearest is 'vgg1"),
        ("smartpool_table1", {"networks": ["module"]}, "there is no workload 'module'"),
        ("smartpool_fig10", {"networks": []}, "expected at least one value"),
        ("smartpool_fig10", {"batches": [1.5]}, "figure.batches: expected integers of at least 2, got 1.5"),
        ("smartpool_fig10", {"overheads": [-0.1]}, "figure.overheads: expected numbers of at least 0, got -0.1"),
        ("smartpool_fig10", {"pool": "cnmem"}, "pool: expected smartpool, "),
        ("smartpool_fig10", {"steps": 1}, "steps: expected an integer of at least 2"),
        ("smartpool_fig2", {"iterations": 2}, "iterations: expected an integer of at least 3"),
        ("smartpool_fig8", {"network": "vgg12"}, "'vgg12' is not in Table I"),
        ("smartpool_fig8", {"limits": [648]}, "figure.limits: expected MB above 0, at most vgg16's 647, got 648"),
        ("smartpool_fig9", {"limits": [True]}, "figure.limits: expected MB"),
        ("smartpool_fig9", {"seeds": [-1]}, "figure.seeds: expected integers of at least 0, got -1"),
        ("smartpool_table2", {"steps": 1}, "steps: expected an integer of at least 2"),
        ("smartpool_table2", {"networks": ["plain20"]}, "'plain20' is not in the table"),
        ("smartpool_fig11", {"overheads": [-1]}, "figure.overheads: expected numbers from 0 to inf, got -1"),
        ("smartpool_fig11", {"geeps": [2]}, "figure.geeps: expected numbers from 0 to 1, got 2"),
        ("smartpool_optimality", {"leave": [1]}, "figure.leave: expected shares between 0 and 1, got 1"),
        ("smartpool_optimality", {"calls": 1}, "calls: expected an integer of at least 20"),
        ("home_table2", {"networks": ["vgg19"]}, "'vgg19' is not one of HOME's (mobilenet, "),
        ("home_table2", {"resolution": 1}, "figure.resolution: expected a number between 0 and 1, got 1"),
        ("home_table2", {"particles": 0}, "particles: expected an integer of at least 1"),
        ("home_fig6", {"shares": [0]}, "figure.shares: expected positive numbers, got 0"),
        ("home_fig7", {"batches": {"vgg12": 3}}, "figure.batches: 'vgg12' is not one of HOME's"),
        ("home_fig7", {"batches": {"vgg16": 1}}, "figure.batches.vgg16: expected an integer of at least 2, got 1"),
        ("home_fig8", {"seeds": [-1]}, "figure.seeds: expected integers of at least 0, got -1"),
        ("home_fig8", {"share": 1}, "figure.share: expected a number above 1, got 1"),
        ("home_table3", {"share": 0.5}, "figure.share: expected a number above 1, got 0.5"),
        ("tensile_table1", {"batch": 0}, "batch: expected an integer of at least 1"),
        ("tensile_times", {"networks": ["mobilenet"]}, "at least two"),
        ("superneurons_alexnet", {"shown": ["livenes"]}, "there is no 'livenes'; the nearest is 'liveness'"),
        ("superneurons_table1", {"networks": ["vgg16"]}, "'vgg16' is not in the table"),
        ("superneurons_table2", {"networks": ["vgg11"]}, "'vgg11' is not in the table"),
        ("superneurons_table3", {"batches": [0]}, "figure.batches: expected positive integers, got [0]"),
        ("superneurons_table3", {"batches": []}, "batches: expected at least one value"),
        ("superneurons_table4", {"methods": ["nine"]}, "there is no 'nine'"),
        ("superneurons_table4", {"captured": "bound"}, "'bound' is not one of the methods"),
        ("superneurons_table4", {"batch_size": 1}, "batch_size"),
        ("superneurons_table5", {"networks": ["resnet18"]}, "'resnet18' is not in the table"),
        ("superneurons_table5", {"methods": []}, "methods"),
        ("superneurons_table5", {"methods": ["own"]}, "superneurons"),
        ("dqn_fig5", {"groups": [["vgg61"]]}, "vgg61"),
        ("dqn_fig5", {"limits": [1.5]}, "figure.limits: expected fractions between 0 and 1, got 1.5"),
        ("dqn_fig5", {"seeds": [-1]}, "figure.seeds"),
        ("dqn_fig5", {"agent": {"sise": 4}}, "agent"),
        ("dqn_fig5", {"min_bytes": 0}, "min_bytes"),
        ("jobs", {"tasks": [{"jobs": ["vgg11"]}]}, "tasks[0]: expected jobs and a limit"),
        ("jobs", {"tasks": [{"jobs": ["vgg11"], "limit": 1.5}]}, "tasks[0]: expected jobs and a limit"),
        ("jobs", {"tasks": ["vgg11"]}, "tasks[0]: expected jobs and a limit"),
        ("core", {"tasks": {"small": {**TASK, "workload": "vgg61"}}},
         "figure.tasks.small.workload: there is no workload 'vgg61'"),
        ("core", {"tasks": {"small": {**TASK, "limit": 40}}}, "small.limit: expected a share of the peak, got 40"),
        ("core", {"tasks": {"small": {**TASK, "split": "both"}}},
         "figure.tasks.small: expected fingerprint, limit, machine, split, workload, of split"),
        ("core", {"agents": {"x": {"planner": "anealing"}}},
         "figure.agents.x: there is no planner 'anealing'; the nearest is 'annealing'"),
        ("core", {"agents": {"x": {"target": "nowhere:Mine"}}}, "figure.agents.x: 'nowhere:Mine' is no 'module:Class'"),
        ("core", {"agents": {"x": {"target": "json:loads"}}}, "json:loads is no class with a method plan"),
        ("measured", {"parts": ["peak"]}, "there is no part 'peak'; the nearest is 'peaks'"),
        ("compiled", {"limits": [2]}, "figure.limits: expected fractions, got [2]"),
        ("compiled", {"networks": [{"kind": "bert"}]}, "expected one of gpt2, llama, resnet, vit, got bert"),
        ("robustness", {"limit": 2}, "figure.limit: expected a share of the peak, got 2"),
        ("robustness", {"jitter": [-1]}, "jitter: jitter: expected a number from 0 to 2"),
        ("robustness", {"iterations": 3}, "iterations: expected an"),
        ("robustness", {"replan_calls": 0}, "replan_calls: expected an"),
        ("robustness", {"episodes": "many"}, "episodes: expected an"),
        ("robustness", {"robust": {"wind": 1}}, "robust: "),
        ("robustness", {"tenant": ["much"]}, "tenant: "),
        ("learning", {"runs": "/nowhere"}, "figure.runs: there is no training with a curve.json under /nowhere"),
    ],
)  # fmt: skip
def test_bad_settings_are_refused(name: str, wrong: dict[str, Any], words: str) -> None:
    config = figure_settings(name)
    config.update(wrong)
    for key, value in wrong.items():  # in its place, not beside what is there
        config[key] = value
    with pytest.raises(cli.UsageError) as caught:
        reproduce.figure(name).tasks(config)
    assert words in str(caught.value)
