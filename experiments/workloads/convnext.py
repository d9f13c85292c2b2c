"""ConvNeXt (Liu et al., "A ConvNet for the 2020s", 2022), as in torchvision.

A 4x4 stem, four stages of blocks (7x7 depthwise convolution, layer norm, two linear layers with GELU, a learned scale,
stochastic depth), and 2x2 convolutions of stride 2 between stages. Parameters for 1000 classes, as torchvision
documents them: 28,589,128 (tiny), 50,223,688 (small), 88,591,464 (base).

Stochastic depth scales each sample's branch by a random factor, so the kernels do not depend on the draw.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.workloads._shared import Layers, classifier, one_of
from experiments.workloads.module import Parts

# Blocks per stage, width of the first stage (it doubles), drop probability of the last block's branch.
SIZES = {"tiny": ((3, 3, 9, 3), 96, 0.1), "small": ((3, 3, 27, 3), 96, 0.4), "base": ((3, 3, 27, 3), 128, 0.5)}


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of ``[batch, channels, height, width]``."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return y.permute(0, 3, 1, 2)


class Block(nn.Module):
    """Residual block on ``[batch, width, height, width]``."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.scale, self.drop = nn.Parameter(torch.full((width, 1, 1), 1e-6)), drop

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale * self.mlp(self.depthwise(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if self.training and self.drop:
            keep = y.new_empty(y.shape[0], 1, 1, 1).bernoulli_(1 - self.drop)
            y = y * keep.div_(1 - self.drop)
        y += x
        return y


def convnext(*, size: str = "tiny", batch_size: int = 32, image: int = 224, classes: int = 1000) -> Parts:
    """Returns a ConvNeXt of one of SIZES, for images of at least 32 px; see ``_shared.classifier``."""
    counts, width, drop = one_of(SIZES, size, "size", "convnext")
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 4), ChannelNorm(width, eps=1e-6)]
    done = 0
    for stage, count in enumerate(counts):
        if stage:
            layers += [ChannelNorm(width, eps=1e-6), nn.Conv2d(width, 2 * width, 2, 2)]
            width *= 2
        for _ in range(count):
            layers.append(Block(width, drop * done / (sum(counts) - 1)))
            done += 1
    layers += [nn.AdaptiveAvgPool2d(1), ChannelNorm(width, eps=1e-6), nn.Flatten(), nn.Linear(width, classes)]
    return classifier(Layers(*layers), batch_size, image, least=32)
