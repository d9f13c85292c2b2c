"""The quick look before a step: true where nothing has changed, and every change that counts is seen."""

import copy

import pytest
import torch
from torch import nn

from executor import PlannedStep
from simulator import Plan
from tests.executor.training.programs import Twins, planned


def unplanned() -> tuple[Twins, PlannedStep]:
    twins = Twins("small")
    return twins, PlannedStep(twins.captured(), Plan())


@pytest.mark.parametrize("make", [unplanned, planned])
def test_without_a_change_nothing_is_found_anew(make, monkeypatch):
    twins, step = make()
    twins.train(step)
    monkeypatch.setattr(step, "_bind", None)
    twins.train(step, 2)
    for parts in (twins.ours, twins.eager):
        parts[2].param_groups[0]["lr"] *= 0.5
        for p in parts[0].parameters():
            p.data.mul_(0.9)
    twins.train(step)


def stem(twins: Twins) -> nn.Module:
    return twins.ours[0].stem[0]


CHANGES = {
    "data": lambda t: setattr(stem(t).weight, "data", stem(t).weight.data.clone()),
    "form": lambda t: setattr(stem(t).weight, "data", stem(t).weight.data.flatten()),
    "strides": lambda t: setattr(stem(t).weight, "data", stem(t).weight.data.transpose(2, 3)),
    "type": lambda t: setattr(stem(t).weight, "data", stem(t).weight.data.view(torch.int32).double()),
    "frozen": lambda t: stem(t).weight.requires_grad_(False),
    "gradient": lambda t: setattr(stem(t).weight, "grad", torch.zeros_like(stem(t).weight)),
    "parameter": lambda t: setattr(stem(t), "weight", nn.Parameter(stem(t).weight.detach())),
    "buffer": lambda t: setattr(t.ours[0].stem[1], "running_mean", torch.ones(4)),
    "no buffer": lambda t: t.ours[0].stem[1]._buffers.pop("running_mean"),
    "state": lambda t: t.ours[2].state[stem(t).weight].update(momentum_buffer=torch.zeros_like(stem(t).weight)),
    "no state": lambda t: t.ours[2].state[stem(t).weight].clear(),
    "another state": lambda t: t.ours[2].state.update({stem(t).weight: dict(t.ours[2].state[stem(t).weight])}),
    "no states": lambda t: t.ours[2].state.clear(),
    "loaded": lambda t: t.ours[2].load_state_dict(copy.deepcopy(t.ours[2].state_dict())),
    "mode": lambda t: t.ours[0].stem[1].eval(),
    "module": lambda t: t.ours[0].stem.append(nn.Identity()),
    "other module": lambda t: t.ours[0].stem.__setitem__(2, nn.Identity()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen(change):
    twins, step = unplanned()
    twins.train(step)
    assert step._known is not None and step._known.same()
    CHANGES[change](twins)
    assert not step._known.same()


@pytest.mark.parametrize("change", ["frozen", "gradient", "data", "state"])
def test_every_change_is_seen_of_what_the_plan_swaps(change):
    twins, step = planned()
    twins.train(step)
    step.finish()
    step.look()
    assert step._known is not None and step._known.same()
    CHANGES[change](twins)
    assert not step._known.same()
