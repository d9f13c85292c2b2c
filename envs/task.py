"""Task of ``GpuMemory-v1``: one program on one machine under one limit, and arrays that all its walks share."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from envs.graph import build_graph
from simulator import Engine, Machine, Program
from simulator.compiled.encoding import columns_of
from simulator.files import no_collections
from simulator.modes import Choice

DEAD_END_REWARD = -10.0  # costs as much as ten iterations, more than any useful plan
REWARDS = ("paper", "causal")
# Forms of an action. PLAIN offload: the copy is issued when the gap opens. COPY: right after the last write. PLAIN
# removal: recomputed at the next use. KEEP: the recomputed chain stays resident. EARLY: as early as memory allows.
PLAIN = 0
COPY = 1
KEEP = 1
EARLY = 2
# Additional forms that a set of actions allows: fields of columns.OPTIONS.
ACTIONS: dict[str, tuple[str, ...]] = {
    "paper": (),
    "copy": ("copies",),
    "keep": ("keeps",),
    "at": ("earlies",),
    "full": ("copies", "keeps", "earlies"),
}


class Task:
    """One program on one machine under one limit, shared by any number of walks of one thread.

    Args:
        limit: memory limit in bytes.
        min_bytes: size in bytes below which tensors stay resident.
        mode: "swap", "recompute" or "joint".

    Raises:
        ValueError: if the mode is unknown.
    """

    @no_collections()
    def __init__(self, program: Program, machine: Machine, limit: int, min_bytes: int = 2**20, mode: str = "swap"):
        self.program = program
        self.machine = machine
        self.limit = int(limit)
        self.mode = mode
        self.graph = build_graph(program, machine, self.limit, min_bytes, mode)
        self.engine = Engine(program, machine, self.limit)
        self.forms = 2 if mode == "swap" else 3  # forms of an action
        self.ideal_ns = max(1, program.ideal_ns)
        self.tensor, self.after, self.before = columns_of(self.graph.gaps).T
        self.wraps = self.after >= self.before
        self.start_ns = np.array(program.start_ns, np.int64)
        self.nbytes = np.array([program.tensors[t].nbytes for t in self.tensor], np.int64)
        self.copy_at, self.first_since = self._copies()
        self.offloads = np.flatnonzero(self.graph.action_kind == Choice.SWAPPED)
        self.offload_gap = self.graph.action_gap[self.offloads]
        self.removals = np.flatnonzero(self.graph.action_kind == Choice.RECOMPUTED)
        self.removal_gap = self.graph.action_gap[self.removals]
        openings = np.unique(self.after[~self.wraps]) + 1
        n = len(program.kernels)
        following = np.append(openings, n)
        self.next_opening = following[np.searchsorted(openings, np.arange(n), side="right")]
        self.live_bytes = np.array(program.live_bytes, np.int64)
        self.host_is_short = sum(program.tensors[t].nbytes for t in set(self.tensor.tolist())) > machine.host_bytes

    def _copies(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the last write before each gap opens, or -1, and the tensor's first gap since it; (G,) each."""
        copy_at = np.full(len(self.tensor), -1, np.int64)
        first_since = np.arange(len(self.tensor))
        for g, (t, after) in enumerate(zip(self.tensor.tolist(), self.after.tolist(), strict=True)):
            writes = self.program.writes[t]
            i = bisect_right(writes, after)
            if i and writes[i - 1] < after:
                copy_at[g] = writes[i - 1]
                while (f := first_since[g] - 1) >= 0 and self.tensor[f] == t and self.before[f] > writes[i - 1]:
                    first_since[g] = f
        return copy_at, first_since
