"""PyTorch's ``ao::offload``, ``ao::reload`` and ``ao::wait_tensor`` between CPU memory and a second pool of it.

They let a plan with swaps be compiled, executed and checked without a GPU. A copy is made only when it is waited for,
and a tensor that is being swapped in holds NaN (or ones) until then. A missing wait, or memory freed before its wait,
therefore changes the results. The second pool is allocated by NumPy, so PyTorch's allocation count leaves it out.
"""

from __future__ import annotations

import weakref
from functools import cache

import numpy as np
import torch
from torch import Tensor


class HostPool:
    """Bytes in use in the second pool, their peak, and the number of copies since ``reset``."""

    def __init__(self) -> None:
        self.pending: dict[int, Tensor] = {}  # address of the result -> its source
        self.bytes_in_use = self.peak = self.copies = 0

    def reset(self) -> None:
        """Resets the counters and keeps the allocations."""
        self.peak = self.bytes_in_use
        self.copies = 0

    def allocate(self, like: Tensor) -> Tensor:
        """Returns pool memory of the same size, freed with the last tensor that uses it."""
        memory = np.empty(max(like.nbytes, 1), np.uint8)
        weakref.finalize(memory, self._free, like.nbytes)
        self.bytes_in_use += like.nbytes
        self.peak = max(self.peak, self.bytes_in_use)
        return torch.from_numpy(memory)[: like.nbytes].view(like.dtype).view(like.shape)

    def start(self, result: Tensor, source: Tensor) -> Tensor:
        """Registers a copy to ``result``, which is performed by ``finish``."""
        result.fill_(float("nan") if result.is_floating_point() else 1)
        self.pending[result.data_ptr()] = source
        # Drop copies of a forward whose backward never ran.
        weakref.finalize(result.untyped_storage(), self.pending.pop, result.data_ptr(), None)
        self.copies += 1
        return result

    def finish(self, result: Tensor) -> bool:
        """Performs the copy to ``result``; returns False if none is pending."""
        source = self.pending.pop(result.data_ptr(), None)
        if source is not None:
            result.data.copy_(source)  # .data: tensors saved for the backward keep their version
        return source is not None

    def _free(self, nbytes: int) -> None:
        self.bytes_in_use -= nbytes


POOL = HostPool()


@cache
def register_cpu_copies() -> torch.library.Library:
    """Registers CPU versions of the operators that copy to and from the pool; GPU copies stay PyTorch's own."""
    from torch._functorch._activation_offloading import offload_ops

    library = torch.library.Library("ao", "IMPL")
    reload = offload_ops.reload._init_fn

    @offload_ops.offload.register_kernel("cpu")
    def _(tensor: Tensor) -> Tensor:
        return POOL.start(POOL.allocate(tensor), tensor)

    @offload_ops.reload.register_kernel("cpu")
    def _(
        tensor: Tensor, device: torch.device, size: list[int] | None = None, stride: list[int] | None = None
    ) -> Tensor:
        if device.type != "cpu":
            return reload(tensor, device, size, stride)
        size = size or list(tensor.shape)
        stride = stride or list(tensor.stride())
        return POOL.start(torch.empty_strided(size, stride, dtype=tensor.dtype), tensor)

    def wait_tensor(tensor: Tensor, keepalive: Tensor | None = None, last: Tensor | None = None) -> Tensor:
        if POOL.finish(tensor):
            return tensor
        event, device = offload_ops._pop_wait(tensor)  # a GPU copy; ``keepalive`` tensors die with their last reader
        torch.accelerator.current_stream(device).wait_event(event)
        return tensor

    library.impl("wait_tensor", wait_tensor, "CPU")
    return library
