"""VGG11, 13, 16 and 19 for CIFAR-10, with batch-norm and dropout (Zagoruyko, "92.45% on CIFAR-10 in Torch", 2015).

The networks of Table I of "Efficient Memory Management for GPU-based Deep Learning Systems" (SmartPool and AutoSwap),
which names that page as its source: 3x3 convolution, batch-norm and ReLU (not in place); dropout between the
convolutions of a block (0.3 in the first block, 0.4 in the others); 2x2 max-pool after each block; then dropout 0.5,
linear 512, batch-norm, ReLU, dropout 0.5, linear 10. The page gives VGG16; the other depths have 1, 2, 3 or 4
convolutions per block as in Simonyan and Zisserman (2014), Table 1.

``ReLU`` and ``Dropout`` keep for the backward pass what Torch7 and cuDNN keep, so that the memory is that of the
paper's runs (on SINGA): ReLU keeps its input, not its output, and dropout one byte per element, not a float. How near
the captured peaks come to Table I: experiments/workloads/README.md.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.workloads._images import classifier
from experiments.workloads.module import Parts, WorkloadError

# Convolutions in each of the five blocks.
BLOCKS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
WIDTHS = (64, 128, 256, 512, 512)


class ReLU(nn.Threshold):
    """max(x, 0) whose gradient reads the input, as Torch7's ``nn.ReLU`` and cuDNN's do."""

    def __init__(self) -> None:
        super().__init__(0.0, 0.0)


class Dropout(nn.Dropout):
    """Dropout by the one kernel that PyTorch runs on a GPU, with a mask of one byte per element."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.native_dropout(x, self.p, self.training)[0]


class VGG(nn.Module):
    """Images ``[batch, 3, 32, 32]`` to logits ``[batch, classes]``."""

    def __init__(self, depth: int, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for block, (count, width) in enumerate(zip(BLOCKS[depth], WIDTHS, strict=True)):
            for i in range(count):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), ReLU()]
                if i < count - 1:
                    layers.append(Dropout(0.3 if block == 0 else 0.4))
                channels = width
            layers.append(nn.MaxPool2d(2))
        layers += [nn.Flatten(), Dropout(0.5), nn.Linear(512, 512), nn.BatchNorm1d(512), ReLU(),
                   Dropout(0.5), nn.Linear(512, classes)]  # fmt: skip
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def build(*, depth: int, batch_size: int = 100) -> Parts:
    """Depths 11, 13, 16 and 19; see ``_images.classifier``."""
    if depth not in BLOCKS:
        raise WorkloadError(f"workload.depth: vgg has {', '.join(map(str, BLOCKS))}, not {depth}")
    return classifier(VGG(depth), batch_size)
