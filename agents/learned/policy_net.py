"""Network of the policy: probabilities of each gap's eviction kinds (stays, swapped, recomputed, kept).

A plan takes the most likely kinds (``decode``) or samples them (``sample``); ``fit`` repairs plans that exceed the
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
from agents.learned.optimization import MASKED
from agents.planner import Rows
from simulator.compiled.encoding import rows_for
from simulator.compiled.engine import Engine
from simulator.compiled.jit import stage
from simulator.modes import Choice
from simulator.moves.gap_graph import BINS, UNDECIDED, Choices, GapGraph
from simulator.moves.plan_moves import add_between

KINDS = len(Choice)

Probabilities = NDArray[np.float32]  # (G, 4): probability of each eviction kind of each gap


@cache
def trained(path: Path) -> PolicyNet:
    """Returns the network of a file of weights (cached); raises FormatError if the file is invalid."""
    return read_weights(path, PolicyNet, "the policy")


def data_of(graph: GapGraph, decided: Choices) -> HeteroData:
    """Returns the network's input for a task with some gaps ``decided``."""
    gaps, bins = graph.state(decided)
    data = HeteroData()
    data["gap"].x = torch.cat([torch.from_numpy(graph.static), torch.from_numpy(gaps)], 1)
    data["gap"].cover = torch.from_numpy(graph.cover)
    data["gap"].allowed = torch.from_numpy(graph.allowed)
    data["bin"].x = torch.cat([torch.from_numpy(graph.bins), torch.from_numpy(bins)], 1)
    data["gap", "next", "gap"].edge_index = torch.from_numpy(graph.next)
    data["gap", "chain", "gap"].edge_index = torch.from_numpy(graph.chain)
    return data


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
        self.gap = _feed(features, width, width)
        self.bin = _feed(bin_features, width, width)
        self.rounds = Rounds(width, layers)
        self.out = nn.Sequential(nn.LayerNorm(width), _feed(width, width, KINDS))

    def encode(self, data: HeteroData) -> tuple[Tensor, Tensor]:
        """Returns the states of the gaps of all tasks (G, width) and of each task's bins (B, BINS, width)."""
        gaps = self.gap((data["gap"].x - self.mean) / self.scale)
        bins = self.bin(data["bin"].x)
        edges = data["gap", "next", "gap"].edge_index, data["gap", "chain", "gap"].edge_index
        task_index = data["gap"].batch if "batch" in data["gap"] else torch.zeros(len(gaps), dtype=torch.int64)
        cover, gap_mask = to_dense_batch(data["gap"].cover, task_index)  # (B, G', BINS)
        bins = bins.view(-1, BINS, bins.shape[-1])
        return self.rounds(gaps, bins, cover, gap_mask, task_index, edges)  # type: ignore[no-any-return]

    def forward(self, data: HeteroData) -> Tensor:
        """Returns logits (G, 4) of the gaps of all tasks, MASKED for kinds that a gap does not have."""
        logits: Tensor = self.out(self.encode(data)[0]).masked_fill(~data["gap"].allowed, MASKED)
        return logits


def _feed(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, outputs))


def _edge_messages(layers: nn.ModuleList, x: Tensor, edges: Sequence[Tensor]) -> Tensor:
    """Returns messages along and against the edges: one layer per direction, of the mean over neighbors."""
    messages = torch.zeros_like(x)
    for layer, (source, target) in zip(layers, [e for edge in edges for e in (edge, edge.flip(0))], strict=True):
        messages = messages + layer(scatter(x[target], source, dim=0, dim_size=len(x), reduce="mean"))
    return messages


