"""Estimate of the device-memory peak while a captured step is trained, as NVML and ``nvidia-smi`` report it.

Parts, in bytes: tensors of the step (the program); tensors that the training loop keeps, and the optimizer's first step
and temporaries on CUDA (``updates``); library workspaces; rounding, splitting and caching of the caching allocator
(simulator/pool/online/caching.py); the CUDA context (the machine's preset).

The iterations of the loop become one stream of mallocs and frees, from a cold allocator. A step captured on a GPU has
the GPU's operators; on the CPU capture with ``as_cuda``. Sources: executor/DEVICE_MEMORY.md.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor.capture.captured import Captured
from executor.capture.optimizers import chooses_foreach
from simulator.machine import Machine
from simulator.pool.device_memory import DevicePeak
from simulator.pool.intervals import Intervals
from simulator.pool.online import caching
from simulator.program import Program

Event = tuple[int, int]  # block and bytes; 0 bytes: free
ZeroGrad = Literal["start", "backward", "end", "never"]


@dataclass(frozen=True)
class Loop:
    """Describes how the training loop calls the step.

    Attributes:
        zero_grad: when the last iteration's gradients are freed (``set_to_none``): before the batch is moved to the
            GPU, before the backward pass, at the end of the iteration, or never (to accumulate). None: as captured.
        keeps_outputs: whether the last model output stays alive until the model returns the next one, as in
            ``for x, y in loader: out = model(x)``.
        batch_overlaps: whether the next batch is on the GPU before the previous one is freed (prefetching).
        iterations: number of iterations, starting from a cold allocator.
    """

    zero_grad: ZeroGrad | None = None
    keeps_outputs: bool = True
    batch_overlaps: bool = False
    iterations: int = 4

    def __post_init__(self) -> None:
        if self.zero_grad not in (None, *get_args(ZeroGrad)):
            raise ValueError(f"zero_grad: expected {', '.join(get_args(ZeroGrad))}, got {self.zero_grad!r}")
        if self.iterations < 1:
            raise ValueError(f"iterations: expected at least 1, got {self.iterations}")


class _MallocTrace:
    """Sequence of mallocs and frees."""

    def __init__(self) -> None:
        self.blocks: list[list[int]] = []  # lower, upper (-1: held) and bytes
        self._time = itertools.count()

    def malloc(self, nbytes: int) -> int:
        """Allocates a block and returns its index."""
        self.blocks.append([next(self._time), -1, nbytes])
        return len(self.blocks) - 1

    def free(self, *blocks: int) -> None:
        for block in blocks:
            self.blocks[block][1] = next(self._time)

    def intervals(self) -> Intervals:
        """Returns all blocks; those still held are freed at the end."""
        lower, upper, nbytes = np.array(self.blocks, np.int64).reshape(-1, 3).T.copy()
        upper[upper < 0] = next(self._time)
        return Intervals(lower, upper, nbytes)


def card_peak(
    captured: Captured,
    machine: Machine,
    loop: Loop | None = None,
    memory_bytes: int | None = None,
    expandable_segments: bool = False,
) -> DevicePeak:
    """Returns the device-memory peak of a captured step.

    Args:
        captured: captured step, with or without an optimizer.
        machine: source of context size and library workspaces.
        loop: how the training loop calls the step; default: ``Loop()``.
        memory_bytes: device memory, for ``fits``.
        expandable_segments: as in PYTORCH_CUDA_ALLOC_CONF.

    Returns:
        the parts of the peak in bytes; ``fits`` compares their sum with ``memory_bytes``.

    Raises:
        ValueError: the optimizer's step cannot be traced.
    """
    loop = loop or Loop()
    update = _update(captured)  # the slowest part, shared
    blocks = stream(captured, machine, loop, update=update)
    live = stream(captured, machine, loop, workspaces=False, update=update).peak_bytes
    tensors = captured.program.peak_bytes
    reserved, _ = caching.serve(blocks, expandable=expandable_segments)
    fits = None
    if memory_bytes is not None:
        room = memory_bytes - machine.context_bytes
        fits = reserved <= room or caching.serve(blocks, room, expandable_segments)[1]
    return DevicePeak(
        tensors,
        live - tensors,
        blocks.peak_bytes - live,
        reserved - blocks.peak_bytes,
        machine.context_bytes,
        memory_bytes,
        fits,
    )


def stream(
    captured: Captured,
    machine: Machine,
    loop: Loop,
    workspaces: bool = True,
    update: tuple[Updates | None, int, int] | None = None,
) -> Intervals:
    """Returns all mallocs and frees of the loop's iterations in order; ``update``: a known result of ``_update``."""
    program = captured.program
    trace = _MallocTrace()
    sizes = [tensor.nbytes for tensor in program.tensors]
    persistent = {t: tensor.kind for t, tensor in enumerate(program.tensors) if tensor.persistent}
    events, begin, end = update or _update(captured)
    for t, kind in persistent.items():
        if kind in ("parameter", "buffer", "gradient"):
            trace.malloc(sizes[t])
    for nbytes in () if events else (x.nbytes for x in program.tensors if x.kind == "optimizer_state"):
        trace.malloc(nbytes)
    backward = next((k for k, kernel in enumerate(program.kernels) if kernel.phase == "backward"), -1)
    holds = captured.holds
    end_of_step = len(program.kernels)
    kept_outputs = frozenset(holds.outputs if loop.keeps_outputs else ())
    gradients = frozenset(holds.gradients)
    zero = {None: holds.zero_grad, "start": -2, "backward": backward, "end": end_of_step, "never": -1}[loop.zero_grad]
    born, dies = _lives(program)
    batch: list[int] = []
    held_outputs: list[tuple[int, int]] = []  # outputs of the model with their iteration
    summed: dict[int, int] = {}  # gradients of the last iteration
    state: dict[int, int] = {}  # optimizer state
    handles: set[str] = set()  # phases, whose threads each have a cuBLAS workspace

    def zero_grad() -> None:
        trace.free(*summed.values())
        summed.clear()

    for iteration in range(loop.iterations):
        if zero == -2:
            zero_grad()
        last_batch = batch
        if not loop.batch_overlaps:
            trace.free(*last_batch)
        batch = [trace.malloc(sizes[t]) for t, kind in persistent.items() if kind == "input"]
        if loop.batch_overlaps:
            trace.free(*last_batch)
        live: dict[int, int] = {}
        for k, kernel in enumerate(program.kernels):
            if k == holds.outputs_end:
                trace.free(*(block for block, _ in held_outputs))
                held_outputs = []
            if k == zero:
                zero_grad()
            if events is not None and begin <= k < end:
                for block, nbytes in () if k > begin else events.later if iteration else events.first:
                    if nbytes:
                        state[block] = trace.malloc(nbytes)
                    else:
                        trace.free(state.pop(block))
            else:
                if workspaces and kernel.kind == "matmul" and kernel.phase not in handles:
                    handles.add(kernel.phase)
                    trace.malloc(machine.cublas_workspace_bytes)
                spaces = list(_workspaces(captured, k)) if workspaces and machine.convolution_copies else []
                for t, space in itertools.zip_longest(born[k], spaces[: len(born[k])], fillvalue=0):
                    live[t] = trace.malloc(sizes[t])
                    if space:
                        trace.free(trace.malloc(space))
            for t in dies[k]:
                if t not in live:
                    continue  # part of the update
                block = live.pop(t)
                if t in gradients and t not in summed:
                    summed[t] = block
                elif t in kept_outputs and t not in gradients:
                    held_outputs.append((block, iteration))
                else:  # also a gradient that is accumulated into the existing one
                    trace.free(block)
        if zero == end_of_step:
            zero_grad()
        if holds.outputs_end == end_of_step:
            trace.free(*(block for block, since in held_outputs if since < iteration))
            held_outputs = [(block, since) for block, since in held_outputs if since == iteration]
    return trace.intervals()


