"""A planned step as a graph: on the host equal to eager to the bit; no recording is taken that is no legal graph."""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from executor import Captured, PlannedStep, StepError
from executor.capture.optimizers import capturable
from executor.memory import ALIGNMENT
from executor.memory.graph_pool import need_of
from executor.training.issue_order import stays
from executor.training.recording import Operation, Recording, illegal
from simulator import Plan, Recompute, Swap
from simulator.pool import smartpool
from simulator.pool.intervals import Intervals
from simulator.pool.online import caching
from simulator.schedule import lower
from tests.executor.networks import sgd
from tests.executor.training.programs import Loop, Twins, network, random_plan, tight

MIB = 2**20


def plan_for(captured: Captured, seed: int = 0) -> Plan:
    """Of a random plan what a graph can do: no batch leaves, no random kernel is recomputed."""
    program = captured.program
    batch = {t for t, tensor in enumerate(program.tensors) if tensor.kind == "input"}
    found = [d for d in random_plan(program, seed).decisions if not (isinstance(d, Swap) and d.tensor in batch)]
    words = ("dropout", "bernoulli", "lstm")
    for _ in range(20):
        again = [s for s in lower(program, Plan(tuple(found))).steps if s.again]
        draws = {s.before for s in again if any(word in program.kernels[s.kernel].name for word in words)}
        found = [d for d in found if not (isinstance(d, Recompute) and {d.before, d.at} & draws)]
    assert not draws
    return Plan(tuple(found), program.fingerprint)


def by_tensor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), capturable=True)


def loop_of(name: str, optimizer: Any, device: str = "cpu") -> Loop:
    """In the optimizer's capturable form, which PyTorch has on the CPU only where it compiles; rates change."""
    loop = network(name, optimizer, device)
    micro = loop.micro

    def in_this_form(i: int, *batch: Any) -> Any:
        with capturable(device == "cpu"):
            return micro(i, *batch)

    loop.micro = in_this_form
    return loop


def set_rate(twins: Twins, rate: float) -> None:
    for loop in (twins.ours, twins.eager):
        for group in loop.optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate


def graphed(
    name: str = "small", optimizer: Any = by_tensor, swaps: bool = True, device: str = "cpu"
) -> tuple[Twins, PlannedStep]:
    twins = Twins(loop_of, name, optimizer, device)
    captured = twins.captured()
    return twins, tight(captured, plan_for(captured) if swaps else Plan(), graph=True)


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("small", by_tensor), ("mlp", sgd), *(pytest.param(*row, marks=pytest.mark.nightly) for row in (
        ("gpt2", by_tensor), ("vgg16", sgd)))],
)  # fmt: skip
def test_equal_to_eager_with_other_batches_and_learning_rates(name, optimizer):
    """One capture does for rates that are tensors; numbers are constants of a graph, which is captured again."""
    twins, step = graphed(name, optimizer)
    kinds = {type(d) for d in step.plan.decisions}
    assert Swap in kinds and any(b.persistent for b in step.state.blocks.blocks.values())
    for rate in (0.02, 0.01, 0.03, 0.005, 0.02):
        set_rate(twins, rate)
        twins.train(step)
    assert step.graph.captures == (1 if optimizer is by_tensor else 4)
    load = stays(step.order, step.state.blocks.blocks)[1].rounded(ALIGNMENT).peak_bytes
    assert 0 < load <= step.graph.graph.pool_bytes <= 1.2 * load


def test_a_graph_is_replayed_and_not_issued():
    twins, step = graphed("mlp", swaps=False)
    with pytest.warns(UserWarning, match="the graph's arena .*, the limit is"):
        twins.train(step, 2)
    step.state.work = None  # type: ignore[assignment]
    twins.train(step, 2)
    assert step.graph.captures == 1


def test_what_changes_between_replays_counts():
    """In place it is read; another tensor is found, and the step captured again."""
    twins, step = graphed()
    twins.train(step, 3)
    for loop in (twins.ours, twins.eager):
        for p in loop.model.parameters():
            p.data.mul_(0.5)
            loop.optimizer.state[p]["exp_avg"].add_(0.25)
    twins.train(step, 2)
    assert step.graph.captures == 1
    for loop in (twins.ours, twins.eager):
        loop.model.stem[0].weight.data = loop.model.stem[0].weight.data + 1
        loop.model.stem[1].running_mean = torch.ones_like(loop.model.stem[1].running_mean)
    twins.train(step, 2)
    assert step.graph.captures == 2
    step.finish()
    twins.compare()
    twins.train(step)
    with step:
        twins.train(step, 2, look=False)
    twins.compare()
    assert step.graph.captures == 2


def test_what_is_returned_is_the_callers():
    twins, step = graphed("mlp", swaps=False)
    losses = [step(*twins.next_batch()) for _ in range(4)]
    kept = [loss.clone() for loss in losses]
    step(*twins.next_batch())
    assert all(map(torch.equal, losses, kept)) and len({loss.data_ptr() for loss in losses}) == 4


# ------------------------------------------------------------------------------------------------------------ legality


@cache
def recorded() -> Recording:
    twins, step = graphed()
    for _ in range(2):
        step(*twins.next_batch())
    return step.graph.graph.recording


def indices(kind: str, *streams: str) -> list[int]:
    return [i for i, done in enumerate(recorded().operations) if done.kind == kind and done.stream in streams]


def without(i: int) -> list[Operation]:
    return [done for j, done in enumerate(recorded().operations) if j != i]


