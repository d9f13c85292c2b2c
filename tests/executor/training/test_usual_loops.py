"""What people do in a step beside a forward and a backward pass: equal to eager to the bit over several steps, under
plans that swap and recompute; and what cannot be captured, refused in a sentence with its place and the way out."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers.optimization import Adafactor

from executor import CaptureError, PlannedStep, PlannedSteps, StepError, capture, capture_step
from simulator import Plan, Recompute, Swap
from tests.executor.training.programs import GPU, equal_states, same, state
from tests.executor.training.test_batches import moving

F = nn.functional


class Loop(NamedTuple):
    """A step with all that it trains; ``after`` is what the loop does when it is over."""

    step: Callable[[Tensor, Tensor], Any]
    models: list[nn.Module]
    optimizers: list[torch.optim.Optimizer]
    after: Callable[[], Any] = int


def net(*sizes: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in zip(sizes, sizes[1:], strict=False):
        layers += [nn.Linear(a, b), nn.LayerNorm(b), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 5))


def trained(model: nn.Module, optimizers: list[torch.optim.Optimizer], **rest: Any) -> Loop:
    """``zero_grad``, loss, ``backward``, and a step of each optimizer."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    return Loop(step, [model], optimizers, **rest)


def norms() -> Loop:
    model = net(8, 32, 32)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        each = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), {"norm": norm, "each": each}

    return Loop(step, [model], [optimizer])


def average_in_the_step() -> Loop:
    model = net(8, 32)
    mean, optimizer = copy.deepcopy(model).requires_grad_(False), torch.optim.AdamW(model.parameters(), 0.01)
    inner = trained(model, [optimizer]).step

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = inner(x, y)
        with torch.no_grad():
            torch._foreach_lerp_(list(mean.parameters()), list(model.parameters()), 0.1)
        return loss

    return Loop(step, [model, mean], [optimizer])


def average_after_the_step() -> Loop:
    model = net(8, 32)
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    loop = trained(model, [torch.optim.AdamW(model.parameters(), 0.01)], after=lambda: mean.update_parameters(model))
    return loop._replace(models=[model, mean])


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank (Hu et al., 2021)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / rank)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * (self.drop(x) @ self.a.T @ self.b.T)


def adapters() -> Loop:
    model = net(8, 32, 32)
    for i, layer in enumerate(model):
        if isinstance(layer, nn.Linear):
            model[i] = Adapted(layer)
    wanted = [p for p in model.parameters() if p.requires_grad]
    return trained(model, [torch.optim.AdamW(wanted, 0.01)])


def muon() -> Loop:
    model = net(8, 32, 32)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if p.dim() != 2]
    return trained(model, [torch.optim.Muon(matrices, 0.02), torch.optim.AdamW(rest, 0.01)])


def adafactor() -> Loop:
    model = net(8, 32)
    return trained(model, [torch.optim.Adafactor(model.parameters(), 0.05, weight_decay=0.01)])


def gradient_penalty() -> Loop:
    """WGAN-GP (Gulrajani et al., 2017): a gradient of the loss of a gradient."""
    make, judge = net(5, 32), nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizers = [torch.optim.Adam(m.parameters(), 0.01, (0.5, 0.9)) for m in (make, judge)]

    def step(x: Tensor, _: Tensor) -> dict[str, Tensor]:
        real, fake = x[:, :5], make(torch.randn(len(x), 5))
        mix = torch.lerp(real, fake.detach(), torch.rand(len(x), 1)).requires_grad_()
        (slope,) = torch.autograd.grad(judge(mix).sum(), mix, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        of_judge = judge(fake.detach()).mean() - judge(real).mean() + 10 * penalty
        optimizers[1].zero_grad()
        of_judge.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        of_make = -judge(fake).mean()
        of_make.backward()
        optimizers[0].step()
        return {"judge": of_judge.detach(), "make": of_make.detach(), "penalty": penalty.detach()}

    return Loop(step, [make, judge], optimizers)


def distillation() -> Loop:
    teacher, student = net(8, 64).eval(), net(8, 16)
    optimizer = torch.optim.AdamW(student.parameters(), 0.01)

    def step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            soft = teacher(x).softmax(1)
        out = student(x)
        loss = F.cross_entropy(out, y) + F.kl_div(out.log_softmax(1), soft, reduction="batchmean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), out.detach().argmax(1)

    return Loop(step, [teacher, student], [optimizer])


def mixed_precision_in_micro_batches() -> Loop:
    model = net(8, 32)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    def step(x: Tensor, y: Tensor) -> dict[str, Tensor]:
        total = torch.zeros(())
        for part, wanted in zip(x.chunk(2), y.chunk(2), strict=True):
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(part), wanted) / 2
            scaler.scale(loss).backward()
            total += loss.detach()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return {"loss": total, "norm": norm}

    return Loop(step, [model], [optimizer])


LOOPS: dict[str, Callable[[], Loop]] = {
    f.__name__: f for f in (norms, average_in_the_step, average_after_the_step, adapters, muon, adafactor,
                            gradient_penalty, distillation, mixed_precision_in_micro_batches)
}  # fmt: skip


@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str) -> None:
    loops = []
    for _ in range(2):
        torch.manual_seed(0)
        loops.append(LOOPS[name]())
    ours, eager = loops
    steps = PlannedSteps(ours.step, None, None, GPU, 2**30, moving, bucket_bytes=None)
    for _ in range(4):
        x, y = torch.randn(8, 8), torch.randint(5, (8,))
        seed = torch.get_rng_state()
        wanted = eager.step(x, y)
        torch.set_rng_state(seed)
        found = steps(x, y)
        for a, b in zip(*(torch.utils._pytree.tree_leaves(result) for result in (found, wanted)), strict=True):
            assert same(a, b)
        ours.after()
        eager.after()
        for mine, theirs in zip(ours.models, eager.models, strict=True):
            for a, b in zip(mine.state_dict().values(), theirs.state_dict().values(), strict=True):
                assert same(a, b)
        for mine_, theirs_ in zip(ours.optimizers, eager.optimizers, strict=True):
            a, b = (torch.utils._pytree.tree_leaves(o.state_dict()["state"]) for o in (mine_, theirs_))
            assert a and all(map(same, a, b))
    (step,) = steps.steps.values()
    assert {type(d) for d in step.plan.decisions} == {Swap, Recompute} and len(steps.steps) == 1


