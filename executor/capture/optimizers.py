"""Optimizers while a step is traced: the form of their updates, their options, the numbers that they keep in Python."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, _adafactor
from torch.optim.optimizer import _default_to_fused_or_foreach

from executor.capture.hyperparameters import is_number
from executor.capture.python_values import is_scalar

BUCKET_BYTES = 64 * 2**20  # of parameters that one update takes, in steps that are planned


def chooses_foreach(group: dict[str, Any], on_cuda: bool = False) -> bool:
    """Whether an optimizer whose ``foreach`` is None takes it for this group where its parameters are, or would if they
    were on CUDA."""
    if isinstance(group.get("lr"), Tensor) and not group.get("capturable"):
        return False
    wanted = [p for p in group["params"] if p.requires_grad]
    if on_cuda:
        return not group.get("differentiable") and all(type(p) in (Tensor, nn.Parameter) for p in wanted)
    return bool(_default_to_fused_or_foreach(wanted, group.get("differentiable", False), False)[1])


@contextmanager
def bucketed(optimizer: Optimizer, nbytes: int) -> Iterator[None]:
    """Every parameter group is several, each of parameters of at most ``nbytes`` (or of one)."""
    groups, buckets = optimizer.param_groups, list[dict[str, Any]]()
    for group in groups:
        bucket: list[Tensor] = []
        for param in group["params"]:
            if bucket and sum(p.nbytes for p in bucket) + param.nbytes > nbytes:
                buckets.append({**group, "params": bucket})
                bucket = []
            bucket.append(param)
        buckets.append({**group, "params": bucket})
    optimizer.param_groups = buckets
    try:
        yield
    finally:
        optimizer.param_groups = groups


def numbers_of(optimizer: Optimizer) -> dict[tuple[Any, ...], Any]:
    """Python's numbers of an optimizer: attributes, options, state; by where they are."""
    found: dict[tuple[Any, ...], Any] = {(key,): value for key, value in vars(optimizer).items() if key not in _FLAGS}
    found |= {(g, key): value for g, group in enumerate(optimizer.param_groups) for key, value in group.items()}
    found |= {(id(p), key): value for p, values in optimizer.state.items() if isinstance(values, dict)
              for key, value in values.items()}  # fmt: skip
    return {key: value for key, value in found.items() if is_scalar(value) or isinstance(value, torch.SymFloat)}


def moved(was: dict[tuple[Any, ...], Any], optimizer: Optimizer) -> tuple[Any, ...] | None:
    """Where a number of an optimizer is not what it was; None: nowhere."""
    for key, value in numbers_of(optimizer).items():
        before = was.get(key, was)
        if value is not before and (isinstance(value, torch.SymFloat) or type(value) is not type(before)
                                    or value != before):  # fmt: skip
            return key
    return None


# Of PyTorch's, on which no result depends.
_FLAGS = "_opt_called", "_warned_capturable_if_run_uncaptured", "_zero_grad_profile_name"


def takes_capturable(optimizer: Optimizer) -> bool:
    """Whether an optimizer is to take its ``capturable`` form, in which the step count stays a tensor."""
    return any(group.get("capturable") for group in optimizer.param_groups)


STEP_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"


@contextmanager
def without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """The user's hooks do not run in a step that is none of the user's."""
    before = {which: getattr(optimizer, which) for which in STEP_HOOKS}
    vars(optimizer).update({which: OrderedDict() for which in STEP_HOOKS})
    try:
        yield
    finally:
        vars(optimizer).update(before)


@contextmanager
def capturable(allowed: bool = True) -> Iterator[None]:
    """Lets optimizers take their ``capturable`` form on any device, as they do under torch.compile."""
    previous = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = previous or allowed
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = previous


@contextmanager
def symbolic_extremes() -> Iterator[None]:
    """Adafactor asks for the larger of two numbers that tensors have: an operation of the graph, not a branch."""

    def of(plain: Callable[..., Any], symbolic: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (symbolic if any(isinstance(a, torch.SymFloat) for a in args) else plain)(*args)

    before = {name: vars(_adafactor)[name] for name in ("max", "min") if name in vars(_adafactor)}
    vars(_adafactor).update(max=of(max, torch.sym_max), min=of(min, torch.sym_min))
    try:
        yield
    finally:  # the step of an optimizer may be within that of another
        del _adafactor.max, _adafactor.min  # type: ignore[attr-defined]
        vars(_adafactor).update(before)


def options(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group's options that are not tensors, and how many parameters it has."""
    plain = {k: v for k, v in group.items() if k != "params" and not isinstance(v, Tensor)}
    return {**plain, "params": len(group["params"])}


def fixed(options: dict[str, Any]) -> dict[str, Any]:
    """Of options those that are constants of the graph (the others: hyperparameters.py)."""
    return {k: v for k, v in options.items() if not is_number(k, v) and not
            (isinstance(v, tuple) and any(is_number(k, part) for part in v))}  # fmt: skip
