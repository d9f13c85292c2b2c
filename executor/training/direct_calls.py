"""Looks up Python bindings of ATen operators (``torch.convolution``), which parse arguments faster than an OpOverload.

An OpOverload boxes every argument, which is slow for lists; the functions of ``torch._C`` do not. They choose the
overload by the arguments, so ``direct`` calls each candidate once on stand-ins and takes the first that dispatches to
the same overload with the same arguments. Most backward operators have no such binding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_MODULES: tuple[tuple[str, Any], ...] = (
    ("", torch._C._VariableFunctions),
    ("", torch._C._nn),
    ("", torch._C.TensorBase),
    ("linalg_", torch._C._linalg),
    ("special_", torch._C._special),
    ("fft_", torch._C._fft),
)
aten = torch.ops.aten

# Operators whose binding has another name.
_METHODS = {aten._local_scalar_dense.default: "item"}

# Overloads that only wrap the number in a tensor and call another overload (aten/src/ATen/native/BinaryOps.cpp).
_WRAPPED = {
    getattr(aten, name).Scalar: getattr(aten, name).Tensor
    for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_")
}


class _Dispatched(BaseException):
    """Raised with the first dispatched operator, before it runs."""

    def __init__(self, target: OpOverload, args: Sequence[Any], options: Mapping[str, Any]) -> None:
        self.target = target
        self.call_args = args
        self.options = options


class _RaiseDispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise _Dispatched(func, args, kwargs or {})


def direct(
    target: OpOverload, args: Sequence[Any], options: Mapping[str, Any], spread: Sequence[Any] | None = None
) -> Callable[..., Any] | None:
    """Returns the function that calls an operator with the least Python overhead.

    Args:
        target: the operator overload.
        args, options: arguments of the operator: constants, and stand-ins for tensors and numbers.
        spread: positional arguments of the call if they differ from ``args`` (``view(2, 4)``).

    Returns:
        A function of ``torch._C`` that dispatches to ``target`` (or to the overload that it wraps) with these
        arguments. If PyTorch has none: the overload itself, or None if ``spread`` is given.
    """
    bound = _bind(target, args, options)
    name = _METHODS.get(target, target._overloadpacket.__name__)
    # Otherwise a default device that is set later would apply.
    has_device = bound.get("device") or any(isinstance(v, Tensor) for v in tree_leaves(bound))
    for prefix, module in _MODULES if target.namespace == "aten" and has_device else ():
        function = getattr(module, name.removeprefix(prefix), None) if name.startswith(prefix) else None
        if function is not None and _dispatches(function, target, bound, args if spread is None else spread, options):
            return function  # type: ignore[no-any-return]
    return target._op if spread is None else None


def _dispatches(
    function: Callable[..., Any],
    target: OpOverload,
    bound: dict[str, Any],
    args: Sequence[Any],
    options: Mapping[str, Any],
) -> bool:
    """Returns True if the function dispatches to ``target`` with the arguments ``bound``."""
    try:
        with torch.no_grad(), _RaiseDispatched():
            function(*args, **options)
    except _Dispatched as dispatched:
        is_target = dispatched.target in (target, _WRAPPED.get(target))
        return is_target and _equal(_bind(target, dispatched.call_args, dispatched.options), bound)
    except Exception:  # the function does not accept these arguments
        return False
    return False


def _bind(target: OpOverload, args: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all arguments by name, including defaults."""
    values = {a.name: a.default_value for a in target._schema.arguments}
    values.update(zip(values, args, strict=False))
    values.update(options)
    if "pin_memory" in values:
        values["pin_memory"] = bool(values["pin_memory"])
    return values


def _equal(a: Any, b: Any) -> bool:
    """Returns True if two arguments are the same to an operator: tensors by identity; 1, 1.0 and True differ."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return a is b
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and bool(a == b)
