"""DistributedDataParallel in a step: its buckets as kernels, reduced as PyTorch's reducer does, to the bit.

A capture runs the wrapped module alone, since the reducer works on the real parameters. Gradients are then taken in the
order in which they are ready: a full bucket is copied together and divided by the number of processes (``bucket``),
summed over them (``all_reduce_``), and when all gradients are there, copied back (``unbucket_``), as in reducer.cpp.

1. PyTorch's first step has other buckets than those after it: one for each type, in the order of the parameters, which
   may change the order of a sum. So in the first step ``unbucket_`` sums what the buckets hold, as one.
2. A collective runs where its kernel stands; PyTorch's runs beside the backward pass. The bits are the same.
3. Every process must run the same plan: collectives meet in the order of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.nn.parallel import DistributedDataParallel

from executor.capture.state import CaptureError


@dataclass(eq=False)
class Reducer:
    """What the kernels of one DistributedDataParallel share.

    Attributes:
        first: its next reduction has the buckets of PyTorch's first step.
    """

    group: Any
    first: bool


REDUCERS: list[Reducer] = []  # operators name them by number
_OF: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

_LIBRARY = torch.library.Library("headroom", "DEF")
_LIBRARY.define("bucket(Tensor[] gradients, int processes) -> Tensor")
_LIBRARY.define("all_reduce_(Tensor(a!) bucket, int reducer, int processes) -> ()")
_LIBRARY.define("unbucket_(Tensor(a!)[] gradients, Tensor[] buckets, int[] order, int reducer, int processes) -> ()")
_LIBRARY.define("broadcast_(Tensor(a!)[] buffers, int reducer) -> ()")


def _views(bucket: Tensor, gradients: Sequence[Tensor]) -> Iterator[Tensor]:
    """Where each gradient stands in a bucket, in its own layout."""
    at = bucket.storage_offset()
    for g in gradients:
        dense = is_non_overlapping_and_dense_or_false(g)
        yield bucket.as_strided(g.size(), g.stride() if dense else torch.empty(g.shape, device="meta").stride(), at)
        at += g.numel()


def _bucket(gradients: list[Tensor], processes: int) -> Tensor:
    out = gradients[0].new_empty(sum(g.numel() for g in gradients))
    for view, g in zip(_views(out, gradients), gradients, strict=True):
        torch.mul(g, 1.0 / processes, out=view)
    return out


def _all_reduce(bucket: Tensor, reducer: int, processes: int) -> None:
    if not REDUCERS[reducer].first:
        dist.all_reduce(bucket, group=REDUCERS[reducer].group)


def _unbucket(gradients: list[Tensor], buckets: list[Tensor], order: list[int], reducer: int, processes: int) -> None:
    views: list[Tensor] = []
    for bucket in buckets:
        own = iter(gradients[len(views) :])
        taken, size = [], 0
        while size < bucket.numel():
            taken.append(next(own))
            size += taken[-1].numel()
        views += _views(bucket, taken)
    if REDUCERS[reducer].first:
        by_type: dict[torch.dtype, list[int]] = {}
        for i in sorted(range(len(gradients)), key=order.__getitem__):
            by_type.setdefault(gradients[i].dtype, []).append(i)
        for found in by_type.values():
            whole = gradients[found[0]].new_empty(sum(gradients[i].numel() for i in found))
            placed = list(_views(whole, [gradients[i] for i in found]))
            for i, view in zip(found, placed, strict=True):
                view.copy_(views[i])
            dist.all_reduce(whole, group=REDUCERS[reducer].group)
            for i, view in zip(found, placed, strict=True):
                views[i] = view
        REDUCERS[reducer].first = False
    for g, view in zip(gradients, views, strict=True):
        g.copy_(view)


def _broadcast(buffers: list[Tensor], reducer: int) -> None:
    dist._broadcast_coalesced(REDUCERS[reducer].group, buffers, 250 * 2**20, 0)


for name, function in (("bucket", _bucket), ("all_reduce_", _all_reduce), ("unbucket_", _unbucket),
                       ("broadcast_", _broadcast)):  # fmt: skip
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(
        f"headroom::{name}",
        (lambda gradients, processes: gradients[0].new_empty(sum(g.numel() for g in gradients)))
        if name == "bucket" else (lambda *_: None),
        lib=_LIBRARY,
    )  # fmt: skip


def check(model: DistributedDataParallel) -> None:
    """Raises CaptureError for what a reducer does and these kernels do not."""
    for attribute, what in (
        ("_comm_hooks", "communication hooks"), ("mixed_precision", "mixed_precision"),
        ("_delay_all_reduce_params", "delay_all_reduce_named_params"), ("_join_config", "join()"),
    ):  # fmt: skip
        value = getattr(model, attribute, None)
        if value and (attribute != "_join_config" or value.enable):
            raise CaptureError(f"a DistributedDataParallel with {what} cannot be captured")
    if len(model.device_ids or ()) > 1:
        raise CaptureError("a DistributedDataParallel on several devices cannot be captured")


def limits(model: DistributedDataParallel) -> list[int]:
    """Bytes from which on the first bucket of a type is full, the second, and so on; the last is for all others."""
    config = getattr(model, "_bucket_config", None)
    if config is not None and config.per_bucket_bytes_caps:
        return list(config.per_bucket_bytes_caps)
    default = getattr(model, "bucket_bytes_cap_default", False)  # PyTorch 2.11, which has no such config
    first = config.first_bucket_bytes_cap if config is not None else dist._DEFAULT_FIRST_BUCKET_BYTES
    return [first if config is not None or default else model.bucket_bytes_cap, model.bucket_bytes_cap]


class _Filling:
    """Gradients as they come, by type, until a bucket is full (compute_bucket_assignment_by_size in reducer.cpp)."""

    def __init__(self, limits: list[int]) -> None:
        self.limits = limits
        self.open: dict[torch.dtype, list[int]] = {}
        self.size: dict[torch.dtype, int] = {}
        self.full: dict[torch.dtype, int] = {}  # buckets of a type

    def add(self, i: int, like: Tensor) -> list[int]:
        """What is in the bucket that this one fills; []: it fills none."""
        self.open.setdefault(like.dtype, []).append(i)
        self.size[like.dtype] = self.size.get(like.dtype, 0) + like.nbytes
        done = self.full.get(like.dtype, 0)
        if self.size[like.dtype] < self.limits[min(done, len(self.limits) - 1)]:
            return []
        self.full[like.dtype] = done + 1
        self.size[like.dtype] = 0
        return self.open.pop(like.dtype)

    def rest(self) -> list[list[int]]:
        """The buckets that are not full."""
        return list(self.open.values())


class _Buckets:
    """The reducer of one DistributedDataParallel while a step is traced."""

    def __init__(self, model: DistributedDataParallel) -> None:
        check(model)
        self.model = model
        if model not in _OF:
            rebuilt = model._get_ddp_logging_data().get("has_rebuilt_buckets", 0)
            first = not (rebuilt or (model.find_unused_parameters and not model.static_graph))
            REDUCERS.append(Reducer(model.process_group, first))
            _OF[model] = len(REDUCERS) - 1
        self.number, self.processes = _OF[model], dist.get_world_size(model.process_group)
        self.armed = False

    def begin(self) -> None:
        """The fake parameters are there; they tell when their gradients are."""
        self.parameters = model_parameters(self.model)
        for i, p in enumerate(self.parameters):
            p.register_post_accumulate_grad_hook(lambda _, i=i: self.ready(i))
        self.fixed: list[set[int]] = []
        if self.model.find_unused_parameters and not self.model.static_graph:  # buckets stay as they are made first
            filling = _Filling(limits(self.model))
            found = [filling.add(i, p) for i, p in enumerate(self.parameters)]
            self.fixed = [set(bucket) for bucket in (*found, *filling.rest()) if bucket]

    def arm(self) -> None:
        """A backward pass begins that is to be reduced."""
        self.armed, self.filling = True, _Filling(limits(self.model))
        self.there: set[int] = set()
        self.order: list[int] = []  # of the gradients in buckets
        self.buckets: list[Tensor] = []

    def ready(self, i: int) -> None:
        """A parameter's gradient is complete."""
        if not self.armed:
            return
        self.there.add(i)
        if self.fixed:
            self.close(*(sorted(bucket) for bucket in self.fixed if i in bucket and bucket <= self.there))
        else:
            gradient = self.parameters[i].grad
            assert gradient is not None
            self.close(*filter(None, [self.filling.add(i, gradient)]))
        if len(self.there) == len(self.parameters):
            self.close(*(() if self.fixed else self.filling.rest()))
            gradients = [self.parameters[i].grad for i in self.order]
            torch.ops.headroom.unbucket_(gradients, self.buckets, self.order, self.number, self.processes)
            self.armed = False

    def close(self, *full: list[int]) -> None:
        """Buckets are complete."""
        for found in full:
            bucket = torch.ops.headroom.bucket([self.parameters[i].grad for i in found], self.processes)
            torch.ops.headroom.all_reduce_(bucket, self.number, self.processes)
            self.order += found
            self.buckets.append(bucket)


