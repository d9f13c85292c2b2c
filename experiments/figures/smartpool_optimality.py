"""The optimality analysis of "Efficient Memory Management for GPU-based Deep Learning Systems" (2020), section VI-B-3:
how much of AutoSwap's overhead could be avoided; batch size 100, GTX 1080 Ti. There are two answers here: the paper's
own way to tell, and what is proven.

The paper's way: where the swap-out stream is idle in the forward pass, variables that were not selected could leave,
and save as much waiting as their transfers take (``avoidable``). Ours: no plan of swaps can have less overhead than the
floor (agents/floor/), so at most the gap to it can be avoided; simulated annealing, which starts from AutoSwap's
plans, has a plan that avoids part of it, so at least that can be.

1. Limits are shares of the load that must leave, as far as AutoSwap's candidates reach, and the paper's example.
2. In an idle time the largest unselected variables leave that are free until the last wait and whose transfer ends.
3. Annealing swaps any tensor of at least 1 MiB, once or more in an iteration; the floor holds for all of these.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter
from omegaconf import DictConfig

import agents
from agents.floor import floor
from agents.planner import MIB
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.smartpool import MB, ZERO, last_kernels, our_limit, percent, waits
from experiments.plotting.palette import FAINT, FLOOR, INK, look
from experiments.plotting.plots import figure
from simulator import Machine, Plan, Program, Timeline, simulate

TITLE = "SmartPool, section VI-B-3: how much of AutoSwap's overhead is avoidable"
EXAMPLE = ("vgg16", 350)  # network, MB
PAPER = {
    "ramp_ms": 24.0,
    "out_ms": 28.9,
    "overhead_ms": 7.3,
    "avoidable_ms": 1.7,
}  # of the example; the last: less than
NEGLIGIBLE = 0.005  # of an iteration


def tasks(settings: DictConfig) -> list[Row]:
    """One per network."""
    leave = cli.values(settings, "leave")
    for share in leave:
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1:
            raise cli.UsageError(f"figure.leave: expected shares between 0 and 1, got {share!r}")
    calls = cli.integer(settings, "calls", least=20)
    return [{"network": n, "leave": sorted(leave), "calls": calls} for n in figures.networks(settings)]


def run(task: Row, machine: Machine) -> Row:
    """What can be avoided at each of the limits, in ns."""
    network = task["network"]
    program = figures.program(network, machine)
    limits = [(share, int(program.peak_bytes * (1 - share))) for share in task["leave"]]
    if network == EXAMPLE[0]:
        limits.append((None, our_limit(program, *EXAMPLE)))
    high = next(k for k, load in enumerate(program.live_bytes) if load >= 0.95 * program.peak_bytes)
    return {
        "load": program.peak_bytes,
        "ideal_ns": program.ideal_ns,
        "ramp_ns": program.start_ns[high],
        "limits": [
            found
            for share, limit in limits
            if (found := at_limit(program, machine, limit, task["calls"], share)) is not None
        ],
    }


def at_limit(program: Program, machine: Machine, limit: int, calls: int, share: float | None) -> Row | None:
    """Times of an iteration at one limit; None where AutoSwap's candidates do not reach it."""
    try:
        plan = agents.make("autoswap_bo").plan(program, machine, limit)
    except agents.Infeasible:
        return None
    timeline = simulate(program, plan, machine, limit)
    better = agents.make("annealing", calls=calls, mode="swap").plan(program, machine, limit)
    waited, could = avoidable(timeline, program, plan, machine)
    begin = timeline.last_start_ns
    return {
        "share": share,
        "limit": limit,
        "iteration_ns": timeline.iteration_ns,
        "forward_wait_ns": waited,
        "avoidable_ns": could,
        "out_ns": sum(s.end_ns - s.start_ns for s in timeline.spans if s.stream == "d2h" and s.start_ns >= begin),
        "annealing_ns": min(simulate(program, better, machine, limit).iteration_ns, timeline.iteration_ns),
        "floor_ns": floor(program, machine, limit, "swap").iteration_ns,
    }


