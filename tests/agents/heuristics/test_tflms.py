"""Tests TFLMS on the program of tests.tiny, its distances counted by hand."""

from __future__ import annotations

import pytest

import agents
from agents.heuristics.tflms import rewrite
from simulator import Gap, Swap, simulate
from tests.agents.planned import planned
from tests.tiny import A1, A2, LIMIT, MACHINE, PROGRAM


def test_n_tensors_count_from_the_input() -> None:
    # Loads 170 and 180 in kernels 3 and 4; a1 is absent in 2 to 5, a2 in 3 and 4, 40 bytes each.
    planner = agents.make("tflms", min_bytes=1)
    limits = (180, 179, 140, 139, 110)
    assert [len(planner.plan(PROGRAM, MACHINE, limit).decisions) for limit in limits] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("gap", "lower_bound", "trigger"),
    [
        # b2 (6) consumes a1; the backward pass starts with b4 (4).
        *((Gap(A1, 1, 6), bound, kernel) for bound, kernel in ((1, 5), (2, 4), (3, 4), (100, 4))),
        (
            Gap(A2, 1, 4),
            2,
            3,
        ),  # no backward kernel comes before b4: the swap-in waits for f4 (3), the last one before it
    ],
)
def test_the_control_dependency_is_a_backward_kernel_at_that_distance(gap: Gap, lower_bound: int, trigger: int) -> None:
    assert rewrite(PROGRAM, [gap], lower_bound).tolist() == [[0, *gap, trigger, -1]]


def test_lower_bound_is_tuned() -> None:
    # One swap does. Issued when b3 ends (bound 1), a1 moves 110-150 and b2 waits for all of it: 190 ns. Issued when b4
    # ends (bound 2), it moves 90-130: 170 ns, as in tests.tiny. Bound 4 is the same, so 2 it is.
    late = planned("tflms", PROGRAM, MACHINE, LIMIT, lower_bound=1)
    assert late.decisions == (Swap(A1, 1, 6, prefetch=5),)
    assert simulate(PROGRAM, late, MACHINE, LIMIT).iteration_ns == 190
    planner = agents.make("tflms", min_bytes=1)
    tuned = planner.plan(PROGRAM, MACHINE, LIMIT)
    assert tuned.decisions == (Swap(A1, 1, 6, prefetch=4),)
    assert simulate(PROGRAM, tuned, MACHINE, LIMIT).iteration_ns == 170
    assert planner.simulator_calls == 3 + 1  # bounds 1, 2, 4, and the last check
