"""Other networks: a multi-layer perceptron, a character-level LSTM, and K-means."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.workloads._shared import labels, tokens
from experiments.workloads.module import Parts, WorkloadError


def mlp(*, batch_size: int = 4096, width: int = 4096, layers: int = 5) -> Parts:
    """Returns ``layers`` linear layers of ``width``, from CIFAR images ``[batch_size, 3072]`` to ``[batch_size, 10]``.

    This is the example network of the TENSILE paper (2021, Figure 5), with ReLU, cross-entropy and Adam. The paper
    gives neither sizes nor the optimizer of its example; it swaps optimizer state across iterations, with Adam as its
    case. The sizes are ours: layers wide enough that parameters and optimizer state outweigh the activations, the case
    that the paper targets.

    Raises:
        WorkloadError: Fewer than two layers.
    """
    if layers < 2:
        raise WorkloadError(f"workload.layers: expected an integer of at least 2, got {layers}")
    pixels = 3 * 32 * 32
    widths = [pixels, *[width] * (layers - 1), 10]
    parts: list[nn.Module] = []
    for inputs, outputs in zip(widths, widths[1:], strict=False):
        parts += [nn.Linear(inputs, outputs), nn.ReLU()]
    model = nn.Sequential(*parts[:-1])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return model, nn.CrossEntropyLoss(), optimizer, (torch.empty(batch_size, pixels), labels(batch_size))


class Cell(nn.Module):
    """One layer at one time step: maps x ``[batch, inputs]``, h and c ``[batch, hidden]`` to the next h and c."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.i2h = nn.Linear(inputs, 4 * hidden)
        self.h2h = nn.Linear(hidden, 4 * hidden)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        sums = self.i2h(x) + self.h2h(h)
        gates, write = sums.split([3 * h.shape[1], h.shape[1]], dim=1)
        enter, forget, leave = gates.sigmoid().chunk(3, dim=1)
        c = forget * c + enter * write.tanh()
        return leave * c.tanh(), c


class CharRNN(nn.Module):
    """LSTM from characters ``[batch, length]`` to logits ``[length · batch, vocabulary]``, time first, unrolled.

    Karpathy's (github.com/karpathy/char-rnn: train.lua and model/LSTM.lua): one-hot characters, LSTM layers with
    dropout 0, a linear decoder and cross-entropy over all time steps; RMSprop with learning rate 0.002 and decay 0.95.
    The cells are plain layers instead of one cuDNN call, so that kernels and tensors of every time step are visible. As
    in the source, both linear layers of a cell have a bias, and the three sigmoid gates are computed together in the
    order in, forget, out. Unspecified or different (experiments/workloads/README.md):

    1. The batch is 2048 sequences, so that a state ``[batch, hidden]`` has 1 MiB; train.lua has 50.
    2. Vocabulary: 65 characters, those of the example, the works of Shakespeare.
    3. The state starts at zero in every step; the source continues from the previous batch. Gradients are not clamped.
    """

    def __init__(self, vocabulary: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.eye: Tensor
        self.register_buffer("eye", torch.eye(vocabulary))  # its rows are the one-hot characters
        self.cells = nn.ModuleList(Cell(hidden if i else vocabulary, hidden) for i in range(layers))
        self.decoder = nn.Linear(hidden, vocabulary)

    def forward(self, characters: Tensor) -> Tensor:
        zero = self.eye.new_zeros(characters.shape[0], self.hidden)
        states = [(zero, zero)] * len(self.cells)
        logits = []
        for step in characters.unbind(1):
            x = self.eye.index_select(0, step)
            for i, cell in enumerate(self.cells):
                states[i] = cell(x, *states[i])
                x = states[i][0]
            logits.append(self.decoder(x))
        return torch.cat(logits)


def lstm(
    *, batch_size: int = 2048, hidden: int = 128, layers: int = 2, length: int = 50, vocabulary: int = 65
) -> Parts:
    """Returns the LSTM with ``batch_size`` sequences of ``length`` characters and the next character of each."""
    model = CharRNN(vocabulary, hidden, layers)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3, alpha=0.95)
    return model, nn.CrossEntropyLoss(), optimizer, tokens(batch_size, length)


class KMeans(nn.Module):
    """One iteration of Lloyd's algorithm on random points, as in github.com/src-d/kmcuda and NVIDIA/kmeans.

    Maps points, a tuple of chunks ``[points, dimensions]``, to the sum over points p of |p - c|² - |p|², where c is the
    nearest of ``centroids`` ``[clusters, dimensions]``. Every point gets the label of its nearest centroid, from the
    distance matrix of one matrix product (NVIDIA/kmeans, labels.cu); then every centroid becomes the mean of its
    points. The centroids are the state that the step updates, without gradients or optimizer. Unspecified or different:

    1. Sizes: the DQN paper gives none; kmcuda's example has 300,000 points of 480 float32 numbers and 5,000 clusters.
    2. The points come in ``chunks`` tensors (20), whose distances are computed one after the other, and stored.
    3. A cluster without points keeps its centroid; kmcuda makes it NaN.
    """

    def __init__(self, clusters: int, dimensions: int) -> None:
        super().__init__()
        self.centroids: Tensor
        self.register_buffer("centroids", torch.empty(clusters, dimensions))

    @torch.no_grad()
    def forward(self, chunks: tuple[Tensor, ...]) -> Tensor:
        centroids = self.centroids
        squares = centroids.square().sum(1)
        total = centroids.new_zeros(())
        labels = []
        for points in chunks:
            # |p|² does not depend on the centroid
            nearest, label = torch.addmm(squares, points, centroids.T, alpha=-2).min(1)
            total += nearest.sum()
            labels.append(label)
        sums = torch.zeros_like(centroids)
        counts = torch.zeros_like(squares)
        for points, label in zip(chunks, labels, strict=True):
            sums.index_add_(0, label, points)
            counts.index_add_(0, label, torch.ones_like(label, dtype=counts.dtype))
        counts = counts[:, None]
        centroids.copy_(torch.where(counts > 0, sums / counts, centroids))
        return total


def loss(total: Tensor, squares: Tensor) -> Tensor:
    """Returns the sum of squared distances to the centroids; ``squares`` is the precomputed constant Σ|p|²."""
    return total + squares


def kmeans(*, batch_size: int = 300_000, dimensions: int = 480, clusters: int = 5_000, chunks: int = 20) -> Parts:
    """Returns a k-means step; ``batch_size`` is the number of points, all of which every iteration reads.

    Raises:
        WorkloadError: ``chunks`` does not divide ``batch_size``.
    """
    if batch_size % chunks:
        raise WorkloadError(f"workload.chunks: expected a divisor of batch_size ({batch_size}), got {chunks}")
    points = tuple(torch.empty(batch_size // chunks, dimensions) for _ in range(chunks))
    return KMeans(clusters, dimensions), loss, None, (points, torch.empty(()))
