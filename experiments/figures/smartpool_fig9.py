"""Fig. 9 of the SmartPool paper: overhead of AutoSwap's priority scores and of Bayesian optimisation (BO)."""

from __future__ import annotations

import numpy as np
from omegaconf import DictConfig

import agents
from agents.floor import floor
from agents.heuristics.autoswap_bo import BASIC
from experiments import figures
from experiments.common.report import Row
from experiments.figures.figure import Figure, span
from experiments.figures.smartpool import MB, ZERO, limits_of, our_limit, planned, waits
from experiments.figures.smartpool_table1 import PAPER
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel, Rule, floor as floor_area
from experiments.plotting.palette import FAINT, look
from simulator import Machine

SCORES = tuple(f"autoswap_{score}" for score in BASIC)
FREE = 447  # MB: the limit down to which the paper's overhead is zero
EVERY = 3  # of so many limits one is in the table; the picture has all
CLOSE, HIGHEST = 0.03, 0.2  # claimed: the scores differ by less, all are below
DASHES, INKS = ("-", "--", ":", "-."), ("#08306b", "#4a9bd4", "#f16913", "#8e5bd0")  # of SCORES


def tasks(settings: DictConfig) -> list[Row]:
    """One for the four scores and the floor, and one per seed of BO."""
    network = settings.network
    shared = {"network": network, "limits": sorted(limits_of(settings, network), reverse=True)}
    seeds = figures.integers(settings, "seeds", 0)
    return [{**shared, "seed": None}, *({**shared, "seed": seed} for seed in seeds)]


def run(task: Row, machine: Machine) -> Row:
    """Overheads by planner, one per limit; the part of that at the lowest that the forward pass waits."""
    program = figures.program(task["network"], machine)
    limits = [our_limit(program, task["network"], limit) for limit in task["limits"]]
    seed = task["seed"]
    planners = {n: agents.make(n) for n in SCORES} if seed is None else {"bo": agents.make("autoswap_bo", seed=seed)}
    runs = {n: [planned(p, program, machine, limit) for limit in limits] for n, p in planners.items()}
    found = {n: [timeline.overhead for timeline in mine] for n, mine in runs.items()}
    if seed is None:
        found["floor"] = [floor(program, machine, limit, "swap").overhead for limit in limits]
    forward = sum(kernel.phase == "forward" for kernel in program.kernels)
    return {
        "load": program.peak_bytes,
        "ours": limits,
        "overheads": found,
        "forward": {n: sum(waits(mine[-1], program)[:forward]) / program.ideal_ns for n, mine in runs.items()},
    }


# ------------------------------------------------------------------------------------------ for people


class Lines:
    """The rows as arrays over the limits, float64[limits]; ``bo`` is [seeds, limits]."""

    def __init__(self, rows: list[Row]) -> None:
        first = next(row for row in rows if row["seed"] is None)
        self.network, self.paper, self.ours = first["network"], first["limits"], first["ours"]
        self.scores = np.array([first["overheads"][name] for name in SCORES])
        self.floor = np.array(first["overheads"]["floor"])
        self.bo = np.array([row["overheads"]["bo"] for row in rows if row["seed"] is not None])
        self.load, self.forward = first["load"], [first["forward"][name] for name in SCORES]

    def free(self, overheads: np.ndarray) -> float:
        """The lowest limit of the paper at which there is no overhead, nor at any above it."""
        paid = np.flatnonzero(overheads > ZERO)
        return float(self.paper[paid[0] - 1 if len(paid) else -1]) if not len(paid) or paid[0] else np.nan


def numbers(rows: list[Row]) -> Row:
    """Every limit, and the paper's claims."""
    lines = Lines(rows)
    aoa, doa, wdoa, swdoa = lines.scores
    bo, best, most = np.median(lines.bo, axis=0), lines.scores.min(axis=0), lines.scores.max(axis=0)
    spread, paid, seeds = most - best, most > ZERO, np.ptp(lines.bo, axis=0)
    return {
        "lines": [
            {"paper": paper, "ours": lines.ours[i], "scores": lines.scores[:, i].tolist(), "bo": bo[i],
             "same": "same" if seeds[i] <= ZERO else None, "floor": lines.floor[i],
             "seeds": span(lines.bo[:, i]) if seeds[i] > ZERO else None}
            for i, paper in enumerate(lines.paper) if i % EVERY == 0 or i == len(lines.paper) - 1
        ],
        "load_paper": PAPER[lines.network]["load"], "load": lines.load, "count": len(spread), "paid": int(paid.sum()),
        "weighted": int((np.minimum(wdoa, swdoa) <= np.minimum(aoa, doa) + ZERO)[paid].sum()),
        "near": int((spread < CLOSE).sum()), "apart": 100 * spread.max(), "apart_at": lines.paper[spread.argmax()],
        "below": int((most < HIGHEST).sum()), "most": most.max(), "most_at": lines.paper[most.argmax()],
        "better": int((bo < best - ZERO).sum()), "of_seeds": len(lines.bo), "seeds": 100 * seeds.max(),
        "claimed": FREE, "free": [lines.free(some) for some in (bo, best, lines.floor)],
        "forward": span(lines.forward) if most.max() >= HIGHEST else None,
        "lowest": lines.paper[-1],
    }  # fmt: skip


def chart(rows: list[Row]) -> Chart:
    """Overhead against the limit."""
    lines = Lines(rows)
    bo = np.median(lines.bo, axis=0)
    # A tighter limit has no lower floor: between two limits that of the wider one holds.
    x, y = [*lines.paper, min(lines.paper) - 5], [*lines.floor, lines.floor[-1]]
    marks: list[Mark] = [floor_area(x, y, -0.003, step=True),
                         Rule(FREE, colour=FAINT, text="the paper's limit\nof no overhead")]  # fmt: skip
    for name, overheads, dash, ink in zip(SCORES, lines.scores, DASHES, INKS, strict=True):
        label, _, marker = look(name)
        end = f"{label.split()[-1]} {overheads[-1]:.0%}"
        marks.append(Line(lines.paper, overheads, ink, label.split()[-1], marker, dash, end=end))
    marks.append(Line(lines.paper, bo, look("autoswap_bo").colour, "BO, median and range of the seeds", width=2.6,
                      band=(lines.bo.min(axis=0), lines.bo.max(axis=0)), end=f"BO {bo[-1]:.0%}", front=4))  # fmt: skip
    shift = lines.paper[0] - lines.ours[0] / MB
    label = f"memory load limit of the paper (MB); ours, at which as much must leave, is {shift:,.0f} MB lower"
    panel = Panel("", marks, Axis(label, limits=(max(lines.paper) + 5, min(lines.paper) - 5)),
                  Axis("overhead of an iteration", "%", (-0.003, 1.08 * max(lines.scores.max(), 0.02))))  # fmt: skip
    title = f"{figures.label(lines.network)}, batch size 100, GTX 1080 Ti: overhead of AutoSwap by priority score"
    return Chart(title, [panel], size=(10.0, 4.8))


FIGURE = Figure("smartpool_fig9", tasks, run, numbers, chart)
