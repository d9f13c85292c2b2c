"""Core suite of the benchmark and the test split: certified gaps of agents.

A task is a program (pinned by its fingerprint), a machine and a limit. It belongs to the train split if the bundled
policy was trained on its family, otherwise to the test split. A run is one agent on one task with a budget (simulator
calls or seconds) and a seed. Its score is the certified gap: the overhead of its plan minus the certified lower bound,
in percentage points, so no plan scores below 0. Agents are planners of ``agents`` or custom classes ("module:Class").

The test split scores planners by planning time, on networks that the policy was not trained on.
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
from experiments.common.report import Row, external_factory, heuristics, warm_up
from experiments.figures import network, program, share_of_peak
from experiments.figures.figure import Figure, Range, Rows
from experiments.plotting import palette
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel
from simulator import Machine, Program
from simulator.compiled.engine import simulate
from simulator.files import read_json
from simulator.plan import PlanError

PUBLISHED = "published"  # the best of all heuristics, as one agent without a budget
WITHOUT = 100.0  # points for a run without a plan in time, and the maximum score
LATE = 1.25, 0.1  # tolerance of a time budget: a factor, plus seconds
BUDGETS = {"calls", "seconds", "seed"}  # budget options that an agent may accept
DRAWS = 2_000
NO_NETWORK = "without_network"
RESULTS = Path(__file__).resolve().parents[1] / "results"
_TASK = {"workload", "machine", "limit", "split", "fingerprint"}


class Core(Figure):
    """Core suite of the benchmark: named tasks, agents with equal budgets, and scores."""

    name = "core"
    splits = ("train", "test")
    needs_all_cores = True

    def tasks(self, settings: DictConfig) -> Rows:
        config = cli.to_dict(settings)
        tasks: Rows = []
        shared = {key: config[key] for key in ("agents", "calls", "seconds", "seeds")}
        for name, agent in config["agents"].items():
            if agent.get("planner") != PUBLISHED:
                planner_factory(agent, f"figure.agents.{name}")
        for name, task in config["tasks"].items():
            if set(task) != _TASK or task["split"] not in self.splits:
                raise cli.UsageError(
                    f"figure.tasks.{name}: expected {', '.join(sorted(_TASK))}, split train or test, got {dict(task)}"
                )
            network(task["workload"], f"tasks.{name}.workload")
            share_of_peak(task["limit"], f"tasks.{name}.limit")
            tasks.append({"task": name, **task, **shared, "beside": bool(config.get("beside"))})
        return tasks

    def run(self, task: Row, machine: Machine) -> Row:
        machine = Machine.load(task["machine"])
        built = program(task["workload"], machine)
        if built.fingerprint[: len(task["fingerprint"])] != task["fingerprint"]:
            raise cli.UsageError(
                f"figure.tasks.{task['task']}.fingerprint: the suite uses {task['fingerprint']}, but this PyTorch "
                f"captures {built.fingerprint[:12]}; install the PyTorch of the suite"
            )
        limit = int(task["limit"] * built.peak_bytes)
        begin = time.perf_counter()
        bound = floor(built, machine, limit)
        floor_s = time.perf_counter() - begin
        runs: Rows = []
        for name, agent in task["agents"].items():
            entry = f"figure.agents.{name}"
            if agent.get("planner") == PUBLISHED:
                runs.append(best_published(built, machine, limit, bound.overhead))
                continue
            make, accepted = planner_factory(agent, entry)
            budgets: list[dict[str, float]] = [
                {key: value} for key in ("calls", "seconds") if key in accepted for value in task[key]
            ] or [{}]
            run_agent(make, budgets[0], built, machine, limit, bound.overhead)  # warm-up, not timed
            for budget in budgets:
                for seed in task["seeds"] if "seed" in accepted else [0]:
                    options = {**budget, **({"seed": seed} if "seed" in accepted else {})}
                    result = run_agent(make, options, built, machine, limit, bound.overhead)
                    runs.append({"agent": name, "calls": None, "seconds": None, **budget, "seed": seed, **result})
        if task["beside"]:
            runs += bundled_runs(task, set(task["agents"]))
        return {
            "kernels": len(built.kernels),
            "limit_bytes": limit,
            "floor_percent": round(100 * bound.overhead, 4),
            "floor_s": round(floor_s, 2),
            "runs": runs,
        }

    def template_values(self, rows: Rows) -> Row:
        by_key = scores(rows)
        lines = []
        for agent, budget in sorted(by_key, key=lambda key: (*sort_key(key[1]), iqm(by_key[key]))):
            gaps = by_key[agent, budget]
            parts = [gaps[[row["split"] == split for row in rows]] for split in self.splits]
            lines.append(
                {
                    "budget": describe(budget),
                    "label": label(agent),
                    "iqm": iqm(gaps),
                    "interval": Range(interval(gaps)),
                    "splits": [iqm(part) if part.size else None for part in parts],
                    "without": (gaps >= WITHOUT).sum(),
                }
            )
        return {"lines": lines, "late": LATE, "most": WITHOUT}

    def chart(self, rows: Rows) -> Chart:
        by_key = scores(rows)
        least = 0.01
        budgets = sorted({budget for _, budget in by_key if budget != (None, None)}, key=sort_key) or [(None, None)]
        gaps_by_agent = {
            agent: [iqm(gaps) for (name, _), gaps in by_key.items() if name == agent] for agent, _ in by_key
        }
        names = sorted(gaps_by_agent, key=lambda agent: np.mean(gaps_by_agent[agent]))
        leaders = [min(names, key=lambda n: iqm(by_key[n, b]) if (n, b) in by_key else np.inf) for b in budgets]
        panels = []
        for budget in budgets:
            marks: list[Mark] = []
            for y, agent in enumerate(names):
                gaps = by_key.get((agent, budget), by_key.get((agent, (None, None))))
                if gaps is not None:
                    ink = palette.look(agent).color
                    ends = [max(end, least) for end in interval(gaps)]
                    marker = "o" if (agent, budget) in by_key else "D"
                    marks += [
                        Line(ends, [y, y], ink, width=5, alpha=0.35),
                        Line([max(iqm(gaps), least)], [y], ink, marker=marker),
                    ]
            panels.append(
                Panel(
                    describe(budget),
                    marks,
                    Axis("gap, points", "{:g}", (least, 1.3 * WITHOUT), "log", [0.01, 0.1, 1, 10, 100]),
                    Axis(names=[label(agent) for agent in names]),
                )
            )
        first = max(leaders, key=leaders.count)
        title = f"{label(first)}: smallest gap to the floor at {leaders.count(first)} of {len(budgets)} budgets"
        note = (
            f"Dots: interquartile means, {len(rows)} tasks, {max(g.shape[1] for g in by_key.values())} seeds; "
            "bars: 95 % bootstrap intervals; diamonds: without a budget."
        )
        return Chart(title, panels, 3, (2.5, 0.34 * len(names) + 0.9), (2.3, 0.7), note=note)


def planner_factory(agent: Mapping[str, Any], entry: str) -> tuple[Callable[..., Planner], set[str]]:
    """Returns a factory of the agent's ``planner`` or ``target``, and its budget options (calls, seconds, seed).

    Raises:
        UsageError: The planner or the target is invalid.
    """
    options = {key: value for key, value in agent.items() if key not in ("planner", "target")}
    if "target" not in agent:
        try:
            accepted = agents.options(str(agent.get("planner")))
        except ValueError as error:
            raise cli.UsageError(f"{entry}: {error}") from None
        return partial(agents.make, agent["planner"], **options), BUDGETS & set(accepted)
    try:
        factory = external_factory(str(agent["target"]))
    except ValueError as error:  # UsageError or FormatError
        raise cli.UsageError(f"{entry}: {error}") from None
    return partial(factory, **options), BUDGETS & set(inspect.signature(factory).parameters)


def run_agent(
    make: Callable[..., Planner], options: Mapping[str, Any], built: Program, machine: Machine, limit: int, bound: float
) -> Row:
    """Runs one agent on one task and returns its result.

    Raises:
        UsageError: The planner returns a plan that is invalid or does not fit.
    """
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
            raise cli.UsageError(
                f"the plan of {planner.name!r} for {built.name!r} is invalid: {error}; correct the planner"
            ) from None
    late = "seconds" in options and seconds > LATE[0] * options["seconds"] + LATE[1]
    return {
        "gap": None if late else gap,
        "late": late,
        "plan_s": round(seconds, 3),
        "simulator_calls": planner.simulator_calls,
    }


def best_published(built: Program, machine: Machine, limit: int, bound: float) -> Row:
    """Returns the best heuristic's result; its time is the total of all heuristics."""
    runs = []
    for name in heuristics():
        warm_up(machine, name)
        runs.append(run_agent(partial(agents.make, name), {}, built, machine, limit, bound))
    gaps = [run["gap"] for run in runs if run["gap"] is not None]
    return {
        "agent": PUBLISHED,
        "calls": None,
        "seconds": None,
        "seed": 0,
        "gap": min(gaps, default=None),
        "late": False,
        "plan_s": round(sum(run["plan_s"] for run in runs), 3),
        "simulator_calls": sum(run["simulator_calls"] for run in runs),
    }


