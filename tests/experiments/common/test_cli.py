"""The entry points as a user meets them: what they write, and what they say to a mistake."""

import json
import subprocess
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

import agents
from agents.floor import floor
from agents.learned.dqn_config import DQNConfig, PaperConfig
from experiments.common import cli
from experiments.common.report import ROW_KEYS
from simulator import Machine, Plan, Program, Swap, simulate
from simulator.compiled.engine import Engine, rows_of
from tests.experiments.conftest import Run, chain

Done = subprocess.CompletedProcess[str]


def refused(done: Done, *words: str) -> None:
    """One sentence on stderr that holds all the words, status 2."""
    assert done.returncode == 2, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    for word in words:
        assert word in lines[0]


# ------------------------------------------------------------------------------------------- the keys


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("limt=0.6", "'limit'"),
        ("workloda=resnet50", "'workload'"),
        ("sead=1", "'seed'"),
        ("machine=gtx1080", "'gtx1080ti'"),
        ("workload=vgg-16", "'vgg16'"),
        ("agent=dqm", "'dqn'"),
        ("machine.copy_engine=1", "'machine.copy_engines'"),
        ("copy_engines=1", "'machine.copy_engines'"),
        ("+limt=0.6", "'limit'"),
        ("seed=1,2", "-m"),
        ("limit=[0.6", "limit"),
        ("~limit", "cannot be deleted"),
        ("agent.walks=3", "this key is agent.num_envs now"),
        ("agent.mutations=3", "no such part any more"),
        ("hydra/launcher=nowhere", "not installed"),
    ],
)
def test_a_mistyped_key_names_the_nearest_right_one(override: str, word: str) -> None:
    with pytest.raises(cli.UsageError) as caught:
        cli.check_overrides("train_dqn", [override], sweep=False)
    assert word in cli.sentence(caught.value)


@pytest.mark.parametrize("name", ["train_dqn", "evaluate", "plan"])
def test_right_keys_pass(name: str) -> None:
    cli.check_overrides(name, ["machine=gtx1080ti", "machine.copy_engines=1"], sweep=False)
    cli.check_overrides(name, ["machine=gtx1080ti,h100"], sweep=True)


def test_a_sweep_is_checked_value_by_value() -> None:
    with pytest.raises(cli.UsageError, match="'h100'"):
        cli.check_overrides("train_dqn", ["machine=gtx1080ti,h10"], sweep=True)


@pytest.mark.parametrize(("name", "kind"), [("dqn", DQNConfig), ("dqn_paper", PaperConfig)])
def test_agent_configs_list_every_key_of_the_agent(name: str, kind: Any) -> None:
    config = OmegaConf.load(cli.CONFIGS / "agent" / f"{name}.yaml")
    made = cli.dataclass_of(kind, config, "agent")
    assert set(config) == {f.name for f in fields(made)}


@pytest.mark.parametrize("value", ["abc", 1.5, -1, None, True])
def test_a_seed_is_a_number_from_0(value: object) -> None:
    with pytest.raises(cli.UsageError, match="seed: expected an integer"):
        cli.integer(OmegaConf.create({"seed": value}), "seed")


def test_a_choice_is_one_of_those_known() -> None:
    cfg = OmegaConf.create({"scale": 3, "mode": None})
    with pytest.raises(cli.UsageError, match="scale: expected log or linear, got 3"):
        cli.choice(cfg, "scale", ("log", "linear"))
    assert cli.choice(cfg, "mode", (None, "swap")) is None


# -------------------------------------------------------------------------------------------- mistakes


def test_unknown_keys_end_with_status_2(run: Run, tmp_path: Path) -> None:
    refused(run("train_dqn", "limt=0.6"), "limt", "'limit'")
    refused(run("evaluate", "machine=gtx1080"), "gtx1080", "'gtx1080ti'")
    assert not any((tmp_path / "work").iterdir())


