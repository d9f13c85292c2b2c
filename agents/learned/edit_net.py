"""Q-network over edits of a plan: structure2vec on the gap graph, a state value, and an advantage per edit.

Q(s, e) = V(s) + A(s, e) - mean A (dueling heads, Wang et al., 2016). A reads the sum over the changes c of edit e of
h[gap(c), mode(c)], a deep-sets head (Zaheer et al., 2017). Gap states come from structure2vec (Dai et al., 2016;
equation 1 of the DQN paper) over the edges of the gap graph and the bins of time; with ``rounds=0`` from each gap's
own columns and the pooled state only. Two auxiliary outputs are trained with Q: the effect of an edit, and the logit
of whether it improves the plan. Shapes: B states of one task, G gaps, M edits, w width.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agents.learned.checkpoint import read_weights
from agents.learned.optimization import MASKED
from agents.learned.structure2vec import neighbor_sum, sparse
from envs.edit.columns import BIN, GAP, N_CHANGES, PLAN, n_columns
from envs.edit.task import EditTask
from simulator.moves.gap_graph import GapGraph

EDGES = 4  # kinds of edges: next and previous gap of a tensor, along and against a recomputation chain


class EditGraph(NamedTuple):
    """Network inputs of a task that do not depend on the plan."""

    static: Tensor  # (G, F)
    bins: Tensor  # (BINS, 12)
    edges: tuple[Tensor, ...]  # EDGES sparse (G, G), each row's weights sum to 1
    gap_of_bin: Tensor  # (G, BINS) share of a gap's time in a bin
    bin_of_gap: Tensor  # (BINS, G) share of a bin's time in a gap


def edit_graph(task: EditTask) -> EditGraph:
    """Returns the network's static inputs of a task."""
    graph: GapGraph = task.graph
    cover = torch.from_numpy(graph.cover)
    pairs = [graph.next, graph.next[::-1], graph.chain, graph.chain[::-1]]
    return EditGraph(
        torch.from_numpy(task.static),
        torch.from_numpy(np.asarray(task.static_bins, np.float32)),
        tuple(_mean_of(pair.copy(), len(graph)) for pair in pairs),
        cover / cover.sum(1, keepdim=True).clamp(min=1e-6),
        (cover / cover.sum(0).clamp(min=1.0)).T.contiguous(),
    )


def _mean_of(edges: NDArray[np.int64], size: int) -> Tensor:
    """Returns a sparse (size, size) matrix that averages over the targets of each gap's edges."""
    degree = np.bincount(edges[0], minlength=size)
    weights = torch.from_numpy((1.0 / np.maximum(degree[edges[0]], 1)).astype(np.float32))
    return sparse(torch.from_numpy(edges), weights, size)


