"""What the trainers of this folder share: the value of what may not be done, and one step of an optimiser."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

MASKED = -1e8  # not −inf: 0 · −inf is not a number


def one_thread() -> None:
    """The matrices are small, and sums must not depend on the number of cores."""
    torch.set_num_threads(1)


@contextmanager
def on_one_thread() -> Iterator[None]:
    """Runs PyTorch on one thread, and then on as many as before."""
    before = torch.get_num_threads()
    one_thread()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def descend(loss: Tensor, net: nn.Module, optimizer: torch.optim.Optimizer, clip: float | None) -> float:
    """One step along the gradient of ``loss``, its norm at most ``clip``; returns the loss."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    if clip is not None:
        nn.utils.clip_grad_norm_(net.parameters(), clip)
    optimizer.step()
    return float(loss.detach())
