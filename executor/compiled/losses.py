"""Computes the loss of a language model in chunks, so that a plan need not hold all logits at once."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    chunks: int = 8,
    bias: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Returns ``F.cross_entropy(F.linear(hidden, weight, bias), target)`` of consecutive chunks of tokens.

    Compiled with a plan, the logits of one chunk are in memory at a time: those of the others are recomputed. The loss
    differs only in the order in which tokens are added up; the gradient of ``weight``, too.

    Args:
        hidden: Shape (..., width).
        weight: Shape (vocabulary, width), as of ``nn.Linear``.
        target: Shape (...), indices of the vocabulary.
        chunks: Number of chunks; at least 1.
        bias: Shape (vocabulary,).
        ignore_index: Targets that do not count.

    Returns:
        The mean loss over targets that count, shape ().

    Raises:
        ValueError: If ``chunks`` is below 1, or hidden and target do not fit.
    """
    if chunks < 1 or hidden.shape[:-1] != target.shape:
        raise ValueError(
            f"chunks: expected at least 1, and a target of shape {tuple(hidden.shape[:-1])}; got {chunks} and a target "
            f"of shape {tuple(target.shape)}"
        )
    rows = hidden.flatten(0, -2).chunk(chunks)
    targets = target.flatten().chunk(chunks)
    total = hidden.new_zeros(())
    for x, y in zip(rows, targets, strict=True):
        total = total + F.cross_entropy(F.linear(x, weight, bias), y, ignore_index=ignore_index, reduction="sum")
    return total / (target != ignore_index).sum()
