"""Tests batches of several shapes under plans: one state, one limit, bit-identical to eager."""

import copy
import gc
import warnings
from collections.abc import Sequence
from mmap import PAGESIZE
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import agents
from executor import PlannedSteps, StepError
from executor.memory.pinned import HOST, LEAST_USE
from simulator import Machine, Plan, Program, Recompute, Swap
from tests.executor.networks import adamw, images, sgd
from tests.executor.training.programs import GPU, Twins, bit_identical, random_plan, required, standard
from tests.executor.training.test_faults import break_kernel, once


def capuchin(program: Program, machine: Machine, limit: int) -> Plan:
    return agents.make("capuchin", min_bytes=64).plan(program, machine, limit)


def everything(program: Program, machine: Machine, limit: int) -> Plan:
    """Returns a plan that uses nearly every gap, as far as the limit allows."""
    plans = (random_plan(program, seed, empty_share=0.1) for seed in range(20))
    plan = next(plan for plan in plans if required(program, plan) <= limit)
    assert {type(decision) for decision in plan.decisions} == {Swap, Recompute}
    return plan


def several(name: str, make_optimizer: Any = sgd, counts: Sequence[int] = (4, 4, 4, 3, 4, 1)) -> Twins:
    """Returns twins whose batches have these numbers of images or words."""
    twins = Twins(name, make_optimizer)

    def batch(number: int) -> tuple[Tensor, Tensor]:
        count = counts[number % len(counts)]
        if name != "gpt2":
            return images(16, count)()
        text = torch.randint(40, (2, count + 1))
        return text[:, :-1].clone(), text[:, 1:].clone()

    for loop in (twins.ours, twins.eager):
        loop.batch = batch
    return twins


@pytest.mark.parametrize(
    ("name", "make_optimizer", "counts"),
    [("small", sgd, (4, 4, 4, 3, 4, 1)), pytest.param("gpt2", adamw, (12, 9, 12, 12, 5), marks=pytest.mark.nightly)],
)
def test_short_batches_and_lengths(name, make_optimizer, counts):
    twins = several(name, make_optimizer, counts)
    steps = twins.steps_under(capuchin, 0.8)
    twins.train(steps, 6)
    assert len(steps.steps) == 3 and any(step.plan.decisions for step in steps.steps.values())
    assert steps.peak_bytes <= steps.limit
    with steps:
        twins.train(steps, 6, compare=False)
    twins.compare()
    steps.finish()
    twins.go_on_eagerly(2)
    twins.train(steps, 2)


