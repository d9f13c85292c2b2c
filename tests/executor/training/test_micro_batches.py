"""A step called once per micro-batch: equal to eager accumulation to the bit, under plans of every kind."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from executor import PlannedStep, StepError, capture
from executor.memory import engines
from simulator import Plan, Recompute, Swap
from tests.executor.networks import adamw, sgd
from tests.executor.training.programs import (
    GPU,
    Bytes,
    Twins,
    equal_states,
    fits,
    random_plan,
    same,
    state,
    tight,
)
from tests.executor.training.test_faults import break_kernel, once

NORM = 0.05


class OneByOne(Twins):
    """Micro-batches one by one; between two of them the user draws random numbers of their own."""

    def __init__(self, network: str, optimizer=adamw, k: int = 3, scaler: bool = False) -> None:
        super().__init__(network, optimizer)
        self.k, self.batches, self.average = k, [], True
        self.scalers = [GradScaler("cpu", init_scale=2.0**8, growth_interval=2) if scaler else None for _ in range(2)]

    def accumulated(self):
        return capture(*self.ours, self.next_batch(), machine=GPU, accumulate=self.k, clip_norm=NORM,
                       scaler=self.scalers[0], average=self.average)  # fmt: skip

    def eager_micro(self, i: int, x: Tensor, y: Tensor) -> Tensor:
        model, loss_fn, optimizer = self.eager
        scaler = self.scalers[1]
        loss = loss_fn(model(x), y) / (self.k if self.average else 1)
        (scaler.scale(loss) if scaler else loss).backward()
        if i == self.k - 1:
            if scaler:
                scaler.unscale_(optimizer)
            assert nn.utils.clip_grad_norm_(model.parameters(), NORM) > NORM
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def micro(self, step: PlannedStep, i: int) -> None:
        """The next one by both; losses and random states are equal."""
        x, y = self.next_batch()
        before = x.clone(), y.clone()
        torch.manual_seed(self.seed)
        ours, drawn = step(x, y), torch.get_rng_state()
        torch.manual_seed(self.seed)
        assert same(ours, self.eager_micro(i, *before)) and torch.equal(drawn, torch.get_rng_state())
        self.batches = [*self.batches[:i], ((x, y), before)]
        if i == self.k - 1:  # what the plan swaps is back
            assert all(same(*pair) for both in self.batches for pair in zip(*both, strict=True))
        self.seed += 1

    def at_once(self, step: Callable[..., Tensor]) -> None:
        batches = []
        for _ in range(self.k):
            batches.append(self.next_batch())
            self.seed += 1
        torch.manual_seed(self.seed)
        total = step(*batches)
        torch.manual_seed(self.seed)
        losses = [self.eager_micro(i, *pair) for i, pair in enumerate(batches)]
        assert same(total, sum(losses[1:], losses[0]))
        self.compare()

    def go(self, step: PlannedStep, steps: int = 1, compare: bool = True) -> None:
        for _ in range(steps):
            for i in range(self.k):
                self.micro(step, i)
            if compare:
                self.compare()


@pytest.mark.parametrize(("network", "optimizer", "k"), [("small", adamw, 1), ("small", sgd, 3), ("gpt2", adamw, 2)])
def test_one_by_one(network, optimizer, k):
    """Under plans that leave little, whose gradients, state and batches leave and come back; the limit holds."""
    twins = OneByOne(network, optimizer, k)
    captured = twins.accumulated()
    for seed in range(2):
        plan = random_plan(captured.program, seed, nothing=0.1)
        moved = {captured.program.tensors[d.tensor].kind for d in plan.decisions if isinstance(d, Swap)}
        assert {"gradient", "input", "optimizer_state"} <= moved
        step = tight(captured, plan)
        twins.go(step, 2)
        assert 0 < step.peak_bytes <= step.limit
        step.finish()


def test_copies_come_after_the_stream_on_which_each_micro_batch_computes(monkeypatch):
    """The caller's may be another one each time: the engines are told when a call begins."""
    twins = OneByOne("small")
    captured = twins.accumulated()
    step = tight(captured, random_plan(captured.program, 0, nothing=0.1))
    twins.go(step)
    told = []
    monkeypatch.setattr(engines.HostEngines, "begin", lambda self: told.append("begin"))
    for name in ("copy_out", "copy_in"):
        copy = getattr(engines.HostEngines, name)
        monkeypatch.setattr(engines.HostEngines, name, lambda *a, copy=copy: (told.append("copy"), copy(*a)))
    for i in range(3):
        told.clear()
        twins.micro(step, i)
        assert told[0] == "begin" and "copy" in told


