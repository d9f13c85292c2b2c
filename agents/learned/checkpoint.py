"""Files of training states and weights, written atomically and read without executing any content."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from simulator.files import FormatError, read_bytes, write_atomically

FORMAT = "dqn-checkpoint/1"
Net = TypeVar("Net", bound=nn.Module)


class TrainingStateError(ValueError):
    """Raised if a checkpoint cannot be used."""


def write_training_state(path: Path, state: dict[str, Any]) -> None:
    """Writes tensors, numbers, strings, lists and dictionaries atomically (temporary file, then rename)."""
    write_atomically(path, lambda file: torch.save({"format": FORMAT, **state}, file))


def read_training_state(path: Path) -> dict[str, Any]:
    """Returns the dictionary of a checkpoint file (``weights_only``).

    Raises:
        TrainingStateError: if the file cannot be read or is not a checkpoint.
    """
    try:
        state = _load(path)
    except FormatError as error:
        raise TrainingStateError(str(error)) from None
    except Exception:  # torch.load raises many types for damaged files
        raise TrainingStateError(f"{path}: not a checkpoint, or a damaged one; train again without it") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise TrainingStateError(f"{path}: not a checkpoint of train_dqn; pass its run folder or checkpoint.pt")
    return state


def _load(path: Path) -> Any:
    """Checks the file's checksums and loads it with ``torch.load``."""
    raw = read_bytes(path)
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        if damaged := archive.testzip():
            raise ValueError(f"{damaged} is damaged")
    return torch.load(io.BytesIO(raw), weights_only=True, map_location="cpu")


def must_match(path: Path, state: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raises TrainingStateError naming the first entry of ``identity`` that differs in the checkpoint."""
    for key, value in identity.items():
        stored = state.get(key)
        if stored == value:
            continue
        if key == "config" and isinstance(stored, dict):
            key = next((f"agent.{k}" for k in value if stored.get(k) != value[k]), key)
        raise TrainingStateError(
            f"{path}: the checkpoint belongs to a run with a different {key}; use its value, or start a new run"
        )


@contextmanager
def restoring(path: Path) -> Iterator[None]:
    """Converts errors while a state is restored into TrainingStateError, because they mean a damaged file."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TrainingStateError(f"{path}: the checkpoint is damaged ({reason}); train again without it") from None


def save_weights(net: nn.Module, path: Path) -> None:
    """Writes a network's weights and ``net.settings``, the keyword arguments of its class, for ``read_weights``."""
    state = {"settings": net.settings, "weights": net.state_dict()}
    write_atomically(path, lambda file: torch.save(state, file))


def read_weights(path: Path, kind: type[Net], description: str) -> Net:
    """Returns a network of class ``kind`` from a file of weights, without executing any content.

    Raises:
        FormatError: if the file cannot be read or does not contain weights of ``description``.
    """
    try:
        state = _load(path)
        with torch.random.fork_rng(devices=[]):  # the initial weights, which are replaced, are drawn
            net = kind(**state["settings"])
        net.load_state_dict(state["weights"])
    except FormatError as error:
        raise FormatError(f"weights: {error}") from None
    except Exception:  # torch.load raises many types for damaged files
        raise FormatError(
            f"weights: {path} does not contain weights of {description}, or is damaged; train them again"
        ) from None
    return net.eval()
