"""FC-DenseNet (Jégou et al., "The One Hundred Layers Tiramisu", CVPR Workshops 2017): a DenseNet for segmentation.

Section 3 and Table 2: a 3x3 convolution to 48 channels; on the way down dense blocks of batch-norm, ReLU, 3x3
convolution and dropout 0.2, each followed by a transition (the same with a 1x1 convolution, and 2x2 max-pool); on the
way up a transposed 3x3 convolution of stride 2 of what the block before has added, the concatenation with the result of
the block on the way down, and a dense block; at the end a 1x1 convolution to the classes. RMSprop at 1e-3 with weight
decay 1e-4 (section 4.1). 56, 67 and 103 layers have 1.5, 3.5 and 9.4 million parameters (Table 3).

1. ``stages`` has the layers of the blocks down to the bottleneck; on the way up they are as many, in reverse.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn

from experiments.workloads.module import Parts, WorkloadError
from experiments.workloads.vgg import Dropout

STEM = 48


def convolution(channels: int, width: int, kernel: int) -> nn.Sequential:
    """Batch-norm, ReLU, convolution, dropout."""
    conv = nn.Conv2d(channels, width, kernel, padding=kernel // 2)
    return nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), conv, Dropout(0.2))


class Block(nn.ModuleList):
    """``[batch, channels, …]`` to the same with ``layers · growth`` channels more, and to those alone."""

    def __init__(self, channels: int, layers: int, growth: int) -> None:
        super().__init__(convolution(channels + i * growth, growth, 3) for i in range(layers))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        new = []
        for layer in self:
            new.append(layer(x))
            x = torch.cat([x, new[-1]], 1)
        return x, torch.cat(new, 1)


class FCDenseNet(nn.Module):
    """Images ``[batch, 3, image, image]`` to logits ``[batch, classes, image, image]``."""

    def __init__(self, stages: tuple[int, ...], growth: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, STEM, 3, padding=1)
        self.down, self.shrink, self.grow, self.up = (nn.ModuleList() for _ in range(4))
        channels, skips = STEM, []
        for layers in stages[:-1]:
            self.down.append(Block(channels, layers, growth))
            channels += layers * growth
            skips.append(channels)
            self.shrink.append(nn.Sequential(convolution(channels, channels, 1), nn.MaxPool2d(2)))
        self.bottleneck = Block(channels, stages[-1], growth)
        below = stages[-1]
        for layers, skip in zip(stages[-2::-1], skips[::-1], strict=True):
            added = below * growth
            self.grow.append(nn.ConvTranspose2d(added, added, 3, stride=2, padding=1, output_padding=1))
            self.up.append(Block(added + skip, layers, growth))
            channels, below = added + skip + layers * growth, layers
        self.classify = nn.Conv2d(channels, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        x, skips = self.stem(images), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x, _ = block(x)
            skips.append(x)
            x = shrink(x)
        x, new = self.bottleneck(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x, new = block(torch.cat([grow(new), skips.pop()], 1))
        logits: Tensor = self.classify(x)
        return logits


def build(*, stages: str, growth: int = 16, batch_size: int = 3, image: int = 224, classes: int = 11) -> Parts:
    """Images with a class for every pixel.

    Args:
        stages: the layers of the blocks down to the bottleneck, as in "4-5-7-10-12-15".

    Raises:
        WorkloadError: ``stages`` are no such numbers, or a side that the pools do not halve.
    """
    if not re.fullmatch(r"[1-9]\d*(-[1-9]\d*)+", str(stages)):
        raise WorkloadError(f"workload.stages: expected numbers of layers as in '4-5-7-10-12-15', got {stages!r}")
    layers = tuple(map(int, stages.split("-")))
    if image % 2 ** (len(layers) - 1):
        raise WorkloadError(f"workload.image: expected a multiple of {2 ** (len(layers) - 1)}, got {image}")
    model = FCDenseNet(layers, growth, classes)
    batch = torch.empty(batch_size, 3, image, image), torch.empty(batch_size, image, image, dtype=torch.int64)
    return model, nn.CrossEntropyLoss(), torch.optim.RMSprop(model.parameters(), lr=1e-3, weight_decay=1e-4), batch
