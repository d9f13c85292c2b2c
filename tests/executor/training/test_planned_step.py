"""A step under a plan equals the eager step to the bit, keeps its limit, and leaves sound tensors between steps."""

import copy
import io
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import agents
from executor import PlannedStep, StepError, capture, capture_step
from executor.memory import engines
from executor.training.memory_source import Place
from simulator import Plan, Recompute, Swap, simulate
from tests.executor.networks import NETWORKS, adamw, images, sgd, small
from tests.executor.training.programs import (
    GPU,
    Bytes,
    Twins,
    equal_states,
    planned,
    random_plan,
    random_reruns,
    required,
    same,
    state,
    tight,
)

# ---------------------------------------------------------------------------------------------- the same to the bit

PLANNERS = [("vgg16", "autoswap_swdoa", sgd), ("resnet", "lp_round", adamw), ("unet", "superneurons", sgd),
            ("gpt2", "lp_round", sgd), ("lstm", "capuchin", adamw)]  # fmt: skip


@pytest.mark.parametrize(("network", "planner", "optimizer"), PLANNERS)
def test_equal_to_eager_under_a_planners_plan(network, planner, optimizer):
    twins = Twins(network, optimizer)
    captured = twins.captured()
    program = captured.program
    options = {"min_bytes": 256} | ({"calls": 60} if planner == "lp_round" else {})
    for part in (0.6, 0.7, 0.8, 0.9):
        try:
            plan = agents.make(planner, **options).plan(program, GPU, int(part * program.peak_bytes))
            break
        except agents.Infeasible:
            continue
    assert plan.decisions
    step = PlannedStep(captured, plan, GPU)
    twins.train(step, 3)
    assert step.peak_bytes <= plan.limit < program.peak_bytes


@pytest.mark.parametrize(("network", "seed"), [*zip(NETWORKS, (0, 1, 0, 1, 0), strict=True), ("resnet", 0)])
def test_equal_to_eager_under_random_plans(network, seed):
    """Every way to leave and to come back, at the smallest limit at which the plan is feasible."""
    twins = Twins(network, [sgd, adamw][seed])
    captured = twins.captured()
    plan = random_plan(captured.program, seed)
    kinds = {(type(d), d.after >= d.before, getattr(d, "keep", None)) for d in plan.decisions}
    assert kinds >= {(Swap, False, None), (Swap, True, None), (Recompute, False, True), (Recompute, False, False)}
    assert any(isinstance(d, Swap) and d.copy not in (None, d.after) for d in plan.decisions)
    assert any(isinstance(d, Recompute) and d.at not in (None, d.before) for d in plan.decisions)
    step = tight(captured, plan)
    assert any(item.step.again for item in step.order.items) and step.order.start
    twins.train(step, 3)
    assert step.peak_bytes == step.order.peak <= step.limit


@pytest.mark.parametrize("network", NETWORKS)
def test_equal_to_eager_under_reruns(network):
    """Kernels run again one by one, some several times: dropout, batch norm and updates in place among them."""
    twins = Twins(network, adamw if network == "lstm" else sgd)
    captured = twins.captured()
    program = captured.program
    plan = random_reruns(program, 0)
    step = tight(captured, plan)
    again = [item.step.kernel for item in step.order.items if item.step.again]
    assert len(again) > len(set(again)) and any(isinstance(d, Swap) for d in plan.decisions)
    assert any(step.calls.random(k) for k in again)
    assert any(set(program.kernels[k].inputs) & set(program.kernels[k].outputs) for k in again)
    norms = any("batch_norm" in program.kernels[k].name for k in again)
    assert norms is (network in ("resnet", "unet"))
    twins.train(step, 3)
    with step:
        twins.train_within(step, 2)
    twins.compare()
    assert step.peak_bytes == step.order.peak <= step.limit


def test_a_place_on_the_host_is_for_several_tensors():
    """Pinned memory is what the host holds at one time, not the sum of what the plan swaps."""
    twins = Twins("vgg16", sgd)
    captured = twins.captured()
    program = captured.program
    plan = Plan(tuple(Swap(*gap) for gap in program.gaps()))
    step = tight(captured, plan)
    swapped = sum(program.tensors[d.tensor].nbytes for d in {d.tensor: d for d in plan.decisions}.values())
    assert step.pinned_bytes <= 1.1 * max(step.order.schedule.on_host) < 0.95 * swapped
    twins.train(step, 3)


