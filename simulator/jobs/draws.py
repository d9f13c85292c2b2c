"""Programs that differ between iterations, one for each draw: stochastic depth, a batch of another shape.

``adapted`` carries a plan over from one draw to another. Names do not say what corresponds: captures name parameters by
module, but number activations and gradients in order, so that those of a layer have other names where a layer before
it is dropped. So a kernel is known by its **place**: the persistent tensors that it touches; where there are none, the
place of the kernel that wrote the newest of its inputs (of those that the forward pass wrote, if there are any: in the
backward pass a layer's own activations say more than the gradient that comes in). Of kernels of the same name at the
same place the k-th correspond. A tensor is known by its name if it is persistent, else by its first writer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace

from simulator.plan import Decision, Plan, PlanError, Rerun, Swap
from simulator.program import Program
from simulator.schedule import lower


def adapted(plan: Plan, program: Program, other: Program) -> Plan:
    """The decisions of a plan for ``program`` that make sense in ``other``.

    A decision whose tensor or next use is missing is left out. Where the kernel is missing after which a gap opens, it
    opens after the use before; a prefetch, an early copy or an early recomputation is left open. Of decisions that do
    not go together the later are left out. What is then not planned may need more than the plan's limit: several jobs
    evict it on demand.

    Returns:
        A plan that passes ``Plan.check`` and can be lowered.
    """
    tensor, kernel = (_matched(*pair) for pair in zip(_known(program), _known(other), strict=True))
    variants = [(kernel[k], i) for k, i in plan.variants if k in kernel]
    known = [(k, i) for k, i in variants if i < len(other.kernels[k].variants)]
    bare = replace(plan, decisions=(), fingerprint=other.fingerprint, variants=tuple(sorted(known)))
    found = [_moved(d, tensor, kernel, other) for d in plan.decisions]
    return replace(bare, decisions=_together([], [d for d in found if d is not None], bare, other))


def _matched(keys: Sequence[Hashable], others: Sequence[Hashable]) -> dict[int, int]:
    """Indices with the same key."""
    at = {key: i for i, key in enumerate(others)}
    return {i: at[key] for i, key in enumerate(keys) if key in at}


def _known(program: Program) -> tuple[list[Hashable], list[Hashable]]:
    """What tensors and kernels are known by, each by its own."""
    tensors, kernels = program.tensors, program.kernels
    places: list[Hashable] = []
    writer: dict[int, int] = {}  # of tensors that are not persistent: the last so far
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
    """Each with how often it came before."""
    seen: dict[Hashable, int] = {}
    out: list[Hashable] = []
    for name in names:
        out.append((name, seen.get(name, 0)))
        seen[name] = seen.get(name, 0) + 1
    return out


def _moved(d: Decision, tensor: dict[int, int], kernel: dict[int, int], other: Program) -> Decision | None:
    """A decision in the other program's numbers; None where there is none."""
    tries: list[Decision]
    if isinstance(d, Rerun):
        tries = [Rerun(kernel.get(d.kernel, -1), kernel.get(d.before, -1))]
    else:
        t, before = tensor.get(d.tensor), kernel.get(d.before)
        if t is None or before is None or not other.accesses[t]:
            return None
        uses = other.accesses[t]
        here = replace(d, tensor=t, after=kernel.get(d.after, uses[bisect_left(uses, before) - 1]), before=before)
        if isinstance(here, Swap):
            prefetch, copy = (None if k is None else kernel.get(k) for k in (here.prefetch, here.copy))
            tries = [replace(here, prefetch=p, copy=c) for p in (prefetch, None) for c in (copy, None)]
        else:
            tries = [replace(here, at=None if here.at is None else kernel.get(here.at)), replace(here, at=None)]
    return next((one for one in tries if _fit(Plan((one,)), other)), None)


def _fit(plan: Plan, program: Program) -> bool:
    try:
        plan.check(program)
    except PlanError:
        return False
    return True


def _together(kept: list[Decision], more: list[Decision], bare: Plan, program: Program) -> tuple[Decision, ...]:
    """Those that are kept, and of the others those that go together with them, found by halving."""
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
