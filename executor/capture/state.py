"""Finds the tensors that a training step can reach and replaces them with fake tensors during a capture.

Parameters, buffers, optimizer state and any other tensor reachable from the step's Python objects become inputs of the
captured graph. After the capture every dictionary, list and closure cell that was written is restored.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._pytree import MappingKey, tree_leaves_with_path, tree_map_with_path, tree_unflatten

from executor.capture.batches import flatten, tensors_in
from executor.capture.effects import Effects
from executor.capture.hooks import STEP_HOOKS, TENSOR_HOOKS, Hooks, hook_name
from executor.capture.optimizers import changed_number, chooses_foreach, numbers_of, step_without_hooks
from executor.capture.python_values import Change, Owner, Watched, compare_constants
from executor.capture.reach import CaptureError, Reach, Snapshot, check_dense
from simulator.program import TensorKind


class Home(NamedTuple):
    """Slot that binds a tensor: an entry of a dictionary, of a list, or of a view of slots or of a closure cell.

    For an optimizer, ``key`` is (index of a parameter group, option), or (parameter, name of its state, …) followed by
    the path inside a list or dictionary.
    """

    container: Any
    key: Any
    part: int | None = None  # position in a tuple

    def get(self) -> Any:
        """Returns the tensor currently bound to this slot, or None."""
        if self.part is not None:
            values = self._replace(part=None).get()
            return values[self.part] if isinstance(values, tuple) and len(values) > self.part else None
        try:
            if isinstance(self.container, Optimizer):
                first, *path = self.key
                table = self.container.param_groups[first] if isinstance(first, int) else self.container.state[first]
                return functools.reduce(getitem, path, table)
            return self.container[self.key]
        except LookupError:
            return None

    def set(self, value: Tensor) -> None:
        """Binds a tensor to this slot."""
        if self.part is not None:
            values = self._replace(part=None).get()
            value = _as_tuple(values, (value if i == self.part else x for i, x in enumerate(values)))
        if isinstance(self.container, Optimizer):
            first, *path, last = self.key
            functools.reduce(getitem, path, self.container.state[first])[last] = value
        else:
            self.container[self.key] = value


def _as_tuple(original: tuple[Any, ...], parts: Iterable[Any]) -> Any:
    """Returns a tuple of the same type, which may be named, with other parts."""
    return type(original)(*parts) if hasattr(original, "_fields") else tuple(parts)


class Entry(NamedTuple):
    """One persistent tensor, a placeholder of the captured graph."""

    name: str
    kind: TensorKind
    fake: Tensor
    real: Tensor | None  # the user's tensor; None for optimizer state that does not exist yet
    home: Home | None = None  # None: argument of the step, or parameter that only an optimizer holds
    registered: bool = True  # held by a module, an optimizer or the arguments: in memory even if the step ignores it

    @property
    def owner(self) -> str:
        """Path of its module (for optimizer state, the module of its parameter); "inputs" for arguments."""
        name = self.name
        if (
            self.home is not None
            and isinstance(self.home.container, Optimizer)
            and isinstance(self.home.key[0], Tensor)
        ):
            name = name.partition(".")[2].rpartition(".")[0]
        return "inputs" if self.kind == "input" else name.rpartition(".")[0]


class StepState(Reach):
    """Persistent tensors that are reachable from the added objects, and the fake tensors that replace them.

    A tensor that is bound twice (tied weights) is one entry. Tensors that share a storage share it as fakes.
    """

    def __init__(self, mode: FakeTensorMode, as_capturable: bool = False, as_cuda: bool = False) -> None:
        super().__init__()
        self.mode = mode
        self.as_capturable = as_capturable  # use the ``capturable`` form of optimizers
        self.as_cuda = as_cuda  # use the form that optimizers have on a GPU
        self.starting: set[int] = set()  # ids of optimizers whose first step is captured; it creates their state
        self.entries: list[Entry] = []
        self._slots: list[tuple[Any, Any, Any]] = []  # container, key, fake tensor or tuple of them
        self._placed: set[tuple[int, Any]] = set()
        self._fakes: dict[int, Tensor] = {}
        self._bases: dict[StorageWeakRef, Tensor] = {}
        self.watched: tuple[Watched, ...] = ()  # Python constants when the fakes are installed
        self.written: Change | None = None  # first constant that the step changes in every run
        self.first_run_values: tuple[Watched, ...] = ()  # constants that only its first run sets, with their values
        self.silent_hooks: list[str] = []  # hooks that ran no operator
        self.unrepeatable: list[str] = []  # sentences about side effects that the graph cannot repeat
        self.count_operators: Callable[[], int] = int  # returns the number of operators so far
        self._owners: list[Owner] = []
        self._fake_owners: list[Owner] = []  # fake copies of optimizers' state
        self._real_tables: dict[int, Any] = {}  # id of a fake copy of a starting optimizer's state -> the state
        self._before: list[tuple[Owner, dict[Any, Any]]] = []  # with fakes in place
        self._storages: list[StorageWeakRef] = []

    def on_tensor(self, value: Any, name: str, kind: TensorKind, container: Any, key: Any) -> None:
        """Adds an entry for the tensor, or for each tensor of the tuple, at ``container[key]``."""
        if isinstance(value, Tensor):
            tables = [t for m in self.modules[-1:] for t in (m._parameters, m._buffers)]
            registered = kind != "buffer" or isinstance(value, nn.Parameter) or any(container is t for t in tables)
            fake = self.fake(value, name, kind, Home(container, key), registered)
        else:
            homes = (Home(container, key, i) for i in range(len(value)))
            fake = _as_tuple(
                value,
                [
                    self.fake(x, f"{name}.{home.part}", kind, home, False) if isinstance(x, Tensor) else x
                    for x, home in zip(value, homes, strict=True)
                ],
            )
        place = id(container), id(key) if isinstance(key, Tensor) else key
        if place not in self._placed:  # two closures may share a cell
            self._placed.add(place)
            self._slots.append((container, key, fake))

    def fake(
        self, tensor: Tensor, name: str, kind: TensorKind, home: Home | None = None, registered: bool = True
    ) -> Tensor:
        """Returns the fake tensor that replaces ``tensor``; creates it and its entry on first use.

        Args:
            tensor: The user's tensor.
            name, kind, home, registered: As in ``Entry``.

        Raises:
            CaptureError: If the tensor is a DTensor, or an argument of the step with a hook.
        """
        if id(tensor) in self._fakes:
            return self._fakes[id(tensor)]
        if type(tensor).__name__ == "DTensor":
            raise CaptureError(f"{name} is a DTensor, parts of which are on other GPUs: plan the model on one GPU")
        check_dense(tensor, name)
        device = torch.device("cpu") if tensor.device.type == "meta" else tensor.device
        storage = StorageWeakRef(tensor.untyped_storage())
        with self.mode, torch.inference_mode(tensor.is_inference()), torch.no_grad():
            if storage not in self._bases:
                size = tensor.untyped_storage().nbytes()
                self._bases[storage] = torch.empty(size, dtype=torch.uint8, device=device)
            fake = view_memory(self._bases[storage].untyped_storage(), tensor, device)
            if isinstance(tensor, nn.Parameter):
                fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            elif tensor.requires_grad:
                fake.requires_grad_()
        if kind != "input":
            self._copy_hooks(tensor, fake, name)
        elif hook := first_hook(tensor):
            raise CaptureError(f"the argument {name} of the step has {hook}: remove it, or pass a detached tensor")
        kind = "parameter" if isinstance(tensor, nn.Parameter) else kind
        self._fakes[id(tensor)] = fake
        self._kept_alive.append(tensor)
        self.entries.append(Entry(name, kind, fake, tensor, home, registered))
        return fake

    def _copy_hooks(self, tensor: Tensor, fake: Tensor, name: str) -> None:
        """Registers a leaf tensor's hooks on its fake, so that their operators are captured."""
        if not (tensor.is_leaf and tensor.requires_grad):
            return
        registers = fake.register_hook, fake.register_post_accumulate_grad_hook
        for attribute, register in zip(TENSOR_HOOKS, registers, strict=True):
            for hook in (getattr(tensor, attribute, None) or {}).values():
                self._walk(hook, f"{name}.hook", "buffer", 1)
                register(self.watch_hook(hook, f"a hook of {name}"))

    def named_optimizers(self) -> list[tuple[Optimizer, str]]:
        """Returns the optimizers with their names."""
        return [(optimizer, f"optimizer{i or ''}") for i, optimizer in enumerate(self.optimizers)]

    def hooks(self) -> Hooks:
        """Returns the hooks of the user's objects, apart from those of the batch."""
        tensors = [(e.real, e.name) for e in self.entries if e.kind != "input" and e.real is not None]
        return Hooks(
            [(module, self.paths[id(module)] or type(module).__name__) for module in self.modules],
            [(tensor, name) for tensor, name in tensors if tensor.is_leaf and tensor.requires_grad],
            self.named_optimizers(),
        )

    def watch_hook(self, hook: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wraps a hook and records it in ``silent_hooks`` if it runs no operator, so no graph repeats it."""

        def call(*args: Any, **kwargs: Any) -> Any:
            before = self.count_operators()
            result = hook(*args, **kwargs)
            if self.count_operators() == before and (result is None or any(result is arg for arg in args)):
                self.silent_hooks.append(f"{name} ({hook_name(hook)})")
            return result

        return call

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Installs fakes in place of the user's tensors and restores every object on exit."""
        snapshot = Snapshot(self)
        self.watched = self.constants()
        try:
            states = {id(optimizer.state) for optimizer in self.optimizers}  # replaced as a whole below
            for owner in self.owners.values():  # fakes also replace tensors that are dictionary keys
                keyed = isinstance(owner.container, dict) and id(owner.container) not in states
                if keyed and any(id(key) in self._fakes for key in owner.container):
                    items = [(self._fakes.get(id(key), key), value) for key, value in owner.container.items()]
                    owner.container.clear()
                    owner.container.update(items)
            for container, key, fake in self._slots:
                container[self._fakes.get(id(key), key)] = fake
            iterators = [(entry := iterator.replace_by_copy(), entry.position()) for iterator in self.iterators]
            for scaler in self.scalers:
                scaler._per_optimizer_states = copy.copy(scaler._per_optimizer_states)
            named_optimizers = self.named_optimizers()
            replaced: dict[int, Any] = {}  # shared groups and state stay shared
            for optimizer, name in named_optimizers:
                for attribute, make in (("param_groups", self._fake_groups), ("state", self._fake_state)):
                    table = getattr(optimizer, attribute)
                    if id(table) not in replaced:
                        replaced[id(table)] = make(optimizer, name)
                    setattr(optimizer, attribute, replaced[id(table)])
            for optimizer, name in named_optimizers:
                self._make_state(optimizer, name)
            scalers = {id(vars(scaler)) for scaler in self.scalers}
            self._owners = [owner for owner in self.owners.values() if id(owner.container) not in scalers]
            self._fake_owners = self._fake_tables(named_optimizers)
            before = [numbers_of(optimizer) for optimizer in self.optimizers]
            yield
            for optimizer, numbers in zip(self.optimizers, before, strict=True):
                if (key := changed_number(numbers, optimizer, id(optimizer) in self.starting)) is not None:
                    self.unrepeatable.append(
                        f"the step changes {key[-1]} of {type(optimizer).__name__}, which the graph cannot repeat: "
                        "call schedules after the step"
                    )
            self.watched = compare_constants(self.watched).remaining
            self.unrepeatable += [
                f"the step takes a value from the iterator {entry.path}, which the graph cannot repeat: pass the value "
                "as an argument"
                for entry, position in iterators
                if entry.position() != position
            ]
        finally:
            self._before.clear()
            self._fake_owners.clear()
            for entry in self.entries:
                entry.fake.grad = None
            snapshot.restore()

    def begin(self) -> None:
        """Records the objects' content before the step's Python code runs, for ``effects`` to compare with."""
        for entry in self.entries:  # values memoized in an earlier step are not constants
            entry.fake.grad = entry.fake.constant = entry.fake.item_memo = None
        self._before = [(owner, owner.content()) for owner in (*self._owners, *self._fake_owners)]
        self._storages = [StorageWeakRef(entry.fake.untyped_storage()) for entry in self.entries]

    def effects(self, used: Callable[[Tensor], bool]) -> Effects:
        """Returns the effects of the step's Python code on the user's objects.

        Raises:
            CaptureError: If the step gives a persistent tensor other memory.
        """
        effects = Effects({id(entry.fake): entry.real for entry in self.entries}, used, bool(self.starting))
        for owner, before in self._before:
            effects.compare(owner, before)
        fake = {id(owner.container) for owner in self._fake_owners}
        names = {id(e.real): e.name for e in self.entries}
        for i, effect in enumerate(effects.repeatable):
            if (real := self._real_tables.get(id(effect.owner.container))) is not None:
                effects.repeatable[i] = replace(effect, owner=effect.owner._replace(container=real))
            elif id(effect.owner.container) in fake:
                name = names.get(id(effect.key), effect.key)
                effects.refusals.append(
                    f"the step creates state of {effect.owner.path} for {name}: run one step without a plan first"
                )
        slots = Counter(id(fake) for _, _, fake in self._slots)
        memory = Counter(StorageWeakRef(e.fake.untyped_storage()) for e in self.entries)
        for name, old, _ in effects.rebound:
            if slots[id(old)] > 1 or memory[StorageWeakRef(old.untyped_storage())] > 1:
                effects.refusals.append(
                    f"the step rebinds {name}, and another name shares its memory: write into it (copy_), or clone it"
                )
        for entry, storage in zip(self.entries, self._storages, strict=True):
            if StorageWeakRef(entry.fake.untyped_storage()) != storage:
                raise CaptureError(
                    f"the step gives {entry.name} other memory (.data = …): write into it (.data.copy_(…))"
                )
        return effects

    def _fake_tables(self, named_optimizers: list[tuple[Optimizer, str]]) -> list[Owner]:
        """Returns the fake copies of optimizers' state."""
        names = {id(e.fake): e.name for e in self.entries}
        owners: dict[int, Owner] = {}

        def add(value: Any, name: str) -> None:
            if isinstance(value, (dict, list)) and id(value) not in owners:
                owners[id(value)] = Owner(value, name)
                for key in value if isinstance(value, dict) else range(len(value)):
                    add(value[key], f"{name}.{names.get(id(key), key)}")

        for optimizer, prefix in named_optimizers:
            add(optimizer.state, prefix)
        return list(owners.values())

    def _fake_groups(self, optimizer: Optimizer, prefix: str) -> list[dict[str, Any]]:
        """Returns fake parameter groups whose ``foreach`` option is the one chosen for the real parameters."""
        groups = []
        for g, group in enumerate(optimizer.param_groups):
            swapped = dict(group, params=[self.fake(p, f"{prefix}.param", "parameter") for p in group["params"]])
            if self.as_capturable and "capturable" in swapped:
                swapped["capturable"] = True
            if swapped.get("foreach", 0) is None and not swapped.get("fused"):  # PyTorch decides otherwise for fakes
                swapped["foreach"] = chooses_foreach(group, self.as_cuda)
            for option, value in group.items():  # a learning rate that is a tensor
                if isinstance(value, Tensor):
                    home = Home(optimizer, (g, option))
                    swapped[option] = self.fake(value, f"{prefix}.{option}", "optimizer_state", home)
            groups.append(swapped)
        return groups

    def _fake_state(self, optimizer: Optimizer, prefix: str) -> defaultdict[Any, Any]:
        names = {id(e.fake): e.name for e in self.entries}
        state: defaultdict[Any, Any] = defaultdict(dict)

        def swapped(table: Any, label: str, first: Any) -> Any:
            def fake(keys: tuple[Any, ...], value: Any) -> Any:
                if not isinstance(value, Tensor):
                    return value
                name, home = _locate(optimizer, label, first, keys)
                return self.fake(value, name, "optimizer_state", home)

            return tree_map_with_path(fake, table)

        for param, values in optimizer.state.items():
            if isinstance(param, Tensor):
                key = self.fake(param, f"{prefix}.param", "parameter")
                state[key] = swapped(dict(values), f"{prefix}.{names.get(id(key), 'param')}", param)
            else:
                state[param] = swapped(values, f"{prefix}.{param}", param)
        if id(optimizer) in self.starting:
            reals = {id(e.fake): e.real for e in self.entries}
            self._real_tables[id(state)] = optimizer.state
            self._real_tables |= {id(table): optimizer.state[reals.get(id(key), key)] for key, table in state.items()}
        return state

    def _make_state(self, optimizer: Optimizer, prefix: str) -> None:
        """Creates the state of an optimizer's first step by running one untraced step.

        The step count of Adam-like optimizers is read as an unknown number (a SymFloat), so that the bias correction,
        which eager PyTorch computes on the host, becomes part of the graph.
        """
        names = {id(e.fake): e.name for e in self.entries}
        reals = {id(entry.fake): entry.real for entry in self.entries}
        state = optimizer.state
        known_ids = {id(x) for table in state.values() for x in tensors_in(table)}
        trainable = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        assert self.mode.shape_env is not None
        # New step counts are constants and existing ones unknown; a foreach update cannot mix both.
        stateless = {id(p) for p in trainable if not state.get(p)}
        wraps = any(isinstance(part, Optimizer) for part in vars(optimizer).values())
        with self.mode, self.mode.shape_env.ignore_fresh_unbacked_symbols():
            for is_stateless in () if id(optimizer) in self.starting else (True, False):
                chosen = [p for p in trainable if (id(p) in stateless) is is_stateless]
                for param in trainable:
                    param.grad = None
                for param in chosen:
                    param.grad = torch.empty_like(param)
                try:
                    step_without_hooks(optimizer)
                except Exception:  # a wrapper may have no plain step (SAM) or need all gradients
                    if not wraps and is_stateless and chosen:
                        raise
        for kind in STEP_HOOKS:
            hooks = {
                k: self.watch_hook(hook, f"a step hook of the {prefix}") for k, hook in getattr(optimizer, kind).items()
            }
            setattr(optimizer, kind, OrderedDict(hooks))
        # An interrupted capture may leave a context open whose exit resets the setting above.
        self.mode.shape_env.pending_fresh_unbacked_symbols.clear()

        def enter(table: Any, label: str, first: Any) -> None:
            for keys, value in tree_leaves_with_path(table):
                if isinstance(value, Tensor) and id(value) not in known_ids:
                    known_ids.add(id(value))
                    name, home = _locate(optimizer, label, first, keys)
                    self.entries.append(Entry(name, "optimizer_state", value, None, home))

        for param in trainable:
            param.grad = None
        for param in trainable:
            enter(state.get(param, {}), f"{prefix}.{names.get(id(param), 'param')}", reals[id(param)])
        param_ids = {id(param) for param in trainable}
        for key, table in state.items():
            if id(key) not in param_ids and not isinstance(key, Tensor):
                enter(table, f"{prefix}.{key}", key)


def _locate(optimizer: Optimizer, label: str, first: Any, keys: tuple[Any, ...]) -> tuple[str, Home]:
    """Returns the name and the slot of an optimizer's tensor from its path in the pytree of ``state[first]``."""
    path = tuple(key.key if isinstance(key, MappingKey) else key.idx for key in keys)
    return ".".join(map(str, (label, *path))), Home(optimizer, (first, *path))


def first_hook(tensor: Tensor) -> str:
    """Returns a sentence about a hook of a tensor of the batch, or ""."""
    hooks = (getattr(tensor, attribute, None) or {} for attribute in TENSOR_HOOKS)
    function = next((function for table in hooks for function in table.values()), None)
    return (
        ""
        if function is None
        else (f"the hook {hook_name(function)}, which tensors of other batches lack: register it in the step")
    )


def view_memory(memory: torch.UntypedStorage, like: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor over ``memory`` with the dtype, offset, shape and strides of ``like``.

    ``device`` is explicit because the storage of a fake tensor is on the meta device.
    """
    empty = torch.empty(0, dtype=like.dtype, device=device)
    return empty.set_(memory, like.storage_offset(), like.size(), like.stride())


def copy_batch(batch: Any) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """Returns a copy of a batch that keeps memory sharing among its tensors, and the pairs (copy, tensor)."""
    memory: dict[int, torch.UntypedStorage] = {}
    copies: dict[int, Tensor] = {}  # one copy per tensor
    leaves, spec = flatten(batch)
    tensors = {id(value): value for value in leaves if isinstance(value, Tensor)}
    for tensor_id, value in tensors.items():
        storage = value.untyped_storage()
        if storage._cdata not in memory:
            memory[storage._cdata] = storage.clone() if value.device.type != "meta" else storage
        with torch.inference_mode(value.is_inference()):
            copies[tensor_id] = view_memory(memory[storage._cdata], value, value.device)
            copies[tensor_id].requires_grad_(value.requires_grad)
    copy = tree_unflatten([copies.get(id(value), value) for value in leaves], spec)
    return copy, [(copies[tensor_id], value) for tensor_id, value in tensors.items()]
