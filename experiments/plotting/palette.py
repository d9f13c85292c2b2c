"""Labels, colors and markers of planners and allocators.

Colors of one picture are with its figure. A planner's color follows from its family and slot
(``agents.planner.PlannerInfo``). Hues are families of methods: AutoSwap blue, other swapping orange and brown,
recomputation purple, swapping and recomputation green, search red, learned pink. Online allocators are gray and warm,
offline ones cool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import agents
from agents.planner import Family, PlannerInfo
from experiments.common.report import ABLATION as WITHOUT_NETWORK

INK = "#222222"
FAINT = "#9a9a9a"
LIMIT = "#222222"
FLOOR = "#d9d9d9"


class Look(NamedTuple):
    """Label, color and marker of a planner or an allocator."""

    label: str
    color: str
    marker: str = "o"


class Hues(NamedTuple):
    """Color of a family of planners, and colors and markers of its members by ``PlannerInfo.slot``."""

    color: str
    slots: tuple[str, ...] = ()
    markers: str = "os^DvP"


HUES: dict[Family, Hues] = {
    "swap: AutoSwap": Hues("#1f5fa8", ("#8cc5ee", "#4a9bd4", "#1f5fa8", "#08306b", "#00a6c8", "#5b5be0")),
    "swap: other heuristics": Hues("#f16913", ("#fdae6b", "#f16913", "#a63603", "#b8860b", "#7a5c3a", "#d4c200")),
    "recompute": Hues("#8e5bd0", ("#b39ddb", "#8e5bd0", "#4a148c", "#a3319f", "#d4a5f7")),
    "swap and recompute": Hues("#238b45", ("#74c476", "#238b45", "#00441b")),
    "search": Hues(
        "#cb181d", ("#222222", "#9a9a9a", "#fb6a4a", "#cb181d", "#67000d", "#f4a582", "#e7298a", "#e34a33"), "xos^DPX*"
    ),
    "learned": Hues("#d6336c", ("#d6336c", "#f783ac", "#8a1253", "#d3a0bd", "#e599f7", "#ae1fc9")),
    "other": Hues("#17becf"),
}


def spare_look(planner: str, text: str) -> Look:
    """Returns a look from a fixed cycle, chosen by the planner's name."""
    colors = ("#8c564b", "#17becf", "#bcbd22", "#e377c2")
    return Look(text, colors[sum(planner.encode()) % len(colors)])


def _entries() -> Iterator[PlannerInfo]:
    """Yields the facts of every planner, of the trainings' greedy policies, and of the walk without the network."""
    yield PlannerInfo(WITHOUT_NETWORK, WITHOUT_NETWORK, family="search", slot=6)
    for facts in agents.PLANNERS.values():
        yield facts
        if facts.key in ("dqn", "dqn_paper"):  # train_dqn writes a row of the greedy policy
            slot = None if facts.slot is None else facts.slot + 1
            yield replace(facts, key=f"{facts.key}_greedy", label=f"{facts.label}, greedy policy", slot=slot)


def _look(facts: PlannerInfo) -> Look:
    _, slots, markers = HUES[facts.family]
    if facts.slot is None or facts.slot >= len(slots):
        return spare_look(facts.key, facts.label)
    return Look(facts.label, slots[facts.slot], markers[facts.slot])


FAMILIES: dict[str, dict[str, Look]] = {}  # members in the order of their slots
for _name in HUES:
    _members = [facts for facts in _entries() if facts.family == _name]
    if _members:
        _members.sort(key=lambda facts: (facts.slot is None, facts.slot))
        FAMILIES[_name] = {facts.key: _look(facts) for facts in _members}
LOOKS = {name: look for family in FAMILIES.values() for name, look in family.items()}
LOOKS |= {  # lines of figures that are no planner: the best of all heuristics, and the DQN's walk without its network
    "published": Look("best published", "#000000", "D"),
    "without_network": Look(WITHOUT_NETWORK, "#8a8a8a"),
}
ALLOCATORS = {  # keys of simulator.pool; "superneurons" is the heap of SuperNeurons
    "cudamalloc": Look("cudaMalloc", "#9a9a9a", "x"),
    "caching": Look("PyTorch's caching allocator", "#e6550d", "o"),
    "cnmem": Look("CnMem", "#fdae6b", "s"),
    "superneurons": Look("SuperNeurons' heap", "#b8860b", "v"),
    "smartpool": Look("SmartPool, best-fit", "#1f5fa8", "D"),
    "smartpool_first": Look("SmartPool, first-fit", "#8cc5ee", "d"),
    "portfolio": Look("portfolio of heuristics", "#238b45", "^"),
    "optimal": Look("optimal", "#222222", "P"),
}
LOAD = "#cb181d"
SWAPPED = ("#8f8ff0", "#5b5be0", "#25258f")  # SmartPool + AutoSwap, from zero to high overhead
SPANS = {"kernel": "#9a9a9a", "recompute": "#8e5bd0", "swap_out": "#f16913", "swap_in": "#1f5fa8"}  # in a timeline
# Themes of web pages.
LIGHT = {
    "ink": "#222222",
    "faint": "#666666",
    "line": "#dddddd",
    "paper": "#ffffff",
    "soft": "#f3f3f5",
    "before": "#b3b3b8",
    "after": "#1f5fa8",
    "limit": "#cc2222",
}
DARK = {
    "ink": "#e8e8ea",
    "faint": "#a0a0a8",
    "line": "#3a3a40",
    "paper": "#17171a",
    "soft": "#222227",
    "before": "#6d6d75",
    "after": "#6fb1f0",
    "limit": "#f07070",
}
PREDICTED = "#9a9a9a"
MEASURED = "#cb181d"


def look(planner: str) -> Look:
    """Returns a planner's look, with any suffix after a comma in its label; a spare one for unknown planners."""
    key, comma, extra = planner.partition(",")
    return LOOKS[key]._replace(label=LOOKS[key].label + comma + extra) if key in LOOKS else spare_look(planner, planner)


def color(planner: str) -> str:
    """Returns the planner's color."""
    return look(planner).color


def label(planner: str) -> str:
    """Returns the planner's display name."""
    return look(planner).label


def family(planner: str) -> str:
    """Returns the planner's family of methods, or "other"."""
    return next((name for name, members in FAMILIES.items() if planner in members), "other")
