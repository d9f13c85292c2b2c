"""Inception V3 and V4, for 299 px and 1000 classes, with batch-norm and ReLU after every convolution.

V3: Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2015, Table 1, Figures 5 to 7 and 10.
V4: Szegedy et al., "Inception-v4, Inception-ResNet and the Impact of Residual Connections on Learning", 2017,
Figures 3 to 9. 23,834,568 parameters (torchvision, without the auxiliary classifier) and 42,679,816 (Cadene's
pretrained-models).

ReLU keeps its input. V3 follows torchvision where Table 1 is open, without auxiliary classifier. See also
experiments/workloads/README.md.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import torch
from torch import Tensor, nn

from experiments.workloads._shared import SMALL, Dropout, ReLU, classifier, head
from experiments.workloads.module import Parts, WorkloadError

# A specification of layers. A string is a sequence of steps, a list holds parallel branches whose outputs are
# concatenated by channel, and a tuple is a sequence of specifications. Steps:
#   64      1x1 convolution to 64 channels, with batch-norm and ReLU
#   64/5    the same, 5x5
#   64/1x7  the same, of height 1 and width 7
#   avg     3x3 average pool
#   max     3x3 max-pool
# Padding keeps the size, except in a step with the suffix "v" (no padding) or "s" (no padding, stride 2).
Spec = str | list["Spec"] | tuple["Spec", ...]


class Version(NamedTuple):
    """Layers of one version."""

    stem: Spec
    small_stem: Spec  # for images of at most 64 px: stride 1, padding and no max-pools
    blocks: tuple[Spec, ...]
    dropout: float  # before the linear layer


def v3() -> Version:
    """Returns Inception V3."""

    def block_35(pool: int) -> Spec:  # Figure 5, on 35x35
        return ["64", "48 64/5", "64 96/3 96/3", f"avg {pool}"]

    def block_17(c: int) -> Spec:  # Figure 6, on 17x17
        return ["192", f"{c} {c}/1x7 192/7x1", f"{c} {c}/7x1 {c}/1x7 {c}/7x1 192/1x7", "avg 192"]

    pair: Spec = ["384/1x3", "384/3x1"]
    block_8: Spec = ["320", ("384", pair), ("448 384/3", pair), "avg 192"]  # Figure 7, on 8x8
    blocks: tuple[Spec, ...] = (
        *map(block_35, (32, 64, 64)),
        ["384/3s", "64 96/3 96/3s", "maxs"],
        *map(block_17, (128, 160, 160, 192)),
        ["192 320/3s", "192 192/1x7 192/7x1 192/3s", "maxs"],
        block_8,
        block_8,
    )
    return Version("32/3s 32/3v 64/3 maxs 80 192/3v maxs", "32/3 32/3 64/3 80 192/3", blocks, 0.5)


def v4() -> Version:
    """Returns Inception V4."""
    stem: Spec = (
        "32/3s 32/3v 64/3",
        ["maxs", "96/3s"],
        ["64 96/3v", "64 64/7x1 64/1x7 96/3v"],
        ["192/3s", "maxs"],
    )
    small_stem: Spec = (
        "32/3 32/3 64/3",
        ["max", "96/3"],
        ["64 96/3", "64 64/7x1 64/1x7 96/3"],
        ["192/3", "max"],
    )
    block_a: Spec = ["96", "64 96/3", "64 96/3 96/3", "avg 96"]
    block_b: Spec = ["384", "192 224/1x7 256/7x1", "192 192/7x1 224/1x7 224/7x1 256/1x7", "avg 128"]
    pair: Spec = ["256/1x3", "256/3x1"]
    block_c: Spec = ["256", ("384", pair), ("384 448/3x1 512/1x3", pair), "avg 256"]
    blocks: tuple[Spec, ...] = (
        *4 * (block_a,),
        ["384/3s", "192 224/3 256/3s", "maxs"],
        *7 * (block_b,),
        ["192 192/3s", "256 256/1x7 320/7x1 320/3s", "maxs"],
        *3 * (block_c,),
    )
    return Version(stem, small_stem, blocks, 0.2)


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
    parts, build = (spec.split(), _step) if isinstance(spec, str) else (spec, network)
    for part in parts:
        layer, channels = build(part, channels)
        layers.append(layer)
    return nn.Sequential(*layers), channels


def _step(step: str, channels: int) -> tuple[nn.Module, int]:
    """Returns the module of a step and its number of output channels."""
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
    """Returns Inception V3 or V4; see ``_shared.classifier``.

    Raises:
        WorkloadError: The version is neither 3 nor 4; or as for ``classifier``.
    """
    if version not in (3, 4):
        raise WorkloadError(f"workload.version: inception has 3 and 4, not {version}")
    small = image <= SMALL
    stem, small_stem, blocks, dropout = v3() if version == 3 else v4()
    features, channels = network((small_stem if small else stem, *blocks), 3)
    pool, flatten, linear = head(channels, classes)
    top = nn.Sequential(pool, flatten, Dropout(dropout), linear)
    model = nn.Sequential(OrderedDict(features=features, head=top))
    return classifier(model, batch_size, image, least=7 if small else 75)
