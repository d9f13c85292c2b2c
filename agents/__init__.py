"""Planners: one file per published method, all in one dict by name.

``agents.make("autoswap_swdoa").plan(program, machine, limit)`` is all a caller needs.
"""

from __future__ import annotations

import difflib
import inspect
from pkgutil import resolve_name
from typing import Any

from agents.planner import Infeasible, Planner

__all__ = ["PLANNERS", "Infeasible", "Planner", "make"]

# Name: where the class is, and the options that make it this planner. Imported when asked for, so that
# only the learned ones need PyTorch.
PLANNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("agents.planner:NoPlan", {}),
    "random": ("agents.random_search:RandomSearch", {}),
    "autoswap_doa": ("agents.autoswap:AutoSwap", {"score": "doa"}),
    "autoswap_aoa": ("agents.autoswap:AutoSwap", {"score": "aoa"}),
    "autoswap_wdoa": ("agents.autoswap:AutoSwap", {"score": "wdoa"}),
    "autoswap_swdoa": ("agents.autoswap:AutoSwap", {"score": "swdoa"}),
    "superneurons": ("agents.superneurons:SuperNeurons", {}),
    "annealing": ("agents.annealing:Annealing", {}),
    "dqn": ("agents.dqn:DQN", {}),
    "dqn_paper": ("agents.dqn:DQNPaper", {}),
}


def make(name: str, **options: Any) -> Planner:
    """A planner by name, with the keyword options of its class.

    Raises:
        ValueError: there is no such planner or it has no such option; the message names the nearest.
    """
    if name not in PLANNERS:
        raise ValueError(f"there is no planner {name!r}{_nearest(name, list(PLANNERS))}")
    where, fixed = PLANNERS[name]
    planner = resolve_name(where)
    known = [p for p in inspect.signature(planner).parameters if p not in fixed]
    for option in options:
        if option not in known:
            raise ValueError(f"planner {name!r} has no option {option!r}{_nearest(option, known)}")
    made: Planner = planner(**fixed, **options)
    return made


def _nearest(word: str, known: list[str]) -> str:
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.0)
    return f"; the nearest is {match[0]!r} (of {', '.join(known)})" if match else ""
