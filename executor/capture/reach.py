"""Walks the Python objects that a training step can reach, and restores what they held.

``Reach`` follows attributes, containers, closure cells, bound methods and the globals that the step's functions load.
It gives every tensor a path ("model.memory.hidden") and records every mutable object (``Owner``). ``Snapshot`` saves
and restores their content. The capture (state.py) uses it to remove its fake tensors, and the differential check
(training/check.py) to compare the effects of two runs of a step.
"""

from __future__ import annotations

import copy
import functools
import logging
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Iterator
from inspect import Parameter, signature
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from executor.capture.operators import is_user_file
from executor.capture.python_values import (
    CELL,
    ClassAttributes,
    Code,
    Everything,
    Owner,
    Slots,
    Watched,
    globals_of,
    identity,
    is_scalar,
    names_of,
    parts_of,
)
from simulator.program import TensorKind

_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_OPAQUE = (
    Tensor,
    type,
    str,
    bytes,
    int,
    float,
    complex,
    type(None),
    torch.dtype,
    torch.device,
    types.CodeType,
    logging.Logger,
    torch.UntypedStorage,
    torch._ops.OperatorBase,
    torch._ops.OpOverloadPacket,
)


FUNCTION = "__code__", "__defaults__", "__kwdefaults__"  # attributes of a function that decide what it does


class CaptureError(ValueError):
    """Raised if a step cannot be captured; the message is one sentence naming the cause."""


# Wrappers of modules that communicate with other GPUs or processes, which a capture does not see.
_COMPILE = "executor.compiled.compile(model, memory=...), which needs no capture"
REFUSED = {
    "DistributedDataParallel": f"sums gradients across processes; train DistributedDataParallel({_COMPILE})",
    "DataParallel": f"runs the model on several GPUs; capture the module in it on one GPU, or take {_COMPILE}",
    "FullyShardedDataParallel": f"keeps parts of the parameters on other GPUs; take {_COMPILE}",
    "FSDPModule": f"keeps parts of the parameters on other GPUs; take {_COMPILE}",
    "DeepSpeedEngine": f"keeps parts of the parameters elsewhere; take {_COMPILE}",
    "_FabricModule": f"runs in Lightning's Fabric; capture the module in it, or take {_COMPILE}",
}


class StepIterator(NamedTuple):
    """A Python iterator from which the step may take values."""

    container: Any
    key: Any
    iterator: Iterator[Any]
    path: str

    def position(self) -> Any:
        """Returns the iterator's position, which changes when an element is consumed; None if it cannot be read."""
        if isinstance(self.iterator, types.GeneratorType):
            frame = self.iterator.gi_frame
            return None if frame is None else (frame.f_lasti, frame.f_lineno)
        return repr(self.iterator.__reduce__()) if hasattr(self.iterator, "__setstate__") else None

    def replace_by_copy(self) -> StepIterator:
        """Replaces the iterator by a copy, if it can be copied, so that the user's iterator does not advance."""
        if isinstance(self.iterator, types.GeneratorType) or not hasattr(self.iterator, "__setstate__"):
            return self
        iterator_copy = copy.copy(self.iterator)
        self.container[self.key] = iterator_copy
        return self._replace(iterator=iterator_copy)


class Snapshot:
    """Contents of all reached objects and states of the random generators."""

    def __init__(self, reach: Reach) -> None:
        self._saved = [(owner, owner.content()) for owner in reach.owners.values()]
        self._generators = [(generator, generator.get_state()) for generator in reach.generators]

    def restore(self) -> None:
        """Restores every object, even if some fail.

        Raises:
            CaptureError: If some objects could not be restored; the message names them.
        """
        failed: list[str] = []
        restore = [(owner.path, owner.restore, before) for owner, before in reversed(self._saved)]
        restore += [("a torch.Generator", generator.set_state, before) for generator, before in self._generators]
        for name, function, before in restore:
            try:
                function(before)
            except Exception as error:
                failed.append(f"{name or 'an object of the step'} ({type(error).__name__}: {error})")
        if failed:
            raise CaptureError(f"{', '.join(failed)} could not be restored after a trial of the step: create it again")


