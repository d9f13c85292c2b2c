"""Figures and tables of the papers, one module each (see README.md), and their shared functions."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig

import agents
from experiments.common import cli
from experiments.common.bisection import bisect
from experiments.common.report import Row
from simulator import Plan, simulate
from simulator.machine import Machine
from simulator.pool import Intervals, Packing, run
from simulator.pool.intervals import overlap
from simulator.program import Program

WORKLOADS = cli.CONFIGS / "workload"


def networks(settings: DictConfig, allowed: Collection[str] = ()) -> list[str]:
    """Returns the shipped workloads in ``settings.networks``.

    Raises:
        UsageError: A workload is unknown, or not ``allowed``.
    """
    names = [network(str(name), "networks") for name in cli.values(settings, "networks")]
    for name in names:
        if allowed and name not in allowed:
            raise cli.UsageError(f"figure.networks: {name!r} is not in the table ({', '.join(allowed)})")
    return names


def numbers(
    settings: DictConfig, key: str, is_valid: Callable[[Any], bool], expected: str, types: Any = (int, float)
) -> list[Any]:
    """Returns the list of numbers ``settings.key``.

    Args:
        is_valid: Whether a value is valid.
        expected: Description of valid values for the error message.
        types: Accepted types; booleans are always rejected.

    Raises:
        UsageError: An entry has another type, or does not fit.
    """
    values = cli.values(settings, key)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, types) or not is_valid(value):
            raise cli.UsageError(f"figure.{key}: expected {expected}, got {value!r}")
    return values


def integers(settings: DictConfig, key: str, minimum: int) -> list[int]:
    """Returns the list ``settings.key`` of integers; raises UsageError if one is below ``minimum``."""
    return numbers(settings, key, lambda value: value >= minimum, f"integers of at least {minimum}", int)


def choices(settings: DictConfig, key: str, allowed: Collection[str], kind: str = "") -> list[str]:
    """Returns the names in the list ``settings.key``.

    Args:
        allowed: Valid names.
        kind: Kind of name for the error message, such as "network ".

    Raises:
        UsageError: A name is not ``allowed``; the message suggests the nearest.
    """
    names = [str(name) for name in cli.values(settings, key)]
    for name in names:
        if name not in allowed:
            raise cli.UsageError(f"figure.{key}: unknown {kind}{name!r}{cli.nearest(name, set(allowed))}")
    return names


def batch_sizes(settings: DictConfig, minimum: int) -> dict[str, int]:
    """Returns the batch sizes by workload; raises UsageError if one is no integer of at least ``minimum``."""
    batches: dict[str, int] = cli.to_dict(settings.batches)
    for name, batch in batches.items():
        network(name, "batches")
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < minimum:
            raise cli.UsageError(f"figure.batches.{name}: expected an integer of at least {minimum}, got {batch!r}")
    return batches


def share_of_peak(limit: Any, key: str = "limit") -> Any:
    """Returns the limit; raises UsageError unless it is above 0 and at most 1."""
    if not 0 < limit <= 1:
        raise cli.UsageError(f"figure.{key}: expected a share of the peak, got {limit!r}")
    return limit


def group_by(rows: Iterable[Row], key: str = "network") -> dict[Any, list[Row]]:
    """Groups rows by an entry, in the order in which its values appear."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups


@cache
def published(figure: str) -> Any:
    """Returns the paper's numbers of a figure, from the YAML file of its paper (the name's first word)."""
    paper = figure.partition("_")[0]
    return yaml.safe_load((Path(__file__).parent / f"{paper}.yaml").read_text())[figure]


def attempt(planner: agents.Planner, program: Program, machine: Machine, limit: int) -> Plan | None:
    """Returns a planner's plan, or None if it finds none."""
    try:
        return planner.plan(program, machine, limit)
    except agents.Infeasible:
        return None


def overhead(planner: agents.Planner, program: Program, machine: Machine, limit: int) -> float | None:
    """Returns the overhead of a planner's plan, or None if it finds none."""
    plan = attempt(planner, program, machine, limit)
    return None if plan is None else simulate(program, plan, machine, limit).overhead


def least_limit(planner: agents.Planner, program: Program, machine: Machine, tolerance: int) -> int:
    """Returns the smallest limit for which the planner finds a plan, to within ``tolerance`` bytes (bisection)."""
    has_plan = partial(attempt, planner, program, machine)
    return bisect(lambda limit: has_plan(limit) is not None, 0, program.peak_bytes, tolerance)[1]


def network(name: str, key: str) -> str:
    """Returns the name of a shipped workload; raises UsageError, naming the ``key``, if it is unknown."""
    names = {path.stem for path in WORKLOADS.glob("*.yaml") if "batch_size" in workload(path.stem)}
    if name not in names:
        raise cli.UsageError(f"figure.{key}: unknown workload {name!r}{cli.nearest(name, names)}")
    return name


def workload(name: str) -> dict[str, Any]:
    """Returns the configuration of a workload."""
    return yaml.safe_load((WORKLOADS / f"{name}.yaml").read_text())


def program(name: str, machine: Machine, **changes: Any) -> Program:
    """Returns a workload's program with changed configuration keys; raises WorkloadError for an invalid key."""
    from experiments import workloads  # only captures need PyTorch

    return workloads.load({**workload(name), **changes}, machine).program


def evaluate(program: Program, machine: Machine, limit: int, name: str, **options: Any) -> dict[str, Any]:
    """Runs a planner and simulates its plan.

    Args:
        program: Program to plan.
        machine: Machine to plan for.
        limit: Memory limit in bytes.
        name: Name of the planner.
        options: Options of ``agents.make``.

    Returns:
        Overhead in per cent (None without a plan), planning time in s, and simulator calls.

    Raises:
        ValueError: As for ``agents.make``.
    """
    planner = agents.make(name, **options)
    begin = time.perf_counter()
    plan = attempt(planner, program, machine, limit)
    seconds = round(time.perf_counter() - begin, 3)
    overhead_percent = None if plan is None else round(100 * simulate(program, plan, machine, limit).overhead, 4)
    return {"overhead_percent": overhead_percent, "plan_s": seconds, "simulator_calls": planner.simulator_calls}


@cache
def _labels() -> dict[str, str]:
    return yaml.safe_load((Path(__file__).parent / "labels.yaml").read_text())


def label(name: str) -> str:
    """Returns the display name of a network or a GPU."""
    return _labels().get(name) or name.replace("resnet", "ResNet").replace("vgg", "VGG")


def measured_ms(config: Mapping[str, Any], machine: Machine) -> float | None:
    """Returns a workload's measured iteration time on a machine, or None."""
    times: Mapping[str, float] = config.get("iteration_ms") or {}
    return times.get(machine.name)


def checked_packing(name: str, intervals: Intervals, alignment: int = 1, seconds: float = 5.0) -> Packing:
    """Returns an allocator's packing, checked for overlaps.

    Args:
        name: Allocator of simulator.pool.
        intervals: Blocks to pack.
        alignment: Alignment of addresses in bytes.
        seconds: Time limit of the search.

    Raises:
        AssertionError: Two blocks share a byte at some time.
    """
    blocks, packing = run(name, intervals, alignment, seconds)
    if pair := overlap(blocks, packing.offsets):
        raise AssertionError(f"{name}: blocks {pair[0]} and {pair[1]} share a byte; correct this allocator")
    return packing
