"""Inception V3 and V4, for 299 px and 1000 classes, with batch-norm and ReLU after every convolution.

V3: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2015, Table 1, Figures 5 to 7 and 10.
V4: Szegedy et al., "Inception-v4, Inception-ResNet and the Impact of Residual Connections on Learning", 2017,
Figures 3 to 9. 23,834,568 parameters (torchvision, without the auxiliary classifier) and 42,679,816 (Cadene's
pretrained-models).

Networks are specified in a compact notation: a string is a sequence of steps, a list holds parallel branches whose
outputs are concatenated by channel, and a tuple is a sequence of any of these (see the comments below).
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from experiments.workloads._shared import SMALL, Dropout, ReLU, classifier, head
from experiments.workloads.module import Parts, WorkloadError

# Steps: ``64`` is a 1x1 convolution to 64 channels, ``64/5`` a 5x5 one, ``64/1x7`` one of height 1 and width 7; ``avg``
# and ``max`` are 3x3 pools. Sizes are kept except by steps that end in ``v`` (no padding) or ``s`` (no padding, stride
# 2).
# Unspecified or different (see also experiments/workloads/README.md): V3 follows torchvision where Table 1 is open,
# without auxiliary classifier; on images of at most 64 px the stem has stride 1, padding and no max-pools; ReLU keeps
# its input.
Spec = str | list["Spec"] | tuple["Spec", ...]


def _a3(pool: int) -> Spec:
    return ["64", "48 64/5", "64 96/3 96/3", f"avg {pool}"]


def _b3(c: int) -> Spec:
    return ["192", f"{c} {c}/1x7 192/7x1", f"{c} {c}/7x1 {c}/1x7 {c}/7x1 192/1x7", "avg 192"]


_PAIR3: Spec = ["384/1x3", "384/3x1"]
_C3: Spec = ["320", ("384", _PAIR3), ("448 384/3", _PAIR3), "avg 192"]
V3: tuple[Spec, ...] = (
    _a3(32),
    _a3(64),
    _a3(64),
    ["384/3s", "64 96/3 96/3s", "maxs"],
    _b3(128),
    _b3(160),
    _b3(160),
    _b3(192),
    ["192 320/3s", "192 192/1x7 192/7x1 192/3s", "maxs"],
    _C3,
    _C3,
)
STEM3: Spec = "32/3s 32/3v 64/3 maxs 80 192/3v maxs"
STEM3_SMALL: Spec = "32/3 32/3 64/3 80 192/3"

_A4: Spec = ["96", "64 96/3", "64 96/3 96/3", "avg 96"]
_B4: Spec = ["384", "192 224/1x7 256/7x1", "192 192/7x1 224/1x7 224/7x1 256/1x7", "avg 128"]
_PAIR4: Spec = ["256/1x3", "256/3x1"]
_C4: Spec = ["256", ("384", _PAIR4), ("384 448/3x1 512/1x3", _PAIR4), "avg 256"]
V4: tuple[Spec, ...] = (
    *4 * (_A4,),
    ["384/3s", "192 224/3 256/3s", "maxs"],
    *7 * (_B4,),
    ["192 192/3s", "256 256/1x7 320/7x1 320/3s", "maxs"],
    *3 * (_C4,),
)
STEM4: Spec = (
    "32/3s 32/3v 64/3",
    ["maxs", "96/3s"],
    ["64 96/3v", "64 64/7x1 64/1x7 96/3v"],
    ["192/3s", "maxs"],
)
STEM4_SMALL: Spec = (
    "32/3 32/3 64/3",
    ["max", "96/3"],
    ["64 96/3", "64 64/7x1 64/1x7 96/3"],
    ["192/3", "max"],
)


class Branches(nn.ModuleList):
    """Concatenation by channel of the outputs of all branches."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self], 1)


def network(spec: Spec, channels: int) -> tuple[nn.Module, int]:
    """Returns the module of a specification and its number of output channels."""
    if isinstance(spec, list):
        branches = [network(branch, channels) for branch in spec]
        return Branches(module for module, _ in branches), sum(width for _, width in branches)
    layers: list[nn.Module] = []
    for step in spec.split() if isinstance(spec, str) else spec:
        if isinstance(spec, str):
            layer, channels = _step(step, channels)
        else:
            layer, channels = network(step, channels)
        layers.append(layer)
    return nn.Sequential(*layers), channels


def _step(step: str, channels: int) -> tuple[nn.Module, int]:
    stride = 2 if step.endswith("s") else 1
    padded = not step.endswith(("s", "v"))
    operation, _, kernel = step.rstrip("sv").partition("/")
    if operation == "max":
        return nn.MaxPool2d(3, stride, padding=int(padded)), channels
    if operation == "avg":
        return nn.AvgPool2d(3, stride, padding=int(padded)), channels
    sizes = [int(size) for size in (kernel or "1").split("x")]
    height = sizes[0]
    width = sizes[-1]
    padding = (height // 2, width // 2) if padded else 0
    conv = nn.Conv2d(channels, int(operation), (height, width), stride, padding, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(int(operation), eps=0.001), ReLU()), int(operation)


def inception(*, version: int, batch_size: int = 32, image: int = 299, classes: int = 1000) -> Parts:
    """Returns Inception V3 or V4; see ``_shared.classifier``."""
    if version not in (3, 4):
        raise WorkloadError(f"workload.version: inception has 3 and 4, not {version}")
    small = image <= SMALL
    stem, body = (STEM3_SMALL if small else STEM3, V3) if version == 3 else (STEM4_SMALL if small else STEM4, V4)
    features, channels = network((stem, *body), 3)
    pool, flatten, linear = head(channels, classes)
    top = nn.Sequential(pool, flatten, Dropout(0.5 if version == 3 else 0.2), linear)
    model = nn.Sequential(OrderedDict(features=features, head=top))
    return classifier(model, batch_size, image, least=7 if small else 75)
