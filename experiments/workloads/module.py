"""User-defined models, imported and called as ``pkg.mod:factory``."""

from __future__ import annotations

import difflib
import importlib
import math
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.utils._pytree import tree_unflatten

from executor.capture.batches import flatten
from executor.capture.operators import is_user_file

# Arguments of capture() (no optimizer: a step without gradients), or a user-defined step and its arguments.
Parts = tuple[nn.Module, Callable[[Any, Any], Any] | None, optim.Optimizer | None, Any] | tuple[Callable[..., Any], Any]


class WorkloadError(ValueError):
    """Raised if a workload's configuration is invalid; the message is one sentence naming the entry."""


def build(*, target: object) -> Parts:
    """Calls the factory that ``target`` names.

    Args:
        target: ``"pkg.mod:factory"``; the working directory is on the import path.

    Returns:
        Model, loss function (None if the model returns its loss), optimizer and example batch; or a step of any form,
        as ``capture_step`` accepts it, and its arguments.

    Raises:
        WorkloadError: The target cannot be imported or called, or returns something else.
    """
    factory = import_target(target)
    try:
        parts = factory()
    except Exception as error:
        raise WorkloadError(f"target: {target} raised {type(error).__name__}: {error}{_line(error)}") from error
    expected = (nn.Module, (Callable, type(None)), optim.Optimizer, object)
    if isinstance(parts, tuple) and len(parts) == 4 and all(map(isinstance, parts, expected)):
        return parts
    if isinstance(parts, tuple) and len(parts) == 2 and callable(parts[0]) and not isinstance(parts[0], nn.Module):
        return parts
    raise WorkloadError(
        f"target: {target} must return (model, loss_fn, optimizer, batch) or (step, batch), not {_describe(parts)}"
    )


def import_target(target: object) -> Callable[..., Any]:
    """Returns the function or class ``"pkg.mod:name"``; the working directory is on the import path.

    Raises:
        WorkloadError: The target cannot be imported, or is not callable.
    """
    if not isinstance(target, str) or target.count(":") != 1 or not all(target.split(":")):
        raise WorkloadError(f"target: expected 'pkg.mod:factory', got {target!r}")
    name, attribute = target.split(":")
    if Path(name).suffix == ".py":
        raise WorkloadError(f"target: expected a module, got the file {name!r}; the module is {_module_of(name)!r}")
    folder = str(Path.cwd())
    added = folder not in sys.path and "" not in sys.path
    if added:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(error.name + ".")):
            files = sorted(path.stem for path in Path.cwd().glob("*.py"))
            raise WorkloadError(f"target: module {error.name!r} not found{_nearest(name, files)}") from None
        raise WorkloadError(f"target: cannot import module {name!r} (no module {error.name!r}); install it") from error
    except Exception as error:
        reason = f"{type(error).__name__}: {error}{_line(error)}"
        raise WorkloadError(f"target: cannot import module {name!r} ({reason})") from error
    finally:
        if added:
            sys.path.remove(folder)
    factory = getattr(module, attribute, None)
    if not callable(factory):
        problem = "nothing callable named" if hasattr(module, attribute) else "no attribute"
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise WorkloadError(f"target: module {name!r} has {problem} {attribute!r}{_nearest(attribute, own)}")
    return factory


def _module_of(file: str) -> str:
    """Returns the module path of a file in or below the working directory."""
    path = Path(file)
    parts = path.relative_to(Path.cwd()) if path.is_absolute() and path.is_relative_to(Path.cwd()) else path
    return ".".join(parts.with_suffix("").parts)


def _nearest(name: str, candidates: Sequence[str]) -> str:
    """Returns the nearest name as the end of a message, or "" without a similar one."""
    matches = difflib.get_close_matches(name, candidates, n=1)
    return f"; the nearest is {matches[0]!r}" if matches else ""


