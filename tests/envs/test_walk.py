"""Tests episodes step by step: position, valid actions, plan and reward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from envs.graph import NOTHING, OFFLOAD, REMOVE
from envs.task import DEAD_END_REWARD, Task
from simulator import Plan, Program, Recompute, Swap, Tensor
from simulator.compiled.engine import rows_of
from tests.oracle.walk import Walk
from tests.programs import straight
from tests.tiny import A1, A2, LIMIT, MACHINE, PROGRAM, W


def walk_of(program: Program = PROGRAM, limit: int = LIMIT, mode: str = "swap", machine=MACHINE) -> Walk:
    return Walk(Task(program, machine, limit, min_bytes=1, mode=mode))


def node(walk: Walk, kind: int, tensor: int = 0, before: int | None = None) -> int:
    """Returns the node of an action on a tensor (in the gap that ends at ``before``)."""
    if kind == NOTHING:
        return 0
    graph = walk.task.graph
    (found,) = [
        n for n in np.flatnonzero(graph.action_kind == kind)
        if (gap := graph.gaps[graph.action_gap[n]]).tensor == tensor and before in (None, gap.before)
    ]  # fmt: skip
    return int(found)


def allowed(walk: Walk) -> set[tuple[int, ...]]:
    """Returns the valid actions as (kind, tensor), or (NOTHING,)."""
    graph = walk.task.graph
    return {
        (int(graph.action_kind[n]), graph.gaps[graph.action_gap[n]].tensor) if n else (NOTHING,)
        for n in np.flatnonzero(walk.mask())
    }


def nothing(walk: Walk) -> int:
    """Takes "do nothing" and returns the position."""
    walk.step(0)
    return walk.position


# ------------------------------------------------------------------------------- the program of tests/tiny.py


def test_doing_nothing_moves_to_the_next_gap_or_blocked_kernel() -> None:
    """The gaps of w, a1 and a2 open when kernels 0, 1 and 2 have ended. Kernel 3 needs 170 bytes of 150."""
    walk = walk_of()
    assert (walk.position, walk.done, walk.overhead, allowed(walk)) == (0, False, 0.0, {(NOTHING,)})
    assert nothing(walk) == 1 and allowed(walk) == {(NOTHING,), (OFFLOAD, W)}
    assert nothing(walk) == 2 and allowed(walk) == {(NOTHING,), (OFFLOAD, W), (OFFLOAD, A1)}
    assert nothing(walk) == 3 and allowed(walk) == {(OFFLOAD, W), (OFFLOAD, A1), (OFFLOAD, A2)}
    with pytest.raises(ValueError, match="node 0 is not a valid action now"):
        walk.step(0)
    # With a2 swapped out, kernels 3 and 4 need 130 and 140 bytes. It is copied out [30, 70) and f4 waits for 40 ns; it
    # is copied in after b4, [100, 140), and b3 waits as long: 80 ns.
    step = walk.step(node(walk, OFFLOAD, A2))
    assert step == (pytest.approx(-80 / 120), True, False)
    assert (walk.position, walk.overhead) == (3, pytest.approx(80 / 120))
    assert walk.plan("me") == Plan((Swap(A2, 2, 5),), PROGRAM.fingerprint, "me", LIMIT, "tiny")
    assert allowed(walk) == {(NOTHING,)}
    with pytest.raises(ValueError, match="not a valid action"):  # the episode has ended
        walk.step(0)


def test_an_offload_holds_until_its_transfer_ends() -> None:
    """An offload moves the agent to the end of its transfer.

    w is copied [10, 20), so the agent is at kernel 2, which begins at 20; a1 [20, 60), so it is at the kernel that
    cannot start, 3. With both swapped out the loads are 120 and 130, and f4 waits until 60 as with a1 alone.
    """
    walk = walk_of()
    assert nothing(walk) == 1
    assert walk.step(node(walk, OFFLOAD, W)) == (0.0, False, False)
    assert walk.position == 2 and allowed(walk) == {(NOTHING,), (OFFLOAD, A1)}  # w is already swapped out
    assert walk.taken.tolist() == [OFFLOAD, -1, -1]
    step = walk.step(node(walk, OFFLOAD, A1))
    assert step == (pytest.approx(-50 / 120), True, False) and walk.position == 3
    assert walk.plan().decisions == (Swap(W, 0, 7), Swap(A1, 1, 6))


def test_an_offload_that_is_not_enough_keeps_the_agent_where_it_waits() -> None:
    """An offload that frees too little leaves the agent at its position.

    w frees 10 of the 20 bytes that kernel 3 lacks; a1, copied after it, the rest. The engine was idle: w is copied when
    its gap opened.
    """
    walk = walk_of()
    for _ in range(3):
        nothing(walk)
    step = walk.step(node(walk, OFFLOAD, W))
    # Enforced before kernel 3 only, the limit costs nothing yet.
    assert step == (0.0, False, False) and walk.position == 3
    assert allowed(walk) == {(OFFLOAD, A1), (OFFLOAD, A2)}
    assert walk.step(node(walk, OFFLOAD, A1)).terminated
    assert walk.plan().decisions == (Swap(W, 0, 7), Swap(A1, 2, 6))


def test_a_removal_moves_the_agent_like_doing_nothing() -> None:
    """a1 is dropped when its gap opens; then every kernel fits, and recomputing f1 takes 10 ns."""
    walk = walk_of(mode="joint")
    assert (nothing(walk), nothing(walk)) == (1, 2)
    assert allowed(walk) == {(NOTHING,), (OFFLOAD, W), (OFFLOAD, A1), (REMOVE, A1)}
    assert walk.step(node(walk, REMOVE, A1)) == (pytest.approx(-10 / 120), True, False)
    assert walk.plan().decisions == (Recompute(A1, 1, 6),) and walk.position == 3
    assert walk.taken.tolist() == [-1, REMOVE, -1]


def test_a_dead_end() -> None:
    """Under 79 bytes kernel 1 needs 80 even with w swapped out, and no other tensor can be evicted."""
    walk = walk_of(limit=79)
    assert nothing(walk) == 1 and allowed(walk) == {(OFFLOAD, W)}
    assert walk.step(node(walk, OFFLOAD, W)) == (DEAD_END_REWARD, True, True) == (-10.0, True, True)
    assert walk.done and walk.dead_end and allowed(walk) == {(NOTHING,)}
    walk.reset()
    assert (walk.position, walk.count, walk.done, walk.dead_end, len(walk.rows)) == (0, 0, False, False, 0)
    assert walk.taken.tolist() == [-1, -1, -1] and walk.overhead == 0 and allowed(walk) == {(NOTHING,)}


def test_host_memory_limits_offloads() -> None:
    """a1 takes 40 of 50 host bytes: a2 no longer fits, w does; a tensor uses host memory only once."""
    walk = walk_of(limit=100, machine=replace(MACHINE, host_bytes=50))
    assert (nothing(walk), nothing(walk)) == (1, 2)
    walk.step(node(walk, OFFLOAD, A1))
    assert walk.position == 2 and walk.host_left == 10 and allowed(walk) == {(NOTHING,), (OFFLOAD, W)}
    walk.step(node(walk, OFFLOAD, W))
    assert walk.position == 3 and walk.host_left == 0 and walk.dead_end  # a2 would have been enough
    # t is swapped out twice, with a workspace in each of its gaps.
    program = straight([Tensor("t", 40)], ((), (0,), 10), ((), (), 10, 40), ((0,), (), 10), ((), (), 10, 40),
                       ((0,), (), 10))  # fmt: skip
    walk = walk_of(program, 40, machine=replace(MACHINE, host_bytes=40))
    assert nothing(walk) == 1
    walk.step(node(walk, OFFLOAD, 0, before=2))
    assert nothing(walk) == 3
    assert walk.step(node(walk, OFFLOAD, 0, before=4)).terminated and not walk.dead_end


def test_relief_is_a_share_of_the_excess() -> None:
    """Relief is the share of the byte-time above the limit that an action removes.

    Kernels 3, 4 and 5 exceed 145 bytes by 25 for 10 ns, 35 for 20 ns and 5 for 20 ns: 250, 700 and 100. The gap of
    a2 covers 3 and 4, those of a1 and w all three. With a1 swapped out nothing exceeds the limit.
    """
    walk = walk_of(limit=145)
    assert walk.relief() == pytest.approx([1, 1, 950 / 1050])
    assert (nothing(walk), nothing(walk)) == (1, 2)
    walk.step(node(walk, OFFLOAD, A1))
    assert walk.relief().tolist() == [0, 0, 0]


# ----------------------------------------------------------------------------------------------- the copy engine


def test_an_offload_is_issued_behind_the_one_before() -> None:
    """Copies to the host are queued.

    a (25 bytes) is copied [10, 35): the agent is at kernel 4, which begins at 40. b's gap has been open since 20, and
    k2 is the last kernel that ended (30) before the engine is free; b follows at once, [35, 45), until kernel 5.
    """
    program = straight([Tensor("a", 25), Tensor("b", 10)], ((), (0,), 10), ((), (1,), 10), *[((), (), 10)] * 4,
                       ((), (), 10, 100), ((0, 1), (), 10))  # fmt: skip
    walk = walk_of(program, 100)
    assert nothing(walk) == 1
    walk.step(node(walk, OFFLOAD, 0))
    assert walk.position == 4 and allowed(walk) == {(NOTHING,), (OFFLOAD, 1)}
    walk.step(node(walk, OFFLOAD, 1))
    assert walk.position == 5 and walk.done
    assert walk.plan().decisions == (Swap(0, 0, 7), Swap(1, 2, 7))


# ------------------------------------------------------------------------------------------------ over the boundary

# v (20 bytes) is used by k1 only, w (30) by k2, and x (10) waits from k0 to k4; every kernel takes 10 ns.
V, U, X = range(3)
RING = straight(
    [Tensor("v", 20, "parameter", True), Tensor("w", 30, "parameter", True), Tensor("x", 10)],
    ((), (X,), 10), ((V,), (V,), 10), ((U,), (U,), 10), ((), (), 10, 50), ((X,), (), 10, 40),
)  # fmt: skip


def test_gaps_over_the_boundary_are_open_at_first_and_do_not_hold() -> None:
    """Wrapping gaps are open at position 0, and offloading in them does not move the agent.

    Loads are 60, 60, 60, 110 and 100. The gaps of v (from 20) and w (from 30) belong to the previous iteration: v is
    copied [-30, -10), w [-10, 20). Then the loads are 10, 30, 40, 60 and 50.
    """
    assert RING.live_bytes == (60, 60, 60, 110, 100)
    walk = walk_of(RING, 50)
    assert walk.position == 0 and allowed(walk) == {(OFFLOAD, V), (OFFLOAD, U)}
    # Above 50 bytes are 10 in each of k0, k1 and k2, 60 in k3 and 50 in k4: 1400 byte-ns. The gap of v covers all but
    # k1, that of w all but k2, that of x k1 to k3.
    assert walk.relief() == pytest.approx([130 / 140, 130 / 140, 80 / 140])
    walk.step(node(walk, OFFLOAD, V))
    assert (walk.position, walk.free_ns) == (0, -10)
    walk.step(node(walk, OFFLOAD, U))
    assert (walk.position, walk.free_ns) == (0, 20)
    assert walk.need.tolist() == [10, 30, 40, 60, 50] and allowed(walk) == {(NOTHING,)}
    # x's gap opens when k0 has ended; the engine is free at 20.
    assert nothing(walk) == 1 and allowed(walk) == {(NOTHING,), (OFFLOAD, X)}
    walk.step(node(walk, OFFLOAD, X))
    assert walk.done and walk.plan().decisions == (Swap(V, 1, 1), Swap(U, 2, 2), Swap(X, 0, 4))
    assert walk.rows.tolist() == rows_of(walk.plan().decisions).tolist()
    # In the other order: w [-20, 10), then v, whose gap opened at -30.
    walk.reset()
    walk.step(node(walk, OFFLOAD, U))
    assert walk.free_ns == 10
    walk.step(node(walk, OFFLOAD, V))
    assert walk.free_ns == 30


def test_a_gap_over_the_boundary_may_be_entered_behind_it() -> None:
    """A wrapping gap can be used after the iteration boundary.

    Under 105 bytes k3 is the first kernel that cannot start. At position 1, w is unused until k2: it is copied after k0
    in this iteration, [10, 40), so the agent would be at k4 but stops at k3.
    """
    walk = walk_of(RING, 105)
    assert allowed(walk) == {(NOTHING,), (OFFLOAD, V), (OFFLOAD, U)}
    assert nothing(walk) == 1 and allowed(walk) == {(NOTHING,), (OFFLOAD, U), (OFFLOAD, X)}
    walk.step(node(walk, OFFLOAD, U))
    assert walk.plan().decisions == (Swap(U, 0, 2),) and walk.position == 3


# ---------------------------------------------------------------------------------------------- the causal reward


def test_the_clock_waits_for_swap_outs_and_swap_ins() -> None:
    """The causal reward charges waits for copies as the agent passes them.

    Under 125 bytes w is copied [10, 20) and a1 [20, 60): kernel 3, which needs 120, waits for a1 until 60. The last
    step, with a2 swapped out too, charges the rest.
    """
    walk = Walk(Task(PROGRAM, MACHINE, 125, 1, "swap"), "causal")
    assert nothing(walk) == 1
    assert walk.step(node(walk, OFFLOAD, W)).reward == walk.step(node(walk, OFFLOAD, A1)).reward == 0
    assert walk.position == 3 and walk.clock.ended[:4].tolist() == [0, 10, 20, 30]
    assert walk.step(0) == (-30 / 120, False, False)
    assert walk.position == 4 and walk.clock.ended[4] == 70 and walk.overhead == 30 / 120
    step = walk.step(node(walk, OFFLOAD, A2))
    assert walk.clock.out_end.tolist() == [20, 60, 100]  # right after a1
    paper = walk_of(limit=125)
    for taken in (0, node(walk, OFFLOAD, W), node(walk, OFFLOAD, A1), 0, node(walk, OFFLOAD, A2)):
        paper.step(taken)
    assert paper.plan() == walk.plan() and walk.overhead == paper.overhead
    assert step == (pytest.approx(30 / 120 - paper.overhead), True, False)


def test_the_clock_waits_for_data() -> None:
    """The clock waits for swap-ins.

    v is copied out until -10 and in [-10, 10), for kernel 1; that waits until 20, when w has been copied out. w is
    copied in for kernel 2 when kernel 1, beside which it does not fit, has ended: [30, 60).
    """
    walk = Walk(Task(RING, MACHINE, 50, 1, "swap"), "causal")
    walk.step(node(walk, OFFLOAD, V))
    walk.step(node(walk, OFFLOAD, U))
    assert walk.clock.out_end.tolist() == [-10, 20, 0]
    assert nothing(walk) == 1
    walk.clock.run(1, 3, walk.need, walk.taken == OFFLOAD)
    assert walk.need.tolist() == [10, 30, 40, 60, 50] and walk.clock.ended[:4].tolist() == [0, 10, 30, 70]


def test_recomputation_is_charged_at_once() -> None:
    """Recomputing f1 for a1 costs 10 ns at once, although no kernel has waited yet; w is copied out after it."""
    walk = Walk(Task(PROGRAM, MACHINE, 139, 1, "joint"), "causal")
    assert (nothing(walk), nothing(walk)) == (1, 2)
    assert walk.step(node(walk, REMOVE, A1)) == (-10 / 120, False, False)
    with pytest.raises(ValueError, match="reward: expected 'paper' or 'causal', got 'both'"):
        Walk(walk.task, "both")


# -------------------------------------------------------------------------------------------------- more of actions


def test_a_copy_after_the_last_write() -> None:
    """A copy may start right after the tensor's last write.

    Kernel 1 writes a2 and kernel 2 reads it. Copied from 20 on it is out at 60: f4 waits for 30 ns, and b3 for 40 until
    the swap-in after b4, [90, 130). Only the last kernel writes w.
    """
    walk = walk_of()
    for _ in range(3):
        nothing(walk)
    masks = walk.form_masks()
    assert masks.shape == (2, 16) and (masks[0] == walk.mask()).all()
    a2 = node(walk, OFFLOAD, A2)
    assert masks[0, 2] and np.flatnonzero(masks[1]).tolist() == [node(walk, OFFLOAD, A1), a2]
    with pytest.raises(ValueError, match="node 2 is not a valid action now in form 1"):
        walk.step(node(walk, OFFLOAD, W), 1)
    assert walk.step(a2, 1) == (pytest.approx(-70 / 120), True, False)
    assert walk.plan().decisions == (Swap(A2, 2, 5, copy=1),)


def test_removals_that_keep_or_come_early() -> None:
    """Only f4 and b4 do not fit: a1 can be recomputed before b3, one kernel before its use."""
    for form, decision in ((1, Recompute(A1, 1, 6, keep=True)), (2, Recompute(A1, 1, 6, at=5))):
        walk = walk_of(mode="joint")
        assert (nothing(walk), nothing(walk)) == (1, 2)
        a1 = node(walk, REMOVE, A1)
        assert [bool(row[a1]) for row in walk.form_masks()] == [True] * 3
        assert walk.step(a1, form) == (pytest.approx(-10 / 120), True, False)
        assert walk.plan().decisions == (decision,)
    # Under 145 bytes b3 does not fit either, so there is no earlier kernel than the use.
    walk = walk_of(limit=145, mode="joint")
    assert (nothing(walk), nothing(walk)) == (1, 2)
    assert not walk.form_masks()[2].any()


@pytest.mark.parametrize("first", [0, 1])
def test_an_early_copy_needs_uninterrupted_residency(first: int) -> None:
    """An early copy requires that the tensor has been resident since the write.

    k0 writes t, k2 and k4 read it, with a gap before and after k2; u, of 10 bytes, is enough for the first. Once t has
    been evicted in it, t cannot be copied from k0 on for the second.
    """
    program = straight([Tensor("t", 40), Tensor("u", 10)], ((), (0, 1), 10), ((), (), 10, 35), ((0,), (), 10),
                       ((), (), 10, 40), ((0, 1), (), 10))  # fmt: skip
    walk = walk_of(program, 79)
    assert nothing(walk) == 1
    walk.step(node(walk, OFFLOAD, first, before=4 if first else 2))
    while walk.position < 3:
        nothing(walk)
    assert walk.form_masks()[:, node(walk, OFFLOAD, 0, before=4)].tolist() == [True, bool(first)]
