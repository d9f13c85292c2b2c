"""Capuchin: "Capuchin: Tensor-based GPU Memory Management for Deep Learning" (ASPLOS 2020).

One measured iteration gives the access times of every tensor (passive mode). The policy maker then decides which
tensors to evict at which access, whether to swap or recompute them, and when to trigger each swap-in (guided mode);
run-time feedback corrects the triggers. A candidate is a gap, from an evicted-access to the back-access, with

    free time FT = SwapInStartTime - SwapOutEndTime
                 = (back-access - swap-in time) - (end of the evicted-access + swap-out time)

Hidden swaps come first, by descending free time; further swaps compete with recomputation by MSPS, bytes saved per
second. Implemented without access to the paper's text. Entry points: ``Capuchin.choose``, ``PolicyMaker.decide``.
"""
# Numbered choices and deviations: capuchin.md.

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from agents.heuristics.home import Cost, Evaluator, Placements, best_index, placements
from agents.heuristics.layers import FeatureMap, feature_maps
from agents.planner import Candidates, PlannerInfo, Rows, RowsPlanner, at_least, one_of
from simulator.compiled.encoding import AFTER, BEFORE, EXTRA, KIND, NEVER, RECOMPUTE, TENSOR, decisions_of
from simulator.compiled.engine import Engine
from simulator.modes import MODES, Choice, evictions
from simulator.plan import Plan
from simulator.program import Program
from simulator.residency import is_available, reruns
from simulator.timeline import Timeline


@dataclass(eq=False)
class Capuchin(RowsPlanner):
    """Capuchin's policy maker and its feedback.

    Args:
        mode: swap, recompute or joint (the hybrid policy).
        rounds: simulated iterations of feedback, at least 1.
        policy: "tensors": ASPLOS 2020; "layers": as HOME's authors describe it (``by_layer``), without feedback.
    """

    facts = PlannerInfo(
        "capuchin",
        "Capuchin",
        '"Capuchin: Tensor-based GPU Memory Management for Deep Learning", ASPLOS 2020',
        family="swap and recompute",
        slot=1,
        place=120,
    )

    mode: str = one_of(MODES, "joint")
    rounds: int = at_least(1, 50)
    policy: str = one_of(("tensors", "layers"), "tensors")

    def choose(self, engine: Engine) -> Rows:
        """Returns the policy maker's decisions after feedback; raises Infeasible if they cannot reach the limit."""
        if self.policy == "layers":
            rows, (excess, _) = by_layer(engine, self.mode, self.min_bytes)
            if excess:
                raise self.beyond_reach(engine, None)
            return rows
        policy = PolicyMaker(engine, self.mode, self.min_bytes)
        if not policy.decide():
            raise self.beyond_reach(engine, policy.candidates.least_bytes if self.mode != "recompute" else None)
        rows = policy.rows()
        if engine.score(rows).feasible:  # infeasible if host memory is insufficient
            rows = self._feedback(policy, engine, collective(engine, rows, len(policy.swaps)))
        return rows

    def _feedback(self, policy: PolicyMaker, engine: Engine, rows: Rows) -> Rows:
        """Returns ``rows`` (the swaps of ``policy`` first) with the in-triggers of the fastest round (choice 6)."""
        rows, best, best_ns = rows.copy(), rows, 0
        swaps = policy.swaps
        in_start = policy.lanes(swaps)[1]
        for _ in range(self.rounds if swaps else 0):
            timeline = engine.timeline(Plan(decisions_of(rows)))
            if not best_ns or timeline.iteration_ns < best_ns:
                best = rows.copy()
                best_ns = timeline.iteration_ns
            late = [i for i in stalling_swaps(timeline, rows[: len(swaps)]) if rows[i, EXTRA] != rows[i, AFTER]]
            has_moved = False
            while late and not has_moved:  # a step may be shorter than a kernel
                for i in late:
                    in_start[i] -= max(1, int(0.05 * policy.h2d[swaps[i]]))  # 5 % of the swap-in time
                    trigger = policy.trigger(swaps[i], in_start[i])
                    has_moved |= trigger != rows[i, EXTRA]
                    rows[i, EXTRA] = trigger
            if not has_moved:
                break
        return best


