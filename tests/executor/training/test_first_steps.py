"""Tests that `fit` trains steps whose first run differs from later ones as eager PyTorch does, or refuses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from transformers import BertConfig, BertForSequenceClassification

from executor import CaptureError, PlannedStep, StepError, capture, fit
from simulator import Plan
from tests.executor.training.programs import Loop, Twins, standard
from tests.executor.training.test_equal_to_eager import net


class Own(Optimizer):
    """Optimizer whose first step creates its state; subclasses return the direction of each gradient."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p, direction in zip(params, self.directions(params), strict=True):
                p.add_(direction, alpha=-group["lr"])

    def directions(self, params: list[Tensor]) -> list[Tensor]:
        raise NotImplementedError


class FromFirstGradient(Own):
    """Averages gradients from the first one on."""

    def directions(self, params: list[Tensor]) -> list[Tensor]:
        for p in params:
            if not self.state[p]:
                self.state[p]["average"] = p.grad.clone()
            else:
                self.state[p]["average"].lerp_(p.grad, 0.1)
        return [self.state[p]["average"] for p in params]


class OfAll(Own):
    """Scales gradients by an average norm of all, under a key that is no parameter."""

    def directions(self, params: list[Tensor]) -> list[Tensor]:
        norm = torch.stack([p.grad.norm() for p in params]).mean()
        if "all" not in self.state:
            self.state["all"] = {"average": norm.clone()}
        self.state["all"]["average"].lerp_(norm, 0.1)
        return [p.grad / (1 + self.state["all"]["average"]) for p in params]


class InAttribute(Own):
    """Keeps averages in an attribute."""

    averages: list[Tensor] | None = None

    def directions(self, params: list[Tensor]) -> list[Tensor]:
        gradients = [p.grad for p in params]
        if self.averages is None:
            self.averages = [g.clone() for g in gradients]
        torch._foreach_lerp_(self.averages, gradients, 0.1)
        return self.averages


class WithFlag(Own):
    """Skips its first average, as a flag in its state says."""

    def directions(self, params: list[Tensor]) -> list[Tensor]:
        for p in params:
            state = self.state[p]
            if "begun" not in state:
                state.update(begun=True, average=torch.zeros_like(p))
            else:
                state["average"].lerp_(p.grad, 0.1)
        return [p.grad + self.state[p]["average"] for p in params]


class Late(nn.Module):
    """Subtracts the last step's mean, of which the first step has none."""

    def __init__(self) -> None:
        super().__init__()
        self.late: Tensor | None = None

    def forward(self, h: Tensor) -> Tensor:
        h = h if self.late is None else h - self.late
        self.late = h.detach().mean(0)
        return h


class LateBatch(Late):
    """Subtracts the last step's batch."""

    def forward(self, h: Tensor) -> Tensor:
        h = h if self.late is None else h - self.late
        self.late = h.detach()
        return h


class Alternating(nn.Module):
    """Keeps a mean in every other step."""

    def __init__(self) -> None:
        super().__init__()
        self.late: Tensor | None = None

    def forward(self, h: Tensor) -> Tensor:
        self.late, late = (h.detach().mean(0), 0) if self.late is None else (None, self.late)
        return h - late


class Counting(Own):
    """Counts steps in its state."""

    def directions(self, params: list[Tensor]) -> list[Tensor]:
        for p in params:
            self.state[p]["count"] = self.state[p].get("count", 0) + 1
        return [p.grad / self.state[p]["count"] for p in params]


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "the first gradient": FromFirstGradient,
    "state of all parameters": OfAll,
    "state in an attribute": InAttribute,
    "a flag in the state": WithFlag,
    "dampening": lambda params: SGD(params, 0.1, momentum=0.9, dampening=0.5),
}


def trained(make: Callable[[Any], Optimizer], block: Callable[[], nn.Module] = nn.ReLU, **options: Any) -> Loop:
    model = nn.Sequential(net(8), block())
    batch = lambda i: (torch.randn(8, 8), torch.randint(5, (8,)))  # noqa: E731
    return standard(model, nn.functional.cross_entropy, make(model.parameters()), batch, **options)