def _lives(program: Program) -> tuple[list[list[int]], list[list[int]]]:
    """Returns per kernel the tensors it creates, in output order, and those that die after it."""
    born: list[list[int]] = []
    first: dict[int, int] = {}
    for k, kernel in enumerate(program.kernels):
        created = (t for t in kernel.outputs if not program.tensors[t].persistent)
        born.append([t for t in created if first.setdefault(t, k) == k])
    dies: list[list[int]] = [[] for _ in program.kernels]
    for t in sorted(first):
        dies[program.accesses[t][-1]].append(t)
    return born, dies


def _update(captured: Captured) -> tuple[Updates | None, int, int]:
    """Returns mallocs and frees of the only optimizer, and the kernels they replace.

    The first is None if the optimizer updates nothing, or in parts during the backward pass.
    """
    program = captured.program
    touches = [
        k
        for k, kernel in enumerate(program.kernels)
        if kernel.phase == "optimizer"
        and any(program.tensors[t].kind in ("parameter", "optimizer_state") for t in kernel.accesses)
    ]
    if len(captured.settings) != 1 or not touches or captured.early_update:
        return None, -1, -1
    optimizer = captured.settings[0][0]
    used = {t for k in touches for t in program.kernels[k].accesses}
    places = {
        id(s): captured.values[n]
        for n, s in zip(captured.placeholders, captured.sources, strict=True)
        if s is not None and n in captured.values
    }
    idle = [p for g in optimizer.param_groups for p in g["params"] if places.get(id(p)) not in used]
    try:
        return updates(optimizer, idle), touches[0], touches[-1] + 1
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".replace("\n", " ")
        raise ValueError(
            f"the step of {type(optimizer).__name__} cannot be traced ({reason}); use an optimizer of torch.optim"
        ) from error


