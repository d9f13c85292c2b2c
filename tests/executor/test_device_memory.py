"""Tests of device-memory peaks: a loop's mallocs and frees by hand, their parts, CUDA's updates, and verdicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from executor.capture.capture import capture, capture_step
from executor.capture.captured import Captured
from executor.device_memory import Loop, card_peak, stream, updates
from simulator.machine import Machine

MACHINE = replace(Machine.load("a100_40gb"), context_bytes=0, cublas_workspace_bytes=0)
MIB = 2**20


@cache
def linear(optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, width: int = 1024) -> Captured:
    """Captures two linear layers of 4 MiB with a result of 4 MiB."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, width, bias=False))
        x = torch.empty(width, width)
        created = optimizer(model.parameters(), lr=0.1)
        return capture(model, F.mse_loss, created, (x, torch.empty(width, width)))


def test_the_parts_are_the_sum_and_the_peak_is_above_the_ledger() -> None:
    captured = linear()
    parts = card_peak(captured, replace(MACHINE, context_bytes=100 * MIB, cublas_workspace_bytes=8 * MIB))
    assert parts.tensors == captured.program.peak_bytes and parts.context == 100 * MIB
    assert parts.workspaces == 16 * MIB  # a handle of cuBLAS for the forward pass, one for the backward pass's thread
    assert parts.nbytes == parts.tensors + parts.loop + parts.workspaces + parts.allocator + parts.context
    assert min(parts.loop, parts.allocator) >= 0 and parts.fits is None
    assert parts.reserved % (2 * MIB) == 0  # of whole segments


def test_the_models_result_lives_until_the_next() -> None:
    captured = linear()
    assert len(captured.holds.outputs) == 1
    alive, dropped = (stream(captured, MACHINE, Loop(keeps_outputs=k)) for k in (True, False))
    assert len(alive) == len(dropped) and (alive.upper - alive.lower).sum() > (dropped.upper - dropped.lower).sum()
    single = stream(captured, MACHINE, Loop(iterations=1, keeps_outputs=False))
    assert single.peak_bytes <= dropped.peak_bytes <= alive.peak_bytes


@pytest.mark.parametrize(("zero_grad", "more"), [("start", 0), ("end", 0), ("backward", 8), ("never", 8)])
def test_gradients_that_live_into_the_next_forward_pass(zero_grad: str, more: int) -> None:
    """Without an earlier zero_grad, 8 MiB of gradients are still alive before the backward pass."""

    def peak(loop: Loop) -> int:
        captured = linear()
        blocks = stream(captured, MACHINE, replace(loop, iterations=2, keeps_outputs=False))
        start = sorted(blocks.lower[blocks.nbytes == 4 * MIB])
        # The second iteration's first matrix product: after two parameters, the batch, and the first iteration.
        forward = next(k for k, kernel in enumerate(captured.program.kernels) if kernel.kind == "matmul")
        assert forward == 0
        halfway = start[len(start) // 2 + 2]
        return int(blocks.nbytes[(blocks.lower < halfway) & (blocks.upper > halfway)].sum())

    assert peak(Loop(zero_grad=zero_grad)) - peak(Loop(zero_grad="start")) == more * MIB


def test_where_the_captured_step_has_its_zero_grad() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def never(x: Tensor, between: Callable[[], None] = lambda: None) -> Tensor:
        loss = model(x).sum()
        between()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def zeroing(x: Tensor) -> Tensor:
        return never(x, optimizer.zero_grad)

    zeroed, accumulated = (capture_step(step, torch.randn(4, 8)) for step in (zeroing, never))
    position = zeroed.holds.zero_grad
    kernels = zeroed.program.kernels
    assert kernels[position - 1].phase == "forward" and kernels[position].phase == "backward"
    assert accumulated.holds.zero_grad == -1 and len(accumulated.holds.gradients) == 2
    assert nn.Module.zero_grad.__qualname__ == "Module.zero_grad"  # as it was
    assert linear().holds.zero_grad == len(linear().program.kernels)


def test_state_is_made_at_the_first_step_and_foreach_takes_as_much_as_the_parameters() -> None:
    params = [nn.Parameter(torch.empty(256, 1024, device="meta")) for _ in range(4)]  # 1 MiB each
    recorded = updates(torch.optim.Adam(params, lr=0.1))
    nbytes_of = {block: nbytes for block, nbytes in recorded.first if nbytes}
    persistent = set(nbytes_of) - {block for block, nbytes in recorded.first if not nbytes}
    assert sum(nbytes_of[block] for block in persistent) == 2 * 4 * MIB

    def most(events: tuple[tuple[int, int], ...]) -> int:
        live = 0
        peak = 0
        sizes = dict(nbytes_of)
        for block, nbytes in events:
            sizes[block] = nbytes or sizes[block]
            live += nbytes or -sizes[block]
            peak = max(peak, live)
        return peak

    assert most(recorded.later) == 4 * MIB  # the square roots, in place from there on
    single = updates(torch.optim.Adam(params, lr=0.1, foreach=False))
    assert most(single.later) == 3 * MIB  # of one parameter, while the next begins
    assert updates(torch.optim.SGD(params, lr=0.1)).later == ()
    assert updates(torch.optim.SGD(params, lr=0.1), without_grad=params).first == ()


def test_what_fits() -> None:
    captured = linear(torch.optim.Adam)
    reserved = card_peak(captured, MACHINE).reserved
    assert card_peak(captured, MACHINE, memory_bytes=reserved).fits
    assert not card_peak(captured, MACHINE, memory_bytes=captured.program.peak_bytes - 1).fits
    assert not card_peak(captured, replace(MACHINE, context_bytes=reserved), memory_bytes=reserved).fits
    estimate = card_peak(captured, MACHINE, memory_bytes=reserved)
    assert estimate.limit == estimate.tensors
    half = card_peak(captured, MACHINE, memory_bytes=reserved // 2)
    assert not half.fits and 1 < half.limit < estimate.tensors * 6 // 10
    with pytest.raises(ValueError, match="memory_bytes: not given"):
        _ = card_peak(captured, MACHINE).limit
    growing = card_peak(captured, MACHINE, expandable_segments=True)
    assert growing.reserved <= reserved + 20 * MIB and growing.reserved % (2 * MIB) == 0


def test_copies_of_a_convolution_are_image_result_and_filters() -> None:
    """An H100 used 13.15 GB besides image and result for conv2 of VGG13 with 512 images of 224 px."""
    with torch.device("meta"):
        model = nn.Conv2d(64, 64, 3, padding=1)
        x = torch.empty(512, 64, 224, 224)
        captured = capture(model, lambda out, _: out.sum(), None, (x, x))
    with_copies = card_peak(captured, replace(MACHINE, convolution_copies=True), Loop(iterations=1))
    without = card_peak(captured, MACHINE, Loop(iterations=1))
    assert without.workspaces == 0
    copies = 2 * x.nbytes + 64 * 64 * 9 * 4  # 4 bytes a number
    assert round(copies / 1e7) == 1315 and copies - 8 <= with_copies.workspaces <= copies  # the loss comes later
