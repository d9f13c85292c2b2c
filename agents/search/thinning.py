"""Start plans in milliseconds: every gap is emptied, then gaps that the limit does not need are filled again.

A gap is emptied by its cheaper eviction kind. How much cheaper recomputation must be than copies, and the order in
which gaps are filled, differ from plan to plan; the fastest plan that fits is the start of a search.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agents.planner import Rows
from simulator.compiled.encoding import AFTER, BEFORE, NEVER, TENSOR, row_of
from simulator.compiled.engine import Engine
from simulator.modes import Choice, evictions, spans
from simulator.residency import recompute_ns


@dataclass(frozen=True)
class ThinningOptions:
    """Variants of the plans, the most promising ones first."""

    # A gap is recomputed if that takes less than this fraction of the time of its copies; 0: swaps only.
    recompute_below: tuple[float, ...] = (0.1, 1.0, 0.0, 0.5)


OPTIONS = ThinningOptions()


def thinned(engine: Engine, mode: str, min_bytes: int, deadline: float | None = None) -> tuple[Rows | None, int]:
    """Returns rows and iteration time in ns of the fastest plan of ``thinned_plans`` that fits, or None and NEVER.

    Args:
        deadline: time.monotonic() from which no further plan is tried once one fits; None: all are tried.
        engine: the simulator.
        mode: swap, recompute or joint.
        min_bytes: size below which tensors stay resident.
    """
    best = None
    best_ns = NEVER
    for rows in thinned_plans(engine, mode, min_bytes):
        ns = engine.score(rows).iteration_ns
        if ns < best_ns:
            best = rows
            best_ns = ns
        if best is not None and deadline is not None and time.monotonic() > deadline:
            break
    return best, best_ns


def thinned_plans(engine: Engine, mode: str, min_bytes: int) -> Iterator[Rows]:
    """Yields int64[k, 6], plans of ``mode`` whose planned residency fits the limit if the mode allows that at all."""
    program = engine.program
    machine = engine.machine
    allowed = [(gap, evictions(program, gap, mode)) for gap in program.gaps(min_bytes)]
    gaps = [gap for gap, choices in allowed if choices]
    choices = [choices for _, choices in allowed if choices]
    nbytes = [program.tensors[gap.tensor].nbytes for gap in gaps]
    span_ns = np.array([program.gap_ns(gap) for gap in gaps], np.float64)
    byte_ns = span_ns * nbytes
    copy_ns = np.array([machine.d2h_ns(size) + machine.h2d_ns(size) for size in nbytes], np.float64)
    rerun_ns = np.array(
        [
            recompute_ns(program, gap) if Choice.CHAIN_KEPT in kinds else np.inf
            for gap, kinds in zip(gaps, choices, strict=True)
        ]
    )
    can_swap = np.array([Choice.SWAPPED in kinds for kinds in choices], np.bool_)
    recomputed_before: NDArray[np.bool_] | None = None
    for fraction in OPTIONS.recompute_below:
        is_recomputed = (rerun_ns < fraction * copy_ns) | ~can_swap
        if recomputed_before is not None and (is_recomputed == recomputed_before).all():
            continue
        recomputed_before = is_recomputed
        kinds = np.where(is_recomputed, Choice.CHAIN_KEPT, Choice.SWAPPED).tolist()
        rows = np.array([row_of(gap, kind) for gap, kind in zip(gaps, kinds, strict=True)], np.int64).reshape(-1, 6)
        cost_ns = np.where(is_recomputed, rerun_ns, copy_ns) + 1
        for value in (byte_ns / cost_ns, span_ns, byte_ns):
            yield pruned(engine, rows[np.argsort(value, kind="stable")])


def pruned(engine: Engine, rows: Rows) -> Rows:
    """Returns ``rows`` without decisions that the limit does not need, tried in order."""
    program = engine.program
    limit = engine.limit
    load = np.array(program.live_bytes, np.int64)
    nbytes = [program.tensors[t].nbytes for t in rows[:, TENSOR].tolist()]
    opened = [spans(after, before, len(load)) for after, before in rows[:, [AFTER, BEFORE]].tolist()]
    for gap_spans, size in zip(opened, nbytes, strict=True):
        for span in gap_spans:
            load[span] -= size
    is_needed = np.ones(len(rows), dtype=bool)
    for i, (gap_spans, size) in enumerate(zip(opened, nbytes, strict=True)):
        if all((load[span] <= limit - size).all() for span in gap_spans):
            is_needed[i] = False
            for span in gap_spans:
                load[span] += size
    return rows[is_needed]
