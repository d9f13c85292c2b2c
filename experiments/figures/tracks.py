"""The tracks of the environments: their tasks, what a plan is measured by, and the rows, ours and others' (README.md of
envs/ says what each track is about).

A row says what an agent has found on a task within a budget, and holds the plan, so that anybody can simulate it again:
``python -m experiments.benchmark suite=tracks check=FILE``. Rows of others lie in experiments/results/tracks/.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import gymnasium
import numpy as np
from omegaconf import DictConfig

from agents.floor import floor
from envs.jobs_task import total_slowdown
from envs.tasks import TASKS
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import attempt, chosen, grouped, integers, robustness
from experiments.figures.figure import Figure, Range
from experiments.figures.suite import LATE, RESULTS, WITHOUT, interval, iqm, maker, named
from experiments.figures.tracks_agents import NOISE, OWN, SCENARIOS, Found, program_of, scenario_of
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel
from simulator import FormatError, JobsDeadlock, Machine, OutOfMemory, Plan, PlanError, simulate
from simulator.files import read_json
from simulator.jobs import without_limit

SUBMITTED = RESULTS / "tracks"  # rows of others
TRACKS = ("one", "many", "offline", "jobs", "noise")
KEYS = {"track": (str,), "task": (str,), "agent": (str,), "calls": (int, None), "seconds": (int, float, None),
        "seed": (int,), "simulator_calls": (int,), "trained": (dict, None), "plan": (list, None)}  # fmt: skip
LEEWAY = 1.05  # of a budget of calls: the last walks end
ITERATIONS, SEEDS = 20, (1, 2, 3)  # under noise; the first iteration is not counted


# ------------------------------------------------------------------------------------------ tasks and measures


def measured(track: str, task: str, plan: list[Any] | None) -> Row:
    """What a plan is worth. Of ``jobs`` a plan is the actions of an episode of GpuMemoryJobs-v0.

    Raises:
        FormatError, PlanError, OutOfMemory: the plan is none of the task's, or does not fit.
    """
    if plan is None:
        return {"overhead": None}
    if track == "jobs":
        return {"slowdown": round(replayed(task, plan), 6)}
    program, machine, limit = program_of(task)
    made = Plan.from_dict({"format": "plan/2", "decisions": plan})
    made.check(program)
    timeline = simulate(program, made, machine, limit)
    if track != "noise":
        return {"overhead": round(timeline.overhead, 6), "iteration_ns": timeline.iteration_ns}
    ran = [robustness.overheads(program, made, machine, limit, NOISE, ITERATIONS, seed)[1:] for seed in SEEDS]
    return {"overhead": round(float(np.mean(ran)), 6), "without_noise": round(timeline.overhead, 6)}


def replayed(task: str, actions: list[Any]) -> float:
    """The total slowdown of an episode of these actions; raises FormatError where one may not be taken, or the episode
    does not end with them."""
    env = gymnasium.make("GpuMemoryJobs-v0", scenario=scenario_of(task))
    env.reset(options={"task": 0})
    over, info = False, {}
    for i, action in enumerate(actions):
        if over or not isinstance(action, int) or not 0 <= action < env.action_space.n:
            raise FormatError(f"plan[{i}]: {action!r} is no action there")
        _, _, over, _, info = env.step(action)
        if info.get("invalid"):
            raise FormatError(f"plan[{i}]: action {action} may not be taken there")
    if not over:
        raise FormatError("plan: the episode does not end with these actions")
    return float(info["slowdown"])


# ------------------------------------------------------------------------------------------ rows of others


def text(row: Mapping[str, Any]) -> str:
    """The bytes that are compared."""
    return json.dumps(row, sort_keys=True)


def rows_in(file: Path) -> Iterator[tuple[str, Row]]:
    """The rows of a file, each with where it stands; those of a result of this figure, too.

    Raises:
        FormatError: it is none.
    """
    found = read_json(file)
    if not isinstance(found, dict) or not isinstance(found.get("rows"), list):
        raise FormatError(f"{file}: expected an object with a list of rows")
    for i, row in enumerate(found["rows"]):
        if not isinstance(row, dict):
            raise FormatError(f"{file}: rows[{i}]: expected an object")
        runs = row["runs"] if isinstance(row.get("runs"), list) else [row]
        for j, one in enumerate(runs):
            yield f"{file}: rows[{i}]" + (f".runs[{j}]" if runs is not row and "runs" in row else ""), one


def check(file: Path) -> int:
    """How many rows of a file there are, after each has been simulated again.

    Raises:
        FormatError: a row is none, or another one than its plan is worth; one sentence.
    """
    count = 0
    for where, row in rows_in(file):
        check_row(where, row, file.parent)
        count += 1
    return count


def check_row(where: str, row: Any, folder: Path) -> None:
    """Raises FormatError unless the row says what its plan is worth."""
    if not isinstance(row, dict) or not set(KEYS) <= set(row):
        missing = sorted(set(KEYS) - set(row)) if isinstance(row, dict) else list(KEYS)
        raise FormatError(f"{where}: a row has the keys {', '.join(KEYS)} and what was measured; missing: {missing}")
    for key, kinds in KEYS.items():
        known = tuple(kind for kind in kinds if kind is not None)
        if not (row[key] is None if row[key] is None and None in kinds else type(row[key]) in known):
            raise FormatError(f"{where}.{key}: {json.dumps(row[key])[:80]} is not of its kind")
    track, task = row["track"], row["task"]
    if track not in TRACKS or task not in (SCENARIOS if track == "jobs" else TASKS):
        raise FormatError(f"{where}: there is no task {json.dumps(task)[:80]} of a track {json.dumps(track)[:80]}")
    if not row["agent"].isprintable() or not 0 < len(row["agent"]) <= 60 or "|" in row["agent"]:
        raise FormatError(f"{where}.agent: expected a name of at most 60 letters")
    if row["calls"] is not None and row["simulator_calls"] > row["calls"] * LEEWAY:
        raise FormatError(
            f"{where}.simulator_calls: {row['simulator_calls']:,} are more than its {row['calls']:,} calls"
        )
    weights = (row["trained"] or {}).get("weights")
    if isinstance(weights, list) and len(weights) == 2:
        path = folder / Path(str(weights[0])).name
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() != weights[1]:
            raise FormatError(f"{where}.trained.weights: {path} has another sha256")
    try:
        found = measured(track, task, row["plan"])
    except (PlanError, OutOfMemory, JobsDeadlock, ValueError) as error:
        raise FormatError(f"{where}.plan: {error}") from None
    again = {**{key: row[key] for key in KEYS}, **found}
    if text(row) != text(again):
        wrong = [key for key in {**row, **again} if key not in row or key not in again or row[key] != again[key]]
        said, is_so = ({key: kept.get(key) for key in wrong} for kept in (row, again))
        raise FormatError(f"{where}: it says {json.dumps(said)[:200]}, and its plan is worth {json.dumps(is_so)}")


# ------------------------------------------------------------------------------------------ our own rows


def tasks(settings: DictConfig) -> list[Row]:
    """Of each track the floors, and one per agent; raises UsageError where a setting is wrong."""
    config, out = cli.plain(settings), list[Row]()
    seeds, own = integers(settings, "seeds", 0), config.get("agents")
    for track in chosen(settings, "tracks", TRACKS, "track "):
        about = config[track]
        chosen(DictConfig({f"{track}.tasks": about["tasks"]}), f"{track}.tasks",
               SCENARIOS if track == "jobs" else TASKS, "task ")  # fmt: skip
        shared = {"track": track, "tasks": about["tasks"]}
        names = about["agents"] if own is None or track in ("offline", "jobs") else list(own)
        out.append({**shared, "agent": FLOOR})
        for name in names:
            takes = budgets_of(name, f"figure.{track}.agents")
            budgets = {key: about.get(key) or [] for key in ("calls", "seconds") if key in takes}
            out.append({**shared, "agent": name, **budgets, "seeds": seeds if "seed" in takes else [0]})
    return out


def budgets_of(name: str, where: str) -> set[str]:
    """What an agent takes; raises UsageError where there is none."""
    return OWN[name][1] if name in OWN else maker(_settings(name), where)[1]


def _settings(name: str) -> Row:
    return {"target": name} if ":" in name else {"planner": name}


def run(task: Row, machine: Machine) -> Row:
    """``runs``: the rows of an agent, as anybody's; or ``floors``: of each task what no plan is below, of ``jobs`` the
    total slowdown with unlimited memory."""
    if task["agent"] == FLOOR:
        if task["track"] == "jobs":
            scenarios = {name: scenario_of(name) for name in task["tasks"]}
            unlimited = {name: without_limit(one.jobs, one.machine) for name, one in scenarios.items()}
            return {"runs": [], "floors": {name: round(total_slowdown(one, unlimited[name]), 6)
                                           for name, one in scenarios.items()}}  # fmt: skip
        return {"runs": [], "floors": {name: floor(*program_of(name)).overhead for name in task["tasks"]}}
    budgets: list[Row] = [{key: value} for key in ("calls", "seconds") for value in task.get(key, [])] or [{}]
    runs = []
    for name in task["tasks"]:
        if "seconds" in task:
            found_by(task["agent"], name, {"calls": 300} if "calls" in task else {}, 0)  # compiles: not counted
        for budget in budgets:
            for seed in task["seeds"]:
                begin = time.perf_counter()
                plan, calls, trained = found_by(task["agent"], name, budget, seed)
                spent = time.perf_counter() - begin
                if spent > LATE[0] * budget.get("seconds", np.inf) + LATE[1]:
                    plan = None
                if isinstance(plan, Plan):
                    plan = plan.to_dict()["decisions"]
                runs.append({
                    "track": task["track"], "task": name, "agent": task["agent"], "calls": budget.get("calls"),
                    "seconds": budget.get("seconds"), "seed": seed, "simulator_calls": calls, "trained": trained,
                    "plan": plan, **measured(task["track"], name, plan),
                })  # fmt: skip
    return {"runs": runs}


def found_by(agent: str, task: str, budget: Row, seed: int) -> Found:
    """What an agent finds on a task."""
    if agent in OWN:
        return OWN[agent][0](task, budget, seed)
    make, takes = maker(_settings(agent), "agents")
    planner = make(**budget, **({"seed": seed} if "seed" in takes else {}))
    plan = attempt(planner, *program_of(task))
    return plan, planner.simulator_calls, getattr(planner, "trained", TRAINED.get(agent))


FLOOR = "floor"
TRAINED = {name: {"on": "400 programs of other families"} for name in ("policy", "policy_search")}


# ------------------------------------------------------------------------------------------ for people


def numbers(rows: list[Row]) -> Row:
    """Of every track, agent and budget the score over tasks and seeds; rows of others, too."""
    tracks = grouped(rows, "track")
    lines, notes = [], []
    for track, own in tracks.items():
        floors = next((row["floors"] for row in own if "floors" in row), {})
        notes.append({"track": track, "tasks": list(floors), "unit": UNITS.get(track, "per cent of overhead"),
                      "floors": [f"{_shown(track, value)}" for value in floors.values()]})  # fmt: skip
        for key, values in scores(track, [*own, *submitted(track)], floors).items():
            agent, calls, seconds = key
            said = values["runs"]
            lines.append({
                "track": track, "agent": agent, "budget": named((calls, seconds)), "score": iqm(values["score"]),
                "interval": Range(interval(values["score"])), "trained": _trained(said[0]["trained"]),
                "calls": round(fmean(run["simulator_calls"] for run in said)), "size": values["score"].shape,
                "each": " / ".join("–" if v is None else _shown(track, v) for v in values["each"]),
            })  # fmt: skip
    order = {track: i for i, track in enumerate(TRACKS)}
    lines.sort(key=lambda line: (order[line["track"]], line["score"]))
    return {"lines": lines, "of": notes, "without": WITHOUT, "seeds": max(line["size"][1] for line in lines),
            "jitter": NOISE.jitter, "tenant": NOISE.tenant, "iterations": ITERATIONS - 1}  # fmt: skip


UNITS = {"jobs": "total slowdown"}


def _shown(track: str, value: float) -> str:
    return f"{value:.2f}" if track == "jobs" else f"{100 * value:.2f}"


def _trained(about: Row | None) -> str:
    """What an agent was trained with, for people."""
    return "–" if about is None else ", ".join(
        f"{value:,} {key}" if isinstance(value, int) else f"{key} {value}" for key, value in about.items()
        if key != "weights"
    ).replace("_", " ")  # fmt: skip


def submitted(track: str) -> list[Row]:
    """Rows of others that are of a track; what is wrong with one is found by ``check``."""
    return [{"runs": [row]} for file in sorted(SUBMITTED.glob("*.json")) for _, row in rows_in(file)
            if row.get("track") == track]  # fmt: skip


def scores(track: str, rows: list[Row], floors: Mapping[str, float]) -> dict[tuple[Any, ...], Row]:
    """By agent and budget, where there is a run of every task: ``score`` float64[tasks, seeds], points above the floor
    or total slowdowns; ``each``: the mean on each task, None where one has no plan; ``runs``."""
    found: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for one in (run for row in rows for run in row.get("runs", ())):
        key = one["agent"], one["calls"], one["seconds"]
        found.setdefault(key, {}).setdefault(one["task"], []).append(one)
    out = {}
    for key, by_task in found.items():
        if set(by_task) >= set(floors):
            runs = [by_task[name] for name in floors]
            least = min(map(len, runs))
            values = [[_value(track, one, floors[one["task"]]) for one in of[:least]] for of in runs]
            each = [
                None if any(_result(one) is None for one in of) else fmean(_result(one) for one in of) for of in runs
            ]
            out[key] = {"score": np.array(values), "each": each, "runs": [one for of in runs for one in of]}
    return out


def _result(run: Row) -> Any:
    return run["slowdown"] if "slowdown" in run else run["overhead"]


def _value(track: str, run: Row, least: float) -> float:
    result = _result(run)
    if track == "jobs":
        return WITHOUT if result is None else float(result)
    return WITHOUT if result is None else min(100 * (result - least), WITHOUT)


def chart(rows: list[Row]) -> Chart:
    """A panel per track: each agent's interquartile mean and its interval."""
    panels, most = [], 1
    lines = grouped(numbers(rows)["lines"], "track")
    for track, every in lines.items():
        marks = list[Mark]()
        for y, line in enumerate(every):
            low, high = (max(end, LEAST) for end in line["interval"].values)
            marks += [Line([low, high], [y, y], INK, width=5, alpha=0.3),
                      Line([max(line["score"], LEAST)], [y], INK, marker="o")]  # fmt: skip
        names = [line["agent"] + ("" if line["budget"] == "–" else f", {line['budget']}") for line in every]
        jobs = track == "jobs"
        x = Axis("points above the floor", "{:g}", scale="log", ticks=[0.1, 0.3, 1, 3, 10, 30, 100])
        x = Axis("total slowdown", "{:g}") if jobs else x
        panels.append(Panel(track, marks, x, Axis(names=names)))
        most = max(most, len(names))
    return Chart("The tracks: interquartile means and their intervals", panels, 2, (4.2, 0.26 * most + 1.1), (2.6, 0.4))


INK, LEAST = "#1f5fa8", 0.01
FIGURE = Figure("tracks", tasks, run, numbers, chart, on_demand=True)
