"""K-means: one iteration of Lloyd's algorithm on random points, as github.com/src-d/kmcuda and NVIDIA/kmeans do it.

First every point gets the label of its nearest centroid, by the matrix of all distances, which one matrix product gives
(NVIDIA/kmeans, labels.cu); then every centroid becomes the mean of its points. Two passes over the points, as in both.
Centroids are the state that the step updates; there are no gradients and there is no optimizer. Open or different:

1. Sizes: the DQN paper gives none; kmcuda's example: 300,000 points of 480 numbers in 5,000 clusters, 32-bit floats.
2. The points come in ``chunks`` tensors (20), whose distances are computed one after the other, and stored.
3. A cluster without points keeps its centroid; kmcuda makes it NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.workloads.module import Parts, WorkloadError


class KMeans(nn.Module):
    """Points, a tuple of chunks ``[points, dimensions]``, to the sum over the points p of |p - c|² - |p|².

    c is the nearest of ``centroids`` ``[clusters, dimensions]``; ``forward`` then moves these.
    """

    def __init__(self, clusters: int, dimensions: int) -> None:
        super().__init__()
        self.centroids: Tensor
        self.register_buffer("centroids", torch.empty(clusters, dimensions))

    @torch.no_grad()
    def forward(self, chunks: tuple[Tensor, ...]) -> Tensor:
        centroids = self.centroids
        squares = centroids.square().sum(1)
        total, labels = centroids.new_zeros(()), []
        for points in chunks:
            # |p|² is the same for all centroids
            nearest, label = torch.addmm(squares, points, centroids.T, alpha=-2).min(1)
            total += nearest.sum()
            labels.append(label)
        sums, counts = torch.zeros_like(centroids), torch.zeros_like(squares)
        for points, label in zip(chunks, labels, strict=True):
            sums.index_add_(0, label, points)
            counts.index_add_(0, label, torch.ones_like(label, dtype=counts.dtype))
        counts = counts[:, None]
        centroids.copy_(torch.where(counts > 0, sums / counts, centroids))
        return total


def loss(total: Tensor, squares: Tensor) -> Tensor:
    """Sum of the squared distances; ``squares`` is the sum of all |p|², known before the first iteration."""
    return total + squares


def kmeans(*, batch_size: int = 300_000, dimensions: int = 480, clusters: int = 5_000, chunks: int = 20) -> Parts:
    """``batch_size`` is the number of points: every iteration takes them all.

    Raises:
        WorkloadError: chunks that the points do not divide into.
    """
    if batch_size % chunks:
        raise WorkloadError(f"workload.chunks: expected a divisor of batch_size ({batch_size}), got {chunks}")
    points = tuple(torch.empty(batch_size // chunks, dimensions) for _ in range(chunks))
    return KMeans(clusters, dimensions), loss, None, (points, torch.empty(()))
