"""Batches of several shapes under plans: one state, one limit, equal to eager to the bit."""

from itertools import cycle

import pytest
import torch
from torch import Tensor, nn

import agents
from executor import PlannedSteps, StepError
from simulator import Machine, Plan, Program
from tests.executor.networks import OPTIMIZERS, adamw, images
from tests.executor.training.programs import GPU, Twins, random_plan, required


def capuchin(program: Program, machine: Machine, limit: int) -> Plan:
    return agents.make("capuchin", min_bytes=64).plan(program, machine, limit)


class Several(Twins):
    """Batches of these shapes in turn."""

    def __init__(self, network: str, optimizer=adamw) -> None:
        super().__init__(network, optimizer)
        counts = cycle([4, 4, 4, 3, 4, 1])
        sizes = {"gpt2": [12, 9, 12, 12, 5]}.get(network, [])
        lengths = cycle(sizes)
        self.known: dict[int, tuple[Tensor, Tensor]] = {}

        def make() -> tuple[Tensor, Tensor]:
            if self.seed not in self.known:
                if sizes:
                    text = torch.randint(40, (2, next(lengths) + 1))
                    self.known[self.seed] = text[:, :-1].clone(), text[:, 1:].clone()
                else:
                    self.known[self.seed] = images(16, next(counts))()
            return self.known[self.seed]

        self.batch = make


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("network", ["resnet", "gpt2"])
def test_short_batches_and_lengths(network, optimizer):
    twins = Several(network, OPTIMIZERS[optimizer])
    steps = PlannedSteps(*twins.ours, GPU, 0.7, capuchin)
    twins.train(steps, 12)
    assert len(steps.steps) == 3 and sum(bool(step.plan.decisions) for step in steps.steps.values()) >= 1
    assert steps.peak_bytes <= steps.limit
    with steps:
        twins.train_within(steps, 6)
    twins.compare()
    steps.finish()
    for _ in range(2):  # eagerly, what was planned
        twins.eager, twins.ours = twins.ours, twins.eager
        twins.eager_step()
        twins.eager, twins.ours = twins.ours, twins.eager
        twins.eager_step()
        twins.seed += 1
    twins.compare()
    twins.train(steps, 2)


def test_every_shape_has_state_away():
    """Plans that empty every gap, in both shapes, over the boundary of steps, too."""
    twins = Several("small")
    plans: list[Plan] = []

    def everything(program: Program, machine: Machine, limit: int) -> Plan:
        plans.append(random_plan(program, len(plans), nothing=0.1))
        assert required(program, plans[-1]) <= limit
        return plans[-1]

    steps = PlannedSteps(*twins.ours, GPU, 1.0, everything)
    twins.train(steps, 8)
    assert len(plans) == 3 and all(step.order.start for step in steps.steps.values())


def test_the_last_shapes_are_kept():
    twins = Several("small")
    steps = PlannedSteps(*twins.ours, GPU, 1.0, capuchin, keep=1)
    for _ in range(5):
        twins.train(steps)
        assert len(steps.steps) == 1


def test_accumulation_with_a_short_last_batch():
    torch.manual_seed(0)
    model, loss_fn = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), nn.CrossEntropyLoss()
    steps = PlannedSteps(model, loss_fn, adamw(model), GPU, 1.0, capuchin, accumulate=2, clip_norm=1.0)
    pairs = [(torch.randn(n, 8), torch.randint(4, (n,))) for n in (5, 5, 3, 3)]
    assert steps(*pairs[:2]).isfinite() and steps(*pairs[2:]).isfinite()
    with pytest.raises(StepError, match="a step takes 2 micro-batches"):
        steps(*pairs[1:3])


def test_what_the_planner_raises_is_passed_on_and_nothing_has_happened():
    twins = Several("small")
    steps = PlannedSteps(*twins.ours, GPU, 1000, capuchin)
    with pytest.raises(agents.Infeasible):
        steps(*twins.next_batch())
    assert not steps.steps
    twins.compare()
