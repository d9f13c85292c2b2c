"""Tests planners from outside of the registry: classes, functions of an observation, and archives."""

import io
import json
import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from agents.learned.external import ArchivePlanner, FunctionPlanner
from envs.memory_env import small_task
from experiments.common import report
from simulator.files import FormatError
from simulator.plan import PlanError
from tests.experiments.conftest import Run, refused, rows_in

PROGRAM, MACHINE = small_task()
LIMIT = int(0.7 * PROGRAM.peak_bytes)

MINE = """
import agents


class Mine:
    name = "mine"
    simulator_calls = 1

    def plan(self, program, machine, limit):
        return agents.make("tensile").plan(program, machine, limit)


def first_valid(observation):
    return observation["action_mask"].argmax()


class Nothing:
    pass
"""


def first_valid(observation):  # type: ignore[no-untyped-def]
    return observation["action_mask"].argmax()


def test_evaluate_accepts_classes_and_functions(run: Run, tmp_path: Path) -> None:
    (tmp_path / "work" / "mine_planner.py").write_text(MINE)
    PROGRAM.save(tmp_path / "small.json")
    words = [f"program={tmp_path / 'small.json'}", "limits=[0.7]", "jobs=1"]
    out = tmp_path / "out"
    run("evaluate", *words, "planners=['mine_planner:Mine','mine_planner:first_valid',tensile]", f"out={out}").ok()
    mine, function, tensile = rows_in(out)
    assert mine["overhead"] == tensile["overhead"] and mine["planner"] == "mine"
    assert function["feasible"] and function["planner"] == "first_valid" and function["simulator_calls"] >= 1
    refused(run("evaluate", *words, "planners=['mine_planner:Nothing']"), "planners", "plan(program, machine, limit)")
    refused(run("evaluate", *words, "planners=['mine_planner:Mina']"), "planners", "Mina")


def test_a_function_plans_in_both_environments() -> None:
    def walks(observation):  # type: ignore[no-untyped-def]
        return observation["action_mask"].argmax()

    edited = FunctionPlanner(first_valid).plan(PROGRAM, MACHINE, LIMIT)
    walks.environment = "GpuMemory"  # type: ignore[attr-defined]
    planner = FunctionPlanner(walks)
    row, walked, _ = report.score_with(planner, PROGRAM, MACHINE, LIMIT, 0)
    assert edited.decisions and edited.planner == "first_valid"
    assert walked is None or walked.planner == "walks"
    assert row["simulator_calls"] > 0
    with pytest.raises(PlanError, match="action_mask"):
        FunctionPlanner(lambda observation: -1).plan(PROGRAM, MACHINE, LIMIT)


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", ["maskable_ppo", "dqn"])
def test_an_archive_plans_as_the_trained_model(algorithm: str, run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["steps=64", f"algo={algorithm}", "planners=null", "tracker=none", f"out={out}"]
    run("train_sb3", *words, *(["algo.n_steps=8"] if algorithm == "maskable_ppo" else [])).ok()
    greedy = next(row for row in rows_in(out) if row["planner"].endswith("_greedy"))
    with zipfile.ZipFile(out / "model.zip") as archive, zipfile.ZipFile(out / "bare.zip", "w") as bare:
        bare.writestr("policy.pth", archive.read("policy.pth"))  # nothing else is read
    row, _, _ = report.score_with(ArchivePlanner(out / "bare.zip"), PROGRAM, MACHINE, LIMIT, 0)
    assert row["feasible"] == greedy["feasible"] and row["overhead"] == greedy["overhead"]


def test_a_malformed_archive_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.zip"
    file.write_bytes(b"no archive")
    with pytest.raises(FormatError, match="not an archive"):
        ArchivePlanner(file)
    state = io.BytesIO()
    torch.save({"x": torch.zeros(1)}, state)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("policy.pth", state.getvalue())
    with pytest.raises(FormatError, match=r"summary\.json"):
        ArchivePlanner(file)
    (tmp_path / "summary.json").write_text(json.dumps({"config": {"algo": {}, "network": "mine:Net"}}))
    with pytest.raises(FormatError, match="network"):
        ArchivePlanner(file)
    config = {"algo": {}, "task": "GpuMemory/vgg16-45", "min_bytes": 0, "mode": "swap"}
    (tmp_path / "summary.json").write_text(json.dumps({"config": config}))
    with pytest.raises(FormatError, match="reward, actions missing"):
        ArchivePlanner(file)


class Runs:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):  # type: ignore[no-untyped-def]
        return Path.touch, (self.path,)


def test_an_archive_runs_no_code(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as archive:
        archive.writestr("policy.pth", pickle.dumps(Runs(tmp_path / "ran")))
    with pytest.raises(FormatError):
        ArchivePlanner(tmp_path / "model.zip")
    assert not (tmp_path / "ran").exists()
