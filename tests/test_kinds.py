"""Tests that components refuse an unknown decision kind by its name."""

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest

from agents.floor import floor
from executor.replay.streams import cycle
from executor.training.issue_order import order
from experiments.common.report import mode_mismatch
from experiments.measure.speed import simpy_model
from simulator import Job, Plan, PlanError, Rerun, decisions, modes, simulate, simulate_jobs
from simulator.compiled.encoding import RERUN, choice_of, decisions_of, rows_of
from simulator.decisions import Evict
from simulator.files import FormatError
from simulator.report import report
from simulator.schedule import Step, lower
from tests.oracle.steps import Steps
from tests.tiny import MACHINE, PROGRAM

LIMIT = 2 * PROGRAM.peak_bytes
ALONE = simulate(PROGRAM, Plan(), MACHINE, LIMIT)


@dataclass(frozen=True, slots=True)
class Squeeze(Evict):
    """A decision kind that only this test defines."""

    bits: int = 8

    kind: ClassVar[str] = "squeeze"


PLAN = Plan((Squeeze(1, 1, 6),))
SCHEDULE = replace(lower(PROGRAM, Plan()), plan=PLAN)  # as if lowering supported it
REFUSES = {
    "the compiled simulator": lambda: rows_of(PLAN.decisions),
    "a job among several": lambda: simulate_jobs([Job("a", PROGRAM, PLAN, iterations=1)], MACHINE, LIMIT),
    "training": lambda: order(SCHEDULE, ALONE),
    "a replay": lambda: cycle(PROGRAM, PLAN, MACHINE, LIMIT),
    "SimPy": lambda: simpy_model.simulate(SCHEDULE, MACHINE, LIMIT),
    "the validator": lambda: Steps(ALONE.spans, PROGRAM, PLAN),
    "the report": lambda: report(PROGRAM, MACHINE, LIMIT, 0, ALONE, ALONE, PLAN),
}


def test_a_new_kind_is_checked_and_serialized():
    PLAN.check(PROGRAM)
    assert PLAN.to_dict()["decisions"] == [{"kind": "squeeze", "tensor": 1, "after": 1, "before": 6}]
    with pytest.raises(PlanError, match="kernel 5 does not use tensor 1"):
        Plan((Squeeze(1, 1, 5),)).check(PROGRAM)
    with pytest.raises(PlanError, match="tensor 1 is already evicted before kernel 6 by decisions"):
        Plan((*PLAN.decisions, Squeeze(1, 2, 6))).check(PROGRAM)


@pytest.mark.parametrize("who", REFUSES)
def test_unknown_kinds_are_refused(who):
    with pytest.raises(PlanError, match=r"does not support squeeze decisions(;|$)"):
        REFUSES[who]()


def test_unhandled_kinds_are_named():
    with pytest.raises(AssertionError, match=r"Squeeze\(tensor=1"):
        lower(PROGRAM, PLAN)
    step = lower(PROGRAM, Plan()).steps[0]._replace(kind="squeeze")
    for name in ("is_recomputation", "kernel"):
        with pytest.raises(AssertionError, match="squeeze"):
            getattr(step, name)
    assert isinstance(step, Step) and "squeeze" in mode_mismatch(PLAN, "swap")
    with pytest.raises(FormatError, match="expected 'swap', 'recompute' or 'rerun', got 'squeeze'"):
        Plan.from_dict(Plan((Squeeze(1, 1, 6),)).to_dict())


def test_the_floor_refuses_unknown_kinds(monkeypatch):
    monkeypatch.setitem(modes.KINDS_OF, "joint", (*modes.KINDS_OF["joint"], "squeeze"))
    with pytest.raises(ValueError, match=r"the floor does not cover .squeeze. decisions"):
        floor(PROGRAM, MACHINE, LIMIT)
    assert floor(PROGRAM, MACHINE, LIMIT, "swap").feasible


def test_rows_of_no_kind():
    codes = [code for kind in decisions.KINDS for code in kind.codes]
    assert len(set(codes)) == len(codes)
    with pytest.raises(ValueError, match=r"expected kinds of .*, got 9$"):
        decisions_of(np.array([[9, 1, 1, 6, -1, -1]]))
    with pytest.raises(ValueError, match=rf"expected kind .*, got {RERUN}$"):
        choice_of(Rerun(0, 1).row())
