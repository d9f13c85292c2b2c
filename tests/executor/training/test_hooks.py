"""Tests that a hook which is added, removed or exchanged after the capture is refused by name, wherever it is."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils.hooks import RemovableHandle

from executor import PlannedStep, StepError
from simulator import Plan
from tests.executor.networks import sgd
from tests.executor.training.programs import Loop, Twins
from tests.executor.training.test_equal_to_eager import net, trained

HERE = r"{}\.<locals>\.{} \(test_hooks\.py:\d+\)"


class Kind(NamedTuple):
    """A kind of hook.

    Attributes:
        register: returns the function that registers a hook in a loop.
        act: what the hook does.
        name: regular expression of the kind's name and of the hook's owner, around the hook's name.
        options: options of ``register``.
    """

    register: Callable[[Loop], Callable[..., RemovableHandle]]
    act: Callable[..., Any]
    name: str
    options: dict[str, bool] = {}  # noqa: RUF012


def of_layer(method: str) -> Callable[[Loop], Callable[..., RemovableHandle]]:
    return lambda loop: getattr(loop.model[4], method)


def of_weight(method: str) -> Callable[[Loop], Callable[..., RemovableHandle]]:
    return lambda loop: getattr(loop.model[4].weight, method)


def of_optimizer(method: str) -> Callable[[Loop], Callable[..., RemovableHandle]]:
    return lambda loop: getattr(loop.optimizer, method)


def double_first(module: nn.Module, args: tuple[Any, ...], *_: Any) -> Any:
    return (2 * args[0], *args[1:]), *_


def double_gradients(module: nn.Module, gradients: tuple[Any, ...], *_: Any) -> Any:
    return tuple(g if g is None else 2 * g for g in gradients)


def double_gradient(p: torch.Tensor) -> None:
    p.grad.mul_(2)


def double_all_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.mul_(2)


def double_output(module: nn.Module, *values: Any) -> Any:
    return 2 * values[-1]


KINDS = {
    "forward pre": Kind(of_layer("register_forward_pre_hook"), lambda m, x: 2 * x[0], "forward pre hook {} of model.4"),
    "pre with arguments": Kind(
        of_layer("register_forward_pre_hook"), double_first, "forward pre hook {} of model.4", {"with_kwargs": True}
    ),
    "forward": Kind(of_layer("register_forward_hook"), double_output, "forward hook {} of model.4"),
    "forward with arguments": Kind(
        of_layer("register_forward_hook"), double_output, "forward hook {} of model.4", {"with_kwargs": True}
    ),
    "forward always": Kind(
        of_layer("register_forward_hook"), double_output, "forward hook {} of model.4", {"always_call": True}
    ),
    "backward pre": Kind(
        of_layer("register_full_backward_pre_hook"), double_gradients, "backward pre hook {} of model.4"
    ),
    "backward": Kind(of_layer("register_full_backward_hook"), double_gradients, "backward hook {} of model.4"),
    "gradient": Kind(of_weight("register_hook"), lambda g: 2 * g, "backward hook {} of model.4.weight"),
    "accumulated gradient": Kind(
        of_weight("register_post_accumulate_grad_hook"),
        double_gradient,
        "post accumulate grad hook {} of model.4.weight",
    ),
    "before an optimizer": Kind(
        of_optimizer("register_step_pre_hook"), double_all_gradients, "optimizer step pre hook {} of optimizer"
    ),
    "after an optimizer": Kind(
        of_optimizer("register_step_post_hook"), double_all_gradients, "optimizer step post hook {} of optimizer"
    ),
    "forward pre of all": Kind(
        lambda _: modules.register_module_forward_pre_hook, lambda m, x: 2 * x[0], "forward pre hook {} of all modules"
    ),
    "forward of all": Kind(
        lambda _: modules.register_module_forward_hook, double_output, "forward hook {} of all modules"
    ),
    "backward pre of all": Kind(
        lambda _: modules.register_module_full_backward_pre_hook,
        double_gradients,
        "backward pre hook {} of all modules",
    ),
    "backward of all": Kind(
        lambda _: modules.register_module_full_backward_hook, double_gradients, "backward hook {} of all modules"
    ),
    "before all optimizers": Kind(
        lambda _: optimizers.register_optimizer_step_pre_hook,
        double_all_gradients,
        "optimizer pre hook {} of all optimizers",
    ),
    "after all optimizers": Kind(
        lambda _: optimizers.register_optimizer_step_post_hook,
        double_all_gradients,
        "optimizer post hook {} of all optimizers",
    ),
}


def loop_of_layers() -> Loop:
    model = net(8, 8)
    return trained(model, [sgd(model)])


def hook_of(kind: Kind) -> Callable[..., Any]:
    """Returns a new hook."""

    def doubling(*args: Any) -> Any:
        return kind.act(*args)

    return doubling


@pytest.fixture
def handles() -> Iterator[list[RemovableHandle]]:
    registered: list[RemovableHandle] = []
    yield registered
    for handle in registered:
        handle.remove()


def refused(twins: Twins, step: PlannedStep, named: str) -> None:
    for _ in range(2):
        with pytest.raises(StepError, match=named) as caught:
            step(*twins.next_batch())
        assert "\n" not in str(caught.value)
    twins.compare()


@pytest.mark.parametrize("name", KINDS)
def test_a_hook_that_comes_goes_or_is_exchanged_is_refused_by_name(name: str, handles: list[RemovableHandle]) -> None:
    kind = KINDS[name]
    named = kind.name.format(HERE.format("hook_of", "doubling"))
    twins = Twins(loop_of_layers)
    step = PlannedStep(twins.captured(), Plan())
    twins.train(step)
    add = partial(kind.register(twins.ours), **kind.options)
    handles.append(add(hook_of(kind)))
    refused(twins, step, f"{named} was added after")
    handles.pop().remove()
    twins.train(step)

    first = hook_of(kind)
    handles.append(add(first))
    if "of all" not in name and "all " not in name:  # else it is the eager loop's, too
        handles.append(kind.register(twins.eager)(first, **kind.options))
    step = PlannedStep(twins.captured(), Plan())
    twins.train(step)
    handles[0].remove()
    refused(twins, step, f"{named} was removed after")
    handles[0] = add(hook_of(kind))
    refused(twins, step, f"{named} was exchanged for {HERE.format('hook_of', 'doubling')} after")
    handles[0].remove()
    handles[0] = add(first)  # the same hook under a new handle
    twins.train(step, 2)


def test_other_changes_of_hooks() -> None:
    twins = Twins(loop_of_layers)
    layers = twins.ours.model[0], twins.eager.model[0]

    class Doubling:
        def hook(self, module: nn.Module, *values: Any) -> Any:
            return 2 * values[-1]

    objects = Doubling(), Doubling()
    found = [layer.register_forward_hook(o.hook) for layer, o in zip(layers, objects, strict=True)]
    step = PlannedStep(twins.captured(), Plan())
    twins.train(step)
    found[0].remove()
    found[0] = layers[0].register_forward_hook(objects[0].hook)  # another method object of the same object
    twins.train(step)
    found[0].remove()
    found[0] = layers[0].register_forward_hook(objects[1].hook)
    refused(twins, step, r"Doubling\.hook .*was exchanged for")
    found[0].remove()
    found[0] = layers[0].register_forward_hook(objects[0].hook, with_kwargs=True)
    refused(twins, step, r"Doubling\.hook .*was exchanged for")
    layers[0]._forward_hooks = OrderedDict()
    refused(twins, step, r"Doubling\.hook .*was removed")
    layers[0].register_forward_hook(objects[0].hook)
    twins.train(step)
    layers[0].register_forward_hook(objects[0].hook)
    refused(twins, step, r"Doubling\.hook .*another number of times")


def test_the_order_of_hooks_matters() -> None:
    def double(module: nn.Module, *values: Any) -> Any:
        return 2 * values[-1]

    def increment(module: nn.Module, *values: Any) -> Any:
        return values[-1] + 1

    twins = Twins(loop_of_layers)
    for loop in (twins.ours, twins.eager):
        for hook in (double, increment):
            loop.model[0].register_forward_hook(hook)
    step = PlannedStep(twins.captured(), Plan())
    twins.train(step)
    twins.ours.model[0]._forward_hooks.clear()
    for hook in (increment, double):
        twins.ours.model[0].register_forward_hook(hook)
    refused(twins, step, "double .*is called in another order")


def test_a_new_capture_accepts_a_hook() -> None:
    twins = Twins(loop_of_layers)
    steps = twins.steps_under(lambda *_: Plan())
    twins.train(steps)
    for model in map(attrgetter("model"), (twins.ours, twins.eager)):
        model[0].register_forward_hook(double_output)
    with pytest.raises(StepError, match=r"double_output .*recapture\(\)"):
        steps(*twins.next_batch())
    steps.recapture()
    twins.train(steps, 2)
