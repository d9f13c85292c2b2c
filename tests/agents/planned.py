"""Plans and kernels of the planner tests, whose programs have tensors of a few bytes."""

from __future__ import annotations

import agents
from simulator import Kernel, Machine, Plan, Program
from simulator.program import KernelKind, Phase


def planned(name: str, program: Program, machine: Machine, limit: int, **options: object) -> Plan:
    """Returns the plan of a planner that may evict tensors of any size."""
    return agents.make(name, min_bytes=1, **options).plan(program, machine, limit)


def layers(phase: Phase, duration_ns: int, *rows: tuple[str, KernelKind, tuple, tuple]) -> tuple[Kernel, ...]:
    """Returns kernels of one phase and duration from (name, kind, inputs, outputs) rows."""
    return tuple(Kernel(name, kind, phase, *accesses, duration_ns) for name, kind, *accesses in rows)
