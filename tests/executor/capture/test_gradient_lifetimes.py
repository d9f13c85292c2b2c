"""Tests that gradients of a captured step end at their last use, unless the user asks to keep them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor import PlannedStep, capture, capture_step
from executor.capture.captured import Captured
from executor.training.check import eager_peak
from simulator import Plan
from simulator.modes import least_residency

BLOCKS = 8
WIDTH = 64
ROWS = 4


def network() -> nn.Sequential:
    """Returns equal blocks whose gradients take far more memory than their feature maps."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)))


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


def captured(keep_grads: bool = False, **options: Any) -> Captured:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    return capture(model, nn.MSELoss(), optimizer, batch(), keep_grads=keep_grads, **options)


def empty(step: Captured) -> Plan:
    return Plan.of(step.program, ())


def last_readers(step: Captured) -> set[str]:
    """Returns the phases of the last kernels that use the gradients of parameters."""
    program = step.program
    return {program.kernels[program.accesses[t][-1]].phase for t in step.holds.gradients}


def test_least_memory_of_equal_blocks_falls() -> None:
    released, kept = captured(), captured(keep_grads=True)
    gradients = sum(released.program.tensors[t].nbytes for t in released.holds.gradients)
    assert len(released.holds.gradients) == 2 * BLOCKS and gradients == BLOCKS * (WIDTH + 1) * WIDTH * 4
    # Kept gradients are all in memory after the update; otherwise a block's parameters, gradients and state suffice.
    assert least_residency(kept.program, 1) >= gradients
    assert least_residency(released.program, 1) < gradients
    # The marker at the end reads the loss, which the step returns.
    assert [len(step.program.kernels[-1].inputs) for step in (released, kept)] == [1, 1 + 2 * BLOCKS]
    # In eager mode both hold all gradients until the end.
    assert eager_peak(released) == eager_peak(kept) == kept.program.peak_bytes > released.program.peak_bytes


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, zero: str) -> Tensor:
    """Runs a step that clears gradients before or after it, to None or to zero, or not at all."""
    if zero == "before":
        optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    if zero == "by hand":
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
    else:
        optimizer.step()
    if zero in ("after", "to zero"):
        optimizer.zero_grad(set_to_none=zero == "after")
    return loss


@pytest.mark.parametrize("zero", ["before", "after", "to zero", "by hand"])
def test_steps_of_ones_own_release_gradients_wherever_they_clear_them(zero: str) -> None:
    models = network(), network()
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    steps = [partial(stepped, *pair, zero=zero) for pair in zip(models, optimizers, strict=True)]
    example = batch()
    step = capture_step(steps[0], *example)
    assert not [k for k in step.program.kernels if k.name == "marker" and set(k.inputs) & set(step.holds.gradients)]
    assert "backward" not in last_readers(step)
    planned = PlannedStep(step, empty(step))
    for _ in range(3):
        x, y = batch()
        for p in models[1].parameters():
            p.grad = None
        assert torch.equal(planned(x, y), steps[1](x, y).detach())
        assert all(p.grad is None for p in models[0].parameters())
    assert all(torch.equal(p, q) for p, q in zip(*(m.parameters() for m in models), strict=True))


@pytest.mark.parametrize("options", [{"accumulate": 2}, {"clip_norm": 0.1}, {"accumulate": 2, "clip_norm": 0.1}])
def test_accumulated_and_clipped_gradients_live_until_the_update(options: dict[str, Any]) -> None:
    step = captured(**options)
    assert len(step.holds.gradients) == 2 * BLOCKS and last_readers(step) == {"optimizer"}
    first = min(k for k, kernel in enumerate(step.program.kernels) if kernel.phase == "optimizer")
    assert all(step.program.accesses[t][0] < first for t in step.holds.gradients)


def test_kept_gradients_are_left_in_grad() -> None:
    def gradients(keep_grads: bool) -> list[Tensor | None]:
        model = network()
        torch.manual_seed(1)
        example = batch()
        step = capture(model, nn.MSELoss(), torch.optim.AdamW(model.parameters()), example, keep_grads=keep_grads)
        PlannedStep(step, empty(step))(*example)
        return [p.grad for p in model.parameters()]

    assert gradients(False) == [None] * (2 * BLOCKS)
    model = network()
    torch.manual_seed(1)
    x, y = batch()
    nn.functional.mse_loss(model(x), y).backward()
    for kept, p in zip(gradients(True), model.parameters(), strict=True):
        assert kept is not None and p.grad is not None and torch.equal(kept, p.grad)
