"""Hooks that a step may call: those of its modules, tensors and optimizers, and PyTorch's global ones.

The operators of hooks are part of a captured graph. ``Hooks`` therefore compares the hooks themselves, in their order,
with those at capture time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from itertools import chain
from operator import attrgetter, call, itemgetter
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

MODULE_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
TENSOR_HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"
STEP_HOOKS = "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"
_READ_GRADIENT_HOOKS, _READ_ACCUMULATED_HOOKS = map(attrgetter, TENSOR_HOOKS)
_GLOBAL_MODULE_HOOKS = tuple(f"_global{name}" for name in MODULE_HOOKS)
_GLOBAL_STEP_HOOKS = "_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"


class Hook(NamedTuple):
    """A registered hook.

    Attributes:
        owner: What it was registered on.
        table: Name of the table that holds it, which tells its kind.
        function: The hook.
        flags: Whether it receives keyword arguments, and whether it is also called after an error.
    """

    owner: str
    table: str
    function: Callable[..., Any]
    flags: tuple[bool, bool]

    def is_same(self, other: Hook) -> bool:
        """Returns whether both call the same function on the same occasion."""
        a = self.function
        b = other.function
        is_method = isinstance(a, MethodType) and isinstance(b, MethodType)  # a new object at each access
        return self[:2] == other[:2] and self.flags == other.flags and (a is b or (is_method and a == b))

    def __str__(self) -> str:
        kind = self.table.removeprefix("_global").strip("_").removesuffix("s").replace("_", " ")
        return f"the {kind} {hook_name(self.function)} of {self.owner}"


class Hooks:
    """Hooks at the time of the capture.

    Args:
        modules, tensors, optimizers: Objects with hooks, each with its name.
    """

    def __init__(
        self,
        modules: Sequence[tuple[nn.Module, str]],
        tensors: Sequence[tuple[Tensor, str]],
        optimizers: Sequence[tuple[Optimizer, str]],
    ) -> None:
        self._groups: tuple[tuple[tuple[Any, ...], tuple[str, ...], tuple[str, ...]], ...] = tuple(
            (tuple(owner for owner, _ in pairs), tuple(name for _, name in pairs), tables)
            for pairs, tables in (
                (modules, MODULE_HOOKS),
                (tensors, TENSOR_HOOKS),
                (optimizers, STEP_HOOKS),
                ([(nn.modules.module, "all modules")], _GLOBAL_MODULE_HOOKS),
                ([(import_module("torch.optim.optimizer"), "all optimizers")], _GLOBAL_STEP_HOOKS),
            )
        )
        # Tables of most objects are read from their attributes' dictionary, which is faster.
        others = [(owner, tables) for owners, _, tables in self._groups for owner in owners if tables != TENSOR_HOOKS]
        self._readers = [itemgetter(*tables) for _, tables in others]
        self._attributes = [vars(owner) for owner, _ in others]
        self._tensors = [tensor for tensor, _ in tensors]
        self._handles = self._current_handles()
        self._hooks = list(self._current_hooks())

    def are_unchanged(self) -> bool:
        """Returns True if nothing was registered or removed, and False if hooks may have changed."""
        return self._current_handles() == self._handles

    def change(self) -> str:
        """Returns a description of the first hook that was added, removed or exchanged, or ""."""
        if self.are_unchanged():
            return ""
        current = list(self._current_hooks())
        added = [hook for hook in current if not any(map(hook.is_same, self._hooks))]
        removed = [hook for hook in self._hooks if not any(map(hook.is_same, current))]
        if added and removed and added[0][:2] == removed[0][:2]:
            return f"{removed[0]} was exchanged for {hook_name(added[0].function)}"
        if added or removed:
            return f"{added[0]} was added" if added else f"{removed[0]} was removed"
        for before, now in zip(self._hooks, current, strict=False):
            if not before.is_same(now):
                return f"{before} is called in another order"
        if len(current) != len(self._hooks):
            return f"{max(current, self._hooks, key=len)[-1]} was registered another number of times"
        self._handles = self._current_handles()  # the same hooks, registered again
        return ""

    def _current_handles(self) -> list[int]:
        """Returns the keys of all hooks, each given once by PyTorch; its loops run in C, as each step calls it."""
        tables = chain.from_iterable(map(call, self._readers, self._attributes))
        of_tensors = map(_READ_GRADIENT_HOOKS, self._tensors)
        accumulated = map(_READ_ACCUMULATED_HOOKS, self._tensors)
        return list(chain.from_iterable(filter(None, chain(tables, of_tensors, accumulated))))

    def _current_hooks(self) -> Iterator[Hook]:
        for owners, names, tables in self._groups:
            for owner, name in zip(owners, names, strict=True):
                for table in tables:
                    flags = [getattr(owner, table + kind, ()) for kind in ("_with_kwargs", "_always_called")]
                    for key, function in (getattr(owner, table) or {}).items():
                        yield Hook(name, table, function, (key in flags[0], key in flags[1]))


def hook_name(hook: Callable[..., Any]) -> str:
    """Returns a hook's qualified name with the line that defines it."""
    function = getattr(hook, "func", hook)  # of a partial
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None)
    return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else name
