"""Tests the comparison of the first step's real memory with the program."""

import warnings
from contextlib import contextmanager

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


@contextmanager
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def unplanned() -> tuple[nn.Module, PlannedStep]:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    return model, PlannedStep(capture(model, nn.CrossEntropyLoss(), sgd(model), BATCH, machine=GPU), Plan())


def test_storages_are_as_large_as_the_program_says():
    """Storages match the program, swapped or not, and the observer leaves the step's work list unchanged."""
    twins = Twins("gpt2", adamw)
    captured = twins.captured()
    step = tight(captured, random_plan(captured.program, 3))
    call_counts = [len(item.calls) for item in step.state.work]
    with quiet():
        step(*twins.next_batch())
    assert step.differing == {} and step.allocator is None
    assert [len(item.calls) for item in step.state.work] == [max(0, n - 1) for n in call_counts]


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
    memory = torch.zeros(2048)
    memory[:1024] = model[0].weight.data.flatten()
    model[0].weight.data = memory[:1024].view(32, 32)
    with pytest.warns(UserWarning, match=r"0\.weight has 8,192 and not 4,096"):
        step(*BATCH)
    assert step.differing == {"0.weight": (8192, 4096)}


@pytest.mark.parametrize(
    ("factor", "within", "retries", "warned"),
    [
        (1, 0, 0, None),
        (100, 0, 0, "bytes in use on the device, and .* in the program"),
        (1, 10**9 - 5, 0, "999,998,995 bytes"),  # a peak within kernels, below an earlier one of the process
        (1, 0, 3, "out of memory 3 times .*1,000 bytes of other memory"),
    ],
)
def test_the_allocators_statistics(factor, within, retries, warned, monkeypatch):
    """Only the first step is observed; 1,000 bytes belong to others, and the process had a peak of 10**9 before."""
    (_, step), used_bytes = unplanned(), []
    earlier = [10**9]

    def statistics(device):
        used_bytes.append(step.state.blocks.used)
        now = 1000 + used_bytes[-1] * (factor if len(used_bytes) > 1 else 1)
        peak = max([now, within if len(used_bytes) > 1 else 0, *earlier])
        again = 7 + retries if len(used_bytes) > 1 else 7
        return {"allocated_bytes.all.current": now, "allocated_bytes.all.peak": peak, "num_alloc_retries": again}

    monkeypatch.setattr(memory_check, "allocator_stats", statistics)
    monkeypatch.setattr(memory_check, "reset_peak", lambda device: earlier.clear())
    with pytest.warns(UserWarning, match=warned) if warned else quiet():
        step(*BATCH)
    peak = within - 1000 if within else factor * step.peak_bytes
    assert step.allocator == Allocator(1000, peak, step.peak_bytes, retries)
    count = len(used_bytes)
    step(*BATCH)
    assert 3 < count == len(used_bytes)
