"""Dynamic convolution workspaces of SuperNeurons (PPoPP 2018, section 3.5), for the plans of every planner.

A kernel with several algorithms (``Kernel.variants``, and its own duration and workspace) can trade bytes for time.
Section 3.5: tensors have priority, since workspaces do not affect results; then, at every step, the free bytes are
profiled, algorithms that need more are skipped, and the fastest of the others is selected. Entry point:
``plan_with_variants``. Numbered choices and deviations: workspace.md.

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
Algorithm = tuple[int, int, int]  # duration_ns, workspace, index (-1: the kernel's own)


def algorithms(kernel: Kernel) -> list[Algorithm]:
    """Returns every algorithm of a kernel, its own first."""
    return [(kernel.duration_ns, kernel.workspace, -1), *((d, w, i) for i, (d, w) in enumerate(kernel.variants))]


def least_workspaces(program: Program) -> Variants:
    """Returns the variants with the smallest workspace of every kernel."""
    kernels = enumerate(program.kernels)
    return _variants({k: min(algorithms(kernel), key=lambda a: (a[1], a[0], a[2])) for k, kernel in kernels})


def relaxed(program: Program) -> Program:
    """Returns the program with each kernel's shortest duration and smallest workspace, which no variants beat."""
    kernels = []
    for kernel in program.kernels:
        durations, workspaces, _ = zip(*algorithms(kernel), strict=True)
        kernels.append(replace(kernel, duration_ns=min(durations), workspace=min(workspaces)))
    return Program(program.name, program.tensors, tuple(kernels))


def plan_with_variants(
    planner: Planner, program: Program, machine: Machine, limit: int, fill: bool = True, include_default: bool = True
) -> Plan:
    """Plans with minimal workspaces, then selects variants that are as fast as memory allows.

    Args:
        fill: False: keep the minimal workspaces.
        include_default: if workspaces are filled, also plan with the kernels' default algorithms (choice 8).
        planner: makes the plan of evictions.
        program, machine, limit: the task; the limit is in bytes.

    Returns:
        The plan with its variants.

    Raises:
        Infeasible: the planner finds no plan.
    """
    engine = Engine(program, machine, limit)
    min_variants = least_workspaces(program)
    timed: list[tuple[int, Plan]] = []
    calls = 0
    reasons = []
    for variants in dict.fromkeys((min_variants, ()) if fill and include_default else (min_variants,)):
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
        variant_engine = Engine(program, machine, plan.limit).with_variants(plan.variants)
        timed.append((variant_engine.score(rows_of(plan.decisions)).iteration_ns, plan))
        calls += variant_engine.calls
    planner.simulator_calls = calls + engine.calls
    if not timed:
        raise reasons[0]
    return min(timed, key=lambda entry: entry[0])[1]


def with_fastest_variants(
    program: Program, plan: Plan, machine: Machine, limit: int, engine: Engine | None = None
) -> Plan:
    """Returns the plan with algorithms that fit into the bytes it leaves under ``limit``.

    Its iteration is never longer than with minimal workspaces, nor than with the plan's own variants if these fit. It
    needs at most ``limit`` bytes.

    Args:
        plan: a plan that fits the program; its decisions are not changed.
        engine: engine of the program, machine and limit; simulator calls are counted on it.

    Raises:
        PlanError: the plan does not fit the program or the host.
        Infeasible: the plan exceeds the limit even with minimal workspaces.
    """
    plan.check(program)
    engine = engine or Engine(program, machine, limit)
    rows = rows_of(plan.decisions)
    min_variants = least_workspaces(program)
    try:
        engine.timeline(replace(plan, variants=min_variants))
    except OutOfMemory as error:
        raise Infeasible(f"{plan.planner or 'the plan'}: with minimal workspaces, {error}") from None
    times: dict[Variants, int] = {}  # iteration time in ns of the feasible plans

    def iteration_ns(variants: Variants) -> int:
        if variants not in times:
            variant_engine = engine.with_variants(variants)
            times[variants] = variant_engine.score(rows).iteration_ns  # NEVER if infeasible
            engine.calls += variant_engine.calls
        return times[variants]

    for variants in (min_variants, plan.variants):
        while iteration_ns(variants) < NEVER:
            timeline = engine.timeline(replace(plan, variants=variants))
            faster = _fastest(program, variants, free_bytes(program, timeline))
            if faster == variants:
                break
            variants = faster
    return replace(plan, variants=_refine(program, min(times, key=iteration_ns), iteration_ns))


def free_bytes(program: Program, timeline: Timeline) -> dict[int, int]:
    """Returns, per kernel, the minimum free bytes under the limit during its executions in the last iteration.

    Recomputations are included, and the kernel's own workspace counts as in use. Kernels of zero duration get 0, since
    no variant is faster.
    """
    times = [time for time, _ in timeline.memory]
    free: dict[int, int] = {}
    for span in timeline.spans:
        if span.stream == "compute" and span.start_ns >= timeline.last_start_ns:
            # At one instant (rule 9) a kernel's start comes last; copies end before it ends, and these events
            # only free memory.
            begin = bisect_right(times, span.start_ns) - 1
            end = bisect_left(times, span.end_ns, begin + 1)
            available = timeline.limit - max(used for _, used in timeline.memory[begin:end])
            available = available if span.end_ns > span.start_ns else 0
            free[span.index] = min(free.get(span.index, available), available)
    return free


def _current(program: Program, variants: Variants) -> dict[int, Algorithm]:
    """Returns the algorithm that each kernel with several uses."""
    index = dict(variants)
    kernels = ((k, kernel) for k, kernel in enumerate(program.kernels) if kernel.variants)
    return {k: algorithms(kernel)[1 + index.get(k, -1)] for k, kernel in kernels}


def _fastest(program: Program, variants: Variants, free: dict[int, int]) -> Variants:
    """Returns, per kernel, the fastest algorithm that fits into the free bytes plus its current workspace."""
    current = _current(program, variants)
    options = {k: [a for a in algorithms(program.kernels[k]) if a[1] <= free[k] + current[k][1]] for k in current}
    return _variants({k: min(fitting) for k, fitting in options.items()})


def _refine(program: Program, variants: Variants, iteration_ns: Callable[[Variants], int]) -> Variants:
    """Makes one pass over the kernels that could be faster, largest time gain first (choice 5)."""
    best = _current(program, variants)
    gain = {k: algorithm[0] - min(algorithms(program.kernels[k]))[0] for k, algorithm in best.items()}
    for k in sorted(gain, key=lambda k: (-gain[k], k)):
        for faster in sorted(algorithms(program.kernels[k])):
            if faster[0] >= best[k][0]:
                break
            trial = _variants(best | {k: faster})
            if iteration_ns(trial) < iteration_ns(variants):
                best[k] = faster
                variants = trial
                break
    return variants


def _variants(algorithms: dict[int, Algorithm]) -> Variants:
    return tuple((k, i) for k, (_, _, i) in sorted(algorithms.items()) if i >= 0)