@pytest.mark.parametrize("undo", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_all_shapes_share_their_pinned_memory(undo):
    """It is little more than the largest shape needs, and is free between steps."""
    twins = several("small", counts=(3, 4, 1, 4))
    gc.collect()
    HOST.drop()
    before = HOST.nbytes
    seeds = iter(range(9))
    steps = twins.steps_under(lambda program, *_: random_plan(program, next(seeds), empty_share=0.1), 1.0, undo=undo)
    twins.train(steps, 8)
    assert len({step.pinned_bytes for step in steps.steps.values()}) == 3
    steps.finish()
    largest = max(step.pinned_bytes for step in steps.steps.values())
    assert undo or largest <= HOST.nbytes - before <= largest / LEAST_USE + 2 * PAGESIZE
    slab = HOST.take(largest)
    twins.train(steps)
    del slab
    twins.train(steps)


def test_the_last_shapes_are_kept():
    twins = several("small", counts=(4, 3))
    steps = twins.steps_under(capuchin, 1.0, keep=1)
    for _ in range(3):
        twins.train(steps)
        assert len(steps.steps) == 1


# -------------------------------------------------------------------------------------------------- numbers of batches


class Numbers:
    """Steps with a weight of the loss, and the number of plans made so far."""

    def __init__(self, keep: int, read: Any = lambda weight: weight) -> None:
        model = nn.Linear(8, 4)
        self.plans = 0

        def step(x: Tensor, *, weight: Any) -> Tensor:
            loss = (model(x) * read(weight)).sum()
            loss.backward()
            model.zero_grad()
            return loss.detach()

        def plan(*_: Any) -> Plan:
            self.plans += 1
            return Plan()

        self.eager = step
        self.steps = PlannedSteps(lambda x, weight: step(x, weight=weight), None, None, GPU, "1MiB", plan, keep)

    def train(self, weight: Any, rows: int = 3) -> int:
        """Trains a step and returns the number of plans made so far."""
        x = torch.randn(rows, 8)
        assert bit_identical(self.steps(x, weight), self.eager(x, weight=weight))
        return self.plans


@pytest.mark.parametrize("read", [None, int], ids=["a number", "a tensor that is read"])
@pytest.mark.filterwarnings("ignore:.*captures in a row")
def test_steps_for_numbers_are_kept_until_they_are_the_least_recently_used(read):
    numbers = Numbers(2, read or (lambda weight: weight))

    def plans(*weights: int) -> list[int]:
        return [numbers.train(weight if read is None else torch.tensor(weight)) for weight in weights]

    assert plans(1, 2, 1, 2) == [1, 2, 2, 2]
    assert plans(3, 2, 1) == [3, 3, 4] and len(numbers.steps.steps) == 2
    assert plans(2, 1, 3) == [4, 4, 5] and len(numbers.steps.steps) == 2
    assert numbers.train(weight=3 if read is None else torch.tensor(3), rows=5) == 6
    assert len(numbers.steps.steps) == 2


@pytest.mark.filterwarnings("ignore:.*captures in a row")
def test_equal_numbers_that_compute_something_else_are_captured_apart():
    numbers = Numbers(9, lambda weight: torch.ones(2, dtype=torch.int64).mul(weight).sum())
    weights = (1, 1.0, True, 1, 0.0, -0.0, 0.0, float("nan"), float("nan"))
    assert [numbers.train(weight) for weight in weights] == [1, 2, 3, 3, 4, 5, 5, 6, 6]
    numbers = Numbers(9, float)
    weights = map(torch.tensor, (0.0, -0.0, 0.0, float("nan"), float("nan")))
    assert [numbers.train(weight) for weight in weights] == [1, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("weight", "named"),
    [
        (lambda i: 0.1 * i, r"the number 0\.3\d* in the batch \(argument weight\)"),
        (lambda i: {"of": [7, 0.1 * i]}, r"the number 0\.3\d* in the batch \(argument weight\['of'\]\[1\]\)"),
        (torch.tensor, r"a number of the batch \(.*test_planned_steps\.py:\d+\)"),
    ],
    ids=["an argument", "a part", "a tensor that is read"],
)
def test_the_third_capture_for_a_number_is_announced_once(weight, named):
    numbers = Numbers(16, lambda weight: weight["of"][1] if isinstance(weight, dict) else float(weight))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(3):
            numbers.train(weight(i))
        numbers.train(weight(1))
    with pytest.warns(
        UserWarning, match=rf"^{named} has caused 3 captures in a row.*at most 16 are kept; make it a te"
    ):
        numbers.train(weight(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(4, 8):
            numbers.train(weight(i))


def test_captures_for_other_causes_are_not_announced():
    numbers = Numbers(16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(6):
            numbers.train(0.1 * i if i % 3 else 0.0, rows=3 + i // 3 * 4)
        for rows in range(11, 15):
            numbers.train(0.0, rows)


# ------------------------------------------------------------------------------------- micro-batches of several shapes


class Accumulated(Twins):
    """Twins with up to ``k`` micro-batches of any shapes and a decreasing learning rate."""

    def __init__(self, k: int, **options: Any) -> None:
        super().__init__("small", sgd, accumulate=k, clip_norm=0.05, **options)
        self.planned = self.steps_under(everything, 1.0)
        for loop in (self.ours, self.eager):
            rate = torch.optim.lr_scheduler.ExponentialLR(loop.optimizer, 0.8)
            loop.after = lambda _, rate=rate: rate.step()

    def pairs(self, *counts: int) -> list[tuple[Tensor, Tensor]]:
        self.eager.options = self.eager.options | {"accumulate": len(counts)}
        with torch.random.fork_rng():
            torch.manual_seed(100 + self.seed)
            return [images(16, count)() for count in counts]

    def one_by_one(self, *counts: int) -> None:
        pairs = self.pairs(*counts)
        for i, (ours, theirs) in enumerate(zip(pairs, copy.deepcopy(pairs), strict=True)):
            self.micro(self.planned, i, ours, theirs)
        assert not self.planned.in_progress
        self.finish_step(self.planned)

    def announced(self, *counts: int) -> None:
        self.planned.begin(*self.pairs(*counts))
        self.one_by_one(*counts)

    def all_at_once(self, *counts: int) -> None:
        pairs = self.pairs(*counts)
        step = self.planned if len(pairs) > 1 else lambda *pair: self.planned(pair)
        self.at_once(step, pairs, copy.deepcopy(pairs))
        self.finish_step(self.planned)


def test_micro_batches_of_any_shapes():
    """Passes micro-batches one by one and at once, with changing, mixed and fewer shapes per step."""
    twins = Accumulated(3)
    twins.one_by_one(4, 4, 4)
    twins.one_by_one(2, 2, 2)
    twins.announced(4, 2, 3)
    twins.one_by_one(4, 4, 4)
    twins.all_at_once(4, 2, 3)
    twins.announced(4, 2)
    twins.all_at_once(4, 2)
    twins.announced(2)
    twins.all_at_once(2)
    twins.one_by_one(2, 2, 2)
    assert len(twins.planned.steps) == 5 and twins.planned.peak_bytes <= twins.planned.limit
    with twins.planned:
        twins.planned.finish()
        twins.all_at_once(2, 2, 2)
        twins.planned.finish()
    twins.compare()


def test_a_micro_batch_of_another_shape_leaves_the_step_unchanged():
    twins = Accumulated(2)
    first, other, last = twins.pairs(4, 3, 4)
    twins.pairs(4, 4)
    twins.micro(twins.planned, 0, first, copy.deepcopy(first))
    with pytest.raises(StepError, match=r"micro-batch 2 of 2 .*tensor 2 of the batch has shape \(3, .*begin.*finish"):
        twins.planned(*other)
    for wrong in (lambda: twins.planned(last, last), lambda: twins.planned.begin(last), lambda: twins.planned(last)):
        with pytest.raises(StepError, match="1 of the step's 2 micro-batches"):
            wrong()
    assert twins.planned.in_progress
    twins.micro(twins.planned, 1, last, copy.deepcopy(last))
    twins.finish_step(twins.planned)


def test_a_step_that_is_undone_begins_anew():
    """After ``finish`` the next step may have any shape; after a fault it has the same."""
    twins = Accumulated(2, average=False)
    twins.one_by_one(4, 4)
    for pairs in (twins.pairs(4, 4), twins.pairs(4, 3)):
        twins.planned.begin(*pairs)
        twins.planned(*pairs[0])
        twins.planned.finish()
        assert not twins.planned.in_progress
        twins.compare()
    twins.one_by_one(3, 3)
    twins.planned.begin(*twins.pairs(4, 3))
    step = next(reversed(twins.planned.steps.values()))
    break_kernel(step, "backward", once(RuntimeError("bad luck")), 0.9)
    x, y = twins.pairs(4, 3)
    twins.planned(*x)
    with pytest.raises(StepError, match="micro-batch 2 of 2 failed: RuntimeError: bad luck; the model is as before"):
        twins.planned(*y)
    twins.compare()
    twins.one_by_one(4, 3)
    twins.announced(3)


def test_wrong_numbers_of_micro_batches_are_refused():
    twins = Accumulated(2)
    pair = twins.pairs(4)[0]
    for wrong in ([], [pair] * 3):
        for call in (twins.planned, twins.planned.begin):
            with pytest.raises(StepError, match="1 to 2 micro-batches"):
                call(*wrong)
    assert not twins.planned.steps


def test_an_x_and_a_y_that_are_pairs():
    """Two pairs count as two micro-batches until a batch of that structure has been seen."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            return self.layer(pair[0] + pair[1])

    def loop() -> Any:
        model = Sum()
        return standard(
            model,
            lambda out, pair: nn.functional.mse_loss(out, pair[0] - pair[1]),
            adamw(model),
            lambda _: ((torch.randn(5, 8), torch.randn(5, 8)), (torch.randn(5, 4), torch.randn(5, 4))),
            accumulate=2,
        )

    twins = Twins(loop)
    steps = twins.steps_under(lambda *_: Plan(), 1.0)
    steps.begin(twins.next_batch(), twins.next_batch())
    twins.train(steps, 2)


def test_errors_of_the_planner_propagate_and_change_nothing():
    twins = several("small")
    steps = twins.steps_under(capuchin, 2000)
    with pytest.raises(agents.Infeasible):
        steps(*twins.next_batch())
    assert not steps.steps
    twins.compare()
