"""Tests that unsupported captures, plans and steps raise the right exception, naming the cause."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import distribute_tensor
from torch.optim.swa_utils import AveragedModel
from transformers.optimization import Adafactor

from executor import CaptureError, PlannedStep, PlannedSteps, StepError, capture, capture_step, fit
from simulator import Plan, Recompute
from simulator.plan import PlanError
from simulator.schedule import OutOfMemory
from tests.executor.networks import adamw, sgd
from tests.executor.training import programs
from tests.executor.training.programs import GPU, Loop, Twins, fits, moving, network, plan_of, planned, tight
from tests.executor.training.test_equal_to_eager import net, pairs, trained

F = nn.functional
HERE = r"\(test_refusals\.py:\d+\)"


# --------------------------------------------------------------------------------------------- captures, plans, graphs


def step_of(
    model: nn.Module,
    optimizer: Any = None,
    batch: Any = None,
    loss_fn: Any = F.cross_entropy,
    plan: Plan = Plan(),  # noqa: B008
    limit: int | None = None,
    **options: Any,
) -> PlannedStep:
    captured = capture(model, loss_fn, optimizer or sgd(model), batch or pairs(), machine=GPU, **options)
    return PlannedStep(captured, plan, GPU, limit)


def own_step(besides: Callable[[Any, Any], Callable[[], Any]], planner: Any = lambda program: Plan()) -> PlannedStep:
    """Returns a custom step with an additional action and result."""
    model = net(8, 32)
    optimizer = sgd(model)
    inner = trained(model, [optimizer]).capture_args[0]
    does = besides(model, optimizer)

    def step(x: Tensor, y: Tensor) -> Any:
        return inner(x, y), does()

    captured = capture_step(step, *pairs(), machine=GPU)
    assert optimizer.param_groups[0]["lr"] == 0.05  # a schedule's step is undone
    return tight(captured, planner(captured.program))


def average(model: nn.Module, _: Any) -> Callable[[], Any]:
    mean = AveragedModel(model)
    return lambda: mean.update_parameters(model)


def graph(plan: Callable[[Any], Plan] = lambda program: Plan(), optimizer: Any = sgd, **options: Any) -> PlannedStep:
    captured = Twins(lambda: network("small", optimizer, **options)).captured()
    return tight(captured, plan(captured.program), graph=True)


class Acts(nn.Linear):
    """A layer that applies ``act`` to itself and its output."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(8, 5)
        self.act = act
        self._scales = frozenset({torch.full((5,), 2.0)})

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self, super().forward(x))


def doubled_if_positive(out: Tensor) -> Tensor:
    return out * 2 if bool(out.sum() > 0) else out


def scripting(function: Callable[[Tensor], Tensor]) -> nn.Module:
    scripted = torch.jit.script(function)
    return Acts(lambda _, out: scripted(out))


class Shared(nn.Linear):
    """A layer that reads a tensor of its class."""

    scale = torch.full((), 2.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Scaled(torch.optim.SGD):
    """An optimizer that reads a tensor of its class."""

    rate = torch.full((), 0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * self.rate)


def branch(_: Any, out: Tensor) -> Tensor:
    return out * 2 if out.sum() > 0 else out


class Counting(torch.optim.SGD):
    """Optimizer that counts with a Python number in its state, its options or an attribute."""

    def __init__(self, model: nn.Module, where: str) -> None:
        super().__init__(model.parameters(), 0.1)
        self.where = where

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        table: dict[str, Any] = {
            "state": self.state[self.param_groups[0]["params"][0]],
            "option": self.param_groups[0],
            "attribute": vars(self),
        }[self.where]
        table["steps"] = table.get("steps", 0) + 1
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=0.1 / table["steps"])


def counting(where: str) -> PlannedStep:
    model = net(8)
    return step_of(model, Counting(model, where))


def in_place(model: nn.Sequential) -> nn.Sequential:
    model[0].compile()
    return model


def hooked(where: str) -> PlannedStep:
    """Returns a step with a hook that runs no operator."""
    model = net(8)
    optimizer = sgd(model)

    seen: list[int] = []

    def count(*_: object) -> None:
        seen.append(1)

    (optimizer.register_step_post_hook if where == "optimizer" else model[0].weight.register_hook)(count)
    try:
        return step_of(model, optimizer)
    finally:
        assert not seen  # the capture undoes the hook's effects


