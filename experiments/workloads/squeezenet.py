"""SqueezeNet 1.0 (Iandola et al., "SqueezeNet: AlexNet-level accuracy with 50x fewer parameters and <0.5MB model
size", 2016, Table 1): a convolution to 96 channels, eight fire modules, a 1x1 convolution to the classes, average
pooling.

1.25 M parameters (1,248,424) at 224 px and 1000 classes. Open or different (experiments/workloads/README.md):

1. On images of at most 64 px it is the form of the usual PyTorch collections for CIFAR-10.
2. ReLU keeps its input (``vgg.ReLU``), as PyTorch's ``nn.ReLU()`` did until 2021 (mobilenet.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.workloads._images import SMALL, classifier
from experiments.workloads.module import Parts
from experiments.workloads.vgg import Dropout, ReLU

# Width of each fire module; 0 for a max-pool.
FIRES = (128, 128, 256, 0, 256, 384, 384, 512, 0, 512)


def convolution(channels: int, width: int, kernel: int, norm: bool) -> list[nn.Module]:
    """Convolution, batch-norm if asked for, ReLU."""
    conv = nn.Conv2d(channels, width, kernel, padding=kernel // 2)
    return [conv, nn.BatchNorm2d(width), ReLU()] if norm else [conv, ReLU()]


class Fire(nn.Module):
    """1x1 convolution to an eighth of ``width``; from there 1x1 and 3x3 ones to half of it each; maybe a bypass."""

    def __init__(self, channels: int, width: int, norm: bool, bypass: bool) -> None:
        super().__init__()
        self.squeeze = nn.Sequential(*convolution(channels, width // 8, 1, norm))
        self.expand1 = nn.Sequential(*convolution(width // 8, width // 2, 1, norm))
        self.expand3 = nn.Sequential(*convolution(width // 8, width // 2, 3, norm))
        self.bypass = bypass

    def forward(self, x: Tensor) -> Tensor:
        squeezed = self.squeeze(x)
        y = torch.cat([self.expand1(squeezed), self.expand3(squeezed)], 1)
        return y + x if self.bypass else y


class SqueezeNet(nn.Module):
    """Images ``[batch, 3, image, image]`` to logits ``[batch, classes]``."""

    def __init__(self, image: int = 32, classes: int = 10) -> None:
        super().__init__()
        small = image <= SMALL
        pool = nn.MaxPool2d(2) if small else nn.MaxPool2d(3, 2, ceil_mode=True)
        layers = convolution(3, 96, 3, True) if small else [nn.Conv2d(3, 96, 7, 2), ReLU()]
        layers.append(pool)
        channels = 96
        for width in FIRES:
            layers.append(Fire(channels, width, small, bypass=small and channels == width) if width else pool)
            channels = width or channels
        classify = nn.Conv2d(channels, classes, 1)
        layers += [classify] if small else [Dropout(0.5), classify, ReLU()]
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def build(*, batch_size: int = 128, image: int = 32, classes: int = 10) -> Parts:
    """See ``_images.classifier``; at least 8 px, which three pools leave one of."""
    return classifier(SqueezeNet(image, classes), batch_size, image, least=8)
