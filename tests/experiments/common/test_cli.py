"""Tests commands from the user's view: their keys and the files that they write."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from agents.floor import floor
from agents.learned.dqn_config import Args, PaperConfig
from experiments.common import cli
from simulator import Machine, Plan, Program, Swap, simulate
from simulator.compiled.engine import Engine, rows_of
from tests.experiments.conftest import Run, check_rows, refused, rows_in

GPU = Machine.load("gtx1080ti")


# ------------------------------------------------------------------------------------------- the keys


ONE_TASK = {  # values of agent=dqn for one task; the defaults are for many tasks (experiments.pretrain)
    "iterations": 50,
    "init": "pretrained",
    "most_calls": 1000,
    "learning_starts": 4,
    "target_every": 30,
    "learning_rate": 4e-4,
}


SCRATCH = ONE_TASK | {
    "target_every": 150,
    "iterations": 180,
    "init": "scratch",
    "learning_rate": 1e-3,
    "gamma": 0.5,
    "most_calls": 2000,
}
TUNED = {
    "episodes": 60,
    "pool": "mean",
    "mixing": True,
    "n_step": 1000,
    "optimizer": "adam",
    "learning_rate": 1e-3,
    "reward_scale": 100.0,
}


@pytest.mark.parametrize(
    ("agent", "kind", "other"),
    [
        ("dqn", Args, ONE_TASK),
        ("dqn_scratch", Args, SCRATCH),
        ("dqn_paper", PaperConfig, {}),
        ("dqn_paper_tuned", PaperConfig, TUNED),
    ],
)
def test_agent_configs_list_every_key_of_the_agent_with_its_default(
    agent: str, kind: Any, other: dict[str, Any]
) -> None:
    config = OmegaConf.load(cli.CONFIGS / "agent" / f"{agent}.yaml")
    made = cli.dataclass_from_config(kind, config, "agent")
    assert set(config) == {f.name for f in fields(made)}
    assert made == kind(**other)


# ----------------------------------------------------------------------------------------------- runs

SMOKE = {
    "plan": "program={program} memory=0.7 seconds=1",
    "evaluate": "program={program} limits=[0.9] planners=[none] jobs=1",
    "pack": "{program} algorithms=[smartpool]",
    "train_dqn": "program={program} limit=0.6 agent=dqn_paper agent.episodes=2 planners=null",
    "train_sb3": "steps=64 algo.n_steps=8 planners=null",
    "reproduce": "--help",
    "benchmark": "--help",
    "pretrain": "--help",
    "measured": "--help",
    "verify": "--help",
    "validate_gpu": "--help",
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.nightly] * (n != "evaluate")) for n in SMOKE])
def test_a_command_runs_in_a_process_of_its_own(name: str, start: Run, program_file: Path) -> None:
    done = start(name, *SMOKE[name].format(program=program_file).split()).ok()
    assert done.stdout, done.stderr


def test_evaluate_scores_planners(run: Run, program: Program, program_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = (f"program={program_file}", "limits=[0.8,0.01]", "planners=[none,autoswap_swdoa]", "jobs=1")
    done = run("evaluate", *words, f"out={out}").ok()
    names = {"summary.json", "program.json", "results.jsonl", "overhead.png", ".hydra"}
    assert {f.name for f in out.iterdir()} == names
    rows = rows_in(out)
    check_rows(rows)
    assert [(r["planner"], r["feasible"]) for r in rows] == [
        ("none", False),
        ("autoswap_swdoa", True),
        ("none", False),
        ("autoswap_swdoa", False),
    ]
    limit = int(0.8 * program.peak_bytes)
    assert rows[0]["limit_bytes"] == limit and json.loads((out / "summary.json").read_text())["results"] == rows
    overhead = floor(program, GPU, limit).overhead
    assert [r["bound_overhead"] for r in rows] == [overhead, overhead, None, None]
    assert all(r["bound_bytes"] > r["limit_bytes"] for r in rows[2:])
    assert "no plan fits: the smallest limit is" in done.stdout


def test_evaluate_in_a_mode_with_a_budget(run: Run, program: Program, program_file: Path, tmp_path: Path) -> None:
    base = (f"program={program_file}", "limits=[0.8]", "planners=[annealing,home,memonger]", "calls=400", "jobs=1")
    for mode in ("swap", "recompute"):
        out = tmp_path / mode
        done = run("evaluate", *base, f"mode={mode}", "scale=linear", f"out={out}").ok()
        assert f"floor ({mode})" in done.stdout, done.stderr
        rows = rows_in(out)
        check_rows(rows)
        bound = floor(program, GPU, int(0.8 * program.peak_bytes), mode)
        for row in rows:
            assert (row["mode"], row["bound_overhead"]) == (mode, bound.overhead)
            assert row["simulator_calls"] <= 400
        assert [r["feasible"] for r in rows] == ([True, True, False] if mode == "swap" else [True, True, True])


def test_evaluate_scores_a_plan_also_under_other_times(run: Run, program: Program, tmp_path: Path) -> None:
    limit = int(0.7 * program.peak_bytes)
    plan = Plan.of(program, tuple(Swap(*g) for g in program.gaps(2**20)))
    other = program.with_durations([k.duration_ns // 3 for k in program.kernels])
    for name, one in (("plan", plan), ("program", program), ("other", other)):
        one.save(tmp_path / f"{name}.json")
    words = (f"plan={tmp_path / 'plan.json'}", "limits=0.7", f"out={tmp_path / 'out'}", "jobs=1")
    run("evaluate", f"program={tmp_path / 'program.json'}", *words).ok()
    (row,) = rows_in(tmp_path / "out")
    assert row["iteration_ns"] == simulate(program, plan, GPU, limit).iteration_ns
    words = (f"program={tmp_path / 'other.json'}", *words)
    refused(run("evaluate", *words), "retime=true")
    run("evaluate", *words, "retime=true").ok()
    (row,) = rows_in(tmp_path / "out")
    assert row["iteration_ns"] == simulate(other, plan.retimed(other), GPU, limit).iteration_ns


def test_a_sweep_ends_with_a_common_table_and_keeps_it(run: Run, program_file: Path, tmp_path: Path) -> None:
    words = (f"program={program_file}", "planners=[none,autoswap_swdoa]", "jobs=1")
    done = run("evaluate", "-m", *words, "limits=0.8,0.9", "seed=0,5").ok()
    assert len(list((tmp_path / "work" / "runs").glob("evaluate-chain-*"))) == 4
    folder = tmp_path / "work" / done.stdout.splitlines()[-1]
    assert folder.parent.name == "runs" and {f.name for f in folder.iterdir()} == {
        "multirun.yaml",
        "table.txt",
        "results.jsonl",
    }
    lines = [line.split() for line in (folder / "table.txt").read_text().splitlines() if line.strip()]
    swept = [row for row in lines if row[0] in ("0.8", "0.9")]
    assert [row[:2] for row in swept] == [["0.8", "0"], ["0.8", "5"], ["0.9", "0"], ["0.9", "5"]]
    assert "autoswap_swdoa" in (folder / "table.txt").read_text() and swept[0][-1] in done.stdout
    rows = rows_in(folder)
    assert len(rows) == 8 and {tuple(row["overrides"])[-1] for row in rows} == {"seed=0", "seed=5"}
    own = [row for row in rows if row["overrides"] == rows[0]["overrides"]]
    assert [{k: v for k, v in row.items() if k not in ("overrides", "run")} for row in own] == rows_in(
        Path(own[0]["run"])
    )


def test_train_writes_its_run_directory(run: Run, program: Program, program_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs" / "out"
    words = (
        f"program={program_file}",
        "limit=0.5",
        "seed=1",
        "agent.iterations=5",
        "agent.greedy_calls=300",
        "greedy_every=200",
        "planners=[autoswap_doa,annealing]",
    )
    done = run("train_dqn", *words, f"out={out}").ok()
    files = {
        "program.json",
        "summary.json",
        "results.jsonl",
        "plan.json",
        "checkpoint.pt",
        "weights.pt",
        "tb",
        "learning_curve.png",
        "memory_curve.png",
        "timeline.json",
        "curve.json",
        ".hydra",
    }
    assert {f.name for f in out.iterdir()} == files
    rows = rows_in(out)
    check_rows(rows)
    names = [
        "autoswap_doa",
        "annealing",
        "without the network, equal calls",
        "without the network, equal seconds",
        "without the network, 300 calls",
        "dqn, before training",
        "dqn",
        "dqn_greedy",
    ]
    assert [r["planner"] for r in rows] == names
    equal, _, few, before, dqn, greedy = rows[2:]
    assert 0 < equal["simulator_calls"] <= dqn["simulator_calls"]
    assert max(row["simulator_calls"] for row in (few, before, greedy)) <= 300 < dqn["simulator_calls"]
    assert json.loads((out / "summary.json").read_text())["episodes"] == 5
    plan = Plan.load(out / "plan.json")
    score = Engine(program, GPU, program.peak_bytes // 2).score(rows_of(plan.decisions))
    assert score.feasible and score.iteration_ns == dqn["iteration_ns"]
    events = json.loads((out / "timeline.json").read_text())["traceEvents"]
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {"compute", "d2h", "h2d"} and any(e["ph"] == "C" for e in events)
    for picture in ("learning_curve.png", "memory_curve.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    refused(run("train_dqn", *words, f"out={out}"), str(out), "summary.json")
    # Learning curves of several runs.
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "runs" / "other" / "summary.json").write_text('{"results": []}')  # no compared planners
    words = ("figure=learning", f"figure.runs={tmp_path / 'runs'}", "jobs=1", f"out={tmp_path / 'figure'}")
    done = run("reproduce", *words).ok()
    assert "1 of 2 runs" in done.stdout, done.stderr
    learned, curve = json.loads((tmp_path / "figure" / "learning.json").read_text())["rows"]
    assert (learned["seed"], learned["dqn"], learned["autoswap"]) == (1, dqn["overhead"], rows[0]["overhead"])
    assert learned["uniform_calls"] == equal["overhead"] and curve["agent"] == "train_dqn, dqn"
    assert (learned["uniform_greedy"], learned["before"]) == (few["overhead"], before["overhead"])
