"""The state a training step touches, found and replaced by fake tensors for the length of a capture.

Parameters, buffers, optimizer state and any other tensor reachable from the step's Python objects become inputs of the
captured graph. Afterwards the user's objects are exactly as before: every dictionary, list or cell that was written is
restored.
"""

from __future__ import annotations

import copy
import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.amp.grad_scaler import GradScaler
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from executor.capture.optimizers import (
    STEP_HOOKS,
    capturable,
    chooses_foreach,
    moved,
    numbers_of,
    symbolic_extremes,
    takes_capturable,
    without_hooks,
)
from executor.capture.python_values import Change, Seen, Watched, is_scalar, names_of, put_back
from simulator.program import TensorKind


class CaptureError(ValueError):
    """A step cannot be captured; the message is one sentence naming the cause."""


# Wrappers of modules that communicate with other GPUs or processes, which a capture does not see.
REFUSED = {
    "DistributedDataParallel": "sums gradients across processes; train "
    "DistributedDataParallel(executor.compiled.compile(model, memory=...)), which needs no capture",
    "DataParallel": "runs the model on several GPUs; capture the module in it, on one GPU",
    "FullyShardedDataParallel": "keeps parts of the parameters on other GPUs",
    "FSDPModule": "keeps parts of the parameters on other GPUs",
}


def uses_cudnn(module: nn.RNNBase) -> bool:
    """Does cuDNN run this module?"""
    return torch.backends.cudnn.enabled and any(p.is_cuda for p in module.parameters())


class Home(NamedTuple):
    """Where the step finds a tensor: a slot of a dictionary, a list or a closure cell; or of an optimizer, then
    ``key`` is (parameter, name of its state) or (number of a parameter group, option)."""

    container: Any
    key: Any

    def get(self) -> Any:
        """What is there now; None where nothing is."""
        if isinstance(self.container, types.CellType):
            return self.container.cell_contents
        try:
            if isinstance(self.container, Optimizer):
                first, name = self.key
                table = self.container.param_groups[first] if isinstance(first, int) else self.container.state[first]
                return table.get(name)
            return self.container[self.key]
        except LookupError:
            return None


class Entry(NamedTuple):
    """One persistent tensor: a placeholder of the captured graph."""

    name: str
    kind: TensorKind
    fake: Tensor
    real: Tensor | None  # the user's tensor; None for optimizer state that does not exist yet
    home: Home | None = None  # None: the step's arguments, or a parameter that only an optimizer knows

    @property
    def owner(self) -> str:
        """The path of the module that it belongs to, of state that of its parameter; "inputs" for arguments."""
        name = self.name
        if (
            self.home is not None
            and isinstance(self.home.container, Optimizer)
            and isinstance(self.home.key[0], Tensor)
        ):
            name = name.partition(".")[2].rpartition(".")[0]
        return "inputs" if self.kind == "input" else name.rpartition(".")[0]


