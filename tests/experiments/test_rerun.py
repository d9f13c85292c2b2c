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
        "planners=[none,annealing]", "min_bytes=1", "seed=5", "jobs=1", f"out={tmp_path / 'first'}",
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
    (summary(command=["python", "-m", "experiments.plan"]), "summary.families: missing"),
    ({**summary(command=["python", "-m", "experiments.pack"]), "best": "smartpool"}, "has no one file in input/"),
    (summary(command=["python", "-m", "experiments.reproduce"]), "is of experiments.reproduce; "),
    (summary(config={}), "has no machine"),
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


# ------------------------------------------------------------------------------------- plan and pack


def repeat(run: Run, out: Path) -> list[str]:
    """What is said of a run that is repeated, nothing of it left but its directory."""
    again = run("rerun", str(out))
    assert again.returncode == 0, again.stdout + again.stderr
    lines = again.stdout.splitlines()
    assert lines[-1] == f"{out}-again"
    return lines


def test_an_answer_again(run: Run, program_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = run("plan", f"program={program_file}", "memory=0.7", "mode=swap", "seconds=2", f"out={out}")
    assert first.returncode == 0, first.stderr
    program_file.unlink()
    lines = repeat(run, out)
    before, after = (json.loads((path / "summary.json").read_text()) for path in (out, tmp_path / "out-again"))
    assert "none, 0.7 of the peak: the same" in lines and "the largest batch: not compared, it takes the model" in lines
    assert before["verdict"].split(":")[0] == after["verdict"].split(":")[0] and before["fits"] == after["fits"]
    family = next(family for family in before["families"] if family["family"] == "swap, published")
    assert f"{family['planner']}, 0.7 of the peak: the same" in lines  # it has no seconds


def test_what_does_not_fit_again(run: Run, program_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("plan", f"program={program_file}", "memory=40MiB", f"out={out}").returncode == 1
    assert repeat(run, out)[-3].startswith("none, ")


def test_a_packing_again(run: Run, tmp_path: Path) -> None:
    blocks = tmp_path / "my blocks.csv"
    blocks.write_text("id,lower,upper,size\na,0,3,4\nb,3,9,4\nc,0,9,4\nd,9,21,4\ne,0,21,4\n")
    out = tmp_path / "out"
    first = run("pack", blocks, f"out={out}", "seconds=0.2", "algorithms=[cnmem,smartpool,optimal]")
    assert first.returncode == 0, first.stderr
    blocks.unlink()
    assert repeat(run, out)[-5:-1] == ["cnmem: the same", "smartpool: the same", "optimal: the same",
                                       "solution.csv: the same to the byte, by smartpool"]  # fmt: skip
    assert (out / "input" / "my blocks.csv").is_file()


def answer(tmp_path: Path, name: str, plan: str, planner: str, recommended: str, **row: object) -> rerun.Row:
    """The summary of an answer with one family; its directory has the plan."""
    (tmp_path / name).mkdir(exist_ok=True)
    (tmp_path / name / "plan.json").write_text(plan)
    line = {"planner": planner, "limit_bytes": 1, "limit_fraction": 0.5, "overhead": 0.25, "gap": 0.1, **row}
    return {"fits": False, "least_bytes": 1, "results": [line], "recommended": recommended,
            "families": [{"family": "swap", "planner": planner, "left_out": []}]}  # fmt: skip


@pytest.mark.parametrize(
    ("planner", "changes", "same"),
    [
        ("tensile", {"gap": 0.2, "plan_ms": 1}, True),  # the floor had seconds
        ("tensile", {"overhead": 0.3}, False),
        ("tensile", {"plan": "another"}, False),
        ("tensile", {"planner": "capuchin", "recommended": "capuchin"}, False),
        ("tensile", {"planner": "annealing", "recommended": "annealing"}, True),  # which had seconds
        ("annealing", {"plan": "another", "overhead": 0.3}, True),
    ],
)
def test_what_of_an_answer_has_to_be_equal(
    tmp_path: Path, planner: str, changes: dict[str, object], same: bool
) -> None:
    usual = {"plan": "p", "planner": planner, "recommended": planner}
    before = answer(tmp_path, "a", **usual)  # type: ignore[arg-type]
    after = answer(tmp_path, "b", **{**usual, **changes})  # type: ignore[arg-type]
    assert rerun.compared_plan(tmp_path / "a", tmp_path / "b", before, after)[0] is same
    later = {**after, "families": [{**after["families"][0], "left_out": ["capuchin"]}]}
    if after["families"][0]["planner"] != planner:  # another one, because there was less time
        assert rerun.compared_plan(tmp_path / "a", tmp_path / "b", before, later)[0]
    assert not rerun.compared_plan(tmp_path / "a", tmp_path / "b", before, {**after, "least_bytes": 2})[0]


@pytest.mark.parametrize(
    ("best", "changes", "same"),
    [
        ("smartpool", {"seconds": 9.0}, True),
        ("smartpool", {"footprint": 5}, False),
        ("smartpool", {"solution": "another"}, False),
        ("optimal", {"footprint": 5, "solution": "another"}, True),  # it had seconds
        ("optimal", {"footprint": 5, "proven": True}, False),  # two proofs
    ],
)
def test_what_of_a_packing_has_to_be_equal(tmp_path: Path, best: str, changes: dict[str, object], same: bool) -> None:
    for name, change in (("a", {}), ("b", changes)):
        row = {"footprint": 4, "seconds": 1.0, "proven": "proven" in changes, **change}
        (tmp_path / name).mkdir()
        (tmp_path / name / "solution.csv").write_text(str(row.pop("solution", "one")))
        write_json(tmp_path / name / "results.json", {best: row})
    assert rerun.compared_pack(tmp_path / "a", tmp_path / "b", {"best": best}, {"best": best})[0] is same


def test_a_file_names_no_python(tmp_path: Path) -> None:
    """A network of one's own is imported where it was typed, not where a run directory from a stranger has it."""
    data = {"command": ["python", "-m", "experiments.train_dqn"], "config": {"seed": 1, "network": "evil:Net"}}
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(data))
    for words in ([f"resume={tmp_path}"], [f"resume={tmp_path}", "seed=2"]):
        with pytest.raises(UsageError, match="network is Python, which only a command that is typed may name"):
            rerun.resumed_words(file, words)
    typed = [f"resume={tmp_path}", "network=mine:Net"]
    assert rerun.resumed_words(file, typed) == ["seed=1", *typed]
