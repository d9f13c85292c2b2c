"""Tests of the executor's refusals: the type of the error, and the entry that its message names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor import Captured, CaptureError, FitError, capture, capture_step, fit
from executor.calibrate import _fit, calibrate
from executor.capture.profile import ProfileError, with_profile
from executor.capture.profiler import measure
from executor.device_memory import Loop, card_peak
from executor.replay.backend import BackendError
from executor.replay.host_backend import HostBackend
from simulator import FormatError, Machine, OutOfMemory, Plan, Program
from tests.executor.capture.test_durations import GPU as ROUND
from tests.executor.capture.test_profile import PROFILE, PROGRAM
from tests.executor.conftest import Tiny
from tests.executor.networks import sgd, small

H200 = Machine.load("h200")
X = torch.ones(2, 3)
SLOW = Machine("slow", 50_000, 10**9, 10**9)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if (x * self.weight).sum() > 0 else x


class Reads(torch.optim.SGD):
    """Reads numbers of tensors on a GPU."""

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.device.type == "cuda" and float(p.grad.sum()) > 0:
                p.add_(1)
            p.add_(p.grad)


def captured(
    loss_fn: Any = nn.functional.cross_entropy, batch: Any = None, optimizer: Callable[..., Any] = sgd, **options: Any
) -> Captured:
    """Captures a small network."""
    model = small()
    x = torch.randn(2, 3, 16, 16)
    y = torch.zeros(2, dtype=torch.long)
    return capture(model, loss_fn, optimizer(model), batch or (x, y), **options)


def linear(optimizer: Callable[..., Any], **options: Any) -> Captured:
    model = nn.Linear(3, 3)
    return capture(model, nn.MSELoss(), optimizer(model.parameters(), lr=0.1), (X, X), **options)


def profile(**changes: Any) -> Any:
    return type(PROFILE).from_dict({**PROFILE.to_dict(), **changes})


def coefficients(**changes: Any) -> Machine:
    data = ROUND.to_dict()
    assert Machine.from_dict(data) == ROUND
    return Machine.from_dict({**data, "kernel_times": {**data["kernel_times"], **changes}})


def attention(q: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, q, q)


LBFGS = torch.optim.LBFGS
OTHER = Program("two", PROGRAM.tensors[:1] * 2, PROGRAM.kernels)
# Error type, pattern of its message, and the refused call.
ROWS: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    (CaptureError, "Python depends on the values of a tensor", lambda: capture_step(Branching(), X)),
    (CaptureError, "shape of a result depends on the values", lambda: capture_step(lambda x: x[x > 0], X)),
    (CaptureError, "RuntimeError", lambda: capture_step(lambda x: x @ x, X)),
    (CaptureError, "returns a str", lambda: capture_step(lambda x: "text", X)),
    (CaptureError, "returns a float", lambda: capture_step(lambda x: (x + 1).mean().item(), X)),
    (CaptureError, "no tensor operation", lambda: capture_step(lambda x: None, X)),
    (CaptureError, "ZeroDivisionError", lambda: capture_step(lambda x: 1 / 0, X)),
    (CaptureError, "cudnn.enabled", lambda: capture_step(lambda x: torch.empty(0).set_(x.untyped_storage()) + 1, X)),
    (CaptureError, "pair", lambda: captured(batch=(torch.randn(2, 3, 16, 16),))),
    (CaptureError, "loss is a tensor of shape", lambda: captured(lambda out, y: out)),
    (CaptureError, "loss is float", lambda: captured(lambda out, y: 0.0)),
    (CaptureError, "a data-dependent number of times", lambda: captured(optimizer=lambda m: LBFGS(m.parameters()))),
    (
        CaptureError,
        r"machine\.capability",
        lambda: capture_step(attention, X[None, None], machine=replace(H200, capability=""), as_cuda=True),
    ),
    (FormatError, r"machine\.flops_per_s", lambda: linear(torch.optim.SGD, machine=replace(ROUND, flops_per_s={}))),
    *(
        (FormatError, rf"machine\.kernel_times\.{key}: .*, got {value}", lambda k=key, v=value: coefficients(**{k: v}))
        for key, value in {
            "conv": 0,
            "elementwise": 1.5,
            "source": 3,
            "launch_ns": 1.5,
            "unaligned": 2,
            "row_ns": -1,
        }.items()
    ),
    (FormatError, r"profile\.format", lambda: profile(format="profile/2")),
    (FormatError, r"profile\.durations_ns\[1\]", lambda: profile(durations_ns=[1, "2"])),
    (FormatError, r"profile\.durations_ns\[1\]", lambda: profile(durations_ns=[1, -2])),
    (FormatError, r"profile\.cache", lambda: profile(cache="warm")),
    (FormatError, r"profile\.workspaces", lambda: profile(workspaces=[1])),
    (FormatError, "profile: unknown key 'color'", lambda: profile(color=1)),
    (FormatError, "the profile is of another program", lambda: with_profile(OTHER, PROFILE)),
    (ValueError, "^repeats: ", lambda: measure(captured(), "cpu", repeats=0)),
    (ValueError, "^cache: ", lambda: measure(captured(), "cpu", cache="warm")),
    (ValueError, "^zero_grad: ", lambda: Loop(zero_grad="now")),
    (ValueError, "^iterations: ", lambda: Loop(iterations=0)),
    (ValueError, "the step of Reads", lambda: card_peak(linear(Reads), H200)),
    (ValueError, "expected at least 16,384", lambda: calibrate(HostBackend(SLOW), SLOW, 2**22)),
    (BackendError, "do not take longer", lambda: _fit([(1000, 900), (2000, 100)])),
]


@pytest.mark.parametrize(("error", "entry", "call"), ROWS)
def test_a_refusal_names_the_entry(error: type[Exception], entry: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=entry) as found:
        call()
    assert "\n" not in str(found.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU")
def test_no_gpu_to_profile_on(tiny_mlp: Tiny) -> None:
    with pytest.raises(ProfileError, match="no CUDA GPU"):
        measure(tiny_mlp.captured, "cuda")


@pytest.mark.parametrize(
    ("error", "entry", "memory", "options"),
    [
        (
            FitError,
            r"smallest feasible memory .* aten\.convolution_backward\.default of blocks\.0\.body\.3",
            "2KiB",
            {},
        ),
        (FormatError, "^memory: expected a positive fraction", "24G", {}),
        (OutOfMemory, "over the limit", 0.8, {"planner": lambda *_: Plan()}),
        (FitError, r"may exist from [\d,]+ bytes: none: ", 0.8, {"planner": "none"}),
        (FormatError, "there is no preset 'h1000'", 0.8, {"machine": "h1000"}),
    ],
)
def test_fit_refuses(error: type[Exception], entry: str, memory: Any, options: Any, tiny_conv: Tiny) -> None:
    with pytest.raises(error, match=entry) as found:
        fit(*tiny_conv.parts(), memory, **options)
    assert "\n" not in str(found.value)
