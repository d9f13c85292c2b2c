"""The time of an iteration against the memory budget of "Checkmate: Breaking the Memory Wall with Optimal Tensor
Rematerialization" (MLSys 2020), section 6.2: its integer program, solved by Gurobi in up to 24 hours a budget, beside
planners that recompute, on the same two graphs (ResNet-50, batch 184; U-Net, batch 11; measured on a P100).

Graphs and schedules are those that MONeT's authors published (tests/data/checkmate/README.md). A schedule is replayed
as a plan of Reruns by the simulator.

1. A budget is the limit: Checkmate's fixed memory is what is persistent in the program.
2. "annealing", "lp_round" and "milp" plan Recompute decisions, one recovery for each gap of a tensor: a smaller
   language. The floor holds for both.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.ticker import FuncFormatter
from omegaconf import DictConfig

import agents
from agents.floor import floor
from experiments.common import cli
from experiments.common.report import Row
from experiments.plotting.palette import FAINT, FLOOR, INK, look
from experiments.plotting.plots import panel_grid
from simulator import Machine, Plan, Program, Rerun, simulate
from simulator.files import read_json

TITLE = "Checkmate: overhead of recomputation against the memory budget"
DATA = cli.CONFIGS.parent / "tests" / "data" / "checkmate"
LABELS = {"un_11": "U-Net, batch 11", "resnet50_184": "ResNet-50, batch 184"}
PUBLISHED = ("overhead_percent", "lower_bound_percent", "solve_seconds", "status")
GIB = 2**30
SAME = 5e-5  # points: the published overheads have four places


def tasks(settings: DictConfig) -> list[Row]:
    """One per network and budget."""
    if not (DATA / "answers.json").exists():
        raise cli.UsageError(f"{DATA} is not there: the graphs come with the repository and the source distribution")
    known = {network: sorted(published(network)) for network in LABELS}
    planners: dict[str, Any] = cli.plain(settings)["planners"]
    out: list[Row] = []
    for network, budgets in cli.plain(settings)["budgets"].items():
        if network not in known:
            raise cli.UsageError(f"figure.budgets: there is no network {network!r}{cli.nearest(network, set(known))}")
        for budget in budgets:
            if budget not in known[network]:
                raise cli.UsageError(f"figure.budgets.{network}: expected some of {known[network]}, got {budget!r}")
            out.append({"network": network, "budget_gib": budget, "planners": planners})
    return out


def published(network: str) -> dict[float, Row]:
    """What is published of a network, by the budget in GiB."""
    models: list[Row] = read_json(DATA / "answers.json")["models"]
    return {b["budget_gib"]: b for m in models if m["program"] == f"{network}.json.gz" for b in m["budgets"]}


def plan_of(run: Sequence[int]) -> Plan:
    """A schedule as a plan: kernels in the order in which they run, the first time in program order."""
    decisions: list[Rerun] = []
    waiting: list[int] = []
    at = 0
    for k in run:
        if k == at:
            decisions += [Rerun(w, at) for w in waiting]
            waiting, at = [], at + 1
        else:
            waiting.append(k)
    return Plan(tuple(decisions))


def run(task: Row, machine: Machine) -> Row:
    """Overheads in per cent, planning times in s."""
    program = Program.load(DATA / f"{task['network']}.json.gz")
    limit = int(task["budget_gib"] * GIB)
    theirs = published(task["network"])[task["budget_gib"]]
    replayed = simulate(program, plan_of(theirs["run"]), machine, limit)
    found: Row = {}
    for name, options in task["planners"].items():
        mode = {"mode": "recompute"} if "mode" in agents.options(name) else {}
        start = time.perf_counter()
        try:
            plan = agents.make(name, **mode, **options).plan(program, machine, limit)
        except agents.Infeasible:
            found[name] = {"overhead_percent": None, "plan_s": round(time.perf_counter() - start, 1)}
            continue
        seconds = time.perf_counter() - start
        timeline = simulate(program, plan, machine, limit)
        found[name] = {
            "overhead_percent": round(100 * timeline.overhead, 4), "peak_bytes": timeline.peak_bytes,
            "decisions": len(plan.decisions), "plan_s": round(seconds, 1),
        }  # fmt: skip
    return {
        "published": {key: theirs[key] for key in PUBLISHED},
        "replayed": {"overhead_percent": round(100 * replayed.overhead, 4), "peak_bytes": replayed.peak_bytes},
        "floor_percent": round(100 * floor(program, machine, limit, "recompute").overhead, 4),
        "found": found,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------ for people


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """A line per network and budget: overhead and planning time."""
    names = list(rows[0]["planners"])
    heads = ["budget", "floor", "Checkmate, Gurobi", *(look(name).label for name in names)]
    cells = []
    for row in rows:
        theirs = row["published"]
        cells.append([
            f"{LABELS[row['network']]}, {row['budget_gib']:g} GiB", f"{row['floor_percent']:.4f}%",
            f"{theirs['overhead_percent']:.4f}% ({_duration(theirs['solve_seconds'])})",
            *(_cell(row["found"][name]) for name in names),
        ])  # fmt: skip
    return heads, cells


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds:,.0f} s"


def _cell(found: Row) -> str:
    over = "–" if found["overhead_percent"] is None else f"{found['overhead_percent']:.4f}%"
    return f"{over} ({found['plan_s']:,.0f} s)"


def notes(rows: list[Row]) -> list[str]:
    """Where each planner stands beside the published results."""
    out = []
    for name in rows[0]["planners"]:
        pairs = [(row["found"][name]["overhead_percent"], row["published"]["overhead_percent"]) for row in rows]
        better = sum(ours is not None and ours < theirs - SAME for ours, theirs in pairs)
        same = sum(ours is not None and abs(ours - theirs) <= SAME for ours, theirs in pairs)
        out.append(
            f"{look(name).label}: below the published overhead at {better} of {len(rows)} budgets, equal at {same}."
        )
    exact = sum(abs(r["replayed"]["overhead_percent"] - r["published"]["overhead_percent"]) <= SAME for r in rows)
    out.append(f"Replayed by the simulator, the published schedule has its overhead at {exact} of {len(rows)} budgets.")
    out.append(
        'Gurobi ended within 1e-4 of its bound where the status is "optimal" '
        f"({sum(row['published']['status'] == 'optimal' for row in rows)} of {len(rows)}), so that a plan may be that "
        "much below it; where it was stopped after 24 hours there is more."
    )
    return out


def draw(rows: list[Row], path: Path) -> None:
    """A panel per network."""
    networks = [name for name in LABELS if any(row["network"] == name for row in rows)]
    with panel_grid(path, len(networks), 2, (5.6, 4.6), (0.2, 0.2)) as (panels, _):
        for panel, network in zip(panels, networks, strict=True):
            mine = sorted((row for row in rows if row["network"] == network), key=lambda row: row["budget_gib"])
            budgets = [row["budget_gib"] for row in mine]
            low = [row["floor_percent"] for row in mine]
            panel.plot(budgets, low, color=FAINT, linewidth=1.2, label="floor: no plan is below")
            panel.fill_between(budgets, 0, low, color=FLOOR)
            for name in rows[0]["planners"]:
                points = [(row["budget_gib"], row["found"][name]["overhead_percent"]) for row in mine]
                points = [point for point in points if point[1] is not None]
                style = look(name)
                panel.plot(*zip(*points, strict=True), color=style.colour, marker=style.marker, linewidth=1.4,
                           markersize=5, label=style.label)  # fmt: skip
            panel.plot(budgets, [row["published"]["overhead_percent"] for row in mine], color=INK, marker="_",
                       markersize=16, markeredgewidth=2.2, linestyle="none",
                       label="Checkmate, Gurobi, up to 24 h")  # fmt: skip
            panel.set(title=LABELS[network], xlabel="memory budget", ylabel="overhead of an iteration", yscale="log")
            panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g} GiB"))
            panel.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}%"))
            panel.yaxis.set_minor_formatter(FuncFormatter(lambda y, _: f"{y:g}%" if str(f"{y:g}")[0] in "235" else ""))
        panels[0].legend(loc="upper right")
