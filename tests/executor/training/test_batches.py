"""Batches as people have them, what a step returns, gradients that stay: equal to eager under plans that swap and
recompute."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding, GPT2Config, GPT2LMHeadModel

import agents
from executor import CaptureError, PlannedStep, PlannedSteps, StepError, capture, capture_step, fit
from simulator import Machine, Program
from tests.executor.networks import adamw
from tests.executor.training.programs import GPU, random_plan, required, same, tight

F = nn.functional


def moving(program: Program, machine: Machine, limit: int) -> Any:
    """A plan that moves whatever it can: swaps and recomputations of all kinds of tensors."""
    return random_plan(program, 0, nothing=0.1)


def planned(*step: Any, **options: Any) -> PlannedSteps:
    """Steps under such plans."""
    return PlannedSteps(*step, GPU, 2**30, moving, **options)


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


def parts(rows: int = 6) -> dict[str, Tensor]:
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


class Twin:
    """A fitted step and eager PyTorch, on equal models."""

    def __init__(self, make: Callable[[], nn.Module], loss_fn: Any, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.eager = copy.deepcopy(self.model)
        self.optimizers = adamw(self.model), adamw(self.eager)
        self.step = planned(self.model, loss_fn, self.optimizers[0], **options)

    def both(self, call: Callable[[], Any], eager: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
        """The step and eager's, from the same random state; eager first, since a plan may have a batch away."""
        state = torch.get_rng_state()
        theirs = eager(self.eager)
        drawn = torch.get_rng_state()
        torch.set_rng_state(state)
        ours = call()
        assert torch.equal(drawn, torch.get_rng_state())
        return ours, theirs

    def update(self) -> None:
        self.optimizers[1].step()
        self.optimizers[1].zero_grad()
        self.compare()

    def compare(self) -> None:
        for a, b in zip(self.model.state_dict().values(), self.eager.state_dict().values(), strict=True):
            assert same(a, b)


@pytest.mark.parametrize("case", CASES)
def test_batches_of_every_kind(case: str) -> None:
    make, loss_fn, batch, eager = CASES[case]
    twin = Twin(make, loss_fn)
    for rows in (6, 6, 4):
        b = batch(parts(rows))
        ours, loss = twin.both(lambda b=b: twin.step(b), lambda m, b=b: eager(m, b))  # type: ignore[misc]
        loss.backward()
        assert same(ours, loss)
        twin.update()
    assert len(twin.step.steps) == 2


# ------------------------------------------------------------------------------------------------ what a step returns