class Reach:
    """All objects that are reachable from the added ones.

    Attributes:
        modules, optimizers, generators, iterators: Objects in discovery order, each once.
        scalers: Enabled GradScalers, likewise.
        paths: Path of each module, by id.
        owners: Mutable objects, by id.
        code: Code that the step may execute.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.paths: dict[int, str] = {}
        self.optimizers: list[Optimizer] = []
        self.scalers: list[GradScaler] = []
        self.generators: list[torch.Generator] = []
        self.iterators: list[StepIterator] = []
        self.owners: dict[int, Owner] = {}
        self.code = Code()
        self._compared: list[Owner] = []  # objects that a step does not change
        self._libraries: dict[int, Owner] = {}  # PyTorch's modules, with the names that the step's code uses
        self._references: dict[
            int, list[tuple[int, Any]]
        ] = {}  # id of an object -> containers and keys that refer to it
        self._is_read: dict[int, bool] = {}
        self._visited: set[int] = set()
        self._kept_alive: list[Any] = []  # an id stays unique while its object lives

    def on_tensor(self, value: Any, name: str, kind: TensorKind, container: Any, key: Any) -> None:
        """Handles a tensor or a tuple of some (an LSTM's state) at ``container[key]``; subclasses override it."""

    def add(self, value: Any, name: str) -> None:
        """Walks ``value``."""
        self._refer(value, self)
        self._walk(value, name, "buffer", 0)
        while functions := self.code.new_functions():  # methods that the step may call by name
            for function in functions:
                self._refer(function, self)
                self._walk(function, "", "buffer", 1)

    def register(self, container: Any, path: str, keys: tuple[str, ...] | None = None, constant: bool = False) -> Any:
        """Records a mutable object and returns its container, which is the same for all views of one object."""
        owner_id = identity(container)
        existing = self.owners.get(owner_id)
        if existing is not None:
            merged = None if keys is None or existing.keys is None else tuple(dict.fromkeys((*existing.keys, *keys)))
            self.owners[owner_id] = existing._replace(keys=merged, constant=constant or existing.constant)
        else:
            self.owners[owner_id] = Owner(container, path, keys, constant)
            self._kept_alive.append(container)
        return self.owners[owner_id].container

    def constants(self) -> tuple[Watched, ...]:
        """Returns the constants and references that the step may read, as they are now."""
        self._is_read.clear()
        read = [owner for owner in self.owners.values() if owner.constant]
        watched = [found for owner in (*read, *self._compared) for found in self._watch(owner)]
        for owner in self._libraries.values():
            keys = owner._replace(keys=tuple(k for k in owner.content() if callable(owner.container[k])))
            watched.append(Watched(keys, keys.content(), owner.keys or ()))
        for cls in self.code.classes:
            is_own = is_user_file(_file(cls))
            owner = Owner(ClassAttributes(cls), cls.__name__)
            before = {k: v for k, v in owner.content().items() if self._may_use(k, v, is_own)}
            ignored = frozenset(vars(cls).keys() - before.keys())
            watched.append(Watched(owner._replace(keys=tuple(before)), before, self.code.names, ignored))
        return tuple(watched)

    def _may_use(self, name: str, value: Any, is_own: bool) -> bool:
        """Returns whether the step may use an attribute of a class, such as a special method that an operator calls."""
        if name in self.code.names:
            return is_own or is_code(value)
        return is_own and name.startswith("__") and isinstance(value, types.FunctionType)

    def _watch(self, owner: Owner) -> list[Watched]:
        """Returns the entries of an object that the step may read."""
        content = owner.content()
        is_read = self._reads(identity(owner.container))
        if isinstance(owner.container, (list, deque, set)):
            is_constant = isinstance(owner.container, list) and all(map(is_scalar, content.values()))
            return [Watched(owner, content)] if len(content) <= 64 and (is_read or is_constant) else []
        names: Container[Any] = self.code.names if owner.keys is None else frozenset(owner.keys)
        if owner.keys is None and is_read and self._is_iterated(identity(owner.container)):
            names = Everything()
        is_whole = isinstance(names, Everything)
        before = {
            key: value
            for key, value in content.items()
            if (key in names or not isinstance(key, str))
            and (is_scalar(value) or (is_read and (is_whole or is_reference(value))))
        }
        if not (before or is_read):
            return []
        ignored = frozenset(key for key in content if key not in before)
        return [Watched(owner._replace(keys=tuple(before)), before, names if is_read else (), ignored)]

    def _reads(self, object_id: int) -> bool:
        """Returns whether the step's code names a path to an object."""
        if object_id not in self._is_read:
            self._is_read[object_id] = False  # of a cycle
            references = self._references.get(object_id)
            self._is_read[object_id] = references is None or any(
                self._reads(parent) and self._names(parent, key) for parent, key in references
            )
        return self._is_read[object_id]

    def _names(self, parent: int, key: Any) -> bool:
        has_keys = parent in self.owners and self.owners[parent].keys is not None  # globals and cells
        return has_keys or not isinstance(key, str) or key in self.code.names or self._is_iterated(parent)

    def _is_iterated(self, object_id: int) -> bool:
        return any(key in self.code.iterated for _, key in self._references.get(object_id, ()) if isinstance(key, str))

    def _refer(self, value: Any, container: Any, key: Any = None) -> None:
        self._references.setdefault(id(value), []).append((identity(container), key))

    def _walk(self, value: Any, name: str, kind: TensorKind, depth: int) -> None:
        if isinstance(value, type) and _is_uninstalled(_file(value)):  # a namespace, or a class of local objects
            self.code.add_class(value)
            self._class(value, kind, depth)
        if id(value) in self._visited or depth > 40 or isinstance(value, _OPAQUE):
            return
        self._visited.add(id(value))
        self._kept_alive.append(value)
        walk_part = functools.partial(self._walk, kind=kind, depth=depth + 1)
        if isinstance(value, nn.Module):
            for prefix, module in value.named_modules(prefix=name):
                self._module(module, prefix, depth)
        elif isinstance(value, Optimizer):
            self._optimizer(value, name, depth)
        elif isinstance(value, GradScaler):
            if not value.is_enabled():  # has no state, and its methods do nothing
                self.register(vars(value), name, ("_enabled",), constant=True)
                return
            if value._scale is None:  # its first use would create them
                value._lazy_init_scale_growth_tracker(torch.device(value._device))
            self.scalers.append(value)
            self.register(vars(value), name)
            self._items(vars(value), [k for k in ("_scale", "_growth_tracker") if k in vars(value)], name, kind, depth)
        elif isinstance(value, torch.Generator):
            self.generators.append(value)
        elif isinstance(value, (list, deque)) or is_table(value):
            self.register(value, name, constant=True)
            keys = list(value) if isinstance(value, dict) else range(len(value))
            self._items(value, keys, name, kind, depth)
        elif isinstance(value, (set, frozenset)):
            if isinstance(value, set):
                self.register(value, name, constant=True)
            for i, entry in enumerate(value):
                self._refer(entry, value)
                walk_part(entry, f"{name}.{i}".lstrip("."))
        elif (parts := parts_of(value)) is not None:
            for i, part in enumerate(parts):
                self._refer(part, value)
                walk_part(part, f"{name}.{i}".lstrip(".") if isinstance(value, tuple) else name)
        elif isinstance(value, types.FunctionType):
            self._function(value, name, kind, depth)
        elif isinstance(value, types.ModuleType):
            return
        elif hasattr(value, "__dict__") or hasattr(value, "__slots__"):
            self._object(value, name, kind, depth)

    def _object(self, value: Any, name: str, kind: TensorKind, depth: int) -> None:
        if type(value).__module__.startswith(("executor.training.", "executor.fit")):
            return  # a planned step, which the user's object may hold, is no part of the step that it runs
        if type(value).__module__.startswith("executor."):  # private attributes of this package are not state
            self._items(vars(value), [k for k in vars(value) if not k.startswith("_")], name, kind, depth)
            return
        if callable(value):
            self.code.add_function(type(value).__call__)
        self.code.add_class(type(value))
        self._compared.append(Owner(Slots(value, "__class__"), name, ("__class__",)))
        if hasattr(value, "__dict__"):
            self._refer(vars(value), value)
            self._walk(vars(value), name, kind, depth + 1)
        if len(slots := Slots(value)):
            self._kept_alive.append(slots)
            self.register(slots, name, constant=True)
            self._items(slots, list(slots), name, kind, depth)
        self._class(type(value), kind, depth)

    def _class(self, cls: type, kind: TensorKind, depth: int) -> None:
        """Walks objects that are attributes of a user's class."""
        for base in cls.__mro__:
            if id(base) not in self._visited and is_user_file(_file(base)):
                self._visited.add(id(base))
                self.register(ClassAttributes(base), base.__name__)
                for key, value in vars(base).items():
                    if not (key.startswith("__") or is_code(value)):
                        self._refer(value, base, key)
                        self._walk(value, f"{base.__name__}.{key}", kind, depth + 1)

    def _items(self, container: Any, keys: Iterable[Any], name: str, kind: TensorKind, depth: int) -> None:
        for key in keys:
            value = container[key]
            label = key if isinstance(key, (str, int)) else repr(key) if not isinstance(key, Tensor) else "tensor"
            path = f"{name}.{label}".lstrip(".")
            self._entry(value, path, kind, container, key, depth)

    def _entry(self, value: Any, path: str, kind: TensorKind, container: Any, key: Any, depth: int) -> None:
        if any(isinstance(part, Tensor) for part in (value if isinstance(value, tuple) else (value,))):
            self.on_tensor(value, path, kind, container, key)
        elif isinstance(value, Iterator):
            self.iterators.append(StepIterator(container, key, value, path))
        else:
            self._refer(value, container, path if key == CELL else key)
            self._walk(value, path, kind, depth + 1)

    def _optimizer(self, optimizer: Optimizer, name: str, depth: int) -> None:
        """Walks the optimizers and tensors that an optimizer holds, then records the optimizer itself."""
        fields = {k: v for k, v in vars(optimizer).items() if k not in ("param_groups", "state", "defaults")}
        if "param_groups" not in vars(optimizer):  # Accelerate's wrapper of another optimizer
            inner = [part for part in fields.values() if isinstance(part, (Optimizer, GradScaler))]
            if depth == 0 and not any(isinstance(part, Optimizer) for part in inner):
                raise CaptureError(
                    f"{name} ({type(optimizer).__name__}) has no parameter groups: give torch.optim's own"
                )
            for part in inner:
                self._walk(part, name, "optimizer_state", depth + 1)
            return
        closure = signature(type(optimizer).step).parameters.get("closure")
        if closure is not None and closure.default is Parameter.empty:
            raise CaptureError(
                f"{name} ({type(optimizer).__name__}) calls the model a data-dependent number of times, which cannot "
                "be captured: train with it without a plan, or use another optimizer"
            )
        self._items(vars(optimizer), [k for k, v in fields.items() if not is_scalar(v)], name, "optimizer_state", depth)
        self.code.add_class(type(optimizer))
        self._class(type(optimizer), "optimizer_state", depth)
        self.register(vars(optimizer), name)
        self.register(optimizer.state, f"{name}.state")
        self.register(optimizer.param_groups, f"{name}.param_groups")
        for group in optimizer.param_groups:
            self.register(group, f"{name}.param_groups")
        for i, table in enumerate(optimizer.state.values()):
            path = f"{name}.state.{i}"
            if isinstance(table, dict):
                self.register(table, path)
                for key, value in table.items():  # state.py handles lists and tables of tensors
                    if isinstance(value, (dict, list)):
                        self.register(value, f"{path}.{key}")
                    else:
                        self._walk(value, f"{path}.{key}", "optimizer_state", depth + 1)
        self.optimizers.append(optimizer)

    def _module(self, module: nn.Module, name: str, depth: int) -> None:
        for cls in type(module).__mro__:
            if cls.__name__ in REFUSED and cls.__module__.partition(".")[0] in ("torch", "deepspeed", "lightning"):
                raise CaptureError(f"{name or 'the model'} is a {cls.__name__}, which {REFUSED[cls.__name__]}")
            if cls.__name__ == "LightningModule" and getattr(module, "_trainer", None) is not None:
                raise CaptureError(f"{name or 'the model'} is trained by Lightning's Trainer: give that {_COMPILE}")
        if isinstance(module, torch.jit.ScriptModule):
            subject = f"{name or 'the model'} is a scripted or traced module (torch.jit), which cannot be captured"
            raise CaptureError(f"{subject}: give the module that was scripted")
        if isinstance(module, nn.RNNBase) and module.dropout and module.training and uses_cudnn(module):
            subject = f"{name or 'the model'} is a {type(module).__name__} with dropout, whose state cuDNN makes"
            raise CaptureError(f"{subject} on the host: stack layers with nn.Dropout between them, or turn cuDNN off")
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            advice = "give its _orig_mod" if hasattr(module, "_orig_mod") else "leave out its compile()"
            subject = f"{name or 'the model'} is compiled (torch.compile), which cannot be captured"
            raise CaptureError(f"{subject}: {advice}")
        self._visited.add(id(module))
        self._kept_alive.append(module)
        self.modules.append(module)
        self.paths[id(module)] = name
        namespace = vars(module)
        self.code.names.add("forward")
        self.code.add_function(type(module).forward)
        self.code.add_class(type(module))
        self.register(namespace, name, constant=True)
        self._compared.append(Owner(Slots(module, "__class__"), name, ("__class__",)))
        for table in (module._parameters, module._buffers):
            self.register(table, name, constant=True)
            self._items(table, [k for k, v in table.items() if v is not None], name, "buffer", depth)
        self.register(module._modules, name)
        for key, hooks in namespace.items():  # a forward pass may add some
            if "_hooks" in key and isinstance(hooks, (dict, OrderedDict)):
                self.register(hooks, f"{name}.{key}".lstrip("."))
                self._items(hooks, list(hooks), f"{name}.{key}", "buffer", depth)
        is_wrapper = type(module).__module__.startswith("executor.")  # a wrapper: its private attributes are not state
        attributes = [k for k in namespace if k not in _MODULE_ATTRIBUTES and not (is_wrapper and k.startswith("_"))]
        self._items(namespace, attributes, name, "buffer", depth)
        self._class(type(module), "buffer", depth)

    def _function(self, function: types.FunctionType, name: str, kind: TensorKind, depth: int) -> None:
        if (function.__module__ or "").partition(".")[0] in ("torch", "builtins", "executor"):
            return
        self.code.add_function(function)
        is_own = _is_uninstalled(function.__code__.co_filename)  # installed functions are exchanged, but not edited
        attributes = tuple(key for key in FUNCTION if is_own or (key != "__code__" and getattr(function, key)))
        if attributes:
            self._compared.append(Owner(Slots(function, *attributes), name or function.__name__, attributes))
        if defaults := function.__kwdefaults__:
            self._compared.append(Owner(defaults, name, tuple(defaults)))
        for label, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            slot = self.register(Slots(cell, CELL), label, (CELL,), constant=True)
            for value in slot.values():  # none if it is not assigned yet
                self._entry(value, label, kind, slot, CELL, depth)
        for part in (function.__defaults__, function.__kwdefaults__, vars(function) or None):
            self._refer(part, function)
            self._walk(part, name, kind, depth + 1)
        global_names = globals_of(function.__code__)
        self._globals(function.__globals__, global_names, kind, depth)
        for library in {n for n in global_names if isinstance(function.__globals__.get(n), types.ModuleType)}:
            module = function.__globals__[library]
            if is_user_file(getattr(module, "__file__", None) or "<built-in>"):
                self._globals(vars(module), names_of(function.__code__), kind, depth)
            else:
                self._library(module, names_of(function.__code__))

    def _library(self, module: types.ModuleType, names: set[str]) -> None:
        """Records the functions of a library's module that the step's code names."""
        known = self._libraries.get(id(module), Owner(vars(module), module.__name__, ()))
        used = {name for name in names & vars(module).keys()} - set(known.keys or ())
        self._libraries[id(module)] = known._replace(keys=(*(known.keys or ()), *sorted(used)))
        for name in used:
            if isinstance(part := vars(module)[name], types.ModuleType):
                self._library(part, names)

    def _globals(
        self, table: dict[str, Any], global_names: set[str] | frozenset[str], kind: TensorKind, depth: int
    ) -> None:
        self.register(table, "", tuple(sorted(global_names)), constant=True)
        self._items(table, [n for n in sorted(global_names) if n in table], "", kind, depth)


def is_table(value: Any) -> bool:
    """Returns whether the value is a dictionary with plain lookups (transformers' lazy dictionaries import on them)."""
    kind = type(value)
    is_plain = isinstance(value, dict) and kind.__iter__ in (dict.__iter__, OrderedDict.__iter__)
    is_own = kind.__module__.startswith("executor.") and isinstance(value, dict)
    return (is_plain and kind.__getitem__ is dict.__getitem__) or is_own


def is_code(value: Any) -> bool:
    """Returns whether an attribute of a class is a method, or another descriptor."""
    return isinstance(value, (types.FunctionType, staticmethod, classmethod)) or hasattr(value, "__get__")


def is_reference(value: Any) -> bool:
    """Returns whether the object that an entry refers to is compared, not only as a tensor or when iterated."""
    parts = value if isinstance(value, tuple) else (value,)
    return not any(isinstance(part, (Tensor, Iterator)) for part in parts)


def check_dense(tensor: Tensor, name: str) -> None:
    """Raises CaptureError if the tensor is sparse, nested, quantized or uninitialized."""
    if is_lazy(tensor):
        raise CaptureError(
            f"{name} is uninitialized (a lazy module), so its size is unknown: call the model once on a batch before"
        )
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        layout = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else "sparse"
        raise CaptureError(
            f"{name} is a {layout} tensor, whose size a plan cannot know: pass its indices and values as dense tensors "
            "(index_add, scatter, edge_index), or to_dense()"
        )


def check_constant(value: Any, i: int) -> None:
    """Raises CaptureError if argument ``i`` of a step is an array of NumPy, which would be a constant of the graph."""
    if isinstance(value, np.ndarray):
        raise CaptureError(
            f"argument {i} of the step is a NumPy array, whose values a graph cannot follow: pass torch.from_numpy(…) "
            "of it, and use it as a tensor in the step"
        )


def uses_cudnn(module: nn.RNNBase) -> bool:
    """Returns whether cuDNN executes this module."""
    return torch.backends.cudnn.enabled and any(p.is_cuda for p in module.parameters())


def _is_uninstalled(file: str) -> bool:
    return is_user_file(file) and not any(part in file for part in ("site-packages", "dist-packages"))


@functools.cache
def _file(cls: type) -> str:
    return getattr(sys.modules.get(cls.__module__), "__file__", None) or "<built-in>"
