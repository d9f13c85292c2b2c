"""What the image classifiers share: a batch of images, cross-entropy, and SGD with momentum."""

from __future__ import annotations

import torch
from torch import nn

from experiments.workloads.module import Parts, WorkloadError

# px; up to here (CIFAR-10's images have 32) a network made for ImageNet does not reduce the image in its stem.
SMALL = 64


def classifier(model: nn.Module, batch_size: int, image: int = 32, least: int = 1) -> Parts:
    """A model with its loss, optimizer and a batch ``[batch_size, 3, image, image]``, on the default device.

    Raises:
        WorkloadError: a batch of one, which batch-norm refuses; images of less than ``least`` px, which the model's
            strides reduce to nothing.
    """
    if batch_size < 2:
        raise WorkloadError(f"workload.batch_size: expected an integer of at least 2, got {batch_size}")
    if image < least:
        raise WorkloadError(f"workload.image: expected an integer of at least {least}, got {image}")
    batch = torch.empty(batch_size, 3, image, image), torch.empty(batch_size, dtype=torch.int64)
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), batch
