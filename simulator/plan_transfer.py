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


def transfer_plan(plan: Plan, program: Program, other: Program) -> Plan:
    """Returns the decisions of a plan for ``program`` that can be transferred to ``other``.

    Decisions whose tensor or next use is missing are dropped. If the kernel after which a gap opens is missing, the gap
    opens after the previous use, and prefetches, early copies and early recomputations are left open. Of conflicting
    decisions, the later are dropped. The result may need more memory than the plan's limit.

    Kernels with other names correspond if equally many have the same place, and so do their outputs. Otherwise, a
    missing kernel is replaced by the one that touches the decision's tensor, counted by uses within the phase.

    Returns:
        A plan that passes ``Plan.check`` and can be lowered.
    """
    program_keys = _identity_keys(program)
    other_keys = _identity_keys(other)
    tensor, kernel = (_match(*pair) for pair in zip(program_keys, other_keys, strict=True))
    _match_others(program, other, program_keys[1], other_keys[1], tensor, kernel)
    by_order = _by_order(program, other, tensor, kernel)
    variants = [(kernel[k], i) for k, i in plan.variants if k in kernel]
    valid = [(k, i) for k, i in variants if i < len(other.kernels[k].variants)]
    empty = replace(Plan.of(other, (), plan.planner, plan.limit, plan.machine), variants=tuple(sorted(valid)))
    options = (d.mapped(tensor, kernel | by_order.get(getattr(d, "tensor", -1), {}), other) for d in plan.decisions)
    transferred = [next((d for d in group if _is_valid(Plan((d,)), other)), None) for group in options]
    return replace(empty, decisions=_merge([], [d for d in transferred if d is not None], empty, other))


def _match(keys: Sequence[Hashable], other_keys: Sequence[Hashable]) -> dict[int, int]:
    """Returns the pairs of indices with equal keys."""
    index = {key: i for i, key in enumerate(other_keys)}
    return {i: index[key] for i, key in enumerate(keys) if key in index}


def _match_others(
    program: Program,
    other: Program,
    kernel_keys: Sequence[Any],
    other_keys: Sequence[Any],
    tensor: dict[int, int],
    kernel: dict[int, int],
) -> None:
    """Adds kernels of other names, and their outputs, to the matched tensors and kernels; keys identify kernels."""

    def unmatched(keys: Sequence[Any], kernels: Sequence[Kernel], matched: Container[int]) -> dict[Hashable, list[int]]:
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for k, ((_, place), _) in enumerate(keys):
            if k not in matched:
                groups[kernels[k].phase, place].append(k)
        return groups

    other_groups = unmatched(other_keys, other.kernels, set(kernel.values()))
    for key, group in unmatched(kernel_keys, program.kernels, kernel).items():
        if len(group) == len(other_groups[key]):
            kernel |= zip(group, other_groups[key], strict=True)
    for t, uses in enumerate(program.writes):
        if t in tensor or not uses or uses[0] not in kernel or program.tensors[t].persistent:
            continue
        i = program.kernels[uses[0]].outputs.index(t)
        outputs = other.kernels[kernel[uses[0]]].outputs
        if i < len(outputs) and other.tensors[outputs[i]].nbytes == program.tensors[t].nbytes:
            tensor[t] = outputs[i]


def _by_order(
    program: Program, other: Program, tensor: Mapping[int, int], kernel: Mapping[int, int]
) -> dict[int, dict[int, int]]:
    """Returns, per tensor, for unmatched kernels the one with the same number of uses of the tensor into the phase."""
    replacements: dict[int, dict[int, int]] = {}
    for t, u in tensor.items():
        program_uses = _with_occurrence(program.kernels[k].phase for k in program.accesses[t])
        other_uses = _with_occurrence(other.kernels[k].phase for k in other.accesses[u])
        other_kernels = dict(zip(other_uses, other.accesses[u], strict=True))
        pairs = zip(program.accesses[t], program_uses, strict=True)
        replacements[t] = {k: other_kernels[key] for k, key in pairs if k not in kernel and key in other_kernels}
    return replacements


def _identity_keys(program: Program) -> tuple[list[Hashable], list[Hashable]]:
    """Returns the keys that identify tensors and kernels."""
    tensors = program.tensors
    kernels = program.kernels
    places: list[Hashable] = []
    writer: dict[int, int] = {}  # last writer so far of each non-persistent tensor
    for kernel in kernels:
        place: Hashable = tuple(tensors[t].name for t in kernel.accesses if tensors[t].persistent)
        writers = sorted(writer[t] for t in kernel.inputs if t in writer)
        if not place and writers:
            place = places[max((w for w in writers if kernels[w].phase == "forward"), default=writers[-1])]
        places.append(place)
        writer |= {t: len(places) - 1 for t in kernel.outputs if not tensors[t].persistent}
    keys = _with_occurrence((kernel.name, place) for kernel, place in zip(kernels, places, strict=True))
    written_as = {
        t: (keys[uses[0]], kernels[uses[0]].outputs.index(t))
        for t, uses in enumerate(program.writes)
        if uses and not tensors[t].persistent
    }
    return _with_occurrence(written_as.get(t, x.name) for t, x in enumerate(tensors)), keys


def _with_occurrence(names: Iterable[Hashable]) -> list[Hashable]:
    """Pairs each name with the number of its previous occurrences."""
    counters: defaultdict[Hashable, Iterator[int]] = defaultdict(count)
    return [(name, next(counters[name])) for name in names]


def _is_valid(plan: Plan, program: Program) -> bool:
    try:
        plan.check(program)
    except PlanError:
        return False
    return True


def _merge(accepted: list[Decision], others: list[Decision], empty: Plan, program: Program) -> tuple[Decision, ...]:
    """Returns the accepted decisions and all compatible decisions of ``others``, which bisection finds."""
    plan = replace(empty, decisions=(*accepted, *others))
    try:
        plan.check(program)
        lower(program, plan)
        return plan.decisions
    except PlanError:
        if len(others) == 1:
            return tuple(accepted)
    half = len(others) // 2
    first = _merge(accepted, others[:half], empty, program)
    return _merge(list(first), others[half:], empty, program)