def bundled_runs(task: Row, excluded: set[str]) -> Rows:
    """Returns the bundled runs of this task by other agents; their seconds are from another computer."""
    file = RESULTS / "core.json"
    rows = read_json(file)["rows"] if file.exists() else []
    matching = (row for row in rows if all(row[key] == task[key] for key in (*_TASK, "task")))
    return [run for row in matching for run in row["runs"] if run["agent"] not in excluded]


Budget = tuple[float | None, float | None]  # calls, seconds


def scores(rows: Sequence[Row]) -> dict[tuple[str, Budget], NDArray[np.float64]]:
    """Returns the gaps in points by agent and budget, float64[tasks, seeds].

    Runs without a plan in time score ``WITHOUT``.
    """
    by_key: dict[tuple[str, Budget], list[list[float]]] = {}
    for i, row in enumerate(rows):
        for run in row["runs"]:
            by_task = by_key.setdefault((run["agent"], (run["calls"], run["seconds"])), [[] for _ in rows])
            by_task[i].append(WITHOUT if run["gap"] is None else min(run["gap"], WITHOUT))
    full = {key: tasks for key, tasks in by_key.items() if all(tasks)}
    return {key: np.array([gaps[: min(map(len, tasks))] for gaps in tasks]) for key, tasks in full.items()}


