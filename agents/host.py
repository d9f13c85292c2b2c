"""Checks whether host memory makes a limit infeasible, because planners report only the GPU's limit."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from agents.planner import Infeasible, small
from simulator.compiled.encoding import rows_of
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.program import Program


class _IdentityKey:
    """Cache key of a program or a machine, which are not hashable."""

    def __init__(self, value: Any):
        self.value = value

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _IdentityKey) and self.value is other.value


def host_needed(program: Program, machine: Machine, limit: int, mode: str = "joint") -> int | None:
    """Returns the host memory (bytes) that a quick planner's plan needs, if the machine has less.

    Returns None if the machine's host memory is sufficient or if the quick planners find no plan.

    Args:
        program: Program to plan.
        machine: Machine to plan for.
        limit: Memory limit in bytes.
        mode: Mode of the plan.
    """
    evictable = {gap.tensor for gap in program.gaps()}
    if sum(program.tensors[t].nbytes for t in evictable) <= machine.host_bytes:
        return None
    required = _required_bytes(_IdentityKey(program), _IdentityKey(machine), limit, mode)
    return required if required > machine.host_bytes else None


@lru_cache(16)
def _required_bytes(program: _IdentityKey, machine: _IdentityKey, limit: int, mode: str) -> int:
    """Returns the smallest host memory (bytes) used by the plans of two quick planners; 0 if neither finds one."""
    import agents

    unlimited = replace(machine.value, host_bytes=2**50)  # more than any host has
    host_bytes = []
    for name in ("tensile", "autoswap_swdoa"):
        values = {"mode": mode, "min_bytes": small(program.value)}
        planner = agents.make(name, **{key: values[key] for key in values.keys() & set(agents.options(name))})
        try:
            plan = planner.plan(program.value, unlimited, limit)
        except Infeasible:
            continue
        host_bytes.append(Engine(program.value, unlimited, limit).on_host(rows_of(plan.decisions)))
    return min(host_bytes, default=0)
