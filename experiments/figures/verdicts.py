"""Rules by which a figure's numbers decide the verdict on a claim of its paper.

A claim is checked in cases (networks, limits, rows). It is

- *reproduced* if it holds in all cases,
- *refuted* if the opposite holds in more than half of them,
- *a tie* if neither holds in any,
- *partly* reproduced if it holds in at least half of them,
- *not reproduced* otherwise.

Without a case there is no verdict, and the claim is left out. Templates call these functions by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

REPRODUCED = "reproduced"
PARTLY = "partly"
TIE = "tie"
NOT_REPRODUCED = "not reproduced"
REFUTED = "refuted"
VERDICTS = (REPRODUCED, PARTLY, TIE, NOT_REPRODUCED, REFUTED)
OURS = "–"  # the paper's cell of a control or of a claim of ours
CONTROLS = {REPRODUCED: "holds", NOT_REPRODUCED: "does not hold", REFUTED: "the opposite holds"}  # words for those
WITHIN = 0.1  # relative difference up to which a number agrees with the paper's


def leads(ahead: int, behind: int, total: int) -> str | None:
    """Returns the verdict on "better than": ``ahead`` cases are, in ``behind`` the rival is, and the others tie."""
    if not total:
        return None
    if ahead == total:
        return REPRODUCED
    if 2 * behind > total:
        return REFUTED
    if not ahead and not behind:
        return TIE
    return PARTLY if 2 * ahead >= total else NOT_REPRODUCED


def holds(count: int, total: int) -> str | None:
    """Returns the verdict on a claim without an opposite that holds in ``count`` cases."""
    verdict = leads(count, 0, total)
    return NOT_REPRODUCED if verdict == TIE else verdict


def _values(values: Any) -> list[Any]:
    """Returns the entries of a list or of a range, or the one number."""
    values = getattr(values, "values", values)
    return list(values) if isinstance(values, Iterable) else [values]


def _cases(values: Any) -> list[float]:
    return [value for value in _values(values) if isinstance(value, int | float)]


def agrees(ours: Any, paper: Any, within: float = WITHIN) -> str | None:
    """Returns the verdict on numbers: a case holds if ours differs from the paper's by at most ``within``.

    One number of the paper stands for all cases. Cases without a number are left out.
    """
    ours = _values(ours)
    paper = _values(paper) * (len(ours) if isinstance(paper, int | float) else 1)
    pairs = [pair for pair in zip(ours, paper, strict=True) if all(isinstance(x, int | float) for x in pair)]
    return holds(sum(abs(x - y) <= within * abs(y) for x, y in pairs), len(pairs))


def at_least(ours: Any, bound: float) -> str | None:
    """Returns the verdict on numbers that the paper puts at or above a bound."""
    return holds(sum(case >= bound for case in _cases(ours)), len(_cases(ours)))


def at_most(ours: Any, bound: float) -> str | None:
    """Returns the verdict on numbers that the paper puts at or below a bound."""
    return holds(sum(case <= bound for case in _cases(ours)), len(_cases(ours)))


def count_verdicts(verdicts: Iterable[str]) -> list[int]:
    """Returns how often each of VERDICTS occurs."""
    counts = Counter(verdicts)
    return [counts[verdict] for verdict in VERDICTS]


RULES = {rule.__name__: rule for rule in (leads, holds, agrees, at_least, at_most)}
