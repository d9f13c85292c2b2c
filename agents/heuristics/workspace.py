"""The dynamic convolution workspace of "Superneurons: Dynamic GPU Memory Management for Training Deep Neural Networks"
(PPoPP 2018), section 3.5, for the plans of every planner.

A kernel with several algorithms (``Kernel.variants``, and its own duration and workspace) may trade bytes for time.
Section 3.5: tensors come first, since workspaces do not affect what is computed; then at every step the bytes left are
profiled, algorithms that need more are skipped, and the fastest of the others is taken. Read on in
``plan_with_variants``. Choices and deviations: README.md, by their numbers.
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
    """(duration_ns, workspace, index) of every algorithm of a kernel, its own (index -1) first."""
    return [(kernel.duration_ns, kernel.workspace, -1), *((d, w, i) for i, (d, w) in enumerate(kernel.variants))]


def least_workspaces(program: Program) -> Variants:
    """Every kernel with its least workspace."""
    least = {
        k: min(algorithms(kernel), key=lambda a: (a[1], a[0], a[2]))[2] for k, kernel in enumerate(program.kernels)
    }
    return _variants(least)


def relaxed(program: Program) -> Program:
    """Every kernel as fast as its fastest algorithm, in its least workspace: no choice of variants is better."""
    every = [algorithms(kernel) for kernel in program.kernels]
    kernels = (
        replace(kernel, duration_ns=min(d for d, _, _ in a), workspace=min(w for _, w, _ in a))
        for kernel, a in zip(program.kernels, every, strict=True)
    )
    return Program(program.name, program.tensors, tuple(kernels))


def plan_with_variants(
    planner: Planner, program: Program, machine: Machine, limit: int, fill: bool = True, own: bool = True
) -> Plan:
    """A plan of ``planner`` made with the least workspaces, its variants then as fast as memory allows.

    Args:
        fill: False: the least workspaces remain.
        own: also plan with the kernels' own algorithms (choice 8), where workspaces are filled.

    Raises:
        Infeasible: the planner has no plan.
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
    """The plan with algorithms that fit the bytes it leaves under ``limit``.

    Its iteration is never longer than with the least workspaces, nor than with the plan's own variants where these
    fit; it needs at most ``limit`` bytes.

    Args:
        plan: fits the program; its decisions stay.
        engine: of the program, machine and limit, to be charged with the simulator calls.
        refine: choice 5.

    Raises:
        PlanError: the plan does not fit the program or the host.
        Infeasible: it is over the limit with the least workspaces.
    """
    plan.check(program)
    engine = engine or Engine(program, machine, limit)
    rows = rows_of(plan.decisions)
    least = least_workspaces(program)
    try:
        engine.timeline(replace(plan, variants=least))
    except OutOfMemory as error:
        raise Infeasible(f"{plan.planner or 'the plan'}: with the least workspaces, {error}") from None
    found: dict[Variants, int] = {}  # iteration time in ns of all that fits

    def iteration_ns(variants: Variants) -> int:
        if variants not in found:
            asked = engine.with_variants(variants)
            found[variants] = asked.score(rows).iteration_ns  # NEVER where infeasible
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
    """Per kernel, the fewest bytes left under the limit while it runs or runs again in the last iteration.

    Its own workspace counts as in use. For a kernel that takes no time they are 0: nothing is faster.
    """
    begin = timeline.last_start_ns
    times = [time for time, _ in timeline.memory]
    free: dict[int, int] = {}
    for span in timeline.spans:
        if span.stream == "compute" and span.start_ns >= begin:
            # At one instant (rule 9) a kernel's start is the last change; copies end before its end, and what ends
            # only frees memory.
            first = bisect_right(times, span.start_ns) - 1
            after = bisect_left(times, span.end_ns, first + 1)
            here = timeline.limit - max(used for _, used in timeline.memory[first:after])
            here = here if span.end_ns > span.start_ns else 0
            free[span.index] = min(free.get(span.index, here), here)
    return free


def _fastest(program: Program, chosen: Variants, free: dict[int, int]) -> Variants:
    """Per kernel, the fastest algorithm that fits the bytes left and those of its present workspace."""
    now = dict(chosen)
    out = {}
    for k in _several(program):
        every = algorithms(program.kernels[k])
        room = free[k] + every[1 + now.get(k, -1)][1]
        out[k] = min((a for a in every if a[1] <= room), key=lambda a: (a[0], a[1], a[2]))[2]
    return _variants(out)


def _refine(program: Program, chosen: Variants, iteration_ns: Callable[[Variants], int]) -> Variants:
    """Choice 5: one pass over the kernels that could be faster, most time to gain first."""
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
    """From the index of every kernel's algorithm, -1 for its own."""
    return tuple((k, i) for k, i in sorted(index.items()) if i >= 0)