class Late(engines.HostEngines):
    """Copies when it is waited for them: the last moment at which they may be done."""

    def __init__(self) -> None:
        self.due: tuple[deque[Any], deque[Any]] = deque(), deque()

    def copy_out(self, host: Tensor, device: Tensor, event: Any) -> None:
        event.start((host, device))
        self.due[0].append(event)

    def copy_in(self, device: Tensor, host: Tensor, event: Any) -> None:
        event.start((device, host))
        self.due[1].append(event)

    def join(self, event: Any) -> None:
        for queue in self.due:
            while event.under_way() and event in queue:  # in order
                queue.popleft().run()

    def wait(self, event: Any) -> None:
        self.join(event)
        super().wait(event)

    def synchronize(self) -> None:
        for queue in self.due:
            while queue:
                queue.popleft().run()


@pytest.mark.parametrize(("network", "make"), [("resnet", random_reruns), ("gpt2", random_plan)])
def test_it_does_not_matter_when_copies_are_done(network, make, monkeypatch):
    """Nothing is read too early and nothing is overwritten too early, however late the engines are."""
    monkeypatch.setattr(engines, "HostEngines", Late)
    twins = Twins(network, sgd)
    captured = twins.captured()
    step = tight(captured, make(captured.program, 4))
    assert isinstance(step.state.blocks.engines, Late)
    twins.train(step, 2)
    with step:
        twins.train_within(step, 3)
    twins.compare()


def test_without_a_plan_and_with_recomputation_the_peak_is_the_simulators():
    twins = Twins("resnet")
    captured = twins.captured()
    program = captured.program
    step = PlannedStep(captured, Plan())
    twins.train(step, 2)
    assert step.peak_bytes == program.peak_bytes
    plan = Plan(tuple(d for d in random_plan(program, 3).decisions if isinstance(d, Recompute)))
    step = tight(captured, plan)
    twins.train(step, 2)
    assert step.peak_bytes == simulate(program, plan, GPU, step.limit).peak_bytes


@pytest.mark.parametrize("network", ["unet", "gpt2"])
def test_real_bytes_are_those_of_the_ledger(network):
    """The storages themselves, counted from outside: never above the limit, and the ledger's peak is theirs."""
    twins = Twins(network, sgd)
    captured = twins.captured()
    step = tight(captured, random_plan(captured.program, 7))
    twins.train(step)
    batch = twins.next_batch()
    with Bytes(step, batch) as seen:
        loss = step(*batch)
        assert seen.bytes() == step.state.blocks.used + loss.nbytes
    assert seen.peak == step.peak_bytes == step.limit


def test_a_learning_rate_that_is_a_tensor_may_change():
    twins = Twins("lstm", lambda model: torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1), momentum=0.9))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(parts[2], 0.5) for parts in (twins.ours, twins.eager)]
    step = PlannedStep(twins.captured(), Plan())
    for _ in range(3):
        twins.train(step)
        for schedule in schedules:
            schedule.step()
    assert twins.ours[2].param_groups[0]["lr"].item() == pytest.approx(0.0125)


def test_any_step_and_what_it_returns():
    """Gradients too: a step that returns them."""
    torch.manual_seed(0)
    model = small()
    x, y = images(16)()

    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        loss = nn.functional.cross_entropy(model(x), y)
        return [loss, *torch.autograd.grad(loss, list(model.parameters()))]

    captured = capture_step(run, x, y, machine=GPU)
    step = tight(captured, random_plan(captured.program, 2))
    buffers = copy.deepcopy(model.state_dict())
    for seed in range(3):
        torch.manual_seed(seed)
        ours = step(x, y)
        after = copy.deepcopy(model.state_dict())
        model.load_state_dict(buffers)
        torch.manual_seed(seed)
        assert all(same(a, b.detach()) for a, b in zip(ours, run(x, y), strict=True))
        buffers = copy.deepcopy(model.state_dict())
        assert all(same(a, b) for a, b in zip(after.values(), buffers.values(), strict=True))


# ------------------------------------------------------------------------------------------------------ between steps


