"""`experiments.rerun`: a run again from its directory alone, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from experiments import rerun
from experiments.common.cli import UsageError
from simulator.files import write_json
from tests.experiments.conftest import Run
from tests.tiny import PROGRAM


def test_a_run_again_where_nothing_of_it_is_left_but_its_directory(run: Run, tmp_path: Path) -> None:
    PROGRAM.save(tmp_path / "step.json")
    (tmp_path / "own.yaml").write_text((rerun.cli.CONFIGS / "machine" / "gtx1080ti.yaml").read_text())
    done = run(
        "evaluate", f"program={tmp_path / 'step.json'}", f"machine={tmp_path / 'own.yaml'}", "limits=[0.95,0.9]",
        "planners=[none,annealing]", "min_bytes=1", "seed=5", f"out={tmp_path / 'first'}",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (tmp_path / "step.json").unlink()
    (tmp_path / "own.yaml").unlink()
    (tmp_path / "elsewhere").mkdir()
    moved = Path(shutil.move(tmp_path / "first", tmp_path / "elsewhere" / "first"))
    again = run("rerun", str(moved))
    assert again.returncode == 0, again.stdout + again.stderr
    out = tmp_path / "elsewhere" / "first-again"
    assert again.stdout.splitlines()[-1] == str(out) and again.stdout.count(": the same\n") == 4
    before, after = (json.loads((path / "summary.json").read_text()) for path in (moved, out))
    assert after["program"] == before["program"] and after["config"]["seed"] == 5
    assert {**after["config"], "program": 0, "out": 0} == {**before["config"], "program": 0, "out": 0}
    # It is not written over.
    refused = run("rerun", str(moved))
    assert refused.returncode == 2 and "is there already" in refused.stderr


def summary(**changes: object) -> dict[str, object]:
    return {"command": ["python", "-m", "experiments.train_dqn", "agent=dqn_paper", "seed=1", "out=x"],
            "config": {"machine": {"name": "m"}, "seed": 1, "limit": "24GiB", "out": "x", "program": None,
                       "agent": {"lr": 0.5, "layers": [1, None]}, "planners": ["none", "it's"]},
            "versions": {}, "program": {}, "results": [], **changes}  # fmt: skip


def test_every_setting_is_said(tmp_path: Path) -> None:
    write_json(tmp_path / "summary.json", summary())
    PROGRAM.save(tmp_path / "program.json")
    module, words, _ = rerun.repeated(tmp_path)
    assert module == "experiments.train_dqn"
    assert words == ["agent=dqn_paper", "seed=1", "limit='24GiB'", "agent.lr=0.5", "agent.layers=[1,null]",
                     "planners=['none','it\\'s']"]  # fmt: skip


@pytest.mark.parametrize(("data", "message"), [
    ({}, "run: .*summary.command: missing"),
    (summary(command=["python", "-m", "experiments.reproduce"]), "is of experiments.reproduce; "),
    (summary(config={}), "has no program.json or no machine"),
])  # fmt: skip
def test_what_cannot_be_repeated(tmp_path: Path, data: object, message: str) -> None:
    write_json(tmp_path / "summary.json", data)
    PROGRAM.save(tmp_path / "program.json")
    with pytest.raises(UsageError, match=message):
        rerun.repeated(tmp_path)
    with pytest.raises(UsageError, match="cannot be read"):
        rerun.repeated(tmp_path / "nothing")


def test_what_differs_is_said(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "plan.json").write_text(name)
    row = {"planner": "x", "limit_bytes": 1, "limit_fraction": 0.5, "overhead": 0.25, "plan_ms": 1}
    timed = {**row, "planner": "x, equal seconds"}
    before = {"results": [row, timed]}
    same, lines = rerun.compared(tmp_path / "a", tmp_path / "a", before, {"results": [{**row, "plan_ms": 9}, timed]})
    assert same and lines[0] == "plan.json: the same to the byte"
    after = {"results": [row, {**timed, "overhead": 0.5}]}
    same, lines = rerun.compared(tmp_path / "a", tmp_path / "b", before, after)
    assert not same and lines == ["plan.json: another one", "x, 0.5 of the peak: the same",
                                  "x, equal seconds, 0.5 of the peak: other overhead (it had seconds)"]  # fmt: skip
    after = {"results": [{**row, "overhead": 0.5}, timed]}
    assert not rerun.compared(tmp_path / "a", tmp_path / "a", before, after)[0]
