"""What every planner shares: the interface, candidate gaps with their planned residency, the last check.

Planned residency is the load that a plan intends: a tensor is absent from the end of ``after`` to the start
of ``before``, transfers taking no time. A plan of swaps fits a limit exactly when its planned residency
does; transfers that take longer make kernels wait, they do not need more memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from simulator.compiled.encoding import RECOMPUTE as RECOMPUTE, SWAP as SWAP, SYNC_SWAP as SYNC_SWAP
from simulator.compiled.engine import Engine, decisions_of, rows_of
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Gap, Program

MIB = 2**20

Rows = NDArray[np.int64]  # (n, 5): kind, tensor, after, before, extra (swap: prefetch or -1; recompute: keep)


class Infeasible(Exception):
    """No plan of the planner's fits the limit. The message is the reason, one sentence."""


class Planner(Protocol):
    """Plans one program on one machine under one limit.

    Attributes:
        name: its key in ``agents.PLANNERS``.
        simulator_calls: simulator calls that the last ``plan`` made, the final check included.
    """

    name: str
    simulator_calls: int

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """A plan that fits ``limit`` (bytes, persistent tensors included).

        Raises:
            Infeasible: the planner has none.
        """
        ...


class NoPlan:
    """The empty plan, where the limit allows it. It has no use for its options."""

    name = "none"

    def __init__(self, min_bytes: int = MIB, seed: int = 0) -> None:
        self.simulator_calls = 0

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """The empty plan; raises Infeasible when the peak is above ``limit``."""
        engine = Engine(program, machine, limit)
        return finish(self, program, machine, limit, engine, Candidates(program, []).rows)


class Candidates:
    """Gaps a planner chooses from, as arrays.

    Attributes:
        gaps: m gaps.
        nbytes: int64[m], size of each gap's tensor.
        absent: bool[m, n], the kernels at which the gap is open.
        rows: int64[m, 5], the swaps that empty the gaps, their prefetch left to the simulator.
        live_bytes: int64[n], the program's live bytes per kernel.
        least: the peak that remains when every gap is emptied, the smallest limit within reach.
    """

    def __init__(self, program: Program, gaps: Sequence[Gap]) -> None:
        self.gaps = list(gaps)
        self.live_bytes = np.array(program.live_bytes, dtype=np.int64)
        self.nbytes = np.array([program.tensors[g.tensor].nbytes for g in gaps], dtype=np.int64)
        n = len(program.kernels)
        self._open = [spans(g.after, g.before, n) for g in self.gaps]
        self.absent = np.zeros((len(self.gaps), n), dtype=bool)
        for row, opened in zip(self.absent, self._open, strict=True):
            for span in opened:
                row[span] = True
        self.rows = np.array([(SWAP, *g, -1) for g in gaps], dtype=np.int64).reshape(-1, 5)
        self.least = int(self.residency(np.ones(len(self.gaps), dtype=bool)).max())

    def __len__(self) -> int:
        return len(self.gaps)

    def residency(self, chosen: NDArray[np.bool_]) -> NDArray[np.int64]:
        """int64[n]: load per kernel with the ``chosen`` (bool[m]) gaps emptied."""
        return self.live_bytes - self.nbytes[chosen] @ self.absent[chosen]

    def empty(self, load: NDArray[np.int64], i: int) -> None:
        """Takes gap ``i`` out of a residency ``load`` (int64[n]), in place."""
        for span in self._open[i]:
            load[span] -= self.nbytes[i]


def spans(after: int, before: int, n: int) -> tuple[slice, ...]:
    """Kernels (of ``n``) between ``after`` and ``before``: one slice, or two over the iteration boundary."""
    return (slice(after + 1, before),) if after < before else (slice(after + 1, n), slice(0, before))


def finish(planner: Planner, program: Program, machine: Machine, limit: int, engine: Engine, rows: Rows) -> Plan:
    """The plan of ``rows`` (int64[n, 5]), once the engine agrees that it fits.

    Raises:
        Infeasible: it does not.
    """
    score = engine.score(rows)
    planner.simulator_calls = engine.calls
    if not score.feasible:
        raise infeasible(planner, program, limit, score.required_bytes)
    return Plan(decisions_of(rows), program.fingerprint, planner.name, limit, machine.name)


def plans_of(planners: Sequence[Planner], program: Program, machine: Machine, limit: int, engine: Engine) -> list[Rows]:
    """Rows of the plans of those ``planners`` that have one. ``engine`` is charged with the calls of all."""
    found = []
    for planner in planners:
        try:
            found.append(rows_of(planner.plan(program, machine, limit).decisions))
        except Infeasible:
            pass
        engine.calls += planner.simulator_calls
    return found


def infeasible(planner: Planner, program: Program, limit: int, least: int | None) -> Infeasible:
    """The exception that says how far down the planner can go: to ``least`` bytes, None where that is not known."""
    known = least is not None and least > limit
    reach = f"the smallest limit it can reach is {least:,} bytes" if known else "it found no plan that fits"
    return Infeasible(
        f"{planner.name}: {program.name!r} cannot be planned within {limit:,} bytes (peak "
        f"{program.peak_bytes:,}); {reach}"
    )


def check_mode(mode: str) -> str:
    """Raises ValueError unless ``mode`` is swap, recompute or joint."""
    if mode not in ("swap", "recompute", "joint"):
        raise ValueError(f"mode: expected 'swap', 'recompute' or 'joint', got {mode!r}")
    return mode
