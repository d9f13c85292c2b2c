"""Residual networks: ResNets for ImageNet and CIFAR-10 in the variants of the reproduced papers, RegNet and ConvNeXt.

He, Zhang, Ren and Sun, "Deep Residual Learning for Image Recognition", 2016, Table 1 (ImageNet) and section 4.2
(CIFAR-10). Unless noted otherwise, a shortcut that changes the shape is a 1x1 convolution with batch-norm (He's option
B). Unspecified details and deviations: experiments/workloads/README.md.
"""

from __future__ import annotations

import random
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experiments.workloads._shared import (
    IN_PLACE,
    Layers,
    ReLU,
    Residual,
    Squeeze,
    classifier,
    conv,
    counts,
    flag,
    head,
    one_of,
    stages,
)
from experiments.workloads.module import Parts, WorkloadError

# By depth, blocks in each of the four stages, and 3x3 convolutions in each block.
DEPTHS = {18: ((2, 2, 2, 2), 2), 34: ((3, 4, 6, 3), 2), 50: ((3, 4, 6, 3), 3), 101: ((3, 4, 23, 3), 3)}
WIDTHS = (64, 128, 256, 512)
# RegNets: blocks and widths of the stages, group width, squeeze-and-excitation.
REGNETS = {
    "x_400mf": ((1, 2, 7, 12), (32, 64, 160, 400), 16, False),
    "y_400mf": ((1, 3, 6, 6), (48, 104, 208, 440), 8, True),
}
# ConvNeXts: blocks per stage, width of the first stage (it doubles), drop probability of the last block's branch.
CONVNEXTS = {"tiny": ((3, 3, 9, 3), 96, 0.1), "small": ((3, 3, 27, 3), 96, 0.4), "base": ((3, 3, 27, 3), 128, 0.5)}


def projection(channels: int, width: int, stride: int, bias: bool = False) -> list[nn.Module]:
    """Returns the layers of a shortcut; none if the shape is unchanged."""
    return conv(channels, width, 1, stride, bias=bias) if stride > 1 or channels != width else []


# ------------------------------------------------------------------------------------------- CIFAR-10


class Block(Residual):
    """3x3 convolutions with batch-norm plus the shortcut, without ReLU after the sum."""

    def __init__(self, channels: int, width: int, stride: int, convolutions: int) -> None:
        layers = conv(channels, width, 3, stride, bias=True)
        for _ in range(convolutions - 1):
            layers += [ReLU(), *conv(width, width, 3, bias=True)]
        super().__init__(layers, projection(channels, width, stride, bias=True))


class ResNet(Layers):
    """ResNet18, 34, 50 and 101 for CIFAR-10, as in Table I of the SmartPool and AutoSwap paper.

    "Efficient Memory Management for GPU-based Deep Learning Systems" cites torch.ch/blog/2016/02/04/resnets.html and
    runs on SINGA, whose CIFAR example is adapted from that page; neither defines the depths at 32x32 pixels. This
    definition follows SINGA's example (no ReLU after the sum, convolutions with a bias). The rest is chosen to match
    Table I: no pooling in the stem; strides 1, 1, 2, 2, so that the last stage is 8x8; three 3x3 convolutions per block
    in ResNet50 and 101, at the stage's width, instead of the 1-3-1 bottleneck.
    """

    def __init__(self, depth: int, classes: int = 10) -> None:
        counts, convolutions = DEPTHS[depth]
        table = zip(counts, WIDTHS, (1, 1, 2, 2), strict=True)
        blocks = stages(WIDTHS[0], table, partial(Block, convolutions=convolutions))
        super().__init__(
            *conv(3, WIDTHS[0], 3, act=ReLU, bias=True),
            *blocks,
            nn.AvgPool2d(8),
            nn.Flatten(),
            nn.Linear(WIDTHS[-1], classes),
        )


