"""MobileNetV2, MobileNetV3 and MnasNet: networks of inverted residual blocks, as torchvision has them.

A block is a 1x1 convolution that widens, a depthwise one, squeeze and excitation in some, and a 1x1 one that narrows,
each with batch-norm; the input is added where the shape is kept. Sandler et al., "MobileNetV2", 2018, Table 2; Howard
et al., "Searching for MobileNetV3", 2019, Tables 1 and 2; Tan et al., "MnasNet", 2019, Figure 7. Parameters at 1000
classes, as torchvision documents them: 3,504,872 (mobilenet_v2), 4,383,312 (mnasnet1_0), 5,483,032 and 2,542,856
(mobilenet_v3_large, mobilenet_v3_small). Activations are in place, as torchvision's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from experiments.workloads._images import classifier
from experiments.workloads.module import Parts, WorkloadError

Activation = Callable[[], nn.Module]
RELU, RELU6, HARDSWISH = (partial(a, inplace=True) for a in (nn.ReLU, nn.ReLU6, nn.Hardswish))


class Shape(NamedTuple):
    """Of a block: kernel, channels inside, channels that leave, squeeze and excitation, activation, stride."""

    kernel: int
    inside: int
    out: int
    squeeze: bool
    activation: Activation
    stride: int


def convolution(
    channels: int, width: int, kernel: int, stride: int = 1, groups: int = 1, activation: Activation | None = None,
    eps: float = 1e-5,
) -> list[nn.Module]:  # fmt: skip
    """Convolution, batch-norm, activation."""
    conv = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(width, eps), *([activation()] if activation else [])]


def rounded(width: float) -> int:
    """The next multiple of 8, but not 10 % below."""
    near = max(8, int(width + 4) // 8 * 8)
    return near + 8 if near < 0.9 * width else near


class Squeeze(nn.Module):
    """Squeeze and excitation, with a quarter of the channels (rounded)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inside = rounded(channels // 4)
        self.scale = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, inside, 1), nn.ReLU(),
                                   nn.Conv2d(inside, channels, 1), nn.Hardsigmoid())  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.scale(x) * x
        return y


class Block(nn.Module):
    """``[batch, channels, …]`` to ``[batch, shape.out, …]``."""

    def __init__(self, channels: int, shape: Shape, eps: float) -> None:
        super().__init__()
        kernel, inside, out, squeeze, activation, stride = shape
        widen = convolution(channels, inside, 1, activation=activation, eps=eps) if inside != channels else []
        depthwise = convolution(inside, inside, kernel, stride, inside, activation, eps)
        self.layers = nn.Sequential(
            *widen, *depthwise, *([Squeeze(inside)] if squeeze else []), *convolution(inside, out, 1, eps=eps)
        )
        self.residual = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y + x if self.residual else y


class InvertedResiduals(nn.Module):
    """Images ``[batch, 3, image, image]`` to logits ``[batch, classes]``.

    Args:
        stem, head: channels after the first convolution and after the last; ``linear``: of a linear layer after it.
    """

    def __init__(
        self, stem: int, blocks: list[Shape], head: int, first: Activation, last: Activation, linear: int = 0,
        eps: float = 1e-5, classes: int = 1000,
    ) -> None:  # fmt: skip
        super().__init__()
        layers, channels = convolution(3, stem, 3, 2, activation=first, eps=eps), stem
        for shape in blocks:
            layers.append(Block(channels, shape, eps))
            channels = shape.out
        layers += [*convolution(channels, head, 1, activation=last, eps=eps), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
        if linear:
            layers += [nn.Linear(head, linear), last()]
        layers += [nn.Dropout(0.2, inplace=bool(linear)), nn.Linear(linear or head, classes)]
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def stages(table: list[tuple[int, int, int, int, int]], activation: Activation) -> list[Shape]:
    """Blocks of stages (kernel, expansion, channels, repeats, stride), after a stem of 32."""
    shapes, channels = [], 32
    for kernel, expansion, out, repeats, stride in table:
        for i in range(repeats):
            shapes.append(Shape(kernel, expansion * channels, out, False, activation, 1 if i else stride))
            channels = out
    return shapes


V2 = [(3, 1, 16, 1, 1), (3, 6, 24, 2, 2), (3, 6, 32, 3, 2), (3, 6, 64, 4, 2), (3, 6, 96, 3, 1), (3, 6, 160, 3, 2),
      (3, 6, 320, 1, 1)]  # fmt: skip
MNASNET = [(3, 1, 16, 1, 1), (3, 3, 24, 3, 2), (5, 3, 40, 3, 2), (5, 6, 80, 3, 2), (3, 6, 96, 2, 1), (5, 6, 192, 4, 2),
           (3, 6, 320, 1, 1)]  # fmt: skip
R, H = RELU, HARDSWISH
V3_LARGE = [Shape(*row) for row in (
    (3, 16, 16, False, R, 1), (3, 64, 24, False, R, 2), (3, 72, 24, False, R, 1), (5, 72, 40, True, R, 2),
    (5, 120, 40, True, R, 1), (5, 120, 40, True, R, 1), (3, 240, 80, False, H, 2), (3, 200, 80, False, H, 1),
    (3, 184, 80, False, H, 1), (3, 184, 80, False, H, 1), (3, 480, 112, True, H, 1), (3, 672, 112, True, H, 1),
    (5, 672, 160, True, H, 2), (5, 960, 160, True, H, 1), (5, 960, 160, True, H, 1),
)]  # fmt: skip
V3_SMALL = [Shape(*row) for row in (
    (3, 16, 16, True, R, 2), (3, 72, 24, False, R, 2), (3, 88, 24, False, R, 1), (5, 96, 40, True, H, 2),
    (5, 240, 40, True, H, 1), (5, 240, 40, True, H, 1), (5, 120, 48, True, H, 1), (5, 144, 48, True, H, 1),
    (5, 288, 96, True, H, 2), (5, 576, 96, True, H, 1), (5, 576, 96, True, H, 1),
)]  # fmt: skip
NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "mobilenet_v2": lambda n: InvertedResiduals(32, stages(V2, RELU6), 1280, RELU6, RELU6, classes=n),
    "mnasnet1_0": lambda n: InvertedResiduals(32, stages(MNASNET, RELU), 1280, RELU, RELU, classes=n),
    "mobilenet_v3_large": lambda n: InvertedResiduals(16, V3_LARGE, 960, H, H, 1280, 1e-3, n),
    "mobilenet_v3_small": lambda n: InvertedResiduals(16, V3_SMALL, 576, H, H, 1024, 1e-3, n),
}


def build(*, network: str = "mobilenet_v2", batch_size: int = 32, image: int = 224, classes: int = 1000) -> Parts:
    """See ``_images.classifier``; one of NETWORKS."""
    if not isinstance(network, str) or network not in NETWORKS:
        raise WorkloadError(f"workload.network: inverted_residual has {', '.join(NETWORKS)}, not {network!r}")
    return classifier(NETWORKS[network](classes), batch_size, image)
