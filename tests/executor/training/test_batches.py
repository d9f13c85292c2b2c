"""Tests common forms of batches and results: equal to eager under plans that swap and recompute."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import BatchEncoding

import agents
from executor import CaptureError, PlannedStep, StepError, capture, capture_step, fit
from simulator import Machine, Plan, Program
from tests.executor.conftest import mlp
from tests.executor.networks import CLASSES, adamw, sgd
from tests.executor.training.programs import Loop, Twins, moving, standard
from tests.executor.training.test_equal_to_eager import gradient_penalty, net, pairs

F = nn.functional


@dataclass
class Example:
    x: Tensor
    m: Tensor
    y: Tensor
    name: str = "example"


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class Net(nn.Module):
    """Network with two inputs, the second optional or both in one example, that may compute its own loss."""

    def __init__(self, own_loss: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(8, 32)
        self.b = nn.Linear(4, 32)
        self.own_loss = own_loss
        self.rest = nn.Sequential(nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 5))

    def forward(self, x: Any, m: Tensor | None = None, y: Tensor | None = None) -> Any:
        if isinstance(x, Example):
            x, m = x.x, x.m
        out = self.rest(self.a(x) + self.b(x[:, :4] if m is None else m))
        return {"loss": F.cross_entropy(out, y), "logits": out} if self.own_loss else out


def parts(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 8), "m": torch.randn(rows, 4), "y": torch.randint(5, (rows,))}


def of_entry(out: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(out, batch["y"])


CASES: dict[str, tuple[Any, Callable[[dict[str, Tensor]], Any], Callable[[Any, Any], Tensor]]] = {
    "dict": (of_entry, dict, lambda m, b: of_entry(m(**b), b)),
    "UserDict": (of_entry, UserDict, lambda m, b: of_entry(m(**b), b)),
    "BatchEncoding": (None, BatchEncoding, lambda m, b: m(**b)["loss"]),
    "dataclass": (
        lambda out, b: F.cross_entropy(out, b.y),
        lambda p: Example(**p),
        lambda m, b: F.cross_entropy(m(b), b.y),
    ),
    "inputs and a target": (
        F.cross_entropy,
        lambda p: tuple(p.values()),
        lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]),
    ),
    "named tuple": (F.cross_entropy, lambda p: Pair(p["x"], p["y"]), lambda m, b: F.cross_entropy(m(b.x), b.y)),
    "list, and the model's loss": (None, lambda p: list(p.values()), lambda m, b: m(*b)["loss"]),
}


@pytest.mark.parametrize("case", CASES)
def test_batches_of_every_kind(case: str) -> None:
    """Each kind of batch is trained in two shapes."""
    loss_fn, batch, loss = CASES[case]

    def loop() -> Loop:
        model = Net(own_loss=loss_fn is None)
        return standard(model, loss_fn, adamw(model), lambda number: (batch(parts(4 if number == 2 else 6)),), loss)

    twins = Twins(loop)
    steps = twins.steps_under(moving)
    twins.train(steps, 3)
    assert len(steps.steps) == 2


# ------------------------------------------------------------------------------------------------ what a step returns


def test_what_is_returned_counts_to_the_end_of_the_step() -> None:
    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        return out.square().mean()

    def returns(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return loss_fn(out, y), out * 2

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 512))
    x = torch.randn(64, 4)
    without, with_outputs = (capture(model, f, adamw(model), (x, x)).program for f in (loss_fn, returns))
    assert with_outputs.live_bytes[-1] - without.live_bytes[-1] == 64 * 512 * 4
    assert with_outputs.peak_bytes >= without.peak_bytes + 64 * 512 * 4


def test_fit_takes_a_step_of_ones_own_with_several_models_and_optimizers() -> None:
    """Fits a WGAN with batches of two shapes and kept gradients."""

    def near(program: Program, machine: Machine, limit: int) -> Plan:
        return agents.make("capuchin", min_bytes=64).plan(program, machine, limit)

    twins = Twins(gradient_penalty)
    twins.ours.batch = lambda number: tuple(t[: 6 if number == 2 else 8] for t in pairs())
    step = fit(twins.ours.capture_args[0], example_batch=twins.next_batch(), memory=0.8, planner=near, keep_grads=True)
    assert step.plan.decisions
    twins.train(step, 3)


def test_an_optimizer_that_accelerate_has_wrapped() -> None:
    """Accelerate wraps the optimizer and its learning-rate schedule."""
    twins = Twins(lambda: standard(model := net(8, 32), F.cross_entropy, adamw(model), pairs))
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, 4) for loop in (twins.ours, twins.eager)]
    model, optimizer, schedules[0] = Accelerator(cpu=True).prepare(twins.ours.model, twins.ours.optimizer, schedules[0])
    twins.ours.capture_args = (model, F.cross_entropy, optimizer)
    steps = twins.steps_under(moving)
    for _ in range(3):
        twins.train(steps)
        for schedule in schedules:
            schedule.step()
    assert twins.ours.optimizer.param_groups[0]["lr"] < 0.01
    twins.compare()


# -------------------------------------------------------------------------------------------------- memory of batches


def twice(samples: list[Any]) -> tuple[dict[str, Tensor], Tensor]:
    x, y = torch.utils.data.default_collate(samples)
    return {"x": x, "again": x}, y


@pytest.mark.nightly
def test_batches_of_a_loaders_processes_are_copied() -> None:
    """Loader batches are in shared memory, which plans cannot swap; one tensor occurs twice."""
    data = torch.utils.data.TensorDataset(torch.randn(12, 3, 8, 8), torch.randint(5, (12,)))
    spawned = {"num_workers": 1, "multiprocessing_context": "spawn"}
    loader = torch.utils.data.DataLoader(data, batch_size=4, collate_fn=twice, **spawned)
    batches = [(x["x"], {**x, "y": y}) for x, y in loader]
    assert all(x.is_shared() and x.data_ptr() == rest["again"].data_ptr() for x, rest in batches)

    def loss_fn(out: Tensor, target: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(out, target["y"]) * target["again"].square().mean()

    def loop() -> Loop:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 5))
        return standard(model, loss_fn, adamw(model), lambda number: batches[number])

    twins = Twins(loop)
    steps = twins.steps_under(moving)
    twins.train(steps, 3)
    (step,) = steps.steps.values()
    assert step.state.swapped_inputs()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_views_of_one_memory_are_one_tensor_of_the_plan(accumulate: int) -> None:
    """Inputs and targets are slices of one text; batches with separate memory are another form."""

    def texts(number: int) -> tuple[Tensor, Tensor]:
        text = torch.randint(40, (2, 13))
        return text[:, :-1], (text.clone() if number in (4, 5) else text)[:, 1:]

    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.transpose(1, 2), y)

    def loop() -> Loop:
        model = nn.Sequential(nn.Embedding(40, 8), nn.Dropout(0.1), nn.Linear(8, 40))
        return standard(model, loss_fn, adamw(model), texts, accumulate=accumulate)

    twins = Twins(loop)
    steps = twins.steps_under(moving)
    twins.train(steps, 6 // accumulate)
    inputs = {sum(t.kind == "input" for t in step.program.tensors) for step in steps.steps.values()}
    assert inputs == {accumulate, 2 * accumulate}


def plain_step() -> tuple[Callable[..., Tensor], nn.Module]:
    model = nn.Linear(8, 4)
    optimizer = adamw(model)

    def step(x: Tensor, *_: Any) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step, model


def with_hook(x: Tensor) -> Tensor:
    x.requires_grad_().register_hook(lambda gradient: 2 * gradient)
    return x


def in_inference(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


@pytest.mark.parametrize(
    ("change", "at_capture", "later"),
    [
        (Tensor.requires_grad_, "leaves a gradient in its argument input", "has requires_grad True, but had False"),
        (with_hook, r"argument input of the step has the hook with_hook", "requires_grad True"),
        (in_inference, r"input was created in inference mode", r"has is_inference\(\) True, but had False"),
    ],
    ids=["gradient", "hook", "inference"],
)
def test_what_autograd_does_with_the_batch(change: Callable[[Tensor], Tensor], at_capture: str, later: str) -> None:
    step, model = plain_step()
    steps = fit(step, example_batch=(torch.randn(3, 8),), memory=1.0)
    before = model.weight.detach().clone()
    with pytest.raises(CaptureError, match=at_capture):
        steps(change(torch.randn(3, 8)))
    planned = PlannedStep(capture_step(step, torch.randn(3, 8)), Plan())
    with pytest.raises(StepError, match=later):
        planned(change(torch.randn(3, 8)))
    assert torch.equal(before, model.weight)


def test_a_hook_of_a_batch_that_requires_gradients() -> None:
    model = nn.Linear(8, 4)

    def penalty(x: Tensor) -> Tensor:
        return torch.autograd.grad(model(x).square().sum(), x)[0].square().sum()

    planned = PlannedStep(capture_step(penalty, torch.randn(3, 8, requires_grad=True)), Plan())
    x = torch.randn(3, 8, requires_grad=True)
    assert torch.equal(planned(x), penalty(x).detach())
    with pytest.raises(StepError, match=r"tensor 0 of the batch has the hook with_hook"):
        planned(with_hook(x))


def test_a_packed_sequence_names_its_lengths() -> None:
    layer = nn.GRU(8, 4, batch_first=True)
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(3, 6, 8), torch.tensor([6, 5, 4]), batch_first=True)
    with pytest.raises(CaptureError, match=r"\(test_batches\.py:\d+\).* PackedSequence: pass padded tensors"):
        capture_step(lambda p: layer(p)[0].data.sum(), packed)


def test_another_structure_is_named_in_words() -> None:
    step, _ = plain_step()
    planned = PlannedStep(capture_step(step, torch.randn(3, 8)), Plan())
    entries = {"a": torch.ones(2), "b": [torch.ones(2)]}
    with pytest.raises(
        StepError, match=r"the batch is \(\*, \{a: \*, b: list\(\*\)\}\), but was \(\*\) at the capture"
    ):
        planned(torch.randn(3, 8), entries)


def test_kept_gradients_do_not_hinder_a_step_of_another_form() -> None:
    step, model = plain_step()
    steps = fit(step, example_batch=(torch.randn(3, 8),), memory=1.0, keep_grads=True)
    steps(torch.randn(3, 8))
    model.bias.requires_grad_(False)
    steps(torch.randn(4, 8))
    assert model.weight.grad is not None and model.bias.grad is None
    steps.recapture()
    steps(torch.randn(4, 8))


class Trainee:
    """Holds its planned step, as classes of training loops do."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = mlp()
        self.optimizer = sgd(self.model)
        self.planned: Any = None

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def test_an_object_holds_the_planned_step_of_its_method() -> None:
    """A second shape is captured when the object already holds the step."""
    ours, eager = Trainee(), Trainee()
    for i, n in enumerate((64, 32, 64)):
        batch = torch.randn(n, 16), torch.randint(CLASSES, (n,))
        if ours.planned is None:
            ours.planned = fit(ours.step, example_batch=batch, memory=0.7, planner="capuchin")
        torch.manual_seed(i)
        loss = ours.planned(*batch)
        torch.manual_seed(i)
        assert torch.equal(loss, eager.step(*batch))
    ours.planned.finish()
    assert len(ours.planned.steps) == 2
    for p, q in zip(ours.model.parameters(), eager.model.parameters(), strict=True):
        assert torch.equal(p, q)
