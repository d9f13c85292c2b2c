"""TFLMS: "TFLMS: Large Model Support in TensorFlow by Graph Rewriting" (Le, Imai, Negishi, Kawachiya; 2018).

The graph is rewritten: an edge from a forward to a backward operation becomes a swap-out and a swap-in, for the first
``n_tensors`` tensors from the input on. A control dependency triggers the swap-in from an operation at least
``lower_bound`` (the paper's lb) operations before the consumer, so that these overlap the transfer. The user tunes
both numbers. Implemented without access to the paper's text, from the abstract and the documented options of the
module (n_tensors, lb, ub, ctrld_strategy, fuse_swapins, swap_branches). Entry point: ``TFLMS.choose``. Numbered
choices and deviations: tflms.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agents.heuristics.layers import feature_maps
from agents.planner import PlannerInfo, Rows, RowsPlanner, at_least
from simulator.compiled.encoding import AFTER, BEFORE, EXTRA, rows_for
from simulator.compiled.engine import Engine
from simulator.files import no_collections
from simulator.modes import Choice
from simulator.program import Gap, Program


@dataclass(eq=False)
class TFLMS(RowsPlanner):
    """TFLMS; its two parameters are tuned to the limit unless given.

    Args:
        n_tensors: number of swapped tensors, counted from the input; None: as few as fit.
        lower_bound: kernels between the trigger of a swap-in and its consumer; None: the fastest.
    """

    facts = PlannerInfo(
        "tflms",
        "TFLMS",
        '"TFLMS: Large Model Support in TensorFlow by Graph Rewriting", 2018',
        family="swap: other heuristics",
        slot=4,
        place=140,
        moves="swap",
    )

    n_tensors: int | None = at_least(0, None)
    lower_bound: int | None = at_least(1, None)

    @no_collections()
    def choose(self, engine: Engine) -> Rows:
        """Returns the swaps of the rewritten graph; raises Infeasible if they do not free enough memory."""
        program = engine.program
        limit = engine.limit
        gaps = [f.gap for f in feature_maps(program, self.min_bytes)]
        if self.n_tensors is None:
            n = len(self.reachable(engine, gaps).prefix(np.arange(len(gaps)), limit))
        else:
            n = min(self.n_tensors, len(gaps))
        farthest = max((g.before - g.after for g in gaps[:n]), default=1)
        bounds = [2**i for i in range(farthest.bit_length())] if self.lower_bound is None else [self.lower_bound]
        grid = [rewrite(program, gaps[:n], bound) for bound in bounds]
        return min(grid, key=lambda rows: engine.score(rows).iteration_ns) if len(grid) > 1 else grid[0]


def rewrite(program: Program, gaps: list[Gap], lower_bound: int) -> Rows:
    """Returns int64[n, 6]: swaps of ``gaps``, each triggered ``lower_bound`` kernels before its consumer (choice 4)."""
    turn = next((k for k, kernel in enumerate(program.kernels) if kernel.phase != "forward"), 0)
    rows = rows_for(gaps, Choice.SWAPPED)
    after = rows[:, AFTER]
    before = rows[:, BEFORE]
    rows[:, EXTRA] = np.maximum(after, np.minimum(np.maximum(before - lower_bound, turn), before - 1))
    return rows
