"""Tests rows, modes, options and the table of an evaluation."""

import subprocess
import sys
from dataclasses import replace

import pytest
from rich.console import Console

import agents
from agents.floor import floor
from experiments import evaluate
from experiments.common import report
from experiments.common.cli import UsageError
from simulator import Machine, Program, Recompute, Swap
from tests.experiments.conftest import ROOT

MACHINE = Machine.load("gtx1080ti")


def shown(rows: list[report.Row]) -> str:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(report.table(rows, limits=True))
    return captured.get()


def test_the_table_has_the_floor_of_each_limit(program: Program) -> None:
    rows = [
        report.with_bounds(report.score(name, program, MACHINE, limit, 0)[0], floor(program, MACHINE, limit))
        for limit in (int(0.5 * program.peak_bytes), int(0.01 * program.peak_bytes))
        for name in ("autoswap_swdoa", "none")
    ]
    assert [tuple(row) for row in rows[:1]] == [report.ROW_KEYS] and rows[0]["gap"] > 0 and rows[1]["gap"] is None
    cells = [line.split() for line in shown(rows).splitlines() if line.strip()][2:]
    assert cells[0] == ["50%", "floor", f"{rows[0]['bound_overhead']:.2%}"]
    gap = f"{100 * rows[0]['gap']:.2f}"
    assert cells[1][:3] == ["autoswap_swdoa", f"{rows[0]['overhead']:.2%}", gap] and cells[1][-1] == "yes"
    assert cells[2][0] == "none" and f"{program.peak_bytes / 2**20:,.0f} MiB" in " ".join(cells[2])
    assert cells[3][:3] == ["1%", "floor", "–"]
    assert f"{rows[2]['bound_bytes'] / 2**20:,.0f} MiB" in " ".join(cells[3])


def test_options_go_to_the_planners_that_have_them() -> None:
    options = {"mode": "swap", "calls": 77, "jobs": 1}
    annealing = report.make("annealing", **options)
    swarm = report.make("home", **options)
    assert (annealing.mode, annealing.calls) == ("swap", 77)
    assert (swarm.mode, swarm.calls, swarm.jobs) == ("swap", 77, 1)
    report.make("autoswap_doa", **options)  # has none of these options
    assert report.make("annealing", calls=None).calls == agents.make("annealing").calls
    assert "score" not in agents.options("autoswap_doa")  # this option defines the planner
    with pytest.raises(UsageError, match="planners: annealing: calls"):
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
    """Gives every kernel an algorithm of twice the time that avoids its workspace of 40 MiB."""
    return replace(
        program,
        kernels=tuple(replace(k, workspace=40 * 2**20, variants=((2 * k.duration_ns, 0),)) for k in program.kernels),
    )


def test_rows_of_the_three_workspaces(program: Program) -> None:
    program = with_workspaces(program)
    limit = int(0.75 * program.peak_bytes)
    rows = {}
    for workspace in (False, "least", True):
        row, plan = report.score("autoswap_swdoa", program, MACHINE, limit, 0, workspace=workspace)
        assert plan is not None and row["feasible"] and row["workspace"] is workspace
        rows[workspace] = report.with_bounds(row, evaluate.floor_under(program, MACHINE, limit, None, bool(workspace)))
        assert rows[workspace]["gap"] >= 0
        again = report.score_plan(plan, program, MACHINE, limit, 0, workspace=workspace)
        assert (again["workspace"], again["iteration_ns"]) == (workspace, row["iteration_ns"])
    assert rows[True]["iteration_ns"] < rows["least"]["iteration_ns"]
    assert rows[True]["iteration_ns"] <= rows[False]["iteration_ns"]
    assert rows["least"]["breakdown"]["compute_ns"] == 2 * program.ideal_ns
    # Below the limit of every plan with default workspaces, another algorithm fits.
    tight = floor(program, MACHINE, limit).least_bytes - 2**20
    assert not report.score("autoswap_swdoa", program, MACHINE, tight, 0)[0]["feasible"]
    found, _ = report.score("autoswap_swdoa", program, MACHINE, tight, 0, workspace=True)
    assert found["feasible"] and found["peak_bytes"] <= tight
    bound = evaluate.floor_under(program, MACHINE, tight, None, True)
    assert bound.least_bytes <= tight and report.with_bounds(found, bound)["gap"] >= 0


def test_words_expand_to_planners() -> None:
    names = report.planner_names(["all"])
    assert {"none", "home", "lp_round", "autoswap_bo", "geeps"} < set(names) and "dqn_paper" not in names
    assert set(evaluate.SLOW) <= set(names)
    with pytest.raises(UsageError, match="dqn_paper"):
        report.planner_names(["all", "dqn_paper"])
    names = report.planner_names(["none", "published", "lp_round", "tensile"])
    assert names == ["none", *report.heuristics(), "lp_round"]
    assert {"autoswap_doa", "tensile", "geeps"} < set(names)
    assert not {"home", "annealing", "dqn", "dqn_paper"} & set(names)


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


@pytest.mark.nightly
def test_warm_up_compiles_what_every_planner_needs() -> None:
    done = subprocess.run([sys.executable, "-c", WARM], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
