"""Operators of a compiled graph that copy to pinned host memory and back: ``headroom::offload``, ``reload``, ``wait``.

    host = offload(tensor, slab, offset)    # starts the copy, on the stream of its direction
    host = wait(host, tensor)               # compute waits for it; the tensor's memory is free then
    tensor = reload(host, device)
    tensor = wait(tensor, host)

The copies use the engines of executor/memory. The plan gives each swapped tensor its place in one slab of pinned
memory, which is as large as the plan needs and stays pinned between steps.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor.compiled.updates import LIBRARY
from executor.memory.engines import Engines, engines_for
from executor.memory.pinned import Bytes

LIBRARY.define("offload(Tensor tensor, int slab, int offset) -> Tensor")
LIBRARY.define("reload(Tensor host, Device device) -> Tensor")
LIBRARY.define("wait(Tensor(a) tensor, Tensor source) -> Tensor(a)")
OFFLOAD = torch.ops.headroom.offload.default
RELOAD = torch.ops.headroom.reload.default
WAIT = torch.ops.headroom.wait.default
torch.fx.has_side_effect(WAIT)

PENDING: dict[int, tuple[Engines, Any]] = {}  # address of a copy's target -> its engines and event


class LateEngines(Engines):
    """Engines for host memory whose copies are made only when they are waited for.

    Until then the target holds NaN (or ones), so that a missing wait, or memory freed before its wait, changes results.
    """

    def pinned(self, cuts: Sequence[int]) -> list[tuple[int, Bytes]]:
        """Returns memory of NumPy."""
        return [(0, np.empty(cuts[-1], np.uint8))]  # PyTorch's allocation count leaves it out

    def copy_in(self, device: Tensor, host: Tensor, event: Any) -> None:
        """Registers a copy."""
        device.fill_(float("nan") if device.is_floating_point() else 1)
        event.source = host  # not the target, which would never die

    def finish(self, target: Tensor, event: Any) -> None:
        """Makes the copy."""
        target.data.copy_(event.source)  # .data: tensors saved for the backward keep their version


class HostSlab:
    """Pinned memory for the swapped tensors of one plan; each step in flight at once has memory of its own.

    Attributes:
        nbytes: Size for one step.
        key: Its number in graphs.
        live: Per step's memory: offset -> bytes of tensors in it.
        copies: Number of copies so far.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.key = next(_KEYS)
        self.live: list[dict[int, int]] = []
        self.copies = 0
        self._memories: list[Bytes] = []
        _SLABS[self.key] = self

    @property
    def bytes_in_use(self) -> int:
        """Bytes of host copies that exist now."""
        return sum(sum(live.values()) for live in self.live)

    def take(self, offset: int, nbytes: int, engines: Engines) -> Bytes:
        """Returns the memory at an offset, reserved until its last tensor dies."""
        end = offset + nbytes
        free = (i for i, live in enumerate(self.live) if all(end <= o or o + n <= offset for o, n in live.items()))
        index = next(free, len(self.live))
        if index == len(self.live):
            ((_, memory),) = engines.pinned([self.nbytes])  # one cut: one part
            self._memories.append(memory)
            self.live.append({})
        live = self.live[index]
        live[offset] = nbytes
        place = self._memories[index][offset:end]
        weakref.finalize(place, live.pop, offset).atexit = False
        return place


_SLABS: weakref.WeakValueDictionary[int, HostSlab] = weakref.WeakValueDictionary()
_KEYS = itertools.count()


@cache
def copy_engines(device: torch.device) -> Engines:
    """Returns the engines of a device, with one stream per direction on a GPU."""
    return LateEngines() if device.type == "cpu" else engines_for(device)


def _offload(tensor: Tensor, slab: int, offset: int) -> Tensor:
    engines = copy_engines(tensor.device)
    owner = _SLABS[slab]
    memory = owner.take(offset, tensor.nbytes, engines)
    host = torch.from_numpy(memory).view(tensor.dtype).as_strided(tensor.size(), tensor.stride())
    event = _start(engines, host)
    engines.copy_out(host, tensor, event)
    owner.copies += 1
    return host


def _reload(host: Tensor, device: torch.device) -> Tensor:
    engines = copy_engines(device)
    tensor = torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)
    event = _start(engines, tensor)
    engines.copy_in(tensor, host, event)
    return tensor


def _start(engines: Engines, target: Tensor) -> Any:
    event = engines.event()
    engines.begin()
    PENDING[target.data_ptr()] = (engines, event)
    # Drop copies of a forward whose backward never ran.
    weakref.finalize(target.untyped_storage(), PENDING.pop, target.data_ptr(), None).atexit = False
    return event


def _wait(tensor: Tensor, source: Tensor) -> Tensor:
    try:
        engines, event = PENDING.pop(tensor.data_ptr())
    except KeyError:
        raise RuntimeError(
            "headroom::wait: the tensor is no target of a copy that is under way; wait once per copy"
        ) from None
    if isinstance(engines, LateEngines):
        engines.finish(tensor, event)
    else:
        engines.begin()
        engines.wait(event)
    return tensor


LIBRARY.impl("offload", _offload, "CompositeExplicitAutograd")
LIBRARY.impl("reload", _reload, "CompositeExplicitAutograd")
LIBRARY.impl("wait", _wait, "CompositeExplicitAutograd")


def _fake_offload(tensor: Tensor, slab: int, offset: int) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")


def _fake_reload(host: Tensor, device: torch.device) -> Tensor:
    return torch.empty_strided(host.size(), host.stride(), dtype=host.dtype, device=device)


torch.library.register_fake("headroom::offload", _fake_offload, lib=LIBRARY)
torch.library.register_fake("headroom::reload", _fake_reload, lib=LIBRARY)
torch.library.register_fake("headroom::wait", lambda tensor, source: tensor, lib=LIBRARY)
