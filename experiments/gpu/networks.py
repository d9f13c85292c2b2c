"""Networks that are really trained: built on a device, with content, ready to step; their steps timed."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from executor.memory.pinned import CUDA, available
from experiments.workloads import gpt2, resnet, vgg


@dataclass(frozen=True, eq=False)
class Network:
    """A model, what trains it, one batch, and the blocks that checkpointing would take as units."""

    name: str
    model: nn.Module
    loss_fn: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[Tensor, Tensor]
    blocks: tuple[nn.Module, ...]

    def step(self, forward: Callable[[Tensor], Any] | None = None) -> Tensor:
        """One eager training step; returns the loss. ``forward`` in the place of the model, if given."""
        x, y = self.batch
        loss: Tensor = self.loss_fn((forward or self.model)(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def _images(model: nn.Module, batch: int, size: int = 32) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return model, (torch.randn(batch, 3, size, size), torch.randint(10, (batch,)))


def _text(model: nn.Module, batch: int, length: int, words: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    return model, (torch.randint(words, (batch, length)), torch.randint(words, (batch * length,)))


def _tiny_resnet() -> nn.Module:
    blocks = [resnet.Block(8, 8, 1, 2), resnet.Block(8, 8, 1, 2), resnet.Block(8, 16, 2, 2)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AvgPool2d(8), nn.Flatten(), nn.Linear(16, 10))


# Name -> the batch that it is trained with, and the model and one batch of any size.
NETWORKS: dict[str, tuple[int, Callable[[int], tuple[nn.Module, tuple[Tensor, Tensor]]]]] = {
    "vgg16": (100, lambda n: _images(vgg.VGG(16), n)),
    "resnet50": (100, lambda n: _images(resnet.ResNet(50), n)),
    "gpt2_medium": (8, lambda n: _text(gpt2.GPT2(*gpt2.SIZES["medium"]), n, gpt2.CONTEXT, gpt2.VOCABULARY)),
    "tiny_resnet": (8, lambda n: _images(_tiny_resnet(), n, 16)),
    "tiny_gpt2": (4, lambda n: _text(gpt2.GPT2(3, 32, 2, vocabulary=64, context=16), n, 16, 64)),
}


def own_batch(name: str) -> int:
    """The batch that a network is trained with."""
    return NETWORKS[name][0]


def build(name: str, device: str, seed: int = 0, foreach: bool | None = False, batch: int | None = None) -> Network:
    """A network with random content; the same seed gives the same on one device.

    ``foreach``: of the optimizer; None as PyTorch chooses, False one parameter at a time, as captured steps do it.
    """
    torch.manual_seed(seed)
    own, make = NETWORKS[name]
    with torch.device(device):
        model, data = make(batch or own)
    text = data[0].dtype == torch.int64
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=foreach) if text
        else torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=foreach)
    )  # fmt: skip
    blocks = tuple(m for m in model.modules() if isinstance(m, (resnet.Block, gpt2.Block)))
    return Network(name, model, nn.CrossEntropyLoss(), optimizer, data, blocks)


def timed(step: Callable[[], Any], count: int, device: str) -> tuple[list[Any], list[int]]:
    """So many steps: what they return, and ns of each. On CUDA they follow each other without a wait in between, as in
    training, and events on the current stream tell when each was over."""
    results: list[Any] = []
    times: list[int] = []
    if device != "cuda":
        for _ in range(count):
            begin = time.perf_counter_ns()
            results.append(step())
            times.append(time.perf_counter_ns() - begin)
        return results, times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        results.append(step())
        mark.record()
    torch.cuda.synchronize()
    return results, [round(1e6 * a.elapsed_time(b)) for a, b in zip(marks, marks[1:], strict=False)]


def give_back() -> None:
    """Memory of what is not used any more goes back to the device and to the host."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        if hasattr(torch._C, "_host_emptyCache"):  # of PyTorch 2.6 and later: pinned memory
            torch._C._host_emptyCache()


def host_bytes() -> int:
    """Memory of this computer that may be pinned: three quarters of what is left, with what is pinned and free."""
    CUDA.drop()
    return available()[0] * 3 // 4
