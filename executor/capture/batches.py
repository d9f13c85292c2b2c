"""Batches as people have them, and how a model and a loss take them.

A batch is a tuple ``(inputs…, target)``, or one object: a mapping (a dict, a ``BatchEncoding``), whose entries are the
model's arguments by name, or anything else that PyTorch's pytrees or ``dataclasses`` know, which is its one argument.
"""

from __future__ import annotations

import copy
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_map

Loss = Callable[[Any, Any], Any]


class BatchError(ValueError):
    """A model or a loss does not fit a batch; the message is one sentence."""


def flatten(tree: Any) -> tuple[list[Any], TreeSpec]:
    """As ``tree_flatten``, into dataclasses and mappings of every kind, too; ``tree_unflatten`` makes these again."""
    leaves, spec = tree_flatten(tree)
    return tree_flatten(tree_map(_opened, tree)) if any(map(_opens, leaves)) else (leaves, spec)


def structure(tree: Any) -> TreeSpec:
    """``flatten`` without the leaves."""
    return flatten(tree)[1]


def arguments(batch: Any) -> tuple[Any, ...]:
    """A batch as the arguments of a step: the parts of a tuple or list, or the one object."""
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


def called(model: Callable[..., Any], loss_fn: Loss | None, noted: Callable[[Any], Any], *batch: Any) -> Any:
    """What the loss function makes of a batch (``arguments``), or of no loss function the loss that a model returns.

    Args:
        noted: is told the model's result, and passes it on.

    Raises:
        BatchError: there is no loss, or nothing is left for the model.
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
    """The loss in a model's result: all of it, its ``loss``, or the first of a tuple."""
    loss = result[0] if isinstance(result, (tuple, list)) and result else getattr(result, "loss", result)
    loss = loss.get("loss") if isinstance(loss, Mapping) else loss
    if not isinstance(loss, Tensor):
        raise BatchError(
            f"the model returns {type(result).__name__} and no loss: give it what it needs for one (labels), or loss_fn"
        )
    return loss


# ------------------------------------------------------------------------------------------- what PyTorch does not open


@dataclass
class _Record:
    """An object opened; in a spec its shell stands for it."""

    values: list[Any]
    shell: _Shell


@dataclass(frozen=True)
class _Shell:
    """An object without its entries; equal to those of its class with the same names."""

    kind: type
    names: tuple[Any, ...]
    empty: Any = field(compare=False, repr=False)

    def with_entries(self, values: Any) -> Any:
        """Returns such an object."""
        if issubclass(self.kind, Mapping) and not issubclass(self.kind, UserDict):
            return self.kind(zip(self.names, values, strict=True))
        made = copy.copy(self.empty)
        if isinstance(made, UserDict):
            made.data = dict(zip(self.names, values, strict=True))
        else:
            for name, value in zip(self.names, values, strict=True):
                object.__setattr__(made, name, value)
        return made


def _opens(leaf: Any) -> bool:
    kind = type(leaf)
    if kind not in _known:
        wanted = issubclass(kind, Mapping) or is_dataclass(kind)
        _known[kind] = wanted and not issubclass(kind, (Tensor, nn.Module))
    return _known[kind]


def _opened(leaf: Any) -> Any:
    if not _opens(leaf):
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


_known: dict[type, bool] = {}
register_pytree_node(
    _Record, lambda record: (record.values, record.shell), lambda values, shell: shell.with_entries(values)
)
