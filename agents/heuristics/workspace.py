"""Dynamic convolution workspaces of SuperNeurons (PPoPP 2018, section 3.5), for the plans of every planner.

A kernel with several algorithms (``Kernel.variants``, and its own duration and workspace) can trade bytes for time.
Section 3.5: tensors have priority, since workspaces do not affect results; then, at every step, the free bytes are
profiled, algorithms that need more are skipped, and the fastest of the others is selected. Entry point:
``plan_with_variants``. Numbered choices and deviations: README.md.

Source: "Superneurons: Dynamic GPU Memory Management for Training Deep Neural Networks".
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import replace

import agents
from agents.planner import Infeasible, Planner
from simulator import OutOfMemory
from simulator.compiled.encoding import NEVER
from simulator.compiled.engine import Engine, rows_of
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Kernel, Program
from simulator.timeline import Timeline

Variants = tuple[tuple[int, int], ...]  # as Plan.variants


def algorithms(kernel: Kernel) -> list[tuple[int, int, int]]:
    """Returns (duration_ns, workspace, index) of every algorithm of a kernel, its default (index -1) first."""
    return [(kernel.duration_ns, kernel.workspace, -1), *((d, w, i) for i, (d, w) in enumerate(kernel.variants))]


def least_workspaces(program: Program) -> Variants:
    """Returns the variants with the smallest workspace of every kernel."""
    least = {
        k: min(algorithms(kernel), key=lambda a: (a[1], a[0], a[2]))[2] for k, kernel in enumerate(program.kernels)
    }
    return _variants(least)


def relaxed(program: Program) -> Program:
    """Returns the program with each kernel's shortest duration and smallest workspace, which no variants beat."""
    every = [algorithms(kernel) for kernel in program.kernels]
    kernels = (
        replace(kernel, duration_ns=min(d for d, _, _ in a), workspace=min(w for _, w, _ in a))
        for kernel, a in zip(program.kernels, every, strict=True)
    )
    return Program(program.name, program.tensors, tuple(kernels))


def plan_with_variants(
    planner: Planner, program: Program, machine: Machine, limit: int, fill: bool = True, own: bool = True
) -> Plan:
    """Plans with minimal workspaces, then selects variants that are as fast as memory allows.

    Args:
        fill: False: keep the minimal workspaces.
        own: if workspaces are filled, also plan with the kernels' default algorithms (choice 8).

    Raises:
        Infeasible: the planner finds no plan.
    """
    engine = Engine(program, machine, limit)
    least = least_workspaces(program)
    found: list[tuple[int, Plan]] = []
    calls, reasons = 0, []
    for variants in dict.fromkeys((least, ()) if fill and own else (least,)):
        try:
            plan = planner.plan(program.with_variants(variants), machine, limit)
        except Infeasible as error:
            reasons.append(error)
            continue
        finally:
            calls += planner.simulator_calls
        plan = replace(Plan.of(program, plan.decisions, plan.planner, plan.limit, plan.machine), variants=variants)
        facts = agents.PLANNERS.get(planner.name)
        if fill and not (facts and facts.addressed):
            plan = with_fastest_variants(program, plan, machine, limit, engine)
        asked = Engine(program, machine, plan.limit).with_variants(plan.variants)
        found.append((asked.score(rows_of(plan.decisions)).iteration_ns, plan))
        calls += asked.calls
    planner.simulator_calls = calls + engine.calls
    if not found:
        raise reasons[0]
    return min(found, key=lambda entry: entry[0])[1]


