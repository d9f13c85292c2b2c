"""Renders an episode as text or as a picture (for ``gymnasium.wrappers.RecordVideo``).

Both show memory use under the partial plan against the limit, the agent's position, and evicted tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from envs.batch import Batch
from simulator.compiled import encoding

GIB = 2**30
COLUMNS, ROWS = 72, 12  # size of the text
LEFT, NOW, OVER, INK = "#c9c9c9", "#1f77b4", "#d62728", "#222222"


class Scene(NamedTuple):
    """Snapshot of one walk over n kernels."""

    title: str
    start_ns: NDArray[np.int64]  # (n + 1,) ideal start time of each kernel and end of the iteration
    without: NDArray[np.int64]  # (n,) live bytes at each kernel without a plan
    need: NDArray[np.int64]  # (n,) planned residency, bytes
    limit: int
    position: int  # completed kernels
    host: tuple[str, ...]  # tensors swapped out now
    moving: tuple[str, ...]  # tensors of ``host`` with copies in flight
    dropped: tuple[str, ...]  # tensors removed now, to be recomputed
    overhead: float  # of the partial plan

    @classmethod
    def of(cls, batch: Batch, i: int) -> Scene:
        """Creates the snapshot of walk i of a batch."""
        task, walk, rows = batch.task(i), batch.walks[i], batch.plan_rows(i)
        n, position = len(task.program.kernels), int(walk["position"])
        host, moving, dropped = [], [], []
        now, until = task.start_ns[position], int(walk["free_ns"])
        for kind, tensor, after, before in rows[
            ::-1, [encoding.KIND, encoding.TENSOR, encoding.AFTER, encoding.BEFORE]
        ]:
            away = after < position <= before if after < before else position <= before or after < position
            name = task.program.tensors[tensor].name
            if kind == encoding.RECOMPUTE:
                dropped += [name] if away else []
                continue
            if until > now:  # D2H copies are sequential, and the last one ends at ``free_ns``
                moving.append(name)
            until -= task.machine.d2h_ns(task.program.tensors[tensor].nbytes)
            host += [name] if away else []
        title = f"{task.program.name} on {task.machine.name}, {task.limit / task.program.peak_bytes:.0%} of the memory"
        return cls(title, task.start_ns, task.live_bytes, batch.arrays[i, :n].copy(), task.limit,
                   position, tuple(host), tuple(moving), tuple(dropped), float(batch.overhead[i]))  # fmt: skip

    @property
    def words(self) -> str:
        """One-line summary of the agent's position and the evicted tensors."""
        overhead = "dead end" if np.isnan(self.overhead) else f"overhead {self.overhead:.2%}"
        return (
            f"kernel {self.position:,} of {len(self.need):,}, {overhead}; swapped out {len(self.host)}, in flight "
            f"{len(self.moving)}, to be recomputed {len(self.dropped)}"
        )

    def text(self) -> str:
        """Draws COLUMNS bars over the iteration; "#": memory under the partial plan, ".": memory that it has freed."""
        part = np.linspace(0, len(self.need), COLUMNS + 1).astype(int)
        most = max(int(self.without.max()), self.limit)
        pairs = [(a, max(b, a + 1)) for a, b in zip(part, part[1:], strict=False)]
        need, without = ([int(ROWS * x[a:b].max() / most + 0.5) for a, b in pairs] for x in (self.need, self.without))
        line = int(ROWS * self.limit / most + 0.5)
        out = [self.title, self.words]
        for row in range(ROWS, 0, -1):
            cells = ("#" if x >= row else "." if y >= row else " " for x, y in zip(need, without, strict=True))
            out.append("".join(cells) + (f" {self.limit / GIB:.2f} GiB, the limit" if row == line else ""))
        here = min(COLUMNS - 1, COLUMNS * self.position // len(self.need))
        return "\n".join([*out, " " * here + "^"])

    def picture(self) -> NDArray[np.uint8]:
        """Draws the snapshot as uint8 (450, 800, 3)."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), dpi=100, layout="constrained")
        canvas, axes = FigureCanvasAgg(figure), figure.add_subplot()
        times = self.start_ns / 1e6

        def steps(values: NDArray[Any]) -> NDArray[Any]:
            return np.append(values, values[-1:]) / GIB

        axes.fill_between(times, steps(self.without), step="post", color=LEFT, lw=0, label="without a plan")
        axes.fill_between(times, steps(self.need), step="post", color=NOW, lw=0, label="under the plan so far")
        axes.fill_between(times, steps(np.maximum(self.need, self.limit)), self.limit / GIB, step="post", color=OVER,
                          lw=0, label="over the limit")  # fmt: skip
        axes.axhline(self.limit / GIB, color=INK, lw=1.2)
        axes.axvline(times[self.position], color=INK, lw=1.2, ls=":")
        axes.set(xlim=(0, times[-1]), ylim=(0, 1.08 * max(int(self.without.max()), self.limit) / GIB), ylabel="GiB",
                 xlabel=f"time in the iteration, ms\n{self.words}")  # fmt: skip
        axes.set_title(self.title, loc="left")
        axes.legend(loc="upper right", frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[..., :3].copy()
