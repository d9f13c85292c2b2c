"""Real networks for measurements: builds them with random weights and times their training steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import agents
from agents.planner import MIB
from executor.capture.capture import Captured, capture
from executor.memory.pinned import CUDA, available
from experiments.workloads import llama, resnet, transformers, vgg
from simulator.machine import Machine
from simulator.program import Program


@dataclass(frozen=True, eq=False)
class Network:
    """A model with its loss, optimizer, one batch, and its blocks (the units of checkpointing)."""

    name: str
    model: nn.Module
    loss_fn: nn.Module
    optimizer: torch.optim.Optimizer
    batch: tuple[Tensor, Tensor]
    blocks: tuple[nn.Module, ...]

    def captured(self, machine: Machine, check: bool = True) -> Captured:
        """Returns the captured step with durations for ``machine``; raises CaptureError."""
        return capture(
            self.model, self.loss_fn, self.optimizer, self.batch, machine=machine, name=self.name, check=check
        )

    def step(self, forward: Callable[[Tensor], Any] | None = None) -> Tensor:
        """Runs one eager training step, with ``forward`` instead of the model if given, and returns the loss."""
        x, y = self.batch
        run = (
            self.model if forward is None else forward
        )  # the truth of a compiled model is its length, which it may lack
        loss: Tensor = self.loss_fn(run(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


Parts = tuple[nn.Module, tuple[Tensor, Tensor], nn.Module]  # model, batch, loss


class Autocast(nn.Module):
    """A model under bfloat16 autocast."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Computes the model under autocast."""
        with torch.autocast(x.device.type, torch.bfloat16):
            out: Tensor = self.model(x)
        return out


def _images(model: nn.Module, batch: int, size: int = 32, classes: int = 10) -> Parts:
    return model, (torch.randn(batch, 3, size, size), torch.randint(classes, (batch,))), nn.CrossEntropyLoss()


def _channels_last(model: nn.Module, batch: int, size: int, classes: int, half: bool) -> Parts:
    """Returns an image model and batch in channels-last format; ``half``: bfloat16 autocast with a float32 loss."""
    model, (x, y), loss = _images(model.to(memory_format=torch.channels_last), batch, size, classes)
    x = x.contiguous(memory_format=torch.channels_last)
    return (Autocast(model), (x, y), llama.Loss()) if half else (model, (x, y), loss)


def _text(model: nn.Module, batch: int, length: int, words: int, half: bool = False) -> Parts:
    """Returns a text model and batch; ``half``: everything in bfloat16 except the float32 loss."""
    data = torch.randint(words, (batch, length)), torch.randint(words, (batch * length,))
    return (model.to(torch.bfloat16), data, llama.Loss()) if half else (model, data, nn.CrossEntropyLoss())


