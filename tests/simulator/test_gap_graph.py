"""Tests columns of the gap graph against brute force on random programs."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from agents.planner import Candidates
from simulator import Machine, Program
from simulator.modes import MODES, Choice
from simulator.moves.gap_graph import BINS, UNDECIDED, BinColumns, BinState, GapGraph, GapState
from simulator.moves.moves import Moves
from tests.strategies import networks, programs
from tests.tiny import LIMIT, MACHINE, PROGRAM


def graph_of(program: Program, machine: Machine = MACHINE, share: float = 0.6, mode: str = "joint") -> GapGraph:
    limit = max(int(share * program.peak_bytes), 1)
    return GapGraph(program, machine, limit, Moves(program, limit, mode, 1, 0), mode)


def open_kernels(graph: GapGraph, gap: int) -> list[int]:
    out = []
    k = int(graph.after[gap]) + 1
    while k % graph.count != graph.before[gap]:
        out.append(k % graph.count)
        k += 1
    return out


@given(st.one_of(programs(), networks()), st.sampled_from(MODES), st.integers(0, 2**32 - 1))
def test_columns_by_brute_force(program: Program, mode: str, seed: int) -> None:
    graph = graph_of(program, mode=mode)
    rng = np.random.default_rng(seed)
    decided = np.array([rng.choice(np.flatnonzero(allowed)) for allowed in graph.allowed], np.int64).reshape(-1)
    decided[rng.random(len(graph)) < 0.5] = UNDECIDED
    gaps, bins = graph.state(decided)
    assert gaps.shape == (len(graph), len(GapState._fields)) and bins.shape == (BINS, len(BinState._fields))
    assert graph.bins.shape == (BINS, len(BinColumns._fields))
    assert graph.static.shape == (len(graph), len(graph.columns))
    for columns in (graph.static, graph.bins, graph.cover, gaps, bins):
        assert np.isfinite(columns).all() and columns.dtype == np.float32
    emptied = decided > Choice.RESIDENT
    kept = Candidates(program, graph.gaps)
    assert (graph.load(emptied) == kept.residency(emptied)).all()
    assume(program.ideal_ns > 0)  # otherwise the bins are empty
    start = np.array(program.start_ns, np.float64)
    width = graph.ideal / BINS
    for gap in range(len(graph)):
        covered = np.zeros(BINS)
        for k in open_kernels(graph, gap):
            for b in range(BINS):
                covered[b] += max(0.0, min(start[k + 1], (b + 1) * width) - max(start[k], b * width))
        assert np.allclose(graph.cover[gap], covered / width, atol=1e-5)


@pytest.mark.parametrize("times", [2, 1000])
def test_the_same_task_in_other_units(times: int) -> None:
    """The features are scale-free: larger tensors on a faster link, longer kernels on a slower one."""
    tensors = tuple(replace(t, nbytes=t.nbytes * times) for t in PROGRAM.tensors)
    wide = replace(PROGRAM, tensors=tensors)
    fast = replace(MACHINE, d2h_bytes_per_s=10**9 * times, h2d_bytes_per_s=10**9 * times)
    long = PROGRAM.with_durations([k.duration_ns * times for k in PROGRAM.kernels])
    slow = replace(MACHINE, d2h_bytes_per_s=10**9 // times, h2d_bytes_per_s=10**9 // times)
    first = GapGraph(PROGRAM, MACHINE, LIMIT, Moves(PROGRAM, LIMIT, "joint", 1, 0), "joint")
    wider = GapGraph(wide, fast, LIMIT * times, Moves(wide, LIMIT * times, "joint", 1, 0), "joint")
    longer = GapGraph(long, slow, LIMIT, Moves(long, LIMIT, "joint", 1, 0), "joint")
    decided = np.array([Choice.SWAPPED] + [UNDECIDED] * (len(first) - 1))
    for other in (wider, longer):
        assert np.allclose(first.static, other.static, atol=1e-3) and np.allclose(first.bins, other.bins, atol=1e-5)
        for mine, theirs in zip(first.state(decided), other.state(decided), strict=True):
            assert np.allclose(mine, theirs, atol=1e-3)
