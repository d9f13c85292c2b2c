"""Plain and residual networks for CIFAR-10 (He et al., "Deep Residual Learning for Image Recognition", 2016, 4.2).

A 3x3 convolution to ``width`` channels, then stages of blocks of two 3x3 convolutions, each with batch-norm and ReLU;
every stage but the first halves the image and doubles the width; then average pooling and a linear layer. He's plain
network of depth 6n + 2 is ``stages`` n-n-n of ``width`` 16: ``3-3-3`` has 20 layers and 0.27 M parameters (Table 6).
A shortcut whose shape changes is a 1x1 convolution with batch-norm, as in CIFAR-10 collections and in He's option B; on
CIFAR-10 He uses option A, without parameters.

Inferred for HOME (2022), whose text gives neither widths nor depth (experiments/workloads/README.md):

1. Plain20 is four times as wide as He's: 64-128-256.
2. ResNet is ResNet18 as in the usual PyTorch collections for CIFAR-10: ``2-2-2-2`` of width 64 with shortcuts.
3. ReLU keeps its input (``vgg.ReLU``), as PyTorch's ``nn.ReLU()`` did until 2021 (mobilenet.py).
"""

from __future__ import annotations

import re

from torch import Tensor, nn

from experiments.workloads._images import classifier
from experiments.workloads.module import Parts, WorkloadError
from experiments.workloads.vgg import ReLU


class Block(nn.Module):
    """Two batch-normed 3x3 convolutions, plus the shortcut if ``residual``; ReLU after the first and at the end."""

    def __init__(self, channels: int, width: int, stride: int, residual: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride, padding=1, bias=False), nn.BatchNorm2d(width), ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        self.shortcut: nn.Module | None = None
        if residual:
            same = stride == 1 and channels == width
            conv = nn.Conv2d(channels, width, 1, stride, bias=False)
            self.shortcut = nn.Identity() if same else nn.Sequential(conv, nn.BatchNorm2d(width))
        self.relu = ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        if self.shortcut is not None:
            y += self.shortcut(x)  # in place: batch-norm does not need its result
        y = self.relu(y)
        return y


class Plain(nn.Module):
    """Images ``[batch, 3, image, image]`` to logits ``[batch, classes]``, with ``stages`` blocks per stage."""

    def __init__(self, stages: tuple[int, ...], width: int, residual: bool = False, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), ReLU()]
        channels = width
        for stage, count in enumerate(stages):
            for i in range(count):
                layers.append(Block(channels, width << stage, 2 if stage and not i else 1, residual))
                channels = width << stage
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def build(
    *, stages: str, width: int = 16, residual: bool = False, batch_size: int = 128, image: int = 32, classes: int = 10
) -> Parts:
    """See ``_images.classifier``.

    Args:
        stages: the blocks of every stage, as in "3-3-3".
    """
    if not re.fullmatch(r"[1-9]\d*(-[1-9]\d*)*", str(stages)):
        raise WorkloadError(f"workload.stages: expected numbers of blocks as in '3-3-3', got {stages!r}")
    if not isinstance(residual, bool):
        raise WorkloadError(f"workload.residual: expected true or false, got {residual!r}")
    model = Plain(tuple(map(int, str(stages).split("-"))), width, residual, classes)
    return classifier(model, batch_size, image)
