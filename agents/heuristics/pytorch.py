"""Methods built into PyTorch (torch 2.13): segment checkpointing, save_on_cpu, and the compiler's memory budget.

**Checkpoint**, torch.utils.checkpoint.checkpoint_sequential: cuts a list of layers into segments of equal numbers of
layers. The last one executes normally; the others keep only their input and are recomputed in the backward pass.
**OffloadAll**, torch.autograd.graph.save_on_cpu(pin_memory=True): copies every saved tensor to the host in the forward
pass, and back when a backward kernel unpacks it, both on the compute stream.
**ActivationBudget**, torch.compile with torch._functorch.config.activation_memory_budget, the fraction of saved bytes
that may be saved: kernels are banned from recomputation, and a minimum cut saves the fewest bytes. A saved tensor is a
feature map (layers.py); those smaller than ``min_bytes`` are ignored. Numbered choices and deviations: pytorch.md.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from agents.heuristics.layers import FeatureMap, feature_maps
from agents.heuristics.memonger import COMPUTE_INTENSIVE, Split, cuts_of, recomputable, recomputations, splits
from agents.planner import MIB, PlannerInfo, Rows, RowsPlanner, at_least, one_of
from simulator.compiled.encoding import SYNC_SWAP
from simulator.compiled.engine import Engine
from simulator.program import Program
from simulator.residency import reruns

SEGMENTS = {"sqrt": "checkpoints, √n segments", "all": "checkpoints, every block"}
ALLOWLIST = frozenset({"activation", "elementwise", "norm", "reduce", "copy"})
UNITS = 10_000  # capacity steps of the knapsack


@dataclass(eq=False)
class Checkpoint(RowsPlanner):
    """Segment checkpointing by torch.utils.checkpoint.checkpoint_sequential.

    Args:
        segments: sqrt or all.
    """

    facts = tuple(
        PlannerInfo(
            f"checkpoint_{key}",
            label,
            "torch.utils.checkpoint",
            "recompute",
            i,
            180 + 10 * i,
            "recompute",
            {"segments": key},
        )
        for i, (key, label) in enumerate(SEGMENTS.items())
    )

    segments: str = one_of([*SEGMENTS], "sqrt")

    def choose(self, engine: Engine) -> Rows:
        """Returns the planner's only plan, without checking the limit."""
        return recomputations(self.dropped(engine.program))

    def dropped(self, program: Program) -> list[FeatureMap]:
        """Returns the feature maps that are not kept."""
        ends = layer_ends(program, self.min_bytes)
        layers = len(ends) + 1
        segments = math.isqrt(layers) if self.segments == "sqrt" else layers
        size = layers // segments
        cuts = ends[size - 1 : size * (segments - 1) : size]
        checkpoints = {t for cut in cuts for t in cut.crossing} | cuts_of(program, self.min_bytes).through
        maps = [m for m in feature_maps(program, self.min_bytes) if cuts and m.layer <= cuts[-1].kernel]
        return recomputable(program, (m for m in maps if m.tensor not in checkpoints))


def layer_ends(program: Program, min_bytes: int = MIB) -> list[Split]:
    """Returns the end of each layer but the last (choice 1).

    Args:
        program: program with phases.
        min_bytes: size in bytes from which feature maps count.

    Returns:
        The split of least crossing bytes within each layer; a layer without a split is left out.
    """
    forward = [k for k, kernel in enumerate(program.kernels) if kernel.phase == "forward"]
    heads = [k for k in forward if program.kernels[k].kind in COMPUTE_INTENSIVE]
    heads = heads or sorted({m.layer for m in feature_maps(program, min_bytes)})
    cuts = splits(program, min_bytes)
    kernels = [s.kernel for s in cuts]
    ends = []
    for head, following in zip(heads, heads[1:], strict=False):
        layer_cuts = cuts[bisect_left(kernels, head) : bisect_left(kernels, following)]
        if layer_cuts:
            ends.append(min(layer_cuts, key=lambda s: (sum(program.tensors[t].nbytes for t in s.crossing), -s.kernel)))
    return ends


class OffloadAll(RowsPlanner):
    """Offloading of all saved tensors by torch.autograd.graph.save_on_cpu."""

    facts = PlannerInfo(
        "offload_all", "save_on_cpu", "torch.autograd.graph.save_on_cpu", "swap: other heuristics", 5, 200, "swap"
    )

    def choose(self, engine: Engine) -> Rows:
        """Returns the planner's only plan, without checking the limit or host memory."""
        program = engine.program
        rows = []
        for tensor, _, gap in feature_maps(program, self.min_bytes):
            rows.append((SYNC_SWAP, *gap, gap.before - 1, -1))
            later = [k for k in program.accesses[tensor] if k >= gap.before]
            if program.writes[tensor][-1] > gap.before:
                continue  # overwritten, so not the saved tensor any more
            for after, before in zip(later, later[1:], strict=False):
                if before - after > 1 and program.kernels[before].outputs:
                    rows.append((SYNC_SWAP, tensor, after, before, before - 1, -1))
        return np.array(rows, dtype=np.int64).reshape(-1, 6)


