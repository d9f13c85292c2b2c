"""The graph that the agent sees: the operations of one iteration (DQN paper, sections 4.2 and 4.4).

Nodes are the operations (malloc, write, read, free) of tensors above a threshold, in time order, after a node 0 that
stands for the iteration itself and for "do nothing". A gap in which the load never exceeds the limit need not be
emptied and is no action; tensors without an action are left out, because their nodes would never change. Edges join
consecutive operations, and consecutive operations on one tensor; an edge's weight is the time between the two.

No node stands for more than one action (section 4.9). Offloading a tensor in a gap is the operation that opens the
gap, because there the copy may begin. Removing it is the operation that closes the gap, because there it is
recomputed. Where that operation also opens a gap of its own, the tensor's malloc or free stands for the removal;
where those are taken too, the gap has no removal.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simulator import Gap, Machine, Program
from simulator.compiled.encoding import columns_of
from simulator.compiled.engine import rerun_ns
from simulator.modes import RECOMPUTED, STAYS, SWAPPED, check_mode, ways_to_empty

NOTHING, OFFLOAD, REMOVE = STAYS, SWAPPED, RECOMPUTED  # what an action does with a gap, in the paper's words

# Columns of the node features: five of the graph, then those of the moment (observation.py).
SIZE, TRANSFER, RECOMPUTE_TIME, REVISIT, ACTION, VALID, RELIEF, AHEAD, PRESSURE, QUEUE, STUCK = range(11)
# How many are the graph's; with the first three of the moment, which agents/learned reads; all that are observed.
STATIC, FEATURES, OBSERVED = VALID, AHEAD + 1, STUCK + 1


@dataclass(frozen=True)
class OperationGraph:
    """Static structure and features of one program on one machine.

    Shapes: N nodes, E directed edges (both directions and self-loops), G gaps, K kernels.
    """

    gaps: tuple[Gap, ...]
    features: NDArray[np.float32]  # (N, STATIC): the columns of the graph
    kernel: NDArray[np.int64]  # (N,) kernel of the operation; node 0 has 0
    edges: NDArray[np.int64]  # (2, E)
    weights: NDArray[np.float32]  # (E,) time between the two nodes / ideal time
    action_kind: NDArray[np.int64]  # (N,) NOTHING, OFFLOAD, REMOVE; -1: the node is no action
    action_gap: NDArray[np.int64]  # (N,) gap of the action, or -1

    def __len__(self) -> int:
        return len(self.kernel)

    @cached_property
    def gap_columns(self) -> NDArray[np.int64]:
        """(3, G): tensor, after and before of the gaps."""
        return columns_of(self.gaps).T


def build_graph(
    program: Program, machine: Machine, limit: int, min_bytes: int = 2**20, mode: str = "swap"
) -> OperationGraph:
    """The graph of a program.

    Args:
        limit: bytes.
        min_bytes: tensors below this size are left out.
        mode: which actions there are: "swap", "recompute" or "joint".

    Raises:
        ValueError: unknown mode.
    """
    check_mode(mode)
    over = np.concatenate([[0], np.cumsum(np.array(program.live_bytes) > limit)]).tolist()  # kernels before each
    gaps = tuple(g for g in program.gaps(min_bytes) if _passes(over, g))
    concerned = {g.tensor for g in gaps}
    operations = [op for op in program.operations() if op.tensor in concerned]
    ideal = max(1, program.ideal_ns)
    n = len(operations) + 1
    by_tensor: dict[int, list[int]] = {}
    for i, op in enumerate(operations, 1):
        by_tensor.setdefault(op.tensor, []).append(i)

    # Which node represents which action.
    kind, gap_of = np.full(n, -1, np.int64), np.full(n, -1, np.int64)
    kind[0] = NOTHING
    opening: dict[tuple[int, int], int] = {}  # (tensor, kernel) -> last access there
    closing: dict[tuple[int, int], int] = {}  # (tensor, kernel) -> first access there
    for i, op in enumerate(operations, 1):
        if op.kind in ("read", "write"):
            opening[op.tensor, op.kernel] = i
            closing.setdefault((op.tensor, op.kernel), i)
    ways = [ways_to_empty(program, gap, mode) for gap in gaps]
    for g, gap in enumerate(gaps):
        if OFFLOAD in ways[g]:
            node = opening[gap.tensor, gap.after]
            kind[node], gap_of[node] = OFFLOAD, g
    recompute = np.zeros(len(gaps))
    removable = [g for g in range(len(gaps)) if REMOVE in ways[g]]
    if removable:
        recompute[removable] = rerun_ns(program, [gaps[g] for g in removable])
    for g, gap in enumerate(gaps):
        if REMOVE in ways[g]:
            nodes = by_tensor[gap.tensor]
            for node in (closing[gap.tensor, gap.before], nodes[0], nodes[-1]):
                if kind[node] < 0:
                    kind[node], gap_of[node] = REMOVE, g
                    break

    features = np.zeros((n, STATIC), np.float32)
    tensor = np.array([op.tensor for op in operations], np.int64)
    nbytes = np.array([t.nbytes for t in program.tensors])
    there_and_back = np.array([machine.d2h_ns(t.nbytes) + machine.h2d_ns(t.nbytes) for t in program.tensors])
    features[1:, SIZE], features[1:, TRANSFER] = nbytes[tensor] / program.peak_bytes, there_and_back[tensor] / ideal
    gap_at = {(gap.tensor, gap.after): g for g, gap in enumerate(gaps)}
    gap_ns = [program.gap_ns(gap) for gap in gaps]
    for i, op in enumerate(operations, 1):
        node_gap = gap_of[i] if gap_of[i] >= 0 else gap_at.get((op.tensor, op.kernel), -1)
        if node_gap >= 0:
            features[i, RECOMPUTE_TIME] = recompute[node_gap] / ideal
            features[i, REVISIT] = gap_ns[node_gap] / ideal
    features[:, ACTION] = np.where(kind < 0, 0.0, (kind + 1) / 3)

    times = np.array([0] + [op.time_ns for op in operations], np.float64)
    grouped = tensor.argsort(kind="stable")
    same = np.flatnonzero(tensor[grouped[:-1]] == tensor[grouped[1:]])
    pairs = np.append(np.arange(n - 1) * (n + 1) + 1, (grouped[same] + 1) * n + grouped[same + 1] + 1)
    one_way = np.stack(np.divmod(np.unique(pairs), n))  # a pair (i, j) is i n + j
    loops = np.arange(n)[None].repeat(2, 0)
    edges = np.concatenate([one_way, one_way[::-1], loops], axis=1)
    weights = np.abs(times[edges[0]] - times[edges[1]]) / ideal
    kernel = np.array([0] + [op.kernel for op in operations], np.int64)
    return OperationGraph(gaps, features, kernel, edges, weights.astype(np.float32), kind, gap_of)


def _passes(over: list[int], gap: Gap) -> bool:
    """Does the load pass the limit while the tensor could be away? ``over``: at how many kernels before each."""
    found = over[gap.before] - over[gap.after + 1]
    return (found if gap.after < gap.before else found + over[-1]) > 0
