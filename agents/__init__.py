"""Planners: one file per published method, all in one dict by name.

``agents.make("autoswap_swdoa").plan(program, machine, limit)`` is all a caller needs.
"""

from __future__ import annotations

import difflib
import inspect
from pkgutil import resolve_name
from typing import Any

from agents.planner import Infeasible, Planner

__all__ = ["PLANNERS", "Infeasible", "Planner", "make", "options"]

# Name: where the class is, and the options that make it this planner. Imported when asked for, so that
# only the learned ones need PyTorch.
PLANNERS: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("agents.planner:NoPlan", {}),
    "random_search": ("agents.search.random_search:RandomSearch", {}),
    "autoswap_doa": ("agents.heuristics.autoswap:AutoSwap", {"score": "doa"}),
    "autoswap_aoa": ("agents.heuristics.autoswap:AutoSwap", {"score": "aoa"}),
    "autoswap_wdoa": ("agents.heuristics.autoswap:AutoSwap", {"score": "wdoa"}),
    "autoswap_swdoa": ("agents.heuristics.autoswap:AutoSwap", {"score": "swdoa"}),
    "autoswap_bo": ("agents.heuristics.autoswap_bo:AutoSwapBO", {}),
    "smartpool+autoswap": ("agents.heuristics.smartpool_autoswap:SmartPoolAutoSwap", {}),
    "superneurons": ("agents.heuristics.superneurons:SuperNeurons", {}),
    "vdnn_all": ("agents.heuristics.vdnn:VDNN", {"policy": "all"}),
    "vdnn_conv": ("agents.heuristics.vdnn:VDNN", {"policy": "conv"}),
    "vdnn_dyn": ("agents.heuristics.vdnn:VDNN", {"policy": "dyn"}),
    "capuchin": ("agents.heuristics.capuchin:Capuchin", {}),
    "memonger": ("agents.heuristics.memonger:Memonger", {}),
    "tflms": ("agents.heuristics.tflms:TFLMS", {}),
    "geeps": ("agents.heuristics.geeps:GeePS", {}),
    "home": ("agents.heuristics.home:HOME", {}),
    "tensile": ("agents.heuristics.tensile:TENSILE", {}),
    "checkpoint_sqrt": ("agents.heuristics.pytorch:Checkpoint", {"segments": "sqrt"}),
    "checkpoint_all": ("agents.heuristics.pytorch:Checkpoint", {"segments": "all"}),
    "offload_all": ("agents.heuristics.pytorch:OffloadAll", {}),
    "activation_budget": ("agents.heuristics.pytorch:ActivationBudget", {}),
    "annealing": ("agents.search.annealing:Annealing", {}),
    "lp_round": ("agents.search.lp_round:LPRound", {}),
    "milp": ("agents.exact.milp:MILP", {}),
    "dqn": ("agents.learned.dqn:DQN", {}),
    "dqn_paper": ("agents.learned.dqn:DQNPaper", {}),
}


def make(name: str, **chosen: Any) -> Planner:
    """A planner by name, with the keyword options of its class.

    Raises:
        ValueError: there is no such planner or it has no such option; the message names the nearest.
    """
    known = options(name)
    for option in chosen:
        if option not in known:
            raise ValueError(f"planner {name!r} has no option {option!r}{_nearest(option, known)}")
    where, fixed = PLANNERS[name]
    made: Planner = resolve_name(where)(**fixed, **chosen)
    return made


def options(name: str) -> list[str]:
    """The keyword options that ``make`` takes for a planner; raises ValueError when there is none of this name."""
    if name not in PLANNERS:
        raise ValueError(f"there is no planner {name!r}{_nearest(name, list(PLANNERS))}")
    where, fixed = PLANNERS[name]
    return [p for p in inspect.signature(resolve_name(where)).parameters if p not in fixed]


def _nearest(word: str, known: list[str]) -> str:
    match = difflib.get_close_matches(word, known, n=1, cutoff=0.0)
    return f"; the nearest is {match[0]!r} (of {', '.join(known)})" if match else ""