def iqm(values: NDArray[np.float64]) -> float:
    """Returns the interquartile mean (Agarwal et al., "Deep RL at the edge of the statistical precipice")."""
    return float(trim_mean(values.ravel(), 0.25))


def interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Returns the stratified bootstrap interval of the interquartile mean of float64[tasks, seeds].

    Tasks are drawn with replacement, and so are the seeds of each task.
    """
    rng = np.random.default_rng(0)
    (n, seeds) = values.shape
    tasks = rng.integers(n, size=(DRAWS, n, 1))
    samples = values[tasks, rng.integers(seeds, size=(DRAWS, n, seeds))].reshape(DRAWS, -1)
    low, high = np.percentile(trim_mean(samples, 0.25, axis=1), [2.5, 97.5])
    return float(low), float(high)


def sort_key(budget: Budget) -> tuple[bool, float, float]:
    """Returns the sort key of a budget: calls before seconds, smallest first."""
    calls, seconds = budget
    return (calls is None, calls or 0.0, seconds or 0.0)


def describe(budget: Budget) -> str:
    """Formats a budget."""
    calls, seconds = budget
    return f"{calls:,.0f} calls" if calls is not None else f"{seconds:g} s" if seconds is not None else "–"


def label(agent: str) -> str:
    """Returns an agent's display name."""
    labels = {PUBLISHED: "best published", NO_NETWORK: "the same search without the network"}
    return labels.get(agent) or palette.label(agent)