def with_metrics(out: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return F.cross_entropy(out, y), {"right": (out.argmax(1) == y).sum(), "logits": out, "none": None}


def test_what_the_loss_function_returns_besides() -> None:
    """Tensors without a graph, that live to the end of the step, and stay as they are in the steps after it."""
    twin = Twin(Net, with_metrics)
    kept = []
    for _ in range(3):
        x, m, y = parts().values()
        (ours, more), (loss, metrics) = twin.both(lambda: twin.step(x, m, y), lambda net: with_metrics(net(x, m), y))  # noqa: B023
        loss.backward()
        assert same(ours, loss) and same(more["right"], metrics["right"]) and more["none"] is None
        assert not more["logits"].requires_grad and list(more) == list(metrics)
        kept.append((more["logits"], metrics["logits"]))
        twin.update()
    assert all(same(*pair) for pair in kept)
    captured = twin.step._current.captured  # type: ignore[union-attr]
    logits = captured.values[captured.outputs[2]]
    assert captured.program.accesses[logits][-1] == len(captured.program.kernels) - 1


def test_what_is_returned_counts_to_the_end_of_the_step() -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 512))

    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        return out.square().mean()

    def returns(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return loss_fn(out, y), out * 2

    model, x = wide(), torch.randn(64, 4)
    without, held = (capture(model, f, adamw(model), (x, x)).program for f in (loss_fn, returns))
    assert held.live_bytes[-1] - without.live_bytes[-1] == 64 * 512 * 4
    assert held.peak_bytes >= without.peak_bytes + 64 * 512 * 4


def test_what_cannot_be_returned_is_refused() -> None:
    net = Net()
    x, m, y = parts().values()
    batch = (x, m, y)
    with pytest.raises(
        CaptureError, match="the step returns an int, which would be the same each time: return tensors"
    ):
        capture(net, lambda out, y: (F.cross_entropy(out, y), 3), adamw(net), batch)
    with pytest.raises(CaptureError, match=r"loss_fn returns more than the loss, .* micro-batches"):
        capture(net, with_metrics, adamw(net), batch, accumulate=2)
    with pytest.raises(CaptureError, match=r"^the model returns list and no loss: give it what it needs"):
        capture(nn.Sequential(), None, None, ([x.tolist()],))
    steps = planned(net, with_metrics, adamw(net))
    data = type("Data", (), {})()
    data.x = x
    with pytest.raises(StepError, match="the batch has a Data, whose tensors are not known: give a dict of them"):
        steps(data)


def test_what_is_returned_and_swapped_between_steps_is_refused() -> None:
    """The plan would have it on the host when the step is over; a clone is the step's own, and the batch is back."""
    net = Net()
    optimizer, (x, m, y) = adamw(net), parts().values()

    def step(x: Tensor, clone: bool) -> tuple[Tensor, Tensor]:
        loss = F.cross_entropy(net(x, m), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return net.a.weight.clone() if clone else net.a.weight, x[1:]

    captured = capture_step(step, x, False, machine=GPU)
    with pytest.raises(StepError, match=r"the plan swaps net.a.weight, which the step returns: return a clone of it"):
        tight(captured, random_plan(captured.program, 0, nothing=0.0))
    captured = capture_step(step, x, True, machine=GPU)
    planned = tight(captured, random_plan(captured.program, 0, nothing=0.0))
    for _ in range(2):
        weight, rest = planned(x, True)
        assert planned.state.swapped_inputs() and same(weight, net.a.weight) and same(rest, x[1:])


def gpt2() -> GPT2LMHeadModel:
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_transformer_with_its_own_loss_whose_labels_are_its_inputs(accumulate: int) -> None:
    """In micro-batches, too, that come one by one and at once."""
    twin = Twin(gpt2, None, accumulate=accumulate)

    def batch() -> BatchEncoding:
        ids = torch.randint(50, (2, 8))
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})

    for at_once in (False, False, accumulate > 1):
        batches = [batch() for _ in range(accumulate)]
        if at_once:
            ours, losses = twin.both(
                lambda: twin.step(*batches), lambda m: [m(**b).loss / accumulate for b in batches]  # noqa: B023
            )  # fmt: skip
            assert same(ours, sum(losses[1:], losses[0]))
        else:
            pairs = [twin.both(lambda: twin.step(b), lambda m: m(**b).loss) for b in batches]  # noqa: B023
            losses = [loss / accumulate if accumulate > 1 else loss for _, loss in pairs]
            assert all(same(ours, loss) for (ours, _), loss in zip(pairs, losses, strict=True))
        for loss in losses:
            loss.backward()
        twin.update()
    assert len(twin.step.steps) == 1


# ------------------------------------------------------------------------------------- gradients, and their norm


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"autocast": torch.bfloat16}, {"keep_grads": False}])
def test_gradients_that_stay_and_their_norm(options: dict[str, Any]) -> None:
    """After the step ``p.grad`` has them as the update had them, clipped; so does eager before its ``zero_grad``."""
    k, keep = options.get("accumulate", 1), options.get("keep_grads", True)
    twin = Twin(Net, nn.CrossEntropyLoss(), clip_norm=0.05, **{"keep_grads": True, **options})
    for rows in (6, 6, 4, 6):
        batches = [tuple(parts(rows).values()) for _ in range(k)]
        twin.optimizers[1].zero_grad()
        for x, m, y in batches:

            def eager(net: nn.Module) -> Tensor:
                with torch.autocast("cpu", options.get("autocast"), enabled="autocast" in options):
                    loss = F.cross_entropy(net(x, m), y)  # noqa: B023
                    return loss / k if k > 1 else loss

            ours, loss = twin.both(lambda: twin.step(x, m, y), eager)  # noqa: B023
            assert same(ours, loss)
            loss.backward()
        norm = nn.utils.clip_grad_norm_(twin.eager.parameters(), 0.05)
        assert norm > 0.05 and twin.step.grad_norm is not None and same(twin.step.grad_norm, norm)
        for p, q in zip(twin.model.parameters(), twin.eager.parameters(), strict=True):
            assert q.grad is not None and (same(p.grad, q.grad) if keep else p.grad is None)
        twin.optimizers[1].step()
        twin.compare()
    program = twin.step._current.program  # type: ignore[union-attr]
    assert {program.tensors[t].kind for t in program.kernels[-1].inputs} >= {"gradient"}


def test_gradients_that_stay_are_no_graphs() -> None:
    net = Net()
    captured = capture(net, nn.CrossEntropyLoss(), adamw(net), tuple(parts().values()), machine=GPU, keep_grads=True)
    with pytest.raises(StepError, match=r"the step cannot be a graph: .*gradients that are kept"):
        PlannedStep(
            captured,
            random_plan(captured.program, 0),
            GPU,
            required(captured.program, random_plan(captured.program, 0)),
            graph=True,
        )


