"""Tests the order of the update in ``experiments.plan``, and Ctrl-C during its capture."""

from __future__ import annotations

import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor.capture.capture import CaptureError
from experiments import workloads
from experiments.plan import __main__ as command, capture, words
from experiments.plan.answer import Order
from experiments.plan.page import render_html
from experiments.plan.usage import fit_call
from simulator import Machine
from tests.experiments.conftest import Run, refused
from tests.experiments.test_plan import answered

pytestmark = pytest.mark.usefixtures("counted")
MACHINE = Machine.load("h100")
FACTORY = """
import torch
from torch import nn, optim

def parts(clip=None):
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(8)))
        batch = torch.empty(64, 4096), torch.empty(64, 4096)
    optimizer = optim.AdamW(model.parameters(), foreach=True)
    def step(x, y):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if clip is not None:
            clip(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()
    return step, batch

def by_norm():
    return parts(nn.utils.clip_grad_norm_)

def by_value():
    return parts(nn.utils.clip_grad_value_)
"""
press = partial(signal.raise_signal, signal.SIGINT)


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ordered.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))


def ordered(name: str, in_backward: Any = "auto") -> capture.Step:
    return capture.step({"name": name, "target": f"ordered:{name}"}, MACHINE, None, in_backward)


def chosen(step: capture.Step, limit: int) -> tuple[capture.Step, Order]:
    return command.choose_order(step, MACHINE, lambda _: limit, "joint", 2.0, 0)


@pytest.mark.usefixtures("factories")
def test_the_faster_order_is_planned_and_what_clipping_costs_is_said() -> None:
    late = ordered("by_value")
    assert late.early is not None and late.early.in_backward and not late.in_backward
    peaks = late.program.peak_bytes, late.early.program.peak_bytes
    assert peaks[1] < 0.95 * peaks[0]
    step, order = chosen(late, peaks[0])
    assert (step, order) == (late, Order(False))  # it fits
    step, order = chosen(late, peaks[1])
    assert step is late.early and order.in_backward and order.peak_bytes == peaks
    assert order.overheads is not None and order.overheads[1] == 0.0 < order.overheads[0]
    assert ordered("by_value", True).program.peak_bytes == peaks[1]
    assert ordered("by_value", False).program.peak_bytes == peaks[0]
    # With the norm, the page names the line, and what clipping by value would give.
    late = ordered("by_norm")
    assert late.early is None and late.changed is not None
    assert late.changed.peak_bytes == pytest.approx(peaks[1], rel=0.01)
    step, blocked = chosen(late, late.changed.peak_bytes)
    assert step is late and blocked.changed == (late.changed.peak_bytes, 0.0)
    assert "ordered.py:14" in blocked.obstacle and "clip_grad_value_" in blocked.obstacle
    with pytest.raises(CaptureError, match=r"ordered.py:14.* peak would then be .* GB"):
        ordered("by_norm", True)
    a = replace(answered(late.program, late.program.peak_bytes), order=order)
    (line,) = words.update_order(a)
    assert "optimizer_in_backward=True" in line and "+0.00%" in line and a.size(peaks[1]) in line
    assert "with the optimizer in the backward pass" in words.verdict(a) and line in render_html(a, "typed")
    cause, gain = words.update_order(replace(a, order=blocked))
    assert blocked.obstacle in cause and a.size(late.changed.peak_bytes) in gain and "+0.00%" in gain


def test_the_call_of_fit_has_the_order(tmp_path: Path) -> None:
    call = fit_call("m:f", "24GiB", "h100", tmp_path, in_backward=True)
    assert "planner=plan, optimizer_in_backward=True)" in call
    call = fit_call("m:f", "24GiB", "h100", None, in_backward=True)
    assert "machine='h100', optimizer_in_backward=True)" in call and "saved_plan" not in call
    compile(call, "call", "exec")


def test_a_program_file_has_one_order(run: Run, program_file: Path) -> None:
    refused(run("plan", f"program={program_file}", "memory=0.6", "optimizer_in_backward=true"), "program file")


class Pressing(nn.Module):
    """Presses Ctrl-C in its forward or backward pass, and leaves a file at the end of each."""

    def __init__(self, in_backward: bool, folder: Path) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.in_backward = in_backward
        self.folder = folder  # a capture restores Python objects that the step changes

    def forward(self, x: Tensor) -> Tensor:
        if not self.in_backward:
            press()
        x = _Press.apply(self.layer(x), self.folder) if self.in_backward else self.layer(x)
        (self.folder / "forward").touch()
        return x


class _Press(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, folder: Path) -> Tensor:
        ctx.folder = folder
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        press()
        gradient = gradient * 2
        (ctx.folder / "backward").touch()
        return gradient, None


@pytest.mark.parametrize("in_backward", [False, True])
def test_ctrl_c_ends_a_capture_at_the_next_operator(
    in_backward: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Pressing(in_backward, tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    parts = model, nn.MSELoss(), optimizer, (torch.zeros(2, 4), torch.zeros(2, 4))
    monkeypatch.setattr(workloads, "build", lambda _: parts)
    with pytest.raises(KeyboardInterrupt):
        workloads.load({"name": "pressing", "target": "m:f"}, MACHINE, as_cuda=True)
    assert [file.name for file in tmp_path.iterdir()] == ["forward"] * in_backward
