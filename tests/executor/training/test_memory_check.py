"""Tests the comparison of the first step's real memory with the program."""

import warnings

import pytest
import torch
from torch import nn

from executor import PlannedStep, StepError, capture
from executor.training import memory_check
from executor.training.memory_check import Allocator
from simulator import Plan
from tests.executor.networks import adamw, sgd
from tests.executor.training.programs import GPU, Twins, planned, random_plan, tight
from tests.executor.training.test_faults import break_kernel, once

BATCH = torch.ones(8, 32), torch.zeros(8).long()


def quiet(step, *batch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return step(*batch)


def unplanned() -> tuple[nn.Module, PlannedStep]:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    return model, PlannedStep(capture(model, nn.CrossEntropyLoss(), sgd(model), BATCH, machine=GPU), Plan())


@pytest.mark.parametrize("network", ["small", "gpt2"])
def test_storages_are_as_large_as_the_program_says(network):
    """Storages match the program, swapped or not, and the observer leaves the step's work list unchanged."""
    twins = Twins(network, adamw)
    captured = twins.captured()
    step = tight(captured, random_plan(captured.program, 3))
    looked = [len(item.calls) for item in step.state.work]
    quiet(step, *twins.next_batch())
    assert step.differing == {} and step.allocator is None
    assert [len(item.calls) for item in step.state.work] == [max(0, n - 1) for n in looked]
    assert sum(looked) > len(step.state.work)


def test_library_buffers_for_the_backward_pass_are_not_traced():
    """Storages that are not swapped are compared, too; a failed step does not count as the first."""
    twins, step = planned("lstm")
    break_kernel(step, "backward", once(RuntimeError("bad luck")))
    with pytest.raises(StepError, match="bad luck"):
        step(*twins.next_batch())
    assert not step.differing
    with pytest.warns(UserWarning, match=r"^\d storages are not as large"):
        step(*twins.next_batch())
    assert step.differing and all(real > predicted == 0 for real, predicted in step.differing.values())


def test_a_parameter_that_is_part_of_other_memory():
    """Moves a parameter into a larger storage after the capture."""
    model, step = unplanned()
    whole = torch.zeros(2048)
    whole[:1024] = model[0].weight.data.flatten()
    model[0].weight.data = whole[:1024].view(32, 32)
    with pytest.warns(UserWarning, match=r"0\.weight has 8,192 and not 4,096"):
        step(*BATCH)
    assert step.differing == {"0.weight": (8192, 4096)}


class Fake:
    """Fake allocator statistics: memory of others and of the step, peak and retries."""

    def __init__(self, step: PlannedStep, factor: float = 1.0, within: int = 0, retries: int = 0) -> None:
        self.step, self.factor, self.within, self.retries, self.asked = step, factor, within, retries, 0

    def __call__(self, device: torch.device):
        self.asked += 1
        used, first = self.step.state.blocks.used, self.asked == 1
        now = 1000 + (used if first else round(self.factor * used))
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": 10**9 + (0 if first else self.within),
                "num_alloc_retries": 7 + (0 if first else self.retries)}  # fmt: skip


def first_step(monkeypatch, **figures):
    _, step = unplanned()
    fake = Fake(step, **figures)
    monkeypatch.setattr(memory_check, "allocator_stats", fake)
    return step, fake


def test_the_allocator_agrees(monkeypatch):
    step, fake = first_step(monkeypatch)
    quiet(step, *BATCH)
    assert step.allocator == Allocator(1000, step.peak_bytes, step.peak_bytes, 0)
    asked = fake.asked
    quiet(step, *BATCH)
    assert asked > 3 and fake.asked == asked  # only the first step is observed


@pytest.mark.parametrize(
    ("figures", "warned", "peak"),
    [({"factor": 100.0}, "bytes in use on the device, and .* in the program", lambda step: 100 * step.peak_bytes),
     ({"within": 5}, "999,999,005 bytes", lambda step: 10**9 + 5 - 1000),  # a peak within kernels
     ({"retries": 3}, "out of memory 3 times .*1,000 bytes of other memory", lambda step: step.peak_bytes)],
)  # fmt: skip
def test_the_allocator_has_more_in_use_than_the_ledger(figures, warned, peak, monkeypatch):
    step, _ = first_step(monkeypatch, **figures)
    with pytest.warns(UserWarning, match=warned):
        step(*BATCH)
    found = step.allocator
    assert (found.peak_bytes, found.ledger_bytes) == (peak(step), step.peak_bytes)
    assert found.retries == figures.get("retries", 0)
