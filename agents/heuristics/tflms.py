"""TFLMS: "TFLMS: Large Model Support in TensorFlow by Graph Rewriting" (Le, Imai, Negishi, Kawachiya; 2018).

The graph is rewritten: an edge from a forward to a backward operation becomes a swap-out and a swap-in, for the first
``n_tensors`` tensors from the input on. A control dependency triggers the swap-in: an operation at least
``lower_bound`` (the paper's lb) operations before the consumer, so that they overlap the transfer. Both numbers are the
user's to tune. Written without the text of the paper, from the abstract and the documented options of the module
(n_tensors, lb, ub, ctrld_strategy, fuse_swapins, swap_branches). Read on in ``TFLMS.plan``. Choices and deviations:
README.md, by their numbers.
"""

from __future__ import annotations

import numpy as np

from agents.heuristics.autoswap import select
from agents.heuristics.layers import feature_maps
from agents.planner import MIB, Candidates, PlannerInfo, Rows, finish, infeasible
from simulator.compiled.encoding import AFTER, BEFORE, EXTRA, rows_for
from simulator.compiled.engine import Engine
from simulator.files import no_collections
from simulator.machine import Machine
from simulator.modes import SWAPPED
from simulator.plan import Plan
from simulator.program import Gap, Program


class TFLMS:
    """TFLMS with its two numbers tuned to the limit where they are not given.

    Args:
        n_tensors: tensors that are swapped, counted from the input; None: as few as fit.
        lower_bound: kernels between the trigger of a swap-in and its consumer; None: the fastest.
        min_bytes: tensors below this size stay and are not counted.
        seed: unused; nothing is drawn.
    """

    facts = PlannerInfo(
        "tflms", "TFLMS", '"TFLMS: Large Model Support in TensorFlow by Graph Rewriting", 2018',
        family="swap: other heuristics", slot=4, place=140, moves="swap",
    )  # fmt: skip
    name = facts.key

    def __init__(
        self, n_tensors: int | None = None, lower_bound: int | None = None, min_bytes: int = MIB, seed: int = 0
    ) -> None:
        if n_tensors is not None and n_tensors < 0:
            raise ValueError(f"n_tensors: expected at least 0, got {n_tensors}")
        if lower_bound is not None and lower_bound < 1:
            raise ValueError(f"lower_bound: expected at least 1, got {lower_bound}")
        self.n_tensors, self.lower_bound, self.min_bytes = n_tensors, lower_bound, min_bytes
        self.simulator_calls = 0

    @no_collections()
    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """The rewritten graph; raises Infeasible when the swapped tensors do not make enough room."""
        gaps = [f.gap for f in feature_maps(program, self.min_bytes)]
        n = least_tensors(program, gaps, limit) if self.n_tensors is None else min(self.n_tensors, len(gaps))
        if n is None:
            raise infeasible(self, program, limit, Candidates(program, gaps).least)
        engine = Engine(program, machine, limit)
        farthest = max((g.before - g.after for g in gaps[:n]), default=1)
        bounds = [2**i for i in range(farthest.bit_length())] if self.lower_bound is None else [self.lower_bound]
        grid = [rewrite(program, gaps[:n], bound) for bound in bounds]
        best = min(grid, key=lambda rows: engine.score(rows).iteration_ns) if len(grid) > 1 else grid[0]
        return finish(self, program, machine, limit, engine, best)


def least_tensors(program: Program, gaps: list[Gap], limit: int) -> int | None:
    """How many of ``gaps``, in their order, must be emptied for the planned residency to fit; None: all are too few."""
    chosen = select(Candidates(program, gaps), iter(range(len(gaps))), limit)
    return None if chosen is None else len(chosen)


def rewrite(program: Program, gaps: list[Gap], lower_bound: int) -> Rows:
    """int64[n, 6]: swaps of ``gaps``, each swap-in triggered ``lower_bound`` kernels before its consumer (choice 4)."""
    turn = next((k for k, kernel in enumerate(program.kernels) if kernel.phase != "forward"), 0)
    rows = rows_for(gaps, SWAPPED)
    after, before = rows[:, AFTER], rows[:, BEFORE]
    rows[:, EXTRA] = np.maximum(after, np.minimum(np.maximum(before - lower_bound, turn), before - 1))
    return rows
