"""DenseNet and FC-DenseNet: every layer reads the concatenation of all earlier outputs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.workloads._shared import (
    SMALL,
    Dropout,
    Layers,
    ReLU,
    classifier,
    conv,
    counts,
    head,
    labels,
    preactivated,
)
from experiments.workloads.module import Parts, WorkloadError


class Block(nn.ModuleList):
    """Dense block from ``[batch, channels, …]`` to ``[batch, channels + layers · 32, …]``."""

    growth = 32

    def __init__(self, channels: int, layers: int) -> None:
        growth = self.growth
        widths = range(channels, channels + layers * growth, growth)
        super().__init__(
            nn.Sequential(*preactivated(width, 4 * growth, 1), *preactivated(4 * growth, growth, 3)) for width in widths
        )

    def forward(self, x: Tensor) -> Tensor:
        results = [x]
        for layer in self:
            results.append(layer(torch.cat(results, 1)))
        return torch.cat(results, 1)


def densenet(*, batch_size: int = 32, image: int = 224, classes: int = 1000) -> Parts:
    """Returns DenseNet121 (Huang et al., "Densely Connected Convolutional Networks", 2017, Table 1).

    Images have at least 8 px; see ``_shared.classifier``. Growth rate 32; 6, 12, 24 and 16 layers of batch-norm,
    ReLU, 1x1 convolution to 128 channels, batch-norm, ReLU and 3x3 convolution to 32. A transition between blocks
    halves channels and image. 7,978,856 parameters for 1000 classes. Unspecified or different:

    1. Every layer concatenates all earlier outputs, as in torchvision without ``memory_efficient``.
    2. On images of at most 64 px the stem is a 3x3 convolution of stride 1 without max-pool, as in CIFAR-10
       collections.
    3. ReLU keeps its input (``_shared.ReLU``), as in the frameworks of its time.
    """
    small = image <= SMALL
    channels = 64
    layers = conv(3, channels, *((3, 1) if small else (7, 2)), ReLU)
    layers += [] if small else [nn.MaxPool2d(3, 2, padding=1)]
    for block, count in enumerate((6, 12, 24, 16)):
        if block:
            layers += [*preactivated(channels, channels // 2, 1), nn.AvgPool2d(2)]
            channels //= 2
        layers.append(Block(channels, count))
        channels += count * Block.growth
    model = Layers(*layers, nn.BatchNorm2d(channels), ReLU(), *head(channels, classes))
    return classifier(model, batch_size, image, least=8)


def convolution(channels: int, width: int, kernel: int) -> nn.Sequential:
    """Returns batch-norm, ReLU, a convolution and dropout."""
    return nn.Sequential(*preactivated(channels, width, kernel, nn.ReLU, bias=True), Dropout(0.2))


class FCBlock(nn.ModuleList):
    """Dense block that returns its input with ``layers · growth`` more channels, and these new channels alone."""

    def __init__(self, channels: int, layers: int, growth: int) -> None:
        super().__init__(convolution(channels + i * growth, growth, 3) for i in range(layers))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        new = []
        for layer in self:
            new.append(layer(x))
            x = torch.cat([x, new[-1]], 1)
        return x, torch.cat(new, 1)


class FCDenseNet(nn.Module):
    """FC-DenseNet for images ``[batch, 3, image, image]``, returning logits ``[batch, classes, image, image]``.

    Jégou et al., "The One Hundred Layers Tiramisu", CVPR Workshops 2017, section 3 and Table 2: a 3x3 convolution to 48
    channels. Down path: dense blocks of batch-norm, ReLU, 3x3 convolution and dropout 0.2, each followed by a
    transition (the same with a 1x1 convolution, and 2x2 max-pool). Up path: a transposed 3x3 convolution of stride 2 of
    the previous block's new channels, concatenation with the down path's output, and a dense block. At the end a 1x1
    convolution to the classes. 56, 67 and 103 layers have 1.5, 3.5 and 9.4 million parameters (Table 3).

    1. ``stages`` lists the layers of the blocks down to the bottleneck; the up path mirrors them.
    """

    def __init__(self, stages: tuple[int, ...], growth: int, classes: int) -> None:
        super().__init__()
        channels = 48
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.down, self.shrink, self.grow, self.up = (nn.ModuleList() for _ in range(4))
        skips = []
        for layers in stages[:-1]:
            self.down.append(FCBlock(channels, layers, growth))
            channels += layers * growth
            skips.append(channels)
            self.shrink.append(nn.Sequential(convolution(channels, channels, 1), nn.MaxPool2d(2)))
        self.bottleneck = FCBlock(channels, stages[-1], growth)
        below = stages[-1]
        for layers, skip in zip(stages[-2::-1], skips[::-1], strict=True):
            added = below * growth
            self.grow.append(nn.ConvTranspose2d(added, added, 3, stride=2, padding=1, output_padding=1))
            self.up.append(FCBlock(added + skip, layers, growth))
            channels = added + skip + layers * growth
            below = layers
        self.classify = nn.Conv2d(channels, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        skips = []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            x, _ = block(x)
            skips.append(x)
            x = shrink(x)
        x, new = self.bottleneck(x)
        for grow, block in zip(self.grow, self.up, strict=True):
            x, new = block(torch.cat([grow(new), skips.pop()], 1))
        return self.classify(x)


def fc_densenet(*, stages: str, growth: int = 16, batch_size: int = 3, image: int = 224, classes: int = 11) -> Parts:
    """Returns an FC-DenseNet with a class per pixel; RMSprop at 1e-3 with weight decay 1e-4 (section 4.1).

    Args:
        stages: Layers of the blocks down to the bottleneck, as in "4-5-7-10-12-15".
        growth: Channels that each layer adds.
        batch_size: Images per batch.
        image: Side of the images in pixels.
        classes: Number of classes.

    Raises:
        WorkloadError: ``stages`` is malformed, or the pools do not divide the side of the image.
    """
    layers = counts(stages, "numbers of layers", "4-5-7-10-12-15", 2)
    if image % 2 ** (len(layers) - 1):
        raise WorkloadError(f"workload.image: expected a multiple of {2 ** (len(layers) - 1)}, got {image}")
    model = FCDenseNet(layers, growth, classes)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3, weight_decay=1e-4)
    return (
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        (torch.empty(batch_size, 3, image, image), labels(batch_size, image, image)),
    )
