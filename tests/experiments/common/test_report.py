"""Rows, modes, options and the table of an evaluation."""

import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
from rich.console import Console

import agents
from agents.floor import Floor, floor
from experiments import evaluate
from experiments.common import report
from experiments.common.cli import UsageError
from simulator import Engine, Machine, Program, Recompute, Swap
from tests.experiments.conftest import ROOT

MACHINE = Machine.load("gtx1080ti")


def shown(rows: list[report.Row]) -> str:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(report.table(rows, limits=True))
    return captured.get()


def test_a_row_is_certified(program: Program) -> None:
    limit = int(0.5 * program.peak_bytes)
    found, _ = report.score("autoswap_swdoa", program, MACHINE, limit, 0)
    assert found["gap"] is found["bound_overhead"] is None  # not yet
    bound = floor(program, MACHINE, limit)
    row = report.certified(found, bound)
    assert tuple(row) == report.ROW_KEYS
    assert row["bound_overhead"] == bound.overhead >= 0 and row["bound_bytes"] == bound.least_bytes
    assert row["gap"] == row["overhead"] - bound.overhead > 0
    infeasible = report.certified(report.score("none", program, MACHINE, limit, 0)[0], bound)
    assert infeasible["gap"] is None and infeasible["bound_overhead"] == bound.overhead


def test_the_table_has_the_floor_of_each_limit() -> None:
    def row(planner: str, limit: int, overhead: float | None, bound: float | None) -> report.Row:
        timeline = None
        if overhead is not None:
            breakdown = report.simulator.simulate(*empty()).breakdown
            timeline = SimpleNamespace(overhead=overhead, iteration_ns=10**6, peak_bytes=limit, breakdown=breakdown)
        program = SimpleNamespace(name="p", peak_bytes=1000 * 10**6, ideal_ns=10**6)
        why = "x: 'p' cannot be planned within 1 bytes (peak 2); the smallest limit it can reach is 123,456,789 bytes"
        made = report.row(program, MACHINE, limit, planner, 0, timeline, reason=why)  # type: ignore[arg-type]
        return report.certified(made, Floor(bound is not None, 400 * 10**6, 1, bound or 0.0, (), None, None))  # type: ignore[arg-type]

    lines = shown([
        row("annealing", 600 * 10**6, 0.0306, 0.0106), row("none", 600 * 10**6, None, 0.0106),
        row("annealing", 300 * 10**6, None, None),
    ]).splitlines()  # fmt: skip
    cells = [line.split() for line in lines if line.strip()][2:]
    assert cells[0] == ["60%", "floor", "1.06%"]
    assert cells[1][:3] == ["annealing", "3.06%", "2.00"] and cells[1][-1] == "yes"
    assert cells[2][0] == "none" and "no: its smallest limit is 123 MB" in " ".join(cells[2])
    assert cells[3][:3] == ["30%", "floor", "–"]
    assert " ".join(cells[3]).endswith("no plan fits: the smallest limit is 400 MB")
    assert " ".join(cells[4]).endswith("no: no plan fits (the floor)")


def empty() -> tuple:
    """Arguments of ``simulate`` for a program that does nothing much."""
    from simulator import Kernel, Plan, Tensor

    return Program("p", (Tensor("t", 1),), (Kernel("k", "other", "forward", (), (0,), 1),)), Plan(), MACHINE, 1


def test_options_go_to_the_planners_that_have_them() -> None:
    options = {"mode": "swap", "calls": 77, "jobs": 1}
    annealing, swarm = report.made("annealing", **options), report.made("home", **options)
    assert (annealing.mode, annealing.calls) == ("swap", 77)  # type: ignore[attr-defined]
    assert (swarm.mode, swarm.calls, swarm.jobs) == ("swap", 77, 1)  # type: ignore[attr-defined]
    report.made("autoswap_doa", **options)  # has none of them
    assert report.made("annealing", calls=None).calls == agents.make("annealing").calls  # type: ignore[attr-defined]
    assert "score" not in agents.options("autoswap_doa")  # it is what makes it this planner
    with pytest.raises(UsageError, match="planners: annealing: calls: expected at least 20, got 5"):
        report.planner_names(["autoswap_doa", "annealing"], calls=5)


def test_a_plan_of_another_mode_does_not_count(program: Program) -> None:
    limit = int(0.8 * program.peak_bytes)
    for mode, kind, other in (("swap", Swap, "memonger"), ("recompute", Recompute, "autoswap_doa")):
        row, plan = report.score("annealing", program, MACHINE, limit, 0, mode, calls=200)
        assert row["mode"] == mode and plan is not None and {type(d) for d in plan.decisions} == {kind}
        assert report.score(other, program, MACHINE, limit, 0)[0]["feasible"]
        row, plan = report.score(other, program, MACHINE, limit, 0, mode)
        assert plan is None and not row["feasible"] and row["reason"].startswith("its plan has decisions to ")
    plan = report.score("autoswap_doa", program, MACHINE, limit, 0)[1]
    assert plan is not None
    assert not report.score_plan(plan, program, MACHINE, limit, 0, "recompute")["feasible"]
    assert report.score_plan(plan, program, MACHINE, limit, 0, "swap")["feasible"]


