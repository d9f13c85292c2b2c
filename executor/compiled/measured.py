"""Durations of Inductor's kernels from a profiled step, in which each kernel is found by its name.

Inductor's provenance tracking names the kernels that generated code calls, and the graph nodes that each computes. The
nodes of a planned graph know their kernel of the Program. The profiler records the same names: Triton's and C++
kernels' own, and those of operators. On a GPU the duration is the device's.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import fx

from executor.capture.profile import Profile, ProfileError, shape_of, with_profile
from executor.compiled.launches import KERNEL, STEP
from simulator.program import Program

# Inductor's options that make kernels known by name, in the profiler and to ``calls_of``.
NAMED = {"cpp.enable_kernel_profile": True, "trace.provenance_tracking_level": 1, "fx_graph_cache": False}
RANGE = re.compile(r"## Call CompiledFxGraph (.*) ##")  # the profiler's range of a graph's kernels
OTHERWISE = "compile without profile= to plan with the roofline"
_LABELS = itertools.count()


class KernelCall(NamedTuple):
    """A kernel that generated code calls.

    Attributes:
        name: Name of its events in the profiler.
        kernels: Kernels of the Program that it executes, each with the plan's step.
    """

    name: str
    kernels: tuple[tuple[int, int], ...]


class CompiledGraph(NamedTuple):
    """Code that Inductor generated for the forward or backward of a graph, by the ``label`` of its range."""

    label: str
    calls: tuple[KernelCall, ...]


class Run(NamedTuple):
    """One execution of generated code in a profiled step: kernels by name, with their durations in ns."""

    label: str
    events: tuple[tuple[str, int], ...]


def calls_of(gm: fx.GraphModule, run: Any) -> CompiledGraph:
    """Returns the kernel calls of a graph that Inductor has just compiled with the options ``NAMED``.

    Args:
        gm: The graph after Inductor's passes.
        run: Inductor's result, whose range in the profiler gets a label of its own.

    Returns:
        The calls in order.
    """
    from torch._inductor import debug

    run._fx_graph_cache_key = label = f"headroom {next(_LABELS)}"
    known = {
        node.name: (node.meta[STEP], node.meta[KERNEL]) for node in gm.graph.nodes if {STEP, KERNEL} <= node.meta.keys()
    }
    calls = debug._inductor_triton_kernel_to_post_grad_node_info
    return CompiledGraph(
        label,
        tuple(
            KernelCall(_event_name(name.rpartition(":")[0]), tuple(sorted({known[x] for x in nodes if x in known})))
            for name, nodes in calls.items()
        ),
    )


def profiled(step: Callable[[], object], device: str) -> list[Run]:
    """Executes a step under the profiler and returns the runs of generated code in it."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device != "cpu":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        if device != "cpu":
            torch.cuda.synchronize()
    runs = []
    for event in profiler.events() or ():
        if found := RANGE.fullmatch(event.name):
            children = sorted(event.cpu_children, key=lambda child: child.time_range.start)
            times = ((x.name, x.cpu_time_total if device == "cpu" else x.device_time_total) for x in children)
            names = ((re.sub(r"^graph_\d+_", "", name), round(us * 1000)) for name, us in times)
            runs.append(Run(found[1], tuple(names)))
    return runs


def measured(
    name: str, program: Program, graphs: Iterable[CompiledGraph], runs: Sequence[Run], machine: str, device: str
) -> Profile:
    """Returns a Program's measured durations; kernels that no call executes keep theirs.

    Of several runs of the code the median counts. A call that executes several kernels is shared among them in
    proportion to their previous durations. A kernel that is recomputed gets the mean of its executions.

    Args:
        name: Name of the graph, for errors.
        program: The Program.
        graphs: Generated code of its forward and backward.
        runs: Runs of generated code in the step, also of other graphs.
        machine, device: As in ``Profile``.

    Returns:
        The profile, whose ``step_ns`` is the duration of all calls.

    Raises:
        ProfileError: If a call has no event of its name, or the step did not execute the code.
    """
    executions: defaultdict[int, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    total = 0.0
    for graph in graphs:
        for call, ns in zip(graph.calls, _durations(name, graph, runs), strict=True):
            total += ns
            weights = [max(1, program.kernels[k].duration_ns) for _, k in call.kernels]
            for (step, k), weight in zip(call.kernels, weights, strict=True):
                executions[k][step] += ns * weight / sum(weights)
    if not total:
        raise ProfileError(f"graph {name}: the profiler recorded no time in its kernels; {OTHERWISE}")
    durations = [kernel.duration_ns for kernel in program.kernels]
    for k, times in executions.items():
        durations[k] = round(sum(times.values()) / len(times))
    return Profile(
        program.name,
        shape_of(program).fingerprint,
        machine,
        device,
        str(torch.__version__),
        tuple(durations),
        cache="step",
        step_ns=round(total),
    )


def _durations(name: str, graph: CompiledGraph, runs: Sequence[Run]) -> list[float]:
    """Returns the duration of each call in ns, the median over runs; raises ProfileError."""
    found = [run.events for run in runs if run.label == graph.label]
    if not found:
        raise ProfileError(
            f"graph {name}: the profiled step executed no kernel of its forward or backward; pass a function that "
            "executes one training step of the compiled model"
        )
    expected = Counter(call.name for call in graph.calls)
    in_order = {}
    for kernel, count in expected.items():
        times = [[ns for event, ns in events if event == kernel] for events in found]
        odd = [len(x) for x in times if len(x) != count]
        if odd:
            raise ProfileError(
                f"graph {name}: its code calls {kernel} {count} times, and the profiler recorded {odd[0]}; "
                f"compile without CUDA graphs and C++ wrappers, or {OTHERWISE}"
            )
        in_order[kernel] = map(median, zip(*times, strict=True))
    return [next(in_order[call.name]) for call in graph.calls]


def with_measured(program: Program, profiles: Iterable[Profile]) -> Program | None:
    """Returns the Program with the durations of its profile, or None if no profile is of this Program."""
    for profile in profiles:
        named = replace(program, name=profile.program)  # the name counts compilations
        if shape_of(named).fingerprint == profile.fingerprint:
            return replace(with_profile(named, profile), name=program.name)
    return None


def _event_name(kernel: str) -> str:
    """Returns the profiler's name of a kernel of generated code: "aten::mm" for "extern_kernels.mm"."""
    if kernel.startswith("extern_kernels."):
        return f"aten::{kernel.removeprefix('extern_kernels.')}"
    parts = kernel.removeprefix("torch.ops.").split(".")
    return "::".join(parts[:2]) if len(parts) > 1 else kernel