def avoidable(timeline: Timeline, program: Program, plan: Plan, machine: Machine) -> tuple[int, int]:
    """ns that the last iteration waits in the forward pass, and that could be avoided there, by the paper's way."""
    begin, kernels = timeline.last_start_ns, last_kernels(timeline, program)
    end = max(k for k, kernel in enumerate(program.kernels) if kernel.phase == "forward") + 1
    waited = waits(timeline, program)[:end]
    total = sum(waited)
    if not total:
        return 0, 0
    last = max(k for k, ns in enumerate(waited) if ns)
    selected = {(d.tensor, d.after, d.before) for d in plan.decisions}
    ready = {}  # gaps that are open at the last wait, and since when
    for g in program.gaps(MIB):
        if g not in selected and (g.after < last < g.before if g.after < g.before else not g.before <= last <= g.after):
            ready[g] = kernels[g.after].end_ns if g.after < last else begin
    saved = 0
    for start, stop in idle(timeline, begin, kernels[last].start_ns):
        now = start
        while True:
            fits = [
                (machine.d2h_ns(program.tensors[g.tensor].nbytes), g)
                for g, since in ready.items()
                if max(now, since) + machine.d2h_ns(program.tensors[g.tensor].nbytes) <= stop
            ]
            if not fits:
                break
            transfer, g = max(fits)
            now = max(now, ready.pop(g)) + transfer
            saved += transfer
    return total, min(saved, total)


def idle(timeline: Timeline, begin: int, until: int) -> list[tuple[int, int]]:
    """When the swap-out stream has nothing to do, between two times: [start, end) each."""
    busy = sorted((s.start_ns, s.end_ns) for s in timeline.spans if s.stream == "d2h" and s.end_ns > begin)
    out, now = [], begin
    for start, end in [*busy, (until, until)]:
        if min(start, until) > now:
            out.append((now, min(start, until)))
        now = max(now, end)
    return out


# ------------------------------------------------------------------------------------------ for people


def overheads(row: Row, found: Row) -> dict[str, float]:
    """At one limit: AutoSwap's, that of the best plan known, the floor, and what is avoidable by the paper's way."""
    ideal = row["ideal_ns"]
    return {
        "ours": found["iteration_ns"] / ideal - 1,
        "known": found["annealing_ns"] / ideal - 1,
        "floor": found["floor_ns"] / ideal - 1,
        "paper": found["avoidable_ns"] / ideal,
    }


def _points(rows: list[Row]) -> list[tuple[Row, Row, dict[str, float]]]:
    return [(row, found, overheads(row, found)) for row in rows for found in row["limits"]]


def _name(row: Row, found: Row) -> str:
    share = found["share"]
    return f"{figures.label(row['network'])} {'paper' if share is None else f'{share:.0%}'}"


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """A line per network and limit."""
    heads = [
        "must leave", "limit, MB", "AutoSwap BO", "forward waits", "avoidable: the paper's way", "at least (annealing)",
        "at most (floor)", "best plan known", "floor",
    ]  # fmt: skip
    cells = []
    for row, found, over in _points(rows):
        cells.append([
            _name(row, found), f"{found['limit'] / MB:,.0f}", percent(over["ours"]),
            percent(found["forward_wait_ns"] / row["ideal_ns"]), percent(over["paper"]),
            percent(over["ours"] - over["known"]), percent(over["ours"] - over["floor"]), percent(over["known"]),
            percent(over["floor"]),
        ])  # fmt: skip
    return heads, cells


def notes(rows: list[Row]) -> list[str]:
    """The claims of the text beside what we find."""
    points = [p for p in _points(rows) if p[2]["ours"] > ZERO]
    if not points:
        return ["AutoSwap has no overhead at any of these limits."]
    small = sum(over["paper"] <= NEGLIGIBLE for _, _, over in points)
    proven = [over["ours"] - over["known"] for _, _, over in points]
    known = sum(p > ZERO for p in proven)
    shares = {
        kind: [1 - o["known"] / o["ours"] for row, _, o in points if row["network"].startswith(kind)]
        for kind in ("vgg", "resnet")
    }
    forward = sum(f["forward_wait_ns"] >= 0.5 * (f["iteration_ns"] - r["ideal_ns"]) for r, f, _ in points)
    out = [
        '"In most cases there is no avoidable overhead or only a negligible amount": by the paper\'s way it is at most '
        f"{NEGLIGIBLE:.1%} of an iteration at {small} of the {len(points)} limits at which there is overhead.",
        f'"It indicates that our greedy algorithm is indeed near optimal": a better plan is known at {known} of them, '
        f"by up to {100 * max(proven):.1f} points. The paper's way adds swaps to a selection; it does not ask for "
        "another selection, nor for what is gained when tensors come back later.",
    ]
    if all(shares.values()):
        vgg, resnet = (float(np.median(found)) for found in shares.values())
        out.append(
            f"In the median annealing avoids {vgg:.0%} of AutoSwap's overhead for VGGs and {resnet:.0%} for ResNets."
        )
    out.append(
        f'"The overhead in most cases occurs during forward-propagation": at least half of it does at {forward} of '
        f"{len(points)} limits."
    )
    return [*out, *(example(row, found, over) for row, found, over in points if found["share"] is None)]


