"""BERT (Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding", 2019).

Encoder blocks of Vaswani et al. (2017) with GELU and layer norm after each part; embeddings of words, positions and
segments; the masked language model (section 3.1), whose output shares the words' embeddings; Adam at 1e-4, its L2
weight decay 0.01 as AdamW's (appendix A.2). The defaults are BERT-base: 12 layers, width 768, 12 heads.

1. The loss is over all positions of a batch; the paper's is over the 15 % that are masked.
2. No next-sentence prediction, as in RoBERTa (2019), and no pooler.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.workloads.module import Parts, WorkloadError


class Bert(nn.Module):
    """Words ``[batch, length]`` to logits ``[batch · length, vocabulary]``."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int, dropout: float) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.segments = nn.Embedding(2, width)
        self.norm, self.dropout = nn.LayerNorm(width, 1e-12), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, dropout, "gelu", 1e-12, batch_first=True)
            for _ in range(layers)
        )
        self.transform = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width, 1e-12))
        self.bias = nn.Parameter(torch.zeros(vocabulary))

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.positions.weight + self.segments.weight[0]
        x = self.dropout(self.norm(x))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.transform(x), self.words.weight, self.bias).flatten(0, 1)


def build(
    *, layers: int = 12, width: int = 768, heads: int = 12, vocabulary: int = 30522, length: int = 512,
    batch_size: int = 16, dropout: float = 0.1,
) -> Parts:  # fmt: skip
    """``batch_size`` sequences of ``length`` words.

    Raises:
        WorkloadError: heads that do not divide the width, or a dropout outside [0, 1).
    """
    check(width, heads, dropout)
    model = Bert(layers, width, heads, vocabulary, length, dropout)
    batch = (
        torch.empty(batch_size, length, dtype=torch.int64),
        torch.empty(batch_size * length, dtype=torch.int64),
    )
    return model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01), batch


def check(width: int, heads: int, dropout: float) -> None:
    """What the encoder and the translator ask of their sizes; raises WorkloadError."""
    if width % heads:
        raise WorkloadError(f"workload.heads: expected a divisor of width ({width}), got {heads}")
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise WorkloadError(f"workload.dropout: expected a number in [0, 1), got {dropout!r}")