def fitted(twins: Twins, **options: Any) -> Any:
    example = [twins.next_batch(i) for i in range(twins.ours.count)]
    batch = example[0] if len(example) == 1 else tuple(example)
    return fit(*twins.ours.capture_args, batch, 0.9, planner="capuchin", **twins.ours.options, **options)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_first_step_of_an_optimizer_is_captured_by_itself(name: str, check: bool) -> None:
    twins = Twins(trained, OPTIMIZERS[name])
    step = fitted(twins, check=check)
    assert not twins.ours.optimizer.state
    assert step.captured.is_first
    twins.train(step, 4)
    assert not step.captured.is_first and len(step.steps) == 1


@pytest.mark.parametrize(
    ("block", "options"), [(Late, {}), (LateBatch, {}), (Late, {"accumulate": 2}), (Late, {"clip_norm": 0.1})]
)
def test_a_module_that_remembers_its_last_step(block: Any, options: dict[str, Any]) -> None:
    twins = Twins(trained, Adam, block, **options)
    step = fitted(twins)
    assert step.captured.is_first and twins.ours.model[1].late is None
    twins.train(step, 3)
    assert torch.equal(twins.ours.model[1].late, twins.eager.model[1].late)


def test_a_form_captured_before_the_first_step_is_captured_again_after_it() -> None:
    twins = Twins(trained, FromFirstGradient)
    step = fitted(twins)
    step.step_for(*(t[:4] for t in twins.next_batch()))
    assert len(step.steps) == 2
    twins.train(step, 2)
    assert len(step.steps) == 1


def bert(**options: Any) -> Loop:
    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=3
    )
    model = BertForSequenceClassification(config)

    def batch(i: int) -> tuple[Any, ...]:
        return ({"input_ids": torch.randint(50, (4, 8)), "labels": torch.randint(3, (4,))},)

    loss = lambda model, batch: model(**batch).loss  # noqa: E731
    return standard(model, None, torch.optim.AdamW(model.parameters()), batch, loss, **options)


@pytest.mark.parametrize("optimizer", [None, FromFirstGradient])
def test_a_configuration_that_the_first_step_sets(optimizer: Any) -> None:
    twins = Twins(bert)
    if optimizer is not None:
        for loop in (twins.ours, twins.eager):
            loop.optimizers[0] = optimizer(loop.model.parameters())
    step = fitted(twins)
    assert twins.ours.model.config.problem_type is None
    twins.train(step, 3)
    assert twins.ours.model.config.problem_type == "single_label_classification"


@pytest.mark.parametrize(
    ("optimizer", "block", "message"),
    [
        (Adam, Alternating, r"removes the tensor 1\.late"),
        (Counting, nn.ReLU, r"Counting has count as a Python number"),
    ],
)
def test_steps_that_never_repeat_are_refused(optimizer: Any, block: Any, message: str) -> None:
    twins = Twins(trained, optimizer, block)
    with pytest.raises((CaptureError, StepError), match=message):
        fitted(twins)
    twins.go_on_eagerly(2)


def test_a_captured_first_step_runs_once() -> None:
    twins = Twins(trained, FromFirstGradient)
    captured = twins.captured(first_step=True)
    step = PlannedStep(captured, Plan())
    twins.train(step, 1)
    with pytest.raises(StepError, match="captured first one: capture the step again"):
        step(*twins.next_batch())
    with pytest.raises(StepError, match="FromFirstGradient treats its first gradient unlike later ones"):
        untrained = Twins(trained, FromFirstGradient)
        PlannedStep(untrained.captured(), Plan())


def test_a_first_step_that_fails_on_the_example_batch_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(4, 4), Late())
    batch = (torch.tensor([[9]]), torch.zeros(1))
    with pytest.raises(CaptureError, match="differs from later ones, and it fails on the example batch"):
        fit(model, lambda out, y: out.sum(), FromFirstGradient(model.parameters()), batch, 1.0, check=False)


def test_capture_refuses_what_fit_captures_by_itself() -> None:
    model = nn.Sequential(net(8), Late())
    batch = (torch.randn(8, 8), torch.randint(5, (8,)))
    captured = capture(model, nn.functional.cross_entropy, Adam(model.parameters()), batch)
    assert "without a plan first" in captured.python.unrepeatable and not captured.is_first
