"""The loops that people train in: schedules, accumulation, clipping, foreach and fused updates; equal to eager."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import agents
from executor import Captured, PlannedStep, StepError, capture, capture_step
from simulator import Plan, Program
from tests.executor.networks import OPTIMIZERS, adamw
from tests.executor.training.programs import GPU, Twins, random_plan, tight
from tests.executor.training.test_micro_batches import NORM, OneByOne


def at(captured: Captured, part: float = 0.6, planner: str = "capuchin") -> PlannedStep:
    """Under a plan for a part of the peak, or the smallest of some larger ones that can be reached."""
    return PlannedStep(captured, plan_at(captured.program, part, planner), GPU)


@cache
def plan_at(program: Program, part: float, planner: str) -> Plan:
    for limit in (int((part + more / 20) * program.peak_bytes) for more in range(8)):
        try:
            plan = agents.make(planner, min_bytes=64).plan(program, GPU, limit)
        except agents.Infeasible:
            continue
        assert plan.decisions
        return plan
    raise AssertionError("no plan")


# ----------------------------------------------------------------------------------------- numbers of the optimizer


def schedule(name: str, optimizer: torch.optim.Optimizer) -> Any:
    s = torch.optim.lr_scheduler
    return {
        "cosine": lambda: s.CosineAnnealingLR(optimizer, 5),
        "one_cycle": lambda: s.OneCycleLR(optimizer, 0.1, total_steps=8),  # changes beta1, or the momentum, too
        "warm_up": lambda: s.SequentialLR(optimizer, [s.LinearLR(optimizer, 0.1, 1.0, 2), s.StepLR(optimizer, 1)], [2]),
    }[name]()


@pytest.mark.filterwarnings("error:Detected call of `lr_scheduler", "ignore:The epoch parameter")
@pytest.mark.parametrize(
    ("network", "optimizer", "name"),
    [("resnet", "sgd", "cosine"), ("small", "sgd", "one_cycle"), ("small", "adamw", "one_cycle"),
     ("gpt2", "adamw", "warm_up")],
)  # fmt: skip
def test_schedules(network, optimizer, name):
    twins = Twins(network, OPTIMIZERS[optimizer])
    captured = twins.captured()  # before the schedules are there
    schedules = [schedule(name, parts[2]) for parts in (twins.ours, twins.eager)]
    step = at(captured)
    rates = set()
    for _ in range(5):
        twins.train(step)
        rates.add(twins.ours[2].param_groups[0]["lr"])
        for s in schedules:
            s.step()
    assert len(rates) > 3


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1), "nadam": torch.optim.NAdam,
    "adamax": torch.optim.Adamax, "rmsprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, weight_decay=0.1),
    "adagrad": torch.optim.Adagrad, "adadelta": torch.optim.Adadelta, "rprop": torch.optim.Rprop,
}  # fmt: skip


@pytest.mark.parametrize("name", MAKERS)
def test_every_number_may_change(name):
    """All that are not 0 at the same time, in two groups with numbers of their own; and back."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        every = list(model.parameters())
        return MAKERS[name]([{"params": every[:3]}, {"params": every[3:], "lr": 0.02}])

    twins = Twins("small", make)
    captured = twins.captured()
    step = tight(captured, random_plan(captured.program, 3))
    twins.train(step, 2)
    before = [dict(group) for group in twins.ours[2].param_groups]
    for factor in (0.7, 0.3, None):
        for parts in (twins.ours, twins.eager):
            for group, was in zip(parts[2].param_groups, before, strict=True):
                for key, value in was.items():
                    if type(value) is float or key == "lr":
                        group[key] = value * (factor or 1)
                    elif isinstance(value, tuple):
                        group[key] = tuple(v * (factor or 1) for v in value)
        twins.train(step, 2)


def test_a_number_that_does_not_change_costs_nothing():
    twins = Twins("small", adamw)
    step = PlannedStep(twins.captured(), Plan())
    twins.train(step)
    step.calls.numbers = step.calls.patches = None  # type: ignore[assignment]
    twins.train(step)