class Rounds(nn.Module):
    """Rounds of structure2vec with shared weights: s = ReLU(own + Σ W · neighbors)."""

    def __init__(self, width: int, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds
        self.edges = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.to_bin, self.to_gap, self.among = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(
        self, gaps: Tensor, bins: Tensor, cover: Tensor, gap_mask: Tensor, task_index: Tensor, edges: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """Returns states of gaps and bins.

        Args:
            gaps: (G, width).
            bins: (B, BINS, width).
            cover: (B, G', BINS), share of a gap's time in a bin.
            gap_mask: bool (B, G'), padding mask.
            task_index: (G,), task of each gap.
            edges: edge indices (2, E).

        Returns:
            Floats of shapes (G, width) and (B, BINS, width).
        """
        s = gaps.relu()
        b = bins.relu()
        gap_weights = cover / cover.sum(2, keepdim=True).clamp(min=1e-6)
        bin_weights = (cover / cover.sum(1, keepdim=True).clamp(min=1.0)).transpose(1, 2)
        for _ in range(self.rounds):
            dense, _ = to_dense_batch(s, task_index)
            b = (bins + self.to_bin(bin_weights @ dense) + self.among(b.mean(1, keepdim=True))).relu()
            s = (gaps + self.to_gap(gap_weights @ b)[gap_mask] + _edge_messages(self.edges, s, edges)).relu()
        return s, b


# ------------------------------------------------------------------------------------------- decoding


@torch.no_grad()
def gap_probabilities(net: PolicyNet, graph: GapGraph, decided: Choices) -> Probabilities:
    """Returns the network's probabilities of all modes for each gap, given the ``decided`` modes.

    Returns:
        float32 (G, 4), each row summing to 1.
    """
    probabilities: Probabilities = net(batch_of([data_of(graph, decided)])).softmax(-1).numpy()
    return probabilities


def decode(net: PolicyNet, graph: GapGraph, rounds: int = 1) -> tuple[Choices, Probabilities, Probabilities]:
    """Returns the most likely kind of every gap, the initial probabilities, and those at each gap's decision."""
    decided = np.full(len(graph), UNDECIDED)
    initial = gap_probabilities(net, graph, decided)
    at_decision = initial.copy()
    for i in range(rounds):
        current = gap_probabilities(net, graph, decided) if i else initial
        undecided = np.flatnonzero(decided == UNDECIDED)
        surest = undecided[np.argsort(-current[undecided].max(1), kind="stable")[: -(-len(undecided) // (rounds - i))]]
        at_decision[surest] = current[surest]
        decided[surest] = current[surest].argmax(1)
    return decided, initial, at_decision


def sample(likely: Probabilities, rng: np.random.Generator) -> Choices:
    """Samples a kind for every gap independently."""
    kinds: Choices = (np.log(likely + 1e-30) + rng.gumbel(size=likely.shape)).argmax(1)
    return kinds


def fit(engine: Engine, graph: GapGraph, kinds: Choices, likely: Probabilities) -> Rows | None:
    """Returns rows of a plan near ``kinds`` that fits the limit, or None if repair fails or eight fits exceed it.

    While the load exceeds the limit, the open gap that is most likely evicted at the fullest kernel is emptied. Then
    gaps that need not be emptied are filled, those most likely to stay first. The memory of recomputation chains, which
    only the simulator knows, is subtracted from the limit, and the plan is fitted again.
    """
    fitted = kinds.copy()
    eviction = 1 - likely[:, Choice.RESIDENT]
    kind = likely[:, Choice.RESIDENT + 1 :].argmax(1) + 1
    order = np.argsort(eviction, kind="stable")
    room = np.full(graph.count, graph.limit, np.int64)
    for _ in range(8):  # a refit changes the chains, and so their memory
        load = graph.load(fitted > Choice.RESIDENT)
        if not _repair(
            fitted, kind, graph.allowed, eviction, order, graph.after, graph.before, graph.nbytes, load, room
        ):
            return None
        rows = rows_of_kinds(graph, fitted)
        chain_bytes = engine.residency(rows) - load  # memory of the chains
        if (load + chain_bytes <= graph.limit).all():
            return rows
        room = np.minimum(room, graph.limit - chain_bytes)
    return None


def rows_of_kinds(graph: GapGraph, kinds: Choices) -> Rows:
    """Returns int64[k, 6], a row for each gap that is not RESIDENT."""
    rows = np.empty((len(kinds), 6), np.int64)
    for kind in (Choice.SWAPPED, Choice.RECOMPUTED, Choice.CHAIN_KEPT):
        gaps = np.flatnonzero(kinds == kind)
        rows[gaps] = rows_for([graph.gaps[i] for i in gaps.tolist()], kind)
    return rows[kinds > Choice.RESIDENT]


@stage(entry=True)
def _repair(kinds, evict_kinds, allowed, evict_prob, order, after, before, nbytes, load, limits):
    """Repairs ``kinds`` (G,) to fit ``limits`` (K,); ``load`` (K,) is updated. Returns False if that is impossible."""
    n = load.shape[0]
    while True:
        worst = 0
        k = -1
        for j in range(n):
            if load[j] - limits[j] > worst:
                worst = load[j] - limits[j]
                k = j
        if k < 0:
            break
        best = -1
        for g in range(kinds.shape[0]):
            if kinds[g] != Choice.RESIDENT or not allowed[g, evict_kinds[g]]:
                continue
            is_open = after[g] < k < before[g] if after[g] < before[g] else k > after[g] or k < before[g]
            if is_open and (best < 0 or evict_prob[g] > evict_prob[best]):
                best = g
        if best < 0:
            return False
        kinds[best] = evict_kinds[best]
        add_between(load, after[best], before[best], -nbytes[best])
    for i in range(order.shape[0]):
        g = order[i]
        if kinds[g] == Choice.RESIDENT:
            continue
        k = after[g] + 1 if after[g] + 1 < n else 0
        fits = True
        while k != before[g] and fits:
            fits = load[k] + nbytes[g] <= limits[k]
            k = k + 1 if k + 1 < n else 0
        if fits:
            kinds[g] = Choice.RESIDENT
            add_between(load, after[g], before[g], nbytes[g])
    return True