def _llama(layers: int, width: int, heads: int, hidden: int, words: int, length: int) -> nn.Module:
    """Returns a Llama with PyTorch's RMSNorm, so that torch.compile can fuse it as usual."""
    model = llama.Llama(layers, width, heads, max(1, heads // 8), words, length, lambda: llama.SwiGLU(width, hidden))
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, llama.RMSNorm):
                setattr(module, name, nn.RMSNorm(len(child.weight), child.epsilon, device=child.weight.device))
    return model


def _tiny_resnet() -> nn.Module:
    blocks = [resnet.Block(8, 8, 1, 2), resnet.Block(8, 8, 1, 2), resnet.Block(8, 16, 2, 2)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *blocks, nn.AvgPool2d(8), nn.Flatten(), nn.Linear(16, 10))


def _resnet50() -> nn.Module:
    return resnet.ImageNetResNet((3, 4, 6, 3))


def _gpt2() -> nn.Module:
    return transformers.GPT2(*transformers.GPT2_SIZES["medium"])


# Name -> (default batch size, function of the batch size that returns model, batch and loss). The Llama has twelve
# blocks of TinyLlama 1.1B.
NETWORKS: dict[str, tuple[int, Callable[[int], Parts]]] = {
    "vgg16": (100, lambda n: _images(vgg.VGG(16), n)),
    "resnet50": (100, lambda n: _images(resnet.ResNet(50), n)),
    "resnet50_imagenet": (64, lambda n: _channels_last(_resnet50(), n, 224, 1000, False)),
    "resnet50_imagenet_bf16": (64, lambda n: _channels_last(_resnet50(), n, 224, 1000, True)),
    "gpt2_medium": (8, lambda n: _text(_gpt2(), n, transformers.CONTEXT, 50257)),
    "gpt2_medium_bf16": (8, lambda n: _text(_gpt2(), n, transformers.CONTEXT, 50257, True)),
    "llama_bf16": (4, lambda n: _text(_llama(12, 2048, 32, 5632, 32000, 2048), n, 2048, 32000, True)),
    "tiny_resnet": (8, lambda n: _images(_tiny_resnet(), n, 16)),
    "tiny_resnet_bf16": (8, lambda n: _channels_last(_tiny_resnet(), n, 16, 10, True)),
    "tiny_gpt2": (4, lambda n: _text(transformers.GPT2(2, 32, 2, vocabulary=64, context=16), n, 16, 64)),
    "tiny_llama_bf16": (4, lambda n: _text(_llama(2, 32, 2, 64, 64, 16), n, 16, 64, True)),
}
BLOCKS = (resnet.Block, resnet.Bottleneck, transformers.Block, llama.Block)


def own_batch(name: str) -> int:
    """Returns the default batch size of a network."""
    return NETWORKS[name][0]


def block_count(name: str) -> int:
    """Returns the number of blocks (the units of checkpointing)."""
    with torch.device("meta"):
        model, *_ = NETWORKS[name][1](1)
    return sum(isinstance(module, BLOCKS) for module in model.modules())


def build(name: str, device: str, seed: int = 0, batch: int | None = None) -> Network:
    """Builds a network with random weights after freeing the memory of unused ones.

    Text networks train with fused AdamW, which a CUDA graph can hold and which is PyTorch's fastest; others with SGD.

    Args:
        name: key of NETWORKS.
        device: "cuda" or "cpu".
        seed: seed of weights and batch, reproducible on one device.
        batch: batch size; default: the network's own.

    Returns:
        Model, loss, optimizer and batch.
    """
    free_cache()
    torch.manual_seed(seed)
    default_size, make = NETWORKS[name]
    with torch.device(device):
        model, data, loss_fn = make(batch or default_size)
    text = data[0].dtype == torch.int64
    optimizer: torch.optim.Optimizer = (
        torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        if text
        else torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    )
    blocks = tuple(m for m in model.modules() if isinstance(m, BLOCKS))
    return Network(name, model, loss_fn, optimizer, data, blocks)


def timed(step: Callable[[], object], count: int, device: str) -> list[int]:
    """Runs ``count`` steps and returns their durations in ns.

    On CUDA the steps follow each other without synchronization, as in training, and events measure each step.
    """
    times: list[int] = []
    if device != "cuda":
        for _ in range(count):
            begin = time.perf_counter_ns()
            step()
            times.append(time.perf_counter_ns() - begin)
        return times
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [round(1e6 * a.elapsed_time(b)) for a, b in pairwise(marks)]


def time_in_turns(
    step: Callable[[], object],
    other: Callable[[], object],
    count: int,
    device: str,
    other_bytes: int = 0,
    on_turn: Callable[[bool], object] = bool,
    reserved: bool = False,
) -> tuple[list[int], list[int], int]:
    """Times two alternating steps, so that changes of the GPU's clock affect both.

    Args:
        step: first step function.
        other: second step function.
        count: measured steps of each, at least 1, in up to four turns of one unmeasured step and some measured ones.
        device: "cuda" or "cpu".
        other_bytes: device memory in bytes that does not belong to ``step``.
        reserved: whether the peak is of reserved instead of allocated memory.
        on_turn: called before each turn with True for ``step``, False for ``other``.

    Returns:
        Times of ``step`` in ns, times of ``other`` in ns, and the peak memory of ``step`` in bytes (0 on the CPU).
    """
    times: tuple[list[int], list[int]] = ([], [])
    turns = min(4, count)
    peak = 0
    for i in range(turns):
        for is_first, run in ((True, step), (False, other)):
            if device == "cuda":
                peak_of = torch.cuda.max_memory_reserved if reserved else torch.cuda.max_memory_allocated
                peak = peak if is_first else max(peak, peak_of() - other_bytes)
                free_cache()
                torch.cuda.reset_peak_memory_stats()
            on_turn(is_first)
            run()
            times[not is_first].extend(timed(run, count * (i + 1) // turns - count * i // turns, device))
    return *times, peak


def limit_of(program: Program, fraction: float) -> int:
    """Returns the limit in bytes: persistent tensors plus a fraction of the activation peak."""
    persistent = sum(t.nbytes for t in program.tensors if t.persistent)
    return persistent + round(fraction * (program.peak_bytes - persistent))


def free_cache() -> None:
    """Frees unused memory of PyTorch's device and pinned-memory caches."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        if hasattr(torch._C, "_host_emptyCache"):  # pinned memory, PyTorch 2.6 and later
            torch._C._host_emptyCache()


def allocated_bytes(device: str) -> int:
    """Returns the device memory of PyTorch's tensors in bytes; 0 on the CPU."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def reserved_bytes(device: str) -> int:
    """Returns the device memory in bytes that PyTorch's allocator has reserved; 0 on the CPU."""
    return torch.cuda.memory_reserved() if device == "cuda" else 0


def synchronize(device: str) -> None:
    """Waits for the kernels and copies of a GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


def cap_memory(nbytes: float | None, device: str) -> None:
    """Caps the device memory that PyTorch may reserve at ``nbytes``; None removes the cap."""
    if device == "cuda":
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if nbytes is None else min(1.0, nbytes / total))


def get_planner(planner: str, program: Program, **candidates: Any) -> agents.Planner:
    """Returns a planner with those options of ``candidates`` that it accepts; small tensors stay on the device."""
    options = {**candidates, "min_bytes": max(1, min(MIB, program.peak_bytes // 500))}
    return agents.make(planner, **{key: options[key] for key in options.keys() & agents.options(planner)})


def host_bytes() -> int:
    """Returns the host memory in bytes that may be pinned: three quarters of the available memory."""
    CUDA.drop()
    return available()[0] * 3 // 4
