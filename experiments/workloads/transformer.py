"""The Transformer (Vaswani et al., "Attention Is All You Need", 2017): encoder and decoder, for translation.

Section 3, the base model: six layers each, width 512, 8 heads, feed-forward layers of 2048, layer norm after each part,
sinusoidal positions; one embedding for both languages and the output, multiplied by √width on the way in (3.4); dropout
0.1, label smoothing 0.1 (5.4); Adam with β 0.9 and 0.98 (5.3).

1. Sentences have one length, without padding; the paper's batches have 25,000 words of sentences of similar lengths.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.workloads.bert import check
from experiments.workloads.module import Parts


class Translator(nn.Module):
    """Words ``[batch, 2, length]``, of both languages, to logits ``[batch · length, vocabulary]``."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int, length: int, dropout: float) -> None:
        super().__init__()
        self.scale = math.sqrt(width)
        self.words, self.dropout = nn.Embedding(vocabulary, width), nn.Dropout(dropout)
        self.layers = nn.Transformer(width, heads, layers, layers, 4 * width, dropout, batch_first=True)
        angles = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, width, 2) / width))
        self.positions: Tensor
        self.future: Tensor
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], -1).flatten(1)[:, :width])
        self.register_buffer("future", torch.ones(length, length, dtype=torch.bool).triu(1))

    def forward(self, words: Tensor) -> Tensor:
        source, target = self.dropout(self.words(words) * self.scale + self.positions).unbind(1)
        x = self.layers(source, target, tgt_mask=self.future, tgt_is_causal=True)
        return F.linear(x, self.words.weight).flatten(0, 1)


def build(
    *, layers: int = 6, width: int = 512, heads: int = 8, vocabulary: int = 37000, length: int = 128,
    batch_size: int = 64, dropout: float = 0.1,
) -> Parts:  # fmt: skip
    """``batch_size`` pairs of sentences of ``length`` words; raises WorkloadError as ``bert.check``."""
    check(width, heads, dropout)
    model = Translator(layers, width, heads, vocabulary, length, dropout)
    batch = (
        torch.empty(batch_size, 2, length, dtype=torch.int64),
        torch.empty(batch_size * length, dtype=torch.int64),
    )
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    return model, loss, torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-9), batch