def test_at_once_and_one_by_one_take_turns():
    twins = OneByOne("small")
    captured = twins.accumulated()
    step = tight(captured, random_plan(captured.program, 3))
    twins.go(step)
    twins.at_once(step)
    twins.go(step, 2)
    twins.at_once(step)
    with step:
        twins.go(step, 3, compare=False)
    twins.compare()


def test_schedules_between_steps_and_between_micro_batches():
    """The number that counts is the one at the update."""
    twins = OneByOne("small", k=2)
    captured = twins.accumulated()
    step = tight(captured, random_plan(captured.program, 4))
    for rate in (0.02, 0.005):
        twins.micro(step, 0)
        for parts in (twins.ours, twins.eager):
            parts[2].param_groups[0]["lr"] = rate
        twins.micro(step, 1)
        twins.compare()


def test_a_scaler():
    twins = OneByOne("small", k=2, scaler=True)
    captured = twins.accumulated()
    step = tight(captured, random_plan(captured.program, 2))
    twins.go(step, 5)
    assert twins.scalers[0].get_scale() == twins.scalers[1].get_scale() > 2.0**8


def test_a_loss_that_the_plan_frees_at_once():
    """Without a division after it nothing reads it until the losses are added."""
    twins = OneByOne("small", k=2)
    twins.average = False
    captured = twins.accumulated()
    loss = captured.values[captured.micro[1].loss]
    gap = next(gap for gap in captured.program.gaps() if gap.tensor == loss)
    assert gap.after == captured.program.accesses[loss][0]
    twins.go(tight(captured, Plan((Recompute(loss, gap.after, gap.before),))), 2)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.ReLU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def test_checkpoints_have_the_random_numbers_of_their_own_micro_batch():
    twins = OneByOne("small", sgd, k=2)
    twins.batch = lambda: (torch.randn(4, 8), torch.randint(8, (4,)))
    torch.manual_seed(0)
    model, same_model = Checkpointed(), Checkpointed()
    same_model.load_state_dict(model.state_dict())
    twins.ours, twins.eager = (((m, nn.CrossEntropyLoss(), sgd(m))) for m in (model, same_model))
    captured = twins.accumulated()
    assert captured.micro[0].put_back
    twins.go(tight(captured, random_plan(captured.program, 0)), 3)


# --------------------------------------------------------------------------------------------------- what comes later


@pytest.mark.parametrize("which", ["away", "copied", "leaving"])
def test_a_later_batch_goes_where_the_plan_has_it(which, monkeypatch):
    """On the host over the boundary; back before it has come, its copy valid; on its way out when it comes."""
    twins = OneByOne("small", k=2)
    captured = twins.accumulated()
    program = captured.program
    second = [t for t, tensor in enumerate(program.tensors) if tensor.kind == "input"][2]
    uses = program.accesses[second]
    end = captured.micro[0].end
    assert uses[0] >= end
    plan = {
        "away": Plan((Swap(second, uses[-1], uses[0]),)),
        "copied": Plan((Swap(second, uses[-1], uses[0], prefetch=3), Swap(second, uses[0], uses[-1]))),
        "leaving": Plan((Swap(second, end - 1, uses[0], copy=end - 1),)),
    }[which]
    assert fits(program, list(plan.decisions))
    step = tight(captured, plan)
    copied = []
    move = engines.move
    monkeypatch.setattr(engines, "move", lambda a, b: (copied.append(a.nbytes), move(a, b)))
    for _ in range(3):
        x, y = twins.next_batch()
        with Bytes(step, (x, y)) as seen:
            torch.manual_seed(twins.seed)
            ours = step(x, y)
        assert not copied and seen.peak <= step.order.used + sum(i.charged for i in step.order.items)
        torch.manual_seed(twins.seed)
        assert same(ours, twins.eager_micro(0, x, y))
        twins.seed += 1
        twins.micro(step, 1)
        assert set(copied) == {program.tensors[second].nbytes}
        copied.clear()
        twins.compare()
    assert step.peak_bytes <= step.limit


def test_one_memory_for_two_swapped_micro_batches_is_refused():
    twins = OneByOne("small", k=2)
    captured = twins.accumulated()
    inputs = [t for t, tensor in enumerate(captured.program.tensors) if tensor.kind == "input"]
    gaps = [captured.program.accesses[t] for t in (inputs[0], inputs[2])]
    step = tight(captured, Plan(tuple(Swap(t, u[0], u[-1]) for t, u in zip((inputs[0], inputs[2]), gaps, strict=True))))
    x, y = twins.next_batch()
    with pytest.raises(StepError, match="tensor 2 of the batch, which has no memory of its own: clone it"):
        step((x, y), (x, y))
    torch.manual_seed(twins.seed)
    first = step(x, y)
    with pytest.raises(StepError, match="tensor 2 of the batch, which has no memory of its own: clone it"):
        step(x, y)
    second = x.clone()  # the step is where it was
    torch.manual_seed(twins.seed + 1)
    ours = step(second, y)
    x, y = twins.next_batch()
    for i, loss in enumerate((first, ours)):
        torch.manual_seed(twins.seed + i)
        assert same(loss, twins.eager_micro(i, x, y))
    twins.compare()


