"""Step-by-step Python reference of ``local_search.anneal``, used as its test oracle."""

from __future__ import annotations

import math
import time
from itertools import count
from types import SimpleNamespace

import numpy as np

from agents.planner import Rows
from agents.search.local_search import CLOCK
from simulator.compiled.engine import NEVER, Engine
from simulator.moves.moves import Moves


def ticking(seconds: float) -> SimpleNamespace:
    """Returns a fake ``time`` module whose clock advances by a fixed amount per call."""
    calls = count()
    return SimpleNamespace(monotonic=lambda: seconds * next(calls))


def anneal(
    moves: Moves,
    engine: Engine,
    start: Rows,
    start_ns: int,
    calls: int | None,
    hot: float,
    cold: float,
    seed: int,
    enough_ns: int = 0,
    deadline: float | None = None,
) -> tuple[Rows, int]:
    """Repeats ``local_search.anneal`` step by step; checks the clock after every ``CLOCK`` calls."""
    ideal = max(engine.program.ideal_ns, 1)
    rng = np.random.default_rng(seed)
    moves.reset(start)
    best = start
    best_ns = start_ns
    current_ns = start_ns
    enough = max(enough_ns, engine.program.ideal_ns)
    start_time = time.monotonic()
    spent = 0.0
    for step in range(calls) if calls is not None else count():
        if deadline is not None and step % CLOCK == 0:
            spent = (time.monotonic() - start_time) / max(deadline - start_time, 1e-9)
        if best_ns <= enough or spent >= 1:
            break
        rows = moves.propose()
        if rows is None:
            break
        progress = max(spent, step / calls if calls is not None else 0.0)
        temperature = ideal * hot * (cold / hot) ** progress
        cutoff_ns = min(current_ns + math.ceil(-temperature * math.log(1.0 - rng.random())), NEVER)
        iteration_ns = engine.score(rows, None, cutoff_ns).iteration_ns
        if iteration_ns < cutoff_ns:
            moves.accept()
            current_ns = iteration_ns
            if current_ns < best_ns:
                best = rows
                best_ns = current_ns
    return best, best_ns
