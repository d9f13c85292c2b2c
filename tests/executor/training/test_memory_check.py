"""What the first step really takes, beside what the program says."""

import warnings

import pytest
import torch
from torch import nn

from executor import PlannedStep, StepError, capture
from executor.training import memory_check
from executor.training.memory_check import Allocator
from simulator import Plan, Swap
from tests.executor.networks import adamw
from tests.executor.training.programs import GPU, Twins, planned, random_plan, tight


def quiet(step, *batch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return step(*batch)


@pytest.mark.parametrize("network", ["small", "gpt2"])
def test_storages_are_as_large_as_the_program_says(network):
    """Those that are not swapped, too; and the step's work is as if nobody had looked."""
    twins = Twins(network, adamw)
    captured = twins.captured()
    step = tight(captured, random_plan(captured.program, 3))
    looked = [len(item.calls) for item in step.state.work]
    quiet(step, *twins.next_batch())
    assert step.differing == {} and step.allocator is None
    assert [len(item.calls) for item in step.state.work] == [max(0, n - 1) for n in looked]
    assert sum(looked) > len(step.state.work)


def test_what_a_library_keeps_for_the_backward_pass_is_not_in_a_trace():
    twins, step = planned("lstm")
    with pytest.warns(UserWarning, match=r"^\d storages are not as large .* has [\d,]+ and not 0; the limit holds"):
        step(*twins.next_batch())
    assert all(real > said == 0 for real, said in step.differing.values())


def parts():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


BATCH = torch.ones(8, 32), torch.zeros(8).long()


def test_a_parameter_that_is_part_of_other_memory():
    """After the capture; one that the plan swaps is refused."""
    model, loss_fn, optimizer = parts()
    captured = capture(model, loss_fn, optimizer, BATCH, machine=GPU)
    step = PlannedStep(captured, Plan())
    whole = torch.zeros(2048)
    whole[:1024] = model[0].weight.data.flatten()
    model[0].weight.data = whole[:1024].view(32, 32)
    says = (r"^1 storages are not as large as the program says, in all \+4,096 bytes: 0\.weight has 8,192 and not "
            "4,096; the limit holds in the program's bytes only$")  # fmt: skip
    with pytest.warns(UserWarning, match=says):
        step(*BATCH)
    assert step.differing == {"0.weight": (8192, 4096)}
    weight = next(t for t, tensor in enumerate(captured.program.tensors) if tensor.name == "0.weight")
    uses = captured.program.accesses[weight]
    with pytest.raises(StepError, match=r"0\.weight is part of other memory than at the capture"):
        PlannedStep(captured, Plan((Swap(weight, uses[0], uses[1]),)), GPU)


def test_an_operator_that_makes_more_than_its_trace():
    """Seen in the middle of the step, where nothing is swapped; a step that fails is not the first."""
    captured = capture(*parts(), BATCH, machine=GPU)
    step = PlannedStep(captured, Plan())
    i = next(i for i, item in enumerate(step.order.items) if item.step.allocates)
    work = step.state.work
    (out, function, get, options), *rest = work[i].calls
    errors = [RuntimeError("bad luck")]

    def larger(*args, **kwargs):
        if errors:
            raise errors.pop()
        made = function(*args, **kwargs)
        more = torch.empty(made.numel() + 1000)
        return more[: made.numel()].view(made.shape).copy_(made)

    work[i] = work[i]._replace(calls=((out, larger, get, options), *rest))
    with pytest.raises(StepError, match="bad luck"):
        step(*BATCH)
    assert not step.differing
    with pytest.warns(UserWarning, match=r"in all \+4,000 bytes: "):
        step(*BATCH)
    name = captured.program.tensors[step.order.schedule.blocks[step.order.items[i].step.allocates[0]].owner].name
    assert list(step.differing) == [name] and step.differing[name][0] == step.differing[name][1] + 4000


class Fake:
    """An allocator's figures: what others have, what the step has, and what its peak and retries become in it."""

    def __init__(self, step: PlannedStep, others: int, factor: float = 1.0, within: int = 0, retries: int = 0) -> None:
        self.step, self.others, self.factor, self.within, self.retries = step, others, factor, within, retries
        self.asked = 0

    def __call__(self, device: torch.device):
        self.asked += 1
        used, first = self.step.state.blocks.used, self.asked == 1
        now = self.others + (used if first else round(self.factor * used))
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": 10**9 + (0 if first else self.within),
                "num_alloc_retries": 7 + (0 if first else self.retries)}  # fmt: skip


def first_step(monkeypatch, **figures):
    captured = capture(*parts(), BATCH, machine=GPU)
    step = PlannedStep(captured, Plan())
    fake = Fake(step, 1000, **figures)
    monkeypatch.setattr(memory_check, "allocator_stats", fake)
    return step, fake


def test_the_allocator_agrees(monkeypatch):
    step, fake = first_step(monkeypatch)
    quiet(step, *BATCH)
    assert step.allocator == Allocator(1000, step.peak_bytes, step.peak_bytes, 0)
    asked = fake.asked
    quiet(step, *BATCH)
    assert asked > 3 and fake.asked == asked  # the first step only


def test_the_allocator_has_more_in_use_than_the_ledger(monkeypatch):
    step, _ = first_step(monkeypatch, factor=100.0)
    says = (r"^the first step had [\d,]+ bytes in use on the device, the program counts [\d,]+; the limit of [\d,]+ "
            "holds in the program's bytes only$")  # fmt: skip
    with pytest.warns(UserWarning, match=says):
        step(*BATCH)
    assert step.allocator.peak_bytes == 100 * step.peak_bytes == 100 * step.allocator.ledger_bytes


def test_what_kernels_take_meanwhile_shows_where_the_peak_of_the_process_rises(monkeypatch):
    step, _ = first_step(monkeypatch, within=5)
    with pytest.warns(UserWarning, match="had 999,999,005 bytes"):
        step(*BATCH)
    assert step.allocator.peak_bytes == 10**9 + 5 - 1000


def test_retries_are_said(monkeypatch):
    step, _ = first_step(monkeypatch, retries=3)
    says = (r"^in the first step the allocator found no memory 3 times and asked again .* beside 1,000 bytes of others "
            r"the limit of [\d,]+ is too much for this device$")  # fmt: skip
    with pytest.warns(UserWarning, match=says):
        step(*BATCH)
    assert step.allocator.retries == 3
