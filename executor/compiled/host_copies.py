"""PyTorch's ``ao::offload``, ``ao::reload`` and ``ao::wait_tensor`` between CPU memory and a second pool of it.

A plan that swaps can so be compiled, run and looked at without a GPU. A copy is made at the last moment, when it is
waited for, and what is on its way back is filled with NaN (or ones) until then: a wait that is missing, or memory that
is given back before its wait, shows in the bits. The second pool is NumPy's, which PyTorch's count leaves out.
"""

from __future__ import annotations

import weakref
from functools import cache

import numpy as np
import torch
from torch import Tensor


class HostPool:
    """Bytes of the second pool, now and at most, and copies since ``reset``."""

    def __init__(self) -> None:
        self.under_way: dict[int, Tensor] = {}  # address of the result -> its source
        self.held = self.peak = self.copies = 0

    def reset(self) -> None:
        """Counts anew; what is held stays."""
        self.peak, self.copies = self.held, 0

    def take(self, like: Tensor) -> Tensor:
        """Memory of the pool for as many elements; it goes back with the last tensor over it."""
        memory = np.empty(max(like.nbytes, 1), np.uint8)
        weakref.finalize(memory, self._give, like.nbytes)
        self.held += like.nbytes
        self.peak = max(self.peak, self.held)
        return torch.from_numpy(memory)[: like.nbytes].view(like.dtype).view(like.shape)

    def start(self, result: Tensor, source: Tensor) -> Tensor:
        """A copy to ``result``, which is nothing yet."""
        result.fill_(float("nan") if result.is_floating_point() else 1)
        self.under_way[result.data_ptr()] = source
        # What a forward began, whose backward never came.
        weakref.finalize(result.untyped_storage(), self.under_way.pop, result.data_ptr(), None)
        self.copies += 1
        return result

    def finish(self, result: Tensor) -> bool:
        """Copies; False: nothing is on its way there."""
        source = self.under_way.pop(result.data_ptr(), None)
        if source is not None:
            result.data.copy_(source)  # what is saved for the backward keeps its version
        return source is not None

    def _give(self, nbytes: int) -> None:
        self.held -= nbytes


POOL = HostPool()


@cache
def on_the_cpu() -> torch.library.Library:
    """Has the operators copy between the CPU's memory and the pool; what goes to or from a GPU is PyTorch's own."""
    from torch._functorch._activation_offloading import offload_ops as theirs

    library = torch.library.Library("ao", "IMPL")
    reload = theirs.reload._init_fn

    @theirs.offload.register_kernel("cpu")
    def _(tensor: Tensor) -> Tensor:
        return POOL.start(POOL.take(tensor), tensor)

    @theirs.reload.register_kernel("cpu")
    def _(
        tensor: Tensor, device: torch.device, size: list[int] | None = None, stride: list[int] | None = None
    ) -> Tensor:
        if device.type != "cpu":
            return reload(tensor, device, size, stride)
        size, stride = size or list(tensor.shape), stride or list(tensor.stride())
        return POOL.start(torch.empty_strided(size, stride, dtype=tensor.dtype), tensor)

    def wait_tensor(tensor: Tensor, keepalive: Tensor | None = None, last: Tensor | None = None) -> Tensor:
        if POOL.finish(tensor):
            return tensor
        event, device = theirs._pop_wait(tensor)  # of a GPU's; what is kept alive goes with its last reader
        torch.accelerator.current_stream(device).wait_event(event)
        return tensor

    library.impl("wait_tensor", wait_tensor, "CPU")
    return library
