"""DenseNet121 (Huang et al., "Densely Connected Convolutional Networks", 2017, Table 1).

Growth rate 32; 6, 12, 24 and 16 layers of batch-norm, ReLU, 1x1 convolution to 128 channels, batch-norm, ReLU, 3x3
convolution to 32; between the blocks a transition that halves channels and image; 7,978,856 parameters at 1000
classes. Open or different (experiments/workloads/README.md):

1. Every layer concatenates all results before it, as torchvision's does without ``memory_efficient``.
2. On images of at most 64 px the stem is a 3x3 convolution of stride 1 without max-pool, as in CIFAR-10 collections.
3. ReLU keeps its input (``vgg.ReLU``), as in the frameworks of its time.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.workloads._images import SMALL, classifier
from experiments.workloads.module import Parts
from experiments.workloads.vgg import ReLU

LAYERS = (6, 12, 24, 16)
GROWTH = 32
STEM = 64


def convolution(channels: int, width: int, kernel: int) -> list[nn.Module]:
    """Batch-norm, ReLU, convolution."""
    conv = nn.Conv2d(channels, width, kernel, padding=kernel // 2, bias=False)
    return [nn.BatchNorm2d(channels), ReLU(), conv]


class Block(nn.ModuleList):
    """``[batch, channels, …]`` to ``[batch, channels + layers · 32, …]``."""

    def __init__(self, channels: int, layers: int) -> None:
        widths = range(channels, channels + layers * GROWTH, GROWTH)
        super().__init__(
            nn.Sequential(*convolution(width, 4 * GROWTH, 1), *convolution(4 * GROWTH, GROWTH, 3)) for width in widths
        )

    def forward(self, x: Tensor) -> Tensor:
        results = [x]
        for layer in self:
            results.append(layer(torch.cat(results, 1)))
        return torch.cat(results, 1)


class DenseNet(nn.Module):
    """Images ``[batch, 3, image, image]`` to logits ``[batch, classes]``."""

    def __init__(self, image: int = 224, classes: int = 1000) -> None:
        super().__init__()
        small = image <= SMALL
        kernel, stride = (3, 1) if small else (7, 2)
        layers: list[nn.Module] = [nn.Conv2d(3, STEM, kernel, stride, padding=kernel // 2, bias=False)]
        layers += [nn.BatchNorm2d(STEM), ReLU()]
        if not small:
            layers.append(nn.MaxPool2d(3, 2, padding=1))
        channels = STEM
        for block, count in enumerate(LAYERS):
            if block:
                layers += [*convolution(channels, channels // 2, 1), nn.AvgPool2d(2)]
                channels //= 2
            layers.append(Block(channels, count))
            channels += count * GROWTH
        layers += [nn.BatchNorm2d(channels), ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        self.layers = nn.Sequential(*layers, nn.Linear(channels, classes))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def build(*, batch_size: int = 32, image: int = 224, classes: int = 1000) -> Parts:
    """See ``_images.classifier``; at least 8 px, which three transitions leave one of."""
    return classifier(DenseNet(image, classes), batch_size, image, least=8)
