"""Planners: one file per published method, registered by name.

``agents.make("autoswap_swdoa").plan(program, machine, limit)`` is the whole interface. To add a planner, put a class
with ``facts`` (planner.py) into a file of one of the folders in ``FOLDERS``; no other file needs a change.
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

FOLDERS = ("heuristics", "search", "learned")


def _classes() -> list[tuple[PlannerInfo, Callable[..., Planner]]]:
    """Returns every planner class of the folders, sorted by ``PlannerInfo.place``.

    Files without ``PlannerInfo(`` are not imported, because some of them need PyTorch. Planners import slow
    dependencies only when they plan.
    """
    root = Path(__file__).parent
    files = [
        f for folder in FOLDERS for f in sorted((root / folder).rglob("*.py")) if "PlannerInfo(" in f.read_text("utf-8")
    ]
    names = [".".join(f.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__") for f in files]
    entries = []
    for module in ("agents.planner", *names):
        for cls in vars(import_module(module)).values():
            if isinstance(cls, type) and cls.__module__ == module and "facts" in vars(cls):
                facts = vars(cls)["facts"]
                entries += [(info, cls) for info in (facts if isinstance(facts, tuple) else (facts,))]
    return sorted(entries, key=lambda entry: (entry[0].place, entry[0].key))


_ENTRIES = _classes()
PLANNERS: dict[str, PlannerInfo] = {facts.key: facts for facts, _ in _ENTRIES}
_CLASSES = {facts.key: kind for facts, kind in _ENTRIES}
if len(PLANNERS) < len(_ENTRIES):
    duplicate = next(key for key in PLANNERS if sum(facts.key == key for facts, _ in _ENTRIES) > 1)
    raise ValueError(f"duplicate planner key {duplicate!r}; give one of the planners another key")


def untrained() -> list[str]:
    """Returns the keys of the planners that need no training."""
    return [key for key, facts in PLANNERS.items() if not facts.learned]


def make(name: str, **values: Any) -> Planner:
    """Creates a planner by name, with the keyword options of its class.

    Raises:
        ValueError: the planner or the option is unknown; the message suggests the closest name.
    """
    accepted = options(name)
    for option in values:
        if option not in accepted:
            raise ValueError(f"planner {name!r} has no option {option!r}{_nearest(option, accepted)}")
    return _CLASSES[name](**PLANNERS[name].options, **values)


def options(name: str) -> list[str]:
    """Returns the keyword options that ``make`` accepts for a planner; raises ValueError if the name is unknown."""
    if name not in PLANNERS:
        raise ValueError(f"there is no planner {name!r}{_nearest(name, list(PLANNERS))}")
    return [p for p in inspect.signature(_CLASSES[name]).parameters if p not in PLANNERS[name].options]


def _nearest(word: str, choices: list[str]) -> str:
    match = difflib.get_close_matches(word, choices, n=1, cutoff=0.0)
    return f"; the nearest is {match[0]!r} (of {', '.join(choices)})" if match else ""