@pytest.mark.parametrize(
    ("maker", "key", "value"),
    [(lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), "momentum", 0.0),
     (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "momentum", 0.9),
     (lambda m: torch.optim.AdamW(m.parameters()), "amsgrad", True),
     (lambda m: torch.optim.Adam(m.parameters()), "weight_decay", 0.1),
     (lambda m: torch.optim.Adam(m.parameters()), "maximize", True),
     (lambda m: torch.optim.AdamW(m.parameters(), weight_decay=0.0, fused=True), "weight_decay", 0.1),
     (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "lr", torch.tensor(0.1))],
)  # fmt: skip
def test_what_would_give_another_graph_is_refused(maker, key, value):
    twins = Twins("small", maker)
    step = PlannedStep(twins.captured(), Plan())
    twins.train(step)
    group = twins.ours[2].param_groups[0]
    before, group[key] = group[key], value
    with pytest.raises(StepError, match=f"the optimizer's {key} was .* at the capture and is .* now.*capture the step"):
        step(*twins.next_batch())
    group[key] = before
    twins.train(step)


def test_a_loop_of_ones_own_is_captured_as_it_is():
    """Micro-batches in a list, gradients clipped, the loop in the user's function."""
    twins = OneByOne("gpt2", adamw, 3)
    model, loss_fn, optimizer = twins.ours

    def step(batches: list[Any]) -> torch.Tensor:
        total = torch.zeros(())
        for x, y in batches:
            loss = loss_fn(model(x), y) / len(batches)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), NORM)
        optimizer.step()
        optimizer.zero_grad()
        return total

    planned = at(capture_step(step, [twins.next_batch() for _ in range(3)], machine=GPU))
    for _ in range(3):
        twins.at_once(lambda *batches: planned(list(batches)))


# -------------------------------------------------------------------------------------------------- foreach and fused

FORMS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **form: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1, **form),
    "adam": lambda p, **form: torch.optim.Adam(p, lr=0.01, amsgrad=True, weight_decay=0.1, **form),
    "adamw": lambda p, **form: torch.optim.AdamW(p, lr=0.01, **form),
    "adagrad": lambda p, **form: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1, **form),
    "rmsprop": lambda p, **form: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, **form),
}


@pytest.mark.parametrize(
    ("name", "form", "network"),
    [*((name, "foreach", "small") for name in FORMS), ("adam", "foreach", "gpt2"),
     *((name, "fused", "small") for name in FORMS if name != "rmsprop"), ("sgd", "fused", "gpt2")],
)  # fmt: skip
def test_updates_of_many_at_once(name, form, network):
    """To the bit as eager does them in the same form; numbers change, state leaves between the buckets."""
    twins = Twins(network, lambda model: FORMS[name](model.parameters(), **{form: True}))
    parameters = sum(p.nbytes for p in twins.ours[0].parameters())
    whole = capture(*twins.ours, twins.next_batch(), machine=GPU) if name == "adam" else None
    captured = capture(*twins.ours, twins.next_batch(), machine=GPU, bucket_bytes=parameters // 6)
    updates = [k for k in captured.program.kernels if k.phase == "optimizer"]
    assert any(f"_{form}_" in k.name for k in updates)
    assert whole is None or captured.program.peak_bytes <= whole.program.peak_bytes
    step = at(captured)
    assert any(step.program.tensors[d.tensor].kind == "optimizer_state" for d in step.plan.decisions)
    twins.train(step, 2)
    for factor in (0.5, 0.3):
        for parts in (twins.ours, twins.eager):
            for group in parts[2].param_groups:
                group["lr"] *= factor
                if "betas" in group:
                    group["betas"] = (group["betas"][0] * 0.9, group["betas"][1] * 0.99)
        twins.train(step)
    if whole is not None:
        twins.train(tight(whole, random_plan(whole.program, 1)), 2)


@pytest.mark.parametrize(
    ("name", "form"),
    [("adamw", {"foreach": False}), ("adamw", {"foreach": True}), ("adamw", {"fused": True}), ("sgd", {"fused": True})],
)
def test_a_learning_rate_may_begin_at_0_and_return_to_it(name, form):
    twins = Twins("small", lambda model: FORMS[name](model.parameters(), **form))
    rates = [0.0, 0.01, 0.005, 0.0]
    for parts in (twins.ours, twins.eager):
        parts[2].param_groups[0]["lr"] = rates[0]
    step = at(twins.captured())
    for rate in rates:
        for parts in (twins.ours, twins.eager):
            parts[2].param_groups[0]["lr"] = rate
        twins.train(step)
