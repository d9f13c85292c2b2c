"""Renders an episode as text or as a picture (for ``gymnasium.wrappers.RecordVideo``).

Both show memory use under the partial plan against the limit, the agent's position, and evicted tensors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from envs.batch import Batch
from simulator.compiled import encoding

GIB = 2**30


def _captions(batch: Batch, i: int) -> tuple[str, str]:
    """Returns the title, and a summary of the position of walk i and its evicted tensors."""
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
    title = f"{task.program.name} on {task.machine.name}, {task.limit / task.program.peak_bytes:.0%} of the memory"
    overhead = "dead end" if np.isnan(batch.overhead[i]) else f"overhead {batch.overhead[i]:.2%}"
    return title, (
        f"kernel {position:,} of {len(task.live_bytes):,}, {overhead}; swapped out {swapped}, in flight {moving}, "
        f"to be recomputed {dropped}"
    )


def text(batch: Batch, i: int, n_columns: int = 72, n_rows: int = 12) -> str:
    """Draws bars over the iteration of walk i: "#" memory under the partial plan, "." memory that it freed."""
    task = batch.task(i)
    n = len(task.live_bytes)
    max_bytes = max(int(task.live_bytes.max()), task.limit)
    bounds = np.linspace(0, n, n_columns + 1).astype(int)
    # A program of fewer kernels than columns repeats kernels.
    pairs = [(a, max(b, a + 1)) for a, b in zip(bounds, bounds[1:], strict=False)]
    need, without = (
        [int(n_rows * x[a:b].max() / max_bytes + 0.5) for a, b in pairs] for x in (batch.need(i), task.live_bytes)
    )
    line = int(n_rows * task.limit / max_bytes + 0.5)
    lines = [*_captions(batch, i)]
    for row in range(n_rows, 0, -1):
        cells = ("#" if x >= row else "." if y >= row else " " for x, y in zip(need, without, strict=True))
        lines.append("".join(cells) + (f" {task.limit / GIB:.2f} GiB, the limit" if row == line else ""))
    marker = min(n_columns - 1, n_columns * int(batch.walks["position"][i]) // n)
    return "\n".join([*lines, " " * marker + "^"])


def picture(batch: Batch, i: int) -> NDArray[np.uint8]:
    """Draws walk i as uint8 (450, 800, 3)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import
    from matplotlib.figure import Figure

    task = batch.task(i)
    need = batch.need(i)
    (title, words) = _captions(batch, i)
    figure = Figure(figsize=(8, 4.5), dpi=100, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    times = task.start_ns / 1e6
    limit = task.limit / GIB

    def fill(values: NDArray[Any], color: str, label: str, bottom: float = 0.0) -> None:
        steps = np.append(values, values[-1:]) / GIB
        axes.fill_between(times, steps, bottom, step="post", color=color, lw=0, label=label)

    fill(task.live_bytes, "#c9c9c9", "without a plan")
    fill(need, "#1f77b4", "under the plan so far")
    fill(np.maximum(need, task.limit), "#d62728", "over the limit", limit)
    axes.axhline(limit, color="#222222", lw=1.2)
    axes.axvline(times[batch.walks["position"][i]], color="#222222", lw=1.2, ls=":")
    top = 1.08 * max(int(task.live_bytes.max()), task.limit) / GIB
    axes.set(xlim=(0, times[-1]), ylim=(0, top), ylabel="GiB", xlabel=f"time in the iteration, ms\n{words}")
    axes.set_title(title, loc="left")
    axes.legend(loc="upper right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