class EditNet(nn.Module):
    """Q-network over edits.

    Args:
        static, bins: number of static columns of a gap and of a bin.
        width: w, of all hidden layers.
        rounds: rounds of structure2vec; 0 disables message passing.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, static: int, bins: int, width: int = 32, rounds: int = 2) -> None:
        super().__init__()
        self.settings = {"static": static, "bins": bins, "width": width, "rounds": rounds}
        w = width
        self.rounds = rounds
        self.register_buffer("mean", torch.zeros(static))
        self.register_buffer("scale", torch.ones(static))
        self.gap_static = nn.Linear(static, w)
        self.gap_state = nn.Linear(n_columns(GAP), w, bias=False)
        self.bin_static = nn.Linear(bins, w)
        self.bin_state = nn.Linear(n_columns(BIN), w, bias=False)
        if rounds:
            self.along = nn.Linear(EDGES * w, w, bias=False)
            self.to_bin, self.to_gap, self.among = (nn.Linear(w, w, bias=False) for _ in range(3))
        self.whole = nn.Linear(2 * w + n_columns(PLAN), w)
        self.change_of_gap = nn.Linear(w, w)
        self.change_of_static = nn.Linear(static, w, bias=False)
        self.change_of_state = nn.Linear(n_columns(GAP), w, bias=False)
        self.change = nn.Linear(w, w * N_CHANGES)
        self.edit_of_whole = nn.Linear(w, w)
        self.edit = nn.Linear(w, w)
        self.out = nn.Linear(w, 3)  # advantage, effect, logit of an improvement
        self.value = nn.Linear(w, 1)
        self.lift = nn.Parameter(torch.tensor(0.02))  # weight of the probability of an improvement in the advantage

    def static_parts(self, graph: EditGraph) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the terms equal in all states of a task: two of the gaps (G, w), one of the bins (BINS, w)."""
        x = ((graph.static - self.mean) / self.scale).clamp(-4, 4)  # outliers of other programs, in standard deviations
        return self.gap_static(x), self.change_of_static(x), self.bin_static(graph.bins)

    def encode(
        self, graph: EditGraph, gaps: Tensor, bins: Tensor, plan: Tensor, static_parts: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Encodes states: the columns of gaps (B, G, …), bins (B, BINS, …) and plan (B, …) of envs/edit/columns.py.

        Returns:
            h (B, G * N_CHANGES, w), the term of each possible change, and the state of the whole plan (B, w).
        """
        gap_part, change_part, bin_part = static_parts
        x = gaps.transpose(0, 1)  # (G, B, columns): one sparse product sums over the neighbors in all states
        gap_x = gap_part[:, None] + self.gap_state(x)
        bin_x = bin_part[:, None] + self.bin_state(bins.transpose(0, 1))
        s = gap_x.relu()
        b = bin_x.relu()
        n, batch, w = gap_x.shape
        for _ in range(self.rounds):
            gap_means = (graph.bin_of_gap @ s.flatten(1)).view(-1, batch, w)
            b = (bin_x + self.to_bin(gap_means) + self.among(b.mean(0, keepdim=True))).relu()
            messages = torch.cat([neighbor_sum(s, edges) for edges in graph.edges], -1)
            s = (gap_x + self.to_gap((graph.gap_of_bin @ b.flatten(1)).view(n, batch, w)) + self.along(messages)).relu()
        plan_state = self.whole(torch.cat([s.mean(0), b.mean(0), plan], -1)).relu()
        z = (self.change_of_gap(s) + self.change_of_state(x) + change_part[:, None] + plan_state[None]).relu()
        return self.change(z).transpose(0, 1).reshape(batch, n * N_CHANGES, w), plan_state

    def score(self, h: Tensor, plan_state: Tensor, edits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns Q, effect and logit of an improvement, (B, M) each.

        Args:
            h, plan_state: from ``encode``.
            edits: (B, M, MAX_CHANGES) of gap * N_CHANGES + change, padded with -1. Q of edits without changes: MASKED.
        """
        is_change = edits >= 0
        change_index = edits.clamp(min=0).flatten(1)[:, :, None].expand(-1, -1, h.shape[2])
        changes = h.gather(1, change_index).view(*edits.shape, -1)
        u = (changes * is_change[..., None]).sum(2) + self.edit_of_whole(plan_state)[:, None]
        advantage, effect, improves = self.out(self.edit(u.relu()).relu()).unbind(-1)
        advantage = advantage + self.lift * improves.detach().sigmoid()
        valid = is_change[:, :, 0]
        mean = (advantage * valid).sum(1, keepdim=True) / valid.sum(1, keepdim=True).clamp(min=1)
        q = self.value(plan_state) + advantage - mean
        return q.masked_fill(~valid, MASKED), effect, improves

    def forward(
        self, graph: EditGraph, gaps: Tensor, bins: Tensor, plan: Tensor, edits: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Encodes states and scores edits; arguments and result as in ``encode`` and ``score``."""
        return self.score(*self.encode(graph, gaps, bins, plan, self.static_parts(graph)), edits)


@cache
def trained(path: Path) -> EditNet:
    """Returns the network of a file of weights (cached); raises FormatError if the file is invalid."""
    return read_weights(path, EditNet, "the DQN")