class PolicyMaker:
    """The policy maker: decisions made so far, and the costs of further ones.

    Attributes:
        gaps: m candidates.
        free: int64[m], free times in ns.
        swaps, recomputed: candidates in the order of selection.
    """

    def __init__(self, engine: Engine, mode: str, min_bytes: int):
        program = engine.program
        machine = engine.machine
        is_above = np.array(program.live_bytes, dtype=np.int64) > engine.limit
        all_gaps = Candidates(program, program.gaps(min_bytes))
        self.candidates = Candidates(
            program, [g for g, open_at in zip(all_gaps.gaps, all_gaps.absent, strict=True) if open_at[is_above].any()]
        )
        self.program = program
        self.engine = engine
        self.gaps = self.candidates.gaps
        nbytes = self.candidates.nbytes.tolist()
        start = program.start_ns
        self.evicted_access = np.array([start[g.after + 1] for g in self.gaps], dtype=np.int64)
        self.back_access = self.evicted_access + np.array([program.gap_ns(g) for g in self.gaps], dtype=np.int64)
        self.d2h = np.array([machine.d2h_ns(b) for b in nbytes], dtype=np.int64)
        self.h2d = np.array([machine.h2d_ns(b) for b in nbytes], dtype=np.int64)
        self.free = (self.back_access - self.h2d) - (self.evicted_access + self.d2h)
        # At kernels above the limit: excess bytes, bytes that each candidate evicts, starts and ends.
        self.to_free = self.candidates.live_bytes[is_above] - engine.limit
        self.freed = np.where(self.candidates.absent[:, is_above], self.candidates.nbytes[:, None], 0)
        self.starts = np.array(start[:-1])[is_above]
        self.ends = np.array(start[1:])[is_above]
        self.wraps = np.array([g.after >= g.before for g in self.gaps], dtype=bool)
        self.swaps: list[int] = []
        self.recomputed: list[int] = []
        self.by_free_time = np.argsort(-self.free, kind="stable").tolist() if mode != "recompute" else []
        self.can_swap = dict.fromkeys(self.by_free_time)
        self.can_recompute = dict.fromkeys(
            i for i, g in enumerate(self.gaps) if Choice.RECOMPUTED in evictions(program, g, mode)
        )
        self.chain_ns: dict[int, int] = {}
        self.sources: dict[int, set[int]] = {}
        self.regenerate(self.can_recompute)
        self.excess = self.remaining_excess()

    def decide(self) -> bool:
        """Makes decisions until no kernel exceeds the limit; returns False if that is impossible."""
        for i in list(self.can_swap):
            if self.candidates.absent[i, self.excess > 0].any() and self.overhead([*self.swaps, i]) <= 0:  # hidden
                self.try_adding(i, self.swaps, self.can_swap)
        while self.excess.any():
            is_useful = self.is_useful()
            swap = next((i for i in self.can_swap if is_useful[i]), None)
            recompute = max((i for i in self.can_recompute if is_useful[i]), key=self.msps, default=None)
            if recompute is not None and (swap is None or self.recompute_ns(recompute) < self.swap_ns(swap)):
                self.try_adding(recompute, self.recomputed, self.can_recompute)
            elif swap is not None:
                self.try_adding(swap, self.swaps, self.can_swap)
            elif not self.fall_back():
                return False
        return True

    def is_useful(self) -> NDArray[np.bool_]:
        """Returns bool[m]: undecided candidates that are open at a kernel above the limit."""
        is_useful: NDArray[np.bool_] = np.logical_or.reduce(self.candidates.absent[:, self.excess > 0], axis=1)
        is_useful[self.swaps + self.recomputed] = False
        return is_useful

    def try_adding(self, i: int, chosen: list[int], pool: dict[int, None]) -> None:
        """Adds candidate i to ``chosen`` if that reduces the excess, else removes it from its ``pool``."""
        old_excess = self.excess
        chosen.append(i)
        self.excess = self.remaining_excess()
        if self.excess.sum() >= old_excess.sum():
            chosen.pop()
            del pool[i]
            self.excess = old_excess
        elif chosen is self.recomputed:
            t = self.gaps[i].tensor
            self.regenerate([j for j in self.sources if t in self.sources[j] and self.is_open(i, self.gaps[j].before)])

    def fall_back(self) -> bool:
        """Turns the latest recomputation into a swap (choice 8); returns False if that is impossible."""
        if not self.recomputed or not self.by_free_time:
            return False
        self.swaps.append(self.recomputed.pop())
        del self.can_recompute[self.swaps[-1]]
        self.can_swap = dict.fromkeys(self.by_free_time)  # candidates removed earlier may help now
        self.regenerate(self.sources)
        self.excess = self.remaining_excess()
        return True

    def remaining_excess(self) -> NDArray[np.int64]:
        """Returns the bytes of planned residency above the limit per kernel, int64[n]."""
        return np.maximum(self.engine.residency(self.rows()) - self.engine.limit, 0)

    def rows(self) -> Rows:
        """Returns the decisions, swaps first, each with its in-trigger (choice 6)."""
        rows = self.candidates.rows[self.swaps + self.recomputed]
        rows[len(self.swaps) :, [KIND, EXTRA]] = RECOMPUTE, 0
        starts = self.lanes(self.swaps)[1].tolist()
        rows[: len(self.swaps), EXTRA] = [self.trigger(i, s) for i, s in zip(self.swaps, starts, strict=True)]
        return rows

    def lanes(self, swaps: list[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns SwapOutEndTime and SwapInStartTime of ``swaps`` (int64), serialized per lane (choice 3)."""
        indices = np.array(swaps, dtype=np.int64)
        end = np.empty_like(indices)
        begin = np.empty_like(indices)
        order = np.argsort(self.evicted_access[indices], kind="stable")
        busy = np.cumsum(self.d2h[indices[order]])
        free_from = self.evicted_access[indices[order]] - busy + self.d2h[indices[order]]
        end[order] = np.maximum.accumulate(free_from) + busy
        order = np.argsort(-self.back_access[indices], kind="stable")
        busy = np.cumsum(self.h2d[indices[order]])
        free_until = self.back_access[indices[order]] + busy - self.h2d[indices[order]]
        begin[order] = np.minimum.accumulate(free_until) - busy
        return end, begin

    def overhead(self, swaps: list[int]) -> int:
        """Returns the cost of ``swaps`` in ns, given the recomputations (choice 3); at most 0 if they are hidden."""
        out_end, in_start = self.lanes(swaps)
        shortfall = int((out_end - in_start).max(initial=-NEVER))
        inside = ~self.wraps[swaps]
        need = self.to_free - self.freed[self.recomputed].sum(axis=0) - self.freed[swaps][~inside].sum(axis=0)
        evicted = self.freed[swaps][inside]
        out_end = out_end[inside, None]
        in_start = in_start[inside, None]
        late = delay(evicted, out_end - self.starts, need, np.argsort(out_end[:, 0], kind="stable"))
        early = delay(evicted, self.ends - in_start, need, np.argsort(-in_start[:, 0], kind="stable"))
        return max(shortfall, late, early, late + early)

    def swap_ns(self, i: int) -> int:
        """Returns the overhead that swapping candidate i adds."""
        return max(self.overhead([*self.swaps, i]), 0) - max(self.overhead(self.swaps), 0)

    def recompute_ns(self, i: int) -> int:
        """Returns the ns of recomputing candidate i, once more per chosen recomputation that reads it (choice 4)."""
        t = self.gaps[i].tensor
        users = sum(t in self.sources[r] and self.is_open(i, self.gaps[r].before) for r in self.recomputed)
        return self.chain_ns[i] * (1 + users)

    def msps(self, i: int) -> float:
        """Returns the bytes that recomputing candidate i saves per nanosecond."""
        return int(self.candidates.nbytes[i]) / max(self.recompute_ns(i), 1)

    def is_open(self, i: int, kernel: int) -> bool:
        """Returns whether candidate i (which does not wrap) would be evicted before ``kernel``."""
        return self.gaps[i].after < kernel <= self.gaps[i].before

    def regenerate(self, indices: Iterable[int]) -> None:
        """Updates time and sources of the recomputations ``indices``, given which tensors are recomputed themselves."""
        dropped: dict[int, list[int]] = {}
        for r in self.recomputed:
            dropped.setdefault(self.gaps[r].tensor, []).append(r)
        for i in list(indices):
            target, _, kernel = self.gaps[i]
            absent = {target} | {t for t, rs in dropped.items() if any(self.is_open(r, kernel) for r in rs)}
            rerun = reruns(self.program, {target}, kernel, absent)
            read = {(x, w) for w in rerun for x in self.program.kernels[w].inputs}
            self.sources[i] = {x for x, w in read if is_available(self.program, x, w, kernel, absent)}
            self.chain_ns[i] = sum(self.program.kernels[w].duration_ns for w in rerun)

    def trigger(self, i: int, start: int) -> int:
        """Returns the in-trigger of candidate i for a swap-in at ``start`` ns: the gap's last kernel to end by then."""
        n = len(self.program.kernels)
        (_, after, before) = self.gaps[i]
        iterations, time = divmod(int(start), max(self.program.ideal_ns, 1))
        last = iterations * n + bisect_right(self.program.start_ns, time) - 2
        return max(after, min(last, before - 1 + (n if after >= before else 0))) % n


def delay(nbytes: NDArray[np.int64], late: NDArray[np.int64], need: NDArray[np.int64], order: NDArray[np.int64]) -> int:
    """Returns the maximum delay in ns over all kernels if the tensors are transferred one after another.

    Args:
        nbytes: int64[m, p], bytes that each tensor contributes to the transfers before each kernel.
        late: int64[m, p], delay of the end of its transfer relative to the kernel, in ns.
        need: int64[p], bytes that must have been transferred; a need above the tensors' total counts as the total.
        order: int64[m], transfer order.
    """
    if not len(order):
        return -NEVER
    total = np.cumsum(nbytes[order], axis=0)
    last = np.argmax(total >= np.minimum(need, total[-1]), axis=0)  # the transfer that covers the need
    return int(late[order[last], np.arange(len(need))][np.minimum(need, total[-1]) > 0].max(initial=-NEVER))


def collective(engine: Engine, rows: Rows, begin: int) -> Rows:
    """Returns ``rows`` with ``keep`` in each recomputation from row ``begin`` on that it makes faster (choice 7)."""
    rows, best_ns = rows.copy(), engine.score(rows).iteration_ns if begin < len(rows) else 0
    for i in sorted(range(begin, len(rows)), key=lambda i: (rows[i, BEFORE], rows[i, TENSOR])):
        rows[i, EXTRA] = 1
        score = engine.score(rows)
        if score.feasible and score.iteration_ns < best_ns:
            best_ns = score.iteration_ns
        else:
            rows[i, EXTRA] = 0
    return rows


def stalling_swaps(timeline: Timeline, swaps: Rows) -> list[int]:
    """Returns the ``swaps`` that stalled compute in the last iteration: their swap-in ended when the wait did."""
    idle_from = 0
    begin = timeline.last_start_ns
    arrivals: dict[int, set[int]] = {}
    wait_ends: set[int] = set()
    for span in timeline.spans:
        if span.kind == "swap_in":
            arrivals.setdefault(span.index, set()).add(span.end_ns)
        elif span.stream == "compute":
            if span.start_ns > idle_from and span.start_ns >= begin:
                wait_ends.add(span.start_ns)
            idle_from = span.end_ns
    return [i for i, t in enumerate(swaps[:, TENSOR].tolist()) if arrivals.get(t, set()) & wait_ends]


def by_layer(engine: Engine, mode: str, min_bytes: int) -> tuple[Rows, Cost]:
    """Plans as HOME's authors reimplemented Capuchin (IEEE TC 2022, sections 2.3 and 4.1): layer by layer, greedily.

    "It iteratively searches the candidate policy to achieve the best performance only for the tensor(s) from the first
    layer to the current layer while ignoring the tensors in the latter layers." If the step up to the current layer,
    with the backward pass from there on, exceeds the limit, the cheapest change of one placement (retain, swap,
    recompute) is made until it fits; earlier placements are otherwise kept.

    Returns:
        The rows of the policy and its cost: bytes above the limit, and iteration time in ns.
    """
    program = engine.program
    maps = feature_maps(engine.program, min_bytes)
    gaps = [m.gap for m in maps]
    allowed = [placements(program, m.gap, mode) for m in maps]
    evaluator = Evaluator(engine, gaps, 1)
    x = np.zeros(len(maps), np.int8)
    for i, current in enumerate(maps):
        load = engine.residency(evaluator.rows(x))
        if np.delete(load, kernels_between(current)).max() > engine.limit:
            partial = Evaluator(Engine(program_up_to(program, current), engine.machine, engine.limit), gaps, 1)
            x, _ = evict(partial, allowed[: i + 1], x)
            engine.calls += partial.calls
    x, cost = evict(evaluator, allowed, x)
    return evaluator.rows(x), cost


def evict(evaluator: Evaluator, allowed: Sequence[Sequence[int]], x: Placements) -> tuple[Placements, Cost]:
    """Changes one placement at a time, each time the cheapest, until the policy fits or no change saves bytes.

    Args:
        allowed: Placements of the feature maps from the first to the current layer.
        x: Placements of all feature maps, (feature maps,).
        evaluator: Evaluates placements.

    Returns:
        The changed placements and their cost.
    """
    cost = evaluator.evaluate(x[None])[0]
    while cost[0]:
        changes = [(j, kind) for j, kinds in enumerate(allowed) for kind in kinds if kind != x[j]]
        if not changes:
            break
        variants = np.repeat(x[None], len(changes), axis=0)
        variants[range(len(changes)), [j for j, _ in changes]] = [kind for _, kind in changes]
        costs = evaluator.evaluate(variants)
        best = best_index(costs)
        if costs[best, 0] >= cost[0]:
            break
        x = variants[best]
        cost = costs[best]
    return x, (int(cost[0]), int(cost[1]))


def kernels_between(current: FeatureMap) -> range:
    """Returns the kernels after the layer of a feature map and before its backward use."""
    return range(current.layer + 1, current.gap.before)


def program_up_to(program: Program, current: FeatureMap) -> Program:
    """Returns the step as known at a feature map's layer: tensors of later layers take no memory."""
    kernels = kernels_between(current)
    tensors = list(program.tensors)
    for t, uses in enumerate(program.accesses):
        if uses and uses[0] in kernels and not tensors[t].persistent:
            tensors[t] = replace(tensors[t], nbytes=0)
    return replace(program, tensors=tuple(tensors))
