"""Bindings of a captured step to the user's tensors, checked before every step, and creation of optimizer state."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain, repeat
from operator import attrgetter, getitem, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._C._dynamo.guards import TensorGuards
from torch.optim import Optimizer

from executor.capture.ambient import CastWeights, ambient_modes, mode_change
from executor.capture.capture import Captured
from executor.capture.first_state import first_step_differs, initial_state, is_builtin
from executor.capture.python_values import Change
from executor.capture.state import Home
from executor.training.memory_source import Block, Place, StepError, UserTensor, is_movable, is_shared


class Binding(UserTensor):
    """A user's tensor bound to a placeholder of the captured graph."""

    def __init__(self, captured: Captured, i: int):
        self.node = captured.placeholders[i]
        self.name = captured.names[i]
        self.index = i
        self.home = captured.homes[i]
        self.source = captured.sources[i]
        self.tensor = captured.values[self.node]
        self.layout = layout_of(captured, i)
        self.user = self.device_tensor = self.visible = None  # type: ignore[assignment]
        self.block: Block | None = None  # set if the plan swaps the tensor

    def current(self) -> Any:
        """Returns the tensor currently bound to this slot, or None."""
        return self.home.get() if self.home else self.source

    def is_unchanged(self) -> bool:
        """Returns True if the tensor is unchanged since the last step."""
        now = self.current()
        if now is None or now is not self.user or now.device != self.visible.device or not self.visible.is_set_to(now):
            return False
        if self.block is None:
            return True
        return is_movable(now) if self.block.place is Place.DEVICE else not is_shared(now)

    def bind(self, nbytes: int) -> None:
        """Binds the current tensor, which must have the form that it had at the capture.

        While a parameter is on the host between two steps, tensors derived from it are created there (loaded optimizer
        state, new ``data``); this moves them to the device.

        Args:
            nbytes: size of the tensor's storage in the program.

        Raises:
            StepError: the parameter was replaced, or the form or memory of the tensor has changed.
        """
        now = self.current()
        if isinstance(self.source, nn.Parameter) and now is not self.source:
            raise StepError(f"{self.name} was replaced by another parameter after the capture; capture the step again")
        if self.block and isinstance(now, Tensor) and is_shared(now):
            raise StepError(f"the plan swaps {self.name}, whose memory is shared with other processes: clone it")
        if isinstance(now, Tensor) and now.device.type == "cpu" != self.layout.device.type and self._may_be_on_host():
            now.data = now.data.to(self.layout.device)
        compare(self.name, now, self.node, self.layout)
        if self.block and now.untyped_storage().nbytes() != nbytes:
            raise StepError(f"{self.name} is part of other memory than at the capture; capture the step again")
        self.user = now
        self.device_tensor = now.detach()
        self.visible = self.device_tensor

    def _may_be_on_host(self) -> bool:
        return self.block is not None or (self.home is not None and isinstance(self.home.container, Optimizer))


def device_of(captured: Captured) -> torch.device:
    """Returns the step's device, ignoring optimizer scalars on the host; raises StepError for several devices."""
    devices = {d for node, d in zip(captured.placeholders, captured.devices, strict=True) if node in captured.values}
    others = sorted({str(d) for d in devices if d.type != "cpu"})
    if len(others) > 1:
        raise StepError(f"the model is on several devices ({', '.join(others)}), but a plan covers one: move it to one")
    return torch.device(others[0]) if others else torch.device("cpu")


def inputs_of(captured: Captured) -> set[int]:
    """Returns the program tensors that belong to the batch."""
    leaves = [leaf for leaf in captured.leaves if isinstance(leaf, fx.Node)]
    return {captured.values[leaf] for leaf in leaves if leaf in captured.values}


def cast_weights(captured: Captured) -> CastWeights | None:
    """Returns the parameters that autocast around the step casts and keeps, or None."""
    device = device_of(captured)
    cast = {
        captured.values[node]: source
        for node, source in zip(captured.placeholders, captured.sources, strict=True)
        if isinstance(source, nn.Parameter) and any(u.target is torch.ops.aten._to_copy.default for u in node.users)
    }
    if not cast or all(device.type != name for name, _ in captured.modes[0]):
        return None
    written = {t for kernel in captured.program.kernels for t in kernel.outputs}
    return CastWeights(device, set(map(id, cast.values())), {id(p) for t, p in cast.items() if t in written})


class Layout(NamedTuple):
    """What a placeholder's tensor must have, besides shape, dtype and strides.

    Attributes:
        offset: Storage offset if the graph depends on it, else None.
        is_inference: Whether it was created in inference mode, so that autograd cannot save it.
    """

    device: torch.device
    offset: int | None
    is_inference: bool


def layout_of(captured: Captured, i: int) -> Layout:
    """Returns the expected layout of a placeholder's tensor."""
    node = captured.placeholders[i]
    source = captured.sources[i]
    absolute = any(user.target is torch.ops.aten.as_strided.default for user in node.users)
    if source is None:
        return Layout(captured.devices[i], None, False)
    return Layout(captured.devices[i], source.storage_offset() if absolute else None, source.is_inference())


