"""Parses memory limits and sizes.

A limit is a fraction of a program's peak (above 0, at most 1; also ``80%``), an integer (bytes), or a size:
``24GiB``, ``500MB``, ``1.5 GB``. Units are case-insensitive: B; kB, MB, GB, TB (powers of 1000); KiB, MiB, GiB, TiB
(powers of 1024). A single letter (``24G``) is rejected as ambiguous. Numbers may be strings (``"0.6"``), as argparse
passes them. A bare number too small for bytes (``24``) is rejected with a hint at GiB.
"""

from __future__ import annotations

import re
from decimal import Decimal
from math import isfinite
from numbers import Integral, Real
from typing import TYPE_CHECKING

from simulator.files import FormatError

if TYPE_CHECKING:
    from simulator.program import Program

UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
LEAST = 1024  # smallest number without a unit that counts as bytes


def size_bytes(value: object, where: str = "size", least: int = LEAST) -> int:
    """Returns a size in bytes from an integer or a size with a unit, rounded down.

    Args:
        value: Integer or text, such as ``"24GiB"``.
        where: Name of the entry in error messages.
        least: Smallest number without a unit that counts as bytes.

    Returns:
        The size in bytes, at least 1.

    Raises:
        FormatError: The value is neither, or less than one byte.
    """
    if (nbytes := _size(value, where, least)) is None:
        raise FormatError(
            f"{where}: expected an integer (bytes) or a size such as 24GiB or 500MB, got {value!r}{_nearest(value)}"
        )
    return nbytes


def limit_bytes(value: object, program: Program, where: str = "limit") -> int:
    """Returns a limit in bytes, persistent tensors included; fractions are relative to ``program.peak_bytes``.

    Args:
        value: Fraction, integer (bytes) or size; see the module.
        program: Program whose peak a fraction refers to.
        where: Name of the entry in error messages.

    Returns:
        The limit in bytes; a fraction is rounded down.

    Raises:
        FormatError: The value is not a limit.
    """
    if (fraction := _fraction(value)) is not None:
        return int(program.peak_bytes * fraction)
    nbytes = _size(value, where, LEAST if program.peak_bytes >= LEAST else 1)  # programs in tests may be smaller
    if nbytes is None:
        raise _no_limit(value, where)
    return nbytes


def check_limit(value: object, where: str = "limit") -> None:
    """Checks a limit before its program is known.

    Args:
        value: Fraction, integer (bytes) or size; see the module.
        where: Name of the entry in error messages.

    Raises:
        FormatError: The value is not a limit.
    """
    if _fraction(value) is None and _size(value, where, LEAST) is None:
        raise _no_limit(value, where)


def is_fraction(value: object) -> bool:
    """Returns whether a limit is a fraction of a program's peak."""
    return _fraction(value) is not None


def _no_limit(value: object, where: str) -> FormatError:
    return FormatError(
        f"{where}: expected a positive fraction of the peak (at most 1), an integer (bytes), or a size such "
        f"as 24GiB, 500MB or 80%, got {value!r}{_nearest(value)}"
    )


def _nearest(value: object) -> str:
    """Returns the sizes that a single letter as the unit may mean, as the end of a message, or ""."""
    number, unit = _number_and_unit(value)
    if number is None or len(unit) != 1 or f"{unit}ib" not in UNITS:
        return ""
    prefix = unit if unit == "k" else unit.upper()
    return f"; was {number}{unit.upper()}iB or {number}{prefix}B meant?"


def _number_and_unit(value: object) -> tuple[Decimal | None, str]:
    """Returns the number and its unit in lower case ("": no unit); None if the value is not a number."""
    if isinstance(value, str):
        pattern = r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]+|%|)\s*"
        match = re.fullmatch(pattern, value, re.IGNORECASE | re.ASCII)
        return (Decimal(match[1]), match[2].lower()) if match else (None, "")
    if not isinstance(value, Real) or isinstance(value, bool) or not isfinite(value):  # includes NumPy scalars
        return None, ""
    return Decimal(int(value) if isinstance(value, Integral) else float(value)), ""


def _fraction(value: object) -> float | None:
    number, unit = _number_and_unit(value)
    if number is None or unit not in ("", "%"):
        return None
    fraction = float(number / 100 if unit else number)
    return fraction if 0 < fraction <= 1 else None


def _size(value: object, where: str, least: int) -> int | None:
    """Returns a size in bytes, or None; raises FormatError for a bare number up to ``least``, which cannot be bytes."""
    number, unit = _number_and_unit(value)
    if not unit and number is not None and 1 < number < least:
        raise FormatError(f"{where}: {value} would be {value} bytes; was {value}GiB meant?")
    if number is None or unit not in ("", *UNITS) or (not unit and number != int(number)):
        return None
    nbytes = int(number * UNITS[unit or "b"])
    return nbytes if 1 <= nbytes < 2**63 else None
