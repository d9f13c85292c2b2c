"""The slowest kernels of a step: their time, their rate, the type they compute in, and what bounds them."""

from __future__ import annotations

from experiments.plan.capture import Step
from simulator.machine import Machine
from simulator.program import Kernel
from simulator.report import ITSELF

ROWS = 12  # of the table
HEADS = ["slowest kernels", "where", "time", "of the step", "rate", "type", "bound by"]


def slowest(step: Step, machine: Machine) -> tuple[list[str], list[list[str]]]:
    """Heads and rows of the table, kernels of equal operator, work and time in one row."""
    program, origins, types = step.program, step.origins, step.types
    groups: dict[tuple[object, ...], list[int]] = {}
    for k, kernel in enumerate(program.kernels):
        kind = types[k] if types else ""
        groups.setdefault((kernel.name, kernel.duration_ns, kernel.flops, kernel.bytes, kind), []).append(k)
    order = sorted(groups.values(), key=lambda group: -len(group) * program.kernels[group[0]].duration_ns)
    rows = []
    for group in order[:ROWS]:
        kernel, kind = program.kernels[group[0]], types[group[0]] if types else ""
        ns = len(group) * kernel.duration_ns
        time = f"{ns / 1e6:,.2f} ms" if ns >= 1e5 else f"{ns / 1e3:.1f} us"
        if not ns:
            break
        places = [] if origins is None else list(dict.fromkeys(origins.places[k].module or ITSELF for k in group))
        where = "–" if not places else places[0] + (f" and {len(places) - 1} more" if len(places) > 1 else "")
        name = kernel.name.removeprefix("aten.").removesuffix(".default")
        rate, bound = _bound(kernel, machine, kind)
        rows.append([
            f"{len(group)} × {name}" if len(group) > 1 else name, where, time,
            f"{ns / max(program.ideal_ns, 1):.1%}", rate, kind or "–", bound,
        ])  # fmt: skip
    return HEADS, rows


def _bound(kernel: Kernel, machine: Machine, kind: str) -> tuple[str, str]:
    """The rate of what takes longest at the machine's peaks, and its name."""
    peak = machine.flops_per_s.get(kind or "float32", 0)
    seconds, moving = kernel.duration_ns / 1e9, kernel.bytes / machine.memory_bytes_per_s
    computing = kernel.flops / peak if peak else 0.0
    if computing >= moving and computing:
        return f"{kernel.flops / seconds / 1e12:,.1f} TFLOP/s", "arithmetic"
    launch = machine.launch_ns if machine.kernel_times is None else machine.kernel_times.launch_ns
    rate = f"{kernel.bytes / seconds / 1e9:,.0f} GB/s"
    return rate, "memory" if moving >= launch / 1e9 else "the launch"
