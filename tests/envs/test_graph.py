"""Tests operation graph: nodes, actions, features and edges."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from envs.graph import Feature, OperationGraph, build_graph
from simulator import Gap, Kernel, Program, Tensor
from simulator.modes import Choice
from tests.programs import activations, parameter, straight
from tests.tiny import A1, A2, LIMIT, MACHINE, PROGRAM, W

SLOW_IN = replace(MACHINE, h2d_bytes_per_s=5 * 10**8)  # 1 ns per byte out, 2 ns per byte in

# Of tests/tiny.py the operations of w, a1 and a2; no action concerns the others. Node 0 stands for the iteration.
#   node   1       2     3      4       5     6      7     8     9     10    11    12    13    14     15
#          malloc  read  write  malloc  read  write  read  read  read  read  free  read  read  write  free
#          a1      w     a1     a2      a1    a2     a2    a2    a1    a2    a2    w     a1    w      a1
#   kernel 0       0     0      1       1     1      2     5     6     6     6     7     7     7      7
#   time   0       0     0      10      10    10     20    60    80    80    100   100   100   100    120
NODES = {"w": [2, 12, 14], "a1": [1, 3, 5, 9, 13, 15], "a2": [4, 6, 7, 8, 10, 11]}
TIMES = [0, 0, 0, 0, 10, 10, 10, 20, 60, 80, 80, 100, 100, 100, 100, 120]


def graph_of_tiny(mode: str) -> OperationGraph:
    return build_graph(PROGRAM, SLOW_IN, LIMIT, 1, mode)


def test_nodes_and_actions() -> None:
    """The operation that opens a gap offloads it, the one that closes it removes it; w cannot be recomputed."""
    graph = graph_of_tiny("joint")
    assert graph.gaps == (Gap(W, 0, 7), Gap(A1, 1, 6), Gap(A2, 2, 5)) and len(graph) == 16
    assert graph.kernel.tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 5, 6, 6, 6, 7, 7, 7, 7]
    # node -> gap
    offload = {2: 0, 5: 1, 7: 2}
    remove = {9: 1, 8: 2}
    for mode, kinds in (("joint", (offload, remove)), ("swap", (offload, {})), ("recompute", ({}, remove))):
        kind = np.full(16, -1)
        gap = np.full(16, -1)
        kind[0] = Choice.RESIDENT
        for action, nodes in zip((Choice.SWAPPED, Choice.RECOMPUTED), kinds, strict=True):
            for node, g in nodes.items():
                kind[node] = action
                gap[node] = g
        graph = graph_of_tiny(mode)
        assert (graph.action_kind.tolist(), graph.action_gap.tolist()) == (kind.tolist(), gap.tolist())


def test_features() -> None:
    """Checks size / peak, transfer time / ideal, recomputation time / ideal and gap length / ideal."""
    features = graph_of_tiny("joint").features
    expected = np.zeros((16, 5))
    for tensor, nodes in NODES.items():
        nbytes = 10 if tensor == "w" else 40
        expected[nodes, Feature.SIZE] = nbytes / 180
        expected[nodes, Feature.TRANSFER] = 3 * nbytes / 120
    expected[[5, 9], 2:4] = 10 / 120, 60 / 120  # a1: recomputed by f1; gap from 20 to 80
    expected[[7, 8], 2:4] = 10 / 120, 30 / 120  # a2: recomputed by f2; gap from 30 to 60
    expected[2, Feature.REVISIT] = 90 / 120  # w: gap from 10 to 100
    expected[[0, 2, 5, 7, 8, 9], Feature.ACTION] = 1 / 3, 2 / 3, 2 / 3, 2 / 3, 1, 1
    assert features == pytest.approx(expected, rel=1e-6)
    # Without removals the recomputation times are 0, and a gap's features are at the node that opens it.
    swap = expected.copy()
    swap[:, Feature.RECOMPUTE_TIME] = 0
    swap[[8, 9], 2:] = 0
    assert graph_of_tiny("swap").features == pytest.approx(swap, rel=1e-6)


def test_edges_and_weights() -> None:
    """Edges join consecutive operations, and those on one tensor, in both directions; plus self-loops."""
    graph = graph_of_tiny("swap")
    pairs = {(i, i + 1) for i in range(15)}.union(*map(pairwise, NODES.values()))
    forward = sorted(pairs)
    backward = [(b, a) for a, b in forward]
    loops = [(i, i) for i in range(16)]
    assert [tuple(edge) for edge in graph.edges.T.tolist()] == forward + backward + loops
    assert graph.weights == pytest.approx([abs(TIMES[a] - TIMES[b]) / 120 for a, b in graph.edges.T], rel=1e-6)


def test_no_node_is_more_than_one_action() -> None:
    """Tensor t is read by every second kernel, so its gaps close where the next ones open; k6 updates it."""
    reads: list[tuple[int, ...]] = [(), (0,), (0,), (0,), (0,)]
    kernels = []
    for i, inputs in enumerate(reads):
        writes = (0,) if i in (0, 3) else ()
        kernels += [Kernel(f"k{2 * i}", "other", "forward", inputs, writes, 10)]
        kernels += [Kernel(f"k{2 * i + 1}", "other", "forward", (), (), 10 + i, workspace=100)]
    program = Program("often", (Tensor("t", 100),), tuple(kernels[:-1]))
    graph = build_graph(program, MACHINE, 100, 1, "joint")
    # Nodes: 1 malloc, 2 write; 3 read k2; 4 read k4; 5 read, 6 write k6; 7 read k8, 8 free.
    assert graph.gaps == (Gap(0, 0, 2), Gap(0, 2, 4), Gap(0, 4, 6), Gap(0, 6, 8))
    actions = {i: (k, g) for i, (k, g) in enumerate(zip(graph.action_kind, graph.action_gap, strict=True)) if k > 0}
    # Gaps 0 and 1 close at 3 and 4, which are taken: the malloc and the free represent them. Gap 2 closes at 5; gap 3
    # opens at the same kernel, but at node 6.
    assert actions == {
        2: (Choice.SWAPPED, 0),
        3: (Choice.SWAPPED, 1),
        4: (Choice.SWAPPED, 2),
        6: (Choice.SWAPPED, 3),
        1: (Choice.RECOMPUTED, 0),
        8: (Choice.RECOMPUTED, 1),
        5: (Choice.RECOMPUTED, 2),
        7: (Choice.RECOMPUTED, 3),
    }
    # Recomputing k0 takes 10 ns; the last gap needs k6 as well. k1, k3, k5, k7: 10 to 13 ns; the iteration takes 96 ns.
    assert graph.features[:, 2] * 96 == pytest.approx([0, 10, 10, 10, 10, 10, 20, 20, 10], rel=1e-6)
    assert graph.features[:, 3] * 96 == pytest.approx([0, 10, 10, 11, 12, 12, 13, 13, 11], rel=1e-6)
    # With k6 reading only, gap 2 closes at 5, which is taken, as are the malloc and the free: it has no removal.
    read_only = (*kernels[:6], replace(kernels[6], outputs=()), *kernels[7:-1])
    graph = build_graph(replace(program, kernels=read_only), MACHINE, 100, 1, "joint")
    assert graph.action_gap[graph.action_kind == Choice.RECOMPUTED].tolist() == [0, 3, 1]


@pytest.mark.parametrize(
    ("over", "gaps"),
    [
        (0, []),  # both are in use where the load exceeds the limit
        (1, [Gap(0, 0, 2), Gap(1, 0, 2)]),
        (2, []),
        (3, [Gap(1, 2, 0)]),  # wrapping gap
        (4, [Gap(1, 2, 0)]),
    ],
)
def test_a_gap_below_the_limit_is_no_action(over: int, gaps: list[Gap]) -> None:
    """k0 and k2 use t and the persistent w; one kernel has a workspace that raises the load to at most 8."""
    lines: list[tuple] = [((1,), (0,), 10), ((), (), 10), ((0, 1), (), 10), ((), (), 10), ((), (), 10)]
    lines[over] += (8 - [7, 7, 7, 2, 2][over],)
    program = straight([*activations(5), parameter(2)], *lines)
    assert program.live_bytes[over] == 8 == program.peak_bytes
    assert list(build_graph(program, MACHINE, 7, 1, "swap").gaps) == gaps
    assert build_graph(program, MACHINE, 8, 1, "swap").gaps == ()


def test_the_boundary_is_in_a_gap_of_one_kernel() -> None:
    """Only k1 uses w: its gap runs from k2 across the iteration boundary to k0, which has the peak."""
    program = straight([parameter(2)], ((), (), 10, 3), ((0,), (), 10), ((), (), 10))
    assert build_graph(program, MACHINE, 4, 1, "joint").gaps == (Gap(0, 1, 1),)
    assert build_graph(program, MACHINE, 5, 1, "joint").gaps == ()
    assert (build_graph(program, MACHINE, 4, 1, "joint").action_kind == Choice.RECOMPUTED).sum() == 0


def test_a_program_without_duration() -> None:
    graph = build_graph(PROGRAM.with_durations([0] * 8), MACHINE, LIMIT, 1, "joint")
    assert not graph.weights.any() and graph.features[1, 1] == 80  # ns; the ideal time is at least 1 ns


def test_small_tensors_are_left_out() -> None:
    sizes = {"just": 2**20, "below": 2**20 - 1}
    for name, nbytes in sizes.items():
        tensors = (replace(PROGRAM.tensors[0], nbytes=0), *(replace(t, nbytes=nbytes) for t in PROGRAM.tensors[1:]))
        graph = build_graph(replace(PROGRAM, tensors=tensors), MACHINE, 3 * nbytes)
        assert bool(graph.gaps) == (name == "just")
