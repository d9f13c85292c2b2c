"""torch.autocast and GradScaler under plans, equal to eager to the bit; steps that are skipped, too."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

import agents
from executor import PlannedStep, capture, capture_step
from simulator import Plan
from tests.executor.networks import adamw, sgd
from tests.executor.training.programs import GPU, Twins, random_plan, same, tight


class Scaled(Twins):
    """Mixed precision with a scaler each; some batches are infinite."""

    def __init__(self, network: str, optimizer: Any, dtype: torch.dtype = torch.bfloat16, bad: tuple[int, ...] = ()):
        super().__init__(network, optimizer)
        self.dtype, self.bad = dtype, bad
        self.scalers = [GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in range(2)]

    def next_batch(self) -> tuple[Tensor, Tensor]:
        x, y = super().next_batch()
        return (x * torch.inf if self.seed in self.bad else x), y

    def captured(self, **options: Any):
        return capture(*self.ours, super().next_batch(), machine=GPU, autocast=self.dtype, scaler=self.scalers[0],
                       **options)  # fmt: skip

    def eager_step(self, clip: float | None = None) -> Tensor:
        model, loss_fn, optimizer = self.eager
        scaler = self.scalers[1]
        x, y = self.next_batch()
        torch.manual_seed(self.seed)
        with torch.autocast("cpu", self.dtype):
            loss = loss_fn(model(x), y)
        scaler.scale(loss).backward()
        if clip is not None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    def compare(self) -> None:
        super().compare()
        assert self.scalers[0].state_dict() == self.scalers[1].state_dict()


@pytest.mark.parametrize(("network", "optimizer"), [("resnet", sgd), ("gpt2", adamw)])
def test_autocast_and_a_scaler(network, optimizer):
    twins = Scaled(network, optimizer)
    captured = twins.captured()
    program = captured.program
    plan = agents.make("capuchin", min_bytes=64).plan(program, GPU, int(0.75 * program.peak_bytes))
    assert plan.decisions
    twins.train(PlannedStep(captured, plan, GPU), 3)
    twins.train(tight(captured, random_plan(program, 2)), 3)


@pytest.mark.parametrize(
    ("make", "bad"),
    [(sgd, (0, 2)), (adamw, (0, 2)), (adamw, (1, 3)),
     (lambda m: torch.optim.AdamW(m.parameters(), foreach=True), (0, 2)),
     (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=True), (1, 3)),
     (lambda m: torch.optim.AdamW(m.parameters(), fused=True), (0, 2))],
)  # fmt: skip
def test_a_step_that_is_skipped(make, bad):
    """All gaps of the optimizer's state are emptied; infinite batches leave parameters and state as they are."""
    twins = Scaled("small", make, bad=bad)
    captured = twins.captured()
    step = tight(captured, random_plan(captured.program, 6))
    for i in range(5):
        before = copy.deepcopy(list(twins.ours[0].parameters()))
        x, y = twins.next_batch()
        torch.manual_seed(i)
        loss = step(x, y)
        assert same(loss, twins.eager_step()) or (loss.isnan() and i in bad)
        twins.seed += 1
        unchanged = all(map(same, before, twins.ours[0].parameters()))
        assert unchanged is (i in bad)
        assert twins.scalers[0].state_dict() == twins.scalers[1].state_dict()
        assert all(map(same, twins.ours[0].parameters(), twins.eager[0].parameters()))
    assert twins.scalers[0].get_scale() != 1024
    names = [n for n, p in twins.ours[0].named_parameters()]
    for state in (p[2].state_dict()["state"] for p in (twins.ours, twins.eager)):
        assert len(state) == len(names)
    ours, theirs = (p[2].state_dict()["state"] for p in (twins.ours, twins.eager))
    assert all(same(ours[i][k], theirs[i][k]) for i in theirs for k in theirs[i])


def test_a_scaler_with_clipping():
    twins = Scaled("small", adamw)
    step = PlannedStep(twins.captured(clip_norm=0.1), Plan(), GPU)
    for _ in range(4):
        batch = twins.next_batch()
        torch.manual_seed(twins.seed)
        assert same(step(*batch), twins.eager_step(0.1))
        twins.seed += 1
        twins.compare()


def test_a_weight_that_is_used_twice_is_cast_once():
    """The tied weights of GPT-2, and one used in two micro-batches' forward passes."""
    model = nn.Linear(8, 8)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(model(x)).sum()

    captured = capture_step(step, torch.randn(2, 8), machine=GPU)
    weight = next(n for n, name in zip(captured.placeholders, captured.names, strict=True) if "weight" in name)
    assert sum("to_copy" in str(user.target) for user in weight.users) == 1
    x = torch.randn(2, 8)
    assert same(PlannedStep(captured, Plan())(x), step(x).detach())
    assert torch.is_autocast_cache_enabled()


def test_a_failed_capture_leaves_the_scaler():
    twins = Scaled("small", adamw)
    before = twins.scalers[0].state_dict()
    twins.captured()
    assert twins.scalers[0].state_dict() == before
    assert not twins.scalers[0]._per_optimizer_states
    twins.eager, twins.scalers = twins.ours, twins.scalers[::-1]
    twins.eager_step()
