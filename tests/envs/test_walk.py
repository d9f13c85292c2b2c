"""Tests episodes step by step: position, valid actions, plan and reward."""

from __future__ import annotations

import numpy as np
import pytest

from envs.task import DEAD_END_REWARD, Task
from simulator import Plan, Program, Swap, Tensor
from simulator.compiled.engine import rows_of
from simulator.modes import Choice
from tests.oracle.walk import Walk
from tests.programs import straight
from tests.tiny import A1, A2, LIMIT, MACHINE, PROGRAM, W


def walk_of(program: Program = PROGRAM, limit: int = LIMIT, mode: str = "swap", machine=MACHINE) -> Walk:
    return Walk(Task(program, machine, limit, min_bytes=1, mode=mode))


def node(walk: Walk, kind: int, tensor: int = 0, before: int | None = None) -> int:
    """Returns the node of an action on a tensor (in the gap that ends at ``before``)."""
    if kind == Choice.RESIDENT:
        return 0
    graph = walk.task.graph
    (index,) = [
        n
        for n in np.flatnonzero(graph.action_kind == kind)
        if (gap := graph.gaps[graph.action_gap[n]]).tensor == tensor and before in (None, gap.before)
    ]
    return int(index)


def valid_actions(walk: Walk) -> set[tuple[int, ...]]:
    """Returns the valid actions as (kind, tensor), or (RESIDENT,)."""
    graph = walk.task.graph
    return {
        (int(graph.action_kind[n]), graph.gaps[graph.action_gap[n]].tensor) if n else (Choice.RESIDENT,)
        for n in np.flatnonzero(walk.mask())
    }


def do_nothing(walk: Walk) -> int:
    """Takes "do nothing" and returns the position."""
    walk.step(0)
    return walk.position


# ------------------------------------------------------------------------------- the program of tests/tiny.py


def test_doing_nothing_moves_to_the_next_gap_or_blocked_kernel() -> None:
    """The gaps of w, a1 and a2 open when kernels 0, 1 and 2 have ended. Kernel 3 needs 170 bytes of 150."""
    walk = walk_of()
    assert (walk.position, walk.done, walk.overhead, valid_actions(walk)) == (0, False, 0.0, {(Choice.RESIDENT,)})
    assert do_nothing(walk) == 1 and valid_actions(walk) == {(Choice.RESIDENT,), (Choice.SWAPPED, W)}
    assert do_nothing(walk) == 2 and valid_actions(walk) == {
        (Choice.RESIDENT,),
        (Choice.SWAPPED, W),
        (Choice.SWAPPED, A1),
    }
    assert do_nothing(walk) == 3 and valid_actions(walk) == {
        (Choice.SWAPPED, W),
        (Choice.SWAPPED, A1),
        (Choice.SWAPPED, A2),
    }
    with pytest.raises(ValueError, match="node 0 is not a valid action now"):
        walk.step(0)
    # With a2 swapped out, kernels 3 and 4 need 130 and 140 bytes. It is copied out [30, 70) and f4 waits for 40 ns; it
    # is copied in after b4, [100, 140), and b3 waits as long: 80 ns.
    step = walk.step(node(walk, Choice.SWAPPED, A2))
    assert step == (pytest.approx(-80 / 120), True, False)
    assert (walk.position, walk.overhead) == (3, pytest.approx(80 / 120))
    assert walk.plan("me") == Plan((Swap(A2, 2, 5),), PROGRAM.fingerprint, "me", LIMIT, "tiny")
    assert valid_actions(walk) == {(Choice.RESIDENT,)}
    with pytest.raises(ValueError, match="not a valid action"):  # the episode has ended
        walk.step(0)


def test_a_dead_end() -> None:
    """Under 79 bytes kernel 1 needs 80 even with w swapped out, and no other tensor can be evicted."""
    walk = walk_of(limit=79)
    assert do_nothing(walk) == 1 and valid_actions(walk) == {(Choice.SWAPPED, W)}
    assert walk.step(node(walk, Choice.SWAPPED, W)) == (DEAD_END_REWARD, True, True) == (-10.0, True, True)
    assert walk.done and walk.dead_end and valid_actions(walk) == {(Choice.RESIDENT,)}
    walk.reset()
    assert (walk.position, walk.count, walk.done, walk.dead_end, len(walk.rows)) == (0, 0, False, False, 0)
    assert walk.taken.tolist() == [-1, -1, -1] and walk.overhead == 0 and valid_actions(walk) == {(Choice.RESIDENT,)}


# ------------------------------------------------------------------------------------------------ over the boundary

# v (20 bytes) is used by k1 only, w (30) by k2, and x (10) waits from k0 to k4; every kernel takes 10 ns.
V, U, X = range(3)
RING = straight(
    [Tensor("v", 20, "parameter", True), Tensor("w", 30, "parameter", True), Tensor("x", 10)],
    ((), (X,), 10),
    ((V,), (V,), 10),
    ((U,), (U,), 10),
    ((), (), 10, 50),
    ((X,), (), 10, 40),
)


def test_gaps_over_the_boundary_are_open_at_first_and_do_not_hold() -> None:
    """Wrapping gaps are open at position 0, and offloading in them does not move the agent.

    Loads are 60, 60, 60, 110 and 100. The gaps of v (from 20) and w (from 30) belong to the previous iteration: v is
    copied [-30, -10), w [-10, 20). Then the loads are 10, 30, 40, 60 and 50.
    """
    assert RING.live_bytes == (60, 60, 60, 110, 100)
    walk = walk_of(RING, 50)
    assert walk.position == 0 and valid_actions(walk) == {(Choice.SWAPPED, V), (Choice.SWAPPED, U)}
    # Above 50 bytes are 10 in each of k0, k1 and k2, 60 in k3 and 50 in k4: 1400 byte-ns. The gap of v covers all but
    # k1, that of w all but k2, that of x k1 to k3.
    assert walk.relief() == pytest.approx([130 / 140, 130 / 140, 80 / 140])
    walk.step(node(walk, Choice.SWAPPED, V))
    assert (walk.position, walk.free_ns) == (0, -10)
    walk.step(node(walk, Choice.SWAPPED, U))
    assert (walk.position, walk.free_ns) == (0, 20)
    assert walk.need.tolist() == [10, 30, 40, 60, 50] and valid_actions(walk) == {(Choice.RESIDENT,)}
    # x's gap opens when k0 has ended; the engine is free at 20.
    assert do_nothing(walk) == 1 and valid_actions(walk) == {(Choice.RESIDENT,), (Choice.SWAPPED, X)}
    walk.step(node(walk, Choice.SWAPPED, X))
    assert walk.done and walk.plan().decisions == (Swap(V, 1, 1), Swap(U, 2, 2), Swap(X, 0, 4))
    assert walk.rows.tolist() == rows_of(walk.plan().decisions).tolist()
    # In the other order: w [-20, 10), then v, whose gap opened at -30.
    walk.reset()
    walk.step(node(walk, Choice.SWAPPED, U))
    assert walk.free_ns == 10
    walk.step(node(walk, Choice.SWAPPED, V))
    assert walk.free_ns == 30
