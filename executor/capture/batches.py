"""Batch formats, and how they are passed to a model and a loss.

A batch is a tuple ``(inputs…, target)``, or one object. A mapping (a dict, a ``BatchEncoding``) is passed as the
model's keyword arguments, any other pytree or dataclass as its single argument.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_map

Loss = Callable[[Any, Any], Any]


class BatchError(ValueError):
    """Raised if a model or a loss does not fit a batch; the message is one sentence."""


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """Flattens like ``tree_flatten``, and also opens all dataclasses and mappings; ``tree_unflatten`` inverts it."""
    leaves, spec = tree_flatten(tree)
    return tree_flatten(tree_map(_open, tree)) if any(map(_is_openable, map(type, leaves))) else (leaves, spec)


def structure(tree: Any) -> TreeSpec:
    """Returns the spec of ``flatten`` without the leaves."""
    return flatten(tree)[1]


def format_structure(spec: TreeSpec) -> str:
    """Formats a ``structure``, with * for a leaf: "(*, {x: *})"."""
    if spec.is_leaf():
        return "*"
    parts = list(map(format_structure, spec.children()))
    if spec.type in (dict, OrderedDict):
        return "{" + ", ".join(f"{key}: {part}" for key, part in zip(spec.context, parts, strict=True)) + "}"
    names = getattr(spec.context, "names", None)
    if names is not None:  # an opened object
        parts = [f"{name}={part}" for name, part in zip(names, parts, strict=True)]
    kind = {tuple: "", list: "list"}.get(spec.type, getattr(spec.context, "kind", spec.type).__name__)
    return f"{kind}({', '.join(parts)})"


def path_of(spec: TreeSpec, leaf: int) -> list[Any]:
    """Returns the indices and keys that lead to a leaf of a tree with this ``structure``."""
    path: list[Any] = []
    while not spec.is_leaf():
        children = spec.children()
        k = 0
        while leaf >= children[k].num_leaves:
            leaf -= children[k].num_leaves
            k += 1
        keys = spec.context if spec.type in (dict, OrderedDict) else getattr(spec.context, "names", range(k + 1))
        path.append(keys[k])
        spec = children[k]
    return path


def constant_key(value: Any) -> tuple[type, Any]:
    """Returns a key of a constant: 1, 1.0 and True are different constants, as are 0.0 and -0.0; NaN is one."""
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


def arguments(batch: Any) -> tuple[Any, ...]:
    """Returns a batch as the arguments of a step: the elements of a tuple or list, or the single object."""
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


def compute_loss(model: Callable[..., Any], loss_fn: Loss | None, hook: Callable[[Any], Any], *batch: Any) -> Any:
    """Returns the loss function's result for a batch (``arguments``); the model's own loss if ``loss_fn`` is None.

    Args:
        hook: Receives the model's result and returns it.

    Raises:
        BatchError: If the model returns no loss, or the batch has no model inputs.
    """
    if len(batch) > 1:
        *inputs, target = batch
        if loss_fn is None:
            return _loss_of(hook(model(*batch)))
        return loss_fn(hook(model(*inputs)), target)
    if not batch:
        raise BatchError("the batch is empty: expected (inputs…, target), a mapping or one object")
    (data,) = batch
    kwargs, args = (data, ()) if isinstance(data, Mapping) else ({}, (data,))
    return _loss_of(hook(model(*args, **kwargs))) if loss_fn is None else loss_fn(hook(model(*args, **kwargs)), data)


def tensors_in(value: Any, depth: int = 6) -> Iterator[Tensor]:
    """Yields the tensors in a value, in containers and objects such as transformers' caches."""
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, set, deque)):
        for part in value:
            yield from tensors_in(part, depth - 1)
    elif depth and isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part, depth - 1)
    elif depth and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)):
        yield from tensors_in(vars(value), depth - 1)


def _loss_of(result: Any) -> Any:
    """Returns the loss in a model's result: the result itself, its ``loss``, or the first element of a tuple."""
    loss = result[0] if isinstance(result, (tuple, list)) and result else getattr(result, "loss", result)
    loss = loss.get("loss") if isinstance(loss, Mapping) else loss
    if not isinstance(loss, Tensor):
        raise BatchError(
            f"the model returns {type(result).__name__} and no loss: give it what it needs for one (labels), or loss_fn"
        )
    return loss


# ------------------------------------------------------------------------------------- objects that pytrees do not open


@dataclass
class _OpenedObject:
    """An opened object; its shell represents it in a spec."""

    values: list[Any]
    shell: _Shell


@dataclass(frozen=True)
class _Shell:
    """An object without its entries; equal to shells of the same class with the same names."""

    kind: type
    names: tuple[Any, ...]
    empty: Any = field(compare=False, repr=False)

    def with_entries(self, values: Any) -> Any:
        """Returns an object of this class with the given entries."""
        if issubclass(self.kind, Mapping) and not issubclass(self.kind, UserDict):
            return self.kind(zip(self.names, values, strict=True))
        restored = copy.copy(self.empty)
        if isinstance(restored, UserDict):
            restored.data = dict(zip(self.names, values, strict=True))
        else:
            for name, value in zip(self.names, values, strict=True):
                object.__setattr__(restored, name, value)
        return restored


@functools.cache
def _is_openable(kind: type) -> bool:
    return (issubclass(kind, Mapping) or is_dataclass(kind)) and not issubclass(kind, (Tensor, nn.Module))


def _open(leaf: Any) -> Any:
    if not _is_openable(type(leaf)):
        return leaf
    empty = copy.copy(leaf)
    if isinstance(leaf, Mapping):
        table = dict(leaf)
        if isinstance(empty, UserDict):
            empty.data = {}
    else:
        table = {f.name: getattr(leaf, f.name) for f in fields(leaf) if hasattr(leaf, f.name)}
        for name in table:
            object.__setattr__(empty, name, None)
    values = [tree_map(_open, value) for value in table.values()]
    return _OpenedObject(values, _Shell(type(leaf), tuple(table), empty))


register_pytree_node(
    _OpenedObject, lambda record: (record.values, record.shell), lambda values, shell: shell.with_entries(values)
)
