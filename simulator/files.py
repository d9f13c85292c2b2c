"""Reads and writes the project's JSON files: validated on reading, written atomically."""

from __future__ import annotations

import gc
import glob
import gzip
import json
import os
import re
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields as dataclass_fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import IO, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

T = TypeVar("T")
LONGEST = 500  # characters of an error message that quotes a file
ABANDONED_AFTER_S = 3600.0  # seconds after which a temporary file counts as abandoned


class FormatError(ValueError):
    """Raised for a malformed file or dictionary; the message names the entry and has at most LONGEST characters."""

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= LONGEST else message[: LONGEST - 3] + "...")


def fields(
    data: object, where: str, required: Mapping[str, type], optional: Mapping[str, tuple[type, Any]]
) -> dict[str, Any]:
    """Checks that ``data`` is an object with all required keys and no keys besides the optional ones.

    Args:
        data: Parsed JSON or YAML.
        where: Name of the entry in error messages.
        required: Type of each required key: str, int, float, bool, list, dict, or a Literal of its choices.
        optional: Type and default of each optional key.

    Returns:
        A new dictionary with every key present.

    Raises:
        FormatError: ``data`` is no object, a key is unknown or missing, or a value has another type.
    """
    if not isinstance(data, dict):
        raise FormatError(f"{where}: expected an object, got {_describe(data)}")
    for key in data:
        if key not in required and key not in optional:
            raise FormatError(f"{where}: unknown key {key!r}; expected some of {', '.join([*required, *optional])}")
    out: dict[str, Any] = {}
    for key, kind in required.items():
        if key not in data:
            raise FormatError(f"{where}: missing key {key!r}")
        out[key] = _typed(data[key], kind, f"{where}.{key}")
    for key, (kind, default) in optional.items():
        out[key] = _typed(data[key], kind, f"{where}.{key}") if key in data else default
    return out


def keys_of(dataclass: Any) -> tuple[dict[str, type], dict[str, tuple[type, Any]]]:
    """Returns the required and the optional keys (see ``fields``) of a dataclass with an entry per field.

    Types follow from the resolved annotations. A tuple is a list in a file, another dataclass or mapping an object. An
    optional field is absent, never null.
    """
    types = _entry_types(dataclass)
    required: dict[str, type] = {}
    optional: dict[str, tuple[type, Any]] = {}
    for field in dataclass_fields(dataclass):
        kind = types[field.name]
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if default is MISSING:
            required[field.name] = kind
        else:
            optional[field.name] = kind, default
    return required, optional


@cache
def _entry_types(dataclass: Any) -> dict[str, Any]:
    """Returns the type of each field's entry, as ``_typed`` checks it."""
    hints = get_type_hints(dataclass)
    return {field.name: _entry_type(hints[field.name]) for field in dataclass_fields(dataclass)}


def _entry_type(hint: Any) -> Any:
    if get_origin(hint) in (Union, UnionType):
        (hint,) = (option for option in get_args(hint) if option is not NoneType)
    if get_origin(hint) is Literal or hint in _NAMES:
        return hint
    return list if get_origin(hint) is tuple else dict


def _typed(value: Any, kind: Any, where: str) -> Any:
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if value not in choices:
            raise FormatError(f"{where}: expected one of {', '.join(map(str, choices))}, got {_describe(value)}")
        return value
    # bool is an int in Python but not in the format; an integer is an acceptable float.
    converted = float(value) if kind is float and type(value) is int else value
    if isinstance(converted, bool) != (kind is bool) or not isinstance(converted, kind):
        raise FormatError(f"{where}: expected {_NAMES[kind]}, got {_describe(value)}")
    return converted


_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


def _describe(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


def label(name: str) -> str:
    """Returns ``name`` as a path component: at most 80 letters, digits and ``_ + . -``, not hidden."""
    return re.sub(r"[^\w+.-]", "_", name)[:80].lstrip(".") or "_"


def integers(values: Any, where: str, length: int | None = None) -> tuple[int, ...]:
    """Checks a list of integers (of length ``length`` if given); raises FormatError that names ``where``."""
    if not isinstance(values, list):
        raise FormatError(f"{where}: expected a list, got {_describe(values)}")
    if length is not None and len(values) != length:
        raise FormatError(f"{where}: expected {length} integers, got {len(values)}")
    return tuple(_typed(v, int, f"{where}[{i}]") for i, v in enumerate(values))


def read_bytes(path: str | Path) -> bytes:
    """Returns the content of a file, decompressed if its name ends in .gz.

    Raises:
        FormatError: The file cannot be read; the message names it.
    """
    path = Path(path)
    try:
        raw = path.read_bytes()
        return gzip.decompress(raw) if path.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:  # missing, truncated, or not gzip
        raise FormatError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None


def read_json(path: str | Path) -> Any:
    """Reads JSON, decompressed if the name ends in .gz.

    Raises:
        FormatError: As in ``read_bytes``, or the content is not JSON, or an object has a duplicate key.
    """
    raw = read_bytes(path)
    try:
        return json.loads(raw, object_pairs_hook=_unique_keys)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, or nested too deeply
        raise FormatError(f"{path}: not JSON ({error})") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        names = [name for name, _ in pairs]
        raise FormatError(
            f"duplicate key {next(name for name in names if names.count(name) > 1)!r} in an object; keep one"
        )
    return out


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses duplicate keys, of which PyYAML would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise FormatError(f"line {key.start_mark.line + 1}: duplicate key {key.value!r}; keep one")
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path) -> Any:
    """Reads YAML.

    Raises:
        FormatError: As in ``read_bytes``, or the content is not YAML, or an object has a duplicate key.
    """
    raw = read_bytes(path)
    try:
        return yaml.load(raw, _UniqueKeyLoader)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # bad YAML, no such date, or nested too deeply
        raise FormatError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None


def load_json(path: str | Path, from_dict: Callable[[object], T]) -> T:
    """Reads a JSON file and converts it with ``from_dict``; every FormatError names the file."""
    data = read_json(path)
    try:
        return from_dict(data)
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None


def write_atomically(path: str | Path, write: Callable[[IO[bytes]], object]) -> None:
    """Writes a file atomically: ``write`` fills a temporary file in the same folder, which is then renamed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.????????"):  # left by killed processes
        if time.time() - leftover.stat().st_mtime > ABANDONED_AFTER_S:
            leftover.unlink(missing_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            write(file)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def write_text(path: str | Path, text: str) -> None:
    """Writes a file atomically, compressed if the name ends in .gz."""
    raw = text.encode()
    if Path(path).suffix == ".gz":
        raw = gzip.compress(raw, mtime=0)  # without a time stamp, equal content gives equal bytes
    write_atomically(path, lambda file: file.write(raw))


def write_json(path: str | Path, data: Any, indent: int | None = None) -> None:
    """Writes JSON atomically (gzip if the name ends in .gz)."""
    write_text(path, json.dumps(data, indent=indent) + "\n")


@contextmanager
def no_collections() -> Iterator[None]:
    """Disables garbage collection, which would otherwise take half of the time on many long-lived objects.

    As a decorator, disables it during the call.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
