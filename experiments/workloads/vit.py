"""The Vision Transformer (Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021), Table 1.

Section 3.1: patches of 16 px and a class token, learned positions, pre-norm blocks of attention and a GELU layer four
times as wide, LayerNorm and a linear layer on the class token at the end. Dropout 0.1 "after every dense layer except
for the qkv-projections and directly after adding positional- to patch embeddings" (appendix B.1; Table 3 has 0.1 for
ImageNet and ImageNet-21k, 0 for ViT-L/16 on JFT-300M). Adam with high weight decay (section 4.1): AdamW here. Attention
itself runs in one fused kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.workloads.module import Parts, WorkloadError

# Layers, width, heads.
SIZES = {"base": (12, 768, 12), "large": (24, 1024, 16), "huge": (32, 1280, 16)}


def dropout(rate: float) -> nn.Module:
    """Dropout, or nothing: a rate of 0 would still draw."""
    return nn.Dropout(rate) if rate else nn.Identity()


class Block(nn.Module):
    """Patches ``[batch, length, width]`` to the same."""

    def __init__(self, width: int, heads: int, rate: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, 1e-6), nn.LayerNorm(width, 1e-6)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.project(y))
        out: Tensor = x + self.dropout(self.down(self.dropout(F.gelu(self.up(self.norm2(x))))))
        return out


class ViT(nn.Module):
    """Images ``[batch, 3, image, image]`` to logits ``[batch, classes]``."""

    def __init__(self, layers: int, width: int, heads: int, patch: int, image: int, classes: int, rate: float) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, width))
        self.dropout = dropout(rate)
        self.blocks = nn.Sequential(*(Block(width, heads, rate) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width, 1e-6), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1)
        x = self.blocks(self.dropout(x + self.positions))
        logits: Tensor = self.head(self.norm(x[:, 0]))
        return logits


def build(
    *, size: str, batch_size: int = 256, image: int = 224, patch: int = 16, classes: int = 1000,
    layers: int | None = None, dropout: float = 0.1,
) -> Parts:  # fmt: skip
    """``batch_size`` images of ``image`` px for one of SIZES; ``layers`` None: all that it has.

    Raises:
        WorkloadError: no such size; patches that do not divide the image; no number of layers; no rate of dropout.
    """
    if not isinstance(size, str) or size not in SIZES:
        raise WorkloadError(f"workload.size: vit has {', '.join(SIZES)}, not {size!r}")
    if image % patch:
        raise WorkloadError(f"workload.patch: expected a divisor of image ({image}), got {patch}")
    if layers is not None and (isinstance(layers, bool) or not isinstance(layers, int) or layers < 1):
        raise WorkloadError(f"workload.layers: expected a positive integer, got {layers!r}")
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise WorkloadError(f"workload.dropout: expected a number in [0, 1), got {dropout!r}")
    depth, width, heads = SIZES[size]
    model = ViT(layers or depth, width, heads, patch, image, classes, dropout)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    batch = torch.empty(batch_size, 3, image, image), torch.empty(batch_size, dtype=torch.int64)
    return model, nn.CrossEntropyLoss(), optimizer, batch
