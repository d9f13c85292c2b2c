"""What the benchmark's suites share (core.py, large.py): named tasks, agents on them within equal budgets, scores.

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
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf
from scipy.stats import trim_mean

import agents
from agents.floor import floor
from agents.planner import Planner
from experiments.common import cli
from experiments.common.report import Row, heuristics, warm_up
from experiments.figures import network, program
from experiments.plotting import palette
from experiments.plotting.plots import panel_grid
from simulator import Machine, Program
from simulator.compiled.engine import simulate
from simulator.files import FormatError, load_json
from simulator.plan import PlanError

PUBLISHED = "published"  # the best of all heuristics, as one agent without a budget
WITHOUT = 100.0  # points, of no plan or one that is too late, and the most that a run scores
LATE = 1.25, 0.1  # a plan counts that took at most so many times the seconds, and so many beyond
SPLITS = ("train", "test")
BUDGETS = {"calls", "seconds", "seed"}  # what an agent may take
DRAWS, LEVEL = 2_000, 95
RESULTS = Path(__file__).resolve().parents[1] / "results"
_TASK = {"workload", "machine", "limit", "split", "fingerprint"}


def tasks(settings: DictConfig) -> list[Row]:
    """One per task of the suite; raises UsageError where a setting is wrong."""
    config = cli.plain(settings)
    out: list[Row] = []
    shared = {key: config[key] for key in ("agents", "calls", "seconds", "seeds")}
    for name, agent in config["agents"].items():
        if agent.get("planner") != PUBLISHED:
            maker(agent, f"figure.agents.{name}")
    for name, task in config["tasks"].items():
        if set(task) != _TASK or task["split"] not in SPLITS:
            raise cli.UsageError(f"figure.tasks.{name}: expected {', '.join(sorted(_TASK))}, of split train or test")
        network(task["workload"], f"tasks.{name}.workload")
        if not 0 < task["limit"] <= 1:
            raise cli.UsageError(f"figure.tasks.{name}.limit: expected a share of the peak, got {task['limit']!r}")
        out.append({"task": name, **task, **shared, "beside": bool(config.get("beside"))})
    return out


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


def run(task: Row, machine: Machine) -> Row:
    """Every run of a task: agent, budget (of neither: None), seed, gap in points (None: no plan, or too late)."""
    machine = Machine.load(task["machine"])
    built = program(task["workload"], machine)
    if built.fingerprint[: len(task["fingerprint"])] != task["fingerprint"]:
        raise cli.UsageError(
            f"figure.tasks.{task['task']}.fingerprint: the suite is of {task['fingerprint']}, this PyTorch captures "
            f"{built.fingerprint[:12]}; scores of different programs cannot be compared"
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
        budgets: list[dict[str, float]] = [{key: value} for key in ("calls", "seconds") if key in takes
                                           for value in task[key]] or [{}]  # fmt: skip
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


def outcome(
    make: Callable[..., Planner], options: Mapping[str, Any], built: Program, machine: Machine, limit: int, bound: float
) -> Row:  # fmt: skip
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
    found: list[Row] = []
    for file in RESULTS.glob("*.json"):
        try:
            rows = load_json(file, lambda data: data).get("rows", [])
        except (FormatError, AttributeError):
            continue
        for row in rows if isinstance(rows, list) else ():
            same = isinstance(row, dict) and all(row.get(key) == task[key] for key in (*_TASK, "task"))
            found += [run for run in row["runs"] if run["agent"] not in new] if same and "runs" in row else []
    return found


# ------------------------------------------------------------------------------------------ for people

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


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """A line per budget and agent: interquartile means of all tasks and of each split, the best of a budget first."""
    found = scores(rows)
    heads = ["budget", "agent", "gap in points: IQM", f"{LEVEL} %", *SPLITS, "median", "no plan in time", "s, median"]
    cells = []
    for agent, budget in sorted(found, key=lambda key: (*order(key[1]), iqm(found[key]))):
        values = found[agent, budget]
        low, high = interval(values)
        of = [values[[row["split"] == split for row in rows]] for split in SPLITS]
        times = [one["plan_s"] for row in rows for one in row["runs"]
                 if (one["agent"], (one["calls"], one["seconds"])) == (agent, budget)]  # fmt: skip
        cells.append([named(budget), label(agent), f"{iqm(values):.2f}", f"{low:.2f} to {high:.2f}",
                      *(f"{iqm(part):.2f}" if part.size else "–" for part in of), f"{np.median(values):.2f}",
                      f"{(values >= WITHOUT).sum()} of {values.size}", f"{np.median(times):.2g}"])  # fmt: skip
    return heads, cells


def notes(rows: list[Row]) -> list[str]:
    """What a score is, and the tasks."""
    out = [f"No plan, or one later than {LATE[0]:g} times its seconds and {LATE[1]:g} s, scores {WITHOUT:g} points."]
    listed = {split: ", ".join(row["task"] for row in rows if row["split"] == split) for split in SPLITS}
    out.append(f"Tasks, {'; '.join(f'{split}: {names}' for split, names in listed.items() if names)}.")
    over = [
        (one["simulator_calls"] / one["calls"], one["agent"]) for row in rows for one in row["runs"] if one["calls"]
    ]
    if over and max(over)[0] > 1.02:
        out.append(f"The most calls beyond a budget: {max(over)[0]:.2f} times, by {label(max(over)[1])}.")
    if older := [row["task"] for row in rows if row["fingerprint"] not in _pins(row["task"], row["fingerprint"])]:
        out.append(f"Of programs with other kernel times than captures have now, by one roofline: {', '.join(older)}.")
    return out


def _pins(task: str, own: str) -> set[str]:
    """Fingerprints of a task in the suites as they are now; its own where none has it."""
    suites = (OmegaConf.load(cli.CONFIGS / "figure" / f"{name}.yaml").tasks for name in ("core", "large"))
    return {str(tasks[task].fingerprint) for tasks in suites if task in tasks} or {own}


def draw(rows: list[Row], path: Path) -> None:
    """A panel per budget: an agent's interquartile mean and its interval; the best published as a line."""
    found = scores(rows)
    budgets = sorted({budget for _, budget in found if budget != (None, None)}, key=order)
    names = list(dict.fromkeys(agent for agent, _ in found))
    least = 0.01
    with panel_grid(path, max(len(budgets), 1), 5, (3.0, 0.42 * len(names) + 1.1), (2.6, 0.4)) as (panels, _):
        for panel, budget in zip(panels, budgets or [(None, None)], strict=True):
            for y, agent in enumerate(names):
                values = found.get((agent, budget), found.get((agent, (None, None))))
                if values is not None:
                    _mark(panel, y, values, palette.look(agent).colour, least, (agent, budget) in found)
            panel.set(title=named(budget), xscale="log", xlabel="gap, points", xlim=(least, 1.3 * WITHOUT))
            panel.set_ylim(len(names) - 0.5, -0.5)
            panel.set_yticks(range(len(names)), [label(a) for a in names] if panel is panels[0] else [])
            panel.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            panel.xaxis.set_minor_formatter(FuncFormatter(lambda *_: ""))


def _mark(panel: Axes, y: int, values: NDArray[np.float64], colour: str, least: float, budgeted: bool) -> None:
    low, high = interval(values)
    panel.plot(
        [max(low, least), max(high, least)], [y, y], color=colour, linewidth=5, alpha=0.35, solid_capstyle="butt"
    )
    panel.plot(max(iqm(values), least), y, "o" if budgeted else "D", color=colour, markersize=6)
