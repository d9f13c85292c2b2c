"""Tests of kernels' source locations on small models, also with checkpoints, autocast and arbitrary steps."""

from __future__ import annotations

from inspect import getsourcelines

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from executor import Captured, capture, capture_step


class Net(nn.Module):
    def __init__(self, mode: str = "") -> None:
        super().__init__()
        self.mode = mode  # which checkpoint runs the body
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.stem(x))
        b = checkpoint(self.body, h, use_reentrant=self.mode == "reentrant") if self.mode else self.body(h)
        return self.head((b + h).mean((2, 3)))


HERE = "tests/executor/capture/test_source_locations.py"
STEM, BODY, HEAD = (f"{HERE}:{getsourcelines(Net.forward)[1] + i}" for i in (1, 2, 3))
BATCH = torch.empty(2, 3, 8, 8), torch.zeros(2).long()


def loss_fn(y: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(y, target)


LOSS = f"{HERE}:{getsourcelines(loss_fn)[1] + 1}"


def kernels_of(captured: Captured, phase: str) -> list[tuple[str, str, str]]:
    """Returns (operator, module, line) of a phase's kernels, without markers."""
    pairs = zip(captured.program.kernels, captured.places, strict=True)
    return [(k.name.split(".")[1], *place) for k, place in pairs if k.phase == phase and k.name != "marker"]


FORWARD = [
    ("convolution", "stem", STEM),
    ("add_", "norm", STEM),
    ("native_batch_norm", "norm", STEM),
    ("convolution", "body.0", BODY),
    ("relu", "body.1", BODY),
    ("add", "", HEAD),
    ("mean", "", HEAD),
    ("addmm", "head", HEAD),
    ("_log_softmax", "loss_fn", LOSS),
    ("nll_loss_forward", "loss_fn", LOSS),
]
FROM_LOSS = [
    ("ones_like", "loss_fn", ""),
    ("nll_loss_backward", "loss_fn", LOSS),
    ("_log_softmax_backward_data", "loss_fn", LOSS),
    ("mm", "head", HEAD),
    ("mm", "head", HEAD),
    ("sum", "head", HEAD),
    ("div", "", HEAD),
]
BACKWARD = [
    *FROM_LOSS,
    ("threshold_backward", "body.1", BODY),
    ("convolution_backward", "body.0", BODY),
    ("add_", "body.0", BODY),
    ("native_batch_norm_backward", "norm", STEM),
    ("convolution_backward", "stem", STEM),
]


def captured_net(mode: str = "", **options: object) -> Captured:
    model = Net(mode)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return capture(model, loss_fn, optimizer, BATCH, **options)


def test_every_kernel_has_the_place_of_its_forward() -> None:
    captured = captured_net()
    assert kernels_of(captured, "forward") == FORWARD
    assert kernels_of(captured, "backward") == BACKWARD
    assert set(kernels_of(captured, "optimizer")) <= {(op, "optimizer", "") for op in ("mul_", "add_", "_foreach_add_")}
    markers = [k for k, kernel in enumerate(captured.program.kernels) if kernel.name == "marker"]
    assert markers
    assert all(captured.places[k] == captured.places[k - 1] for k in markers)


def test_tensors_belong_to_modules() -> None:
    captured = captured_net()
    owners = dict(zip((t.name for t in captured.program.tensors), captured.owners, strict=True))
    assert {name: owners[name] for name in ("stem.weight", "norm.running_mean", "head.bias", "input0")} == {
        "stem.weight": "stem",
        "norm.running_mean": "norm",
        "head.bias": "head",
        "input0": "inputs",
    }
    assert owners["optimizer.body.0.weight.momentum_buffer"] == "body.0"
    assert owners["relu"] == "body.1"


def test_the_gradient_of_a_parameter_belongs_to_its_module() -> None:
    """A gradient belongs to its parameter's module even if another module's forward uses the parameter."""

    class Borrowed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lender = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.lender.weight)

    model = Borrowed()
    captured = capture(model, loss_fn, torch.optim.SGD(model.parameters(), lr=0.1), (torch.empty(2, 4), BATCH[1]))
    program = captured.program
    update = next(k for k in program.kernels if k.phase == "optimizer")
    (gradient,) = (t for t in update.inputs if program.tensors[t].kind == "gradient")
    assert captured.owners[gradient] == "lender"
    assert captured.places[program.accesses[gradient][0]].module == ""


@pytest.mark.parametrize("mode", ["reentrant", "not reentrant"])
def test_recomputed_checkpoints_keep_their_location(mode: str) -> None:
    captured = captured_net(mode)
    assert kernels_of(captured, "forward") == FORWARD
    kernels = kernels_of(captured, "backward")
    assert kernels[: len(FROM_LOSS)] == FROM_LOSS
    recomputed = {(op, module) for op, module, _ in kernels[len(FROM_LOSS) :] if op != "detach"}
    repeated = {("convolution", "body.0"), ("relu", "body.1")}
    assert recomputed - {("add", "body.0")} == repeated | {(op, module) for op, module, _ in BACKWARD[len(FROM_LOSS) :]}
    places = {(op, module): line for op, module, line in kernels}
    assert places["threshold_backward", "body.1"] == places["convolution_backward", "body.0"] == BODY
    assert places["native_batch_norm_backward", "norm"] == STEM


def test_autocast_and_micro_batches_change_no_place() -> None:
    captured = captured_net(autocast=torch.bfloat16, accumulate=2)
    expected = [(module, line) for _, module, line in FORWARD]
    sources = [(module, line) for _, module, line in kernels_of(captured, "forward")]
    assert set(expected) <= set(sources) <= {*expected, ("loss_fn", "")}  # dividing the loss
    sums = [
        (place.module, place.line)
        for k, place in zip(captured.program.kernels, captured.places, strict=True)
        if k.phase == "backward" and k.name == "aten.add_.Tensor" and not place.line
    ]
    assert sorted(set(sums)) == [("body.0", ""), ("head", ""), ("norm", ""), ("stem", "")]  # gradients add up


def test_modules_of_any_step_have_the_names_by_which_it_finds_them() -> None:
    model = Net()
    target = BATCH[1]

    def step(x: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(model(x), target)
        loss.backward()
        return loss

    captured = capture_step(step, BATCH[0])
    first = getsourcelines(step)[1]
    prefixed = [(op, f"model.{module}".rstrip("."), line) for op, module, line in FORWARD[:-2]]
    loss = [(op, "step", f"{HERE}:{first + 1}") for op, *_ in FORWARD[-2:]]
    assert kernels_of(captured, "forward") == prefixed + loss
    backward = kernels_of(captured, "backward")
    assert backward[0] == ("ones_like", "step", f"{HERE}:{first + 2}")
    assert backward[-1] == ("convolution_backward", "model.stem", STEM)


def test_the_engine_runs_the_users_functions_in_their_forwards_place() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            return grad + grad

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(4, 4)
            self.two = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.two(Double.apply(self.one(x)))

    model = Doubled()
    x = torch.empty(2, 4)
    captured = capture(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), lr=0.1), (x, x))
    (forward,) = (entry for entry in kernels_of(captured, "forward") if entry[0] == "mul")
    (backward,) = (entry for entry in kernels_of(captured, "backward") if entry[0] == "add")
    assert forward[1:] == backward[1:] == ("", f"{HERE}:{getsourcelines(Double)[1] + 3}")
