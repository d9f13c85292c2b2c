"""Section VI-B-3 of the SmartPool paper: how much of AutoSwap's overhead could be avoided."""

from __future__ import annotations

import numpy as np
from omegaconf import DictConfig

import agents
from agents.floor import floor
from agents.planner import MIB
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.figure import Figure
from experiments.figures.smartpool import ZERO, last_kernels, our_limit, waits
from experiments.plotting.charts import Axis, Bars, Chart, Line, Panel, Words
from experiments.plotting.palette import FAINT, FLOOR, INK, look
from simulator import Machine, Plan, Program, Timeline, simulate

EXAMPLE = ("vgg16", 350)  # network, MB
# Of the example; the last: less than.
PAPER = {"ramp_ms": 24.0, "out_ms": 28.9, "overhead_ms": 7.3, "avoidable_ms": 1.7}
NEGLIGIBLE = 0.005  # of an iteration


def tasks(settings: DictConfig) -> list[Row]:
    """One per network."""
    leave = figures.numbers(settings, "leave", lambda share: 0 < share < 1, "shares between 0 and 1")
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
    if (plan := figures.attempt(agents.make("autoswap_bo"), program, machine, limit)) is None:
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


def points(rows: list[Row]) -> list[Row]:
    """Every limit of every network."""
    out = []
    for row in rows:
        for found in row["limits"]:
            over = overheads(row, found)
            ms = row["ideal_ns"] / 1e6
            out.append({
                **found, **over, "network": row["network"], "ideal_ns": row["ideal_ns"], "ramp_ns": row["ramp_ns"],
                "label": f"{figures.label(row['network'])} {named(found['share'], 'paper')}",
                "waits": found["forward_wait_ns"] / row["ideal_ns"], "least": over["ours"] - over["known"],
                "most": over["ours"] - over["floor"],
            })  # fmt: skip
            out[-1]["ms"] = {key: out[-1][key] * ms for key in ("ours", "paper", "least", "most")}
    return out


def named(share: float | None, paper: str) -> str:
    """What must leave, for people."""
    return paper if share is None else f"{share:.0%}"


def numbers(rows: list[Row]) -> Row:
    """The claims of the text beside what we find."""
    every = points(rows)
    paid = [one for one in every if one["ours"] > ZERO]
    shares = {
        kind: [1 - one["known"] / one["ours"] for one in paid if one["network"].startswith(kind)]
        for kind in ("vgg", "resnet")
    }
    half = [one for one in paid if one["forward_wait_ns"] >= 0.5 * (one["iteration_ns"] - one["ideal_ns"])]
    return {
        "points": [limits[-1] for limits in figures.grouped(every).values()], "paid": len(paid) or None,
        "negligible": NEGLIGIBLE, "paper_ms": PAPER,
        "none": None if paid else "no overhead", "small": sum(one["paper"] <= NEGLIGIBLE for one in paid),
        "known": sum(one["least"] > ZERO for one in paid),
        "proven": 100 * max((one["least"] for one in paid), default=0), "half": len(half),
        **{kind: float(np.median(found)) if all(shares.values()) else None for kind, found in shares.items()},
        "examples": [one for one in paid if one["share"] is None],
    }  # fmt: skip


def chart(rows: list[Row]) -> Chart:
    """A bar per limit: what cannot be avoided, what is open, what a known plan avoids; a mark for the paper's way."""
    every, x, marks = points(rows), [], []
    for i, one in enumerate(every):
        x.append(-1.0 if not x else x[-1] + (1.0 if every[i - 1]["network"] == one["network"] else 1.8))
    low, known, ours, paper = (np.array([one[key] for one in every]) for key in ("floor", "known", "ours", "paper"))
    top = 1.15 * max(ours.max(), 0.01)
    marks += [
        Bars(x, low, FLOOR, "no plan of swaps avoids it (proven)", across=False),
        Bars(x, known - low, FAINT, "not known", base=low, hollow=True, across=False),
        Bars(x, ours - known, look("annealing").colour, "avoided by a plan that we have", base=known, across=False),
        Line(x, ours, look("autoswap_bo").colour, "AutoSwap BO", "_", "", size=11, front=4),
        Bars(x, paper, INK, "avoidable by the paper's way", 0.2, base=ours - paper, across=False),
    ]
    for network in dict.fromkeys(one["network"] for one in every):
        mine = [place for place, one in zip(x, every, strict=True) if one["network"] == network]
        marks.append(Words(sum(mine) / len(mine), 0.99, figures.label(network), top=True))
    names = [named(one["share"], "350 MB") for one in every]
    where = Axis("what must leave of the load (350 MB: the paper's example)", limits=(x[0] - 0.8, x[-1] + 0.8),
                 ticks=x, names=names)  # fmt: skip
    panel = Panel("", marks, where, Axis("overhead of an iteration", "%", (0, top)))
    title = "AutoSwap's overhead, and how much of it is avoidable"
    return Chart(title, [panel], size=(max(7.0, 0.34 * len(every) + 2.2), 4.6), keys=5 if len(every) > 12 else 2)


FIGURE = Figure("smartpool_optimality", tasks, run, numbers, chart)
