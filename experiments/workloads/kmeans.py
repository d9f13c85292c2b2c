"""K-means: one iteration of Lloyd's algorithm on random points, as in github.com/src-d/kmcuda and NVIDIA/kmeans.

Every point gets the label of its nearest centroid, from the distance matrix of one matrix product (NVIDIA/kmeans,
labels.cu); then every centroid becomes the mean of its points. The centroids are the state that the step updates,
without gradients or optimizer. Unspecified or different:

1. Sizes: the DQN paper gives none; kmcuda's example has 300,000 points of 480 float32 numbers and 5,000 clusters.
2. The points come in ``chunks`` tensors (20), whose distances are computed one after the other, and stored.
3. A cluster without points keeps its centroid; kmcuda makes it NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.workloads.module import Parts, WorkloadError


class KMeans(nn.Module):
    """Module that maps points, a tuple of chunks ``[points, dimensions]``, to the sum over points p of |p - c|² - |p|².

    c is the nearest of ``centroids`` ``[clusters, dimensions]``; ``forward`` then updates the centroids.
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
            # |p|² does not depend on the centroid
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
