"""VGG16 for ImageNet (Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition",
2014).

Configuration D of Table 1, 138 M parameters (138,357,544) at 224 px and 1000 classes: thirteen 3x3 convolutions with
ReLU and without batch-norm, a 2x2 max-pool after each of the five blocks, then linear layers of 4096, 4096 and
``classes``, with dropout 0.5 after the first two. The network of SuperNeurons (2018) and, of 16 or 19 layers, of
TENSILE (2021), which says "VGG" only. ReLU and dropout keep what cuDNN's keep (``vgg.ReLU``, ``vgg.Dropout``), as
SuperNeurons runs on cuDNN. torchvision's (``pooled``), of any depth and for any image, has ReLU in place, dropout as
PyTorch runs it, and pools to 7x7 before the linear layers, which then have the parameters of 224 px.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from experiments.workloads._images import classifier
from experiments.workloads.module import Parts, WorkloadError
from experiments.workloads.vgg import BLOCKS, WIDTHS, Dropout, ReLU


class VGG(nn.Module):
    """Images ``[batch, 3, image, image]`` to logits ``[batch, classes]``."""

    def __init__(self, image: int = 224, classes: int = 1000, depth: int = 16, pooled: bool = False) -> None:
        super().__init__()
        relu, dropout = (partial(nn.ReLU, inplace=True), nn.Dropout) if pooled else (ReLU, Dropout)
        side = 7 if pooled else image // 32
        layers: list[nn.Module] = []
        channels = 3
        for count, width in zip(BLOCKS[depth], WIDTHS, strict=True):
            for _ in range(count):
                layers += [nn.Conv2d(channels, width, 3, padding=1), relu()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        layers += [nn.AdaptiveAvgPool2d(side)] if pooled else []
        layers += [nn.Flatten(), nn.Linear(channels * side**2, 4096), relu(), dropout(0.5),
                   nn.Linear(4096, 4096), relu(), dropout(0.5), nn.Linear(4096, classes)]  # fmt: skip
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def build(
    *, batch_size: int = 32, image: int = 224, classes: int = 1000, depth: int = 16, pooled: bool = False
) -> Parts:
    """See ``_images.classifier``; at least 32 px, which five pools leave one of.

    Args:
        depth: one of ``vgg.BLOCKS``.
        pooled: torchvision's.
    """
    if depth not in BLOCKS:
        raise WorkloadError(f"workload.depth: vgg_imagenet has {', '.join(map(str, BLOCKS))}, not {depth}")
    return classifier(VGG(max(image, 32), classes, depth, pooled), batch_size, image, least=32)
