"""ResNet18, 34, 50 and 101 for CIFAR-10, as in Table I of the SmartPool and AutoSwap paper.

"Efficient Memory Management for GPU-based Deep Learning Systems" names torch.ch/blog/2016/02/04/resnets.html and runs
on SINGA, whose CIFAR example is adapted from that page; neither says what the depths are at 32x32 pixels. The
definition here follows SINGA's example (no ReLU after the sum, which the page found better; a 1x1 convolution with
batch-norm where the shape changes) and was completed so that Table I comes out:

- stem: 3x3 convolution to 64 channels, no pooling; widths 64, 128, 256, 512 with strides 1, 1, 2, 2, so that the last
  stage is 8x8;
- blocks per stage as in He et al. (2016), Table 1; two 3x3 convolutions per block in ResNet18 and 34, three in ResNet50
  and 101, all at the stage's width: not the 1-3-1 bottleneck.

How near the captured peaks come: experiments/workloads/README.md.
"""

from __future__ import annotations

from torch import Tensor, nn

from experiments.workloads._images import classifier
from experiments.workloads.module import Parts, WorkloadError
from experiments.workloads.vgg import ReLU

# Blocks in each of the four stages, and 3x3 convolutions in each block.
STAGES = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
CONVOLUTIONS = {18: 2, 34: 2, 50: 3, 101: 3}
WIDTHS = (64, 128, 256, 512)
STRIDES = (1, 1, 2, 2)


class Block(nn.Module):
    """Batch-normed 3x3 convolutions plus the shortcut; no ReLU after the sum."""

    def __init__(self, channels: int, width: int, stride: int, convolutions: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for i in range(convolutions):
            layers += [ReLU()] if i else []
            layers += [nn.Conv2d(width if i else channels, width, 3, 1 if i else stride, padding=1),
                       nn.BatchNorm2d(width)]  # fmt: skip
        self.residual = nn.Sequential(*layers)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels != width:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.residual(x) + self.shortcut(x)
        return total


class ResNet(nn.Module):
    """Images ``[batch, 3, 32, 32]`` to logits ``[batch, classes]``."""

    def __init__(self, depth: int, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, WIDTHS[0], 3, padding=1), nn.BatchNorm2d(WIDTHS[0]), ReLU()]
        channels = WIDTHS[0]
        for count, width, stride in zip(STAGES[depth], WIDTHS, STRIDES, strict=True):
            for i in range(count):
                layers.append(Block(channels, width, 1 if i else stride, CONVOLUTIONS[depth]))
                channels = width
        layers += [nn.AvgPool2d(8), nn.Flatten(), nn.Linear(channels, classes)]
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def build(*, depth: int, batch_size: int = 100) -> Parts:
    """Depths 18, 34, 50 and 101; see ``_images.classifier``."""
    if depth not in STAGES:
        raise WorkloadError(f"workload.depth: resnet has {', '.join(map(str, STAGES))}, not {depth}")
    return classifier(ResNet(depth), batch_size)