def recomputing_dropout(program: Any) -> Plan:
    for gap in program.gaps():
        plan = Plan((Recompute(gap.tensor, gap.after, gap.before),))
        drawn = any("bernoulli" in k.name and gap.tensor in k.outputs for k in program.kernels)
        if drawn and fits(program, list(plan.decisions), check_schedule=True):
            return plan
    raise AssertionError("no dropout")


def metrics(out: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return F.cross_entropy(out, y), {"logits": out}


def steps_of_net(*batch: Any, **options: Any) -> Any:
    model = net(8)
    return PlannedSteps(model, F.cross_entropy, sgd(model), GPU, 1.0, moving, **options)(*batch)


SCALER = torch.amp.GradScaler("cpu")
REFUSED: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    # operations of a step
    "sparse gradients": (
        CaptureError,
        "0 is sparse",
        lambda: step_of(
            nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Flatten(), nn.Linear(32, 5)),
            batch=(torch.randint(20, (6, 4)), torch.randint(5, (6,))),
        ),
    ),
    "a tensor that is nowhere": (
        CaptureError,
        rf"aten\.mul\.Tensor .*{HERE}.*register_buffer",
        lambda: step_of(Acts(lambda layer, out: out * next(iter(layer._scales)))),
    ),
    "a shape that depends on data": (
        CaptureError,
        rf"shape .*{HERE}",
        lambda: step_of(Acts(lambda _, out: out[out[:, 0] > 0])),
    ),
    "a branch on data": (CaptureError, rf"values of a tensor.*{HERE}.*torch.where", lambda: step_of(Acts(branch))),
    "an average that counts": (CaptureError, rf"values of a tensor.*{HERE}.*after the step", lambda: own_step(average)),
    "a schedule in the step": (
        StepError,
        "lr of SGD",
        lambda: own_step(lambda _, optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5).step),
    ),
    "a number is returned": (
        CaptureError,
        "int",
        lambda: step_of(net(8), loss_fn=lambda out, y: (F.cross_entropy(out, y), 3)),
    ),
    "metrics of micro-batches": (
        CaptureError,
        "loss_fn .*micro-batches",
        lambda: step_of(net(8), loss_fn=metrics, accumulate=2),
    ),
    "no loss": (CaptureError, "list and no loss", lambda: capture(nn.Sequential(), None, None, ([[1.0]],))),
    "a hook of the optimizer that runs no operator": (StepError, "optimizer .*count", lambda: hooked("optimizer")),
    "a hook of a tensor that runs no operator": (StepError, r"0\.weight .*count", lambda: hooked("weight")),
    "a compiled model": (
        CaptureError,
        "the model is compiled.*_orig_mod",
        lambda: step_of(torch.compile(net(8)), sgd(net(8))),
    ),
    "a compiled part": (
        CaptureError,
        "0 is compiled.*_orig_mod",
        lambda: step_of(nn.Sequential(torch.compile(net(8)))),
    ),
    "a part compiled in place": (CaptureError, r"0 is compiled.*compile\(\)", lambda: step_of(in_place(net(8)))),
    "a compiled loss": (
        CaptureError,
        "part of the step is compiled",
        lambda: step_of(net(8), loss_fn=torch.compile(F.cross_entropy)),
    ),
    "a scripted model": (
        CaptureError,
        r"the model is a scripted .*torch\.jit.*give the module that was scripted",
        lambda: step_of(torch.jit.script(net(8))),
    ),
    "a traced part": (
        CaptureError,
        "0 is a scripted or traced module",
        lambda: step_of(nn.Sequential(torch.jit.trace(nn.Linear(8, 5), pairs()[0]))),
    ),
    "a branch in a scripted function": (
        CaptureError,
        rf"operator of doubled_if_positive \(test_refusals.*, .*torch\.jit .*branch .*{HERE}: call the Python",
        lambda: step_of(scripting(doubled_if_positive)),
    ),
    "a lazy layer": (
        CaptureError,
        r"0\.weight is uninitialized .*call the model once",
        lambda: capture(nn.Sequential(nn.LazyLinear(5)), F.cross_entropy, None, pairs()),
    ),
    "a tensor of a module's class": (
        CaptureError,
        rf"Shared\.scale, a tensor of a class, in aten\.mul\.Tensor {HERE}: make it an attribute of the object",
        lambda: step_of(Shared(8, 5)),
    ),
    "a tensor of an optimizer's class": (
        CaptureError,
        rf"Scaled\.rate, a tensor of a class, .*{HERE}: make it an attribute of the object",
        lambda: step_of(model := net(8), Scaled(model.parameters(), 0.1)),
    ),
    "data that is nowhere": (
        CaptureError,
        r"assigns to data a tensor that is not in .*\(.*test_refusals\.py:\d+\): make it a buffer",
        lambda: step_of(Acts(lambda layer, out: setattr(out, "data", next(iter(layer._scales))) or out)),
    ),
    "other data for an input": (
        CaptureError,
        r"gives input0 other memory \(\.data = …\)",
        lambda: capture_step(lambda x, y: setattr(x, "data", x * 2) or (x + 1), *pairs()),
    ),
    "DataParallel": (CaptureError, "DataParallel", lambda: step_of(nn.DataParallel(net(8)))),
    # optimizers
    "a count in an optimizer's state": (StepError, "Counting has steps", lambda: counting("state")),
    "a count in its options": (StepError, "Counting has steps", lambda: counting("option")),
    "a count in an attribute": (StepError, "Counting has steps", lambda: counting("attribute")),
    "Adafactor of transformers": (
        StepError,
        "Adafactor has step",
        lambda: step_of(
            model := net(8), Adafactor(model.parameters(), 0.01, scale_parameter=False, relative_step=False)
        ),
    ),
    "LBFGS": (CaptureError, "LBFGS", lambda: step_of(model := net(8), torch.optim.LBFGS(model.parameters()))),
    "dampening": (
        StepError,
        "dampening",
        lambda: step_of(model := net(8), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)),
    ),
    # plans and graphs
    "a plan of another program": (PlanError, "another program", lambda: step_of(net(8), plan=Plan((), "0" * 64))),
    "no memory": (OutOfMemory, "", lambda: step_of(net(8), limit=1000)),
    "tensors without content": (
        StepError,
        "weight has device meta",
        lambda: step_of(nn.Linear(8, 5, device="meta"), batch=tuple(t.to("meta") for t in pairs())),
    ),
    "what is returned is swapped": (
        StepError,
        r"0\.weight, which the step returns",
        lambda: own_step(lambda model, _: lambda: model[0].weight, moving),
    ),
    "a graph with a number": (StepError, "graph: .*optimizer.*step", lambda: graph(optimizer=adamw)),
    "a graph that recomputes dropout": (StepError, "graph: .*random", lambda: graph(recomputing_dropout)),
    "a graph that can be undone": (
        StepError,
        "graph: .*undone",
        lambda: tight(Twins("small").captured(), Plan(), graph=True, undo=True),
    ),
    "a graph with a scaler": (StepError, "graph: .*GradScaler", lambda: graph(scaler=SCALER)),
    "a graph that keeps gradients": (StepError, "graph: .*gradients", lambda: graph(keep_grads=True)),
    # batches and options
    "an object in a batch": (StepError, "SimpleNamespace", lambda: steps_of_net(SimpleNamespace(x=torch.randn(2, 8)))),
    "a NumPy array in a batch": (
        CaptureError,
        r"argument 0 of the step is a NumPy array.*torch\.from_numpy",
        lambda: steps_of_net(pairs()[0].numpy(), pairs()[1]),
    ),
    "a NumPy array in a captured batch": (
        CaptureError,
        r"argument 1 of the step is a NumPy array.*torch\.from_numpy",
        lambda: capture_step(lambda x, y: x + torch.from_numpy(y), pairs()[0], np.ones(8)),
    ),
    "a set in a batch": (StepError, "set", lambda: steps_of_net((torch.randn(2, 8), {1}), torch.zeros(2).long())),
    "no batch": (StepError, "1 to 1 micro-batches", lambda: steps_of_net(())),
    "accumulate": (ValueError, "accumulate.*got 0", lambda: steps_of_net(accumulate=0)),
    "keep": (ValueError, "keep.*got 0", lambda: steps_of_net(keep=0)),
    "options of a custom step": (
        ValueError,
        "clip_norm",
        lambda: fit(torch.sum, example_batch=(torch.randn(16, 8),), memory=0.8, clip_norm=1.0),
    ),
    "no limit": (ValueError, "memory", lambda: fit(torch.sum, example_batch=(torch.randn(16, 8),))),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.*is deprecated")
