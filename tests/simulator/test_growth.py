"""Tests that near-linear implementations equal their quadratic definitions."""

from __future__ import annotations

import copy
from random import Random

import numpy as np
import pytest

from agents.heuristics.autoswap import submodular_weighted_duration, weighted_duration
from agents.planner import Candidates
from simulator import Program
from simulator.compiled.engine import rerun_ns
from simulator.decisions import can_recompute, cannot_recompute
from simulator.residency import recompute_ns
from simulator.schedule import lower
from simulator.timeline import Span
from tests.oracle.steps import Steps
from tests.random_cases import plan_of, program_of

PROGRAMS = [program_of(Random(seed), 40) for seed in range(25)]


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_what_can_run_again(program: Program) -> None:
    gaps = [g for g in program.gaps() if not program.tensors[g.tensor].persistent]
    possible = []
    for g in gaps:
        assert (cannot_recompute(program, *g) is None) == can_recompute(program, g.tensor, g.before)
        possible += [g] if can_recompute(program, g.tensor, g.before) else []
    assert rerun_ns(program, possible).tolist() == [recompute_ns(program, g) for g in possible]


@pytest.mark.parametrize("program", PROGRAMS[:10], ids=range(10))
def test_selection_by_areas(program: Program) -> None:
    candidates = Candidates(program, program.gaps())
    now = copy.copy(candidates)
    left = np.ones(len(candidates), bool)
    order = []
    while left.any():  # recomputes the load and all scores after each selection
        scores = np.where(left, weighted_duration(now, program), -np.inf)
        order.append((best := int(scores.argmax()), float(scores[best])))
        left[best] = False
        now.live_bytes = now.live_bytes - candidates.nbytes[best] * candidates.absent[best]
    selected, values = submodular_weighted_duration(candidates, program)
    assert list(zip(selected.tolist(), values.tolist(), strict=True)) == order
    for limit in range(int(candidates.least_bytes), program.peak_bytes + 1, 50):
        load = candidates.live_bytes.copy()
        few = []
        for i, _ in order:
            if load.max() <= limit:
                break
            load -= candidates.nbytes[i] * candidates.absent[i]
            few.append(i)
        assert candidates.prefix(selected, limit).tolist() == few
        assert (candidates.residency(np.array(few, np.int64)) == load).all()


def test_bytes_on_the_host() -> None:
    """A copy counts from its issue until the swap-in ends, or until the next gap that reuses the copy."""
    for seed, program in enumerate(PROGRAMS):
        plan = plan_of(Random(seed), program, reruns=False)
        schedule = lower(program, plan)
        spans = [Span(0, 0, "compute", step.kind, step.kernel) for step in schedule.steps]
        assert Steps(spans * 2, program, plan).planned_host_bytes() == list(schedule.on_host), f"seed {seed}"


def test_a_program_is_not_copied() -> None:
    assert copy.deepcopy({"program": PROGRAMS[0]})["program"] is PROGRAMS[0]
