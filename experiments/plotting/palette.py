"""How each planner and allocator looks: its name for people, its colour and its marker. Every colour is in this file.

Hues of planners are families of methods: AutoSwap blue, other swapping orange and brown, recomputation purple, both
green, search red, exact and none black, learned pink. Of allocators: the rivals grey and warm, offline ones cool.
"""

from __future__ import annotations

from typing import NamedTuple

INK, FAINT, LIMIT, FLOOR, GRID = "#222222", "#9a9a9a", "#222222", "#d9d9d9", "#eeeeee"
BEST_OF = "the best of each family"


class Look(NamedTuple):
    """A planner or an allocator in a figure."""

    label: str
    colour: str
    marker: str = "o"


FAMILIES: dict[str, dict[str, Look]] = {
    "swap: AutoSwap": {
        "autoswap_doa": Look("AutoSwap DOA", "#8cc5ee", "o"),
        "autoswap_aoa": Look("AutoSwap AOA", "#4a9bd4", "s"),
        "autoswap_wdoa": Look("AutoSwap WDOA", "#1f5fa8", "^"),
        "autoswap_swdoa": Look("AutoSwap SWDOA", "#08306b", "D"),
        "autoswap_bo": Look("AutoSwap BO", "#00a6c8", "v"),
        "smartpool+autoswap": Look("SmartPool + AutoSwap", "#5b5be0", "P"),
    },
    "swap: other heuristics": {
        "vdnn_all": Look("vDNN all", "#fdae6b", "o"),
        "vdnn_conv": Look("vDNN conv", "#f16913", "s"),
        "vdnn_dyn": Look("vDNN dyn", "#a63603", "^"),
        "geeps": Look("GeePS", "#b8860b", "D"),
        "tflms": Look("TFLMS", "#7a5c3a", "v"),
        "offload_all": Look("save_on_cpu", "#d4c200", "P"),
    },
    "recompute": {
        "checkpoint_sqrt": Look("checkpoints, √n segments", "#b39ddb", "o"),
        "checkpoint_all": Look("checkpoints, every block", "#8e5bd0", "s"),
        "memonger": Look("memonger", "#4a148c", "^"),
        "activation_budget": Look("activation budget", "#a3319f", "D"),
    },
    "swap and recompute": {
        "superneurons": Look("SuperNeurons", "#74c476", "o"),
        "capuchin": Look("Capuchin", "#238b45", "s"),
        "tensile": Look("TENSILE", "#00441b", "^"),
    },
    "search and exact": {
        "none": Look("no plan", "#222222", "x"),
        "random_search": Look("random search", "#9a9a9a", "o"),
        "annealing": Look("simulated annealing", "#fb6a4a", "s"),
        "home": Look("HOME", "#cb181d", "^"),
        "lp_round": Look("LP rounding", "#67000d", "D"),
        "milp": Look("MILP", "#000000", "v"),
    },
    "learned": {
        "dqn": Look("DQN", "#d6336c", "o"),
        "dqn_greedy": Look("DQN, greedy policy", "#f783ac", "s"),
        "dqn_paper": Look("DQN, as in the paper", "#8a1253", "^"),
        "dqn_paper_greedy": Look("DQN, as in the paper, greedy policy", "#d3a0bd", "D"),
    },
}
LOOKS = {name: look for family in FAMILIES.values() for name, look in family.items()}
FAMILY_COLOURS = {
    "swap: AutoSwap": "#1f5fa8", "swap: other heuristics": "#f16913", "recompute": "#8e5bd0",
    "swap and recompute": "#238b45", "search and exact": "#cb181d", "learned": "#d6336c", "other": "#17becf",
}  # fmt: skip
ALLOCATORS = {  # of simulator.pool, whose names they have; "superneurons" is its heap
    "cudamalloc": Look("cudaMalloc", "#9a9a9a", "x"),
    "caching": Look("PyTorch's caching allocator", "#e6550d", "o"),
    "cnmem": Look("CnMem", "#fdae6b", "s"),
    "superneurons": Look("SuperNeurons' heap", "#b8860b", "v"),
    "smartpool": Look("SmartPool, best-fit", "#1f5fa8", "D"),
    "smartpool_first": Look("SmartPool, first-fit", "#8cc5ee", "d"),
    "portfolio": Look("portfolio of heuristics", "#238b45", "^"),
    "optimal": Look("optimal", "#222222", "P"),
}
BLOCKS = ("#f6d98f", "#9fd08b", "#45b0a8", "#3a8fc9", "#4a5fb5", "#6a2c80")  # of a packing, from small to large
LOAD, CAPACITY = "#cb181d", "#238b45"  # lines across a packing
KEPT = "#238b45"  # a load with what a framework keeps besides
SWAPPED = ("#8f8ff0", "#5b5be0", "#25258f")  # SmartPool + AutoSwap, from no overhead to much
SPANS = {"kernel": "#9a9a9a", "recompute": "#8e5bd0", "swap_out": "#f16913", "swap_in": "#1f5fa8"}  # of a timeline
STRATEGY = {"speed": "#f16913", "memory": "#1f5fa8", "cost": "#238b45"}  # of recomputation, SuperNeurons'
TECHNIQUES = {"liveness": "#1f5fa8", "offload": "#f16913", "recompute": "#8e5bd0", "captured": "#5f6b75"}
# Of an iteration.
PARTS = {"computation": "#9a9a9a", "overlap": "#1f5fa8", "recomputation": "#8e5bd0", "swapping": "#cb181d"}
SWARM = {"worst": "#9a9a9a", "mean": "#1f5fa8", "best": "#cb181d"}  # of HOME's particles
CAPACITY_OF = {  # methods of SuperNeurons' Tables 4 and 5
    "own": "#c9c9c9", "none": "#6b6b6b", "memonger": "#4a148c", "vdnn_all": "#fdae6b", "superneurons": "#74c476",
    "superneurons_joins": "#238b45", "lp_round": "#67000d",
}  # fmt: skip
PREDICTED, MEASURED = "#9a9a9a", "#cb181d"
STYLE = {
    "font.size": 11, "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": FAINT, "axes.labelcolor": INK,
    "xtick.color": INK, "ytick.color": INK, "axes.grid": True, "grid.color": GRID, "axes.axisbelow": True,
    "legend.frameon": False, "hatch.linewidth": 0.6,
}  # fmt: skip


def look(planner: str) -> Look:
    """A planner's looks; one that is not known takes a colour from a fixed cycle, by its name."""
    spare = ("#8c564b", "#17becf", "#bcbd22", "#e377c2")
    return LOOKS.get(planner, Look(planner, spare[sum(planner.encode()) % len(spare)]))


def colour(planner: str) -> str:
    """The planner's colour."""
    return look(planner).colour


def label(planner: str) -> str:
    """The planner's name for people."""
    return look(planner).label


def family(planner: str) -> str:
    """The family of methods that the planner is of."""
    return next((name for name, members in FAMILIES.items() if planner in members), "other")
