"""YOLOv3 (Redmon and Farhadi, "YOLOv3: An Incremental Improvement", 2018): Darknet-53 and detections on three scales.

Table 1: 3x3 convolutions, five of them of stride 2, and 1, 2, 8, 8 and 4 residual blocks of a 1x1 and a 3x3
convolution, each with batch-norm and leaky ReLU. Section 2.3: detections from the last of them; then, twice, a 1x1
convolution, upsampling, and the concatenation with the last block of twice the side, from which the next are made;
three boxes of 4 + 1 + 80 numbers at each place. 61,949,149 parameters at 80 classes.

1. Loss: the binary cross-entropy of every number beside a dense target; the paper's squared errors of the boxes that
   match depend on the data.
2. The batch is 8 images, as the paper's implementation has in memory at a time (64 in 8 parts); SGD with momentum 0.9.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.workloads.module import Parts, WorkloadError

STAGES = 5
BOXES = 3


def convolution(channels: int, width: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Convolution, batch-norm, leaky ReLU."""
    conv = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(width), nn.LeakyReLU(0.1))


class Residual(nn.Sequential):
    """1x1 to half the channels and 3x3 back, added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__(convolution(channels, channels // 2, 1), convolution(channels // 2, channels, 3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) + x
        return y


class YOLO(nn.Module):
    """Images ``[batch, 3, image, image]`` to ``[batch, outputs, side, side]`` of image / 32, / 16 and / 8."""

    def __init__(self, stages: tuple[int, ...], width: int, outputs: int) -> None:
        super().__init__()
        widths = [width << i for i in range(STAGES + 1)]
        self.stem = convolution(3, width, 3)
        self.stages = nn.ModuleList(
            nn.Sequential(convolution(w // 2, w, 3, 2), *(Residual(w) for _ in range(count)))
            for count, w in zip(stages, widths[1:], strict=True)
        )
        self.necks, self.heads, self.routes = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        channels = widths[-1]
        for w in widths[:-4:-1]:
            half = w // 2
            widths_in = (channels, half, w, half, w)
            self.necks.append(
                nn.Sequential(*(convolution(c, (half, w)[i % 2], (1, 3)[i % 2]) for i, c in enumerate(widths_in)))
            )
            self.heads.append(nn.Sequential(convolution(half, w, 3), nn.Conv2d(w, outputs, 1)))
            if len(self.heads) < 3:
                self.routes.append(convolution(half, half // 2, 1))
                channels = half // 2 + half  # beside a stage of half the channels

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        x, kept = self.stem(images), []
        for stage in self.stages:
            x = stage(x)
            kept.append(x)
        found = []
        for i, (neck, head) in enumerate(zip(self.necks, self.heads, strict=True)):
            x = neck(x)
            found.append(head(x))
            if i < len(self.routes):
                x = torch.cat([F.interpolate(self.routes[i](x), scale_factor=2), kept[-2 - i]], 1)
        return tuple(found)


class Loss(nn.Module):
    """The sum of the scales' binary cross-entropies beside targets of the same shapes, flat in one tensor."""

    def forward(self, found: tuple[Tensor, ...], targets: Tensor) -> Tensor:
        wanted = targets.split([one.numel() for one in found])
        return torch.stack(
            [F.binary_cross_entropy_with_logits(one, t.view_as(one)) for one, t in zip(found, wanted, strict=True)]
        ).sum()


def build(
    *, stages: str = "1-2-8-8-4", width: int = 32, classes: int = 80, batch_size: int = 8, image: int = 416
) -> Parts:
    """Images with a dense target for every number of every box.

    Args:
        stages: the residual blocks of the five stages.
        width: channels of the first convolution.

    Raises:
        WorkloadError: ``stages`` are no five numbers, or a side that is no multiple of 32.
    """
    if not re.fullmatch(r"[1-9]\d*(-[1-9]\d*){4}", str(stages)):
        raise WorkloadError(f"workload.stages: expected five numbers of blocks as in '1-2-8-8-4', got {stages!r}")
    if image % 32 or image < 32:
        raise WorkloadError(f"workload.image: expected a multiple of 32, got {image}")
    outputs = BOXES * (5 + classes)
    model = YOLO(tuple(map(int, stages.split("-"))), width, outputs)
    places = sum((image // (8 << i)) ** 2 for i in range(3))
    batch = torch.empty(batch_size, 3, image, image), torch.empty(batch_size * outputs * places)
    return model, Loss(), torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), batch
