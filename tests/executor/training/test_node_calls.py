"""Tests a step's calls: operators by PyTorch's Python bindings, without detaching and unpacking."""

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor import PlannedStep, capture
from executor.capture.capture import capture_step
from executor.training.direct_calls import direct
from simulator.machine import Machine
from simulator.plan import Plan

aten = torch.ops.aten
X = torch.empty(2, 1, 4, 4, device="meta")
W = torch.empty(3, 1, 3, 3, device="meta")
CONVOLUTION = X, W, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1


@pytest.mark.parametrize(
    ("target", "args", "options", "function"),
    [
        (aten.convolution.default, CONVOLUTION, {}, torch.convolution),
        (aten.add_.Tensor, (X, X), {"alpha": 2}, torch.Tensor.add_),
        (aten._foreach_add_.Scalar, ([X, W], 1), {}, torch._foreach_add_),
        (aten.gelu.default, (X,), {"approximate": "tanh"}, torch._C._nn.gelu),
        (aten.zeros.default, ([2],), {"device": torch.device("cpu"), "pin_memory": False}, torch.zeros),
        (aten.div_.Scalar, (X, 2.0), {}, torch.Tensor.div_),  # calls div_.Tensor
        # Another overload; a default device that could be set later; no binding; no ATen operator.
        (aten.floor_divide.Scalar, (X, 2.0), {}, None),
        (aten.zeros.default, ([2],), {}, None),
        (aten.threshold_backward.default, (X, X, 0), {}, None),
        (torch.ops.prims.sin.default, (X,), {}, None),
    ],
    ids=lambda value: str(value) if isinstance(value, torch._ops.OpOverload) else "",
)
def test_an_operator_is_called_by_the_function_that_dispatches_to_it(
    target: Any, args: Any, options: Any, function: Any
) -> None:
    assert direct(target, args, options) is (target._op if function is None else function)


def test_sizes_one_by_one() -> None:
    assert direct(aten.view.default, (X, [8, 4]), {}, (X, 8, 4)) is torch.Tensor.view
    assert direct(aten.view.default, (X, [8, 4]), {}, (X, 4, 8)) is None


def functions(step: PlannedStep) -> list[Any]:
    return [function for item in step.state.work for _, function, _, _ in item.calls]


def test_a_step_detaches_and_unpacks_nothing() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten())
    batch = torch.randn(2, 1, 4, 4), torch.tensor([0, 1])
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    captured = capture(model, nn.CrossEntropyLoss(), optimizer, batch, machine=Machine.load("gtx1080ti"))
    targets = {node.target for node in captured.graph.graph.nodes}
    assert {aten.detach.default, operator.getitem} <= targets
    called = functions(PlannedStep(captured, Plan()))
    assert torch.convolution in called and torch.native_batch_norm in called
    assert not {operator.getitem, torch.Tensor.detach, torch.detach, torch.empty} & set(called)


def test_a_number_is_read_again_only_if_it_was_written() -> None:
    model = nn.Linear(3, 2)
    batch = torch.randn(2, 3), torch.tensor([0, 1])
    optimizer = torch.optim.Adam(model.parameters(), 0.1, foreach=True)  # reads a step twice, by parameter
    captured = capture(model, nn.CrossEntropyLoss(), optimizer, batch, machine=Machine.load("gtx1080ti"))
    assert sum(node.target is aten._local_scalar_dense.default for node in captured.graph.graph.nodes) == 4
    assert functions(PlannedStep(captured, Plan())).count(torch.Tensor.item) == 2


def test_what_a_step_returns_is_detached() -> None:
    weight = torch.ones(3)

    def step(x: Tensor) -> tuple[Tensor, ...]:
        y = x * weight
        a, b = y.detach().t().t().split([1, 2])
        return y, y.detach(), a + 1, b.expand(2) + 1

    planned = PlannedStep(capture_step(step, torch.ones(3)), Plan())
    y, same, *others = planned(torch.arange(3.0))
    assert y is not same and y.data_ptr() == same.data_ptr()
    same.unsqueeze_(0)  # its form is independent
    assert y.tolist() == [0, 1, 2] and [t.tolist() for t in others] == [[1], [2, 3]]
    assert sum(f in (torch.detach, torch.Tensor.detach) for f in functions(planned)) == 1


def test_a_form_that_is_changed_in_place_is_no_other_tensors() -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        y.detach().resize_(2)
        return y.sum(), y + 1

    captured = capture_step(step, torch.ones(3), check=False)
    planned = PlannedStep(captured, Plan())
    assert planned(torch.ones(3))[1].tolist() == [3, 3, 3]
    assert any(node.target is aten.resize_.default for node in captured.graph.graph.nodes)
