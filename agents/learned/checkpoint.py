"""Files of training states and of weights. They are written whole or not at all, and nothing in them is executed."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from simulator.files import FormatError, read_bytes, write_whole

FORMAT = "dqn-checkpoint/1"
Net = TypeVar("Net", bound=nn.Module)


class TrainingStateError(ValueError):
    """A checkpoint cannot be used; the message is one sentence."""


def write_training_state(path: Path, state: dict[str, Any]) -> None:
    """Writes tensors, numbers, strings, lists and dictionaries: to a temporary name beside ``path``, then renamed."""
    write_whole(path, lambda file: torch.save({"format": FORMAT, **state}, file))


def read_training_state(path: Path) -> dict[str, Any]:
    """The dictionary in a checkpoint file (weights_only: nothing in it is executed).

    Raises:
        TrainingStateError: it cannot be read or is no checkpoint.
    """
    try:
        state = _load(path)
    except FormatError as error:
        raise TrainingStateError(str(error)) from None
    except Exception:  # torch.load raises half a dozen types, by what is damaged
        raise TrainingStateError(f"{path}: not a checkpoint, or a damaged one") from None
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise TrainingStateError(f"{path}: not a checkpoint of this program")
    return state


def _load(path: Path) -> Any:
    """What ``torch.load`` makes of a file whose checksums are right."""
    raw = read_bytes(path)
    with zipfile.ZipFile(io.BytesIO(raw)) as parts:
        if damaged := parts.testzip():
            raise ValueError(f"{damaged} is damaged")
    return torch.load(io.BytesIO(raw), weights_only=True, map_location="cpu")


def must_match(path: Path, state: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raises TrainingStateError naming the first entry of ``identity`` that the checkpoint has otherwise."""
    for key, value in identity.items():
        theirs = state.get(key)
        if theirs == value:
            continue
        if key == "config" and isinstance(theirs, dict):
            key = next((f"agent.{k}" for k in value if theirs.get(k) != value[k]), key)
        raise TrainingStateError(f"{path}: the checkpoint is of a run with another {key}")


@contextmanager
def restoring(path: Path) -> Iterator[None]:
    """What goes wrong while a state is taken over means that it is damaged: raises TrainingStateError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, RuntimeError, IndexError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TrainingStateError(f"{path}: the checkpoint is damaged ({reason})") from None


def save_weights(net: nn.Module, path: Path) -> None:
    """Writes ``net.settings``, the keyword arguments of its class, and its weights, for ``read_weights``."""
    state = {"settings": net.settings, "weights": net.state_dict()}
    write_whole(path, lambda file: torch.save(state, file))


def read_weights(path: Path, kind: type[Net], what: str) -> Net:
    """A network of class ``kind`` from a file of weights; nothing in it is executed.

    Raises:
        FormatError: it cannot be read, or holds no weights of ``what``.
    """
    try:
        state = _load(path)
        net = kind(**state["settings"])
        net.load_state_dict(state["weights"])
    except FormatError as error:
        raise FormatError(f"weights: {error}") from None
    except Exception:  # torch.load raises half a dozen types, by what is damaged
        raise FormatError(f"weights: {path} holds no weights of {what}, or damaged ones") from None
    return net.eval()
