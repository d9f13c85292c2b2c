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
from torch.utils._pytree import tree_unflatten

from executor.capture.batches import flatten

# What capture() takes; no optimizer: a step without gradients. Or a step of one's own, and its arguments.
Parts = tuple[nn.Module, Callable[[Any, Any], Any] | None, optim.Optimizer | None, Any] | tuple[Callable[..., Any], Any]


class WorkloadError(ValueError):
    """A workload's configuration is wrong; the message is one sentence naming the entry."""


def build(*, target: object) -> Parts:
    """Calls the factory ``target`` names.

    Args:
        target: ``"pkg.mod:factory"``; modules in the working directory are found too.

    Returns:
        model, loss function (None: the model returns its loss), optimizer, example batch; or a step of any form, as
        ``capture_step`` takes it, and its arguments.

    Raises:
        WorkloadError: the target cannot be imported or called, or returns something else.
    """
    factory = named(target)
    try:
        parts = factory()
    except Exception as error:
        raise WorkloadError(f"target: {target} raised {type(error).__name__}: {error}") from error
    expected = (nn.Module, (Callable, type(None)), optim.Optimizer, object)
    if isinstance(parts, tuple) and len(parts) == 4 and all(map(isinstance, parts, expected)):  # type: ignore[arg-type]
        return parts
    if isinstance(parts, tuple) and len(parts) == 2 and callable(parts[0]) and not isinstance(parts[0], nn.Module):
        return parts
    raise WorkloadError(
        f"target: {target} must return (model, loss_fn, optimizer, batch) or (step, batch), not {_describe(parts)}"
    )


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
    sizes = {tuple(t.shape[:1]) for t in flatten(parts[-1])[0] if isinstance(t, Tensor) and t.dim()}
    if len(sizes) != 1 or 0 in (size := sizes.pop()):
        raise WorkloadError("the tensors of the example batch do not share a first dimension, so it has no known size")
    return int(size[0])


def with_batch(parts: Parts, batch: int) -> Parts:
    """The same with an example batch of so many examples; raises WorkloadError as ``leading`` does.

    A tensor that stands there twice does so in it, too, and tensors that are parts of one memory stay that.
    """
    own = leading(parts)
    made: dict[int, Tensor] = {}
    memory: dict[int, torch.UntypedStorage] = {}

    def resized(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or not tensor.dim():
            return tensor
        if id(tensor) not in made:
            made[id(tensor)] = larger(tensor)
        return made[id(tensor)]

    def larger(tensor: Tensor) -> Tensor:
        whole, shape = tensor.untyped_storage(), (batch, *tensor.shape[1:])
        if tensor.stride(0) * tensor.itemsize * own != whole.nbytes():  # a part of larger memory
            if tensor.stride(0) != math.prod(shape[1:]):  # the examples do not lie one after the other
                return tensor.new_empty(shape)
            return torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        if whole._cdata not in memory:
            memory[whole._cdata] = torch.UntypedStorage(whole.nbytes() // own * batch, device=tensor.device)
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(memory[whole._cdata], tensor.storage_offset(), shape, tensor.stride())  # type: ignore[call-overload,no-any-return]

    leaves, spec = flatten(parts[-1])
    return (*parts[:-1], tree_unflatten(list(map(resized, leaves)), spec))  # type: ignore[return-value]


def _describe(value: object) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(type(v).__name__ for v in value) + ")"
    return type(value).__name__
