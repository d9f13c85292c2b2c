"""Optimizers during tracing: the form of their updates, their options, and the numbers that they keep in Python.

While an optimizer's step is traced, each numeric option (learning rate, betas, …) is a ``SymFloat``. Python arithmetic
on it (``1 - lr * weight_decay``) becomes part of the graph and is bit-identical to eager mode. A branch on a number
(``momentum != 0``) becomes a condition, and a value that violates it needs another graph. Fused updates take numbers by
name (``_fused_adamw_(lr=…)``) instead of symbols. These names are connected to the options, and an option other than
the learning rate that is 0 must stay 0.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import sympy
import torch
from torch import SymFloat, Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.optim import Optimizer, _adafactor
from torch.optim.optimizer import _default_to_fused_or_foreach

from executor.capture.hooks import STEP_HOOKS
from executor.capture.python_values import is_scalar

BUCKET_BYTES = 64 * 2**20  # bytes of parameters per update kernel in planned steps
# PyTorch's own hooks, which do not affect results.
FLAGS = frozenset({"_opt_called", "_warned_capturable_if_run_uncaptured", "_zero_grad_profile_name"})


@contextmanager
def patch_attrs(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Sets attributes (object, name, value) and restores them on exit."""
    before = [
        (owner, name, vars(owner).get(name, _MISSING) if isinstance(owner, type) else getattr(owner, name, _MISSING))
        for owner, name, _ in changes
    ]
    try:
        for owner, name, value in changes:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            if value is not _MISSING:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)


_MISSING = object()


def chooses_foreach(group: dict[str, Any], on_cuda: bool = False) -> bool:
    """Returns whether an optimizer with ``foreach=None`` uses multi-tensor updates for this group.

    Args:
        on_cuda: Whether to treat the parameters as CUDA tensors.
    """
    if isinstance(group.get("lr"), Tensor) and not group.get("capturable"):
        return False
    trainable = [p for p in group["params"] if p.requires_grad]
    if on_cuda:
        return not group.get("differentiable") and all(type(p) in (Tensor, nn.Parameter) for p in trainable)
    return bool(_default_to_fused_or_foreach(trainable, group.get("differentiable", False), False)[1])


def rates_as_tensors(optimizer: Optimizer) -> None:
    """Replaces learning rates by float32 tensors beside the parameters, which CUDA graphs read at each replay.

    PyTorch's schedulers then write into them.

    Raises:
        ValueError: the optimizer reads its learning rate on the host.
    """
    groups = [group for group in optimizer.param_groups if group["params"]]
    for i, group in enumerate(groups):
        if not (group.get("fused") or group.get("capturable")):
            raise ValueError(
                f"tensor_lr: group {i} of {type(optimizer).__name__} reads its learning rate on the host; create the "
                "optimizer with fused=True or capturable=True"
            )
    for group in groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=group["params"][0].device)


@contextmanager
def split_groups(optimizer: Optimizer, nbytes: int) -> Iterator[None]:
    """Splits every parameter group into groups of at most ``nbytes`` of parameters (or of one parameter)."""
    buckets: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        bucket: list[Tensor] = []
        for param in group["params"]:
            if bucket and sum(p.nbytes for p in bucket) + param.nbytes > nbytes:
                buckets.append({**group, "params": bucket})
                bucket = []
            bucket.append(param)
        buckets.append({**group, "params": bucket})
    with patch_attrs((optimizer, "param_groups", buckets)):
        yield


def numbers_of(optimizer: Optimizer) -> dict[tuple[Any, ...], Any]:
    """Returns an optimizer's Python numbers (attributes, options, state), keyed by their location."""
    numbers: dict[tuple[Any, ...], Any] = {(key,): value for key, value in vars(optimizer).items() if key not in FLAGS}
    numbers |= {(g, key): value for g, group in enumerate(optimizer.param_groups) for key, value in group.items()}
    numbers |= {
        (id(p), key): value
        for p, values in optimizer.state.items()
        if isinstance(values, dict)
        for key, value in values.items()
    }
    return {key: value for key, value in numbers.items() if is_scalar(value) or isinstance(value, SymFloat)}


