"""Network of the policy: probabilities of each gap's eviction kinds (stays, swapped, recomputed, kept).

A plan takes the most likely kinds (``decode``) or samples them (``drawn``); ``fitted`` repairs plans that exceed the
limit by the same probabilities. With several rounds, each decides the gaps with the highest confidence, and the next
reads these decisions, as in "MaskGIT" (Chang et al., 2022).

The input is a ``GapGraph`` (gap_graph.py) as torch_geometric's ``HeteroData``, so a ``Batch`` can mix programs. The
encoder is structure2vec (equation 1 of the DQN paper): rounds with shared weights over a gap's neighbors along each
kind of edge and the bins of time that it covers. Its cost is linear in the number of gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch_geometric.data import Batch, HeteroData
from torch_geometric.utils import scatter, to_dense_batch

from agents.learned.checkpoint import read_weights
from agents.learned.optimisation import MASKED
from agents.planner import Rows
from simulator.compiled.encoding import rows_for
from simulator.compiled.engine import Engine
from simulator.compiled.jit import stage
from simulator.modes import KEPT, RECOMPUTED, STAYS, SWAPPED
from simulator.moves.gap_graph import BINS, UNDECIDED, Choices, GapGraph
from simulator.moves.plan_moves import add_between

WAYS = KEPT + 1
TINY = 1e-30
MENDS = 8  # maximum refits of a plan to the memory of its recomputation chains

Chances = NDArray[np.float32]  # (G, 4): probability of each eviction kind of each gap


@cache
def trained(path: Path) -> PolicyNet:
    """Returns the network of a file of weights (cached); raises FormatError if the file is invalid."""
    return read_weights(path, PolicyNet, "the policy")


def data_of(graph: GapGraph, decided: Choices) -> HeteroData:
    """Returns the network's input for a task with some gaps ``decided``."""
    gaps, bins = graph.state(decided)
    out = HeteroData()
    out["gap"].x = torch.cat([torch.from_numpy(graph.static), torch.from_numpy(gaps)], 1)
    out["gap"].cover = torch.from_numpy(graph.cover)
    out["gap"].ways = torch.from_numpy(graph.ways)
    out["bin"].x = torch.cat([torch.from_numpy(graph.bins), torch.from_numpy(bins)], 1)
    out["gap", "next", "gap"].edge_index = torch.from_numpy(graph.next)
    out["gap", "chain", "gap"].edge_index = torch.from_numpy(graph.chain)
    return out


def batch_of(data: Sequence[HeteroData]) -> HeteroData:
    """Returns several tasks as one graph."""
    return Batch.from_data_list(list(data))


class PolicyNet(nn.Module):
    """Network that outputs logits of every gap's eviction kinds.

    Args:
        features, bin_features: number of columns of a gap and of a bin.
        width: width of all hidden layers.
        layers: rounds of structure2vec.
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, features: int, bin_features: int, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.settings = {"features": features, "bin_features": bin_features, "width": width, "layers": layers}
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))
        self.gap, self.bin = _feed(features, width, width), _feed(bin_features, width, width)
        self.rounds = Rounds(width, layers)
        self.out = nn.Sequential(nn.LayerNorm(width), _feed(width, width, WAYS))

    def encode(self, data: HeteroData) -> tuple[Tensor, Tensor]:
        """Returns the states of the gaps of all tasks (G, width) and of each task's bins (B, BINS, width)."""
        gaps = self.gap((data["gap"].x - self.mean) / self.scale)
        bins = self.bin(data["bin"].x)
        edges = data["gap", "next", "gap"].edge_index, data["gap", "chain", "gap"].edge_index
        of = data["gap"].batch if "batch" in data["gap"] else torch.zeros(len(gaps), dtype=torch.int64)
        cover, there = to_dense_batch(data["gap"].cover, of)  # (B, G', BINS)
        bins = bins.view(-1, BINS, bins.shape[-1])
        return self.rounds(gaps, bins, cover, there, of, edges)  # type: ignore[no-any-return]

    def forward(self, data: HeteroData) -> Tensor:
        """Returns logits (G, 4) of the gaps of all tasks, MASKED for kinds that a gap does not have."""
        logits: Tensor = self.out(self.encode(data)[0]).masked_fill(~data["gap"].ways, MASKED)
        return logits


def _feed(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, outputs))


def _along(layers: nn.ModuleList, x: Tensor, edges: Sequence[Tensor]) -> Tensor:
    """Returns messages along and against the edges: one layer per direction, of the mean over neighbors."""
    out = torch.zeros_like(x)
    for layer, (source, target) in zip(layers, [e for edge in edges for e in (edge, edge.flip(0))], strict=True):
        out = out + layer(scatter(x[target], source, dim=0, dim_size=len(x), reduce="mean"))
    return out


