"""Stacked hourglasses (Newell, Yang and Deng, "Stacked Hourglass Networks for Human Pose Estimation", ECCV 2016).

Section 3: a 7x7 convolution of stride 2, residual modules and a max-pool reduce an image of 256 pixels to 64; an
hourglass pools ``levels`` times, with a residual module beside every pool, comes back by nearest-neighbour upsampling
and adds what went beside. After each of the ``stacks`` a heat map per joint is predicted and fed back by 1x1
convolutions; the loss is the mean squared error of all of them (3.2), the optimizer RMSprop at 2.5e-4 (3.3).
Residual modules are the bottlenecks of He et al. (2016) with batch-norm and ReLU first (the paper's Figure 4).

1. The batch is 16 images; the paper does not give it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.workloads.module import Parts, WorkloadError


class Residual(nn.Module):
    """1x1, 3x3 and 1x1 convolutions, each after batch-norm and ReLU, added to the input ``[batch, channels, …]``."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        half = width // 2
        self.layers = nn.Sequential(
            nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, half, 1),
            nn.BatchNorm2d(half), nn.ReLU(), nn.Conv2d(half, half, 3, padding=1),
            nn.BatchNorm2d(half), nn.ReLU(), nn.Conv2d(half, width, 1),
        )  # fmt: skip
        self.shortcut = nn.Identity() if channels == width else nn.Conv2d(channels, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x) + self.shortcut(x)
        return y


class Hourglass(nn.Module):
    """``levels`` pools and as many upsamplings, with what goes beside each pool."""

    def __init__(self, levels: int, width: int) -> None:
        super().__init__()
        self.beside, self.down, self.up = (Residual(width, width) for _ in range(3))
        self.inner = Hourglass(levels - 1, width) if levels > 1 else Residual(width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.inner(self.down(F.max_pool2d(x, 2))))
        out: Tensor = self.beside(x) + F.interpolate(y, scale_factor=2)
        return out


class Stacked(nn.Module):
    """Images ``[batch, 3, image, image]`` to heat maps ``[batch, stacks, joints, image / 4, image / 4]``."""

    def __init__(self, stacks: int, levels: int, width: int, joints: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width // 4, 7, stride=2, padding=3), nn.BatchNorm2d(width // 4), nn.ReLU(),
            Residual(width // 4, width // 2), nn.MaxPool2d(2), Residual(width // 2, width // 2),
            Residual(width // 2, width),
        )  # fmt: skip
        self.hourglasses = nn.ModuleList(
            nn.Sequential(Hourglass(levels, width), Residual(width, width), nn.Conv2d(width, width, 1),
                          nn.BatchNorm2d(width), nn.ReLU())
            for _ in range(stacks)
        )  # fmt: skip
        self.heads = nn.ModuleList(nn.Conv2d(width, joints, 1) for _ in range(stacks))
        self.features = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(stacks - 1))
        self.feedback = nn.ModuleList(nn.Conv2d(joints, width, 1) for _ in range(stacks - 1))

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        maps = []
        for i, (hourglass, head) in enumerate(zip(self.hourglasses, self.heads, strict=True)):
            y = hourglass(x)
            maps.append(head(y))
            if i < len(self.features):
                x = x + self.features[i](y) + self.feedback[i](maps[-1])
        return torch.stack(maps, 1)


class Loss(nn.Module):
    """Mean squared error of the heat maps of every stack, beside the same targets ``[batch, joints, …]``."""

    def forward(self, maps: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(maps, targets[:, None].expand_as(maps))


def build(
    *, stacks: int = 8, levels: int = 4, width: int = 256, joints: int = 16, batch_size: int = 16, image: int = 256
) -> Parts:
    """Images with a heat map per joint.

    Raises:
        WorkloadError: a side that the pools do not halve, or channels that do not divide by 4.
    """
    if image % (4 << levels):
        raise WorkloadError(f"workload.image: expected a multiple of {4 << levels} with {levels} levels, got {image}")
    if width % 4:
        raise WorkloadError(f"workload.width: expected a multiple of 4, got {width}")
    model = Stacked(stacks, levels, width, joints)
    side = image // 4
    batch = torch.empty(batch_size, 3, image, image), torch.empty(batch_size, joints, side, side)
    return model, Loss(), torch.optim.RMSprop(model.parameters(), lr=2.5e-4), batch
