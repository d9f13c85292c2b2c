"""Memonger: "Training Deep Nets with Sublinear Memory Cost" (Chen, Xu, Zhang, Guestrin; arXiv 1604.06174, 2016).

The forward pass is cut into stages. Outputs of stages are kept; other feature maps are dropped and recomputed stage by
stage in the backward pass (Algorithm 1; the mirror count m(v) of Algorithm 2 is 0 for a layer whose results are kept,
else 1). Algorithm 3 places the cuts for a budget B: it accumulates the bytes of layer results and ends a stage at the
first candidate where the sum exceeds B. It returns x, the bytes kept between stages, and y, the bytes of the largest
stage. B = sqrt(x y) balances the two (2 sqrt(n) feature maps for n equal layers); a grid search around it finds the
plan. Implemented without access to the paper's text. Entry point: ``Memonger.choose``. Numbered choices and
deviations: memonger.md.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from agents.heuristics.layers import FeatureMap, feature_maps, is_marker
from agents.planner import MIB, PlannerInfo, Rows, RowsPlanner, at_least
from simulator.compiled.encoding import rows_for
from simulator.compiled.engine import Engine
from simulator.decisions import can_recompute
from simulator.files import no_collections
from simulator.modes import Choice
from simulator.program import Program

COMPUTE_INTENSIVE = frozenset({"conv", "matmul", "rnn"})


@dataclass(eq=False)
class Memonger(RowsPlanner):
    """Sublinear-memory checkpointing with its budget tuned to the limit.

    Args:
        trials: number of budgets in the grid.
    """

    facts = PlannerInfo(
        "memonger",
        "memonger",
        '"Training Deep Nets with Sublinear Memory Cost", 2016',
        family="recompute",
        slot=2,
        place=130,
        moves="recompute",
    )

    trials: int = at_least(1, 64)

    @no_collections()
    def choose(self, engine: Engine) -> Rows:
        """Returns the fastest plan of the grid that fits the limit; raises Infeasible if none does."""
        program = engine.program
        stages = Stages(program, self.min_bytes)
        budget = 0
        for _ in range(3):
            x, y, _ = stages.divide(budget)
            budget = math.isqrt(x * y)
        grid = (round(math.sqrt(2) * budget * i / self.trials) for i in range(self.trials + 1))
        plans = {tuple(dropped): dropped for _, _, dropped in map(stages.divide, grid)}
        if program.peak_bytes <= engine.limit:  # recomputation can need more memory than the empty plan
            plans[()] = []
        scored = [(engine.score(rows), rows) for rows in map(recomputations, plans.values())]
        best, rows = min(scored, key=lambda s: (not s[0].feasible, s[0].iteration_ns))
        if not best.feasible:
            raise self.beyond_reach(engine, min(score.required_bytes for score, _ in scored))
        return rows


class Stages:
    """Algorithm 3 for one program."""

    def __init__(self, program: Program, min_bytes: int = MIB) -> None:
        self._maps = feature_maps(program, min_bytes)
        self._nbytes = {m.tensor: program.tensors[m.tensor].nbytes for m in self._maps}
        cuts, through = cuts_of(program, min_bytes)
        self._droppable = {m.tensor for m in recomputable(program, self._maps)} - through
        self._results: dict[int, list[int]] = {}
        for m in self._maps:
            self._results.setdefault(m.layer, []).append(m.tensor)
        self._splits = {s.kernel: s for s in cuts}
        self._layers = [  # the kernels considered, and the bytes of their results
            (v, sum(self._nbytes[t] for t in self._results.get(v, ())))
            for v in sorted(self._results.keys() | self._splits.keys())
        ]

    def divide(self, budget: int) -> tuple[int, int, list[FeatureMap]]:
        """Returns the stages for a budget in bytes.

        Returns:
            x, the bytes kept between stages; y, the bytes of the largest stage; the dropped feature maps.
        """
        x = y = temp = 0
        kept: set[int] = set()
        for v, nbytes in self._layers:
            temp += nbytes
            if temp > budget and v in self._splits:
                added = {t for t in (*self._results.get(v, ()), *self._splits[v].crossing) if t in self._nbytes} - kept
                x += sum(self._nbytes[t] for t in added)
                y = max(y, temp)
                kept |= added
                temp = 0
        return x, max(y, temp), [m for m in self._maps if m.tensor in self._droppable and m.tensor not in kept]


class Split(NamedTuple):
    """Kernel after which the forward pass can be cut in two."""

    kernel: int  # last kernel before the cut
    crossing: frozenset[int]  # tensors written up to the cut and used by later forward kernels


class Cuts(NamedTuple):
    """Candidate cuts of a forward pass."""

    splits: list[Split]  # in program order
    through: frozenset[int]  # tensors that cross all blocks of a model of repeated blocks, and stay


def splits(program: Program, min_bytes: int = MIB) -> list[Split]:
    """Returns the candidate cuts of the forward pass, as ``cuts_of``."""
    return cuts_of(program, min_bytes).splits


def cuts_of(program: Program, min_bytes: int = MIB) -> Cuts:
    """Returns the candidate cuts of the forward pass.

    At a cut, at most one tensor of ``min_bytes`` crosses, and all crossing tensors reach the backward pass unchanged.
    Of consecutive kernels with the same crossing tensors only the first is returned. If that divides the forward pass
    into equal blocks, tensors that cross all blocks do not count, and neither do references that Python holds.
    """
    through = _lasting(program)
    if through or _is_held(program):
        relaxed = _splits(program, min_bytes, through, ignores_markers=True)
        if _is_repeated(program, relaxed):
            return Cuts(relaxed, through)
    return Cuts(_splits(program, min_bytes), frozenset())


def _splits(
    program: Program, min_bytes: int, through: frozenset[int] = frozenset(), ignores_markers: bool = False
) -> list[Split]:
    """Returns the cuts at which at most one tensor of ``min_bytes`` crosses, besides those in ``through``."""
    forward = [k for k, kernel in enumerate(program.kernels) if kernel.phase == "forward"]
    counted = {k for k in forward if not (ignores_markers and is_marker(program.kernels[k]))}
    begins: dict[int, list[int]] = {}
    last_use: dict[int, int] = {}  # last use in the forward pass
    for t, uses in enumerate(program.accesses):
        forward_uses = [k for k in uses if k in counted]
        if forward_uses and not program.tensors[t].persistent and t not in through:
            begins.setdefault(forward_uses[0], []).append(t)
            last_use[t] = forward_uses[-1]
    written = {t: max(k for k in program.writes[t] if k <= last) for t, last in last_use.items()}
    consumed = {t for t in last_use if program.kernels[program.accesses[t][-1]].phase == "forward"}
    cuts: list[Split] = []
    crossing: set[int] = set()
    for k in forward:
        crossing = {t for t in crossing.union(begins.get(k, ())) if last_use[t] > k}
        large = sum(program.tensors[t].nbytes >= max(min_bytes, 1) for t in crossing)
        if large <= 1 and all(t not in consumed and written[t] <= k for t in crossing):
            if not cuts or cuts[-1].crossing != crossing:
                cuts.append(Split(k, frozenset(crossing)))
    return cuts


def _is_repeated(program: Program, cuts: Sequence[Split]) -> bool:
    """Returns whether most forward kernels lie in segments between two cuts that occur more than once."""
    kernels = program.kernels
    names = [tuple(k.name for k in kernels[a.kernel : b.kernel] if not is_marker(k)) for a, b in pairwise(cuts)]
    repeated = sum(len(segment) * count for segment, count in Counter(names).items() if count > 1)
    return 2 * repeated > sum(k.phase == "forward" and not is_marker(k) for k in kernels)


def _lasting(program: Program) -> frozenset[int]:
    """Returns the tensors that operators of one kind read in each block, at about equal distances.

    Examples are rotary tables, masks, position biases, and the encoder's result in a decoder.
    """
    kernels = [k for k, kernel in enumerate(program.kernels) if kernel.phase == "forward" and not is_marker(kernel)]
    position = {k: i for i, k in enumerate(kernels)}
    heads = [k for k in kernels if program.kernels[k].kind in COMPUTE_INTENSIVE]
    found = set()
    for t, tensor in enumerate(program.tensors):
        uses = [k for k in program.accesses[t] if k in position]
        is_constant = bool(uses) and not tensor.persistent and program.writes[t] == (uses[0],)
        if is_constant and _repeats(program, uses[1:], position, heads):
            found.add(t)
    return frozenset(found)


def _is_held(program: Program) -> bool:
    """Returns whether Python holds a tensor beyond its last use for most of the forward pass, such as embeddings."""
    forward = [k for k, kernel in enumerate(program.kernels) if kernel.phase == "forward"]
    position = {k: i for i, k in enumerate(forward)}
    for t, tensor in enumerate(program.tensors):
        uses = [k for k in program.accesses[t] if k in position]
        held_for = [position[b] - position[a] for a, b in pairwise(uses) if is_marker(program.kernels[b])]
        if not tensor.persistent and 2 * max(held_for, default=0) > len(forward):
            return True
    return False


def _repeats(program: Program, readers: Sequence[int], position: Mapping[int, int], heads: Sequence[int]) -> bool:
    """Returns whether readers of a tensor repeat: those of one operator and result size are at about equal distances.

    Readers with no compute-intensive kernel (``heads``) between them, besides other readers, count once. Two readings
    repeat if they are half the forward pass apart.
    """
    own = set(readers)
    other_heads = [k for k in heads if k not in own]
    groups: dict[tuple[str, int], list[int]] = {}
    for k in readers:
        kernel = program.kernels[k]
        group = groups.setdefault((kernel.name, sum(program.tensors[x].nbytes for x in kernel.outputs)), [])
        if not group or bisect_left(other_heads, group[-1]) < bisect_left(other_heads, k):
            group.append(k)
    for group in groups.values():
        distances = sorted(position[b] - position[a] for a, b in pairwise(group))
        if not distances:
            continue
        middle = distances[len(distances) // 2]
        equal = sum(8 * abs(distance - middle) <= middle for distance in distances)  # the first block may compute more
        if (equal >= 2 and 2 * equal >= len(distances)) or 2 * distances[-1] > len(position):
            return True
    return False


def recomputable(program: Program, maps: Iterable[FeatureMap]) -> list[FeatureMap]:
    """Returns the feature maps that kernels of the program can recompute."""
    return [m for m in maps if can_recompute(program, m.tensor, m.gap.before)]


def recomputations(dropped: Sequence[FeatureMap]) -> Rows:
    """Returns int64[n, 6], rows that drop the feature maps and recompute each once, at its first use."""
    return rows_for((m.gap for m in dropped), Choice.CHAIN_KEPT)