def changed_number(
    before: dict[tuple[Any, ...], Any], optimizer: Optimizer, is_first: bool = False
) -> tuple[Any, ...] | None:
    """Returns the location of a changed number of an optimizer, or None.

    Args:
        before: Numbers by location, as ``numbers_of`` returned them.
        optimizer: The optimizer now.
        is_first: Whether the step may create numbers, apart from options.
    """
    groups = range(len(optimizer.param_groups))
    for key, value in numbers_of(optimizer).items():
        if is_first and key not in before and key[0] not in groups:
            continue
        old = before.get(key, before)
        if value is not old and (isinstance(value, SymFloat) or type(value) is not type(old) or value != old):
            return key
    return None


def step_without_hooks(optimizer: Optimizer) -> None:
    """Runs an optimizer's step in the form that is captured, without the user's hooks."""
    with captured_form(optimizer), patch_attrs(*((optimizer, hooks, OrderedDict()) for hooks in STEP_HOOKS)):
        type(optimizer).step(optimizer)


@contextmanager
def captured_form(optimizer: Optimizer) -> Iterator[None]:
    """Keeps an optimizer's step count and numbers read from tensors as tensors.

    Optimizers with ``capturable=True`` may use that form on any device. ``max`` of two numbers read from tensors (in
    Adafactor) is a graph operation instead of a branch.
    """

    def choose(plain: Callable[..., Any], symbolic: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: (symbolic if any(isinstance(a, SymFloat) for a in args) else plain)(*args)

    extremes = ("max", choose(max, torch.sym_max)), ("min", choose(min, torch.sym_min))
    is_allowed = any(group.get("capturable") for group in optimizer.param_groups)
    with capturable(is_allowed), patch_attrs(*((_adafactor, name, function) for name, function in extremes)):
        yield


def capturable(is_allowed: bool = True) -> AbstractContextManager[None]:
    """Lets optimizers use their ``capturable`` form on any device, as under torch.compile."""
    return patch_attrs((torch.compiler, "_is_compiling_flag", torch.compiler._is_compiling_flag or is_allowed))


def options(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a parameter group's options that are not tensors, and its number of parameters."""
    plain = {k: v for k, v in group.items() if k != "params" and not isinstance(v, Tensor)}
    return {**plain, "params": len(group["params"])}


def constant_options(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that are constants of the graph (``Numbers`` has the others)."""
    return {
        k: v
        for k, v in options.items()
        if not is_number(k, v) and not (isinstance(v, tuple) and any(is_number(k, part) for part in v))
    }


def is_number(key: str, value: Any) -> bool:
    """Returns whether this option can change without changing the graph; a learning rate may start as an integer."""
    return type(value) is float or (key == "lr" and type(value) is int)


class Option:
    """A numeric option of an optimizer; calling it returns the current value.

    Attributes:
        key, part: Name of the parameter group's option, and the index if it is a tuple.
        captured: Value at capture time.
    """

    def __init__(self, optimizer: Optimizer, group: int, key: str, part: int | None, value: float):
        self.optimizer = optimizer
        self.group = group
        self.key = key
        self.part = part
        self.captured = value
        self.__name__ = self.__qualname__ = key if part is None else f"{key}_{part}"  # shown in generated code
        self.__module__ = "option"

    def __call__(self) -> Any:
        """Returns the current value."""
        value = self.optimizer.param_groups[self.group][self.key]
        return value if self.part is None else value[self.part]


class Numbers:
    """Numeric optimizer options of a step, and the conditions that their current values must satisfy.

    Attributes:
        options: Options that the graph reads or that a condition names.
    """

    def __init__(self, shapes: ShapeEnv):
        self._shapes = shapes
        self._entries: dict[tuple[int, int, str, int | None], tuple[Option, sympy.Symbol, SymFloat, fx.Proxy]] = {}
        self._fused: dict[int, dict[str, fx.Node]] = {}  # id of a parameter -> nodes of its group's options
        self._zeros: list[sympy.Basic] = []
        self.options: tuple[Option, ...] = ()
        self._conditions: list[tuple[sympy.Basic, list[Option]]] = []
        self._symbols: dict[Option, sympy.Symbol] = {}

    @contextmanager
    def symbolic(self, optimizer: Optimizer, groups: tuple[dict[str, Any], ...]) -> Iterator[None]:
        """Replaces an optimizer's numeric options by symbols while its step is traced.

        Args:
            groups: Its options at capture time; an option that the step has changed since then stays a constant.
        """
        tables = optimizer.param_groups
        before = [{key: value for key, value in table.items() if key != "params"} for table in tables]
        for g, (table, captured) in enumerate(zip(tables, groups, strict=True)):
            for key, value in captured.items():
                now = table.get(key, table)
                # A wrapping optimizer already installed symbols, or the step has changed the option.
                if any(isinstance(v, SymFloat) for v in (now if isinstance(now, tuple) else (now,))) or now != value:
                    continue
                parts = enumerate(value) if isinstance(value, tuple) else [(None, value)]
                numbers = {i: self._symbol(optimizer, g, key, i, v) for i, v in parts if is_number(key, v)}
                if table.get("fused"):
                    for i in numbers:
                        self._name(optimizer, g, key, i, table["params"])
                elif numbers and isinstance(value, tuple):
                    table[key] = tuple(numbers.get(i, v) for i, v in enumerate(value))
                elif numbers:
                    table[key] = numbers[None]
        try:
            yield
        finally:
            for table, values in zip(tables, before, strict=True):
                table.update(values)

    def _name(self, optimizer: Optimizer, g: int, key: str, part: int | None, params: list[Tensor]) -> None:
        """Records the graph node of a hyperparameter (lr, beta1, …) under its keyword in each fused update."""
        option, symbol, _, proxy = self._entries[id(optimizer), g, key, part]
        name = key if part is None else f"{key.removesuffix('s')}{part + 1}"
        for p in params:
            self._fused.setdefault(id(p), {})[name] = proxy.node
        if key != "lr":  # a learning rate never changes an update's form and may start at 0
            self._zeros.append(sympy.Eq(symbol, 0) if option.captured == 0 else sympy.Ne(symbol, 0))

    def connect(self, node: fx.Node, first: Any) -> None:
        """Connects the numbers of a fused update, whose first parameter is ``first``, to the options."""
        names = self._fused[id(first)]
        node.kwargs = {key: names.get(key, value) for key, value in node.kwargs.items()}

    def _symbol(self, optimizer: Optimizer, group: int, key: str, part: int | None, value: float) -> SymFloat:
        location = id(optimizer), group, key, part
        if location not in self._entries:
            option = Option(optimizer, group, key, part, value)
            source = ConstantSource(f"option{len(self._entries)}")
            symbol = self._shapes.create_unspecified_symbol(float(value), source, DimDynamic.DYNAMIC)
            number = self._shapes.create_symfloatnode(symbol, hint=float(value), source=source)
            mode = get_proxy_mode()
            assert mode is not None
            proxy = mode.tracer.create_proxy("call_function", option, (), {})
            track_tensor_tree(number, proxy, constant=None, tracer=mode.tracer)
            self._entries[location] = option, symbol, number, proxy
        return self._entries[location][2]

    def close(self, targets: set[Any]) -> None:
        """Collects conditions and options at the end of the trace.

        Args:
            targets: Targets of the graph's nodes.
        """
        by_symbol = {symbol: option for option, symbol, *_ in self._entries.values()}
        conditions = [*(guard.expr for guard in self._shapes.guards), *self._zeros]
        pairs = [(c, [by_symbol[s] for s in c.free_symbols if s in by_symbol]) for c in conditions]
        self._conditions = [(condition, involved) for condition, involved in pairs if involved]
        used = {option for _, involved in self._conditions for option in involved} | targets
        self._symbols = {option: symbol for symbol, option in by_symbol.items() if option in used}
        self.options = tuple(self._symbols)
        self._entries.clear()
        self._fused.clear()

    def first_violation(self, values: dict[Option, Any]) -> Option | None:
        """Returns the first option whose current value needs another graph, or None."""
        for option, value in values.items():
            if type(value) not in (int, float):
                return option
        substitution = {self._symbols[option]: sympy.Float(value) for option, value in values.items()}
        for condition, involved in self._conditions:
            if condition.xreplace(substitution) != sympy.true:
                return next((o for o in involved if values[o] != o.captured), involved[0])
        return None
