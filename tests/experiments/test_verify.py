"""Tests ``verify``: plans of a submission count only for their program and within the limit."""

import json
from dataclasses import replace
from pathlib import Path

import agents
from envs.tasks import load
from simulator import simulate
from tests.experiments.conftest import Run, refused, rows_in


def test_plans_are_verified_against_program_and_limit(run: Run, tmp_path: Path) -> None:
    program, machine = load("vgg16")
    limit = int(0.45 * program.peak_bytes)
    plan = agents.make("capuchin").plan(program, machine, limit)
    folder = tmp_path / "plans"
    folder.mkdir()
    plan.save(folder / "vgg16-45.json")
    out = tmp_path / "good"
    done = run("verify", f"plans={folder}", "tasks=[vgg16-45]", f"out={out}").ok()
    (row,) = rows_in(out)
    assert row["overhead"] == simulate(program, plan, machine, limit).overhead and "1 of 1 plans count" in done.stdout

    replace(plan, decisions=()).save(folder / "vgg16-40.json")  # does not fit
    plan.save(folder / "unet-50.json")  # of another program
    (folder / "mobilenet-40.json").write_text(json.dumps({"format": "plan/2"}))
    out = tmp_path / "bad"
    names = "tasks=[vgg16-45,vgg16-40,unet-50,mobilenet-40,gpt2_small-50]"
    done = run("verify", f"plans={folder}", names, f"out={out}")
    assert done.returncode == 1 and "1 of 5 plans count" in done.stdout
    assert [row["feasible"] for row in rows_in(out)] == [True, False, False, False, False]


def test_invalid_arguments_are_refused(run: Run, tmp_path: Path) -> None:
    refused(run("verify"), "plans")
    refused(run("verify", f"plans={tmp_path}", "tasks=[vgg-45]"), "tasks", "vgg-45")
