"""Plans out of the policy's network: ways for the gaps, and rows that fit the limit.

The network gives every gap a probability of each way (policy_net.py). A plan takes the likeliest ways (``decode``), or
draws them (``drawn``); what the limit does not allow is repaired by the same probabilities (``fitted``). With several
rounds, each decides the gaps that the network is surest of, and the next sees what is decided, as in "MaskGIT" (Chang
et al., 2022).
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from agents.learned.policy_net import PolicyNet, batch_of, data_of
from agents.planner import Rows
from simulator.compiled.encoding import rows_for
from simulator.compiled.engine import Engine
from simulator.compiled.jit import stage
from simulator.modes import KEPT, RECOMPUTED, STAYS, SWAPPED
from simulator.moves.gap_graph import UNDECIDED, Choices, GapGraph
from simulator.moves.plan_moves import add_between

TINY = 1e-30
MENDS = 8  # times that a plan is fitted anew to the memory of its recomputation chains

Chances = NDArray[np.float32]  # (G, 4): how likely each way of each gap is


@torch.no_grad()
def chances(net: PolicyNet, graph: GapGraph, decided: Choices) -> Chances:
    """What the network says of each gap where some are ``decided``."""
    found: Chances = net(batch_of([data_of(graph, decided)])).softmax(-1).numpy()
    return found


def decode(net: PolicyNet, graph: GapGraph, rounds: int = 1) -> tuple[Choices, Chances, Chances]:
    """The likeliest way of every gap; and the chances of each gap before anything was decided, and when it was."""
    decided = np.full(len(graph), UNDECIDED)
    first = chances(net, graph, decided)
    said = first.copy()
    for i in range(rounds):
        now = chances(net, graph, decided) if i else first
        left = np.flatnonzero(decided == UNDECIDED)
        surest = left[np.argsort(-now[left].max(1), kind="stable")[: -(-len(left) // (rounds - i))]]
        said[surest] = now[surest]
        decided[surest] = now[surest].argmax(1)
    return decided, first, said


def drawn(likely: Chances, rng: np.random.Generator) -> Choices:
    """A way of every gap by its chances, each for itself."""
    ways: Choices = (np.log(likely + TINY) + rng.gumbel(size=likely.shape)).argmax(1)
    return ways


def fitted(engine: Engine, graph: GapGraph, ways: Choices, likely: Chances) -> Rows | None:
    """Rows of a plan near ``ways`` that fits the limit; None where repairs do not lead to one.

    Over the limit, gaps that are open at the fullest kernel are emptied, the likeliest first; then those that the limit
    does not need away are filled, the likeliest to stay first. The memory of recomputation chains, which only the
    simulator knows, is set aside from the limit, and the plan fitted again.
    """
    chosen = ways.copy()
    away = 1 - likely[:, STAYS]
    other = likely[:, STAYS + 1 :].argmax(1) + 1
    order = np.argsort(away, kind="stable")
    room = np.full(graph.count, graph.limit, np.int64)
    for _ in range(MENDS):
        load = graph.load(chosen > STAYS)
        if not _fit(chosen, other, graph.ways, away, order, graph.after, graph.before, graph.nbytes, load, room):
            return None
        rows = rows_of_ways(graph, chosen)
        over = engine.residency(rows) - load  # of the chains
        if (load + over <= graph.limit).all():
            return rows
        room = np.minimum(room, graph.limit - over)
    return None


def rows_of_ways(graph: GapGraph, ways: Choices) -> Rows:
    """int64[k, 6]: the rows that empty the gaps which do not stay."""
    out = np.empty((len(ways), 6), np.int64)
    for way in (SWAPPED, RECOMPUTED, KEPT):
        chosen = np.flatnonzero(ways == way)
        out[chosen] = rows_for([graph.gaps[i] for i in chosen.tolist()], way)
    return out[ways > STAYS]


@stage(entry=True)
def _fit(chosen, other, ways, away, order, after, before, nbytes, load, room):  # type: ignore[no-untyped-def]
    """Makes ``chosen`` (G,) fit ``room`` (K,) and ``load`` (K,) what it leaves; False where nothing more can leave."""
    n = load.shape[0]
    while True:
        worst, k = 0, -1
        for j in range(n):
            if load[j] - room[j] > worst:
                worst, k = load[j] - room[j], j
        if k < 0:
            break
        best = -1
        for g in range(chosen.shape[0]):
            if chosen[g] != STAYS or not ways[g, other[g]]:
                continue
            inside = after[g] < k < before[g] if after[g] < before[g] else k > after[g] or k < before[g]
            if inside and (best < 0 or away[g] > away[best]):
                best = g
        if best < 0:
            return False
        chosen[best] = other[best]
        add_between(load, after[best], before[best], -nbytes[best])
    for i in range(order.shape[0]):
        g = order[i]
        if chosen[g] == STAYS:
            continue
        k, fits = after[g] + 1 if after[g] + 1 < n else 0, True
        while k != before[g] and fits:
            fits = load[k] + nbytes[g] <= room[k]
            k = k + 1 if k + 1 < n else 0
        if fits:
            chosen[g] = STAYS
            add_between(load, after[g], before[g], nbytes[g])
    return True