def test_checkpoints_between_steps_are_those_of_eager_training():
    twins, step = planned(optimizer=adamw)
    twins.train(step, 2)
    away = [b for b in step.state.blocks.blocks.values() if b.persistent and b.place is Place.HOST]
    assert len(away) > 5 and all(b.storage.nbytes() == 0 for b in away)  # they are away, and yet can be read
    file = io.BytesIO()
    torch.save(state(twins.ours), file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    theirs = io.BytesIO()
    torch.save(state(twins.eager), theirs)
    assert file.tell() == pytest.approx(theirs.tell(), rel=0.01)
    equal_states(saved, copy.deepcopy(state(twins.ours)))
    seed = twins.seed
    twins.train(step, 2)
    for parts in (twins.ours, twins.eager):  # back to the checkpoint
        parts[0].load_state_dict(saved[0])
        parts[2].load_state_dict(copy.deepcopy(saved[1]))  # it takes the tensors themselves
    twins.seed = seed
    twins.train(step, 2)


def test_eager_steps_in_between_and_afterwards():
    twins, step = planned()
    for _ in range(2):
        twins.train(step, 2)
        ours, twins.eager = twins.eager, twins.ours  # what was planned goes on eagerly
        twins.eager_step()
        twins.ours, twins.eager = twins.eager, ours
        twins.eager_step()
        twins.seed += 1
        twins.compare()
    twins.train(step)
    step.finish()
    assert all(b.place is Place.DEVICE for b in step.state.blocks.blocks.values())
    assert step.state.blocks.used == sum(t.nbytes for t in step.program.tensors if t.persistent)
    twins.compare()


def test_changes_between_steps_count():
    """In place, through ``data``, by another tensor; on tensors that are away and on others."""
    twins, step = planned(optimizer=adamw)
    twins.train(step)
    for model, _, optimizer in (twins.ours, twins.eager):
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
            optimizer.state[parameter]["exp_avg"].add_(0.25)
            optimizer.state[parameter]["exp_avg_sq"] = optimizer.state[parameter]["exp_avg_sq"] * 2
        model.stem[1].running_mean = torch.ones_like(model.stem[1].running_mean)
        model.head[3].weight.data = model.head[3].weight.data + 1
    twins.train(step, 2)


def test_tensors_that_numpy_has_seen():
    """PyTorch cannot empty their memory any more; they get other memory, and numbers stay right."""
    twins, step = planned()
    twins.train(step)
    arrays = [p.detach().numpy() for p in twins.ours[0].parameters()]
    moved = [
        b for b in step.state.bindings if b.block and b.block.place is Place.DEVICE and isinstance(b.user, nn.Parameter)
    ]
    assert moved and not any(b.own.untyped_storage().resizable() for b in moved)
    twins.train(step, 2)
    assert not any(np.shares_memory(a, b.own.numpy()) for a in arrays for b in moved)


def test_without_a_barrier_between_steps():
    """Swap-outs and swap-ins that are under way at the boundary go on."""
    twins = Twins("small", adamw)
    captured = twins.captured()
    program = captured.program
    moved = [i for i, t in enumerate(program.tensors) if t.kind in ("parameter", "optimizer_state")]
    wrapping = [Swap(*gap) for gap in program.gaps() if gap.after > gap.before and gap.tensor in moved]
    plan = Plan(tuple(wrapping))
    step = PlannedStep(captured, plan, GPU, int(1.02 * required(program, plan)))
    assert set(step.order.start.values()) == {"host", "out", "in"}
    with step:
        twins.train_within(step, 4)
        under_way = {b.place for b in step.state.blocks.blocks.values()}
    assert under_way & {Place.OUT, Place.IN}
    twins.compare()
    twins.train(step, 2)
    assert step.peak_bytes == step.order.peak <= step.limit


def test_the_same_tensor_as_input_and_target():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8))
    x = torch.randn(3, 8)
    step = PlannedStep(capture(model, nn.MSELoss(), sgd(model), (x, x)), Plan())
    other = torch.randn(3, 8)
    assert step(other, other).isfinite()
    with pytest.raises(StepError, match="the same as another"):
        step(other, x)


# -------------------------------------------------------------------------------------------------------------- a GPU


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("network", NETWORKS)
def test_equal_to_eager_on_a_gpu(network, monkeypatch):
    """To the bit where cuDNN is deterministic; the LSTM, whose dropout cuDNN would draw on the host, without cuDNN."""
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