def test_bad_values_end_with_status_2_and_leave_nothing(run: Run, program_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    broken = tmp_path / "broken.json"
    broken.write_text('{"format": "program/1"')
    base = (f"program={program_file}", f"out={out}")
    refused(run("evaluate", *base, "limits=[abc]"), "limits", "'abc'")
    refused(run("evaluate", *base, "planners=[anealing]"), "'anealing'", "'annealing'")
    refused(run("evaluate", *base, "mode=both"), "mode: expected null, swap, recompute or joint, got 'both'")
    refused(run("evaluate", *base, "machine.memory_bytes=-1"), "machine.memory_bytes")
    refused(run("evaluate", f"program={broken}", f"out={out}"), "broken.json", "not JSON")
    refused(run("evaluate", f"program={tmp_path / 'none.json'}", f"out={out}"), "none.json", "cannot be read")
    assert not out.exists()
    assert not any((tmp_path / "work").iterdir())


def test_a_plan_for_another_program_is_refused(run: Run, program_file: Path, tmp_path: Path) -> None:
    other = chain(layers=7)
    Plan((Swap(*other.gaps()[0]),), other.fingerprint).save(tmp_path / "plan.json")
    done = run("evaluate", f"program={program_file}", f"plan={tmp_path / 'plan.json'}", f"out={tmp_path / 'out'}")
    refused(done, "another program")
    assert not (tmp_path / "out").exists()


def test_training_below_what_any_plan_can_reach_is_refused(run: Run, program_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused(run("train_dqn", f"program={program_file}", "limit=0.01", f"out={out}"), "chain", "cannot run in")
    assert not out.exists()


def test_a_checkpoint_that_is_none_is_refused(run: Run, program_file: Path, tmp_path: Path) -> None:
    out, bad = tmp_path / "out", tmp_path / "checkpoint.pt"
    refused(run("train_dqn", f"program={program_file}", f"resume={bad}", f"out={out}"), "checkpoint.pt")
    bad.write_bytes(b"not a checkpoint")
    refused(run("train_dqn", f"program={program_file}", f"resume={bad}", f"out={out}"), "checkpoint.pt")
    assert not out.exists()


# ----------------------------------------------------------------------------------------------- runs


def rows_in(directory: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (directory / "results.jsonl").read_text().splitlines()]


def check_rows(rows: list[dict[str, object]]) -> None:
    for row in rows:
        assert set(row) - {"reason"} == set(ROW_KEYS)
        assert ("reason" in row) == (not row["feasible"])
        if row["feasible"]:
            assert row["peak_bytes"] <= row["limit_bytes"]  # type: ignore[operator]
            assert row["gap"] == row["overhead"] - row["bound_overhead"] >= 0  # type: ignore[operator]
        else:
            assert row["gap"] is row["overhead"] is row["iteration_ns"] is row["peak_bytes"] is row["breakdown"] is None


def test_evaluate_scores_planners(run: Run, program: Program, program_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(
        "evaluate", f"program={program_file}", "limits=[0.8,0.01]", "planners=[none,autoswap_swdoa]", f"out={out}"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(out)
    names = {"summary.json", "program.json", "results.jsonl", "overhead.png", ".hydra"}
    assert {f.name for f in out.iterdir()} == names
    assert (out / ".hydra" / "overrides.yaml").read_text().startswith(f"- program={program_file}\n- limits=")
    rows = rows_in(out)
    check_rows(rows)
    assert [(r["planner"], r["feasible"]) for r in rows] == [
        ("none", False), ("autoswap_swdoa", True), ("none", False), ("autoswap_swdoa", False)
    ]  # fmt: skip
    assert rows[0]["limit_bytes"] == int(0.8 * program.peak_bytes)
    assert json.loads((out / "summary.json").read_text())["results"] == rows
    on = Machine.load("gtx1080ti")
    assert [r["bound_overhead"] for r in rows] == [floor(program, on, int(0.8 * program.peak_bytes)).overhead] * 2 + [
        None
    ] * 2
    assert all(r["bound_bytes"] > r["limit_bytes"] for r in rows[2:])  # type: ignore[operator]
    assert "no plan fits: the smallest limit is" in done.stdout and "no plan fits (the floor)" in done.stdout


def test_evaluate_in_a_mode_with_a_budget(run: Run, program: Program, program_file: Path, tmp_path: Path) -> None:
    base = (f"program={program_file}", "limits=[0.8]", "planners=[annealing,home,memonger]", "calls=400", "jobs=1")
    for mode in ("swap", "recompute"):
        out = tmp_path / mode
        done = run("evaluate", *base, f"mode={mode}", "scale=linear", f"out={out}")
        assert done.returncode == 0, done.stderr
        assert f"floor ({mode})" in done.stdout
        rows = rows_in(out)
        check_rows(rows)
        bound = floor(program, Machine.load("gtx1080ti"), int(0.8 * program.peak_bytes), mode)
        for row in rows:
            assert (row["mode"], row["bound_overhead"]) == (mode, bound.overhead)
            assert row["simulator_calls"] <= 400  # type: ignore[operator]
        assert [r["feasible"] for r in rows] == ([True, True, False] if mode == "swap" else [True, True, True])


def test_evaluate_scores_a_plan(run: Run, program: Program, program_file: Path, tmp_path: Path) -> None:
    plan, machine = Plan(tuple(Swap(*g) for g in program.gaps(2**20)), program.fingerprint), Machine.load("gtx1080ti")
    plan.save(tmp_path / "plan.json")
    out = tmp_path / "out"
    done = run("evaluate", f"program={program_file}", f"plan={tmp_path / 'plan.json'}", "limits=0.7", f"out={out}")
    assert done.returncode == 0, done.stderr
    (row,) = rows_in(out)
    assert row["iteration_ns"] == simulate(program, plan, machine, int(0.7 * program.peak_bytes)).iteration_ns


def test_evaluate_scores_a_plan_under_other_times(run: Run, program: Program, tmp_path: Path) -> None:
    machine, limit = Machine.load("gtx1080ti"), int(0.7 * program.peak_bytes)
    plan = agents.make("tensile").plan(program, machine, limit)
    plan.save(tmp_path / "plan.json")
    other = program.with_durations([k.duration_ns // 3 for k in program.kernels])
    other.save(tmp_path / "other.json")
    words = (f"program={tmp_path / 'other.json'}", f"plan={tmp_path / 'plan.json'}", "limits=0.7")
    refused(run("evaluate", *words), "only times differ", "retime=true")
    done = run("evaluate", *words, "retime=true", f"out={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    (row,) = rows_in(tmp_path / "out")
    assert row["iteration_ns"] == simulate(other, plan.retimed(other), machine, limit).iteration_ns


def test_evaluate_with_the_dynamic_workspace(run: Run, program: Program, program_file: Path, tmp_path: Path) -> None:
    base = (f"program={program_file}", "limits=0.8", "planners=autoswap_swdoa", f"out={tmp_path / 'out'}", "jobs=1")
    refused(run("evaluate", *base, "workspace=fast"), "workspace: expected true, false or least, got 'fast'")
    refused(run("evaluate", *base, "workspace=true"), "no kernel of 'chain' has several algorithms")
    several = (replace(k, workspace=2**24, variants=((3_000_000, 0),)) for k in program.kernels)
    replace(program, kernels=tuple(several)).save(program_file)
    done = run("evaluate", *base, "workspace=true")
    assert done.returncode == 0, done.stderr
    rows = rows_in(tmp_path / "out")
    check_rows(rows)
    assert [row["workspace"] for row in rows] == [True]


def test_a_sweep_makes_a_run_each(run: Run, program_file: Path, tmp_path: Path) -> None:
    done = run("evaluate", "-m", f"program={program_file}", "planners=none", "limits=1.0,0.9", "jobs=1")
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "work" / "runs").glob("evaluate-chain-*"))) == 2


def test_a_sweep_ends_with_a_common_table_and_keeps_it(run: Run, program_file: Path, tmp_path: Path) -> None:
    words = (f"program={program_file}", "planners=[none,autoswap_swdoa]", "jobs=1")
    done = run("evaluate", "-m", *words, "limits=0.8,0.9", "seed=0,5")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "work" / done.stdout.splitlines()[-1]
    assert folder.parent.name == "runs" and {f.name for f in folder.iterdir()} == {
        "multirun.yaml", "table.txt", "results.jsonl"}  # fmt: skip
    lines = [line.split() for line in (folder / "table.txt").read_text().splitlines() if line.strip()]
    swept = [row for row in lines if row[0] in ("0.8", "0.9")]
    assert [row[:2] for row in swept] == [["0.8", "0"], ["0.8", "5"], ["0.9", "0"], ["0.9", "5"]]
    assert "autoswap_swdoa" in (folder / "table.txt").read_text() and swept[0][-1] in done.stdout
    rows = rows_in(folder)
    assert len(rows) == 8 and {tuple(row["overrides"])[-1] for row in rows} == {"seed=0", "seed=5"}  # type: ignore[arg-type]
    own = [row for row in rows if row["overrides"] == rows[0]["overrides"]]
    assert [{k: v for k, v in row.items() if k not in ("overrides", "run")} for row in own] == rows_in(
        Path(own[0]["run"])
    )  # type: ignore[arg-type]


def test_train_writes_its_run_directory(run: Run, program: Program, program_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = (f"program={program_file}", "limit=0.6", "seed=1", "agent.episodes=6", "planners=[none,autoswap_swdoa]")
    done = run("train_dqn", *words, f"out={out}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(out)
    names = {"program.json", "summary.json", "results.jsonl", "plan.json", "checkpoint.pt", "tb", "learning_curve.png",
             "memory_curve.png", "timeline.json", "curve.json", ".hydra"}  # fmt: skip
    assert {f.name for f in out.iterdir()} == names
    rows = rows_in(out)
    check_rows(rows)
    names = ["none", "autoswap_swdoa", "mutation, equal calls", "mutation, equal seconds", "dqn, from scratch",
             "dqn, nothing learned", "dqn", "dqn_greedy"]  # fmt: skip
    assert [r["planner"] for r in rows] == names
    equal, dqn = rows[2], rows[6]
    assert 0 < equal["simulator_calls"] <= dqn["simulator_calls"]  # type: ignore[operator]
    plan = Plan.load(out / "plan.json")
    limit = int(0.6 * program.peak_bytes)
    score = Engine(program, Machine.load("gtx1080ti"), limit).score(rows_of(plan.decisions))
    assert score.feasible and score.iteration_ns == dqn["iteration_ns"]
    events = json.loads((out / "timeline.json").read_text())["traceEvents"]
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {"compute", "d2h", "h2d"} and any(e["ph"] == "C" for e in events)
    for picture in ("learning_curve.png", "memory_curve.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    assert any((out / "tb").glob("events.out.tfevents.*"))
    refused(run("train_dqn", *words, f"out={out}"), "already holds a finished run")


def test_learning_compares_the_agent_over_the_seeds(run: Run, program_file: Path, tmp_path: Path) -> None:
    refused(run("reproduce", "figure=learning", f"figure.runs={tmp_path}"), "no training")
    for seed in (0, 1):
        words = (f"program={program_file}", "limit=0.6", f"seed={seed}", "planners=[autoswap_doa,annealing]")
        done = run("train_dqn", *words, "agent.episodes=4", f"out={tmp_path / 'runs' / str(seed)}")
        assert done.returncode == 0, done.stderr
    (tmp_path / "runs" / "2").mkdir()
    (tmp_path / "runs" / "2" / "summary.json").write_text('{"results": []}')  # compared nothing
    words = ("figure=learning", f"figure.runs={tmp_path / 'runs'}", "jobs=1", f"out={tmp_path / 'out'}")
    done = run("reproduce", *words)
    assert done.returncode == 0, done.stderr
    assert "1 of 3 runs under" in done.stdout
    first, second, *curves = json.loads((tmp_path / "out" / "learning.json").read_text())["rows"]
    assert [(curve["agent"], curve["seed"]) for curve in curves] == [("train_dqn, dqn", 0), ("train_dqn, dqn", 1)]
    assert [first["seed"], second["seed"]] == [0, 1] and first["mode"] == "joint"
    expected = {r["planner"]: r["overhead"] for r in rows_in(tmp_path / "runs" / "0")}
    assert first["dqn"] == expected["dqn"] and first["autoswap"] == expected["autoswap_doa"]
    assert first["mutation_calls"] == expected["mutation, equal calls"]
    assert first["mutation_seconds"] == expected["mutation, equal seconds"]
    assert first["dqn"] - first["floor"] == first["gap"] >= 0
