"""Batch formats, and how they are passed to a model and a loss.

A batch is a tuple ``(inputs…, target)``, or one object. A mapping (a dict, a ``BatchEncoding``) is passed as the
model's keyword arguments, any other pytree or dataclass as its single argument.
"""

from __future__ import annotations

import copy
import functools
from collections import UserDict, deque
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
    return tree_flatten(tree_map(_opened, tree)) if any(map(_opens, map(type, leaves))) else (leaves, spec)


def structure(tree: Any) -> TreeSpec:
    """Returns the spec of ``flatten`` without the leaves."""
    return flatten(tree)[1]


def arguments(batch: Any) -> tuple[Any, ...]:
    """Returns a batch as the arguments of a step: the elements of a tuple or list, or the single object."""
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


def called(model: Callable[..., Any], loss_fn: Loss | None, noted: Callable[[Any], Any], *batch: Any) -> Any:
    """Returns the loss function's result for a batch (``arguments``); the model's own loss if ``loss_fn`` is None.

    Args:
        noted: Receives the model's result and returns it.

    Raises:
        BatchError: If the model returns no loss, or the batch has no model inputs.
    """
    if len(batch) > 1:
        *inputs, target = batch
        if loss_fn is None:
            return _own(noted(model(*batch)))
        return loss_fn(noted(model(*inputs)), target)
    if not batch:
        raise BatchError("the batch is empty: expected (inputs…, target), a mapping or one object")
    (whole,) = batch
    named, rest = (whole, ()) if isinstance(whole, Mapping) else ({}, (whole,))
    return _own(noted(model(*rest, **named))) if loss_fn is None else loss_fn(noted(model(*rest, **named)), whole)


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


def _own(result: Any) -> Any:
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
class _Record:
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
        made = copy.copy(self.empty)
        if isinstance(made, UserDict):
            made.data = dict(zip(self.names, values, strict=True))
        else:
            for name, value in zip(self.names, values, strict=True):
                object.__setattr__(made, name, value)
        return made


@functools.cache
def _opens(kind: type) -> bool:
    return (issubclass(kind, Mapping) or is_dataclass(kind)) and not issubclass(kind, (Tensor, nn.Module))


def _opened(leaf: Any) -> Any:
    if not _opens(type(leaf)):
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
    values = [tree_map(_opened, value) for value in table.values()]
    return _Record(values, _Shell(type(leaf), tuple(table), empty))


register_pytree_node(
    _Record, lambda record: (record.values, record.shell), lambda values, shell: shell.with_entries(values)
)
