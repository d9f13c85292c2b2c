"""Tests AutoSwap against scores computed by hand."""

from __future__ import annotations

import pytest

import agents
from agents.heuristics.autoswap import AutoSwap, area_of_absence, duration_of_absence, peak_gaps, weighted_duration
from agents.planner import Candidates
from simulator import Gap, Kernel, Program, Swap, Tensor
from tests.programs import BYTE_PER_NS as MACHINE


def straight(gaps: list[tuple[int, int]], sizes: list[int], durations: list[int], workspaces: list[int]) -> Program:
    """Builds a program whose tensor i is written by kernel gaps[i][0] and read by kernel gaps[i][1]."""
    kernels = tuple(
        Kernel(
            f"k{k}", "other", "forward", tuple(i for i, g in enumerate(gaps) if g[1] == k),
            tuple(i for i, g in enumerate(gaps) if g[0] == k), duration, workspaces[k],
        )
        for k, duration in enumerate(durations)
    )  # fmt: skip
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
    chosen = AutoSwap(score, min_bytes=1).select(candidates, FOUR, MACHINE, 13)
    assert chosen is not None and chosen.tolist() == order
    plan = agents.make(f"autoswap_{score}", min_bytes=1).plan(FOUR, MACHINE, 13)
    assert plan.decisions == tuple(Swap(*candidates.gaps[i]) for i in order)
    assert (plan.planner, plan.limit, plan.machine) == (f"autoswap_{score}", 13, "byte per ns")


def test_candidates_are_large_and_open_at_the_peak() -> None:
    # Kernel 3 is the peak by its workspace. 0 spans it, 1 is too small, 2 is used at it, 3 ends before it.
    program = straight([(0, 5), (0, 5), (0, 3), (0, 2)], [4, 1, 4, 4], [1] * 6, [0, 0, 0, 50, 0, 0])
    assert peak_gaps(program, 2) == [Gap(0, 0, 5)]
