"""GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019), Table 2.

Pre-norm blocks of causal attention and a GELU layer four times as wide, learned positions, dropout 0.1, the output's
weights those of the embedding. Attention itself runs in one fused kernel and without dropout, as is usual today.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.workloads.module import Parts, WorkloadError

# Layers, width, heads.
SIZES = {"small": (12, 768, 12), "medium": (24, 1024, 16), "large": (36, 1280, 20)}
VOCABULARY, CONTEXT = 50257, 1024


class Block(nn.Module):
    """Tokens ``[batch, length, width]`` to the same."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.dropout(self.project(y))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh")))


class GPT2(nn.Module):
    """Tokens ``[batch, length]`` to logits ``[batch · length, vocabulary]``."""

    def __init__(self, layers: int, width: int, heads: int, vocabulary: int = VOCABULARY, context: int = CONTEXT):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight).flatten(0, 1)


def build(*, size: str, batch_size: int = 8, length: int = CONTEXT) -> Parts:
    """``batch_size`` sequences of ``length`` tokens for one of SIZES, with AdamW.

    Raises:
        WorkloadError: no such size, or more tokens than positions.
    """
    if not isinstance(size, str) or size not in SIZES:
        raise WorkloadError(f"workload.size: gpt2 has {', '.join(SIZES)}, not {size!r}")
    if length > CONTEXT:
        raise WorkloadError(f"workload.length: gpt2 has {CONTEXT} positions, not {length}")
    model = GPT2(*SIZES[size])
    batch = (
        torch.empty(batch_size, length, dtype=torch.int64),
        torch.empty(batch_size * length, dtype=torch.int64),
    )
    return model, nn.CrossEntropyLoss(), torch.optim.AdamW(model.parameters(), lr=1e-4), batch
