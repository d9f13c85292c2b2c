"""Randomly wired networks (Xie et al., "Exploring Randomly Wired Neural Networks for Image Recognition", ICCV 2019).

Section 3.2: a random Watts-Strogatz graph, its edges directed from the lower to the higher node. A node sums its
inputs, each weighted by the sigmoid of a learned number, then runs ReLU, a 3x3 separable convolution and batch-norm.
Nodes without an input read the stage's input with stride 2; the stage's output is the mean of the nodes without an
output. Section 3.4 and Table 1, the small regime: two convolutions, the second a graph of half the nodes, then three
stages whose widths double; a 1x1 convolution to 1280 channels, average pooling and a linear layer.

1. The graphs are WS(4, 0.75), the best of the paper's Figure 3; ``draw`` is their seed.
"""

from __future__ import annotations

import random
from collections import OrderedDict

import torch
from torch import Tensor, nn

from experiments.workloads._shared import Layers, classifier, conv, head
from experiments.workloads.module import Parts, WorkloadError


def graph(nodes: int, rng: random.Random) -> list[list[int]]:
    """Returns the inputs of every node of a Watts-Strogatz (1998) graph, a ring with rewired edges.

    Every node has two neighbors on either side (K = 4), and an edge is rewired with probability P = 0.75.
    """
    edges = {frozenset((v, (v + i) % nodes)) for v in range(nodes) for i in (1, 2)}
    for i in (1, 2):
        for v in range(nodes):
            original = frozenset((v, (v + i) % nodes))
            candidates = [u for u in range(nodes) if u != v and frozenset((v, u)) not in edges]
            if candidates and rng.random() < 0.75:
                edges = edges - {original} | {frozenset((v, rng.choice(candidates)))}
    return [sorted(min(edge) for edge in edges if max(edge) == v) for v in range(nodes)]


class Unit(Layers):
    """ReLU, a separable 3x3 convolution and batch-norm."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        depthwise = nn.Conv2d(channels, channels, 3, stride, padding=1, groups=channels, bias=False)
        super().__init__(nn.ReLU(), depthwise, *conv(channels, width, 1))


class Stage(nn.Module):
    """Stage of one random graph, from ``[batch, channels, side, side]`` to ``[batch, width, side / 2, side / 2]``."""

    def __init__(self, channels: int, width: int, inputs: list[list[int]]) -> None:
        super().__init__()
        self.inputs = inputs
        self.units = nn.ModuleList(Unit(width if i else channels, width, 1 if i else 2) for i in inputs)
        self.weights = nn.ParameterList(torch.zeros(len(i)) for i in inputs)
        self.last = sorted(set(range(len(inputs))) - {u for i in inputs for u in i})

    def forward(self, x: Tensor) -> Tensor:
        done: list[Tensor] = []
        for inputs, unit, weights in zip(self.inputs, self.units, self.weights, strict=True):
            terms = [w * done[i] for w, i in zip(weights.sigmoid().unbind(), inputs, strict=True)] if inputs else [x]
            done.append(unit(sum(terms[1:], terms[0])))
        return sum((done[i] for i in self.last[1:]), done[self.last[0]]) / len(self.last)


def randwire(
    *, nodes: int = 32, width: int = 78, draw: int = 1, batch_size: int = 32, image: int = 224, classes: int = 1000
) -> Parts:
    """Returns a randomly wired network; see ``_shared.classifier``.

    Raises:
        WorkloadError: Fewer nodes than two rings of neighbors need, or a width of one.
    """
    if nodes < 16:
        raise WorkloadError(f"workload.nodes: expected at least 16, got {nodes}")
    if width < 2:
        raise WorkloadError(f"workload.width: expected at least 2, got {width}")
    rng = random.Random(draw)
    widths = (width // 2, width, width, 2 * width, 4 * width)
    graphs = (graph(n, rng) for n in (nodes // 2, nodes, nodes, nodes))
    model = nn.Sequential(
        OrderedDict(
            stem=nn.Sequential(*conv(3, width // 2, 3, 2)),
            stages=nn.Sequential(*map(Stage, widths, widths[1:], graphs)),
            head=nn.Sequential(nn.ReLU(), *conv(4 * width, 1280, 1, act=nn.ReLU), *head(1280, classes)),
        )
    )
    return classifier(model, batch_size, image)
