"""Capuchin as HOME's authors reimplemented it (IEEE TC 2022, sections 2.3 and 4.1): layer by layer, greedily.

"It iteratively searches the candidate policy to achieve the best performance only for the tensor(s) from the first
layer to the current layer while ignoring the tensors in the latter layers." If the step up to the current layer, with
the backward pass from there on, exceeds the limit, the cheapest change of one placement (retain, swap, recompute) is
made until it fits; earlier placements are otherwise kept. Entry point: ``by_layer``. Numbered choices: README.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from agents.heuristics.home import Cost, Evaluator, Placements, lowest, placements
from agents.heuristics.layers import FeatureMap, feature_maps
from agents.planner import Rows
from simulator.compiled.engine import Engine
from simulator.program import Program


def by_layer(engine: Engine, mode: str, min_bytes: int) -> tuple[Rows, Cost]:
    """Returns the rows of the policy and its cost: bytes above the limit, and iteration time in ns."""
    program, maps = engine.program, feature_maps(engine.program, min_bytes)
    gaps, allowed = [m.gap for m in maps], [placements(program, m.gap, mode) for m in maps]
    whole = Evaluator(engine, gaps, 1)
    x = np.zeros(len(maps), np.int8)
    for i, current in enumerate(maps):
        load = engine.residency(whole.rows(x))
        if np.delete(load, later(current)).max() > engine.limit:
            known = Evaluator(Engine(up_to(program, current), engine.machine, engine.limit), gaps, 1)
            x, _ = evict(known, allowed[: i + 1], x)
            engine.calls += known.calls
    x, cost = evict(whole, allowed, x)
    return whole.rows(x), cost


def evict(evaluator: Evaluator, allowed: Sequence[Sequence[int]], x: Placements) -> tuple[Placements, Cost]:
    """Changes one placement at a time, each time the cheapest, until the policy fits or no change saves bytes.

    Args:
        allowed: Placements of the feature maps from the first to the current layer.
        x: Placements of all feature maps, (feature maps,).

    Returns:
        The changed placements and their cost.
    """
    cost = evaluator.evaluate(x[None])[0]
    while cost[0]:
        changes = [(j, way) for j, ways in enumerate(allowed) for way in ways if way != x[j]]
        if not changes:
            break
        tried = np.repeat(x[None], len(changes), axis=0)
        tried[range(len(changes)), [j for j, _ in changes]] = [way for _, way in changes]
        costs = evaluator.evaluate(tried)
        best = lowest(costs)
        if costs[best, 0] >= cost[0]:
            break
        x, cost = tried[best], costs[best]
    return x, (int(cost[0]), int(cost[1]))


def later(current: FeatureMap) -> range:
    """Returns the kernels after the layer of a feature map and before its backward use."""
    return range(current.layer + 1, current.gap.before)


def up_to(program: Program, current: FeatureMap) -> Program:
    """Returns the step as known at a feature map's layer: tensors of later layers take no memory."""
    kernels = later(current)
    ignored = [bool(uses) and uses[0] in kernels for uses in program.accesses]
    tensors = [t if t.persistent or not later_one else replace(t, nbytes=0)
               for t, later_one in zip(program.tensors, ignored, strict=True)]  # fmt: skip
    return replace(program, tensors=tuple(tensors))