# ---------------------------------------------------------------------------------------------- steps of one's own


def test_fit_takes_a_step_of_ones_own_with_several_models_and_optimizers() -> None:
    """A GAN: two models, two optimizers, two losses, noise drawn in the step; ``zero_grad`` comes first."""

    def parts(seed: int) -> tuple[nn.Module, nn.Module, list[torch.optim.Optimizer], Callable[[Tensor], Any]]:
        torch.manual_seed(seed)
        make = nn.Sequential(nn.Linear(4, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
        judge = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(0.2), nn.Dropout(0.1), nn.Linear(32, 1))
        optimizers = [torch.optim.Adam(m.parameters(), 1e-2) for m in (make, judge)]

        def step(real: Tensor) -> dict[str, Tensor]:
            fake = make(torch.randn(len(real), 4))
            optimizers[1].zero_grad()
            of_judge = F.softplus(-judge(real)).mean() + F.softplus(judge(fake.detach())).mean()
            of_judge.backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            of_make = F.softplus(-judge(fake)).mean()
            of_make.backward()
            optimizers[0].step()
            return {"judge": of_judge.detach(), "make": of_make.detach()}

        return make, judge, optimizers, step

    *ours, step = parts(0)
    *theirs, eager = parts(0)
    planned = fit(step, example_batch=(torch.randn(16, 8),), memory=0.8, planner=near, keep_grads=True)
    assert planned.plan.decisions
    for rows in (16, 16, 12):
        real = torch.randn(rows, 8)
        state = torch.get_rng_state()
        found = planned(real)
        torch.set_rng_state(state)
        wanted = eager(real)
        assert list(found) == list(wanted) and all(same(found[key], wanted[key]) for key in wanted)
        for model, twin in zip(ours[:2], theirs[:2], strict=True):
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                assert same(p, q) and same(p.grad, q.grad)
    assert all(len(o.state_dict()["state"]) for o in ours[2])
    with pytest.raises(ValueError, match="clip_norm: a step of your own does that itself"):
        fit(step, example_batch=(torch.randn(16, 8),), memory=0.8, clip_norm=1.0)
    with pytest.raises(ValueError, match="memory: missing"):
        fit(step, example_batch=(torch.randn(16, 8),))


def near(program: Program, machine: Machine, limit: int) -> Any:
    return agents.make("capuchin", min_bytes=64).plan(program, machine, limit)


# ------------------------------------------------------------------------------------------------------- data loaders


def test_batches_of_a_loaders_processes_are_copied() -> None:
    """They are in memory that is shared with these, which no plan can swap; one tensor stands there twice."""
    data = torch.utils.data.TensorDataset(torch.randn(12, 3, 8, 8), torch.randint(5, (12,)))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, collate_fn=twice)
    twin = Twin(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 5)), of_twice)
    for x, y in loader:
        assert x["x"].is_shared() and x["x"].data_ptr() == x["again"].data_ptr()
        before = x["x"].clone()
        ours, loss = twin.both(
            lambda: twin.step(x["x"], {**x, "y": y}),  # noqa: B023
            lambda m: of_twice(m(x["x"]), {**x, "y": y}),  # noqa: B023
        )
        assert same(ours, loss) and same(x["x"], before)
        loss.backward()
        twin.update()
    step = twin.step._current
    assert step is not None and step.state.swapped_inputs() and len(twin.step.steps) == 1


def twice(samples: list[Any]) -> tuple[dict[str, Tensor], Tensor]:
    x, y = torch.utils.data.default_collate(samples)
    return {"x": x, "again": x}, y


def of_twice(out: Tensor, target: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(out, target["y"]) * target["again"].square().mean()


def test_views_of_one_memory_are_one_tensor_of_the_plan() -> None:
    """Texts and what follows, as slices of one; and batches whose parts have memory of their own are another form."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Embedding(40, 8), nn.Dropout(0.1), nn.Linear(8, 40))

    def loss_fn(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out.transpose(1, 2), y)

    twin = Twin(make, loss_fn)
    for n, apart in enumerate((False, False, True)):
        text = torch.randint(40, (2, 13))
        x, y = text[:, :-1], (text.clone() if apart else text)[:, 1:]
        ours, loss = twin.both(lambda: twin.step(x, y), lambda m: loss_fn(m(x), y))  # noqa: B023
        assert same(ours, loss)
        loss.backward()
        twin.update()
        inputs = [t for t in twin.step._current.program.tensors if t.kind == "input"]  # type: ignore[union-attr]
        assert len(inputs) == (2 if apart else 1) and len(twin.step.steps) == (2 if apart else 1), n