def inserted(i: int, operation: Operation) -> list[Operation]:
    return [*recorded().operations[:i], operation, *recorded().operations[i:]]


def not_joined() -> list[Operation]:
    last = indices("wait", "compute")[-1]
    return [
        done for i, done in enumerate(recorded().operations) if i != last and not (i > last and done.kind == "give")
    ]


def given_back_at_once(i: int) -> list[Operation]:
    """The memory that operation ``i`` takes."""
    operations = recorded().operations
    back = next(g for g, done in enumerate(operations)
                if g > i and done.kind == "give" and done.writes == operations[i].writes)  # fmt: skip
    return [*operations[: i + 1], operations[back], *operations[i + 1 : back], *operations[back + 1 :]]


def stray() -> list[Operation]:
    return inserted(len(recorded().operations) // 2, Operation("kernel", "compute", "a kernel", (), ((2, 10),)))


def beyond() -> list[Operation]:
    end = recorded().pool[1]
    return [Operation("take", "compute", "memory that is taken", (), ((end, end + 512),))]


ILLEGAL: dict[str, tuple[Callable[[], list[list[Operation]]], str]] = {  # most of these are found, for this reason
    "nothing": (lambda: [recorded().operations], "^None$"),
    "a wait of compute too few": (lambda: [without(i) for i in indices("wait", "compute")[::4]],
                                  "neither waits for the other|is not joined"),
    "a copy that does not wait": (lambda: [without(i) for i in indices("wait", "d2h", "h2d")[::4]],
                                  "neither waits for the other"),
    "a stream that is not forked": (lambda: [without(indices("wait", "d2h", "h2d")[0])], "has not been forked"),
    "a stream that is not joined": (lambda: [not_joined()], "is not joined"),
    "an event of before": (lambda: [without(indices("record", "h2d")[0])], "which has not been recorded"),
    "a number for the host": (lambda: [inserted(9, Operation("read", "compute", "a loss"))], "the host reads a loss"),
    "memory of others": (lambda: [stray()], "uses memory that is neither taken"),
    "memory beyond the pool": (lambda: [beyond()], "is not the pool's"),
    "memory taken twice": (lambda: [inserted(i, recorded().operations[i]) for i in indices("take", "compute")[:1]],
                           "has not been given back"),
    "memory given back too early": (lambda: [given_back_at_once(i) for i in indices("take", "compute")[::7]],
                                    "uses memory that is neither taken"),
}  # fmt: skip


@pytest.mark.parametrize("what", ILLEGAL)
def test_recordings_that_are_no_legal_graph_are_found(what):
    make, named = ILLEGAL[what]
    changed = make()
    found = [str(illegal(operations, recorded().pool, recorded().there)) for operations in changed]
    assert sum(bool(re.search(named, why)) for why in found) >= (len(found) + 1) // 2, found


def test_packed_addresses_that_overlap_are_found(monkeypatch):
    """By the check, and by numbers: memory that is given back is overwritten."""
    pack = smartpool.pack

    def wrong(intervals, alignment):
        packing = pack(intervals, alignment)
        packing.offsets[: len(packing.offsets) // 2] = 0
        return packing

    twins, step = graphed()
    step(*twins.next_batch())
    monkeypatch.setattr(smartpool, "pack", wrong)
    with pytest.raises(StepError, match=r"is no legal graph: memory is taken that|the graph failed: "):
        step(*twins.next_batch())


# ------------------------------------------------------------------------------------------ the memory of a CUDA graph


def test_the_arena_is_what_the_model_of_the_allocator_asks_for():
    rng = np.random.default_rng(3)
    times = rng.permutation(400)
    size = rng.integers(1, 8 * MIB, 200)
    size[:40] = rng.integers(1, MIB, 40)
    intervals = Intervals(np.minimum(times[:200], times[200:]), np.maximum(times[:200], times[200:]), size)
    need = need_of(intervals)
    assert need.packed == smartpool.pack(intervals, 512).footprint
    assert need.reserved == caching.pack(intervals, need.first).footprint <= caching.pack(intervals).footprint
    assert intervals.peak_bytes <= need.packed and need.first < need.reserved < need.arena
    assert need.arena - need.reserved == 32 * MIB and need.arena % (2 * MIB) == 0
    # Everything large is inside the first segment, and what is small has 2 MiB segments after it.
    packing = caching.pack(intervals, need.first)
    large = size > MIB
    assert (packing.offsets[large] + size[large] <= need.first).all() and (packing.offsets[~large] >= need.first).all()
    assert packing.driver_mallocs == 1 + (need.reserved - need.first) // (2 * MIB)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize(("name", "optimizer"), [
    ("small", sgd), ("vgg16", sgd), ("gpt2", lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, capturable=True)),
])  # fmt: skip
def test_a_graph_on_a_gpu(name, optimizer, monkeypatch):
    """Equal to eager to the bit where cuDNN is deterministic; its memory goes back to the device when it is closed."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    twins, step = graphed(name, optimizer, device="cuda")
    twins.train(step, 5)
    made = step.graph.graph
    assert step.graph.captures == 1 and 0 < made.idle_bytes <= made.pool_bytes and made.packed_bytes <= made.pool_bytes
    before = torch.cuda.mem_get_info()[0]
    step.graph.close()
    assert torch.cuda.mem_get_info()[0] - before >= made.pool_bytes
    twins.train(step, 2)
    assert step.graph.captures == 2
    step.finish()
    twins.compare()
