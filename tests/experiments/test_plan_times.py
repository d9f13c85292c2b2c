"""`experiments.plan`: how sure the times are, which plan is recommended for that, and what is said."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from agents.search.other_times import OtherTimes, Spread, TimesError
from experiments.common.cli import UsageError
from experiments.plan import summary as words, times
from experiments.plan.summary import Best
from simulator import Machine, Plan, Program, Recompute, Swap, simulate
from tests.agents.search.test_other_times import ERROR, just_hidden
from tests.experiments.common.test_cli import refused
from tests.experiments.conftest import Run, chain

H100 = Machine.load("h100")


def read(machine: Machine = H100, captured: bool = True, **keys: Any) -> times.Times:
    return times.read(OmegaConf.create({"step_ms": None, "times": "modelled", **keys}), machine, captured)


def test_what_is_known_of_the_times() -> None:
    model = H100.kernel_times
    assert model is not None
    found = read()
    assert found.error == TimesError(model.error, model.step_error) and found.step_ns is None
    assert f"within about {model.error:.0%}, their sum within {model.step_error:.0%}" in found.said
    found = read(step_ms=70.7)
    assert found.step_ns == 70_700_000 and found.error == TimesError(model.error, 0.0)
    assert "scaled to the step of 70.7 ms" in found.said and "sum within" not in found.said
    found = read(Machine.load("gtx1080ti"))
    assert found.error is None and "not known, as no kernel was measured on gtx1080ti" in found.said
    found = read(captured=False, times="measured")
    assert found.error is None and "as measured" in found.said


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"times": "true"}, "times: expected modelled or measured, got 'true'"),
        ({"times": "measured"}, "times: those of a capture are modelled"),
        ({"step_ms": 0}, "step_ms: expected a number above 0, got 0"),
        ({"step_ms": "fast"}, "step_ms: expected a number above 0, got 'fast'"),
        ({"step_ms": 1e-9}, "step_ms: expected at least 0.000001"),
    ],
)
def test_wrong_keys(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(**keys)


def test_a_measured_step() -> None:
    known = read(step_ms=80)
    assert times.with_step({"name": "mlp"}, known) == {"name": "mlp", "iteration_ms": 80.0}
    assert times.with_step({"name": "mlp"}, read()) == {"name": "mlp"} and times.with_step(None, known) is None
    program = times.lasting(chain(), known)
    assert program.ideal_ns == 80_000_000 and times.lasting(program, known) == program
    assert times.lasting(program, read()) is program
    timeless = chain().with_durations([0] * len(chain().kernels))
    with pytest.raises(UsageError, match="step_ms: iteration_ns: cannot scale 0 ns"):
        times.lasting(timeless, known)


def best(family: str, plan: Plan, program: Program, machine: Machine, limit: int) -> Best:
    return Best(family, None, plan, simulate(program, plan, machine, limit), 0.0)


def test_the_plan_that_loses_little_is_recommended() -> None:
    task = just_hidden()
    program = task[0]
    hidden, sure = (best("", Plan.of(program, (d,)), *task) for d in (Swap(1, 1, 5), Recompute(2, 1, 5)))
    assert words.overhead(hidden) == 0 < words.overhead(sure) < times.ROOM
    others = OtherTimes(*task, ERROR, draws=1)
    assert times.recommended([hidden, sure], None) is hidden
    assert times.recommended([hidden, sure], others) is sure
    nothing = Best("none", None, None, None, 0.0)
    assert times.recommended([nothing, hidden], others) is hidden
    assert times.recommended([nothing], others) is None and times.recommended([], None) is None


def test_a_dear_plan_is_not_recommended_for_what_it_might_save() -> None:
    program, machine, limit = just_hidden()
    slow = replace(program.kernels[1], duration_ns=6 * 10**6)
    program = replace(program, kernels=(program.kernels[0], slow, *program.kernels[2:]))
    task = (program, machine, limit)
    hidden, dear = (best("", Plan.of(program, (d,)), *task) for d in (Swap(1, 1, 5), Recompute(2, 1, 5)))
    assert words.overhead(dear) > times.ROOM
    others = OtherTimes(*task, ERROR, draws=1)
    assert dear.plan is not None and hidden.plan is not None
    assert others.expected(dear.plan) < others.expected(hidden.plan)
    assert times.recommended([hidden, dear], others) is hidden


def test_of_equal_plans_the_shorter() -> None:
    program = chain()
    task = (program, H100, program.peak_bytes)
    short, long = (best("", Plan.of(program, tuple(Swap(*g) for g in program.gaps(2**20)[:n])), *task) for n in (1, 2))
    long = replace(long, timeline=short.timeline)
    assert times.recommended([long, short], None) is short


def test_a_range_in_words() -> None:
    spread = Spread(0.0148, 0.031, 0.0148, 0.012, 0.029)
    assert times.ranged(spread) == " (+1.20% to +3.10% within the error of the times)" and times.ranged(None) == ""
    text = times.said(spread, TimesError(0.14, 0.1))
    assert text.startswith("Under other times: +3.10% where all kernels are 10% faster, +1.48% where they are slower")
    assert text.endswith("+1.20% to +2.90% where single kernels are others (5th to 95th percentile).")
    assert "faster" not in times.said(spread, TimesError(0.14, 0.0))
    assert "it cannot run" in times.ranged(replace(spread, fast=float("inf")))


# ---------------------------------------------------------------------------------------- as a user


def test_a_plan_has_a_range(run: Run, program_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    base = (f"program={program_file}", "memory=0.7", "seconds=2")
    done = run("plan", *base, "machine=h100", f"out={out}")
    assert done.returncode == 0, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    program, plan, model = Program.load(program_file), Plan.load(out / "plan.json"), H100.kernel_times
    error = TimesError(model.error, model.step_error) if model else None
    assert error is not None and summary["times"]["error"] == {"kernel": error.kernel, "step": error.step}
    spread = OtherTimes(program, H100, plan.limit, error).spread(plan)
    assert summary["overheads"] == pytest.approx(vars(spread))
    assert "for faster kernels" in [one["family"] for one in summary["families"]]
    assert summary["verdict"].count("within the error of the times") == 1
    page = (out / "report.html").read_text()
    assert "How sure the times are" in page and "Under other times" in page and "their sum within" in done.stdout

    done = run("plan", *base, "machine=h100", "step_ms=20", f"out={tmp_path / 'scaled'}")
    summary = json.loads((tmp_path / "scaled" / "summary.json").read_text())
    assert summary["times"]["error"]["step"] == 0 and "scaled to the step of 20.0 ms" in done.stdout
    assert summary["overheads"]["fast"] == summary["overheads"]["slow"] == summary["overheads"]["said"]
    assert Program.load(tmp_path / "scaled" / "program.json").ideal_ns == 20_000_000


def test_a_capture_is_scaled_to_a_measured_step(run: Run, tmp_path: Path) -> None:
    words = ("workload=mlp", "machine=h100", "memory=0.95", "seconds=2", "largest=false")
    done = run("plan", *words, "step_ms=5", f"out={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    assert Program.load(tmp_path / "out" / "program.json").ideal_ns == 5_000_000
    refused(run("plan", *words, "times=measured"), "times: those of a capture are modelled")
