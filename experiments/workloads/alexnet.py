"""AlexNet as SuperNeurons writes it (section 4.1.1, footnote 3), for ImageNet: the layers of Krizhevsky et al. (2012),
without groups, so that CONV2, CONV4 and CONV5 read all channels, and local response normalization before pooling.

For images of 3 x 227 x 227. Sizes, and the initial values that let it train, are those of the authors' code
(github.com/linnanwang/superneurons-release, testing/alexnet.cpp); LRN has cuDNN's defaults, a window of 5, alpha 1e-4,
beta 0.75 and k 2. ReLU and dropout keep for the backward pass what cuDNN keeps (experiments/workloads/vgg.py).
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from experiments.workloads._images import classifier
from experiments.workloads.module import Parts
from experiments.workloads.vgg import Dropout, ReLU

STD = {"fc1": 0.005, "fc2": 0.005}  # of the initial weights; the others' is 0.01
BIAS = {"conv2": 0.1, "conv4": 0.1, "conv5": 0.1, "fc1": 0.1, "fc2": 0.1}  # initial; the others are 0


class LRN(nn.LocalResponseNorm):
    """Local response normalization across channels with cuDNN's default parameters."""

    def __init__(self) -> None:
        super().__init__(5, alpha=1e-4, beta=0.75, k=2.0)


class AlexNet(nn.Sequential):
    """Images ``[batch, 3, 227, 227]`` to logits ``[batch, classes]``; the last layer, softmax, is in the loss."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__(OrderedDict[str, nn.Module](
            conv1=nn.Conv2d(3, 96, 11, stride=4), relu1=ReLU(), lrn1=LRN(), pool1=nn.MaxPool2d(3, 2),
            conv2=nn.Conv2d(96, 256, 5, padding=2), relu2=ReLU(), lrn2=LRN(), pool2=nn.MaxPool2d(3, 2),
            conv3=nn.Conv2d(256, 384, 3, padding=1), relu3=ReLU(),
            conv4=nn.Conv2d(384, 384, 3, padding=1), relu4=ReLU(),
            conv5=nn.Conv2d(384, 256, 3, padding=1), relu5=ReLU(), pool5=nn.MaxPool2d(3, 2), flatten=nn.Flatten(),
            fc1=nn.Linear(256 * 6 * 6, 4096), relu6=ReLU(), dropout1=Dropout(0.5),
            fc2=nn.Linear(4096, 4096), relu7=ReLU(), dropout2=Dropout(0.5),
            fc3=nn.Linear(4096, classes),
        ))  # fmt: skip
        for name, layer in self.named_children():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                assert layer.bias is not None
                nn.init.normal_(layer.weight, std=STD.get(name, 0.01))
                nn.init.constant_(layer.bias, BIAS.get(name, 0.0))


def build(*, batch_size: int = 200) -> Parts:
    """See ``_images.classifier``."""
    return classifier(AlexNet(), batch_size, 227)
