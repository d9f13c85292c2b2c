"""Planners: one file per published method, registered by name.

``agents.make("autoswap_swdoa").plan(program, machine, limit)`` is the whole interface. To add a planner, put a class
with ``facts`` (planner.py) into a file of one of the folders in ``ROOMS``; no other file needs a change.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from agents.planner import Infeasible, Planner, PlannerInfo

__all__ = ["PLANNERS", "Infeasible", "Planner", "PlannerInfo", "make", "options", "untrained"]

ROOMS = ("heuristics", "search", "learned")


def _classes() -> list[tuple[PlannerInfo, Callable[..., Planner]]]:
    """Returns every planner class of the folders, sorted by ``PlannerInfo.place``.

    Files without ``PlannerInfo(`` are not imported, because some of them need PyTorch. Planners import slow
    dependencies only when they plan.
    """
    root = Path(__file__).parent
    files = [f for room in ROOMS for f in sorted((root / room).rglob("*.py")) if "PlannerInfo(" in f.read_text("utf-8")]
    names = [".".join(f.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__") for f in files]
    found = []
    for module in ("agents.planner", *names):
        for kind in vars(import_module(module)).values():
            if isinstance(kind, type) and kind.__module__ == module and "facts" in vars(kind):
                facts = vars(kind)["facts"]
                found += [(one, kind) for one in (facts if isinstance(facts, tuple) else (facts,))]
    return sorted(found, key=lambda entry: (entry[0].place, entry[0].key))


_FOUND = _classes()
PLANNERS: dict[str, PlannerInfo] = {facts.key: facts for facts, _ in _FOUND}
_MAKERS = {facts.key: kind for facts, kind in _FOUND}
if len(PLANNERS) < len(_FOUND):
    twice = next(key for key in PLANNERS if sum(facts.key == key for facts, _ in _FOUND) > 1)
    raise ValueError(f"duplicate planner key {twice!r}")


def untrained() -> list[str]:
    """Returns the keys of the planners that need no training."""
    return [key for key, facts in PLANNERS.items() if not facts.learned]


def make(name: str, **chosen: Any) -> Planner:
    """Creates a planner by name, with the keyword options of its class.

    Raises:
        ValueError: the planner or the option is unknown; the message suggests the closest name.
    """
    known = options(name)
    for option in chosen:
        if option not in known:
            raise ValueError(f"planner {name!r} has no option {option!r}{_nearest(option, known)}")
    return _MAKERS[name](**PLANNERS[name].options, **chosen)


def options(name: str) -> list[str]:
    """Returns the keyword options that ``make`` accepts for a planner; raises ValueError if the name is unknown."""
    if name not in PLANNERS:
        raise ValueError(f"there is no planner {name!r}{_nearest(name, list(PLANNERS))}")
    return [p for p in inspect.signature(_MAKERS[name]).parameters if p not in PLANNERS[name].options]


def _nearest(word: str, known: list[str]) -> str:
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.0)
    return f"; the nearest is {match[0]!r} (of {', '.join(known)})" if match else ""
