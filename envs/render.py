"""Renders an episode as text or as a picture (for ``gymnasium.wrappers.RecordVideo``).

Both show memory use over one iteration under the current plan and without a plan, against the limit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.compiled import encoding

if TYPE_CHECKING:
    from envs.batch import Batch
    from envs.edit.batch import EditBatch

MODES = ("ansi", "rgb_array")
GIB = 2**30


class Frame(NamedTuple):
    """What a rendering shows, for a program of n kernels."""

    title: str
    caption: str
    live_bytes: NDArray[np.int64]  # (n,) without a plan
    need_bytes: NDArray[np.int64]  # (n,) under the plan
    limit: int  # bytes
    start_ns: NDArray[np.int64]  # (n + 1,)
    position: int | None = None  # kernel that the agent has reached


def walk_frame(batch: Batch, i: int) -> Frame:
    """Returns the frame of walk i: the plan so far, the agent's position, and evicted tensors."""
    task = batch.task(i)
    walk = batch.walks[i]
    rows = batch.plan_rows(i)
    position = int(walk["position"])
    copy_end = int(walk["free_ns"])
    swapped = moving = dropped = 0
    for kind, tensor, after, before in rows[::-1, [encoding.KIND, encoding.TENSOR, encoding.AFTER, encoding.BEFORE]]:
        is_evicted = after < position <= before if after < before else position <= before or after < position
        if kind == encoding.RECOMPUTE:
            dropped += is_evicted
            continue
        moving += copy_end > task.start_ns[position]  # D2H copies are sequential, and the last one ends at ``free_ns``
        copy_end -= task.machine.d2h_ns(task.program.tensors[tensor].nbytes)
        swapped += is_evicted
    overhead = "dead end" if np.isnan(batch.overhead[i]) else f"overhead {batch.overhead[i]:.2%}"
    caption = (
        f"kernel {position:,} of {len(task.live_bytes):,}, {overhead}; swapped out {swapped}, in flight {moving}, "
        f"to be recomputed {dropped}"
    )
    return Frame(_title(task), caption, task.live_bytes, batch.need(i), task.limit, task.start_ns, position)


def edit_frame(batch: EditBatch, i: int) -> Frame:
    """Returns the frame of edit walker i: its current plan and the search."""
    task = batch.tasks[batch.task[i]]
    rows = batch.plan_rows(i)
    recomputed = int((rows[:, encoding.KIND] == encoding.RECOMPUTE).sum())
    caption = (
        f"simulator call {batch.calls[i]:,}, overhead {batch.overhead[i]:.2%}, best {batch.best_overhead[i]:.2%}; "
        f"swapped out {len(rows) - recomputed}, recomputed {recomputed} of {len(task.graph):,} gaps"
    )
    live_bytes = np.array(task.program.live_bytes, np.int64)
    start_ns = np.array(task.program.start_ns, np.int64)
    return Frame(_title(task), caption, live_bytes, task.engine.residency(rows), task.limit, start_ns)


def _title(task: Any) -> str:
    share = task.limit / task.program.peak_bytes
    return f"{task.program.name} on {task.machine.name}, {share:.0%} of the memory"


def text(frame: Frame, n_columns: int = 72, n_rows: int = 12) -> str:
    """Draws bars over the iteration: "#" memory under the plan, "." memory that it freed."""
    n = len(frame.live_bytes)
    max_bytes = max(int(frame.live_bytes.max()), frame.limit)
    bounds = np.linspace(0, n, n_columns + 1).astype(int)
    # A program of fewer kernels than columns repeats kernels.
    pairs = [(a, max(b, a + 1)) for a, b in zip(bounds, bounds[1:], strict=False)]
    need, without = (
        [int(n_rows * x[a:b].max() / max_bytes + 0.5) for a, b in pairs] for x in (frame.need_bytes, frame.live_bytes)
    )
    line = int(n_rows * frame.limit / max_bytes + 0.5)
    lines = [frame.title, frame.caption]
    for row in range(n_rows, 0, -1):
        cells = ("#" if x >= row else "." if y >= row else " " for x, y in zip(need, without, strict=True))
        lines.append("".join(cells) + (f" {frame.limit / GIB:.2f} GiB, the limit" if row == line else ""))
    if frame.position is not None:
        lines.append(" " * min(n_columns - 1, n_columns * frame.position // n) + "^")
    return "\n".join(lines)


def picture(frame: Frame) -> NDArray[np.uint8]:
    """Draws a frame as uint8 (450, 800, 3)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    times = frame.start_ns / 1e6
    limit = frame.limit / GIB

    def fill(values: NDArray[Any], color: str, label: str, bottom: float = 0.0) -> None:
        steps = np.append(values, values[-1:]) / GIB
        axes.fill_between(times, steps, bottom, step="post", color=color, lw=0, label=label)

    fill(frame.live_bytes, "#c9c9c9", "without a plan")
    fill(frame.need_bytes, "#1f77b4", "under the plan" if frame.position is None else "under the plan so far")
    fill(np.maximum(frame.need_bytes, frame.limit), "#d62728", "over the limit", limit)
    axes.axhline(limit, color="#222222", lw=1.2)
    if frame.position is not None:
        axes.axvline(times[frame.position], color="#222222", lw=1.2, ls=":")
    top = 1.08 * max(int(frame.live_bytes.max()), frame.limit) / GIB
    axes.set(xlim=(0, times[-1]), ylim=(0, top), ylabel="GiB", xlabel=f"time in the iteration, ms\n{frame.caption}")
    axes.set_title(frame.title, loc="left")
    axes.legend(loc="upper right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
