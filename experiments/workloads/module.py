"""Anybody's own model: ``pkg.mod:factory``, imported and called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn, optim

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


def _describe(value: object) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(type(v).__name__ for v in value) + ")"
    return type(value).__name__
