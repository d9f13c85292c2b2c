"""Batches as people have them, and what a step returns: equal to eager under plans that swap and recompute."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from transformers import BatchEncoding, GPT2Config, GPT2LMHeadModel

import agents
from executor import capture, fit
from simulator import Machine, Plan, Program
from tests.executor.networks import adamw
from tests.executor.training.programs import Loop, Twins, equal, moving, standard
from tests.executor.training.test_equal_to_eager import gan, net, pairs

F = nn.functional


class Net(nn.Module):
    """Two inputs, dropout, batch norm; called by names or by position."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 32), nn.Linear(4, 32)
        self.rest = nn.Sequential(nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 5))

    def forward(self, x: Tensor, m: Tensor) -> Tensor:
        return self.rest(self.a(x) + self.b(m))


@dataclass
class Example:
    x: Tensor
    m: Tensor
    y: Tensor
    name: str = "example"


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class OfExample(Net):
    def forward(self, batch: Example) -> Tensor:  # type: ignore[override]
        return super().forward(batch.x, batch.m)


class OfNames(Net):
    def forward(self, x: Tensor, m: Tensor, y: Tensor) -> Tensor:
        return super().forward(x, m)


class OfOne(Net):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x[:, :4])


class OwnLoss(Net):
    """Returns its loss, as transformers' models do."""

    def forward(self, x: Tensor, m: Tensor, y: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(x, m)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def parts(rows: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, 8), "m": torch.randn(rows, 4), "y": torch.randint(5, (rows,))}


def of_entry(out: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(out, batch["y"])


CASES: dict[str, tuple[type[nn.Module], Any, Callable[[dict[str, Tensor]], Any], Callable[[Any, Any], Tensor]]] = {
    "dict": (OfNames, of_entry, lambda p: p, lambda m, b: of_entry(m(**b), b)),
    "UserDict": (OfNames, of_entry, UserDict, lambda m, b: of_entry(m(**b), b)),
    "BatchEncoding": (OwnLoss, None, BatchEncoding, lambda m, b: m(**b)["loss"]),
    "dataclass": (OfExample, lambda out, b: F.cross_entropy(out, b.y), lambda p: Example(**p),
                  lambda m, b: F.cross_entropy(m(b), b.y)),
    "inputs and a target": (Net, nn.CrossEntropyLoss(), lambda p: (p["x"], p["m"], p["y"]),
                            lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2])),
    "named tuple": (OfOne, nn.CrossEntropyLoss(), lambda p: Pair(p["x"], p["y"]),
                    lambda m, b: F.cross_entropy(m(b.x), b.y)),
    "list, and the model's loss": (OwnLoss, None, lambda p: list(p.values()), lambda m, b: m(*b)["loss"]),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_batches_of_every_kind(case: str) -> None:
    """In two shapes."""
    make, loss_fn, batch, loss = CASES[case]

    def loop() -> Loop:
        model = make()
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

    model, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 512)), torch.randn(64, 4)
    without, held = (capture(model, f, adamw(model), (x, x)).program for f in (loss_fn, returns))
    assert held.live_bytes[-1] - without.live_bytes[-1] == 64 * 512 * 4
    assert held.peak_bytes >= without.peak_bytes + 64 * 512 * 4


def test_what_is_returned_stays_as_it_is() -> None:
    """Without a graph, and not overwritten by later steps."""
    twins = Twins(lambda: standard(model := net(8, 32), lambda out, y: (F.cross_entropy(out, y), out),
                                   adamw(model), pairs))  # fmt: skip
    steps, kept = twins.steps_under(moving), []

    def step(*batch: Any) -> Any:
        result = steps(*batch)
        kept.append((result, tuple(t.clone() for t in result)))
        return result

    twins.train(step, 3)
    assert not any(t.requires_grad for result, _ in kept for t in result)
    for pair in kept:
        equal(*pair)


def gpt2(accumulate: int) -> Loop:
    """Its labels are its inputs, and it returns its loss."""
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))

    def batch(_: int) -> tuple[BatchEncoding]:
        ids = torch.randint(50, (2, 8))
        return (BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}),)

    return standard(model, None, adamw(model), batch, lambda m, b: m(**b).loss, accumulate=accumulate)


@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_transformer_with_its_own_loss_whose_labels_are_its_inputs(accumulate: int) -> None:
    twins = Twins(gpt2, accumulate)
    steps = twins.steps_under(moving)
    twins.train(steps, 2)
    twins.train(lambda *batches: steps(*(batch for (batch,) in batches)), at_once=True) if accumulate > 1 else None
    assert len(steps.steps) == 1


def test_fit_takes_a_step_of_ones_own_with_several_models_and_optimizers() -> None:
    """A GAN, with batches of two shapes, and gradients that stay."""

    def near(program: Program, machine: Machine, limit: int) -> Plan:
        return agents.make("capuchin", min_bytes=64).plan(program, machine, limit)

    twins = Twins(gan)
    twins.ours.batch = lambda number: (torch.randn(12 if number == 2 else 16, 8),)
    step = fit(twins.ours.given[0], example_batch=twins.next_batch(), memory=0.8, planner=near, keep_grads=True)
    assert step.plan.decisions
    twins.train(step, 3)


def test_an_optimizer_that_accelerate_has_wrapped() -> None:
    """Its schedule, too."""
    twins = Twins(lambda: standard(model := net(8, 32), F.cross_entropy, adamw(model), pairs))
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(loop.optimizer, 4) for loop in (twins.ours, twins.eager)]
    model, optimizer, schedules[0] = Accelerator(cpu=True).prepare(twins.ours.model, twins.ours.optimizer, schedules[0])
    twins.ours.given = (model, F.cross_entropy, optimizer)
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


def test_batches_of_a_loaders_processes_are_copied() -> None:
    """They are in memory that is shared with these, which no plan can swap; one tensor stands there twice."""
    data = torch.utils.data.TensorDataset(torch.randn(12, 3, 8, 8), torch.randint(5, (12,)))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, collate_fn=twice)
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


def test_views_of_one_memory_are_one_tensor_of_the_plan() -> None:
    """Texts and what follows, as slices of one; and batches whose parts have memory of their own are another form."""

    def texts(number: int) -> tuple[Tensor, Tensor]:
        text = torch.randint(40, (2, 13))
        return text[:, :-1], (text.clone() if number == 2 else text)[:, 1:]

    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.transpose(1, 2), y)

    def loop() -> Loop:
        model = nn.Sequential(nn.Embedding(40, 8), nn.Dropout(0.1), nn.Linear(8, 40))
        return standard(model, loss_fn, adamw(model), texts)

    twins = Twins(loop)
    steps = twins.steps_under(moving)
    twins.train(steps, 3)
    inputs = [sum(t.kind == "input" for t in step.program.tensors) for step in steps.steps.values()]
    assert inputs == [1, 2]
