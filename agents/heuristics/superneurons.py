"""SuperNeurons: "Superneurons: Dynamic GPU Memory Management for Training Deep Neural Networks" (PPoPP 2018).

Outputs of CONV layers are offloaded to the host (section 3.3.1), but only if a Tensor Cache in LRU order runs out of
memory (section 3.3.2); outputs of cheap layers are dropped and recomputed (section 3.4). For a segment of k dropped
outputs, speed-centric recomputation executes k kernels and keeps their results, memory-centric k (k + 1) / 2 and keeps
nothing; cost-aware (the paper's) is speed-centric if the peak of a single layer allows it. Liveness analysis (section
3.2) is implicit in Program; dynamic choice of convolution algorithms (section 3.5) is workspace.py. Entry point:
``SuperNeurons.choose``, by default with the fastest of the method's settings. Numbered choices and deviations:
superneurons.md.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agents.heuristics.workspace import plan_with_variants
from agents.planner import MIB, PlannerInfo, Rows, RowsPlanner, one_of
from simulator.compiled.encoding import EXTRA, row_of
from simulator.compiled.engine import Engine, Score
from simulator.machine import Machine
from simulator.modes import MODES, Choice, evictions
from simulator.plan import Plan
from simulator.program import Gap, Program

CONV = frozenset({"conv"})
CHEAP = frozenset({"pool", "activation", "lrn", "norm", "dropout"})
JOINS = frozenset({"elementwise", "copy"})  # sums; concatenations
STRATEGIES = ("cost", "speed", "memory")


@dataclass(eq=False)
class SuperNeurons(RowsPlanner):
    """SuperNeurons' rules as a plan.

    Args:
        mode: swap (section 3.3 only), recompute (section 3.4 only) or joint.
        recompute: cost, speed or memory (section 3.4), or best: the fastest plan of all settings (choice 8).
        always: drop every cheap output, not only under memory pressure (choice 3).
        early: leave every prefetch to the simulator (choice 5); best tries that, too.
        joins: also offload outputs of joins (choice 1).
        cache: "lru": offload outputs when memory is short (section 3.3.2); "off": always (section 3.3.1).
        workspace: plan with minimal workspaces, then give kernels the fastest algorithms that fit (section 3.5).
    """

    facts = PlannerInfo(
        "superneurons",
        "SuperNeurons",
        '"Superneurons: Dynamic GPU Memory Management for Training Deep Neural Networks", PPoPP 2018',
        family="swap and recompute",
        slot=0,
        place=80,
    )

    mode: str = one_of(MODES, "joint")
    recompute: str = one_of(("best", *STRATEGIES), "best")
    always: bool = False
    early: bool = False
    joins: bool = False
    cache: str = one_of(("lru", "off"), "lru")
    workspace: bool = False

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """Returns the plan of the rules; raises Infeasible if they do not reach ``limit``."""
        if not self.workspace:
            return super().plan(program, machine, limit)
        tensors_only = replace(self, workspace=False)
        try:
            return plan_with_variants(tensors_only, program, machine, limit, include_default=False)
        finally:
            self.simulator_calls = tensors_only.simulator_calls

    def choose(self, engine: Engine) -> Rows:
        """Applies the rules with the kernels' current algorithms."""
        scored = [planner._apply(engine) for planner in self.settings()]
        rows, score = min(scored, key=lambda pair: (not pair[1].feasible, pair[1].iteration_ns))
        if not score.feasible:
            raise self.beyond_reach(engine, min(score.required_bytes for _, score in scored))
        return rows

    def settings(self) -> list[SuperNeurons]:
        """Returns a planner per setting, of which the fastest that fits is used (choice 8)."""
        if self.recompute != "best":
            return [self]
        return [
            replace(self, mode=mode, recompute=strategy, early=early, always=always)
            for mode in (MODES if self.mode == "joint" and not self.always else (self.mode,))
            for strategy in (STRATEGIES if mode != "swap" else STRATEGIES[:1])
            for early in {self.early or mode == "recompute", True}  # a recomputation has no prefetch
            for always in {self.always, mode != "swap"}
        ]

    def _apply(self, engine: Engine) -> tuple[Rows, Score]:
        """Applies the rules with one setting; returns rows that may exceed the limit, and their score."""
        program = engine.program
        limit = engine.limit
        kinds = evictable_gaps(program, self.mode, self.min_bytes, self.joins)
        forced_kinds = [Choice.RECOMPUTED] * self.always + [Choice.SWAPPED] * (self.cache == "off")
        forced = [g for g, kind in kinds.items() if kind in forced_kinds]
        for target in (limit, 0):
            rows, score = self._segments(engine, tensor_cache(program, kinds, target, forced), kinds)
            if score.required_bytes <= limit:
                break
        return rows, score

    def _segments(self, engine: Engine, gaps: Sequence[Gap], kinds: Mapping[Gap, int]) -> tuple[Rows, Score]:
        """Chooses the strategy of every segment (section 3.4); returns rows and their score."""
        program = engine.program
        segment = segments(engine.program)
        rows = np.array([row_of(g, kinds[g]) for g in gaps], dtype=np.int64).reshape(-1, 6)
        if not self.early:
            rows[:, EXTRA] = [prefetch(program, g) for g in gaps]
        dropped: dict[int, list[int]] = {}
        for i, g in enumerate(gaps):
            if kinds[g] == Choice.RECOMPUTED:
                dropped.setdefault(segment[g.tensor], []).append(i)
        cost = {s: segment_bytes(program, [gaps[i] for i in members]) for s, members in dropped.items()}
        l_peak = max(layer_bytes(program, k) for k in range(len(program.kernels)))
        for s, members in dropped.items():
            rows[members, EXTRA] = self.recompute == "speed" or (self.recompute == "cost" and cost[s] <= l_peak)
        score = engine.score(rows)
        for s in sorted(dropped, key=lambda s: -cost[s]):
            if score.required_bytes <= engine.limit or self.recompute != "cost":
                break
            if cost[s] <= l_peak:
                rows[dropped[s], EXTRA] = False
                score = engine.score(rows)
        return rows, score


