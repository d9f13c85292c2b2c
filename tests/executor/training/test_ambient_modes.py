"""Tests that a step which is called in another ambient mode of PyTorch is captured again or refused by name."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from executor import CaptureError, PlannedStep, PlannedSteps, StepError, fit
from executor.training.bindings import check_settings
from simulator import Plan
from simulator.schedule import OutOfMemory
from tests.executor.networks import sgd
from tests.executor.training.programs import GPU, Loop, Twins, equal
from tests.executor.training.test_equal_to_eager import trained

F = nn.functional


@contextmanager
def switched(get: Callable[[], Any], switch: Callable[[Any], object], value: Any) -> Iterator[None]:
    before = get()
    switch(value)
    try:
        yield
    finally:
        switch(before)


bfloat16 = partial(torch.autocast, "cpu", torch.bfloat16)
MODES: dict[str, tuple[Callable[[], AbstractContextManager[Any]], str]] = {
    "autocast": (bfloat16, r"torch\.autocast was off .* is torch\.bfloat16 on cpu now"),
    "autocast of another type": (
        partial(torch.autocast, "cpu", torch.float16),
        r"torch\.autocast was off .* is torch\.float16 on cpu now",
    ),
    "no_grad": (torch.no_grad, r"torch\.is_grad_enabled\(\) was True .* is False now"),
    "inference_mode": (torch.inference_mode, r"torch\.is_inference_mode_enabled\(\) was False .* is True now"),
    "sdpa_kernel": (
        partial(sdpa_kernel, SDPBackend.MATH),
        "the flash backend of sdpa_kernel was True .* is False now",
    ),
    "order of backends": (
        partial(sdpa_kernel, [SDPBackend(i) for i in torch._C._get_sdp_priority_order()[::-1]], set_priority=True),
        r"the order of backends of sdpa_kernel was \(.*\) at the capture and is \(.*\) now",
    ),
    "default dtype": (
        partial(switched, torch.get_default_dtype, torch.set_default_dtype, torch.float64),
        r"torch\.get_default_dtype\(\) was torch\.float32 .* is torch\.float64 now",
    ),
    "default device": (partial(torch.device, "cpu"), r"set_default_device\) was 0 .* is 1 now"),
    "deterministic algorithms": (
        partial(switched, torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
        r"are_deterministic_algorithms_enabled\(\) was False .* is True now",
    ),
    "deterministic cuDNN": (
        partial(torch.backends.cudnn.flags, enabled=True, deterministic=True),
        r"cudnn\.deterministic was False .* is True now",
    ),
    "oneDNN": (partial(torch.backends.mkldnn.flags, enabled=False), r"mkldnn\.enabled was True .* is False now"),
    "matmul precision": (
        partial(switched, torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
        r"TF32 for matrix products \(.*\) was False .* is True now",
    ),
}
TRAINABLE = [name for name in MODES if name not in ("no_grad", "inference_mode")]


def batch(_: int = 0) -> tuple[Tensor, Tensor]:
    return torch.randn(3, 6, 8, dtype=torch.float32), torch.randint(4, (3, 6))


def attention() -> Loop:
    """Builds a loop of self-attention with two heads."""
    model = nn.ModuleDict({"q": nn.Linear(8, 24), "o": nn.Linear(8, 4)})

    def loss(x: Tensor, y: Tensor) -> list[Tensor]:
        q, k, v = model["q"](x).view(len(x), 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
        out = model["o"](F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return [F.cross_entropy(out.float().flatten(0, 1), y.flatten())]

    loop = trained(model, [sgd(model)], loss)
    loop.batch = batch
    return loop


@pytest.mark.parametrize("name", MODES)
def test_a_captured_step_is_refused_in_another_mode(name: str) -> None:
    context, named = MODES[name]
    twins = Twins(attention)
    step = PlannedStep(twins.captured(), Plan())
    twins.train(step)
    for _ in range(2):
        values = twins.next_batch()
        with context(), pytest.raises(StepError, match=f"{named}: .*fit and PlannedSteps") as caught:
            step(*values)
        assert "\n" not in str(caught.value)
    twins.train(step)


def test_each_mode_is_a_form_of_its_own() -> None:
    twins = Twins(attention)
    steps = twins.steps_under(lambda *_: Plan())
    twins.train(steps)
    first = next(iter(steps.steps.values()))
    for name in TRAINABLE:
        for _ in range(2):
            with MODES[name][0]():
                twins.train(steps)
    assert len(steps.steps) == len(TRAINABLE) + 1
    twins.train(steps)
    assert next(reversed(steps.steps.values())) is first


@pytest.mark.parametrize("name", ["no_grad", "inference_mode"])
def test_a_step_that_needs_gradients_says_so(name: str) -> None:
    twins = Twins(attention)
    steps = fit(twins.ours.capture_args[0], example_batch=twins.next_batch(), memory=1.0)
    for _ in range(2):
        with MODES[name][0](), pytest.raises(CaptureError, match=r"backward pass \(.*:\d+\) needs gradients, which"):
            steps(*twins.next_batch())
    twins.train(steps)


@pytest.mark.parametrize("name", ["no_grad", "inference_mode"])
def test_evaluation_without_gradients(name: str) -> None:
    model = nn.Linear(8, 4)

    def evaluate(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x).float().flatten(0, 1), y.flatten())
        return loss if torch.is_grad_enabled() else 100 * loss.detach()

    steps = fit(evaluate, example_batch=batch(), memory=1.0)
    for autocast in (nullcontext, bfloat16):
        with MODES[name][0](), autocast():
            for _ in range(2):
                values = batch()
                equal(steps(*values), evaluate(*values))
    assert len(steps.steps) == 3


def test_the_first_form_of_each_mode_is_compared_with_eager() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()  # one fused kernel, without gradients
    steps = fit(lambda x: model(x).sum(), example_batch=(torch.randn(3, 6, 8),), memory=1.0)
    with torch.no_grad(), pytest.raises(CaptureError, match=r"TransformerEncoderLayer .*fused .*fastpath"):
        steps(torch.randn(3, 6, 8))
    fastpath = torch.backends.mha
    with switched(fastpath.get_fastpath_enabled, fastpath.set_fastpath_enabled, False), torch.no_grad():
        x = torch.randn(3, 6, 8)
        equal(steps(x), model(x).sum())


def test_fit_within_autocast_equals_eager_and_knows_its_cache() -> None:
    """Autocast keeps the weights that it has cast until its context ends, so eager steps would use old ones."""
    twins = Twins(attention)
    model = nn.Linear(8, 4)

    def evaluate(x: Tensor) -> Tensor:
        return model(x)

    with bfloat16():
        steps = fit(twins.ours.capture_args[0], example_batch=twins.next_batch(), memory=1.0)
        assert "_to_copy" in str(steps.captured.graph.graph)
        x = torch.randn(2, 8)
        evaluated = fit(evaluate, example_batch=(x,), memory=1.0)
        twins.train(steps)
        for _ in range(2):
            with pytest.raises(StepError, match=r"autocast keeps the weights .*open a torch\.autocast context"):
                steps(*twins.next_batch())
            equal(evaluated(x), evaluate(x).detach())  # its weights do not change
    for _ in range(2):
        with bfloat16():
            twins.train(steps)
    with bfloat16(cache_enabled=False):
        twins.train(steps, 2)
    twins.train(steps, 2)
    assert len(steps.steps) == 3


def test_a_new_form_does_not_hide_what_autocast_keeps() -> None:
    model = nn.Linear(8, 4)
    optimizer = sgd(model)

    def step(x: Tensor) -> Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with bfloat16():
        steps = fit(step, example_batch=(torch.randn(3, 8),), memory=1.0)
        steps(torch.randn(3, 8))
        with pytest.raises(CaptureError, match="autocast keeps the weights"):
            steps(torch.randn(5, 8))
    with bfloat16():
        steps(torch.randn(5, 8))


def test_functions_that_pack_activations_are_refused_around_the_step() -> None:
    def rounded(t: Tensor) -> Tensor:
        return t.bfloat16().float() if t.is_floating_point() else t

    twins = Twins(attention)
    step = PlannedStep(twins.captured(), Plan())
    twins.train(step)
    with torch.autograd.graph.saved_tensors_hooks(rounded, lambda t: t):
        with pytest.raises(StepError, match="saved_tensors_hooks surround the step was False"):
            step(*twins.next_batch())
        with pytest.raises(CaptureError, match=r"rounded \(test_ambient_modes\.py:\d+\)\) surround the step"):
            twins.captured()
    twins.train(step)


def test_steps_of_one_model_share_what_autocast_keeps() -> None:
    twins = Twins(attention)
    step = twins.ours.capture_args[0]
    with bfloat16():
        first, second = (fit(step, example_batch=twins.next_batch(), memory=1.0) for _ in range(2))
        twins.train(first)
        with pytest.raises(StepError, match="autocast keeps the weights"):
            second(*twins.next_batch())
    with bfloat16():
        twins.train(second)


def test_weights_that_a_step_updates_without_gradients() -> None:
    model = nn.Linear(8, 4)

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            out = model(x)
            model.weight.mul_(0.5)
        return out

    x = torch.randn(3, 8)
    for context in (torch.no_grad, torch.inference_mode):
        with context(), bfloat16():
            steps = fit(step, example_batch=(x,), memory=1.0)
            steps(x)
            with pytest.raises(StepError, match="autocast keeps the weights"):
                steps(x)


def test_micro_batches_have_one_mode() -> None:
    model = nn.Linear(8, 4)
    steps = PlannedSteps(model, F.cross_entropy, sgd(model), GPU, 2**30, lambda *_: Plan(), accumulate=2)
    x, y = torch.randn(3, 8), torch.randint(4, (3,))
    steps(x, y)
    with bfloat16(), pytest.raises(StepError, match=r"micro-batch 2 of 2 .*torch\.autocast was off"):
        steps(x, y)
    assert steps.in_progress
    steps(x, y)
    assert not steps.in_progress


def test_planners_run_in_default_modes() -> None:
    model = nn.Linear(8, 4)
    seen: list[torch.dtype] = []

    def planner(*_: Any) -> Plan:
        product = nn.Linear(2, 2)(torch.ones(1, 2))
        product.sum().backward()
        seen.append(product.dtype)
        return Plan()

    def step(x: Tensor) -> Tensor:
        return model(x).sum()

    x = torch.randn(3, 8)
    steps = PlannedSteps(step, None, None, GPU, 2**30, planner, check=False)
    for name in ("autocast", "inference_mode", "default dtype"):
        with MODES[name][0](), torch.device("meta"):
            steps.step_for(x)
            with pytest.raises(OutOfMemory):  # after the planner was called
                fit(step, example_batch=(x,), memory=0.99, planner=planner, check=False)
    assert seen == [torch.float32] * 6


def test_a_number_of_the_batch_is_computed_without_the_ambient_autocast() -> None:
    model = nn.Linear(8, 4)

    def loss(x: Tensor, y: Tensor) -> list[Tensor]:
        with torch.autocast("cpu", enabled=False):
            scale = (x @ x.T).sum().item()
        return [F.cross_entropy(model(x).float(), y) * scale]

    x, y = torch.randn(3, 8), torch.randint(4, (3,))
    step = trained(model, [sgd(model)], loss).capture_args[0]
    with bfloat16():
        steps = fit(step, example_batch=(x, y), memory=1.0)
        steps(x, y)
    assert len(steps.steps) == 1


def test_comparing_modes_calls_no_python_function() -> None:
    twins = Twins(attention)
    captured = twins.captured()
    calls: list[str] = []

    def record(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    sys.setprofile(record)
    try:
        check_settings(captured, captured.python.change())
    finally:
        sys.setprofile(None)
    assert "ambient_modes" in calls and not {"mode_change", "_autocasts"} & set(calls)
