"""The curves behind the pictures."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np

from experiments import plots
from experiments.report import MB
from simulator import Machine, Plan, Program, Swap, simulate

MACHINE = Machine("m", 2**40, 4 * 10**9, 4 * 10**9)


def test_the_memory_curve_is_that_of_the_last_iteration(program: Program) -> None:
    plan = Plan(tuple(Swap(*gap) for gap in program.gaps(2**20)))
    required = simulate(program, plan, MACHINE, program.peak_bytes).required_bytes
    timeline = simulate(program, plan, MACHINE, required, iterations=3)
    ms, used = plots.steady_memory(timeline)
    assert ms[0] == 0 and np.isclose(ms[-1], timeline.iteration_ns / 1e6)
    assert (np.diff(ms) >= 0).all()
    assert used.max() * MB <= required
    # The byte-seconds under the curve are those of the intervals that the timeline lists.
    begin, end = timeline.boundaries[-2:]
    area, last = 0, (0, 0)
    for time, level in (*timeline.memory, (end, 0)):
        area += max(0, min(time, end) - max(last[0], begin)) * last[1]
        last = (time, level)
    assert np.isclose((np.diff(ms) * used[:-1]).sum() * 1e6 * MB, area)


def test_pictures_of_nothing_feasible(tmp_path: Path, program: Program) -> None:
    """No planner found a plan, no episode ended well: the pictures are still made, and no temporary file stays."""
    row = {"planner": "none", "feasible": False, "overhead": None, "limit_fraction": 0.1}
    plots.overhead_by_limit(tmp_path / "overhead.png", [row], "t")
    episode = SimpleNamespace(episode=0, overhead=float("nan"), feasible=False, best_overhead=float("nan"))
    plots.learning_curve(tmp_path / "learning.png", [episode], [row], "dqn", "t")
    assert sorted(f.name for f in tmp_path.iterdir() if f.suffix != ".json") == ["learning.png", "overhead.png"]
