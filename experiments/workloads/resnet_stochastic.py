"""ResNets with stochastic depth (Huang et al., "Deep Networks with Stochastic Depth", 2016) on CIFAR-10.

The ResNet of He et al. (2016) for CIFAR: three stages of 16, 32 and 64 channels, 18 blocks each (110 layers). In every
iteration block l of L survives with probability 1 - l / L * (1 - 0.5) (equation 4 with p_L = 0.5); one that does not is
replaced by its shortcut, in the forward and the backward pass. From the authors' code
(github.com/yueatsprograms/Stochastic_Depth): where the shape changes the shortcut is an average pool and channels of
zeros; SGD with Nesterov momentum 0.9 and weight decay 1e-4, batch 128. A captured step is straight-line code, so blocks
are drawn before: one program for each ``draw``, the seed. Open or different (experiments/workloads/README.md):

1. PyTorch's SGD does nothing for the parameters of a dropped block: no momentum, no weight decay.
2. ReLU after the sum is in place, as in the authors' code; a dropped block has none: its input has no negative numbers.
3. The DQN paper says "ResNet with stochastic depth" and CIFAR-10, no depth: 110 is what Huang et al. train most.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.workloads._images import classifier
from experiments.workloads.module import Parts

WIDTHS = (16, 32, 64)


class Block(nn.Module):
    """Two batch-normed 3x3 convolutions plus the shortcut; the shortcut alone if the block does not survive."""

    def __init__(self, channels: int, width: int, survives: bool) -> None:
        super().__init__()
        self.stride, self.more, self.survives = width // channels, width - channels, survives
        self.residual = nn.Sequential(
            nn.Conv2d(channels, width, 3, self.stride, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        shortcut = F.pad(F.avg_pool2d(x, 2), (0, 0, 0, 0, 0, self.more)) if self.more else x
        return F.relu_(self.residual(x) + shortcut) if self.survives else shortcut


class StochasticResNet(nn.Module):
    """Images ``[batch, 3, 32, 32]`` to logits ``[batch, 10]``; ``survives`` has an entry for every block."""

    def __init__(self, survives: list[bool]) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            nn.Conv2d(3, WIDTHS[0], 3, padding=1), nn.BatchNorm2d(WIDTHS[0]), nn.ReLU(inplace=True)
        ]  # fmt: skip
        channels, per_stage = WIDTHS[0], len(survives) // len(WIDTHS)
        for i, survive in enumerate(survives):
            width = WIDTHS[i // per_stage]
            layers.append(Block(channels, width, survive))
            channels = width
        layers += [nn.AvgPool2d(8), nn.Flatten(), nn.Linear(channels, 10)]
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def survival(blocks: int, draw: int, last: float = 0.5) -> list[bool]:
    """Which of ``blocks`` survive: block l with probability 1 - l / blocks * (1 - last), drawn with seed ``draw``."""
    generator = random.Random(draw)
    return [generator.random() < 1 - (i + 1) / blocks * (1 - last) for i in range(blocks)]


def build(*, draw: int = 1, blocks: int = 18, batch_size: int = 128) -> Parts:
    """``blocks`` in each of the three stages; see ``_images.classifier``."""
    model, loss_fn, _, batch = classifier(StochasticResNet(survival(3 * blocks, draw)), batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    return model, loss_fn, optimizer, batch
