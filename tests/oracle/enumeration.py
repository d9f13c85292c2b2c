"""Exhaustive enumeration of the plans of tiny programs: oracle for the floor and the searches.

The simulator scores every plan. A search may beat ``shortest_ns``, because early copies, prefetches and early
recomputation are not enumerated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from agents.planner import Rows, eviction_rows
from simulator import Engine, Machine, Plan, PlanError, Program, Rerun
from simulator.schedule import lower


def plans(program: Program, mode: str) -> Iterator[Rows]:
    """Yields every combination of emptied gaps, each by swap, recompute, or recompute with ``keep``."""
    for rows in itertools.product(*([None, *eviction_rows(program, gap, mode)] for gap in program.gaps(1))):
        yield np.array([row for row in rows if row], np.int64).reshape(-1, 6)


def count(program: Program, mode: str) -> int:
    """Returns the number of plans that ``plans`` yields."""
    return math.prod(1 + len(eviction_rows(program, gap, mode)) for gap in program.gaps(1))


def shortest_ns(program: Program, machine: Machine, limit: int, mode: str = "joint") -> float:
    """Returns the shortest iteration of ``plans`` within ``limit`` bytes; inf if none fits."""
    engine = Engine(program, machine, limit)
    scores = map(engine.score, plans(program, mode))
    return min((score.iteration_ns for score in scores if score.feasible), default=math.inf)


def rerun_plans(program: Program, pairs: Sequence[Rerun], most: int) -> Iterator[tuple[int, int]]:
    """Yields iteration time and required bytes of every valid plan of at most ``most`` of ``pairs``."""
    for chosen in itertools.chain.from_iterable(itertools.combinations(pairs, size) for size in range(most + 1)):
        try:
            required = lower(program, Plan(chosen)).required_bytes
        except PlanError:
            continue
        yield program.ideal_ns + sum(program.kernels[pair.kernel].duration_ns for pair in chosen), required
