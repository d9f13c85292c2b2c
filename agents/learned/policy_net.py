"""The policy's network: for every gap of a task, how likely each way is (stays, swapped, recomputed, kept).

It reads a ``GapGraph`` (gap_graph.py), as torch_geometric's ``HeteroData``, so that a ``Batch`` mixes programs. Two
encoders. Gaps and bins of time only ever meet each other and the neighbours along edges, so that both are linear in the
number of gaps.

- ``attention``: the bins attend to the gaps, to each other, and the gaps to the bins (scaled dot products, one added
  term per head for the share of the bin that a gap covers), as in "Perceiver" (Jaegle et al., 2021): the bins are its
  latent array. Between, gaps add the mean of their neighbours. Pre-norm residual blocks.
- ``structure2vec``: equation 1 of the DQN paper (structure2vec.py) on the same graph: T rounds with the same weights,
  the neighbours of a gap along each kind of edge and the bins that it covers, weighted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch_geometric.data import Batch, HeteroData
from torch_geometric.utils import scatter, to_dense_batch

from agents.learned.gap_graph import BINS, Choices, GapGraph
from agents.learned.optimisation import MASKED
from agents.learned.training_state import read_weights
from simulator.modes import KEPT

ENCODERS = ("attention", "structure2vec")
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
        layers: blocks of the attention, or rounds of structure2vec.
        encoder: one of ENCODERS.
    """

    mean: Tensor
    scale: Tensor

    def __init__(
        self, features: int, bin_features: int, width: int = 64, layers: int = 3, encoder: str = "structure2vec",
        heads: int = 4,
    ) -> None:  # fmt: skip
        super().__init__()
        if encoder not in ENCODERS:
            raise ValueError(f"encoder: expected {' or '.join(ENCODERS)}, got {encoder!r}")
        self.settings = {"features": features, "bin_features": bin_features, "width": width, "layers": layers,
                         "encoder": encoder, "heads": heads}  # fmt: skip
        self.register_buffer("mean", torch.zeros(features))
        self.register_buffer("scale", torch.ones(features))
        self.gap, self.bin = _feed(features, width, width), _feed(bin_features, width, width)
        attends = encoder == "attention"
        self.blocks = (
            nn.ModuleList(AttentionBlock(width, heads) for _ in range(layers))
            if attends
            else nn.ModuleList([Rounds(width, layers)])
        )
        self.out = nn.Sequential(nn.LayerNorm(width), _feed(width, width, WAYS))

    def encode(self, data: HeteroData) -> tuple[Tensor, Tensor]:
        """States of the gaps of all tasks (G, width), and of each task's bins (B, BINS, width)."""
        gaps = self.gap((data["gap"].x - self.mean) / self.scale)
        bins = self.bin(data["bin"].x)
        edges = data["gap", "next", "gap"].edge_index, data["gap", "chain", "gap"].edge_index
        of = data["gap"].batch if "batch" in data["gap"] else torch.zeros(len(gaps), dtype=torch.int64)
        cover, there = to_dense_batch(data["gap"].cover, of)  # (B, G', BINS)
        bins = bins.view(-1, BINS, bins.shape[-1])
        for block in self.blocks:
            gaps, bins = block(gaps, bins, cover, there, of, edges)
        return gaps, bins

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


class Attention(nn.Module):
    """Attention of queries (B, Q, width) to others (B, K, width), with a term per head of ``cover`` (B, Q, K)."""

    def __init__(self, width: int, heads: int, covers: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.other_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.kv, self.o = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.weight = nn.Parameter(torch.linspace(0.0, 3.0, heads)) if covers else None
        nn.init.zeros_(self.o.weight)

    def forward(self, x: Tensor, others: Tensor, cover: Tensor | None = None, there: Tensor | None = None) -> Tensor:
        """``there`` (B, K): which of the others are no padding."""
        q = self.q(self.norm(x)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.kv(self.other_norm(others)).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(2, -1)
        bias = None
        if cover is not None and self.weight is not None:
            bias = self.weight[:, None, None] * cover[:, None]
        if there is not None:
            hidden = torch.zeros(there.shape).masked_fill(~there, MASKED)[:, None, None]
            bias = hidden if bias is None else bias + hidden
        y: Tensor = self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))
        return x + y


class AttentionBlock(nn.Module):
    """One layer of the attention encoder."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.gather, self.among = Attention(width, heads, True), Attention(width, heads, False)
        self.tell = Attention(width, heads, True)
        self.norm = nn.LayerNorm(width)
        self.edges = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(4))
        self.feeds = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), _feed(width, 2 * width, width)) for _ in range(2))
        for weight in self.edges.parameters():
            nn.init.zeros_(weight)

    def forward(
        self, gaps: Tensor, bins: Tensor, cover: Tensor, there: Tensor, of: Tensor, edges: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """gaps (G, width), bins (B, BINS, width), cover (B, G', BINS); ``of`` (G,): the task of each gap."""
        dense, _ = to_dense_batch(gaps, of)
        bins = self.gather(bins, dense, cover.transpose(1, 2), there)
        bins = self.among(bins, bins)
        bins = bins + self.feeds[0](bins)
        gaps = self.tell(dense, bins, cover)[there]
        gaps = gaps + _along(self.edges, self.norm(gaps), edges)
        return gaps + self.feeds[1](gaps), bins


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
        """As ``AttentionBlock``."""
        s, b = gaps.relu(), bins.relu()
        of_gap = cover / cover.sum(2, keepdim=True).clamp(min=1e-6)
        of_bin = (cover / cover.sum(1, keepdim=True).clamp(min=1.0)).transpose(1, 2)
        for _ in range(self.rounds):
            dense, _ = to_dense_batch(s, of)
            b = (bins + self.to_bin(of_bin @ dense) + self.among(b.mean(1, keepdim=True))).relu()
            s = (gaps + self.to_gap(of_gap @ b)[there] + _along(self.edges, s, edges)).relu()
        return s, b