# ------------------------------------------------------------------------------------------ optimizers and schedules


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, 8), torch.randint(5, (6,))


def test_an_optimizer_that_accelerate_has_wrapped() -> None:
    """Its schedule, too; PyTorch does not warn that the optimizer had not stepped before the schedule."""
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    models = [net(8, 32)]
    models.append(copy.deepcopy(models[0]))
    optimizers = [torch.optim.AdamW(m.parameters(), 0.01) for m in models]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 4) for o in optimizers]
    model, optimizer, schedule = accelerator.prepare(models[0], optimizers[0], schedules[0])
    steps = PlannedSteps(model, F.cross_entropy, optimizer, GPU, 2**30, moving)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            x, y = batch()
            seed = torch.get_rng_state()
            ours = steps(x, y)
            torch.set_rng_state(seed)
            loss = F.cross_entropy(models[1](x), y)
            loss.backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            assert same(ours, loss)
            schedule.step()
            schedules[1].step()
            equal_states(*(state((m, F.cross_entropy, o)) for m, o in zip(models, optimizers, strict=True)))
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"] < 0.01


def unplanned(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, x: Tensor | None = None) -> PlannedStep:
    """A step of the model without a plan; raises what refuses it."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), 0.1)
    given = batch()
    return PlannedStep(
        capture(model, F.cross_entropy, optimizer, (given[0] if x is None else x, given[1])), Plan(), GPU
    )


class Counting(torch.optim.SGD):
    """Has a number of Python's, in its state, its options or an attribute of its own."""

    where: str
    steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        table: dict[str, Any] = {"state": self.state[self.param_groups[0]["params"][0]], "option": self.param_groups[0],
                                 "attribute": vars(self)}[self.where]  # fmt: skip
        table["steps"] = table.get("steps", 0) + 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1 / table["steps"])


@pytest.mark.parametrize("where", ["state", "option", "attribute"])
def test_an_optimizer_that_counts_in_python_is_refused(where: str) -> None:
    """Its graph would have the count of the capture for ever."""
    model = net(8)
    optimizer = Counting(model.parameters(), 0.1)
    optimizer.where = where
    with pytest.raises(StepError, match=r"^Counting has steps as a number of Python's, .* keeps it in a tensor"):
        unplanned(model, optimizer)


def test_optimizers_that_are_refused() -> None:
    model = net(8)
    with pytest.raises(StepError, match=r"^Adafactor has step as a number of Python's"):
        unplanned(model, Adafactor(model.parameters(), 0.01, scale_parameter=False, relative_step=False))
    with pytest.raises(CaptureError, match=r"^optimizer \(LBFGS\) calls the model as often as .*another"):
        unplanned(model, torch.optim.LBFGS(model.parameters()))


def test_a_schedule_in_the_step_is_refused() -> None:
    model = net(8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    inner = trained(model, [optimizer]).step

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = inner(x, y)
        schedule.step()
        return loss

    before = copy.deepcopy(schedule.state_dict())
    captured = capture_step(step, *batch())
    with pytest.raises(StepError, match=r"^the step changes lr of SGD, .*: call schedules after the step$"):
        PlannedStep(captured, Plan(), GPU)
    assert optimizer.param_groups[0]["lr"] == 0.1 and schedule.state_dict() == before


# --------------------------------------------------------------------------------------------------- what is refused


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.words(x).mean(1))


class Unfound(nn.Module):
    """A tensor where no capture looks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self._scales = nn.Linear(8, 5), (torch.full((5,), 2.0),)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self._scales[0]


class Chosen(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out[out[:, 0] > 0]


class Asking(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * 2 if out.sum() > 0 else out


HERE = r"\(test_usual_loops\.py:\d+\)"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "sparse gradients": (Sparse, "^the gradient of words is sparse, .*: leave sparse=True out"),
    "a tensor that is nowhere": (Unfound, rf"uses a tensor in aten\.mul\.Tensor that .*{HERE}: .*register_buffer"),
    "a shape that depends on data": (lambda: Chosen(8, 5), rf"shape of a result depends .*{HERE}; .*fixed shape"),
    "a branch on data": (lambda: Asking(8, 5), rf"Python depends on the values of a tensor: .*{HERE}; .*torch.where"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refusals_name_the_place_the_cause_and_the_way_out(what: str) -> None:
    make, said = REFUSED[what]
    model = make()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(CaptureError, match=said) as error:
        unplanned(model, x=torch.randint(20, (6, 4)) if what == "sparse gradients" else None)
    assert "\n" not in str(error.value)
    assert all(same(value, before[key]) for key, value in model.state_dict().items())


def test_an_average_that_asks_how_often_it_was_updated_comes_after_the_step() -> None:
    model = net(8)
    mean, inner = AveragedModel(model), trained(model, [torch.optim.SGD(model.parameters(), 0.1)]).step

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = inner(x, y)
        mean.update_parameters(model)
        return loss

    with pytest.raises(CaptureError, match=rf"depends on the values of a tensor: .*{HERE}; .*do this after the step"):
        capture_step(step, *batch())
