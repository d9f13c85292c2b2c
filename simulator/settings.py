"""Reads mappings into dataclasses: one check of types, ranges, choices, unknown keys and missing keys.

The types of entries follow from the annotations of the fields (``files.keys_of``). ``at_least``, ``positive`` and
``one_of`` declare fields with a range or a set of choices, which ``check`` enforces when an instance is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, field, fields as dataclass_fields
from typing import Any, TypeVar

from simulator.files import FormatError, fields, keys_of

T = TypeVar("T")


def at_least(least: float, default: Any = MISSING) -> Any:
    """Declares a numeric field with a lower bound; None: not given."""
    return _declared(default, lambda value: value >= least, f"at least {least}")


def positive(default: Any) -> Any:
    """Declares a numeric field that must be above 0; None: not given."""
    return _declared(default, lambda value: value > 0, "more than 0")


def one_of(choices: Sequence[Any], default: Any) -> Any:
    """Declares a field with a fixed set of values."""
    return _declared(default, lambda value: value in choices, f"one of {', '.join(map(str, choices))}")


def _declared(default: Any, accepts: Callable[[Any], bool], expected: str) -> Any:
    return field(default=default, metadata={"accepts": accepts, "expected": expected})


def check(settings: Any) -> None:
    """Raises ValueError that names the first field of a dataclass whose value it does not accept."""
    for entry in dataclass_fields(settings):
        if "accepts" in entry.metadata and (value := getattr(settings, entry.name)) is not None:
            if not entry.metadata["accepts"](value):
                raise ValueError(f"{entry.name}: expected {entry.metadata['expected']}, got {value!r}")


def read(kind: type[T], data: object, where: str) -> T:
    """Returns a dataclass from a mapping with an entry per field; fields with a default are optional.

    Args:
        kind: Dataclass whose annotations are among those of ``files.keys_of``.
        data: Parsed JSON or YAML.
        where: Name of the mapping in error messages.

    Returns:
        The dataclass, checked field by field.

    Raises:
        FormatError: A key is unknown or missing, or a value has the wrong type or is out of range; the message names
            the first such entry.
    """
    values = fields(data, where, *keys_of(kind))
    try:
        return kind(**values)
    except FormatError:
        raise
    except ValueError as error:  # of ``check``; begins with the name of the field
        raise FormatError(f"{where}.{error}") from None