@pytest.mark.parametrize("what", REFUSED)
def test_refusals_name_the_cause(what: str) -> None:
    error, named, build = REFUSED[what]
    with pytest.raises(error, match=named or None) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_modules_that_work_on_several_gpus_are_refused(tmp_path: Any) -> None:
    model = net(8)
    torch.distributed.init_process_group("gloo", init_method=(tmp_path / "store").as_uri(), rank=0, world_size=1)
    try:
        with pytest.raises(CaptureError, match=r"DistributedDataParallel, .*executor\.compiled\.compile\(model"):
            step_of(nn.parallel.DistributedDataParallel(model), sgd(model))
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.data, mesh))
        with pytest.raises(CaptureError, match=r"0\.weight is a DTensor"):
            step_of(model)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_dropout_of_cudnns_recurrent_layers_is_refused(kind: Any, monkeypatch: Any) -> None:
    """These layers seed their dropout on the host; without dropout or in eval mode they are captured."""
    monkeypatch.setattr(sys.modules[CaptureError.__module__], "uses_cudnn", lambda module: True)

    def captured(layer: nn.Module) -> Any:
        return capture(layer, lambda out, y: out[0].sum(), sgd(layer), (torch.randn(4, 2, 3), torch.zeros(1)))

    layer = kind(3, 3, 2, dropout=0.5)
    with pytest.raises(CaptureError, match=f"{kind.__name__} with dropout"):
        captured(layer)
    assert captured(layer.eval()) and captured(kind(3, 3, 2))


