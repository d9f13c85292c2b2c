"""Shared parts of the trainers: value of masked actions, thread settings, and a gradient step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

MASKED = -1e8  # not −inf: 0 · −inf is not a number


def one_thread() -> None:
    """Limits PyTorch to one thread: matrices are small, and sums must not depend on the number of cores."""
    torch.set_num_threads(1)


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Limits PyTorch to one thread within the context."""
    num_threads = torch.get_num_threads()
    one_thread()
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def descend(loss: Tensor, net: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None) -> float:
    """Performs one gradient step with the gradient norm clipped to ``clip``; returns the loss."""
    optimizer.zero_grad()
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(net.parameters(), clip)
    optimizer.step()
    return float(loss.detach())
