"""ResNet of any depth for ImageNet, with bottleneck blocks (He, Zhang, Ren, Sun, "Deep Residual Learning for Image
Recognition", 2016, Table 1).

Depth is 3 (n1 + n2 + n3 + n4) + 2 for ni blocks in stage i, each of three convolutions, 1x1, 3x3 and 1x1, after a stem
of one and before a linear layer: 3-4-6-3 is He's ResNet50, 3-4-23-3 ResNet101 and 3-8-36-3 ResNet152. SuperNeurons
(2018, section 4.2) goes deeper in the third stage only: 6-32-n3-6 in the program that its authors released.

Stages 2 to 4 halve the image in their first 1x1 convolution, as in the paper; torchvision halves it in the 3x3
convolution (``halve=3``), which keeps larger images and no other number of parameters. Shortcuts are identities, but
for 1x1 convolutions with batch-norm where the shape changes (He's option B). Parameters: 25,557,032, 44,549,160 and
60,192,808, as torchvision documents for its own.

ReLU is in place, as in He's and torchvision's: batch-norm keeps its input for the backward pass and ReLU its output.
"""

from __future__ import annotations

import re

from torch import Tensor, nn

from experiments.workloads._images import classifier
from experiments.workloads.module import Parts, WorkloadError

WIDTHS = (64, 128, 256, 512)
EXPANSION = 4  # channels that leave a block, over its width


def convolution(channels: int, width: int, size: int, stride: int = 1) -> list[nn.Module]:
    """A convolution that keeps the image's size but for the stride, and its batch-norm."""
    return [nn.Conv2d(channels, width, size, stride, padding=size // 2, bias=False), nn.BatchNorm2d(width)]


class Bottleneck(nn.Module):
    """Convolutions 1x1, 3x3, 1x1, plus the shortcut; then ReLU."""

    def __init__(self, channels: int, width: int, stride: int, halve: int = 1) -> None:
        super().__init__()
        out = EXPANSION * width
        first, second = (stride, 1) if halve == 1 else (1, stride)
        self.residual = nn.Sequential(
            *convolution(channels, width, 1, first), nn.ReLU(inplace=True),
            *convolution(width, width, 3, second), nn.ReLU(inplace=True),
            *convolution(width, out, 1),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != out:
            self.shortcut = nn.Sequential(*convolution(channels, out, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.residual(x) + self.shortcut(x))
        return out


class ResNet(nn.Module):
    """Images ``[batch, 3, image, image]`` to logits ``[batch, classes]``, with ``stages`` blocks in the four stages,
    that halve the image in their 1x1 or 3x3 convolution."""

    def __init__(self, stages: tuple[int, ...], classes: int = 1000, halve: int = 1) -> None:
        super().__init__()
        layers = [*convolution(3, WIDTHS[0], 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
        channels = WIDTHS[0]
        for stage, (count, width) in enumerate(zip(stages, WIDTHS, strict=True)):
            for i in range(count):
                layers.append(Bottleneck(channels, width, 2 if stage and not i else 1, halve))
                channels = EXPANSION * width
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def build(*, stages: str, batch_size: int = 32, image: int = 224, classes: int = 1000, halve: int = 1) -> Parts:
    """See ``_images.classifier``.

    Args:
        stages: the blocks of the four stages, as in "3-4-6-3".
        halve: 1 or 3, the size of the convolution that halves the image.
    """
    if halve not in (1, 3):
        raise WorkloadError(f"workload.halve: expected 1 or 3, got {halve!r}")
    if not re.fullmatch(r"[1-9]\d*(-[1-9]\d*){3}", str(stages)):
        raise WorkloadError(f"workload.stages: expected four numbers of blocks as in '3-4-6-3', got {stages!r}")
    return classifier(ResNet(tuple(map(int, stages.split("-"))), classes, halve), batch_size, image)