def _line(error: Exception) -> str:
    """Returns the last line of user code that an error passed through, as the end of a message, or ""."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if is_user_file(frame.filename) and frame.filename != __file__ and "-packages" not in frame.filename
    ]
    if isinstance(error, SyntaxError) or not frames:
        return ""  # the message of a SyntaxError names its line
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"


def batch_size_of(parts: Parts) -> int:
    """Returns the batch size: the first dimension, shared by all tensors of the batch except scalars.

    Raises:
        WorkloadError: The tensors do not share a first dimension.
    """
    sizes = {tuple(t.shape[:1]) for t in flatten(parts[-1])[0] if isinstance(t, Tensor) and t.dim()}
    if len(sizes) != 1 or 0 in (size := sizes.pop()):
        raise WorkloadError("example batch: expected tensors that share a first dimension, the batch size")
    return int(size[0])


def length_of(parts: Parts) -> int:
    """Returns the sequence length: the second dimension, shared by all tensors of the batch with at least two.

    Raises:
        WorkloadError: The batch has no token ids (integers of two dimensions), or the dimension is not shared.
    """
    tensors = [t for t in flatten(parts[-1])[0] if isinstance(t, Tensor)]
    if not any(t.dim() == 2 and not t.is_floating_point() for t in tensors):
        raise WorkloadError("the example batch has no token ids: expected integers of two dimensions")
    lengths = {t.shape[1] for t in tensors if t.dim() > 1}
    if len(lengths) != 1 or any(t.dim() > 2 for t in tensors):
        raise WorkloadError("example batch: expected tensors that share a second dimension, the sequence")
    return int(lengths.pop())


def longest_of(parts: Parts) -> int | None:
    """Returns the number of positions that the model has; None if it is unknown or not limited."""
    model = parts[0]
    if not isinstance(model, nn.Module):
        return None
    config = getattr(model, "config", None)
    known = [getattr(config, key, None) for key in ("max_position_embeddings", "n_positions")]
    tables = [m.num_embeddings for name, m in model.named_modules() if isinstance(m, nn.Embedding) and _is_places(name)]
    return min((n for n in (*known, *tables) if isinstance(n, int)), default=None)


def _is_places(name: str) -> bool:
    """Returns whether a module's path names an embedding of positions."""
    leaf = name.rpartition(".")[2]
    return "pos" in leaf or leaf == "wpe"


def with_length(parts: Parts, length: int) -> Parts:
    """Returns the parts with sequences of ``length`` tokens; raises WorkloadError as ``length_of`` does.

    A tensor that appears twice in the batch still does.
    """
    length_of(parts)
    resized: dict[int, Tensor] = {}

    def longer(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or tensor.dim() < 2:
            return tensor
        return resized.setdefault(id(tensor), tensor.new_zeros(tensor.shape[0], length))

    leaves, spec = flatten(parts[-1])
    return (*parts[:-1], tree_unflatten(list(map(longer, leaves)), spec))


def with_batch(parts: Parts, batch: int) -> Parts:
    """Returns the parts with an example batch of ``batch`` examples; raises WorkloadError as ``batch_size_of`` does.

    Aliasing is kept: a tensor that appears twice still does, and views of one storage still share it.
    """
    batch_size = batch_size_of(parts)
    resized_tensors: dict[int, Tensor] = {}
    memory: dict[int, torch.UntypedStorage] = {}

    def resized(tensor: Any) -> Any:
        if not isinstance(tensor, Tensor) or not tensor.dim():
            return tensor
        if id(tensor) not in resized_tensors:
            resized_tensors[id(tensor)] = larger(tensor)
        return resized_tensors[id(tensor)]

    def larger(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        shape = (batch, *tensor.shape[1:])
        if tensor.stride(0) * tensor.itemsize * batch_size != storage.nbytes():  # a view of a larger storage
            if tensor.stride(0) != math.prod(shape[1:]):  # examples are not contiguous
                return tensor.new_empty(shape)
            return torch.empty_strided(shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        if storage._cdata not in memory:
            memory[storage._cdata] = torch.UntypedStorage(storage.nbytes() // batch_size * batch, device=tensor.device)
        empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return empty.set_(memory[storage._cdata], tensor.storage_offset(), shape, tensor.stride())

    leaves, spec = flatten(parts[-1])
    return (*parts[:-1], tree_unflatten(list(map(resized, leaves)), spec))


def _describe(value: object) -> str:
    if isinstance(value, tuple):
        return "(" + ", ".join(type(v).__name__ for v in value) + ")"
    return type(value).__name__
