"""RegNetX and RegNetY of 400 MFLOP (Radosavovic et al., "Designing Network Design Spaces", 2020), as torchvision has
them.

A stem of 32 channels and four stages of blocks: convolutions 1x1, 3x3 in groups (of stride 2 in a stage's first), for Y
squeeze and excitation, and 1x1, each with batch-norm, plus the shortcut. Widths and depths are those of the paper's
Table 12. Parameters at 1000 classes, as torchvision documents them: 5,495,976 (x_400mf), 4,344,144 (y_400mf).
"""

from __future__ import annotations

from torch import Tensor, nn

from experiments.workloads._images import classifier
from experiments.workloads.inverted_residual import RELU, convolution
from experiments.workloads.module import Parts, WorkloadError

# Blocks and widths of the stages, width of a group, squeeze and excitation.
SIZES = {
    "x_400mf": ((1, 2, 7, 12), (32, 64, 160, 400), 16, False),
    "y_400mf": ((1, 3, 6, 6), (48, 104, 208, 440), 8, True),
}
STEM = 32


class Squeeze(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, channels: int, inside: int) -> None:
        super().__init__()
        self.scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, inside, 1), nn.ReLU(),
                                   nn.Conv2d(inside, channels, 1), nn.Sigmoid())  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.scale(x) * x
        return y


class Block(nn.Module):
    """``[batch, channels, …]`` to ``[batch, width, …]``."""

    def __init__(self, channels: int, width: int, stride: int, group: int, squeeze: bool) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *convolution(channels, width, 1, activation=RELU),
            *convolution(width, width, 3, stride, width // group, RELU),
            *([Squeeze(width, round(channels / 4))] if squeeze else []), *convolution(width, width, 1),
        )  # fmt: skip
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != width:
            self.shortcut = nn.Sequential(*convolution(channels, width, 1, stride))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.relu(self.shortcut(x) + self.residual(x))
        return y


class RegNet(nn.Module):
    """Images ``[batch, 3, image, image]`` to logits ``[batch, classes]``."""

    def __init__(
        self, counts: tuple[int, ...], widths: tuple[int, ...], group: int, squeeze: bool, classes: int = 1000
    ) -> None:
        super().__init__()
        layers, channels = convolution(3, STEM, 3, 2, activation=RELU), STEM
        for count, width in zip(counts, widths, strict=True):
            for i in range(count):
                layers.append(Block(channels, width, 1 if i else 2, group, squeeze))
                channels = width
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def build(*, size: str = "x_400mf", batch_size: int = 32, image: int = 224, classes: int = 1000) -> Parts:
    """See ``_images.classifier``; one of SIZES."""
    if not isinstance(size, str) or size not in SIZES:
        raise WorkloadError(f"workload.size: regnet has {', '.join(SIZES)}, not {size!r}")
    return classifier(RegNet(*SIZES[size], classes), batch_size, image)
