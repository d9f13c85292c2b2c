"""State that an optimizer's first step creates, and whether the first step is like later ones.

A captured step starts from existing optimizer state. Most optimizers create state and then update it as in any step,
so the state can be created before. Others treat their first gradient in another way (SGD with dampening, an average
that starts with the first gradient); their first step needs a capture of its own.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from executor.capture.optimizers import FLAGS, step_without_hooks
from executor.capture.python_values import Owner, are_equal, have_same_objects, is_scalar


class _FirstValues(dict[Any, Any]):
    """Dictionary that records the first value stored under each key."""

    def __init__(self) -> None:
        super().__init__()
        self.first_values: dict[Any, Any] = {}

    def __setitem__(self, key: Any, value: Any) -> None:
        self.first_values.setdefault(key, tree_map_only(Tensor, Tensor.clone, value))
        super().__setitem__(key, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]


class _Trial:
    """One step of an optimizer on a copy of one parameter, after which the optimizer is as before.

    Attributes:
        param: The copy after the step.
        state: State of the copy.
        is_alone: Whether the step has created nothing but state of the copy.
    """

    def __init__(self, optimizer: Optimizer, group: dict[str, Any], param: Tensor, grad: Tensor, state: Any) -> None:
        self.param = param.detach().clone().requires_grad_()
        self.param.grad = grad
        table: defaultdict[Any, Any] = defaultdict(type(state), {self.param: state} if state else {})
        attributes = dict(vars(optimizer))
        owners = [Owner(v, k) for k, v in attributes.items() if isinstance(v, (list, dict)) and k != "state"]
        contents = [owner.content() for owner in owners]
        try:
            optimizer.param_groups = [{**group, "params": [self.param]}]
            optimizer.state = table
            before = dict(vars(optimizer))
            step_without_hooks(optimizer)
            objects = {k: v for k, v in vars(optimizer).items() if k not in FLAGS and not is_scalar(v)}
            self.is_alone = (
                all(before.get(key) is value for key, value in objects.items())
                and all(map(have_same_objects, contents, (owner.content() for owner in owners)))
                and all(key is self.param for key in table)
            )
        finally:
            vars(optimizer).clear()
            vars(optimizer).update(attributes)
            for owner, content in zip(owners, contents, strict=True):
                owner.restore(content)
        self.state = table[self.param]


def group_of(optimizer: Optimizer, param: Tensor) -> dict[str, Any]:
    """Returns the group of a parameter."""
    return next(group for group in optimizer.param_groups if any(p is param for p in group["params"]))


def is_builtin(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer is PyTorch's own, which fills each new state tensor with one value."""
    return type(optimizer).__module__.startswith("torch.optim")


def initial_state(optimizer: Optimizer, param: Tensor) -> dict[Any, Any]:
    """Returns the values that an optimizer's first step stores first for a parameter.

    Tensors of PyTorch's own optimizers have one element.
    """
    like = param.detach()
    if is_builtin(optimizer):
        like = torch.full((1,) * param.dim(), -0.0, dtype=param.dtype, device=param.device)
    trial = _Trial(optimizer, group_of(optimizer, param), like, torch.full_like(like, -0.0), _FirstValues())
    return dict(trial.state.first_values)


def first_step_differs(optimizer: Optimizer, param: Tensor) -> str:
    """Returns why an optimizer's first step of a parameter is not like a later one from created state, or "".

    An optimizer that is not PyTorch's own takes both steps on copies of the parameter, with one random gradient.
    """
    name = type(optimizer).__name__
    group = group_of(optimizer, param)
    if is_builtin(optimizer):
        is_damped = group.get("dampening") and group.get("momentum")
        return f"{name} with dampening uses its first gradient undamped" if is_damped else ""
    if any(isinstance(part, Optimizer) for part in vars(optimizer).values()):  # it steps another's parameters
        return ""
    random_state = torch.get_rng_state()
    try:
        grad = torch.empty_like(param, requires_grad=False).normal_()
        first = _Trial(optimizer, group, param, grad.clone(), {})
        initial = initial_state(optimizer, param)
        torch.set_rng_state(random_state)
        torch.empty_like(param, requires_grad=False).normal_()
        later = _Trial(optimizer, group, param, grad.clone(), initial)
    except Exception as error:
        return f"{name} takes no step of one parameter alone ({type(error).__name__})"
    finally:
        torch.set_rng_state(random_state)
    if not first.is_alone:
        return f"{name} creates state of its own in its first step"
    pairs = zip(tree_leaves([first.param, first.state]), tree_leaves([later.param, later.state]), strict=False)
    is_like_later = first.state.keys() == later.state.keys() == initial.keys() and all(
        map(_same, *zip(*pairs, strict=True))
    )
    return "" if is_like_later else f"{name} treats its first gradient unlike later ones"


def has_own_start(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer's next step creates state and differs from later steps."""
    stateless = {
        (id(group), p.shape, p.dtype): p
        for group in optimizer.param_groups
        for p in group["params"]
        if p.requires_grad and p.device.type != "meta" and not optimizer.state.get(p)
    }
    return any(first_step_differs(optimizer, param) for param in stateless.values())


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return are_equal(a, b)
