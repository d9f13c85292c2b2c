"""Tests GeePS: the pinned set and the buffer pool, computed by hand."""

from __future__ import annotations

import pytest

from agents.heuristics.geeps import trigger, unpinned
from simulator import Gap, Program, Swap
from tests.agents.heuristics.test_autoswap import MACHINE, straight
from tests.agents.planned import planned

# Six tensors, each written on the way in and read on the way out; tensor 2 has 20 bytes, the others 10.
# Loads 10 20 40 50 60 70 70 60 50 40 20 10. Tensor 5 has no gap.
STACK = straight([(i, 11 - i) for i in range(6)], [10, 10, 20, 10, 10, 10], [10] * 12, [0] * 12)


# Two tensors of 20 bytes.
PAIR = straight([(i, 11 - i) for i in range(6)], [10, 20, 20, 10, 10, 10], [10] * 12, [0] * 12)


@pytest.mark.parametrize(
    ("program", "limit", "swapped", "pool"),
    [
        # The largest layer is pinned first because that shrinks the pool. Nothing pinned: 10 (tensor 5) + 2 * 20. The
        # layer of most access is kernel 2; with tensor 2 pinned 30 + 2 * 10. Next kernel 0: with tensor 0 pinned
        # 40 + 2 * 10 = 60. Any third tensor would make it 70. 55 has no room for tensor 0, nor for any other.
        (STACK, 60, {1, 3, 4}, 20),
        (STACK, 55, {0, 1, 3, 4}, 20),
        # 49 cannot hold a pool of twice the largest layer: with nothing pinned, it is what tensor 5 leaves.
        (STACK, 49, {0, 1, 2, 3, 4}, 39),
        (STACK, 70, set(), 0),
        # Where nothing of the largest layer fits, the shortest gap is. Nothing pinned 10 + 2 * 20; with one of the two
        # 30 + 2 * 20; with one of 10 bytes 20 + 2 * 20 = 60: tensor 4 waits for 3 kernels, 3 for 5, 0 for 11.
        (PAIR, 60, {0, 1, 2, 3}, 40),
    ],
)
def test_what_is_not_pinned(program: Program, limit: int, swapped: set[int], pool: int) -> None:
    assert unpinned(program, program.gaps(1), limit) == (swapped, pool)


# On the way back kernels 7 to 11 fetch tensors 4 to 0. Kernel 11's fits a pool of 20 beside that of kernel 10, so it is
# issued when kernel 9 ends: one layer ahead. In 40 it fits beside those of kernels 10 and 9, not with 8's. Without room
# for two it waits for the kernel before; kernels that access nothing in the pool do not count.
@pytest.mark.parametrize(
    ("gap", "pool", "kernel"), [((0, 11), 20, 9), ((0, 11), 40, 8), ((0, 11), 10, 10), ((4, 7), 10, 4)]
)
def test_fetching_runs_as_far_ahead_as_the_pool_has_room(gap: tuple[int, int], pool: int, kernel: int) -> None:
    assert trigger(STACK, Gap(gap[0], *gap), {0, 1, 2, 3, 4}, pool) == kernel


def test_plan() -> None:
    # Pinned 0, 2 and 5; pool 20. Tensor 1 is fetched beside tensor 3 (kernel 8) but not tensor 4 (kernel 7).
    plan = planned("geeps", STACK, MACHINE, 60)
    assert plan.decisions == (Swap(1, 1, 10, prefetch=7), Swap(3, 3, 8, prefetch=3), Swap(4, 4, 7, prefetch=4))
