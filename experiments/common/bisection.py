"""The largest batch, or depth, that a memory holds, and the least memory that holds something."""

from __future__ import annotations

from collections.abc import Callable


def largest(fits: Callable[[int], bool], first: int, most: int, part: int | None = None) -> int:
    """The largest integer that fits, by doubling, then bisection: about 2 log2(answer / first) calls.

    Args:
        fits: whether a size fits; where a size does, every smaller one is taken to.
        first: tried first; at least 1. The nearer to the answer, the fewer calls.
        most: nothing above it is tried.
        part: the answer need only be exact to 1 / ``part`` of it.

    Returns:
        A size for which ``fits`` was true, at most ``most``; 0 where not even 1 fits. Unless it is ``most`` (or
        ``part`` is given), ``fits`` was false for the next one.

    Raises:
        ValueError: ``first`` is below 1 or above ``most``.
    """
    if not 1 <= first <= most:
        raise ValueError(f"first: expected 1 to {most}, got {first}")
    if fits(first):
        low, high = first, min(2 * first, most + 1)
        while high <= most and fits(high):
            low, high = high, min(2 * high, most + 1)
    else:
        low, high = 0, first
    return between(lambda size: not fits(size), low, high, part=part)[0]


def between(
    fits: Callable[[int], bool], low: int, high: int, within: int = 1, part: int | None = None
) -> tuple[int, int]:
    """Where what does not fit (``low``) meets what does (``high``), by bisection: at most ``within`` apart, or
    1 / ``part`` of ``low``."""
    while high - low > max(within, 1, low // part if part else 1):
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return low, high