def evictable_gaps(program: Program, mode: str = "joint", min_bytes: int = MIB, joins: bool = False) -> dict[Gap, int]:
    """Returns the gaps in which an output may be evicted: SWAPPED for CONV (and joins), RECOMPUTED for cheap layers."""
    kinds: dict[Gap, int] = {}
    offloaded = layer_outputs(program, CONV | JOINS if joins else CONV) if mode != "recompute" else frozenset()
    cheap = layer_outputs(program, CHEAP)
    for gap in program.gaps(min_bytes):
        if gap.tensor in offloaded:
            kinds[gap] = Choice.SWAPPED
        elif gap.tensor in cheap and program.kernels[gap.before].phase == "backward":
            if Choice.RECOMPUTED in evictions(program, gap, mode):
                kinds[gap] = Choice.RECOMPUTED
    return kinds


def layer_outputs(program: Program, kinds: Collection[str], min_bytes: int = 0) -> frozenset[int]:
    """Returns the non-persistent tensors of at least ``min_bytes`` that a forward layer of ``kinds`` writes first."""
    producers = {t: program.kernels[writers[0]] for t, writers in enumerate(program.writes) if writers}
    outputs = (t for t, layer in producers.items() if layer.phase == "forward" and layer.kind in kinds)
    tensors = program.tensors
    return frozenset(t for t in outputs if not tensors[t].persistent and tensors[t].nbytes >= min_bytes)


def tensor_cache(program: Program, kinds: Mapping[Gap, int], limit: int, forced: Sequence[Gap] = ()) -> list[Gap]:
    """Returns the gaps that LRU empties to keep the planned residency within ``limit`` if possible (section 3.3.2).

    Args:
        limit: memory limit in bytes.
        forced: gaps of ``kinds`` that are emptied in any case.
        program: Program to plan.
        kinds: eviction kind of each gap that may be emptied.
    """
    emptied = list(forced)
    nbytes = [tensor.nbytes for tensor in program.tensors]
    evicted = 0  # bytes that are absent at the present kernel
    returned = [0] * (len(program.kernels) + 1)  # per kernel, bytes swapped in less those swapped out
    for gap in forced:
        returned[gap.after + 1] -= nbytes[gap.tensor]
        returned[gap.before] += nbytes[gap.tensor]
    queue = deque(sorted(set(kinds) - set(forced), key=lambda g: (g.after, g.tensor)))  # least recently used first
    for k, load in enumerate(program.live_bytes):
        evicted -= returned[k]
        while load - evicted > limit and queue and queue[0].after < k:
            gap = queue.popleft()
            if k < gap.before:
                evicted += nbytes[gap.tensor]
                returned[gap.before] += nbytes[gap.tensor]
                emptied.append(gap)
    return emptied


def segments(program: Program) -> list[int]:
    """Returns, per tensor, the number of checkpoints before the layer that writes it (-1: never written)."""
    checkpoints = [k for k, kernel in enumerate(program.kernels) if kernel.kind in ("conv", "matmul")]
    return [bisect_right(checkpoints, writers[0]) if writers else -1 for writers in program.writes]


def layer_bytes(program: Program, k: int) -> int:
    """Returns l_i: bytes of the tensors that kernel ``k`` accesses, and its workspace."""
    kernel = program.kernels[k]
    return kernel.workspace + sum(program.tensors[t].nbytes for t in kernel.accesses)


def segment_bytes(program: Program, dropped: Sequence[Gap]) -> int:
    """Returns the bytes of one segment that keeps its recomputed outputs.

    These are its dropped outputs plus the tensors of the largest kernel that needs one of them.
    """
    outputs = {g.tensor for g in dropped}
    return sum(program.tensors[t].nbytes for t in outputs) + max(
        layer_bytes(program, k)
        - sum(program.tensors[t].nbytes for t in outputs.intersection(program.kernels[k].accesses))
        for k in {g.before for g in dropped}
    )


def prefetch(program: Program, gap: Gap) -> int:
    """Returns the kernel after which the swap-in of ``gap`` is issued (section 3.3.1); -1: simulator rule 5."""
    if program.kernels[gap.before].phase == "backward":
        for k in range(gap.before - 1, gap.after, -1):
            if program.kernels[k].kind == "conv" and program.kernels[k].phase == "backward":
                return k - 1
    return -1
