"""Tests ``experiments.plan``: uncertainty of kernel times, and its effect on the recommended plan."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from agents.search.retimed import Retimed, TimesError
from experiments.common.cli import UsageError
from experiments.plan import times
from experiments.plan.answer import Best, Times
from simulator import Machine, Plan, Program, Recompute, Swap, simulate
from tests.experiments.conftest import Run, chain
from tests.tiny import just_hidden

pytestmark = pytest.mark.usefixtures("counted")
H100 = Machine.load("h100")
ERROR = TimesError(0.3, 0.25)


def read(machine: Machine = H100, captured: bool = True, **keys: Any) -> Times:
    return times.read(OmegaConf.create({"step_ms": None, "times": "modeled", **keys}), machine, captured)


def test_what_is_known_of_the_times() -> None:
    model = H100.kernel_times
    assert model is not None
    found = read()
    assert found.error == TimesError(model.error, model.step_error) and found.step_ns is None
    assert f"{model.error:.0%}" in found.note and f"{model.step_error:.0%}" in found.note
    found = read(step_ms=70.7)
    assert found.step_ns == 70_700_000 and found.error == TimesError(model.error, 0.0) and "70.7 ms" in found.note
    found = read(Machine.load("gtx1080ti"))
    assert found.error is None and "gtx1080ti" in found.note
    assert read(captured=False, times="measured").error is None


def test_a_measured_step() -> None:
    known = read(step_ms=80)
    program = times.rescaled(chain(), known)
    assert program.ideal_ns == 80_000_000 and times.rescaled(program, known) == program
    assert times.rescaled(program, read()) is program
    with pytest.raises(UsageError, match="step_ms"):
        times.rescaled(chain().with_durations([0] * len(chain().kernels)), known)


def best(family: str, plan: Plan, program: Program, machine: Machine, limit: int) -> Best:
    return Best(family, None, plan, simulate(program, plan, machine, limit), 0.0)


def test_the_plan_that_loses_little_is_recommended() -> None:
    task = just_hidden()
    program = task[0]
    hidden, sure = (best("", Plan.of(program, (d,)), *task) for d in (Swap(1, 1, 5), Recompute(2, 1, 5)))
    assert hidden.overhead == 0 < sure.overhead < times.ROOM
    others = Retimed(*task, ERROR, draws=1)
    assert times.recommended([hidden, sure], None) is hidden
    assert times.recommended([hidden, sure], others) is sure
    nothing = Best("none", None, None, None, 0.0)
    assert times.recommended([nothing, hidden], others) is hidden
    assert times.recommended([nothing], others) is None and times.recommended([], None) is None


def test_an_expensive_plan_is_not_recommended_for_possible_savings() -> None:
    program, machine, limit = just_hidden()
    slow = replace(program.kernels[1], duration_ns=6 * 10**6)
    program = replace(program, kernels=(program.kernels[0], slow, *program.kernels[2:]))
    task = (program, machine, limit)
    hidden, dear = (best("", Plan.of(program, (d,)), *task) for d in (Swap(1, 1, 5), Recompute(2, 1, 5)))
    assert dear.overhead > times.ROOM
    others = Retimed(*task, ERROR, draws=1)
    assert dear.plan is not None and hidden.plan is not None
    assert others.expected(dear.plan) < others.expected(hidden.plan)
    assert times.recommended([hidden, dear], others) is hidden


# ---------------------------------------------------------------------------------------- as a user


def test_a_plan_has_a_range(run: Run, program_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    base = (f"program={program_file}", "memory=0.7", "seconds=2", "machine=h100")
    run("plan", *base, f"out={out}").ok()
    summary = json.loads((out / "summary.json").read_text())
    program = Program.load(program_file)
    plan = Plan.load(out / "plan.json")
    model = H100.kernel_times
    assert model is not None
    error = TimesError(model.error, model.step_error)
    assert summary["times"]["error"] == {"kernel": error.kernel, "step": error.step}
    spread = Retimed(program, H100, plan.limit, error).spread(plan)
    assert summary["overheads"] == pytest.approx(vars(spread))
    assert "for faster kernels" in [one["family"] for one in summary["families"]]
    assert f"{spread.fast:+.2%}" in (out / "report.html").read_text()

    run("plan", *base, "step_ms=20", f"out={tmp_path / 'scaled'}").ok()
    summary = json.loads((tmp_path / "scaled" / "summary.json").read_text())
    assert summary["times"]["error"]["step"] == 0
    assert summary["overheads"]["fast"] == summary["overheads"]["slow"] == summary["overheads"]["said"]
    assert Program.load(tmp_path / "scaled" / "program.json").ideal_ns == 20_000_000