# ------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("micro", [0, 2])
def test_a_micro_batch_that_fails_undoes_all_of_the_step(micro):
    twins = OneByOne("small")
    captured = twins.accumulated()
    step = tight(captured, random_plan(captured.program, 1, nothing=0.1))
    twins.go(step)
    before, seed = tuple(map(_copy, state(twins.ours))), twins.seed
    kernels, work = step.program.kernels, step.state.work
    backward = [j for j, item in enumerate(step.order.items)
                if kernels[item.step.kernel].phase == "backward" and work[j].calls]  # fmt: skip
    first = next(i for i, j in enumerate(backward) if j >= step.state.parts[micro].begin)
    break_kernel(step, "backward", once(RuntimeError("bad luck")), (first + 0.5) / len(backward))
    torch.manual_seed(77)
    rng = torch.get_rng_state()
    for _ in range(micro):
        step(*twins.next_batch())
    with pytest.raises(StepError, match=rf"in micro-batch {micro + 1} of 3 failed: RuntimeError: bad luck; the model "
                                        "is as before the step, which begins anew with micro-batch 1"):  # fmt: skip
        step(*twins.next_batch())
    assert torch.equal(rng, torch.get_rng_state())
    equal_states(state(twins.ours), before)
    twins.seed = seed
    twins.go(step, 2)


def _copy(values):
    return {
        k: v.clone() if isinstance(v, Tensor) else _copy(v) if isinstance(v, dict) else v for k, v in values.items()
    }


def test_finish_undoes_a_step_that_is_not_whole():
    twins = OneByOne("small")
    captured = twins.accumulated()
    step = tight(captured, random_plan(captured.program, 1, nothing=0.1))
    twins.go(step)
    before = tuple(map(_copy, state(twins.ours)))
    step(*twins.next_batch())
    step(*twins.next_batch())
    step.finish()
    equal_states(state(twins.ours), before)
    twins.go(step, 2)


def test_what_does_not_fit_leaves_the_step_where_it_was():
    twins = OneByOne("small", k=2)
    captured = twins.accumulated()
    step = tight(captured, random_plan(captured.program, 0))
    twins.micro(step, 0)
    x, y = twins.next_batch()
    with pytest.raises(StepError, match="tensor 2 of the batch has shape"):
        step(x[:1], y)
    with pytest.raises(StepError, match="1 of the step's 2 micro-batches are done; it takes the next one, alone"):
        step((x, y), (x, y))
    twins.ours[0].eval()
    with pytest.raises(StepError, match="is in eval mode"):
        step(x, y)
    twins.ours[0].train()
    twins.micro(step, 1)
    twins.compare()


def test_a_batch_that_the_plan_needs_again_may_not_be_changed():
    """Kernels of the first micro-batch run again in the second; without that its memory is the caller's again."""
    twins = OneByOne("small", k=2)
    captured = twins.accumulated()
    again = next(plan for plan in (random_plan(captured.program, seed, nothing=0.1) for seed in range(9))
                 if tight(captured, plan).state.parts[0].reads_on)  # fmt: skip
    step = tight(captured, again)
    x, y = twins.next_batch()
    step(x, y)
    (x if x.untyped_storage().nbytes() else y).zero_()
    with pytest.raises(StepError, match=r"a batch was changed that the plan needs .* finish\(\) undoes it"):
        step(*twins.next_batch())
    step.finish()
    twins.go(step)

    free = PlannedStep(captured, Plan())
    x, y = twins.next_batch()
    torch.manual_seed(twins.seed)
    ours, memory = free(x, y), StorageWeakRef(x.untyped_storage())
    torch.manual_seed(twins.seed)
    assert same(ours, twins.eager_micro(0, x.clone(), y))
    del x
    assert memory.expired()
    twins.seed += 1
    twins.micro(free, 1)
    twins.compare()


def test_a_capture_of_one_batch_takes_no_part_of_it():
    twins = Twins("small")
    captured = twins.captured()
    assert not captured.micro
    with pytest.raises(StepError, match="the batch is"):
        PlannedStep(captured, Plan())(twins.next_batch()[0])