def compare(name: str, tensor: Any, node: fx.Node, layout: Layout) -> None:
    """Raises StepError if a tensor's shape, dtype, strides or layout differ from its placeholder's."""
    meta = node.meta["tensor_meta"]
    if not isinstance(tensor, Tensor):
        raise StepError(f"{name} is a {type(tensor).__name__}, not a tensor: pass a tensor as at the capture")
    for field, actual, expected in (
        ("shape", tuple(tensor.shape), tuple(meta.shape)),
        ("type", tensor.dtype, meta.dtype),
        ("device", tensor.device, layout.device),
        ("stride", tensor.stride(), tuple(meta.stride)),
        ("offset", tensor.storage_offset() if layout.offset is not None else None, layout.offset),
        ("is_inference()", tensor.is_inference(), layout.is_inference),
    ):
        if actual != expected:
            raise StepError(
                f"{name} has {field} {actual}, but had {expected} at the capture: restore it, or capture again"
            )


def check_model(captured: Captured, parameters: list[Binding]) -> None:
    """Raises StepError if module structure, modes, hooks or gradients have changed since the capture."""
    for module, training, children in captured.modules:
        if tuple(module._modules.values()) != children:
            raise StepError(
                f"module {type(module).__name__} has other parts than at the capture; capture the step again"
            )
        if module.training is not training:
            now, was = ("train" if mode else "eval" for mode in (module.training, training))
            raise StepError(
                f"module {type(module).__name__} is in {now} mode, but was in {was} mode at the capture: call {was}() "
                "on the model, or capture the step again"
            )
    if change := captured.hooks.change():
        raise StepError(f"{change} after the capture; capture the step again (recapture() of a step of all shapes)")
    for b in parameters:
        if b.user.grad is not None:
            raise StepError(f"{b.name} has a gradient, but a captured step starts without gradients: set it to None")
        if b.user.requires_grad is not b.node.meta["tensor_meta"].requires_grad:
            raise StepError(
                f"{b.name} was frozen or unfrozen after the capture; capture the step again, with recapture() of a "
                "step of all shapes (in a callback of PlannedTrainer: trainer.planned.recapture())"
            )


def check_settings(captured: Captured, change: Change | None) -> None:
    """Raises StepError for a changed Python value, and if modes or optimizer options differ from the capture's."""
    modes = ambient_modes()
    if modes != captured.modes:
        raise StepError(mode_change(captured.modes, modes))
    if change is not None:
        raise StepError(
            f"{change.name} was {change.old!r} at the capture and is {change.new!r} now; capture the step again "
            "(recapture() of a step of all shapes)"
        )
    for optimizer, groups in captured.settings:
        if len(groups) != len(optimizer.param_groups):
            raise StepError("the optimizer has other parameter groups than at the capture; capture the step again")
        for captured_options, group in zip(groups, optimizer.param_groups, strict=True):
            for option, value in captured_options.items():
                current = len(group["params"]) if option == "params" else group[option]
                if current is not value and current != value:
                    raise StepError(
                        f"the optimizer's {option} was {value} at the capture and is {current} now; capture the step "
                        "again, or make it a tensor before the capture"
                    )


_TRAINING = attrgetter("training")
_CHILDREN = attrgetter("_modules")
_GRAD = attrgetter("grad")
_REQUIRES_GRAD = attrgetter("requires_grad")


