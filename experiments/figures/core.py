"""The core suite of the benchmark: named tasks, agents on them within equal budgets, scores.

A task is a program, pinned by its fingerprint, a machine and a limit; it is of the train split where the policy that
comes with the package learned programs of its family, else of the test split. A run is an agent on a task with a budget
(simulator calls, or seconds) and a seed; its score is the certified gap: the overhead of its plan less the floor's, in
points, so that no plan scores below 0. Agents are planners of `agents`, or anybody's own class ("module:Class").
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig
from scipy.stats import trim_mean

import agents
from agents.floor import floor
from agents.planner import Planner
from experiments.common import cli
from experiments.common.report import Row, heuristics, warm_up
from experiments.figures import network, program, share_of_peak
from experiments.figures.figure import Figure, Range
from experiments.plotting import palette
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel
from simulator import Machine, Program
from simulator.compiled.engine import simulate
from simulator.files import read_json
from simulator.plan import PlanError

PUBLISHED = "published"  # the best of all heuristics, as one agent without a budget
WITHOUT = 100.0  # points, of no plan or one that is too late, and the most that a run scores
LATE = 1.25, 0.1  # a plan counts that took at most so many times the seconds, and so many beyond
SPLITS = ("train", "test")
BUDGETS = {"calls", "seconds", "seed"}  # what an agent may take
DRAWS, LEVEL = 2_000, 95
RESULTS = Path(__file__).resolve().parents[1] / "results"
_TASK = {"workload", "machine", "limit", "split", "fingerprint"}


class Core(Figure):
    """The core suite of the benchmark: named tasks, agents on them within equal budgets, scores."""

    name = "core"
    alone = True

    def tasks(self, settings: DictConfig) -> list[Row]:
        config = cli.plain(settings)
        out: list[Row] = []
        shared = {key: config[key] for key in ("agents", "calls", "seconds", "seeds")}
        for name, agent in config["agents"].items():
            if agent.get("planner") != PUBLISHED:
                maker(agent, f"figure.agents.{name}")
        for name, task in config["tasks"].items():
            if set(task) != _TASK or task["split"] not in SPLITS:
                raise cli.UsageError(
                    f"figure.tasks.{name}: expected {', '.join(sorted(_TASK))}, of split train or test"
                )
            network(task["workload"], f"tasks.{name}.workload")
            share_of_peak(task["limit"], f"tasks.{name}.limit")
            out.append({"task": name, **task, **shared, "beside": bool(config.get("beside"))})
        return out

    def run(self, task: Row, machine: Machine) -> Row:
        machine = Machine.load(task["machine"])
        built = program(task["workload"], machine)
        if built.fingerprint[: len(task["fingerprint"])] != task["fingerprint"]:
            raise cli.UsageError(
                f"figure.tasks.{task['task']}.fingerprint: the suite is of {task['fingerprint']}, this PyTorch "
                f"captures {built.fingerprint[:12]}; scores of different programs cannot be compared"
            )
        limit = int(task["limit"] * built.peak_bytes)
        begin = time.perf_counter()
        bound = floor(built, machine, limit)
        floor_s = time.perf_counter() - begin
        runs: list[Row] = []
        for name, agent in task["agents"].items():
            where = f"figure.agents.{name}"
            if agent.get("planner") == PUBLISHED:
                runs.append(published(built, machine, limit, bound.overhead))
                continue
            make, takes = maker(agent, where)
            budgets: list[dict[str, float]] = [
                {key: value} for key in ("calls", "seconds") if key in takes for value in task[key]
            ] or [{}]
            outcome(make, budgets[0], built, machine, limit, bound.overhead)  # compiles, loads weights: not counted
            for budget in budgets:
                for seed in task["seeds"] if "seed" in takes else [0]:
                    options = {**budget, **({"seed": seed} if "seed" in takes else {})}
                    found = outcome(make, options, built, machine, limit, bound.overhead)
                    runs.append({"agent": name, "calls": None, "seconds": None, **budget, "seed": seed, **found})
        if task["beside"]:
            runs += committed(task, set(task["agents"]))
        return {"kernels": len(built.kernels), "limit_bytes": limit, "floor_percent": round(100 * bound.overhead, 4),
                "floor_s": round(floor_s, 2), "runs": runs}  # fmt: skip

    def numbers(self, rows: list[Row]) -> Row:
        found, lines = scores(rows), []
        for agent, budget in sorted(found, key=lambda key: (*order(key[1]), iqm(found[key]))):
            values = found[agent, budget]
            of = [values[[row["split"] == split for row in rows]] for split in SPLITS]
            times = [one["plan_s"] for row in rows for one in row["runs"]
                     if (one["agent"], (one["calls"], one["seconds"])) == (agent, budget)]  # fmt: skip
            lines.append({
                "budget": named(budget), "label": label(agent), "iqm": iqm(values), "interval": Range(interval(values)),
                "splits": [iqm(part) if part.size else None for part in of], "median": np.median(values),
                "without": (values >= WITHOUT).sum(), "size": values.size, "seconds": np.median(times),
            })  # fmt: skip
        over = [(one["simulator_calls"] / one["calls"], label(one["agent"]))
                for row in rows for one in row["runs"] if one["calls"]]  # fmt: skip
        return {
            "lines": lines, "late": LATE, "most": WITHOUT,
            "beyond": max(over) if over and max(over)[0] > 1.02 else None,
            **{split: [row["task"] for row in rows if row["split"] == split] or None for split in SPLITS},
        }  # fmt: skip

    def chart(self, rows: list[Row]) -> Chart:
        found, least = scores(rows), 0.01
        budgets = sorted({budget for _, budget in found if budget != (None, None)}, key=order) or [(None, None)]
        names = list(dict.fromkeys(agent for agent, _ in found))
        panels = []
        for budget in budgets:
            marks: list[Mark] = []
            for y, agent in enumerate(names):
                values = found.get((agent, budget), found.get((agent, (None, None))))
                if values is not None:
                    ink, ends = palette.look(agent).colour, [max(end, least) for end in interval(values)]
                    marker = "o" if (agent, budget) in found else "D"
                    marks += [Line(ends, [y, y], ink, width=5, alpha=0.35),
                              Line([max(iqm(values), least)], [y], ink, marker=marker)]  # fmt: skip
            panels.append(Panel(named(budget), marks, Axis("gap, points", "{:g}", (least, 1.3 * WITHOUT), "log",
                                                           [0.01, 0.1, 1, 10, 100]),
                                Axis(names=[label(agent) for agent in names])))  # fmt: skip
        title = "The gap to the floor: interquartile means and their intervals; diamonds: without a budget"
        return Chart(title, panels, 5, (3.0, 0.42 * len(names) + 1.1), (2.6, 0.4))


def maker(agent: Mapping[str, Any], where: str) -> tuple[Callable[..., Planner], set[str]]:
    """What makes an agent, by the ``planner`` or the ``target`` of its settings, and which of calls, seconds and seed
    it takes; raises UsageError."""
    chosen = {key: value for key, value in agent.items() if key not in ("planner", "target")}
    if "target" not in agent:
        try:
            known = agents.options(str(agent.get("planner")))
        except ValueError as error:
            raise cli.UsageError(f"{where}: {error}") from None
        return partial(agents.make, agent["planner"], **chosen), BUDGETS & set(known)
    from experiments.workloads.module import WorkloadError, named  # PyTorch

    try:
        kind = named(agent["target"])
    except WorkloadError as error:
        raise cli.UsageError(f"{where}: {agent['target']!r} is no 'module:Class' that can be had ({error})") from None
    if not callable(getattr(kind, "plan", None)):
        raise cli.UsageError(f"{where}: {agent['target']} is no class with a method plan(program, machine, limit)")
    return partial(kind, **chosen), BUDGETS & set(inspect.signature(kind).parameters)


def outcome(
    make: Callable[..., Planner], options: Mapping[str, Any], built: Program, machine: Machine, limit: int, bound: float
) -> Row:
    """One run."""
    begin = time.perf_counter()
    planner = make(**options)
    try:
        plan = planner.plan(built, machine, limit)
    except agents.Infeasible:
        plan = None
    seconds = time.perf_counter() - begin
    gap = None
    if plan is not None:
        try:
            gap = round(100 * (simulate(built, plan, machine, limit).overhead - bound), 4)
        except (PlanError, agents.Infeasible) as error:
            raise cli.UsageError(f"the plan of {planner.name!r} for {built.name!r} cannot be run: {error}") from None
    late = "seconds" in options and seconds > LATE[0] * options["seconds"] + LATE[1]
    return {"gap": None if late else gap, "late": late, "plan_s": round(seconds, 3),
            "simulator_calls": planner.simulator_calls}  # fmt: skip


def published(built: Program, machine: Machine, limit: int, bound: float) -> Row:
    """The best heuristic; its time is that of all."""
    found = []
    for name in heuristics():
        warm_up(machine, name)
        found.append(outcome(partial(agents.make, name), {}, built, machine, limit, bound))
    gaps = [one["gap"] for one in found if one["gap"] is not None]
    return {"agent": PUBLISHED, "calls": None, "seconds": None, "seed": 0,
            "gap": min(gaps, default=None), "late": False, "plan_s": round(sum(one["plan_s"] for one in found), 3),
            "simulator_calls": sum(one["simulator_calls"] for one in found)}  # fmt: skip


def committed(task: Row, new: set[str]) -> list[Row]:
    """The runs of this task that come with the package, of other agents; their seconds are of another computer."""
    file = RESULTS / "core.json"
    rows = read_json(file)["rows"] if file.exists() else []
    same = (row for row in rows if all(row[key] == task[key] for key in (*_TASK, "task")))
    return [run for row in same for run in row["runs"] if run["agent"] not in new]


Budget = tuple[float | None, float | None]  # calls, seconds


def scores(rows: Sequence[Row]) -> dict[tuple[str, Budget], NDArray[np.float64]]:
    """Of each agent and budget, float64[tasks, seeds]: gaps in points, ``WITHOUT`` where there is no plan in time."""
    found: dict[tuple[str, Budget], list[list[float]]] = {}
    for i, row in enumerate(rows):
        for one in row["runs"]:
            mine = found.setdefault((one["agent"], (one["calls"], one["seconds"])), [[] for _ in rows])
            mine[i].append(WITHOUT if one["gap"] is None else min(one["gap"], WITHOUT))
    whole = {key: each for key, each in found.items() if all(each)}
    return {key: np.array([each[: min(map(len, of))] for each in of]) for key, of in whole.items()}


def iqm(values: NDArray[np.float64]) -> float:
    """The mean of the middle half of all (Agarwal et al., "Deep RL at the edge of the statistical precipice")."""
    return float(trim_mean(values.ravel(), 0.25))


def interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Of the interquartile mean of float64[tasks, seeds]: tasks are drawn with replacement, and the seeds of each."""
    random, (n, seeds) = np.random.default_rng(0), values.shape
    of_tasks = random.integers(n, size=(DRAWS, n, 1))
    drawn = values[of_tasks, random.integers(seeds, size=(DRAWS, n, seeds))].reshape(DRAWS, -1)
    low, high = np.percentile(trim_mean(drawn, 0.25, axis=1), [(100 - LEVEL) / 2, (100 + LEVEL) / 2])
    return float(low), float(high)


def order(budget: Budget) -> tuple[bool, float, float]:
    """Calls before seconds, the least first."""
    calls, seconds = budget
    return (calls is None, calls or 0.0, seconds or 0.0)


def named(budget: Budget) -> str:
    """A budget for people."""
    calls, seconds = budget
    return f"{calls:,.0f} calls" if calls is not None else f"{seconds:g} s" if seconds is not None else "–"


LABELS = {PUBLISHED: "best published", "without_network": "the same search without the network"}


def label(agent: str) -> str:
    """An agent's name for people."""
    return LABELS.get(agent) or palette.label(agent)
