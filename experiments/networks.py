"""Networks that are really trained: built on a device, with content, ready to step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

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


NETWORKS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, Tensor]]]] = {
    "vgg16": lambda: _images(vgg.VGG(16), 100),
    "resnet50": lambda: _images(resnet.ResNet(50), 100),
    "gpt2_medium": lambda: _text(gpt2.GPT2(*gpt2.SIZES["medium"]), 8, gpt2.CONTEXT, gpt2.VOCABULARY),
    "tiny_resnet": lambda: _images(_tiny_resnet(), 8, 16),
    "tiny_gpt2": lambda: _text(gpt2.GPT2(3, 32, 2, vocabulary=64, context=16), 4, 16, 64),
}


def build(name: str, device: str, seed: int = 0, foreach: bool | None = False) -> Network:
    """A network with random content; the same seed gives the same on one device.

    ``foreach``: of the optimizer; None as PyTorch chooses, False one parameter at a time, as captured steps do it.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        model, batch = NETWORKS[name]()
    text = batch[0].dtype == torch.int64
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=foreach) if text
        else torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, foreach=foreach)
    )  # fmt: skip
    blocks = tuple(m for m in model.modules() if isinstance(m, (resnet.Block, gpt2.Block)))
    return Network(name, model, nn.CrossEntropyLoss(), optimizer, batch, blocks)