class ChangeDetector:
    """Fast check whether bindings and model are unchanged since the last full check.

    It detects replaced tensors or tables, changes of a tensor's form, type or memory (``data``), gradients, frozen
    parameters, hooks, and changes in the children and modes of modules. Values that exist per parameter or module are
    compared by loops in C; only tensors that the plan swaps are checked one by one, because their memory changes. A
    tensor with the same address and form counts as the same memory.
    """

    def __init__(self, captured: Captured, bindings: list[Binding], parameters: list[Binding]):
        resident = [b for b in bindings if not b.block]
        homes = [(b, b.home) for b in resident if b.home]
        in_optimizers = [(b, h) for b, h in homes if isinstance(h.container, Optimizer) and len(h.key) == 2]
        states = [(b, h) for b, h in in_optimizers if not isinstance(h.key[0], int)]
        tables = [(b, h) for b, h in homes if isinstance(h.container, (dict, list)) and h.part is None]
        bulk_ids = {id(b) for b, _ in (*states, *tables)}
        self.individual = [b for b in bindings if b.block or (b.home and id(b) not in bulk_ids)]
        # Per optimizer: the state dictionary, its parameters, and the state of each parameter.
        self.optimizers = [
            (o, o.state, tuple(o.state.keys()), tuple(o.state.values()))
            for o in {id(h.container): h.container for _, h in states}.values()
        ]
        entries = [(h.container, h.key, b.user) for b, h in tables]
        entries += [(h.container.state[h.key[0]], h.key[1], b.user) for b, h in states]
        self.tables, self.keys, self.users = zip(*entries, strict=True) if entries else ((), (), ())
        self.tensors = [b.user for b in resident]
        self.guards = (
            TensorGuards(*self.tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None) if self.tensors else None
        )
        self.addresses = list(map(Tensor.data_ptr, self.tensors))
        self.parameters = [b.user for b in parameters]
        self.requires_grad = list(map(_REQUIRES_GRAD, self.parameters))
        self.modules = [module for module, _, _ in captured.modules]
        self.modes, self.children = list(map(_TRAINING, self.modules)), list(map(_CHILDREN, self.modules))
        self.hooks = captured.hooks
        self.submodules = tuple(chain.from_iterable(children for _, _, children in captured.modules))

    def is_unchanged(self) -> bool:
        """Returns True if nothing has changed, and False if something may have changed."""
        for optimizer, state, keys, values in self.optimizers:
            if optimizer.state is not state or len(state) != len(keys):
                return False
            if not (all(map(is_, state.keys(), keys)) and all(map(is_, state.values(), values))):
                return False
        try:
            if not all(map(is_, map(getitem, self.tables, self.keys), self.users)):
                return False
        except LookupError:
            return False
        return (
            (self.guards is None or self.guards.check(*self.tensors))
            and list(map(Tensor.data_ptr, self.tensors)) == self.addresses
            and all(map(is_, map(_GRAD, self.parameters), repeat(None)))
            and list(map(_REQUIRES_GRAD, self.parameters)) == self.requires_grad
            and self.hooks.are_unchanged()
            and self._are_modules_unchanged()
            and all(b.is_unchanged() for b in self.individual)
        )

    def _are_modules_unchanged(self) -> bool:
        children = list(map(_CHILDREN, self.modules))
        submodules = list(chain.from_iterable(map(dict.values, children)))
        return (
            all(map(is_, map(_TRAINING, self.modules), self.modes))
            and all(map(is_, children, self.children))
            and len(submodules) == len(self.submodules)
            and all(map(is_, submodules, self.submodules))
        )


class ReboundSlots:
    """Slots that the user's step rebinds to a new tensor in each step (``self.state = new``).

    A captured step copies the new content into the old tensor. Eager PyTorch would leave the old content to whoever
    still refers to the old tensor (``history.append(model.state)``), so such a tensor is replaced by a copy before the
    next step. Only reference counts tell: Python has no list of an object's holders, and a view in C++ has no Python
    object at all. Counts other than those right after the last step mean a new holder.
    """

    def __init__(self, homes: Sequence[Home]) -> None:
        self._homes = homes
        self._references = [(0, 0)] * len(homes)

    def remember(self) -> None:
        """Records the references after a step."""
        self._references = [_count_references(home) for home in self._homes]

    def separate(self) -> None:
        """Replaces tensors by copies if other references to them may exist."""
        for home, reference in zip(self._homes, self._references, strict=True):
            if _count_references(home) != reference and isinstance(tensor := home.get(), Tensor):
                home.set(tensor.detach().clone())


def _count_references(home: Home) -> tuple[int, int]:
    """Returns the identity of the tensor in this slot, and the references to it, its container and its memory."""
    tensor = home.get()
    if not isinstance(tensor, Tensor):
        return 0, 0
    container = home._replace(part=None).get()  # the containing tuple, or the tensor itself
    memory = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return id(tensor), sys.getrefcount(tensor) + sys.getrefcount(container) + memory


def create_state(b: Binding, bindings: list[Binding]) -> None:
    """Creates the state that an optimizer's first step would create for a parameter.

    Raises:
        StepError: the tensor has moved since the capture, or the optimizer's first step is not like later ones.
    """
    if b.home is None or not isinstance(b.home.container, Optimizer) or not isinstance(b.home.key[0], Tensor):
        raise StepError(f"{b.name} is not where it was at the capture; capture the step again")
    optimizer = b.home.container
    param = b.home.key[0]
    if reason := first_step_differs(optimizer, param):
        raise StepError(f"{reason}: run the first step eagerly, or take fit, which captures it by itself")
    placeholders = {
        x.home.key[1]: x.node for x in bindings if x.home and x.home.container is optimizer and x.home.key[0] is param
    }
    state = optimizer.state[param]
    for key, value in initial_state(optimizer, param).items():
        if key in state:
            continue
        if not is_builtin(optimizer) or not isinstance(value, Tensor):
            state[key] = value
        elif key in placeholders:
            meta = placeholders[key].meta["tensor_meta"]
            tensor = torch.empty_strided(meta.shape, meta.stride, dtype=value.dtype, device=value.device)
            state[key] = tensor.fill_(value.flatten()[0].item())
    if b.current() is None:
        raise StepError(f"{b.name} is not created by the optimizer's first step: run the first step eagerly")
