"""Operation graph that the agent observes (DQN paper, sections 4.2 and 4.4).

Node 0 stands for the iteration and for "do nothing". The other nodes are the malloc, write, read and free operations
of tensors with an action, in time order. A gap in which the load never exceeds the limit has no action. Edges join
consecutive operations, and consecutive operations on one tensor; an edge's weight is the time between the two.

A node represents at most one action (section 4.9). Offloading is at the operation that opens the gap, where the copy
may begin. Removing is at the operation that closes the gap, where the tensor is recomputed. If that operation also
opens a gap, the tensor's malloc or free represents the removal; if those are taken, the gap has no removal.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from simulator import Gap, Machine, Program
from simulator.compiled.engine import rerun_ns
from simulator.modes import Choice, check_mode, evictions


class Feature(IntEnum):
    """Columns of the node features: five static ones, then the dynamic ones (observation.py)."""

    SIZE = 0
    TRANSFER = 1
    RECOMPUTE_TIME = 2
    REVISIT = 3
    ACTION = 4
    VALID = 5
    RELIEF = 6
    AHEAD = 7
    PRESSURE = 8
    QUEUE = 9
    STUCK = 10


STATIC = 5  # columns that no action changes
SIGNED = (Feature.VALID, Feature.AHEAD, Feature.PRESSURE)  # observed columns in [-1, 1]; the others are in [0, 1]
FEATURES = 8  # the static and the first three dynamic columns, which agents/learned/dqn_paper.py reads
OBSERVED = len(Feature)


@dataclass(frozen=True)
class OperationGraph:
    """Static structure and features of one program on one machine.

    Shapes: N nodes, E directed edges (both directions and self-loops), G gaps.
    """

    gaps: tuple[Gap, ...]
    features: NDArray[np.float32]  # (N, STATIC): static columns
    kernel: NDArray[np.int64]  # (N,) kernel of the operation; node 0 has 0
    edges: NDArray[np.int64]  # (2, E)
    weights: NDArray[np.float32]  # (E,) time between the two nodes / ideal time
    action_kind: NDArray[np.int64]  # (N,) Choice; -1: not an action
    action_gap: NDArray[np.int64]  # (N,) gap of the action, or -1

    def __len__(self) -> int:
        return len(self.kernel)


def observed_static(graph: OperationGraph) -> NDArray[np.float64]:
    """Returns the static columns as they are observed, (N, STATIC): a time t relative to the ideal time as t/(1+t)."""
    columns = graph.features.astype(np.float64)
    times = columns[:, [Feature.TRANSFER, Feature.RECOMPUTE_TIME]]
    columns[:, [Feature.TRANSFER, Feature.RECOMPUTE_TIME]] = times / (1.0 + times)
    return columns


def build_graph(
    program: Program, machine: Machine, limit: int, min_bytes: int = 2**20, mode: str = "swap"
) -> OperationGraph:
    """Returns the operation graph of a program.

    Args:
        program: Program whose operations are the nodes.
        machine: Machine of the transfer times.
        limit: memory limit in bytes.
        min_bytes: size in bytes below which tensors are left out.
        mode: available eviction kinds: "swap", "recompute" or "joint".

    Returns:
        The graph, as arrays over its N nodes and E edges.

    Raises:
        ValueError: if the mode is unknown.
    """
    check_mode(mode)
    n_over = np.concatenate([[0], np.cumsum(np.array(program.live_bytes) > limit)]).tolist()  # count before each kernel
    gaps = tuple(g for g in program.gaps(min_bytes) if _passes(n_over, g))
    evictable = {g.tensor for g in gaps}
    operations = [op for op in program.operations() if op.tensor in evictable]
    ideal = max(1, program.ideal_ns)
    n = len(operations) + 1
    by_tensor: dict[int, list[int]] = {}
    for i, op in enumerate(operations, 1):
        by_tensor.setdefault(op.tensor, []).append(i)

    # Which node represents which action.
    kind = np.full(n, -1, np.int64)
    gap_of = np.full(n, -1, np.int64)
    kind[0] = Choice.RESIDENT
    opening: dict[tuple[int, int], int] = {}  # (tensor, kernel) -> last access there
    closing: dict[tuple[int, int], int] = {}  # (tensor, kernel) -> first access there
    for i, op in enumerate(operations, 1):
        if op.kind in ("read", "write"):
            opening[op.tensor, op.kernel] = i
            closing.setdefault((op.tensor, op.kernel), i)
    kinds = [evictions(program, gap, mode) for gap in gaps]
    for g, gap in enumerate(gaps):
        if Choice.SWAPPED in kinds[g]:
            node = opening[gap.tensor, gap.after]
            kind[node] = Choice.SWAPPED
            gap_of[node] = g
    recompute = np.zeros(len(gaps))
    removable = [g for g in range(len(gaps)) if Choice.RECOMPUTED in kinds[g]]
    if removable:
        recompute[removable] = rerun_ns(program, [gaps[g] for g in removable])
    for g, gap in enumerate(gaps):
        if Choice.RECOMPUTED in kinds[g]:
            nodes = by_tensor[gap.tensor]
            for node in (closing[gap.tensor, gap.before], nodes[0], nodes[-1]):
                if kind[node] < 0:
                    kind[node] = Choice.RECOMPUTED
                    gap_of[node] = g
                    break

    features = np.zeros((n, STATIC), np.float32)
    tensor = np.array([op.tensor for op in operations], np.int64)
    nbytes = np.array([t.nbytes for t in program.tensors])
    round_trip_ns = np.array([machine.d2h_ns(t.nbytes) + machine.h2d_ns(t.nbytes) for t in program.tensors])
    features[1:, Feature.SIZE] = nbytes[tensor] / program.peak_bytes
    features[1:, Feature.TRANSFER] = round_trip_ns[tensor] / ideal
    gap_at = {(gap.tensor, gap.after): g for g, gap in enumerate(gaps)}
    gap_ns = [program.gap_ns(gap) for gap in gaps]
    for i, op in enumerate(operations, 1):
        node_gap = gap_of[i] if gap_of[i] >= 0 else gap_at.get((op.tensor, op.kernel), -1)
        if node_gap >= 0:
            features[i, Feature.RECOMPUTE_TIME] = recompute[node_gap] / ideal
            features[i, Feature.REVISIT] = gap_ns[node_gap] / ideal
    features[:, Feature.ACTION] = np.where(kind < 0, 0.0, (kind + 1) / 3)

    times = np.array([0] + [op.time_ns for op in operations], np.float64)
    order = tensor.argsort(kind="stable")
    same_tensor = np.flatnonzero(tensor[order[:-1]] == tensor[order[1:]])
    pairs = np.append(np.arange(n - 1) * (n + 1) + 1, (order[same_tensor] + 1) * n + order[same_tensor + 1] + 1)
    one_way = np.stack(np.divmod(np.unique(pairs), n))  # a pair (i, j) is i n + j
    loops = np.arange(n)[None].repeat(2, 0)
    edges = np.concatenate([one_way, one_way[::-1], loops], axis=1)
    weights = np.abs(times[edges[0]] - times[edges[1]]) / ideal
    kernel = np.array([0] + [op.kernel for op in operations], np.int64)
    return OperationGraph(gaps, features, kernel, edges, weights.astype(np.float32), kind, gap_of)


def _passes(n_over: list[int], gap: Gap) -> bool:
    """Returns whether the load exceeds the limit inside the gap; ``n_over`` counts such kernels before each kernel."""
    count = n_over[gap.before] - n_over[gap.after + 1]
    return (count if gap.after < gap.before else count + n_over[-1]) > 0
