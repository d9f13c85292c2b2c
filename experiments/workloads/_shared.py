"""What the families share: layers, a loss and optimizer for image classifiers, batches, and checks of settings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from experiments.workloads.module import Parts, WorkloadError

K = TypeVar("K")
V = TypeVar("V")
Activation = Callable[[], nn.Module]

# px; up to here (CIFAR-10's images have 32) a network made for ImageNet does not reduce the image in its stem.
SMALL = 64


class ReLU(nn.Threshold):
    """max(x, 0) whose gradient reads the input, as Torch7's ``nn.ReLU`` and cuDNN's do, and as PyTorch's ``nn.ReLU()``
    did until 2021 (pull request 63089)."""

    def __init__(self) -> None:
        super().__init__(0.0, 0.0)


class Dropout(nn.Dropout):
    """Dropout by the one kernel that PyTorch runs on a GPU, with a mask of one byte per element."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.p, self.training)[0]


IN_PLACE = partial(nn.ReLU, inplace=True)


def conv(
    channels: int, width: int, kernel: int, stride: int = 1, act: Activation | None = None, groups: int = 1,
    bias: bool = False, eps: float = 1e-5,
) -> list[nn.Module]:  # fmt: skip
    """A convolution that keeps the image's size but for the stride, batch-norm, and an activation if one is given."""
    layer = nn.Conv2d(channels, width, kernel, stride, kernel // 2, groups=groups, bias=bias)
    return [layer, nn.BatchNorm2d(width, eps), *([act()] if act else [])]


class Layers(nn.Module):
    """Modules one after the other: images ``[batch, 3, image, image]`` to logits ``[batch, classes]``."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Residual(nn.Module):
    """``residual`` plus the shortcut, which is the input where no layers are given for it; then ``act``."""

    def __init__(self, residual: list[nn.Module], shortcut: list[nn.Module], act: Activation = nn.Identity) -> None:
        super().__init__()
        self.residual = nn.Sequential(*residual)
        self.shortcut = nn.Sequential(*shortcut) if shortcut else nn.Identity()
        self.relu = act()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.residual(x) + self.shortcut(x))


class Squeeze(nn.Module):
    """Squeeze and excitation, with ``inside`` channels in between."""

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
    """The blocks of stages ``(count, width, stride)``, each made of ``(channels, width, stride)``; only the first of a
    stage has its stride."""
    blocks = []
    for count, width, stride in table:
        for i in range(count):
            blocks.append(block(channels, width, 1 if i else stride))
            channels = width
    return blocks


def head(channels: int, classes: int) -> list[nn.Module]:
    """Average pooling and a linear layer."""
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]


def classifier(model: nn.Module, batch_size: int, image: int = 32, least: int = 1) -> Parts:
    """A model of images with cross-entropy, SGD with momentum and a batch, on the default device.

    Raises:
        WorkloadError: a batch of one, which batch-norm refuses; images of less than ``least`` px, which the model's
            strides reduce to nothing.
    """
    if batch_size < 2:
        raise WorkloadError(f"workload.batch_size: expected an integer of at least 2, got {batch_size}")
    if image < least:
        raise WorkloadError(f"workload.image: expected an integer of at least {least}, got {image}")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, nn.CrossEntropyLoss(), optimizer, (torch.empty(batch_size, 3, image, image), labels(batch_size))


def labels(*shape: int) -> Tensor:
    """Numbers of classes, or of words."""
    return torch.empty(shape, dtype=torch.int64)


def tokens(batch_size: int, length: int) -> tuple[Tensor, Tensor]:
    """A batch of sequences ``[batch, length]``, and the word that is expected at each of their places."""
    return labels(batch_size, length), labels(batch_size * length)


# ------------------------------------------------------------------------------------- checks of settings


def one_of(known: Mapping[K, V], value: K, key: str, family: str) -> V:
    """What ``known`` has for the value of a key; raises WorkloadError where it has nothing."""
    if value not in list(known):
        raise WorkloadError(f"workload.{key}: {family} has {', '.join(map(str, known))}, not {value!r}")
    return known[value]


def counts(stages: str, what: str, example: str, least: int, most: int | None = None) -> tuple[int, ...]:
    """The numbers of "3-4-6-3", at least and at most so many; raises WorkloadError, by ``what`` and an example."""
    parts = str(stages).split("-")
    if not all(re.fullmatch(r"[1-9]\d*", n) for n in parts) or not least <= len(parts) <= (most or len(parts)):
        raise WorkloadError(f"workload.stages: expected {what} as in '{example}', got {stages!r}")
    return tuple(map(int, parts))


def flag(value: object, key: str) -> None:
    """Raises WorkloadError where a value is neither true nor false."""
    if not isinstance(value, bool):
        raise WorkloadError(f"workload.{key}: expected true or false, got {value!r}")


def positive(value: object, key: str) -> None:
    """Raises WorkloadError where a value is no number above 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise WorkloadError(f"workload.{key}: expected a number above 0, got {value!r}")


def rate(value: object, key: str = "dropout") -> None:
    """Raises WorkloadError where a value is no number in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise WorkloadError(f"workload.{key}: expected a number in [0, 1), got {value!r}")