class PlainBlock(nn.Module):
    """Two 3x3 convolutions with batch-norm and ReLU; the shortcut is added before the last ReLU if ``residual``."""

    def __init__(self, channels: int, width: int, stride: int, residual: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(*conv(channels, width, 3, stride, ReLU), *conv(width, width, 3))
        self.shortcut = nn.Sequential(*projection(channels, width, stride)) if residual else None
        self.relu = ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x)
        if self.shortcut is not None:
            y += self.shortcut(x)  # in place, since the backward pass of batch-norm does not read its output
        y = self.relu(y)
        return y


class Plain(Layers):
    """Plain and residual networks of He et al., section 4.2, with ``blocks`` blocks per stage.

    A 3x3 convolution to ``width`` channels, then stages; every stage but the first halves the image and doubles the
    width. He's plain network of depth 6n + 2 has n-n-n blocks and ``width`` 16: 3-3-3 has 20 layers and 0.27 M
    parameters (Table 6). The shortcut is as in CIFAR-10 collections; He uses the parameter-free option A on CIFAR-10.

    HOME (2022) gives neither widths nor depth. Inferred:

    1. Plain20 is four times as wide as He's: 64-128-256.
    2. ResNet is ResNet18 as in the usual PyTorch collections for CIFAR-10: ``2-2-2-2`` of width 64 with shortcuts.
    """

    def __init__(self, blocks: tuple[int, ...], width: int, residual: bool = False, classes: int = 10) -> None:
        table = [(count, width << stage, 2 if stage else 1) for stage, count in enumerate(blocks)]
        super().__init__(
            *conv(3, width, 3, act=ReLU),
            *stages(width, table, partial(PlainBlock, residual=residual)),
            *head(table[-1][1], classes),
        )