class Rounds(nn.Module):
    """Rounds of structure2vec with shared weights: s = ReLU(own + Σ W · neighbors)."""

    def __init__(self, width: int, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds
        self.edges = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.to_bin, self.to_gap, self.among = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(
        self, gaps: Tensor, bins: Tensor, cover: Tensor, there: Tensor, of: Tensor, edges: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Returns states of gaps and bins.

        Args:
            gaps: (G, width).
            bins: (B, BINS, width).
            cover: (B, G', BINS), share of a gap's time in a bin.
            there: bool (B, G'), padding mask.
            of: (G,), task of each gap.
            edges: edge indices (2, E).
        """
        s, b = gaps.relu(), bins.relu()
        of_gap = cover / cover.sum(2, keepdim=True).clamp(min=1e-6)
        of_bin = (cover / cover.sum(1, keepdim=True).clamp(min=1.0)).transpose(1, 2)
        for _ in range(self.rounds):
            dense, _ = to_dense_batch(s, of)
            b = (bins + self.to_bin(of_bin @ dense) + self.among(b.mean(1, keepdim=True))).relu()
            s = (gaps + self.to_gap(of_gap @ b)[there] + _along(self.edges, s, edges)).relu()
        return s, b


# ------------------------------------------------------------------------------------------- decoding


@torch.no_grad()
def chances(net: PolicyNet, graph: GapGraph, decided: Choices) -> Chances:
    """Returns the network's probabilities of all modes for each gap, given the ``decided`` modes."""
    found: Chances = net(batch_of([data_of(graph, decided)])).softmax(-1).numpy()
    return found


def decode(net: PolicyNet, graph: GapGraph, rounds: int = 1) -> tuple[Choices, Chances, Chances]:
    """Returns the most likely kind of every gap, the initial probabilities, and those at each gap's decision."""
    decided = np.full(len(graph), UNDECIDED)
    first = chances(net, graph, decided)
    said = first.copy()
    for i in range(rounds):
        now = chances(net, graph, decided) if i else first
        left = np.flatnonzero(decided == UNDECIDED)
        surest = left[np.argsort(-now[left].max(1), kind="stable")[: -(-len(left) // (rounds - i))]]
        said[surest] = now[surest]
        decided[surest] = now[surest].argmax(1)
    return decided, first, said


def drawn(likely: Chances, rng: np.random.Generator) -> Choices:
    """Samples a kind for every gap independently."""
    ways: Choices = (np.log(likely + TINY) + rng.gumbel(size=likely.shape)).argmax(1)
    return ways


def fitted(engine: Engine, graph: GapGraph, ways: Choices, likely: Chances) -> Rows | None:
    """Returns rows of a plan near ``ways`` that fits the limit, or None if repair fails.

    While the load exceeds the limit, the open gap that is most likely evicted at the fullest kernel is emptied. Then
    gaps that need not be emptied are filled, those most likely to stay first. The memory of recomputation chains, which
    only the simulator knows, is subtracted from the limit, and the plan is fitted again.
    """
    chosen = ways.copy()
    away = 1 - likely[:, STAYS]
    other = likely[:, STAYS + 1 :].argmax(1) + 1
    order = np.argsort(away, kind="stable")
    room = np.full(graph.count, graph.limit, np.int64)
    for _ in range(MENDS):
        load = graph.load(chosen > STAYS)
        if not _fit(chosen, other, graph.ways, away, order, graph.after, graph.before, graph.nbytes, load, room):
            return None
        rows = rows_of_ways(graph, chosen)
        over = engine.residency(rows) - load  # memory of the chains
        if (load + over <= graph.limit).all():
            return rows
        room = np.minimum(room, graph.limit - over)
    return None


def rows_of_ways(graph: GapGraph, ways: Choices) -> Rows:
    """Returns int64[k, 6], a row for each gap whose mode is not STAYS."""
    out = np.empty((len(ways), 6), np.int64)
    for way in (SWAPPED, RECOMPUTED, KEPT):
        chosen = np.flatnonzero(ways == way)
        out[chosen] = rows_for([graph.gaps[i] for i in chosen.tolist()], way)
    return out[ways > STAYS]


@stage(entry=True)
def _fit(chosen, other, ways, away, order, after, before, nbytes, load, room):
    """Repairs ``chosen`` (G,) to fit ``room`` (K,); ``load`` (K,) is updated. Returns False if that is impossible."""
    n = load.shape[0]
    while True:
        worst, k = 0, -1
        for j in range(n):
            if load[j] - room[j] > worst:
                worst, k = load[j] - room[j], j
        if k < 0:
            break
        best = -1
        for g in range(chosen.shape[0]):
            if chosen[g] != STAYS or not ways[g, other[g]]:
                continue
            inside = after[g] < k < before[g] if after[g] < before[g] else k > after[g] or k < before[g]
            if inside and (best < 0 or away[g] > away[best]):
                best = g
        if best < 0:
            return False
        chosen[best] = other[best]
        add_between(load, after[best], before[best], -nbytes[best])
    for i in range(order.shape[0]):
        g = order[i]
        if chosen[g] == STAYS:
            continue
        k, fits = after[g] + 1 if after[g] + 1 < n else 0, True
        while k != before[g] and fits:
            fits = load[k] + nbytes[g] <= room[k]
            k = k + 1 if k + 1 < n else 0
        if fits:
            chosen[g] = STAYS
            add_between(load, after[g], before[g], nbytes[g])
    return True
