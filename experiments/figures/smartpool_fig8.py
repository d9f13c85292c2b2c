"""Fig. 8 of the SmartPool paper: memory load of VGG16 over one iteration, with AutoSwap at several limits."""

from __future__ import annotations

import numpy as np
from omegaconf import DictConfig

import agents
from agents.heuristics.autoswap import peak_gaps
from agents.planner import Candidates
from experiments import figures
from experiments.common.report import MB as MEGABYTE, Row
from experiments.figures.figure import Figure
from experiments.figures.smartpool import MB, limits_of, our_limit, planned
from experiments.figures.smartpool_table1 import PAPER
from experiments.plotting import plots
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel, Rule
from experiments.plotting.palette import FAINT, LOAD, SWAPPED
from simulator import Machine, Plan, Program, Swap, Timeline, simulate

LEAST = 280  # MB: the lowest limit of Fig. 9, "slightly above the load_min"
NONE, MINIMUM = "no swap", "load_min"


def tasks(settings: DictConfig) -> list[Row]:
    """One per curve."""
    network, limits = settings.network, limits_of(settings, settings.network)
    curves: list[Row] = [{"curve": NONE, "limit": None}, {"curve": MINIMUM, "limit": None}]
    curves += [{"curve": f"limit {limit:g} MB", "limit": limit} for limit in limits]
    return [{"network": network, **curve} for curve in curves]


def run(task: Row, machine: Machine) -> Row:
    """Steps of the curve: ms and MB; the run's figures in bytes and ns."""
    program = figures.program(task["network"], machine)
    if task["curve"] == MINIMUM:
        found, timeline = load_min(program, machine)
        x, y = np.array(program.start_ns) / 1e6, np.append(found, found[-1]) / MB
        peak, limit = int(found.max()), None
        gradients = gradient_bytes(program, int(found.argmax()))
    elif task["limit"] is None:
        timeline = simulate(program, Plan(), machine, program.peak_bytes)
        peak, limit = timeline.peak_bytes, None
    else:
        limit = our_limit(program, task["network"], task["limit"])
        timeline = planned(agents.make("autoswap_bo"), program, machine, limit)
        peak = timeline.peak_bytes
    if task["curve"] != MINIMUM:
        x, y = plots.steady_memory(timeline)
        y = y * MEGABYTE / MB
    out = [s for s in timeline.spans if s.kind == "swap_out" and s.start_ns >= timeline.last_start_ns]
    return {
        "ours": limit,
        "load": program.peak_bytes,
        "peak": peak,
        "gradients": gradients if task["curve"] == MINIMUM else None,
        "peak_ms": float(x[int(np.argmax(y))]),
        "iteration_ns": timeline.iteration_ns,
        "ideal_ns": program.ideal_ns,
        "moved": sum(program.tensors[s.index].nbytes for s in out),
        "swaps": len(out),
        "curve_points": [[round(float(a), 4), round(float(b), 3)] for a, b in zip(x, y, strict=True)],
    }


def load_min(program: Program, machine: Machine) -> tuple[np.ndarray, Timeline]:
    """Load per kernel (int64[n]) when every candidate of AutoSwap is away, and the run of its synchronous swaps."""
    candidates = Candidates(program, peak_gaps(program))
    load = candidates.residency(np.ones(len(candidates), dtype=bool))
    n = len(program.kernels)
    swaps = tuple(Swap(*g, prefetch=(g.before - 1) % n, sync=True) for g in candidates.gaps)
    return load, simulate(program, Plan(swaps), machine, program.peak_bytes)


def gradient_bytes(program: Program, kernel: int) -> int:
    """Bytes of gradients that are alive while a kernel runs."""
    alive = [uses[0] <= kernel <= uses[-1] if uses else False for uses in program.accesses]
    return sum(t.nbytes for t, here in zip(program.tensors, alive, strict=True) if here and t.kind == "gradient")


# ------------------------------------------------------------------------------------------ for people


def numbers(rows: list[Row]) -> Row:
    """How limits are taken over, and what the text says of the figure."""
    network, least = rows[0]["network"], next(row for row in rows if row["curve"] == MINIMUM)
    early = least["peak_ms"] < 0.5 * least["ideal_ns"] / 1e6
    return {
        "curves": [{**row, "overhead": row["iteration_ns"] / row["ideal_ns"] - 1} for row in rows],
        "label": figures.label(network), "load": rows[0]["load"], "paper": PAPER[network]["load"],
        "away": rows[0]["load"] - least["peak"], "theirs": PAPER[network]["load"] - LEAST, "lowest": LEAST,
        "least": least, "gradients": None if early else least["gradients"],
        "early": "near the start" if early else None, "cost": least["iteration_ns"] / least["ideal_ns"] - 1,
    }  # fmt: skip


def chart(rows: list[Row]) -> Chart:
    """All curves in one pair of axes, limits dashed."""
    order = sorted(numbers(rows)["curves"], key=lambda row: -row["peak"])
    marks: list[Mark] = []
    for row, ink in zip(order, [*[FAINT, *SWAPPED][: len(order) - 1], LOAD], strict=True):
        x, y = zip(*row["curve_points"], strict=True)
        words = f"{row['curve']}: peak {row['peak'] / MB:,.0f} MB"
        if row["limit"]:
            ours = row["ours"] / MB
            words = f"paper's limit {row['limit']:g} MB, ours {ours:,.0f} MB: {row['overhead']:.1%} overhead"
            marks.append(Rule(ours, across=True, colour=ink))
        marks.append(Line(x, y, ink, words, step=True, width=1.5, band=(0, y) if row["curve"] == NONE else None))
    longest = max(row["curve_points"][-1][0] for row in rows)
    panel = Panel(
        "", marks, Axis("time in the iteration (ms)", limits=(0, longest)), Axis("memory load (MB)", limits=(0, None))
    )
    title = f"{figures.label(rows[0]['network'])}, batch size 100, GTX 1080 Ti: load with AutoSwap"
    return Chart(title, [panel], size=(9.5, 4.4), keys=2)


FIGURE = Figure("smartpool_fig8", tasks, run, numbers, chart)
