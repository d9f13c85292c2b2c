"""VGG for CIFAR-10 and for ImageNet, and AlexNet.

Depths and blocks are those of Simonyan and Zisserman ("Very Deep Convolutional Networks for Large-Scale Image
Recognition", 2014), Table 1. Unless noted otherwise, the backward pass reads what Torch7 and cuDNN keep, on which the
papers ran: the input of ReLU, not its output, and one byte per element for dropout.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial

from torch import nn

from experiments.workloads._shared import IN_PLACE, Dropout, Layers, ReLU, classifier, conv, one_of
from experiments.workloads.module import Parts

# Convolutions in each of the five blocks.
BLOCKS = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
WIDTHS = (64, 128, 256, 512, 512)


class VGG(Layers):
    """VGG11, 13, 16 and 19 for CIFAR-10, with batch-norm and dropout (Zagoruyko, "92.45% on CIFAR-10 in Torch", 2015).

    These are the networks of Table I of "Efficient Memory Management for GPU-based Deep Learning Systems" (SmartPool
    and AutoSwap), which cites that page and ran on SINGA. 3x3 convolution, batch-norm and ReLU; dropout between the
    convolutions of a block (0.3 in the first block, 0.4 in the others); 2x2 max-pool after each block; then dropout
    0.5, linear 512, batch-norm, ReLU, dropout 0.5, linear 10. The page gives VGG16. experiments/workloads/README.md
    compares the captured peaks with Table I.
    """

    def __init__(self, depth: int, classes: int = 10) -> None:
        layers: list[nn.Module] = []
        channels = 3
        for block, (count, width) in enumerate(zip(BLOCKS[depth], WIDTHS, strict=True)):
            for i in range(count):
                layers += conv(channels, width, 3, act=ReLU, bias=True)
                if i < count - 1:
                    layers.append(Dropout(0.3 if block == 0 else 0.4))
                channels = width
            layers.append(nn.MaxPool2d(2))
        super().__init__(
            *layers,
            nn.Flatten(),
            Dropout(0.5),
            nn.Linear(512, 512),
            nn.BatchNorm1d(512),
            ReLU(),
            Dropout(0.5),
            nn.Linear(512, classes),
        )


class AlexNet(nn.Sequential):
    """AlexNet as in SuperNeurons (section 4.1.1, footnote 3): images ``[batch, 3, 227, 227]`` to logits.

    The layers of Krizhevsky et al. (2012) without groups, so that CONV2, CONV4 and CONV5 read all channels, with local
    response normalization before pooling and cuDNN's defaults: a window of 5, alpha 1e-4, beta 0.75 and k 2. Sizes and
    initial values are those of the authors' code (github.com/linnanwang/superneurons-release, testing/alexnet.cpp). The
    last layer, softmax, is part of the loss.
    """

    def __init__(self, classes: int = 1000) -> None:
        lrn = partial(nn.LocalResponseNorm, 5, alpha=1e-4, beta=0.75, k=2.0)
        super().__init__(
            OrderedDict[str, nn.Module](
                conv1=nn.Conv2d(3, 96, 11, stride=4),
                relu1=ReLU(),
                lrn1=lrn(),
                pool1=nn.MaxPool2d(3, 2),
                conv2=nn.Conv2d(96, 256, 5, padding=2),
                relu2=ReLU(),
                lrn2=lrn(),
                pool2=nn.MaxPool2d(3, 2),
                conv3=nn.Conv2d(256, 384, 3, padding=1),
                relu3=ReLU(),
                conv4=nn.Conv2d(384, 384, 3, padding=1),
                relu4=ReLU(),
                conv5=nn.Conv2d(384, 256, 3, padding=1),
                relu5=ReLU(),
                pool5=nn.MaxPool2d(3, 2),
                flatten=nn.Flatten(),
                fc1=nn.Linear(256 * 6 * 6, 4096),
                relu6=ReLU(),
                dropout1=Dropout(0.5),
                fc2=nn.Linear(4096, 4096),
                relu7=ReLU(),
                dropout2=Dropout(0.5),
                fc3=nn.Linear(4096, classes),
            )
        )
        for name, layer in self.named_children():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                assert layer.bias is not None
                nn.init.normal_(layer.weight, std=0.005 if name in ("fc1", "fc2") else 0.01)
                nn.init.constant_(layer.bias, 0.1 if name in ("conv2", "conv4", "conv5", "fc1", "fc2") else 0.0)


def vgg(*, depth: int, batch_size: int = 100) -> Parts:
    """Returns a CIFAR-10 ``VGG``; see ``_shared.classifier``."""
    one_of(BLOCKS, depth, "depth", "vgg")
    return classifier(VGG(depth), batch_size)


def vgg_imagenet(
    *,
    batch_size: int = 32,
    image: int = 224,
    classes: int = 1000,
    depth: int = 16,
    pooled: bool = False,
    adam: bool = False,
) -> Parts:
    """Returns VGG for images of at least 32 px: no batch-norm, two linear layers of 4096 with dropout 0.5.

    Configuration D of Table 1 has 138 M parameters (138,357,544) at 224 px and 1000 classes. SuperNeurons (2018) and,
    with 16 or 19 layers, TENSILE (2021, which says only "VGG") use this network. torchvision's variant (``pooled``) has
    in-place ReLU and PyTorch's dropout, and pools to 7x7 before the linear layers, which then have the parameters of
    224 px. See ``_shared.classifier``.
    """
    relu, dropout = (IN_PLACE, nn.Dropout) if pooled else (ReLU, Dropout)
    side = 7 if pooled else max(image // 32, 1)  # ``classifier`` refuses smaller images
    layers: list[nn.Module] = []
    channels = 3
    for count, width in zip(one_of(BLOCKS, depth, "depth", "vgg_imagenet"), WIDTHS, strict=True):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), relu()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(side)] if pooled else []
    layers += [
        nn.Flatten(),
        nn.Linear(channels * side**2, 4096),
        relu(),
        dropout(0.5),
        nn.Linear(4096, 4096),
        relu(),
        dropout(0.5),
        nn.Linear(4096, classes),
    ]
    return classifier(Layers(*layers), batch_size, image, 32, adam)


def alexnet(*, batch_size: int = 200) -> Parts:
    """Returns ``AlexNet``; see ``_shared.classifier``."""
    return classifier(AlexNet(), batch_size, 227)
