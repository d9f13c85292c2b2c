"""Learning curves that every trainer logs under the same names, by simulator calls (README.md, "Curves").

``Curve`` logs the training on one task to a tracker and writes ``curve.json``, which ``figure=learning`` plots.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from statistics import fmean

from agents.floor import Floor, floor
from simulator.files import read_json, write_json
from simulator.machine import Machine
from simulator.program import Program

LAST = 50  # window of the running means, in episodes
GREEDY = "greedy/overhead"
OVERHEAD = "episode/overhead"
BEST = "episode/best_overhead"
LogPoint = Callable[[int, Mapping[str, float]], None]


class Curve:
    """Scalars of a training on one task, logged at most every ``every`` simulator calls and saved to a file.

    Args:
        file: curve.json; None: no file.
        metadata: agent, seed and other settings that identify the training.
        every: minimum number of simulator calls between two points.
        log: callback that receives the scalars of a point.
        resumed: curve file of the run being resumed; its points up to the resumed state are kept.
    """

    def __init__(
        self,
        file: Path | None,
        program: Program,
        machine: Machine,
        limit: int,
        mode: str,
        metadata: Mapping[str, object],
        every: int,
        log: LogPoint | None = None,
        resumed: Path | None = None,
    ) -> None:
        self.file = file
        self.every = every
        self.log = log
        self.recent: deque[float] = deque(maxlen=LAST)  # overheads of episodes
        self.best = math.nan
        self.task = program, machine, limit, mode
        self.metadata = {
            "workload": program.name,
            "machine": machine.name,
            "mode": mode,
            **metadata,
            "limit_fraction": round(limit / program.peak_bytes, 4),
        }
        self.points: list[dict[str, float | None]] = []
        self.next_calls = every
        self.resumed_points = read_json(resumed)["points"] if resumed is not None and resumed.is_file() else []

    @cached_property
    def bound(self) -> Floor:
        """Certified lower bound of the task."""
        return floor(*self.task)

    def resume(self, calls: int) -> None:
        """Continues the curve of a resumed run after ``calls`` simulator calls."""
        self.points = [point for point in self.resumed_points if point["calls"] <= calls]
        self.next_calls = calls + self.every

    def add_episode(self, overhead: float, best: float | None = None) -> None:
        """Records an episode's overhead (NaN without a plan); ``best``: best overhead that other searches found."""
        self.recent.append(overhead if math.isfinite(overhead) else math.nan)
        values = (v for v in (self.best, self.recent[-1], best) if v is not None and not math.isnan(v))
        self.best = min(values, default=math.nan)

    def running_means(self) -> dict[str, float]:
        """Returns means over the last episodes; NaN before the first."""
        feasible = [v for v in self.recent if not math.isnan(v)]
        share = len(feasible) / len(self.recent) if self.recent else math.nan
        return {OVERHEAD: fmean(feasible) if feasible else math.nan, "episode/feasible": share, BEST: self.best}

    def add_point_if_due(self, calls: int, greedy: Callable[[], float]) -> None:
        """Adds a point if one is due.

        Args:
            greedy: evaluates the greedy policy's overhead, NaN in a dead end; its simulator calls are not counted.
        """
        if calls >= self.next_calls:
            self.add_point(calls, greedy())

    def add_point(self, calls: int, greedy: float) -> None:
        """Adds a point."""
        self.next_calls = calls + self.every
        values = {**self.running_means(), GREEDY: greedy, "greedy/gap": greedy - self.bound.overhead}
        if self.log is not None:
            self.log(calls, values)
        rounded = {key: round(v, 6) if math.isfinite(v) else None for key, v in values.items()}
        self.points.append({"calls": calls, **rounded})
        if self.file is not None:
            write_json(self.file, {**self.metadata, "floor": self.bound.overhead, "points": self.points}, indent=1)
