"""GeePS: "GeePS: Scalable deep learning on distributed GPUs with a GPU-specialized parameter server" (EuroSys 2016).

GPU memory consists of a pinned part and a pool of buffers. Pinned tensors stay. All other data (parameters, optimizer
state and intermediate states of layers) live in host memory. They are fetched into the pool before each kernel that
accesses them and written back after it, in the background. The pool is twice the largest layer, so one layer is
computed while the next is fetched and the previous one is written back. Implemented without access to the paper's
text, from its abstract and the behavior of its published code. Entry points: ``GeePS.choose`` and ``unpinned``.
Numbered choices and deviations: geeps.md.
"""

from __future__ import annotations

import numpy as np

from agents.planner import PlannerInfo, Rows, RowsPlanner
from simulator.compiled.encoding import SWAP
from simulator.compiled.engine import Engine
from simulator.program import Gap, Program


class GeePS(RowsPlanner):
    """GeePS memory management as a swap plan; tensors smaller than ``min_bytes`` are pinned."""

    facts = PlannerInfo(
        "geeps",
        "GeePS",
        '"GeePS: Scalable deep learning on distributed GPUs with a GPU-specialized parameter server", EuroSys 2016',
        family="swap: other heuristics",
        slot=3,
        place=150,
        moves="swap",
    )

    def choose(self, engine: Engine) -> Rows:
        """Swaps all unpinned tensors; raises Infeasible if the limit is less than one kernel needs."""
        program = engine.program
        limit = engine.limit
        gaps = program.gaps(self.min_bytes)
        self.reachable(engine, gaps)
        swapped, pool = unpinned(program, gaps, limit)
        rows = [(SWAP, *g, trigger(program, g, swapped, pool), -1) for g in gaps if g.tensor in swapped]
        return np.array(rows, dtype=np.int64).reshape(-1, 6)


def unpinned(program: Program, gaps: list[Gap], limit: int) -> tuple[set[int], int]:
    """Returns the swapped tensors and the bytes of the pool that they pass through (choices 2 to 4)."""
    n = len(program.kernels)
    shortest: dict[int, int] = {}  # tensor: kernels from one access to the next, over its gaps
    for g in gaps:
        shortest[g.tensor] = min((g.before - g.after - 1) % n + 1, shortest.get(g.tensor, n))
    ids = sorted(shortest, key=lambda t: (shortest[t], t))
    pinned_load = np.array(program.live_bytes, dtype=np.int64)  # per kernel, without swapped tensors
    access = np.zeros(n, dtype=np.int64)  # bytes of swapped tensors that it accesses

    def move(t: int, pin: bool) -> None:
        nbytes = program.tensors[t].nbytes if pin else -program.tensors[t].nbytes
        uses = program.accesses[t]
        pinned_load[slice(None) if program.tensors[t].persistent else slice(uses[0], uses[-1] + 1)] += nbytes
        access[list(uses)] -= nbytes

    swapped = dict.fromkeys(ids if program.peak_bytes > limit else [])
    for t in swapped:
        move(t, pin=False)

    def try_pin(t: int) -> bool:
        """Pins ``t`` if pinned part and pool then fit; returns whether it did."""
        move(t, pin=True)
        if int(pinned_load.max()) + 2 * int(access.max()) <= limit:
            del swapped[t]
            return True
        move(t, pin=False)
        return False

    while swapped:
        largest = set(program.kernels[int(access.argmax())].accesses)
        if not any(try_pin(t) for t in list(swapped) if t in largest) and not [t for t in list(swapped) if try_pin(t)]:
            break
    return set(swapped), min(2 * int(access.max()), limit - int(pinned_load.max()))


def trigger(program: Program, gap: Gap, swapped: set[int], pool: int) -> int:
    """Returns the kernel after which the swap-in of ``gap`` is issued, as early as ``pool`` allows (choice 5)."""
    n = len(program.kernels)
    k = gap.before
    fetched = set[int]()
    while True:
        fetched |= swapped.intersection(program.kernels[k].accesses)
        k = (k - 1) % n
        pool_tensors = fetched | swapped.intersection(program.kernels[k].accesses)
        if k == gap.after or sum(program.tensors[t].nbytes for t in pool_tensors) > pool:
            return k
