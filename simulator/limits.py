"""Memory limits as people write them, in bytes.

A limit is a fraction of a program's peak (above 0, at most 1; also ``80%``), an integer (bytes), or a size:
``24GiB``, ``500MB``, ``1.5 GB``. The units are B; kB, MB, GB, TB of 1000; KiB, MiB, GiB, TiB of 1024, in any case.
A letter alone (``24G``) is refused: some tools mean 10**9 by it, others 2**30.
"""

from __future__ import annotations

import re
from decimal import Decimal
from numbers import Real
from typing import TypeGuard

from simulator.files import FormatError
from simulator.program import Program

UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
         "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}  # fmt: skip
_NUMBER_AND_UNIT = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]+|%)\s*", re.IGNORECASE | re.ASCII)


def size_bytes(value: object, where: str = "size") -> int:
    """An integer (bytes), or a size with its unit, rounded down.

    Args:
        where: how error messages name the entry.

    Raises:
        FormatError: it is neither, or no byte.
    """
    found = _size(value)
    if found is None:
        raise FormatError(f"{where}: expected an integer (bytes) or a size such as 24GiB or 500MB, got {value!r}")
    return found


def limit_bytes(value: object, program: Program, where: str = "limit") -> int:
    """A limit in bytes, persistent tensors included; a fraction is one of ``program.peak_bytes``.

    Args:
        where: how error messages name the entry.

    Raises:
        FormatError: it is no limit.
    """
    part = _fraction(value)
    found = int(program.peak_bytes * part) if part is not None else _size(value)
    if found is None:
        raise FormatError(
            f"{where}: expected a positive fraction of the peak (at most 1), an integer (bytes), or a size such "
            f"as 24GiB, 500MB or 80%, got {value!r}"
        )
    return found


def is_fraction(value: object) -> bool:
    """Whether a limit is a fraction of a program's peak."""
    return _fraction(value) is not None


def _fraction(value: object) -> float | None:
    if isinstance(value, str):
        parts = _NUMBER_AND_UNIT.fullmatch(value)
        value = float(parts[1]) / 100 if parts and parts[2] == "%" else None
    return float(value) if _is_number(value) and 0 < value <= 1 else None


def _size(value: object) -> int | None:
    if isinstance(value, str):
        parts = _NUMBER_AND_UNIT.fullmatch(value)
        unit = UNITS.get(parts[2].lower()) if parts else None
        value = int(Decimal(parts[1]) * unit) if parts and unit else None
    return int(value) if _is_number(value) and 1 <= value < 2**63 and int(value) == value else None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)  # NumPy's, too
