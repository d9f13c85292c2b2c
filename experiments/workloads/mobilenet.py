"""MobileNet (Howard et al., "MobileNets: Efficient Convolutional Neural Networks for Mobile Vision Applications",
2017).

Table 1: a 3x3 convolution to 32 channels, thirteen depthwise separable blocks (3x3 depthwise, then 1x1; each followed
by batch-norm and ReLU), average pooling and a linear layer; 4.2 M parameters at 224 px and 1000 classes. Open or
different (experiments/workloads/README.md):

1. The table gives the last depthwise convolution a stride of 2, but 7x7 pixels before and after it; its stride is 1.
2. On images of at most 64 px the first convolution has stride 1, as in CIFAR-10 collections: 32 px end in 2x2.
3. ReLU keeps its input (``vgg.ReLU``), as PyTorch's ``nn.ReLU()`` did until 2021 (pull request 63089).
"""

from __future__ import annotations

from torch import Tensor, nn

from experiments.workloads._images import SMALL, classifier
from experiments.workloads.module import Parts
from experiments.workloads.vgg import ReLU

# Output channels and stride of the depthwise separable blocks.
BLOCKS = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *5 * ((512, 1),), (1024, 2), (1024, 1))


def convolution(channels: int, width: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    """Convolution, batch-norm, ReLU."""
    conv = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(width), ReLU()]


class MobileNet(nn.Module):
    """Images ``[batch, 3, image, image]`` to logits ``[batch, classes]``."""

    def __init__(self, image: int = 32, classes: int = 10) -> None:
        super().__init__()
        layers = convolution(3, 32, 3, stride=1 if image <= SMALL else 2)
        channels = 32
        for width, stride in BLOCKS:
            layers += convolution(channels, channels, 3, stride, groups=channels) + convolution(channels, width, 1)
            channels = width
        layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
        self.layers = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def build(*, batch_size: int = 128, image: int = 32, classes: int = 10) -> Parts:
    """See ``_images.classifier``."""
    return classifier(MobileNet(image, classes), batch_size, image)