class StepState:
    """Everything persistent that is reachable from ``roots`` (modules, optimizers, callables, tensors).

    Reached: modules and their submodules, attributes of plain objects, lists and dictionaries, closure
    cells, bound methods, ``functools.partial``, and the globals a Python function names. Equal tensors
    (tied weights) are one entry; tensors that share a storage share it as fakes.
    """

    def __init__(self, mode: FakeTensorMode, as_capturable: bool = False) -> None:
        self.mode = mode
        self.as_capturable = as_capturable  # optimizers take their ``capturable`` form
        self.entries: list[Entry] = []
        self.modules: list[nn.Module] = []
        self.paths: dict[int, str] = {}  # id of a module -> its dotted path
        self.optimizers: list[Optimizer] = []
        self.scalers: list[GradScaler] = []
        self.schedules: list[LRScheduler] = []
        self._slots: list[tuple[Any, Any, Tensor]] = []  # container, key, fake
        self._fakes: dict[int, Tensor] = {}
        self._bases: dict[StorageWeakRef, Tensor] = {}
        self._visited: set[int] = set()
        self._keep: list[Any] = []  # an id stays unique while its object lives
        self.seen = Seen()
        self.watched: tuple[Watched, ...] = ()  # values as they are when fakes are put in
        self.written: Change | None = None  # the first of them that the step's Python changed
        self.silent: list[str] = []  # hooks that ran no operator
        self.undone: list[str] = []  # sentences: what optimizers' Python has changed
        self.ran: Callable[[], int] = int  # how many operators have run

    def add(self, value: Any, name: str, kind: TensorKind = "buffer") -> None:
        """Walks ``value``; tensors that are not parameters or registered buffers are of ``kind``."""
        self._walk(value, name, kind, 0)

    def fake(self, tensor: Tensor, name: str, kind: TensorKind, home: Home | None = None) -> Tensor:
        """The fake tensor that stands in for ``tensor``, made and listed on first sight."""
        if id(tensor) in self._fakes:
            return self._fakes[id(tensor)]
        if type(tensor).__name__ == "DTensor":
            raise CaptureError(f"{name} is a DTensor, parts of which are on other GPUs")
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            raise TypeError(f"{name} is not a dense tensor")
        device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
        storage = StorageWeakRef(tensor.untyped_storage())
        with self.mode, torch.no_grad():
            if storage not in self._bases:
                size = tensor.untyped_storage().nbytes()
                self._bases[storage] = torch.empty(size, dtype=torch.uint8, device=device)
            fake = over(self._bases[storage].untyped_storage(), tensor, device)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            elif tensor.requires_grad:
                fake.requires_grad_()
        self._hooks(tensor, fake, name)
        kind = "parameter" if isinstance(tensor, nn.Parameter) else kind
        self._fakes[id(tensor)] = fake
        self._keep.append(tensor)
        self.entries.append(Entry(name, kind, fake, tensor, home))
        return fake

    def _hooks(self, tensor: Tensor, fake: Tensor, name: str) -> None:
        """Hooks of a leaf are those of its fake, and so captured as what they do."""
        if not (tensor.is_leaf and tensor.requires_grad):
            return
        for which, register in zip(
            ("_backward_hooks", "_post_accumulate_grad_hooks"),
            (fake.register_hook, fake.register_post_accumulate_grad_hook), strict=True,
        ):  # fmt: skip
            for hook in (getattr(tensor, which, None) or {}).values():
                self._walk(hook, f"{name}.hook", "buffer", 1)
                register(self.heard(hook, f"a hook of {name}"))

    def heard(self, hook: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A hook, that is listed where it runs no operator: a graph cannot do again what it does instead."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before = self.ran()
            result = hook(*args, **kwargs)
            if self.ran() == before and (result is None or any(result is arg for arg in args)):
                self.silent.append(f"{name} ({getattr(hook, '__qualname__', type(hook).__name__)})")
            return result

        return call

    def _walk(self, value: Any, name: str, kind: TensorKind, depth: int) -> None:
        if id(value) in self._visited or depth > 12 or isinstance(value, _OPAQUE):
            return
        self._visited.add(id(value))
        self._keep.append(value)
        step = functools.partial(self._walk, kind=kind, depth=depth + 1)
        if isinstance(value, nn.Module):
            for prefix, module in value.named_modules(prefix=name):
                self._module(module, prefix, depth)
        elif isinstance(value, Optimizer) and "param_groups" not in vars(value):  # Accelerate's, around another
            inner = [part for part in vars(value).values() if isinstance(part, (Optimizer, GradScaler))]
            if not any(isinstance(part, Optimizer) for part in inner):
                raise CaptureError(f"{name} ({type(value).__name__}) has no parameter groups: give torch.optim's own")
            for part in inner:
                step(part, name)
        elif isinstance(value, Optimizer):
            closure = signature(type(value).step).parameters.get("closure")
            if closure is not None and closure.default is Parameter.empty:
                raise CaptureError(
                    f"{name} ({type(value).__name__}) calls the model as often as its values ask, which no capture "
                    "can: train with it without a plan, or take another optimizer"
                )
            self.optimizers.append(value)
            for hook in (*value._optimizer_step_pre_hooks.values(), *value._optimizer_step_post_hooks.values()):
                self._walk(hook, f"{name}.hook", kind, depth + 1)
        elif isinstance(value, GradScaler):
            if value.is_enabled() and value._scale is None:  # its first use would make them
                value._lazy_init_scale_growth_tracker(torch.device(value._device))
            self.scalers.append(value)
            self._items(vars(value), [(k, k) for k in ("_scale", "_growth_tracker") if k in vars(value)], name, kind,
                        depth)  # fmt: skip
        elif isinstance(value, dict):
            self.seen.containers.append((value, name))
            self._items(value, [(k, k if isinstance(k, str) else repr(k)) for k in value], name, kind, depth)
        elif isinstance(value, list):
            self.seen.containers.append((value, name))
            self._items(value, [(i, str(i)) for i in range(len(value))], name, kind, depth)
        elif isinstance(value, (tuple, set, frozenset)):
            for i, entry in enumerate(value):
                step(entry, f"{name}.{i}")
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                step(part, name)
        elif isinstance(value, types.MethodType):
            step(value.__self__, name)
            step(value.__func__, name)
            self.seen.runs(value.__func__, type(value.__self__))
        elif isinstance(value, types.FunctionType):
            self._function(value, name, kind, depth)
        elif hasattr(value, "__dict__"):
            if isinstance(value, LRScheduler):
                self.schedules.append(value)
            if callable(value):
                self.seen.runs(type(value).__call__, type(value))
            step(vars(value), name)

    def _items(self, container: Any, keys: list[tuple[Any, str]], name: str, kind: TensorKind, depth: int) -> None:
        for key, label in keys:
            value = container[key]
            if isinstance(value, Tensor):
                home = Home(container, key)
                self._slots.append((container, key, self.fake(value, f"{name}.{label}".lstrip("."), kind, home)))
            else:
                self._walk(value, f"{name}.{label}".lstrip("."), kind, depth + 1)

    def _module(self, module: nn.Module, name: str, depth: int) -> None:
        for cls in type(module).__mro__:
            if cls.__name__ in REFUSED and cls.__module__.startswith("torch."):
                raise CaptureError(f"{name or 'the model'} is a {cls.__name__}, which {REFUSED[cls.__name__]}")
        if isinstance(module, nn.RNNBase) and module.dropout and module.training and uses_cudnn(module):
            what = f"{name or 'the model'} is a {type(module).__name__} with dropout, whose state cuDNN makes"
            raise CaptureError(f"{what} on the host: stack layers with nn.Dropout between them, or turn cuDNN off")
        if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
            way = "give its _orig_mod" if hasattr(module, "_orig_mod") else "leave out its compile()"
            what = f"{name or 'the model'} is compiled (torch.compile), and only what is not can be captured"
            raise CaptureError(f"{what}: {way}")
        self._visited.add(id(module))
        self.modules.append(module)
        self.paths[id(module)] = name
        self.seen.containers.append((vars(module), name))
        self.seen.runs(type(module).forward, type(module))
        for table in (module._parameters, module._buffers):
            self._items(table, [(k, k) for k, v in table.items() if v is not None], name, "buffer", depth)
        own = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules")}
        plain = [(k, k) for k, v in own.items() if not k.startswith("_") or isinstance(v, (Tensor, list))]
        self._items(vars(module), plain, name, "buffer", depth)

    def _function(self, function: types.FunctionType, name: str, kind: TensorKind, depth: int) -> None:
        if (function.__module__ or "").partition(".")[0] in ("torch", "builtins"):
            return
        self.seen.runs(function)
        self.seen.functions.append((function, name))
        for label, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if is_scalar(value):
                self.seen.cells.append((cell, label))
            elif isinstance(value, Tensor):
                self._slots.append((cell, None, self.fake(value, label, kind, Home(cell, None))))
            else:
                self._walk(value, label, kind, depth + 1)
        self._walk(function.__defaults__, name, kind, depth + 1)
        self._walk(function.__kwdefaults__, name, kind, depth + 1)
        named = [n for n in names_of(function.__code__) if n in function.__globals__]
        self._items(function.__globals__, [(n, n) for n in named], "", kind, depth)
        self.seen.globals.setdefault(id(function.__globals__), (function.__globals__, set()))[1].update(named)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Fakes in place of the user's tensors; on leaving, every object is as it was."""
        undo: list[Callable[[], None]] = []
        self.watched = self.seen.watched()
        try:
            for module in self.modules:  # a forward pass may set attributes, rebind buffers, add hooks
                undo.append(_restorer(vars(module)))
                hooks = (table for name, table in vars(module).items() if "_hooks" in name and isinstance(table, dict))
                undo += [_restorer(t) for t in (module._parameters, module._buffers, module._modules, *hooks)]
            for container, key, fake in self._slots:
                undo.append(_put(container, key, fake))
            undo += [_restorer(vars(one)) for one in (*self.scalers, *self.schedules)]
            for scaler in self.scalers:
                scaler._per_optimizer_states = copy.copy(scaler._per_optimizer_states)
            for i, optimizer in enumerate(self.optimizers):
                undo.append(_restorer(vars(optimizer)))
                self._install_optimizer(optimizer, "optimizer" if i == 0 else f"optimizer{i}")
            before = [numbers_of(optimizer) for optimizer in self.optimizers]
            yield
            for optimizer, was in zip(self.optimizers, before, strict=True):
                if (key := moved(was, optimizer)) is not None:
                    self.undone.append(
                        f"the step changes {key[-1]} of {type(optimizer).__name__}, which would not be done again: "
                        "call schedules after the step"
                    )
        finally:
            self.watched, self.written = put_back(self.watched)
            for action in reversed(undo):
                action()

    def _install_optimizer(self, optimizer: Optimizer, prefix: str) -> None:
        """Swaps in fake parameters and state, and creates the state its first step would create.

        Updates take the form (``foreach``, ``fused`` or one by one) that the real parameters would give them. The step
        count of Adam and its kin is read as a number that is not known (a SymFloat), so that the arithmetic
        of the bias correction becomes part of the graph, as eager PyTorch does it on the host.
        """
        groups, fresh = [], []
        options = {"capturable": True} if self.as_capturable else {}
        for g, group in enumerate(optimizer.param_groups):
            swapped = dict(group, params=[self.fake(p, f"{prefix}.param", "parameter") for p in group["params"]])
            swapped.update({k: v for k, v in options.items() if k in swapped})
            if swapped.get("foreach", 0) is None and not swapped.get("fused"):  # what fakes would not choose
                swapped["foreach"] = chooses_foreach(group)
            for option, value in group.items():  # a learning rate that is a tensor
                if isinstance(value, Tensor):
                    swapped[option] = self.fake(value, f"{prefix}.{option}", "optimizer_state",
                                                Home(optimizer, (g, option)))  # fmt: skip
            groups.append(swapped)
        names = {id(e.fake): e.name for e in self.entries}
        state: defaultdict[Any, Any] = defaultdict(dict)
        for param, values in optimizer.state.items():
            if isinstance(param, Tensor):
                key = self.fake(param, f"{prefix}.param", "parameter")
                state[key] = dict(values)
                label = f"{prefix}.{names.get(id(key), 'param')}"
                for k, value in state[key].items():
                    if isinstance(value, Tensor):
                        home = Home(optimizer, (param, k))
                        state[key][k] = self.fake(value, f"{label}.{k}", "optimizer_state", home)
                    else:
                        self._walk(value, f"{label}.{k}", "optimizer_state", 1)
            else:
                state[param] = values
        optimizer_groups = optimizer.param_groups
        optimizer.param_groups, optimizer.state = groups, state
        # One untraced step with gradients of no content: creates momentum and the like, as fakes.
        reals = {}
        assert self.mode.shape_env is not None
        with self.mode, self.mode.shape_env.ignore_fresh_unbacked_symbols():
            for group, own in zip(groups, optimizer_groups, strict=True):
                for param, real in zip(group["params"], own["params"], strict=True):
                    reals[id(param)] = real
                    if param.requires_grad:
                        param.grad = torch.empty_like(param)
                        fresh.append(param)
            steps = {id(p): dict(s) for p, s in state.items() if isinstance(p, Tensor)}
            with capturable(takes_capturable(optimizer)), without_hooks(optimizer), symbolic_extremes():
                type(optimizer).step(optimizer)
        for which in STEP_HOOKS:
            hooks = {
                k: self.heard(hook, f"a step hook of the {prefix}") for k, hook in getattr(optimizer, which).items()
            }
            setattr(optimizer, which, OrderedDict(hooks))
        # Should the setting above be lost: a context that an interrupted capture left open may end at any time.
        self.mode.shape_env.pending_fresh_unbacked_symbols.clear()
        for param in fresh:
            param.grad = None
        for param in fresh:
            label = f"{prefix}.{names.get(id(param), 'param')}"
            known = steps.get(id(param), {})
            for k, value in state[param].items():
                if isinstance(value, Tensor) and value is not known.get(k):
                    home = Home(optimizer, (reals[id(param)], k))
                    self.entries.append(Entry(f"{label}.{k}", "optimizer_state", value, None, home))
        for entry in self.entries:  # a count of 1 after that step, or a number read in it, is no constant
            entry.fake.constant = entry.fake.item_memo = None  # type: ignore[attr-defined]


_OPAQUE = (Tensor, types.ModuleType, type, str, bytes, int, float, complex, type(None), torch.dtype, torch.device,
           torch.Generator, types.BuiltinFunctionType, types.CodeType)  # fmt: skip


def _restorer(table: dict[Any, Any]) -> Callable[[], None]:
    before = dict(table)

    def restore() -> None:
        table.clear()
        table.update(before)

    return restore


def _put(container: Any, key: Any, value: Any) -> Callable[[], None]:
    """Writes one slot; returns what writes the old value back."""
    if isinstance(container, types.CellType):
        before = container.cell_contents
        container.cell_contents = value
        return functools.partial(setattr, container, "cell_contents", before)
    before = container[key]
    container[key] = value
    return functools.partial(container.__setitem__, key, before)


def over(memory: torch.UntypedStorage, like: Tensor, device: torch.device) -> Tensor:
    """A tensor over ``memory``, of ``device`` (a fake one's own is meta), with the dtype, offset, shape and strides of
    another."""
    empty = torch.empty(0, dtype=like.dtype, device=device)
    return empty.set_(memory, like.storage_offset(), like.size(), like.stride())  # type: ignore[call-overload,no-any-return]
