"""Tests AutoSwap against scores computed by hand, and the gain of Bayesian optimization over the four scores."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

import agents
from agents.heuristics.autoswap import (
    BASIC,
    SCORES,
    AutoSwap,
    AutoSwapBO,
    area_of_absence,
    descending,
    duration_of_absence,
    peak_gaps,
    standardized_scores,
    submodular_weighted_duration,
    weighted_duration,
)
from agents.planner import Candidates
from simulator import Engine, Gap, Kernel, Program, Swap, Tensor, simulate
from tests.agents.planned import planned
from tests.programs import BYTE_PER_NS as MACHINE
from tests.strategies import machines, networks, programs, reachable_limits


def straight(gaps: list[tuple[int, int]], sizes: list[int], durations: list[int], workspaces: list[int]) -> Program:
    """Builds a program whose tensor i is written by kernel gaps[i][0] and read by kernel gaps[i][1]."""
    kernels = tuple(
        Kernel(
            f"k{k}",
            "other",
            "forward",
            tuple(i for i, g in enumerate(gaps) if g[1] == k),
            tuple(i for i, g in enumerate(gaps) if g[0] == k),
            duration,
            workspaces[k],
        )
        for k, duration in enumerate(durations)
    )
    return Program("straight", tuple(Tensor(f"t{i}", s) for i, s in enumerate(sizes)), kernels)


# Loads are 7 7 10 14 14 2 6 2, start times 0 8 12 18 24 25 26 34 38; the peak is kernel 3.
FOUR = straight([(2, 7), (1, 6), (0, 4), (1, 4)], [1, 1, 3, 3], [8, 4, 6, 6, 1, 1, 8, 4], [4, 0, 2, 6, 6, 0, 4, 1])


def test_scores_by_hand() -> None:
    candidates = Candidates(FOUR, peak_gaps(FOUR, 1))
    assert candidates.gaps == [Gap(0, 2, 7), Gap(1, 1, 6), Gap(2, 0, 4), Gap(3, 1, 4)]
    assert FOUR.live_bytes == (7, 7, 10, 14, 14, 2, 6, 2)
    # 34 - 18 - 2, 26 - 12 - 2, 24 - 8 - 6, 24 - 12 - 6
    assert duration_of_absence(candidates, FOUR, MACHINE).tolist() == [14, 12, 10, 6]
    assert area_of_absence(candidates, FOUR, MACHINE).tolist() == [14, 12, 30, 18]
    # 14*6 + 14*1 + 2*1 + 6*8; 10*6 + 14*6 + 14*1 + 2*1; 7*4 + 10*6 + 14*6; 10*6 + 14*6
    wdoa = weighted_duration(candidates, FOUR)
    assert wdoa.tolist() == [148, 160, 172, 144]


@pytest.mark.parametrize(
    ("score", "order"),
    [
        ("doa", [0]),  # 14; open at kernels 3 and 4, the only ones above 13
        ("aoa", [2, 3, 0]),  # 30, 18, 14; the first two leave kernel 4 at 14
        ("wdoa", [2, 1]),  # 172, 160
        ("swdoa", [2, 0]),  # 172; then 148 - 18 = 130 against 160 - 36 = 124 and 144 - 36 = 108
    ],
)
def test_each_score_selects_its_own_tensors(score: str, order: list[int]) -> None:
    candidates = Candidates(FOUR, peak_gaps(FOUR, 1))
    chosen = AutoSwap(score, min_bytes=1).select(candidates, Engine(FOUR, MACHINE, 13))
    assert chosen is not None and chosen.tolist() == order
    plan = planned(f"autoswap_{score}", FOUR, MACHINE, 13)
    assert plan.decisions == tuple(Swap(*candidates.gaps[i]) for i in order)
    assert (plan.planner, plan.limit, plan.machine) == (f"autoswap_{score}", 13, "byte per ns")


def test_negative_aoa_divides_by_the_size() -> None:
    # Both are absent for 10 ns at best; the transfers take 16 and 20: DOA -6 and -10.
    program = straight([(0, 2), (0, 2)], [8, 10], [1, 10, 1], [0, 1, 0])
    candidates = Candidates(program, peak_gaps(program, 1))
    assert duration_of_absence(candidates, program, MACHINE).tolist() == [-6, -10]
    assert area_of_absence(candidates, program, MACHINE).tolist() == [-0.75, -1.0]


def test_candidates_are_large_and_open_at_the_peak() -> None:
    # Kernel 3 is the peak by its workspace. 0 spans it, 1 is too small, 2 is used at it, 3 ends before it.
    program = straight([(0, 5), (0, 5), (0, 3), (0, 2)], [4, 1, 4, 4], [1] * 6, [0, 0, 0, 50, 0, 0])
    assert peak_gaps(program, 2) == [Gap(0, 0, 5)]


# 23 ns of kernels; loads are 10 11 12 11 11 10, so that a limit of 10 asks for 2 bytes at kernel 2. Together
# tensors 0 and 1 are just that, and their transfers take 2 ns each way in all.
PAIR = straight([(0, 5), (1, 4), (0, 5), (0, 5)], [1, 1, 5, 4], [9, 4, 2, 3, 3, 2], [0, 0, 1, 0, 0, 0])


def overhead_ns(planner: agents.Planner, limit: int) -> int:
    plan = planner.plan(PAIR, MACHINE, limit)
    return simulate(PAIR, plan, MACHINE, limit).iteration_ns - PAIR.ideal_ns


def test_swdoa_scores_by_hand() -> None:
    # WDOA is 148, 160, 172, 144; 2 is first. Without its 3 bytes in kernels 1 to 3 that is
    # 148 - 18 = 130 for 0, 160 - 36 = 124 for 1, 144 - 36 = 108 for 3; 0 is next. Its byte in kernels 3 to 6 is
    # open in 1's kernels 3 to 5 for 8 ns and in 3's kernel 3 for 6: 124 - 8 = 116 and 108 - 6 = 102. 1 is next: its
    # byte is open in 3's kernels 2 and 3 for 12 ns: 102 - 12 = 90.
    candidates = Candidates(FOUR, peak_gaps(FOUR, 1))
    order, scores = submodular_weighted_duration(candidates, FOUR)
    assert (order.tolist(), scores.tolist()) == ([2, 0, 1, 3], [172, 130, 116, 90])


def test_standardized_scores_by_hand() -> None:
    candidates = Candidates(FOUR, peak_gaps(FOUR, 1))
    scores = standardized_scores(candidates, FOUR, MACHINE)
    # DOA is 14, 12, 10, 6: mean 10.5, variance (12.25 + 2.25 + 0.25 + 20.25) / 4 = 8.75.
    assert scores[:, BASIC.index("doa")] == pytest.approx(np.array([3.5, 1.5, -0.5, -4.5]) / 8.75**0.5)
    # SWDOA is 130, 116, 172, 90: mean 127, variance (9 + 121 + 2025 + 1369) / 4 = 881.
    assert scores[:, BASIC.index("swdoa")] == pytest.approx(np.array([3, -11, 45, -37]) / 881**0.5)
    # a = 1 is AOA's selection. -DOA prefers 3 (6 ns), then 2; both together leave kernel 4 at
    # 14, so that 1 (or 0) must follow.
    assert candidates.prefix(descending(scores @ [1, 0, 0, 0]), 13).tolist() == [2, 3, 0]
    assert candidates.prefix(descending(scores @ [0, -1, 0, 0]), 13).tolist() == [3, 2, 1]


@pytest.mark.parametrize("seed", range(3))
def test_bayesian_optimization_beats_every_single_score(seed: int) -> None:
    four = {score: overhead_ns(agents.make(f"autoswap_{score}", min_bytes=1), 10) for score in SCORES}
    # AOA takes tensor 3 alone (4 bytes): kernel 1 waits for it from 9 to 13, and it cannot return before kernel 4
    # has ended, at 25, so that kernel 5 waits 4 ns more. The others take 0 or 2 and then a large one.
    assert four == {"doa": 9, "aoa": 8, "wdoa": 11, "swdoa": 11}
    # Tensors 0 and 1: kernel 1 waits 1 ns for 0, kernel 2 waits 1 ns for 1, kernel 5 waits 1 ns for 0.
    assert overhead_ns(agents.make("autoswap_bo", min_bytes=1, seed=seed), 10) == 3


@given(st.data())
def test_never_worse_than_the_best_score(data: st.DataObject) -> None:
    program = data.draw(programs() | networks())
    machine = data.draw(machines())
    limit = data.draw(reachable_limits(program))
    try:
        plan = AutoSwapBO(evaluations=6, random=1, min_bytes=1).plan(program, machine, limit)
    except agents.Infeasible:
        with pytest.raises(agents.Infeasible):
            planned("autoswap_doa", program, machine, limit)
        return
    bo_ns = simulate(program, plan, machine, limit).iteration_ns
    for score in SCORES:
        basic = planned(f"autoswap_{score}", program, machine, limit)
        assert bo_ns <= simulate(program, basic, machine, limit).iteration_ns