def example(row: Row, found: Row, over: dict[str, float]) -> str:
    """The paper's case, in ms."""
    ms = row["ideal_ns"] / 1e6
    return (
        f"VGG16 below {EXAMPLE[1]} MB, paper / ours: {PAPER['ramp_ms']:g} / {row['ramp_ns'] / 1e6:.1f} ms to 95% of "
        f"the peak load; swapping out takes {PAPER['out_ms']:g} / {found['out_ns'] / 1e6:.1f} ms; the "
        f"overhead is {PAPER['overhead_ms']:g} / {over['ours'] * ms:.1f} ms, of which "
        f"avoidable by the paper's way less than {PAPER['avoidable_ms']:g} / {over['paper'] * ms:.1f} ms, and as "
        f"proven here at least {(over['ours'] - over['known']) * ms:.1f}, at most "
        f"{(over['ours'] - over['floor']) * ms:.1f} ms."
    )


def draw(rows: list[Row], path: Path) -> None:
    """A bar per limit: what cannot be avoided, what is open, what a known plan avoids; a mark for the paper's way."""
    points = _points(rows)
    with figure(path, max(7.0, 0.34 * len(points) + 2.2), 5.4) as axes:
        x, at = [], -1.0
        for i, (row, _, _) in enumerate(points):
            at += 1.0 if not i or points[i - 1][0] is row else 1.8
            x.append(at)
        low, known, ours, paper = (
            np.array([over[key] for _, _, over in points]) for key in ("floor", "known", "ours", "paper")
        )
        better, ink = look("annealing").colour, look("autoswap_bo").colour
        axes.bar(x, low, 0.8, color=FLOOR)
        axes.bar(x, known - low, 0.8, bottom=low, color="white", edgecolor=FAINT, linewidth=0.8)
        axes.bar(x, ours - known, 0.8, bottom=known, color=better)
        for place, high, saved in zip(x, ours, paper, strict=True):
            axes.plot((place - 0.45, place + 0.45), (high, high), color=ink, linewidth=2.4)
            axes.plot((place, place), (high - saved, high), color=INK, linewidth=2.4, solid_capstyle="butt")
        axes.set_xticks(x, ["350 MB" if f["share"] is None else f"{f['share']:.0%}" for _, f, _ in points], rotation=90,
                        fontsize=9)  # fmt: skip
        for row in rows:
            mine = [place for place, point in zip(x, points, strict=True) if point[0] is row]
            if mine:
                axes.text(sum(mine) / len(mine), 0.98, figures.label(row["network"]), ha="center", va="top",
                          fontsize=10.5, color=INK, transform=axes.get_xaxis_transform())  # fmt: skip
        axes.set(
            ylabel="overhead of an iteration", ylim=(0, 1.15 * max(ours.max(), 0.01)),
            xlabel="what must leave of the load (350 MB: the paper's example)",
            title="AutoSwap's overhead, and how much of it is avoidable",
        )  # fmt: skip
        axes.set_xlim(x[0] - 0.8, x[-1] + 0.8)
        axes.grid(axis="x", visible=False)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        keys = [
            Patch(color=better, label="avoided by a plan that we have"),
            Patch(facecolor="white", edgecolor=FAINT, label="not known"),
            Patch(color=FLOOR, label="no plan of swaps avoids it (proven)"),
            Patch(color=ink, label="AutoSwap BO"),
            Patch(color=INK, label="avoidable by the paper's way"),
        ]
        axes.figure.legend(handles=keys, loc="outside lower center", ncols=5 if len(points) > 12 else 2, fontsize=10)