# ------------------------------------------------------------------------------------------------ changes between steps


def stem(loop: Loop) -> Any:
    return loop.model.stem[0]


def momentum(loop: Loop) -> Any:
    return loop.optimizer.state[stem(loop).weight]


def to_data(change: Callable[[Tensor], Tensor]) -> Callable[[Loop], Any]:
    return lambda loop: setattr(stem(loop).weight, "data", change(stem(loop).weight.data))


CHANGES: list[Callable[[Loop], Any]] = [  # the step continues and equals eager
    to_data(torch.clone),
    lambda loop: stem(loop).weight.data.mul_(0.5),
    lambda loop: setattr(loop.model.stem[1], "running_mean", torch.ones(4)),
    lambda loop: momentum(loop)["momentum_buffer"].add_(0.25),
    lambda loop: momentum(loop).update(momentum_buffer=torch.ones_like(stem(loop).weight)),
    lambda loop: momentum(loop).clear(),
    lambda loop: loop.optimizer.state.update({stem(loop).weight: {"momentum_buffer": torch.ones(4, 3, 3, 3)}}),
    lambda loop: loop.optimizer.state.clear(),
    lambda loop: loop.optimizer.load_state_dict(copy.deepcopy(loop.optimizer.state_dict())),
    lambda loop: loop.optimizer.param_groups[0].update(lr=0.01),
]
REFUSED_CHANGES: dict[str, tuple[Callable[[Loop], Any], str]] = {
    "form": (to_data(torch.flatten), "weight has shape"),
    "strides": (to_data(lambda t: t.transpose(2, 3)), "weight has stride"),
    "type": (to_data(torch.Tensor.double), "weight has type torch.float64"),
    "frozen": (lambda loop: stem(loop).weight.requires_grad_(False), r"stem\.0\.weight was frozen"),
    "gradient": (
        lambda loop: setattr(stem(loop).weight, "grad", torch.zeros_like(stem(loop).weight)),
        r"stem\.0\.weight has a gradient",
    ),
    "parameter": (
        lambda loop: setattr(stem(loop), "weight", nn.Parameter(stem(loop).weight.detach())),
        r"stem\.0\.weight was replaced",
    ),
    "no buffer": (lambda loop: loop.model.stem[1]._buffers.pop("running_mean"), r"stem\.1\.running_mean"),
    "mode": (lambda loop: loop.model.stem[1].eval(), "BatchNorm2d is in eval mode"),
    "module": (lambda loop: loop.model.stem.append(nn.Identity()), "Sequential has other parts"),
    "other module": (lambda loop: loop.model.stem.__setitem__(2, nn.Identity()), "Sequential has other parts"),
    "option": (lambda loop: loop.optimizer.param_groups[0].update(nesterov=True), "optimizer's nesterov was False"),
    "group": (
        lambda loop: loop.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        "other parameter groups",
    ),
    "memory": (
        lambda loop: [setattr(p, "data", torch.cat([p.data, p.data])[: len(p)]) for p in loop.model.parameters()],
        "part of other memory",
    ),
}


