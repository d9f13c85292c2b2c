"""Shared parts of the families: layers, loss and optimizer of image classifiers, batches, and checks of settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from experiments.workloads.module import Parts, WorkloadError

V = TypeVar("V")
Activation = Callable[[], nn.Module]

# px; up to this side (CIFAR-10 has 32) the stem of an ImageNet network does not reduce the image.
SMALL = 64


class ReLU(nn.Threshold):
    """max(x, 0) whose backward pass reads the input, as in Torch7, cuDNN, and PyTorch until pull request 63089."""

    def __init__(self) -> None:
        super().__init__(0.0, 0.0)


class Dropout(nn.Dropout):
    """Dropout by PyTorch's fused GPU kernel, with a mask of one byte per element."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.p, self.training)[0]


IN_PLACE = partial(nn.ReLU, inplace=True)


def conv(
    channels: int,
    width: int,
    kernel: int,
    stride: int = 1,
    act: Activation | None = None,
    groups: int = 1,
    bias: bool = False,
    eps: float = 1e-5,
) -> list[nn.Module]:
    """Returns a convolution with same padding, batch-norm and (if given) an activation."""
    layer = nn.Conv2d(channels, width, kernel, stride, kernel // 2, groups=groups, bias=bias)
    return [layer, nn.BatchNorm2d(width, eps), *([act()] if act else [])]


def preactivated(channels: int, width: int, kernel: int, act: Activation = ReLU, bias: bool = False) -> list[nn.Module]:
    """Returns batch-norm, an activation and a convolution with same padding."""
    return [nn.BatchNorm2d(channels), act(), nn.Conv2d(channels, width, kernel, padding=kernel // 2, bias=bias)]


class Layers(nn.Module):
    """Sequence of modules for images ``[batch, 3, image, image]``, returning logits ``[batch, classes]``."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Residual(nn.Module):
    """Sum of ``residual`` and a shortcut (the identity if no layers are given), followed by ``act``."""

    def __init__(self, residual: list[nn.Module], shortcut: list[nn.Module], act: Activation = nn.Identity) -> None:
        super().__init__()
        self.residual = nn.Sequential(*residual)
        self.shortcut = nn.Sequential(*shortcut) if shortcut else nn.Identity()
        self.relu = act()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.residual(x) + self.shortcut(x))


class Squeeze(nn.Module):
    """Squeeze-and-excitation block with ``inside`` hidden channels."""

    def __init__(self, channels: int, inside: int, gate: Activation) -> None:
        super().__init__()
        self.scale = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, inside, 1), nn.ReLU(), nn.Conv2d(inside, channels, 1), gate()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x) * x


def stages(
    channels: int, table: Iterable[tuple[int, int, int]], block: Callable[[int, int, int], nn.Module]
) -> list[nn.Module]:
    """Returns the blocks of stages ``(count, width, stride)``; only the first block of each has the stride."""
    blocks = []
    for count, width, stride in table:
        for i in range(count):
            blocks.append(block(channels, width, 1 if i else stride))
            channels = width
    return blocks


def head(channels: int, classes: int) -> list[nn.Module]:
    """Returns average pooling and a linear layer."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


def classifier(model: nn.Module, batch_size: int, image: int = 32, least: int = 1, adam: bool = False) -> Parts:
    """Returns an image classifier with cross-entropy, SGD with momentum, and a batch on the default device.

    Args:
        model: The classifier.
        batch_size: Images per batch.
        image: Side of the images in pixels.
        least: Smallest side that the model's strides do not reduce to nothing.
        adam: Whether Adam replaces SGD.

    Raises:
        WorkloadError: The batch has a single image, which batch-norm rejects, or ``image`` is below ``least``.
    """
    if batch_size < 2:
        raise WorkloadError(f"workload.batch_size: expected an integer of at least 2, got {batch_size}")
    if image < least:
        raise WorkloadError(f"workload.image: expected an integer of at least {least}, got {image}")
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer = (torch.optim.Adam if adam else sgd)(model.parameters())
    return model, nn.CrossEntropyLoss(), optimizer, (torch.empty(batch_size, 3, image, image), labels(batch_size))


def labels(*shape: int) -> Tensor:
    """Returns class or token indices of the given shape."""
    return torch.empty(shape, dtype=torch.int64)


def tokens(batch_size: int, length: int) -> tuple[Tensor, Tensor]:
    """Returns sequences ``[batch, length]`` and the expected token at each position."""
    return labels(batch_size, length), labels(batch_size * length)


# ------------------------------------------------------------------------------------- checks of settings


def one_of(options: Mapping[Any, V], value: object, key: str, family: str) -> V:
    """Returns ``options[value]``; raises WorkloadError if the value of ``key`` is unknown."""
    if value not in list(options):
        raise WorkloadError(f"workload.{key}: {family} has {', '.join(map(str, options))}, not {value!r}")
    return options[value]


def counts(stages: str, expected: str, example: str, minimum: int, maximum: int | None = None) -> tuple[int, ...]:
    """Parses stage sizes such as "3-4-6-3"; raises WorkloadError, with ``expected`` and ``example``, if malformed."""
    parts = str(stages).split("-")
    if not all(re.fullmatch(r"[1-9]\d*", n) for n in parts) or not minimum <= len(parts) <= (maximum or len(parts)):
        raise WorkloadError(f"workload.stages: expected {expected} as in '{example}', got {stages!r}")
    return tuple(map(int, parts))


def flag(value: object, key: str) -> None:
    """Raises WorkloadError unless the value is true or false."""
    if not isinstance(value, bool):
        raise WorkloadError(f"workload.{key}: expected true or false, got {value!r}")


def positive(value: object, key: str) -> None:
    """Raises WorkloadError unless the value is a number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise WorkloadError(f"workload.{key}: expected a number above 0, got {value!r}")


def rate(value: object, key: str = "dropout") -> None:
    """Raises WorkloadError unless the value is a number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise WorkloadError(f"workload.{key}: expected a number in [0, 1), got {value!r}")