def model_parameters(model: DistributedDataParallel) -> list[nn.Parameter]:
    """Those that are reduced, in the reducer's order (DistributedDataParallel._build_params_for_reducer)."""
    found = {
        id(p): p
        for name, module in model.module.named_modules()
        for key, p in module.named_parameters(recurse=False)
        if p.requires_grad and f"{name}.{key}" not in model.parameters_to_ignore
    }
    return list(found.values())


@contextmanager
def traced() -> Iterator[Callable[[], None]]:
    """While a step is traced, DistributedDataParallel runs its module and tells when buckets are full. Yields what
    raises CaptureError where a reduction was begun and not ended."""
    buckets: dict[nn.Module, _Buckets] = {}
    original = DistributedDataParallel.forward

    def forward(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        own = buckets.get(self)
        if own is None:
            own = buckets[self] = _Buckets(self)
            own.begin()
        synchronises = torch.is_grad_enabled() and self.require_backward_grad_sync
        if synchronises:
            own.arm()
        else:
            own.armed = False
        if self.require_forward_param_sync and self.broadcast_buffers:
            named = self.module.named_buffers()
            if tensors := [b for name, b in named if name not in self.parameters_to_ignore]:
                torch.ops.headroom.broadcast_([b.detach() for b in tensors], own.number)
        out = self.module(*args, **kwargs)
        self.require_forward_param_sync = synchronises
        return out

    def finished() -> None:
        for own in buckets.values():
            if own.armed and own.there:
                missing = len(own.parameters) - len(own.there)
                raise CaptureError(f"{missing} parameters of the DistributedDataParallel get no gradient in the step")

    DistributedDataParallel.forward = forward  # type: ignore[method-assign]
    try:
        yield finished
    finally:
        DistributedDataParallel.forward = original  # type: ignore[method-assign]


def alone(model: nn.Module, synchronises: bool) -> Any:
    """``no_sync()`` of a model for a micro-batch that is not a step's last."""
    return nullcontext() if synchronises or not isinstance(model, DistributedDataParallel) else model.no_sync()