class StochasticBlock(nn.Module):
    """Two 3x3 convolutions with batch-norm plus the shortcut; only the shortcut if the block is dropped."""

    def __init__(self, channels: int, width: int, is_kept: bool) -> None:
        super().__init__()
        self.added_channels = width - channels
        self.is_kept = is_kept
        self.residual = nn.Sequential(
            *conv(channels, width, 3, width // channels, IN_PLACE, bias=True), *conv(width, width, 3, bias=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = F.pad(F.avg_pool2d(x, 2), (0, 0, 0, 0, 0, self.added_channels)) if self.added_channels else x
        return F.relu_(self.residual(x) + shortcut) if self.is_kept else shortcut


def resnet_stochastic(*, draw: int = 1, blocks: int = 18, batch_size: int = 128) -> Parts:
    """Returns a ResNet with stochastic depth (Huang et al., "Deep Networks with Stochastic Depth", 2016) on CIFAR-10.

    Three stages of 16, 32 and 64 channels with ``blocks`` blocks each (18: 110 layers). In every iteration block l of L
    survives with probability 1 - l / L * (1 - 0.5) (equation 4 with p_L = 0.5); a dropped block is replaced by its
    shortcut in both passes. From the authors' code (github.com/yueatsprograms/Stochastic_Depth): a shortcut that
    changes the shape is an average pool with zero channels; SGD with Nesterov momentum 0.9 and weight decay 1e-4. A
    captured step is straight-line code, so blocks are drawn beforehand, with seed ``draw``: one program per draw.

    1. PyTorch's SGD skips the parameters of a dropped block: no momentum, no weight decay.
    2. ReLU after the sum is in place, as in the authors' code. A dropped block has none, since its input is
       nonnegative.
    3. The DQN paper says "ResNet with stochastic depth" and CIFAR-10, but no depth; 110 is the main one of Huang et al.
    """
    widths = [width for width in (16, 32, 64) for _ in range(blocks)]
    residuals = map(StochasticBlock, [16, *widths], widths, survival(len(widths), draw))
    model = Layers(
        *conv(3, 16, 3, act=IN_PLACE, bias=True),
        *residuals,
        nn.AvgPool2d(8),
        nn.Flatten(),
        nn.Linear(widths[-1], 10),
    )
    _, loss_fn, _, batch = classifier(model, batch_size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, nesterov=True)
    return model, loss_fn, optimizer, batch


def survival(blocks: int, draw: int) -> list[bool]:
    """Draws with seed ``draw`` which blocks survive: block l with probability 1 - l / blocks * 0.5."""
    generator = random.Random(draw)
    return [generator.random() < 1 - (i + 1) / blocks * 0.5 for i in range(blocks)]


# ------------------------------------------------------------------------------------------- ImageNet


class Bottleneck(Residual):
    """Convolutions 1x1, 3x3 and 1x1 plus the shortcut, then ReLU; ``halve`` is the kernel size that has the stride."""

    expansion = 4  # output channels over the width

    def __init__(self, channels: int, out: int, stride: int, halve: int = 1) -> None:
        width = out // self.expansion
        first, second = (stride, 1) if halve == 1 else (1, stride)
        layers = [*conv(channels, width, 1, first, IN_PLACE), *conv(width, width, 3, second, IN_PLACE)]
        super().__init__([*layers, *conv(width, out, 1)], projection(channels, out, stride), IN_PLACE)


class ImageNetResNet(Layers):
    """ResNet of any depth for ImageNet, with bottleneck blocks (He et al., Table 1).

    The depth is 3 (n1 + n2 + n3 + n4) + 2 for ni ``blocks`` in stage i, including a convolution as stem and a linear
    layer: 3-4-6-3 is He's ResNet50, 3-4-23-3 ResNet101 and 3-8-36-3 ResNet152. SuperNeurons (2018, section 4.2) varies
    the third stage only: 6-32-n3-6 in the authors' released program.

    Stages 2 to 4 halve the image in their first 1x1 convolution, as in the paper. torchvision halves it in the 3x3
    convolution (``halve`` 3), which keeps larger images and the same number of parameters: 25,557,032, 44,549,160 and
    60,192,808. ReLU is in place, as in He's code and torchvision: the backward pass reads the input of batch-norm and
    the output of ReLU.
    """

    def __init__(self, blocks: tuple[int, ...], classes: int = 1000, halve: int = 1) -> None:
        widths = [Bottleneck.expansion * width for width in WIDTHS]
        layers = stages(WIDTHS[0], zip(blocks, widths, (1, 2, 2, 2), strict=True), partial(Bottleneck, halve=halve))
        super().__init__(
            *conv(3, WIDTHS[0], 7, 2, IN_PLACE), nn.MaxPool2d(3, 2, padding=1), *layers, *head(widths[-1], classes)
        )


class RegBlock(Residual):
    """Convolutions 1x1, grouped 3x3 and 1x1, optional squeeze-and-excitation, plus the shortcut; then ReLU."""

    def __init__(self, channels: int, width: int, stride: int, group: int, squeeze: bool) -> None:
        super().__init__(
            [
                *conv(channels, width, 1, act=IN_PLACE),
                *conv(width, width, 3, stride, IN_PLACE, width // group),
                *([Squeeze(width, round(channels / 4), nn.Sigmoid)] if squeeze else []),
                *conv(width, width, 1),
            ],
            projection(channels, width, stride),
            IN_PLACE,
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.shortcut(x) + self.residual(x))


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of ``[batch, channels, height, width]``."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return y.permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Residual block on ``[batch, width, height, width]``."""

    def __init__(self, width: int, drop: float) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width, eps=1e-6), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.scale = nn.Parameter(torch.full((width, 1, 1), 1e-6))
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale * self.mlp(self.depthwise(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        if self.training and self.drop:
            keep = y.new_empty(y.shape[0], 1, 1, 1).bernoulli_(1 - self.drop)
            y = y * keep.div_(1 - self.drop)
        y += x
        return y


# ------------------------------------------------------------------------------------------- families


def resnet(*, depth: int, batch_size: int = 100) -> Parts:
    """Returns a CIFAR-10 ``ResNet``; see ``_shared.classifier``."""
    one_of(DEPTHS, depth, "depth", "resnet")
    return classifier(ResNet(depth), batch_size)


def plain(
    *, stages: str, width: int = 16, residual: bool = False, batch_size: int = 128, image: int = 32, classes: int = 10
) -> Parts:
    """Returns a ``Plain`` network with ``stages`` blocks, as in "3-3-3"; see ``_shared.classifier``."""
    blocks = counts(stages, "numbers of blocks", "3-3-3", 1)
    flag(residual, "residual")
    return classifier(Plain(blocks, width, residual, classes), batch_size, image)


def resnet_imagenet(
    *, stages: str, batch_size: int = 32, image: int = 224, classes: int = 1000, halve: int = 1
) -> Parts:
    """Returns an ``ImageNetResNet`` with ``stages`` blocks, as in "3-4-6-3"; see ``_shared.classifier``.

    Raises:
        WorkloadError: ``halve`` is neither 1 nor 3, or ``stages`` is malformed; or as for ``classifier``.
    """
    if halve not in (1, 3):
        raise WorkloadError(f"workload.halve: expected 1 or 3, got {halve!r}")
    blocks = counts(stages, "four numbers of blocks", "3-4-6-3", 4, 4)
    return classifier(ImageNetResNet(blocks, classes, halve), batch_size, image)


def regnet(*, size: str = "x_400mf", batch_size: int = 32, image: int = 224, classes: int = 1000) -> Parts:
    """Returns RegNetX or RegNetY of 400 MFLOP (Radosavovic et al., "Designing Network Design Spaces", 2020).

    A stem of 32 channels and four stages of blocks, with the widths and depths of Table 12, as in torchvision. Its
    parameters for 1000 classes: 5,495,976 (x_400mf), 4,344,144 (y_400mf). See ``_shared.classifier``.
    """
    counts, widths, group, squeeze = one_of(REGNETS, size, "size", "regnet")
    blocks = stages(32, zip(counts, widths, (2, 2, 2, 2), strict=True), partial(RegBlock, group=group, squeeze=squeeze))
    return classifier(Layers(*conv(3, 32, 3, 2, IN_PLACE), *blocks, *head(widths[-1], classes)), batch_size, image)


def convnext(*, size: str = "tiny", batch_size: int = 32, image: int = 224, classes: int = 1000) -> Parts:
    """Returns a ConvNeXt (Liu et al., "A ConvNet for the 2020s", 2022), as in torchvision.

    A 4x4 stem, four stages of blocks (7x7 depthwise convolution, layer norm, two linear layers with GELU, a learned
    scale, stochastic depth), and 2x2 convolutions of stride 2 between stages. Parameters for 1000 classes, as
    torchvision documents them: 28,589,128 (tiny), 50,223,688 (small), 88,591,464 (base). Images have at least 32 px;
    see ``_shared.classifier``. Stochastic depth scales each sample's branch by a random factor, so the kernels do not
    depend on the draw.
    """
    blocks, width, drop = one_of(CONVNEXTS, size, "size", "convnext")
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 4), ChannelNorm(width, eps=1e-6)]
    done = 0
    for stage, count in enumerate(blocks):
        if stage:
            layers += [ChannelNorm(width, eps=1e-6), nn.Conv2d(width, 2 * width, 2, 2)]
            width *= 2
        for _ in range(count):
            layers.append(ConvNeXtBlock(width, drop * done / (sum(blocks) - 1)))
            done += 1
    layers += [nn.AdaptiveAvgPool2d(1), ChannelNorm(width, eps=1e-6), nn.Flatten(), nn.Linear(width, classes)]
    return classifier(Layers(*layers), batch_size, image, least=32)
