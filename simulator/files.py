"""Reading and writing the project's JSON files: checked at the edge, written whole or not at all."""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class FormatError(ValueError):
    """A file or dictionary from outside is malformed; the message names the entry."""


def fields(
    data: object, where: str, required: Mapping[str, type], optional: Mapping[str, tuple[type, Any]]
) -> dict[str, Any]:
    """Checks that ``data`` is an object with the required keys, perhaps the optional ones, and no others.

    Args:
        where: how error messages name the entry.
        optional: type and default of each key that may be left out.

    Returns:
        A new dictionary with every key present.
    """
    if not isinstance(data, dict):
        raise FormatError(f"{where}: expected an object, got {_describe(data)}")
    for key in data:
        if key not in required and key not in optional:
            raise FormatError(f"{where}: unknown key {key!r}")
    out: dict[str, Any] = {}
    for key, kind in required.items():
        if key not in data:
            raise FormatError(f"{where}: missing key {key!r}")
        out[key] = _typed(data[key], kind, f"{where}.{key}")
    for key, (kind, default) in optional.items():
        out[key] = _typed(data[key], kind, f"{where}.{key}") if key in data else default
    return out


def _typed(value: Any, kind: type, where: str) -> Any:
    # bool is an int in Python but not in the format; an integer is an acceptable float.
    ok = isinstance(value, kind) and not (kind is not bool and isinstance(value, bool))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not ok:
        raise FormatError(f"{where}: expected {_NAMES[kind]}, got {_describe(value)}")
    return value


_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "true or false", list: "a list",
          dict: "an object"}  # fmt: skip


def _describe(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


def integers(values: Any, where: str, length: int | None = None) -> tuple[int, ...]:
    """Checks a list of integers (of a given length)."""
    if not isinstance(values, list):
        raise FormatError(f"{where}: expected a list, got {_describe(values)}")
    if length is not None and len(values) != length:
        raise FormatError(f"{where}: expected {length} integers, got {len(values)}")
    return tuple(_typed(v, int, f"{where}[{i}]") for i, v in enumerate(values))


def read_json(path: str | Path) -> Any:
    """Reads JSON, through gzip when the name ends in .gz.

    Raises:
        FormatError: the file cannot be read or is not JSON; the message names it.
    """
    path = Path(path)
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        return json.loads(raw)
    except (OSError, EOFError, zlib.error) as error:  # no such file, cut off, or not gzip inside
        raise FormatError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, or nested too deeply
        raise FormatError(f"{path}: not JSON ({error})") from None


def load_json(path: str | Path, from_dict: Callable[[object], T]) -> T:
    """Reads a file and makes an object of it; every FormatError names the file."""
    data = read_json(path)
    try:
        return from_dict(data)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


def write_text(path: str | Path, text: str) -> None:
    """Writes a whole file or nothing: to a temporary name beside it, then renamed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = text.encode()
    if path.suffix == ".gz":
        raw = gzip.compress(raw, mtime=0)  # no time stamp: equal content, equal bytes
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_json(path: str | Path, data: Any, indent: int | None = None) -> None:
    """Writes JSON (gzip when the name ends in .gz), whole or not at all."""
    write_text(path, json.dumps(data, indent=indent) + "\n")
