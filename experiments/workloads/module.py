"""Anybody's own model: ``pkg.mod:factory``, imported and called."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_leaves, tree_map_only

# What capture() takes; no optimizer: a step without gradients.
Parts = tuple[nn.Module, Callable[[Any, Any], Any], optim.Optimizer | None, tuple[Any, Any]]


class WorkloadError(ValueError):
    """A workload's configuration is wrong; the message is one sentence naming the entry."""


def build(*, target: object) -> Parts:
    """Calls the factory ``target`` names.

    Args:
        target: ``"pkg.mod:factory"``; modules in the working directory are found too.

    Returns:
        model, loss function, optimizer, example batch.

    Raises:
        WorkloadError: the target cannot be imported or called, or returns something else.
    """
    factory = named(target)
    try:
        parts = factory()
    except Exception as error:
        raise WorkloadError(f"target: {target} raised {type(error).__name__}: {error}") from error
    expected = (nn.Module, Callable, optim.Optimizer, (tuple, list))
    if (
        not isinstance(parts, tuple)
        or len(parts) != 4
        or not all(isinstance(part, kind) for part, kind in zip(parts, expected, strict=True))  # type: ignore[arg-type]
        or len(parts[3]) != 2
    ):
        raise WorkloadError(f"target: {target} must return (model, loss_fn, optimizer, (x, y)), not {_describe(parts)}")
    return parts


def named(target: object) -> Callable[..., Any]:
    """What ``"pkg.mod:name"`` names, a function or a class; modules in the working directory are found too.

    Raises:
        WorkloadError: it cannot be imported, or is nothing that can be called.
    """
    if not isinstance(target, str) or target.count(":") != 1 or not all(target.split(":")):
        raise WorkloadError(f"target: expected 'pkg.mod:factory', got {target!r}")
    name, attribute = target.split(":")
    here = str(Path.cwd())
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            raise WorkloadError(f"target: there is no module {error.name!r}") from None
        raise WorkloadError(f"target: module {name!r} does not import (no module {error.name!r})") from error
    except Exception as error:
        raise WorkloadError(f"target: module {name!r} does not import ({type(error).__name__}: {error})") from error
    finally:
        if added:
            sys.path.remove(here)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        what = "nothing callable named" if hasattr(module, attribute) else "no attribute"
        raise WorkloadError(f"target: module {name!r} has {what} {attribute!r}")
    return factory


def leading(parts: Parts) -> int:
    """How many examples the batch has: the first dimension, which all its tensors (but numbers) share.

    Raises:
        WorkloadError: they do not.
    """
    sizes = {tuple(t.shape[:1]) for t in tree_leaves(parts[3]) if isinstance(t, Tensor) and t.dim()}
    if len(sizes) != 1 or 0 in (size := sizes.pop()):
        raise WorkloadError("the tensors of the example batch do not share a first dimension, so it has no known size")
    return int(size[0])


def with_batch(parts: Parts, batch: int) -> Parts:
    """The same with an example batch of so many examples; raises WorkloadError as ``leading`` does."""
    leading(parts)

    def resized(tensor: Tensor) -> Tensor:
        if not tensor.dim():
            return tensor
        shape = (batch, *tensor.shape[1:])
        if tensor.stride(0) != math.prod(shape[1:]):  # the examples do not lie one after the other
            return tensor.new_empty(shape)
        return torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    return (*parts[:3], tree_map_only(Tensor, resized, parts[3]))


def _describe(value: object) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(type(v).__name__ for v in value) + ")"
    return type(value).__name__