@dataclass(eq=False)
class ActivationBudget(RowsPlanner):
    """Activation memory budget of torch.compile, tuned to the limit.

    Args:
        runtime: flops (PyTorch's default) or profile: how the knapsack estimates kernel times.
        steps: number of budgets tried, minus one.
    """

    facts = PlannerInfo(
        "activation_budget",
        "activation budget",
        "torch.compile, activation_memory_budget",
        "recompute",
        3,
        210,
        "recompute",
    )

    runtime: str = one_of(("flops", "profile"), "flops")
    steps: int = at_least(1, 100)

    def choose(self, engine: Engine) -> Rows:
        """Returns the recomputations chosen with the largest budget whose plan fits the limit.

        Raises:
            Infeasible: No budget fits.
        """
        partitioner = Partitioner(engine.program, self.runtime, self.min_bytes)
        required = []
        for dropped, _ in groupby(partitioner.dropped(i / self.steps) for i in range(self.steps, -1, -1)):
            rows = recomputations(dropped)
            score = engine.score(rows)
            if score.feasible:
                return rows
            required.append(score.required_bytes)
        raise self.beyond_reach(engine, min(required))


class Partitioner:
    """Min-cut partitioner: selects the feature maps that a budget saves."""

    def __init__(self, program: Program, runtime: str = "flops", min_bytes: int = MIB) -> None:
        maps = feature_maps(program, min_bytes)
        size = [t.nbytes for t in program.tensors]
        self._total = sum(size[m.tensor] for m in maps)
        self._nbytes = {m.tensor: size[m.tensor] for m in maps}
        self._maps = recomputable(program, maps)
        self._reruns = [set(reruns(program, {m.tensor}, m.gap.before)) for m in self._maps]
        rerun = sorted(set().union(*self._reruns))
        kernels = program.kernels
        outputs = {k: sum(size[t] for t in set(kernels[k].outputs)) for k in rerun}
        reductions = {k for k in rerun if 4 * outputs[k] < sum(size[t] for t in set(kernels[k].inputs))}
        hard = {k for k in rerun if kernels[k].kind in (*COMPUTE_INTENSIVE, "dropout")} | reductions
        self._bans = ({k for k in rerun if kernels[k].kind not in ALLOWLIST} | reductions, hard)
        self._items = sorted(hard, key=lambda k: (-outputs[k], k))
        self._weights = [round(UNITS * outputs[k] / max(self._total, 1)) for k in self._items]
        costs = [kernels[k].flops if runtime == "flops" else kernels[k].duration_ns for k in self._items]
        self._is_taken = knapsack(self._weights, [max(cost, 1) for cost in costs])

    def dropped(self, budget: float) -> list[FeatureMap]:
        """Returns the feature maps recomputed under ``budget``, a fraction of their bytes from 0 to 1."""
        if budget == 1:
            return []
        if budget == 0:
            return list(self._maps)
        for banned in self._bans:
            dropped = self._cut(banned)
            if self._total - sum(self._nbytes[m.tensor] for m in dropped) < budget * self._total:
                return dropped
        saved = set()
        room = round(budget * UNITS)
        for i in range(len(self._items) - 1, -1, -1):
            if self._is_taken[i, room]:
                saved.add(self._items[i])
                room -= self._weights[i]
        return self._cut(saved)

    def _cut(self, banned: set[int]) -> list[FeatureMap]:
        """Returns the feature maps that can be recomputed without the banned kernels (minimum cut, choice 9)."""
        return [m for m, kernels in zip(self._maps, self._reruns, strict=True) if not kernels & banned]


def knapsack(weights: list[int], values: list[int]) -> NDArray[np.bool_]:
    """Solves the 0/1 knapsack by dynamic programming, for every capacity from 0 to ``UNITS``.

    Returns:
        bool[items, UNITS + 1]: whether the best choice among items 0 … i for capacity c takes item i.
    """
    best = np.zeros(UNITS + 1, dtype=np.int64)
    is_taken = np.zeros((len(weights), UNITS + 1), dtype=bool)
    for i, (weight, value) in enumerate(zip(weights, values, strict=True)):
        if weight > UNITS:
            continue
        with_item = best[: UNITS + 1 - weight] + value
        is_taken[i, weight:] = with_item > best[weight:]
        best[weight:] = np.maximum(best[weight:], with_item)
    return is_taken