def with_fastest_variants(
    program: Program, plan: Plan, machine: Machine, limit: int, engine: Engine | None = None, refine: bool = True
) -> Plan:
    """Returns the plan with algorithms that fit into the bytes it leaves under ``limit``.

    Its iteration is never longer than with minimal workspaces, nor than with the plan's own variants if these fit. It
    needs at most ``limit`` bytes.

    Args:
        plan: a plan that fits the program; its decisions are not changed.
        engine: engine of the program, machine and limit; simulator calls are counted on it.
        refine: enables choice 5.

    Raises:
        PlanError: the plan does not fit the program or the host.
        Infeasible: the plan exceeds the limit even with minimal workspaces.
    """
    plan.check(program)
    engine = engine or Engine(program, machine, limit)
    rows = rows_of(plan.decisions)
    least = least_workspaces(program)
    try:
        engine.timeline(replace(plan, variants=least))
    except OutOfMemory as error:
        raise Infeasible(f"{plan.planner or 'the plan'}: with minimal workspaces, {error}") from None
    found: dict[Variants, int] = {}  # iteration time in ns of the feasible plans

    def iteration_ns(variants: Variants) -> int:
        if variants not in found:
            asked = engine.with_variants(variants)
            found[variants] = asked.score(rows).iteration_ns  # NEVER if infeasible
            engine.calls += asked.calls
        return found[variants]

    for chosen in (least, plan.variants):
        while iteration_ns(chosen) < NEVER:
            timeline = engine.timeline(replace(plan, variants=chosen))
            faster = _fastest(program, chosen, free_bytes(program, timeline))
            if faster == chosen:
                break
            chosen = faster
    best = min(found, key=iteration_ns)
    if refine:
        best = _refine(program, best, iteration_ns)
    return replace(plan, variants=best)


def free_bytes(program: Program, timeline: Timeline) -> dict[int, int]:
    """Returns, per kernel, the minimum free bytes under the limit during its executions in the last iteration.

    Recomputations are included, and the kernel's own workspace counts as in use. Kernels of zero duration get 0, since
    no variant is faster.
    """
    begin = timeline.last_start_ns
    times = [time for time, _ in timeline.memory]
    free: dict[int, int] = {}
    for span in timeline.spans:
        if span.stream == "compute" and span.start_ns >= begin:
            # At one instant (rule 9) a kernel's start comes last; copies end before it ends, and these events
            # only free memory.
            first = bisect_right(times, span.start_ns) - 1
            after = bisect_left(times, span.end_ns, first + 1)
            here = timeline.limit - max(used for _, used in timeline.memory[first:after])
            here = here if span.end_ns > span.start_ns else 0
            free[span.index] = min(free.get(span.index, here), here)
    return free


def _fastest(program: Program, chosen: Variants, free: dict[int, int]) -> Variants:
    """Returns, per kernel, the fastest algorithm that fits into the free bytes plus its current workspace."""
    now = dict(chosen)
    out = {}
    for k in _several(program):
        every = algorithms(program.kernels[k])
        room = free[k] + every[1 + now.get(k, -1)][1]
        out[k] = min((a for a in every if a[1] <= room), key=lambda a: (a[0], a[1], a[2]))[2]
    return _variants(out)


def _refine(program: Program, chosen: Variants, iteration_ns: Callable[[Variants], int]) -> Variants:
    """Makes one pass over the kernels that could be faster, largest time gain first (choice 5)."""
    best = {k: algorithms(program.kernels[k])[1 + dict(chosen).get(k, -1)] for k in _several(program)}
    gain = {k: now[0] - min(algorithms(program.kernels[k]))[0] for k, now in best.items()}
    for k in sorted(gain, key=lambda k: (-gain[k], k)):
        for faster in sorted(algorithms(program.kernels[k])):
            if faster[0] >= best[k][0]:
                break
            trial = _variants({j: a[2] for j, a in best.items()} | {k: faster[2]})
            if iteration_ns(trial) < iteration_ns(chosen):
                best[k], chosen = faster, trial
                break
    return chosen


def _several(program: Program) -> list[int]:
    return [k for k, kernel in enumerate(program.kernels) if kernel.variants]


def _variants(index: dict[int, int]) -> Variants:
    """Converts algorithm indices (-1: the default) to variants."""
    return tuple((k, i) for k, i in sorted(index.items()) if i >= 0)
