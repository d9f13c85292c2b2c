"""The policy's network: for every gap of a task, how likely each way is (stays, swapped, recomputed, kept).

It reads a ``GapGraph`` (gap_graph.py), as torch_geometric's ``HeteroData``, so that a ``Batch`` mixes programs. The
encoder is structure2vec, equation 1 of the DQN paper (structure2vec.py): T rounds with the same weights over the
neighbours of a gap along each kind of edge and the bins of time that it covers, weighted. Gaps and bins only meet each
other and neighbours along edges, so that it is linear in the number of gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch_geometric.data import Batch, HeteroData
from torch_geometric.utils import scatter, to_dense_batch

from agents.learned.optimisation import MASKED
from agents.learned.training_state import read_weights
from simulator.modes import KEPT
from simulator.moves.gap_graph import BINS, Choices, GapGraph

WAYS = KEPT + 1


@cache
def trained(path: Path) -> PolicyNet:
    """The network of a file of weights, read once; raises FormatError where it is none."""
    return read_weights(path, PolicyNet, "the policy")


def data_of(graph: GapGraph, decided: Choices) -> HeteroData:
    """What the network reads of a task of which some gaps are ``decided``."""
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
    """Several tasks as one graph."""
    return Batch.from_data_list(list(data))


class PolicyNet(nn.Module):
    """Logits of every gap's ways.

    Args:
        features, bin_features: columns of a gap and of a bin.
        width: of all hidden layers.
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
        """States of the gaps of all tasks (G, width), and of each task's bins (B, BINS, width)."""
        gaps = self.gap((data["gap"].x - self.mean) / self.scale)
        bins = self.bin(data["bin"].x)
        edges = data["gap", "next", "gap"].edge_index, data["gap", "chain", "gap"].edge_index
        of = data["gap"].batch if "batch" in data["gap"] else torch.zeros(len(gaps), dtype=torch.int64)
        cover, there = to_dense_batch(data["gap"].cover, of)  # (B, G', BINS)
        bins = bins.view(-1, BINS, bins.shape[-1])
        return self.rounds(gaps, bins, cover, there, of, edges)  # type: ignore[no-any-return]

    def forward(self, data: HeteroData) -> Tensor:
        """(G, 4) over the gaps of all tasks; MASKED where a gap does not have the way."""
        logits: Tensor = self.out(self.encode(data)[0]).masked_fill(~data["gap"].ways, MASKED)
        return logits


def _feed(inputs: int, width: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.GELU(), nn.Linear(width, outputs))


def _along(layers: nn.ModuleList, x: Tensor, edges: Sequence[Tensor]) -> Tensor:
    """What each gap hears along the edges and against them: a layer each, of the mean over its neighbours."""
    out = torch.zeros_like(x)
    for layer, (source, target) in zip(layers, [e for edge in edges for e in (edge, edge.flip(0))], strict=True):
        out = out + layer(scatter(x[target], source, dim=0, dim_size=len(x), reduce="mean"))
    return out


class Rounds(nn.Module):
    """structure2vec: s = ReLU(own + Σ W · neighbours), in rounds with the same weights."""

    def __init__(self, width: int, rounds: int) -> None:
        super().__init__()
        self.rounds = rounds
        self.edges = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.to_bin, self.to_gap, self.among = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(
        self, gaps: Tensor, bins: Tensor, cover: Tensor, there: Tensor, of: Tensor, edges: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """gaps (G, width), bins (B, BINS, width), cover (B, G', BINS); ``of`` (G,): the task of each gap."""
        s, b = gaps.relu(), bins.relu()
        of_gap = cover / cover.sum(2, keepdim=True).clamp(min=1e-6)
        of_bin = (cover / cover.sum(1, keepdim=True).clamp(min=1.0)).transpose(1, 2)
        for _ in range(self.rounds):
            dense, _ = to_dense_batch(s, of)
            b = (bins + self.to_bin(of_bin @ dense) + self.among(b.mean(1, keepdim=True))).relu()
            s = (gaps + self.to_gap(of_gap @ b)[there] + _along(self.edges, s, edges)).relu()
        return s, b
