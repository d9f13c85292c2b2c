"""Integer searches by doubling and bisection: the largest feasible batch, the smallest feasible memory."""

from __future__ import annotations

from collections.abc import Callable


def largest(fits: Callable[[int], bool], first: int, most: int, part: int | None = None) -> int:
    """Returns the largest integer that fits, by doubling, then bisection: about 2 log2(answer / first) calls.

    Args:
        fits: whether a size fits; must be monotone (if a size fits, every smaller size does).
        first: size that is tried first, at least 1. A value near the answer saves calls.
        most: upper bound of the search.
        part: relative precision: the answer may be off by 1 / ``part`` of itself. None: exact.

    Returns:
        A size for which ``fits`` was true, at most ``most``; 0 if not even 1 fits. Unless it equals ``most`` (or
        ``part`` is given), ``fits`` was false for the next size.

    Raises:
        ValueError: ``first`` is below 1 or above ``most``.
    """
    if not 1 <= first <= most:
        raise ValueError(f"first: expected 1 to {most}, got {first}")
    if fits(first):
        low = first
        high = min(2 * first, most + 1)
        while high <= most and fits(high):
            low = high
            high = min(2 * high, most + 1)
    else:
        low = 0
        high = first
    return bisect(lambda size: not fits(size), low, high, part=part)[0]


def bisect(
    fits: Callable[[int], bool], low: int, high: int, tolerance: int = 1, part: int | None = None
) -> tuple[int, int]:
    """Bisects between a size that does not fit (``low``) and one that does (``high``).

    Stops when they are at most ``tolerance`` apart, or 1 / ``part`` of ``low``; returns both.
    """
    while high - low > max(tolerance, 1, low // part if part else 1):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low, high
