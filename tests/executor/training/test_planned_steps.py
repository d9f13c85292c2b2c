"""Batches of several shapes under plans: one state, one limit, equal to eager to the bit."""

import copy
import gc
from itertools import cycle

import pytest
import torch
from torch import Tensor, nn

import agents
from executor import PlannedSteps, StepError
from executor.memory.pinned import HOST, PAGE
from simulator import Machine, Plan, Program, Recompute, Swap
from tests.executor.networks import adamw, images, sgd
from tests.executor.training.programs import GPU, Twins, random_plan, required, same
from tests.executor.training.test_faults import break_kernel, once


def capuchin(program: Program, machine: Machine, limit: int) -> Plan:
    return agents.make("capuchin", min_bytes=64).plan(program, machine, limit)


class Several(Twins):
    """Batches of these shapes in turn."""

    def __init__(self, network: str, optimizer=sgd) -> None:
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


@pytest.mark.parametrize(("network", "optimizer"), [("resnet", sgd), ("gpt2", adamw)])
def test_short_batches_and_lengths(network, optimizer):
    twins = Several(network, optimizer)
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


@pytest.mark.parametrize("undo", [False, True])
def test_all_shapes_have_one_slab(undo):
    """As large as the one of them that needs most; one who comes between finds it free."""
    twins = Several("small")
    counts = cycle([3, 4, 1, 4])
    twins.batch = lambda: twins.known.setdefault(twins.seed, images(16, next(counts))())
    gc.collect()
    HOST.drop()
    before = HOST.nbytes
    plans = iter(range(9))
    steps = PlannedSteps(*twins.ours, GPU, 1.0, lambda p, *_: random_plan(p, next(plans), nothing=0.1), undo=undo)
    twins.train(steps, 8)
    steps.finish()
    assert len({step.pinned_bytes for step in steps.steps.values()}) > 1
    if not undo:
        most = max(step.pinned_bytes for step in steps.steps.values())
        assert HOST.nbytes - before == -(-most // PAGE) * PAGE
    mine = HOST.take(HOST.nbytes - before)  # it is free
    pinned = HOST.nbytes
    twins.train(steps, 1)
    assert HOST.nbytes > pinned
    del mine
    twins.train(steps, 3)
    HOST.drop()
    assert HOST.nbytes <= pinned


def test_the_last_shapes_are_kept():
    twins = Several("small")
    steps = PlannedSteps(*twins.ours, GPU, 1.0, capuchin, keep=1)
    for _ in range(5):
        twins.train(steps)
        assert len(steps.steps) == 1


NORM = 0.05


class Accumulated(Twins):
    """Up to ``k`` micro-batches of any shapes; the learning rate of both goes down from step to step."""

    def __init__(self, k: int, average: bool = True) -> None:
        super().__init__("small")
        self.k, self.average, self.asked = k, average, 0
        self.rates = [torch.optim.lr_scheduler.ExponentialLR(parts[2], 0.8) for parts in (self.ours, self.eager)]
        self.steps = PlannedSteps(*self.ours, GPU, 1.0, self.plan, accumulate=k, average=average, clip_norm=NORM)

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """One that empties nearly every gap, where the limit has room for it."""
        self.asked += 1
        plans = (random_plan(program, seed, nothing=0.1) for seed in range(20))
        plan = next(plan for plan in plans if required(program, plan) <= limit)
        assert {type(decision) for decision in plan.decisions} == {Swap, Recompute}
        return plan

    def pairs(self, *counts: int) -> list[tuple[Tensor, Tensor]]:
        with torch.random.fork_rng():
            torch.manual_seed(100 + self.seed)
            return [images(16, count)() for count in counts]

    def eager_part(self, x: Tensor, y: Tensor, count: int) -> Tensor:
        model, loss_fn, _ = self.eager
        loss = loss_fn(model(x), y)
        loss = loss / count if self.average and count > 1 else loss
        loss.backward()
        return loss.detach()

    def updated(self) -> None:
        model, _, optimizer = self.eager
        assert nn.utils.clip_grad_norm_(model.parameters(), NORM) > NORM
        optimizer.step()
        optimizer.zero_grad()
        assert not self.steps.under_way
        self.compare()
        for rate in self.rates:
            rate.step()
        self.seed += 1

    def one_by_one(self, *counts: int) -> None:
        for x, y in self.pairs(*counts):
            self.seed += 1
            torch.manual_seed(self.seed)
            ours, drawn = self.steps(x, y), torch.get_rng_state()
            torch.manual_seed(self.seed)
            assert same(ours, self.eager_part(x, y, len(counts))) and torch.equal(drawn, torch.get_rng_state())
        self.updated()

    def told(self, *counts: int) -> None:
        self.steps.begin(*self.pairs(*counts))
        self.one_by_one(*counts)

    def at_once(self, *counts: int) -> None:
        pairs = self.pairs(*counts)
        torch.manual_seed(self.seed)
        ours = self.steps(*pairs)
        torch.manual_seed(self.seed)
        assert same(ours, sum(self.eager_part(x, y, len(counts)) for x, y in pairs))
        self.updated()


def test_losses_of_micro_batches_may_be_added_as_they_are():
    twins = Accumulated(2, average=False)
    twins.told(4, 2)
    twins.at_once(4, 2)


def test_micro_batches_of_any_shapes():
    """One by one and at once; steps of other shapes, of several in one step, and of fewer micro-batches."""
    twins = Accumulated(3)
    twins.one_by_one(4, 4, 4)
    twins.one_by_one(2, 2, 2)
    twins.told(4, 2, 3)
    twins.one_by_one(4, 4, 4)
    twins.told(4, 2, 3)
    twins.at_once(4, 2, 3)
    twins.told(4, 2)
    twins.at_once(4, 2)
    twins.told(2)
    twins.at_once(2)
    twins.one_by_one(2, 2, 2)
    assert twins.asked == len(twins.steps.steps) == 5 and twins.steps.peak_bytes <= twins.steps.limit
    with twins.steps:
        twins.steps.finish()
        twins.at_once(2, 2, 2)
        twins.steps.finish()
    twins.compare()


def test_a_shape_that_the_step_did_not_begin_with_leaves_it_where_it_was():
    twins = Accumulated(2)
    (x, y), (other_x, other_y), last = twins.pairs(4, 3, 4)
    torch.manual_seed(0)
    ours = twins.steps(x, y)
    said = (r"^micro-batch 2 of 2 is not of the shape that the step began with: tensor 2 of the batch has shape \(3, "
            r".*; begin\(\*pairs\) tells a step all of its shapes, finish\(\) undoes it$")  # fmt: skip
    with pytest.raises(StepError, match=said):
        twins.steps(other_x, other_y)
    for wrong in (lambda: twins.steps((x, y), (x, y)), lambda: twins.steps.begin((x, y)), lambda: twins.steps((x, y))):
        with pytest.raises(StepError, match=r"^1 of the step's 2 micro-batches are done; it takes the next one, alone"):
            wrong()
    assert twins.steps.under_way
    torch.manual_seed(1)
    theirs = twins.steps(*last)
    for seed, loss, pair in ((0, ours, (x, y)), (1, theirs, last)):
        torch.manual_seed(seed)
        assert same(loss, twins.eager_part(*pair, 2))
    twins.updated()


def test_a_step_that_is_not_whole_is_undone_and_the_next_one_is_of_any_shape():
    twins = Accumulated(2)
    twins.one_by_one(4, 4)
    twins.steps(*twins.pairs(4)[0])
    twins.steps.finish()
    assert not twins.steps.under_way
    twins.compare()
    twins.steps.begin(*twins.pairs(4, 3))
    twins.steps(*twins.pairs(4)[0])
    twins.steps.finish()
    twins.compare()
    twins.one_by_one(3, 3)
    twins.told(3)


def test_a_micro_batch_that_fails_begins_the_same_step_anew():
    twins = Accumulated(2)
    twins.one_by_one(4, 4)
    twins.steps.begin(*twins.pairs(4, 3))
    step = next(reversed(twins.steps.steps.values()))
    break_kernel(step, "backward", once(RuntimeError("bad luck")), 0.9)
    x, y = twins.pairs(4, 3)
    twins.steps(*x)
    with pytest.raises(StepError, match="in micro-batch 2 of 2 failed: RuntimeError: bad luck; the model is as before"):
        twins.steps(*y)
    twins.compare()
    twins.one_by_one(4, 3)


def test_what_is_no_micro_batch():
    twins = Accumulated(2)
    x, y = twins.pairs(4)[0]
    for wrong in ([], [(x, y)] * 3):
        with pytest.raises(StepError, match=r"^a step takes 1 to 2 micro-batches, each a pair \(x, y\) or one object$"):
            twins.steps(*wrong)
        with pytest.raises(StepError, match="a step takes 1 to 2 micro-batches"):
            twins.steps.begin(*wrong)
    with pytest.raises(StepError, match=r"the batch has something that is no tensor and cannot be compared: .*set"):
        twins.steps((x, {1}), y)
    assert not twins.steps.steps
    single = PlannedSteps(*twins.ours, GPU, 1.0, capuchin)
    for wrong in ([], [(x, y)] * 2):
        with pytest.raises(StepError, match=r"^a step takes 1 to 1 micro-batches"):
            single.begin(*wrong)
    for name in ("accumulate", "keep"):
        with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
            PlannedSteps(*twins.ours, GPU, 1.0, capuchin, **{name: 0})


def test_an_x_and_a_y_that_are_pairs():
    """Two of them look like two micro-batches, until such ones have been seen."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    twin = copy.deepcopy(model)
    optimizer, other = adamw(model), adamw(twin)

    class Sum(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return self.layer(pair[0] + pair[1])

    def loss_fn(out: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.mse_loss(out, pair[0] - pair[1])

    steps = PlannedSteps(Sum(model), loss_fn, optimizer, GPU, 1.0, lambda *_: Plan(), accumulate=2)

    def pair(n: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        return (torch.randn(n, 8), torch.randn(n, 8)), (torch.randn(n, 4), torch.randn(n, 4))

    steps.begin(pair(5), pair(5))
    for _ in range(2):
        for n in (5, 5):
            x, y = pair(n)
            loss = loss_fn(Sum(twin)(x), y) / 2
            loss.backward()
            assert same(steps(x, y), loss)
        other.step()
        other.zero_grad()
        assert same(model.weight, twin.weight)


def test_views_into_larger_memory():
    """Micro-batches with strides of their own, as slices of texts have."""
    text = torch.randint(40, (2, 13))
    model = nn.Sequential(nn.Embedding(40, 8), nn.Linear(8, 40))
    steps = PlannedSteps(
        model, lambda out, y: nn.functional.cross_entropy(out.transpose(1, 2), y), adamw(model), GPU, 1.0,
        lambda *_: Plan(), accumulate=2,
    )  # fmt: skip
    before = model[1].weight.clone()
    for _ in range(2):
        assert steps(text[:, :-1], text[:, 1:]).isfinite()
    assert not steps.under_way and not torch.equal(before, model[1].weight)


def test_what_the_planner_raises_is_passed_on_and_nothing_has_happened():
    twins = Several("small")
    steps = PlannedSteps(*twins.ours, GPU, 2000, capuchin)
    with pytest.raises(agents.Infeasible):
        steps(*twins.next_batch())
    assert not steps.steps
    twins.compare()
