"""Multi-layer perceptron on flattened CIFAR images, with ReLU between layers, cross-entropy and Adam.

This is the example network of the TENSILE paper (2021, Figure 5). The paper gives neither sizes nor the optimizer of
its example; it swaps optimizer state across iterations, with Adam as its case. The sizes are ours: layers wide enough
that parameters and optimizer state outweigh the activations, the case that the paper targets.
"""

from __future__ import annotations

import torch
from torch import nn

from experiments.workloads._shared import labels
from experiments.workloads.module import Parts, WorkloadError

PIXELS, CLASSES = 3 * 32 * 32, 10


def mlp(*, batch_size: int = 4096, width: int = 4096, layers: int = 5) -> Parts:
    """Returns ``layers`` linear layers of ``width``, from ``[batch_size, 3072]`` to logits ``[batch_size, 10]``.

    Raises:
        WorkloadError: Fewer than two layers.
    """
    if layers < 2:
        raise WorkloadError(f"workload.layers: expected an integer of at least 2, got {layers}")
    widths = [PIXELS, *[width] * (layers - 1), CLASSES]
    parts: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        parts += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*parts[:-1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, nn.CrossEntropyLoss(), optimizer, (torch.empty(batch_size, PIXELS), labels(batch_size))