def small_step(kind: str) -> tuple[Twins, PlannedStep]:
    twins = Twins("small", sgd)
    captured = twins.captured()
    step = tight(captured, plan_of(captured.program, kind, empty_share=0.1))
    twins.train(step, 2)
    return twins, step


@pytest.mark.parametrize("kind", ["both", pytest.param("none", marks=pytest.mark.nightly)])
def test_a_change_between_steps_takes_effect(kind: str) -> None:
    twins, step = small_step(kind)
    for change in CHANGES:
        change(twins.ours)
        change(twins.eager)
        twins.train(step, 2)


@pytest.mark.parametrize("change", REFUSED_CHANGES)
def test_a_change_between_steps_is_refused(change: str) -> None:
    twins, step = small_step("both")
    does, named = REFUSED_CHANGES[change]
    does(twins.ours)
    for _ in range(2):
        with pytest.raises(StepError, match=named) as caught:
            step(*twins.next_batch())
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("on_device", [True, False])
def test_state_that_becomes_shared_is_refused_wherever_it_is(on_device: bool) -> None:
    twins, step = planned("small")
    twins.train(step)
    swapped = [b for b in step.state.bindings if b.block]
    binding = next(b for b in swapped if (b.block.place.name == "DEVICE") is on_device)
    user = binding.user
    user.share_memory_()
    for _ in range(2):
        with pytest.raises(StepError, match=f"{binding.name}.*shared"):
            step(*twins.next_batch())
    user.data = user.data.clone()
    twins.train(step, 2)


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), {"momentum": 0.0, "lr": torch.tensor(0.1)}),
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), {"momentum": 0.9}),
        (lambda m: torch.optim.Adam(m.parameters()), {"amsgrad": True, "weight_decay": 0.1, "maximize": True}),
        (lambda m: torch.optim.AdamW(m.parameters(), weight_decay=0.0, fused=True), {"weight_decay": 0.1}),
    ],
)
def test_a_number_that_would_give_another_graph_is_refused(make: Any, values: dict[str, Any]) -> None:
    twins = Twins("mlp", make)
    step = PlannedStep(twins.captured(), Plan())
    group = twins.ours.optimizer.param_groups[0]
    for key, value in values.items():
        twins.train(step)
        before = group[key]
        group[key] = value
        with pytest.raises(StepError, match=f"optimizer's {key} was"):
            step(*twins.next_batch())
        group[key] = before
    twins.train(step)


# -------------------------------------------------------------------------------------------------------------- batches


def test_a_batch_that_does_not_fit() -> None:
    twins = Twins("small")
    captured = twins.captured()
    step = tight(captured, programs.swapping_the_batch(captured.program))
    x, y = twins.next_batch()
    for wrong, named in (
        ((x[:1], y), r"tensor 0 of the batch has shape \(1, 3, 16, 16\)"),
        ((x, y.int()), "tensor 1 of the batch has type torch.int32"),
        ((x.to("meta"), y), "tensor 0 of the batch has device meta"),
        ((x.mT.contiguous().mT, y), "tensor 0 of the batch has stride"),
        ((x, y, y), "the batch is"),
        ((x,), "the batch is"),
        ((x, 3), "tensor 1 of the batch is a int"),
        ((torch.cat([x, x])[1:3], y), "clone it"),
        ((torch.from_numpy(x.clone().numpy()), y), "clone it"),
    ):
        with pytest.raises(StepError, match=named) as caught:
            step(*wrong)
        assert "\n" not in str(caught.value)
        twins.train(step)


def test_the_same_tensor_as_input_and_target() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 8))
    x = torch.randn(3, 8)
    step = step_of(model, batch=(x, x), loss_fn=nn.MSELoss())
    other = torch.randn(3, 8)
    assert step(other, other).isfinite()
    with pytest.raises(StepError, match="the same as another"):
        step(other, x)


def test_a_tensor_of_another_size_than_the_programs_is_refused() -> None:
    """Covers operators whose real outputs differ from the trace."""
    twins, step = planned()
    block = next(b for b in step.state.blocks.blocks.values() if not b.persistent)
    block.nbytes += 4
    with pytest.raises(StepError, match=r"bytes, but .* in the program: .*the model is as before the step"):
        step(*twins.next_batch())
    block.nbytes -= 4
    twins.train(step, 2)
