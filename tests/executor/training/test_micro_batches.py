"""Tests a step called once per micro-batch: swapped tensors in between, faults and mismatches.

test_equal_to_eager.py compares it with eager accumulation.
"""

import copy

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from executor import PlannedStep, StepError
from executor.memory import engines
from simulator import Plan, Recompute, Swap
from tests.executor.networks import adamw
from tests.executor.training.programs import Bytes, Twins, equal_states, random_plan, tight
from tests.executor.training.test_faults import break_kernel, once


def accumulated(k: int = 2, seed: int = 1, name: str = "small", **options: object) -> tuple[Twins, PlannedStep]:
    twins = Twins(name, adamw, accumulate=k, clip_norm=0.05, **options)
    captured = twins.captured()
    plan = random_plan(captured.program, seed, empty_share=0.1)
    moved = {captured.program.tensors[d.tensor].kind for d in plan.decisions if isinstance(d, Swap)}
    assert {"gradient", "input", "optimizer_state"} <= moved
    return twins, tight(captured, plan)


def micro(twins: Twins, step: PlannedStep, i: int) -> None:
    """Runs the next micro-batch in both twins."""
    batch = twins.next_batch()
    twins.micro(step, i, batch, copy.deepcopy(batch))


def test_the_learning_rate_that_counts_is_the_one_at_the_update():
    twins, step = accumulated()
    for rate in (0.02, 0.005):
        micro(twins, step, 0)
        for loop in (twins.ours, twins.eager):
            loop.optimizer.param_groups[0]["lr"] = rate
        micro(twins, step, 1)
        twins.compare()


def test_a_loss_that_the_plan_frees_at_once():
    """Without a division, no kernel reads the loss until the losses are summed."""
    twins = Twins("mlp", adamw, accumulate=2, average=False)
    captured = twins.captured()
    loss = captured.values[captured.micro[1].loss]
    gap = next(gap for gap in captured.program.gaps() if gap.tensor == loss)
    twins.train(tight(captured, Plan((Recompute(loss, gap.after, gap.before),))), 2)


@pytest.mark.parametrize("where", ["away", "copied", "leaving"])
def test_a_later_batch_goes_where_the_plan_has_it(where, monkeypatch):
    """The later batch is on the host, swapped in with a valid host copy, or being swapped out when it arrives."""
    twins = Twins("small", adamw, accumulate=2, clip_norm=0.05)
    captured = twins.captured()
    program = captured.program
    end = captured.micro[0].end
    second = [t for t, tensor in enumerate(program.tensors) if tensor.kind == "input"][2]
    first, *_, last = program.accesses[second]
    step = tight(
        captured,
        {
            "away": Plan((Swap(second, last, first),)),
            "copied": Plan((Swap(second, last, first, prefetch=3), Swap(second, first, last))),
            "leaving": Plan((Swap(second, end - 1, first, copy=end - 1),)),
        }[where],
    )
    copied = []
    move = engines.move
    monkeypatch.setattr(engines, "move", lambda a, b: (copied.append(a.nbytes), move(a, b)))
    for _ in range(3):
        batch = twins.next_batch()
        with Bytes(step, batch) as seen:
            torch.manual_seed(twins.seed)
            step(*batch)
        assert not copied and seen.peak <= step.order.used + sum(i.charged for i in step.order.items)
        torch.manual_seed(twins.seed)
        twins.eager.micro(0, *batch)
        twins.seed += 1
        micro(twins, step, 1)
        assert set(copied) == {program.tensors[second].nbytes}
        copied.clear()
        twins.compare()
    assert step.peak_bytes <= step.limit


def test_one_memory_for_two_swapped_micro_batches_is_refused():
    twins = Twins("small", adamw, accumulate=2)
    captured = twins.captured()
    inputs = [t for t, tensor in enumerate(captured.program.tensors) if tensor.kind == "input"][::2]
    uses = [captured.program.accesses[t] for t in inputs]
    step = tight(captured, Plan(tuple(Swap(t, u[0], u[-1]) for t, u in zip(inputs, uses, strict=True))))
    x, y = twins.next_batch()
    with pytest.raises(StepError, match=r"tensor 2 of the batch, .*clone it"):
        step((x, y), (x, y))
    twins.micro(step, 0, (x, y), copy.deepcopy((x, y)))
    with pytest.raises(StepError, match=r"tensor 2 of the batch, .*clone it"):
        step(x, y)
    other = x.clone()
    twins.micro(step, 1, (other, y), copy.deepcopy((other, y)))
    twins.compare()


# ------------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize("which", [pytest.param(0, marks=pytest.mark.nightly), 2])
def test_a_micro_batch_that_fails_undoes_all_of_the_step(which):
    twins, step = accumulated(3)
    twins.train(step)
    before = copy.deepcopy(twins.ours.state())
    kernels = step.program.kernels
    work = step.state.work
    backward = [
        j for j, item in enumerate(step.order.items) if kernels[item.step.kernel].phase == "backward" and work[j].calls
    ]
    first = sum(j < step.state.parts[which].begin for j in backward)
    break_kernel(step, "backward", once(RuntimeError("bad luck")), (first + 0.5) / len(backward))
    torch.manual_seed(77)
    rng = torch.get_rng_state()
    for _ in range(which):
        step(*twins.next_batch())
    with pytest.raises(
        StepError,
        match=rf"micro-batch {which + 1} of 3 failed: RuntimeError: bad luck; the model "
        "is as before the step, .*micro-batch 1",
    ):
        step(*twins.next_batch())
    assert torch.equal(rng, torch.get_rng_state())
    equal_states(twins.ours.state(), before)
    twins.train(step, 2)


def test_a_refused_micro_batch_leaves_the_step_unchanged():
    twins, step = accumulated(seed=0)
    micro(twins, step, 0)
    x, y = twins.next_batch()
    with pytest.raises(StepError, match="tensor 2 of the batch has shape"):
        step(x[:1], y)
    with pytest.raises(StepError, match="1 of the step's 2 micro-batches"):
        step((x, y), (x, y))
    twins.ours.model.eval()
    with pytest.raises(StepError, match="eval mode"):
        step(x, y)
    twins.ours.model.train()
    micro(twins, step, 1)
    twins.compare()


def test_a_batch_that_the_plan_needs_again_may_not_be_changed():
    """The second micro-batch recomputes kernels of the first; otherwise the caller could reuse the first's memory."""
    twins, step = next(pair for seed in range(9) if (pair := accumulated(seed=seed))[1].state.parts[0].read_later)
    x, y = twins.next_batch()
    step(x, y)
    (x if x.untyped_storage().nbytes() else y).zero_()
    with pytest.raises(StepError, match=r"a batch was changed .* finish\(\)"):
        step(*twins.next_batch())
    step.finish()
    twins.train(step)
    free = PlannedStep(step.captured, Plan())
    x, y = twins.next_batch()
    twins.micro(free, 0, (x, y), (x.clone(), y.clone()))
    memory = StorageWeakRef(x.untyped_storage())
    del x
    assert memory.expired()
    micro(twins, free, 1)
    twins.compare()
