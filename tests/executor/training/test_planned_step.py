"""Tests that a planned step keeps its limit, leaves valid tensors between steps, and tolerates slow copies."""

import copy
import io
import sys

import numpy as np
import pytest
import torch
from torch import nn

from executor import PlannedStep, StepError
from executor.training.memory_source import Place
from simulator import Plan, Swap
from simulator.schedule import lower
from tests.executor.networks import NETWORKS, adamw, sgd
from tests.executor.training import programs
from tests.executor.training.programs import GPU, Bytes, Twins, planned, random_plan, tight

# ----------------------------------------------------------------------------------------------------- plans and limits


def test_a_place_on_the_host_is_for_several_tensors():
    """Pinned memory is the peak on the host, not the sum over all swapped tensors."""
    twins = Twins("vgg16", sgd)
    captured = twins.captured()
    program = captured.program
    plan = Plan(tuple(Swap(*gap) for gap in program.gaps()))
    step = tight(captured, plan)
    swapped = sum(program.tensors[t].nbytes for t in {d.tensor for d in plan.decisions})
    assert step.pinned_bytes <= 1.1 * max(step.order.schedule.on_host) < 0.95 * swapped
    twins.train(step)


@pytest.mark.parametrize("network", ["small", *(pytest.param(n, marks=pytest.mark.nightly) for n in ("gpt2", "unet"))])
def test_real_bytes_are_those_of_the_ledger(network):
    """Live storages, counted independently, never exceed the limit, and their peak equals the ledger's."""
    twins = Twins(network, sgd)
    captured = twins.captured()
    step = tight(captured, random_plan(captured.program, 7))
    twins.train(step)
    batch = twins.next_batch()
    with Bytes(step, batch) as seen:
        loss = step(*batch)
        assert seen.bytes() == step.state.blocks.used + loss.nbytes
    assert seen.peak == step.peak_bytes == step.limit


@pytest.mark.parametrize("graph", [False, True])
def test_a_program_is_lowered_once_on_its_way_to_a_step(graph, request):
    """A step that may be a graph is simulated at several limits with the same schedule."""
    if graph:
        request.getfixturevalue("double")
    captured = Twins("mlp").captured()
    plan = Plan(tuple(Swap(*gap) for gap in captured.program.gaps()))
    lowered = 0

    def count(frame, event, _):
        nonlocal lowered
        lowered += event == "call" and frame.f_code is lower.__code__

    sys.setprofile(count)
    try:
        step = PlannedStep(captured, plan, GPU, captured.program.peak_bytes, graph=graph)
    finally:
        sys.setprofile(None)
    assert lowered == 1 and (step.graph is not None) is graph


# ------------------------------------------------------------------------------------------------------ between steps


def test_checkpoints_between_steps_are_those_of_eager_training():
    twins, step = planned(make_optimizer=adamw)
    twins.train(step, 2)
    away = [b for b in step.state.blocks.blocks.values() if b.persistent and b.place is Place.HOST]
    assert len(away) > 5 and all(b.storage.nbytes() == 0 for b in away)  # swapped out, but readable as host copies
    files = [io.BytesIO(), io.BytesIO()]
    for loop, file in zip((twins.ours, twins.eager), files, strict=True):
        torch.save(loop.state(), file)
    assert files[0].tell() == pytest.approx(files[1].tell(), rel=0.01)
    files[0].seek(0)
    saved = torch.load(files[0], weights_only=True)
    programs.equal_states(saved, copy.deepcopy(twins.ours.state()))
    seed = twins.seed
    twins.train(step, 2)
    for loop in (twins.ours, twins.eager):  # restores the checkpoint
        loop.model.load_state_dict(saved[0][0])
        loop.optimizer.load_state_dict(copy.deepcopy(saved[1][0]))  # load_state_dict keeps the tensors
    twins.seed = seed
    twins.train(step, 2)


def test_eager_steps_in_between_and_afterwards():
    twins, step = planned()
    for _ in range(2):
        twins.train(step, 2)
        twins.go_on_eagerly()
    twins.train(step)
    step.finish()
    assert all(b.place is Place.DEVICE for b in step.state.blocks.blocks.values())
    assert step.state.blocks.used == sum(t.nbytes for t in step.program.tensors if t.persistent)
    twins.compare()


def test_tensors_that_numpy_has_seen():
    """PyTorch cannot empty memory exported to NumPy, so the tensors get new memory with equal content."""
    twins, step = planned()
    twins.train(step)
    arrays = [p.detach().numpy() for p in twins.ours.model.parameters()]
    moved = [
        b for b in step.state.bindings if b.block and b.block.place is Place.DEVICE and isinstance(b.user, nn.Parameter)
    ]
    assert moved and not any(b.device_tensor.untyped_storage().resizable() for b in moved)
    twins.train(step, 2)
    assert not any(np.shares_memory(a, b.device_tensor.numpy()) for a in arrays for b in moved)


def swapped_between_steps():
    twins = Twins("mlp")
    step = programs.over_the_boundary(twins.captured())
    twins.train(step)
    name = next(b.name for b in step.state.bindings if b.name.endswith("bias") and b.block and b.block.is_shown)
    layers = [loop.model.get_submodule(name.rpartition(".")[0]) for loop in (twins.ours, twins.eager)]
    return twins, step, layers


def test_data_that_is_assigned_while_a_tensor_is_on_the_host():
    twins, step, layers = swapped_between_steps()
    for layer in layers:
        layer.bias.data = layer.bias.data / 2
    step.finish()
    twins.compare()
    twins.train(step, 2)


def test_a_refused_step_leaves_tensors_that_are_on_the_host_to_the_user():
    twins, step, layers = swapped_between_steps()
    biases = [layer.bias for layer in layers]
    layers[0].bias = nn.Parameter(biases[0].detach().clone())
    with pytest.raises(StepError, match=r"bias was replaced by another parameter"):
        step(*twins.next_batch())
    step.finish()
    assert torch.equal(*biases)
    layers[0].bias = biases[0]
    twins.train(step, 2)


def test_without_a_barrier_between_steps():
    """Copies in flight at the boundary continue."""
    twins = Twins("small", adamw)
    step = programs.over_the_boundary(twins.captured())
    with step:
        twins.train(step, 4, compare=False)
        under_way = {b.place for b in step.state.blocks.blocks.values()}
    assert under_way & {Place.OUT, Place.IN}
    twins.compare()
    twins.train(step, 2)
    assert step.peak_bytes == step.order.peak <= step.limit


# -------------------------------------------------------------------------------------------------------------- a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("network", NETWORKS)
def test_equal_to_eager_on_a_gpu(network, monkeypatch):
    """The step is bit-identical with deterministic cuDNN. The LSTM disables cuDNN, which draws dropout on the host."""
    monkeypatch.setattr(torch.backends.cudnn, "enabled", network != "lstm")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    twins = Twins(network, adamw, "cuda")
    captured = twins.captured()
    step = tight(captured, random_plan(captured.program, 0))
    twins.train(step, 5)
    step.finish()
    with step:
        for _ in range(5):
            twins.train(step)
    assert step.peak_bytes <= step.limit