class Updates(NamedTuple):
    """Events of the first step and of every later one; blocks of the first that are not freed persist."""

    first: tuple[Event, ...]
    later: tuple[Event, ...]


class _StorageRecorder(TorchDispatchMode):
    """Records creation and release of GPU storages."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.live: dict[StorageWeakRef, int] = {}
        self.ignored: set[int] = set()
        self.count = 0

    def reap(self) -> None:
        """Records storages released since the last operator."""
        expired = torch.UntypedStorage._expired  # StorageWeakRef.expired without its overhead
        for key in [key for key in self.live if expired(key.cdata)]:
            self.events.append((self.live.pop(key), 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reap()
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == "cuda":
                key = StorageWeakRef(tensor.untyped_storage())
                if key not in self.live and key.cdata not in self.ignored and tensor.untyped_storage().nbytes():
                    self.live[key] = self.count
                    self.events.append((self.count, tensor.untyped_storage().nbytes()))
                    self.count += 1
        return out


def updates(optimizer: Optimizer, without_grad: Sequence[Tensor] = ()) -> Updates:
    """Returns the mallocs and frees of an optimizer's steps on CUDA: state of the first step, and temporaries.

    Blocks are numbered from 0. The optimizer's own code runs on fake CUDA parameters, which need no GPU, with the GPU's
    default for ``foreach`` unless the user chose one.

    Args:
        optimizer: optimizer with its parameters; it is not changed.
        without_grad: parameters that get no gradient.

    Returns:
        block events of the first step and of a later one.

    Raises:
        Exception: the optimizer's own, if its code reads values of fake tensors.
    """
    without_grad_ids = {id(p) for p in without_grad}
    clone = copy.copy(optimizer)
    with FakeTensorMode() as mode, torch.no_grad():
        groups = []
        for group in optimizer.param_groups:
            params = []
            for p in group["params"]:
                fake = nn.Parameter(
                    torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device="cuda"), p.requires_grad
                )
                if p.requires_grad and id(p) not in without_grad_ids:
                    fake.grad = torch.empty_like(fake)
                params.append(fake)
            options = {
                k: torch.empty_like(v, device=v.device) if isinstance(v, Tensor) else v
                for k, v in group.items()
                if k != "params"
            }
            if options.get("foreach", 0) is None and not options.get("fused"):
                options["foreach"] = chooses_foreach(group, on_cuda=True)
            groups.append({**options, "params": params})
        vars(clone)["param_groups"], vars(clone)["state"] = groups, defaultdict(dict)
        recorder = _StorageRecorder()
        recorder.ignored = {
            StorageWeakRef(t.untyped_storage()).cdata
            for g in groups
            for p in g["params"]
            for t in (p, p.grad)
            if t is not None
        }
        parts = []
        del mode
        for _ in range(2):
            recorder.events = []
            with recorder:
                type(clone).step(clone)
            recorder.reap()
            parts.append(tuple(recorder.events))
    return Updates(*parts)


def _workspaces(captured: Captured, k: int) -> Iterator[int]:
    """Yields for each result of a convolution kernel the temporary bytes of cuDNN; nothing for other kernels."""
    node = captured.nodes[k][0] if captured.nodes[k] else None
    if node is None or node.target not in (aten.convolution.default, aten.convolution_backward.default):
        return
    backward = node.target is aten.convolution_backward.default
    y, x, w = node.args[:3] if backward else (node, *node.args[:2])
    groups = node.args[9 if backward else 8]
    channels_first = x.meta["tensor_meta"].stride[1] != 1 or x.meta["tensor_meta"].shape[1] == 1
    # cuDNN's kernel needs channels last and copies image, result and filters if they have channels first.
    copies = sum(map(_nbytes, (x, y, w))) if groups == 1 and channels_first else 0
    for needs_grad in node.args[10][:2] if backward else (True,):  # gradients of image and filters
        if needs_grad:
            yield copies


def _nbytes(node: fx.Node) -> int:
    meta = node.meta["tensor_meta"]
    return math.prod(meta.shape) * meta.dtype.itemsize


aten = torch.ops.aten
