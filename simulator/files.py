"""Reads and writes the project's JSON files: validated on reading, written atomically."""

from __future__ import annotations

import gc
import glob
import gzip
import json
import os
import re
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, fields as dataclass_fields
from pathlib import Path
from typing import IO, Any, TypeVar

import yaml

T = TypeVar("T")
MOST_BYTES = 2**29  # largest size of a file after decompression
LONGEST = 500  # characters of an error message that quotes a file
ABANDONED_AFTER_S = 3600.0  # seconds after which a temporary file counts as abandoned
MOST_LEVELS = 32  # deepest nesting in YAML


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
        required: Type of each required key.
        optional: Type and default of each optional key.

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


def keys_of(dataclass: Any) -> tuple[dict[str, type], dict[str, tuple[type, Any]]]:
    """Returns the required and the optional keys (see ``fields``) of a dataclass with a JSON entry per field."""
    required: dict[str, type] = {}
    optional: dict[str, tuple[type, Any]] = {}
    for field in dataclass_fields(dataclass):
        kind = _TYPES.get(re.split(r"\W", str(field.type))[0], dict)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if default is MISSING:
            required[field.name] = kind
        else:
            optional[field.name] = kind, default
    return required, optional


def _typed(value: Any, kind: type, where: str) -> Any:
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
_TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool, "tuple": list}


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
    """Returns the content of a file, decompressed if its name ends in .gz; at most MOST_BYTES, compressed or not.

    Raises:
        FormatError: The file cannot be read, is not a regular file (a pipe, a directory), or is too large; the message
            names it.
    """
    path = Path(path)
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise FormatError(f"{path}: cannot be read ({'Is a directory' if path.is_dir() else 'not a regular file'})")
        with path.open("rb") as file, gzip.open(file) if path.suffix == ".gz" else nullcontext(file) as stream:
            raw = stream.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:  # missing, truncated, or not gzip
        raise FormatError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if len(raw) > MOST_BYTES:
        raise FormatError(f"{path}: larger than {MOST_BYTES:,} bytes")
    return bytes(raw)


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
        raise FormatError(f"duplicate key {next(name for name in names if names.count(name) > 1)!r} in an object")
    return out


class _StrictLoader(yaml.SafeLoader):
    """Refuses aliases, duplicate keys and nesting beyond MOST_LEVELS."""

    level = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        line = f"line {event.start_mark.line + 1}"
        if isinstance(event, yaml.AliasEvent):
            raise FormatError(f"{line}: aliases are not supported")
        self.level += 1
        if self.level > MOST_LEVELS and isinstance(event, yaml.CollectionStartEvent):
            raise FormatError(f"{line}: nested too deeply")
        node = super().compose_node(parent, index)
        self.level -= 1
        seen_keys: set[str] = set()
        keys = [key for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
        for key in keys:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen_keys:
                    raise FormatError(f"line {key.start_mark.line + 1}: duplicate key {key.value!r}")
                seen_keys.add(key.value)
        return node


def read_yaml(path: str | Path) -> str:
    """Returns the text of a YAML file without aliases, duplicate keys or nesting beyond MOST_LEVELS.

    Raises:
        FormatError: As in ``read_bytes``, or the content violates these restrictions.
    """
    raw = read_bytes(path)
    try:
        text = raw.decode()
        _StrictLoader(text).get_single_node()
    except FormatError as error:
        raise FormatError(f"{path}: {error}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"{path}: cannot be read ({' '.join(str(error).split())})") from None
    return text


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
