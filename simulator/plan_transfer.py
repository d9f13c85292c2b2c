"""Transfers a plan to another capture of the same step, from another device or with other operators.

Names of activations are not stable across captures, but names of persistent tensors are. So a kernel is identified by
its **place**: the persistent tensors that it touches, or else the place of the writer of its newest input. Inputs
written in the forward pass take precedence, because a layer's activations identify it better than the incoming
gradient. Among kernels of equal name and place, the k-th correspond to each other. A persistent tensor is identified by
its name, any other by its first writer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from simulator.plan import Decision, Plan, PlanError
from simulator.program import Kernel, Program
from simulator.schedule import lower


def adapted(plan: Plan, program: Program, other: Program) -> Plan:
    """Returns the decisions of a plan for ``program`` that can be transferred to ``other``.

    Decisions whose tensor or next use is missing are dropped. If the kernel after which a gap opens is missing, the gap
    opens after the previous use, and prefetches, early copies and early recomputations are left open. Of conflicting
    decisions, the later are dropped. The result may need more memory than the plan's limit.

    Kernels with other names correspond if equally many have the same place, and so do their outputs. Otherwise, a
    missing kernel is replaced by the one that touches the decision's tensor, counted by uses within the phase.

    Returns:
        A plan that passes ``Plan.check`` and can be lowered.
    """
    mine, theirs = _known(program), _known(other)
    tensor, kernel = (_matched(*pair) for pair in zip(mine, theirs, strict=True))
    _match_others(program, other, mine[1], theirs[1], tensor, kernel)
    beside = _by_order(program, other, tensor, kernel)
    variants = [(kernel[k], i) for k, i in plan.variants if k in kernel]
    known = [(k, i) for k, i in variants if i < len(other.kernels[k].variants)]
    bare = replace(Plan.of(other, (), plan.planner, plan.limit, plan.machine), variants=tuple(sorted(known)))
    tries = (d.moved(tensor, kernel | beside.get(getattr(d, "tensor", -1), {}), other) for d in plan.decisions)
    found = [next((d for d in each if _fit(Plan((d,)), other)), None) for each in tries]
    return replace(bare, decisions=_together([], [d for d in found if d is not None], bare, other))


class Same:
    """Identity-based cache key for a program or a machine."""

    def __init__(self, of: Any):
        self.of = of

    def __hash__(self) -> int:
        return id(self.of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.of is other.of


def _matched(keys: Sequence[Hashable], others: Sequence[Hashable]) -> dict[int, int]:
    """Returns the pairs of indices with equal keys."""
    at = {key: i for i, key in enumerate(others)}
    return {i: at[key] for i, key in enumerate(keys) if key in at}


def _match_others(
    program: Program, other: Program, mine: Sequence[Any], theirs: Sequence[Any], tensor: dict[int, int],
    kernel: dict[int, int],
) -> None:  # fmt: skip
    """Adds kernels of other names, and their outputs, to the matched tensors and kernels; ``mine``: kernels' keys."""

    def unmatched(keys: Sequence[Any], kernels: Sequence[Kernel], known: Container[int]) -> dict[Hashable, list[int]]:
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for k, ((_, place), _) in enumerate(keys):
            if k not in known:
                groups[kernels[k].phase, place].append(k)
        return groups

    others = unmatched(theirs, other.kernels, set(kernel.values()))
    for key, group in unmatched(mine, program.kernels, kernel).items():
        if len(group) == len(others[key]):
            kernel |= zip(group, others[key], strict=True)
    for t, uses in enumerate(program.writes):
        if t in tensor or not uses or uses[0] not in kernel or program.tensors[t].persistent:
            continue
        i, outputs = program.kernels[uses[0]].outputs.index(t), other.kernels[kernel[uses[0]]].outputs
        if i < len(outputs) and other.tensors[outputs[i]].nbytes == program.tensors[t].nbytes:
            tensor[t] = outputs[i]


def _by_order(
    program: Program, other: Program, tensor: Mapping[int, int], kernel: Mapping[int, int]
) -> dict[int, dict[int, int]]:
    """Returns, per tensor, for unmatched kernels the one with the same number of uses of the tensor into the phase."""
    found: dict[int, dict[int, int]] = {}
    for t, u in tensor.items():
        mine = _numbered(program.kernels[k].phase for k in program.accesses[t])
        theirs = _numbered(other.kernels[k].phase for k in other.accesses[u])
        at = dict(zip(theirs, other.accesses[u], strict=True))
        pairs = zip(program.accesses[t], mine, strict=True)
        found[t] = {k: at[key] for k, key in pairs if k not in kernel and key in at}
    return found


def _known(program: Program) -> tuple[list[Hashable], list[Hashable]]:
    """Returns the keys that identify tensors and kernels."""
    tensors, kernels = program.tensors, program.kernels
    places: list[Hashable] = []
    writer: dict[int, int] = {}  # last writer so far of each non-persistent tensor
    for kernel in kernels:
        place: Hashable = tuple(tensors[t].name for t in kernel.accesses if tensors[t].persistent)
        wrote = sorted(writer[t] for t in kernel.inputs if t in writer)
        if not place and wrote:
            place = places[max((w for w in wrote if kernels[w].phase == "forward"), default=wrote[-1])]
        places.append(place)
        writer |= {t: len(places) - 1 for t in kernel.outputs if not tensors[t].persistent}
    keys = _numbered((kernel.name, place) for kernel, place in zip(kernels, places, strict=True))
    made = {t: (keys[uses[0]], kernels[uses[0]].outputs.index(t))
            for t, uses in enumerate(program.writes) if uses and not tensors[t].persistent}  # fmt: skip
    return _numbered(made.get(t, x.name) for t, x in enumerate(tensors)), keys


def _numbered(names: Iterable[Hashable]) -> list[Hashable]:
    """Pairs each name with the number of its previous occurrences."""
    seen: defaultdict[Hashable, Iterator[int]] = defaultdict(count)
    return [(name, next(seen[name])) for name in names]


def _fit(plan: Plan, program: Program) -> bool:
    try:
        plan.check(program)
    except PlanError:
        return False
    return True


def _together(kept: list[Decision], more: list[Decision], bare: Plan, program: Program) -> tuple[Decision, ...]:
    """Returns the kept decisions and all compatible decisions of ``more``, which bisection finds."""
    whole = replace(bare, decisions=(*kept, *more))
    try:
        whole.check(program)
        lower(program, whole)
        return whole.decisions
    except PlanError:
        if len(more) == 1:
            return tuple(kept)
    half = len(more) // 2
    first = _together(kept, more[:half], bare, program)
    return _together(list(first), more[half:], bare, program)