def with_workspaces(program: Program) -> Program:
    """Every kernel has an algorithm of twice the time without its workspace of 40 MiB."""
    return replace(program, kernels=tuple(
        replace(k, workspace=40 * 2**20, variants=((2 * k.duration_ns, 0),)) for k in program.kernels
    ))  # fmt: skip


def test_rows_of_the_three_workspaces(program: Program) -> None:
    program = with_workspaces(program)
    limit = int(0.75 * program.peak_bytes)
    rows = {}
    for workspace in (False, "least", True):
        row, plan = report.score("autoswap_swdoa", program, MACHINE, limit, 0, workspace=workspace)
        assert plan is not None and row["feasible"] and row["workspace"] is workspace
        assert row["iteration_ns"] == report.simulator.simulate(program, plan, MACHINE, limit).iteration_ns
        assert row["ideal_ns"] == program.ideal_ns
        rows[workspace] = report.certified(row, evaluate.floor_under(program, MACHINE, limit, None, bool(workspace)))
        assert rows[workspace]["gap"] >= 0
        again = report.score_plan(plan, program, MACHINE, limit, 0, workspace=workspace)
        assert (again["workspace"], again["iteration_ns"]) == (workspace, row["iteration_ns"])
    assert rows[True]["iteration_ns"] < rows["least"]["iteration_ns"]
    assert rows[True]["iteration_ns"] <= rows[False]["iteration_ns"]
    assert rows["least"]["breakdown"]["compute_ns"] == 2 * program.ideal_ns
    # Below what every plan needs with its own workspaces, another algorithm fits.
    needs = floor(program, MACHINE, limit).least_bytes
    tight = needs - 2**20
    assert not report.score("autoswap_swdoa", program, MACHINE, tight, 0)[0]["feasible"]
    found, _ = report.score("autoswap_swdoa", program, MACHINE, tight, 0, workspace=True)
    assert found["feasible"] and found["peak_bytes"] <= tight
    bound = evaluate.floor_under(program, MACHINE, tight, None, True)
    assert bound.least_bytes <= tight and 0 <= bound.overhead == bound.iteration_ns / program.ideal_ns - 1
    assert report.certified(found, bound)["gap"] >= 0
    plan = report.score("autoswap_swdoa", program, MACHINE, limit, 0)[1]
    assert plan is not None
    nothing = report.score_plan(plan, program, MACHINE, needs // 2, 0, workspace=True)
    assert not nothing["feasible"] and "with the least workspaces" in nothing["reason"]


def test_home_has_one_thread_in_a_worker(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    batch = Engine.score_batch
    monkeypatch.setattr(Engine, "score_batch", lambda self, *args: asked.append(args[2]) or batch(self, *args))
    evaluate._start_worker(program, MACHINE, 0, {"mode": None, "calls": 300})
    row = evaluate._do("home", int(0.5 * program.peak_bytes))
    assert set(asked) == {1} and row["feasible"] and row["simulator_calls"] <= 300  # type: ignore[index]


def test_floors_come_first_while_the_simulator_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiling = iter([True, False, False, False])
    monkeypatch.setattr(evaluate.warm, "busy", lambda: next(compiling, False))
    monkeypatch.setattr(evaluate, "_start_worker", lambda *_: None)
    monkeypatch.setattr(evaluate, "_warm_up", lambda name: None)
    monkeypatch.setattr(evaluate, "_do", lambda name, limit: limit)
    tasks = [(evaluate.FLOOR, 1), (evaluate.FLOOR, 2), ("none", 1), ("none", 2)]
    order = [task for task, _ in evaluate._done(tasks, 1, ())]
    assert order == [tasks[1], tasks[3], tasks[2], tasks[0]]


def test_all_planners_need_no_training_and_slow_ones_come_first() -> None:
    names = report.planner_names(["all"])
    assert {"none", "home", "lp_round", "autoswap_bo", "geeps"} < set(names) and "dqn" not in names
    assert set(evaluate.SLOW) <= set(names)
    with pytest.raises(UsageError, match="train_dqn"):
        report.planner_names(["all", "dqn"])


def test_published_planners_stand_for_those_that_plan_in_seconds() -> None:
    names = report.planner_names(["none", "published", "lp_round", "tensile"])
    assert names == ["none", *report.heuristics(), "lp_round"]
    assert {"autoswap_doa", "tensile", "geeps"} < set(names) and not {"home", "annealing", "dqn_paper"} & set(names)


WARM = """
from experiments.common import report
from tests.experiments.conftest import chain
from simulator import Machine
import sys

def compiled():
    return {(f.__module__, f.__name__): len(f.signatures) for m in list(sys.modules.values()) for f in vars(m).values()
            if getattr(m, "__name__", "").startswith(("simulator", "agents")) and hasattr(f, "nopython_signatures")}

if __name__ == "__main__":
    machine, program = Machine.load("gtx1080ti"), chain()
    for mode in ("swap", "joint"):
        for name in report.planner_names(["all"]):
            report.warm_up(machine, name, mode)
            before = compiled()
            report.score(name, program, machine, int(0.4 * program.peak_bytes), 0, mode, calls=60, jobs=1)
            assert before and compiled() == before, (name, mode, set(compiled().items()) - set(before.items()))
"""


def test_warm_up_compiles_what_every_planner_needs() -> None:
    done = subprocess.run([sys.executable, "-c", WARM], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
