"""What an optimizer's step takes and gives back on CUDA: the state made at the first step, and the temporaries.

The optimizer's own code runs over fake parameters of CUDA, which need no GPU, in the form that a GPU gives it
(``foreach``, if the user has not chosen): PyTorch's ``_default_to_fused_or_foreach`` in torch/optim/optimizer.py. A
dispatch mode sees storages come, and go before the next operator.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor.capture.optimizers import chooses_foreach

Event = tuple[int, int]  # a block, and its bytes; 0: it is given back


class Updates(NamedTuple):
    """Events of the first step and of every later one; blocks of the first that are never given back stay."""

    first: tuple[Event, ...]
    later: tuple[Event, ...]


class _Watch(TorchDispatchMode):
    """Notes storages of the GPU as they are made and die."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.live: dict[StorageWeakRef, tuple[int, StorageWeakRef]] = {}
        self.known: set[int] = set()
        self.made = 0

    def reap(self) -> None:
        """Notes what died since the last operator."""
        for key, (block, reference) in list(self.live.items()):
            if reference.expired():
                self.events.append((block, 0))
                del self.live[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reap()
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == "cuda":
                key = StorageWeakRef(tensor.untyped_storage())
                if key not in self.live and key.cdata not in self.known and tensor.untyped_storage().nbytes():
                    self.live[key] = self.made, key
                    self.events.append((self.made, tensor.untyped_storage().nbytes()))
                    self.made += 1
        return out


def updates(optimizer: Optimizer, without: Sequence[Tensor] = ()) -> Updates:
    """The events of an optimizer's steps; blocks are numbered from 0.

    Args:
        without: parameters that get no gradient.

    Raises:
        Exception: the optimizer's own, where its code reads numbers from tensors that have none.
    """
    left_out = {id(p) for p in without}
    clone = copy.copy(optimizer)
    with FakeTensorMode() as mode, torch.no_grad():
        groups = []
        for group in optimizer.param_groups:
            params = []
            for p in group["params"]:
                fake = nn.Parameter(torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="cuda"),
                                    p.requires_grad)  # fmt: skip
                if p.requires_grad and id(p) not in left_out:
                    fake.grad = torch.empty_like(fake)
                params.append(fake)
            made = {k: torch.empty_like(v, device=v.device) if isinstance(v, Tensor) else v for k, v in group.items()
                    if k != "params"}  # fmt: skip
            if made.get("foreach", 0) is None and not made.get("fused"):
                made["foreach"] = chooses_foreach(group, on_cuda=True)
            groups.append({**made, "params": params})
        vars(clone)["param_groups"], vars(clone)["state"] = groups, defaultdict(dict)
        watch = _Watch()
        watch.known = {StorageWeakRef(t.untyped_storage()).cdata for g in groups for p in g["params"]
                       for t in (p, p.grad) if t is not None}  # fmt: skip
        parts = []
        del mode
        for _ in range(2):
            watch.events = []
            with watch:
                type(clone).step(clone)
            watch.reap()
            parts.append(tuple(watch.events))
    return Updates(*parts)
