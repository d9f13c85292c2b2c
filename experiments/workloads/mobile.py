"""Small networks: SqueezeNet, MobileNet, and networks of inverted residual blocks.

Parameter counts are for 1000 classes. ReLU of MobileNet and SqueezeNet keeps its input (``_shared.ReLU``). Unspecified
details and deviations: experiments/workloads/README.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from torch import Tensor, nn

from experiments.workloads._shared import (
    IN_PLACE,
    SMALL,
    Activation,
    Dropout,
    Layers,
    ReLU,
    Squeeze,
    classifier,
    conv,
    head,
    one_of,
)
from experiments.workloads.module import Parts


def mobilenet(*, batch_size: int = 128, image: int = 32, classes: int = 10) -> Parts:
    """Returns MobileNet (Howard et al., "MobileNets", 2017); see ``_shared.classifier``.

    Table 1: a 3x3 convolution to 32 channels, thirteen depthwise separable blocks (3x3 depthwise, then 1x1; each
    followed by batch-norm and ReLU), average pooling and a linear layer; 4.2 M parameters at 224 px.

    1. The table gives the last depthwise convolution stride 2, but 7x7 pixels before and after it; the stride is 1
       here.
    2. On images of at most 64 px the first convolution has stride 1, as in CIFAR-10 collections: 32 px end in 2x2.
    """
    layers = conv(3, 32, 3, 1 if image <= SMALL else 2, ReLU)
    channels = 32
    blocks = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *5 * ((512, 1),), (1024, 2), (1024, 1))
    for width, stride in blocks:
        layers += conv(channels, channels, 3, stride, ReLU, channels) + conv(channels, width, 1, act=ReLU)
        channels = width
    return classifier(Layers(*layers, *head(channels, classes)), batch_size, image)


class Fire(nn.Module):
    """1x1 convolution to an eighth of ``width``, then 1x1 and 3x3 convolutions to half each; optional bypass."""

    def __init__(self, channels: int, width: int, norm: bool, bypass: bool) -> None:
        super().__init__()

        def convolution(inputs: int, outputs: int, kernel: int) -> nn.Module:
            layer, *norm_and_act = conv(inputs, outputs, kernel, act=ReLU, bias=True)
            return nn.Sequential(layer, *norm_and_act[not norm :])

        self.squeeze = convolution(channels, width // 8, 1)
        self.expand1, self.expand3 = (convolution(width // 8, width // 2, kernel) for kernel in (1, 3))
        self.bypass = bypass

    def forward(self, x: Tensor) -> Tensor:
        squeezed = self.squeeze(x)
        y = torch.cat([self.expand1(squeezed), self.expand3(squeezed)], 1)
        return y + x if self.bypass else y


def squeezenet(*, batch_size: int = 128, image: int = 32, classes: int = 10) -> Parts:
    """Returns SqueezeNet 1.0 (Iandola et al., "SqueezeNet", 2016, Table 1) for images of at least 8 px.

    A convolution to 96 channels, eight fire modules, a 1x1 convolution to the classes, average pooling. 1.25 M
    parameters (1,248,424) at 224 px. See ``_shared.classifier``.

    1. On images of at most 64 px it has the form common in PyTorch collections for CIFAR-10.
    """
    small = image <= SMALL
    pool = nn.MaxPool2d(2) if small else nn.MaxPool2d(3, 2, ceil_mode=True)
    layers = conv(3, 96, 3, act=ReLU, bias=True) if small else [nn.Conv2d(3, 96, 7, 2), ReLU()]
    layers.append(pool)
    channels = 96
    for width in (128, 128, 256, 0, 256, 384, 384, 512, 0, 512):  # of fire modules; 0 is a max-pool
        layers.append(Fire(channels, width, small, bypass=small and channels == width) if width else pool)
        channels = width or channels
    classify = nn.Conv2d(channels, classes, 1)
    layers += [classify] if small else [Dropout(0.5), classify, ReLU()]
    return classifier(Layers(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), batch_size, image, least=8)


# --------------------------------------------------------------------------- inverted residual blocks


ACTIVATIONS: dict[str, Activation] = {
    "relu": IN_PLACE,
    "relu6": partial(nn.ReLU6, inplace=True),
    "swish": partial(nn.Hardswish, inplace=True),
}


class Shape(NamedTuple):
    """Shape of a block: kernel, inner and output channels, squeeze-and-excitation, activation, stride."""

    kernel: int
    inside: int
    out: int
    squeeze: bool
    activation: str  # key of ``ACTIVATIONS``
    stride: int


def round_channels(width: float) -> int:
    """Rounds to a multiple of 8 that is at least 90 % of ``width``."""
    near = max(8, int(width + 4) // 8 * 8)
    return near + 8 if near < 0.9 * width else near


class Block(Layers):
    """Inverted residual from ``[batch, channels, …]`` to ``[batch, shape.out, …]``; adds the input if possible."""

    def __init__(self, channels: int, shape: Shape, eps: float) -> None:
        kernel, inside, out, squeeze, activation, stride = shape
        act = ACTIVATIONS[activation]
        super().__init__(
            *(conv(channels, inside, 1, act=act, eps=eps) if inside != channels else []),
            *conv(inside, inside, kernel, stride, act, inside, eps=eps),
            *([Squeeze(inside, round_channels(inside // 4), nn.Hardsigmoid)] if squeeze else []),
            *conv(inside, out, 1, eps=eps),
        )
        self.residual = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        return y + x if self.residual else y


def expand_stages(table: Sequence[tuple[int, int, int, int, int]], activation: str) -> list[Shape]:
    """Returns the blocks of stages (kernel, expansion, channels, repeats, stride) after a stem of 32 channels."""
    shapes = []
    channels = 32
    for kernel, expansion, out, repeats, stride in table:
        for i in range(repeats):
            shapes.append(Shape(kernel, expansion * channels, out, False, activation, 1 if i else stride))
            channels = out
    return shapes


class Network(NamedTuple):
    """Network of inverted residuals, as in inverted_residual.yaml."""

    stem: int  # channels after the first convolution
    last: int  # channels after the last convolution
    act: str  # key of ``ACTIVATIONS``
    last_act: str  # key of ``ACTIVATIONS``
    stages: Sequence[tuple[int, int, int, int, int]] = ()  # or ``blocks``
    blocks: Sequence[tuple[int, int, int, bool, str, int]] = ()
    linear: int = 0  # width of a linear layer after the last convolution; 0 for none
    eps: float = 1e-5  # of batch-norms


def inverted_residual(
    *, network: str = "mobilenet_v2", batch_size: int = 32, image: int = 224, classes: int = 1000
) -> Parts:
    """Returns MobileNetV2, MobileNetV3 or MnasNet as in torchvision, with in-place activations.

    Sandler et al., "MobileNetV2", 2018; Howard et al., "Searching for MobileNetV3", 2019; Tan et al., "MnasNet", 2019;
    their tables are in inverted_residual.yaml. Parameters, as torchvision documents them: 3,504,872 (mobilenet_v2),
    4,383,312 (mnasnet1_0), 5,483,032 and 2,542,856 (mobilenet_v3_large, mobilenet_v3_small). See
    ``_shared.classifier``.
    """
    tables = yaml.safe_load(Path(__file__).with_name("inverted_residual.yaml").read_text())
    stem, last, act, last_act, stages, blocks, linear, eps = Network(
        **one_of(tables, network, "network", "inverted_residual")
    )
    layers = conv(3, stem, 3, 2, ACTIVATIONS[act], eps=eps)
    channels = stem
    for shape in [Shape(*row) for row in blocks] or expand_stages(stages, act):
        layers.append(Block(channels, shape, eps))
        channels = shape.out
    layers += [*conv(channels, last, 1, act=ACTIVATIONS[last_act], eps=eps), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    if linear:
        layers += [nn.Linear(last, linear), ACTIVATIONS[last_act]()]
    layers += [nn.Dropout(0.2, inplace=bool(linear)), nn.Linear(linear or last, classes)]
    return classifier(Layers(*layers), batch_size, image)
