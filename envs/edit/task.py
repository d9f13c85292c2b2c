"""Task of ``GpuMemoryEdit-v1``: one program on one machine under one limit, and its start plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from envs.edit.columns import BOUND
from envs.edit.walkers import Times
from simulator.compiled.encoding import NEVER, Ints, rows_of
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.modes import Choice, check_mode
from simulator.moves.gap_graph import BINS, UNDECIDED, GapGraph
from simulator.moves.moves import Moves
from simulator.plan import Plan
from simulator.program import Program


class Start(NamedTuple):
    """A feasible plan and its iteration time."""

    iteration_ns: int
    rows: Ints  # (n, 6), the plan


StartMaker: TypeAlias = "Callable[[EditTask], Sequence[Ints]]"


class EditTask:
    """One program on one machine under one limit, shared by any number of walkers of one thread.

    Args:
        limit: memory limit in bytes.
        mode: "swap", "recompute" or "joint".
        min_bytes: size in bytes below which tensors stay resident.
        start: a plan, or a function from the task to the rows of plans (starts.py).
        by_class: whether drawn edits of a repetitive program may change several gaps of a class (classes.py).

    Attributes:
        static: (G, F) float32 columns of the gaps that no edit changes; the last four: log prior of each ``Choice``.
        static_bins: (BINS, 12) float32 columns of the bins of time that no edit changes.
        starts: feasible start plans, fastest first.
        start_calls: simulator calls spent on them.

    Raises:
        ValueError: if no start plan is feasible, or no gap of the program can be emptied.
    """

    def __init__(
        self,
        program: Program,
        machine: Machine,
        limit: int,
        mode: str,
        min_bytes: int,
        start: Plan | StartMaker,
        by_class: bool = False,
    ) -> None:
        self.program = program
        self.machine = machine
        self.limit = int(limit)
        self.mode = check_mode(mode)
        self.engine = Engine(program, machine, self.limit)
        self.moves = Moves(program, self.limit, mode, min_bytes, 0, by_class=by_class)
        if not self.moves.gaps:
            raise ValueError(
                f"{program.name!r}: no tensor of at least {min_bytes:,} bytes can be evicted in mode {mode!r}; lower "
                "min_bytes, or choose another mode"
            )
        self.min_bytes = min_bytes
        self.ideal_ns = max(program.ideal_ns, 1)
        self.graph = GapGraph(program, machine, self.limit, self.moves, mode)
        self.priors = np.full((len(self.graph), len(Choice)), 1 / len(Choice))
        self.starts = self._starts(start)
        self.start_calls = self.engine.calls
        self.static = self._static()
        bins = self.graph.state(np.full(len(self.graph), UNDECIDED))[1]
        self.static_bins = np.clip(np.concatenate([self.graph.bins, bins], 1), -BOUND, BOUND)
        self.times = self._times()

    def _starts(self, start: Plan | StartMaker) -> list[Start]:
        if isinstance(start, Plan):
            start.check(self.program)
            plans = [rows_of(start.decisions)]
            if not self.moves.accepts(plans[0]):
                raise ValueError(
                    "start: the plan evicts tensors in gaps or modes that this task does not allow; give a plan of "
                    f"mode {self.mode!r} with min_bytes={self.min_bytes}"
                )
        else:
            plans = list(start(self))
        scored = [Start(self.engine.score(rows).iteration_ns, rows) for rows in plans]
        feasible = [candidate for candidate in scored if candidate.iteration_ns < NEVER]
        if not feasible:
            raise ValueError(f"start: no start plan fits {self.limit:,} bytes; use a larger limit or another start")
        return sorted(feasible, key=lambda candidate: candidate.iteration_ns)

    def _static(self) -> NDArray[np.float32]:
        # Scaled to the range of the other columns. A choice that the gap does not have is less likely than any other.
        prior = np.where(self.graph.allowed, np.log(np.maximum(self.priors, 1e-3)) / 3, -3.0)
        columns = np.concatenate([self.graph.static, prior], 1).clip(-BOUND, BOUND)
        return columns.astype(np.float32)

    def _times(self) -> Times:
        n = len(self.program.kernels)
        m = len(self.graph)
        begins = np.array(self.program.start_ns[:n], np.float64)
        bins = np.minimum((begins / self.ideal_ns * BINS).astype(np.int64), BINS - 1)
        duration_ns = np.array([kernel.duration_ns for kernel in self.program.kernels], np.int64)
        duration = duration_ns.astype(np.float64)
        return Times(
            bin_of=bins,
            duration=duration,
            duration_ns=duration_ns,
            duration_until=np.concatenate([[0.0], duration.cumsum()]),
            by_size=np.argsort(self.graph.nbytes, kind="stable"),
            data_until=np.zeros(n + 1),
            memory_until=np.zeros(n + 1),
            tight_until=np.zeros(n + 1, np.int64),
            least_slack=np.zeros((n.bit_length(), n)),
            gap_of=np.zeros(m, np.int64),
            start=np.zeros(n),
            data_stall=np.zeros(n),
            memory_stall=np.zeros(n),
            rerun=np.zeros(n),
            slack=np.zeros(n),
            out_end=np.zeros(m),
            in_start=np.zeros(m),
            in_end=np.zeros(m),
        )
