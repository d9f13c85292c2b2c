"""Baselines on the named tasks of both environments: a random agent, trained agents, planners, and the floor."""

from __future__ import annotations

import math
import time
from statistics import fmean
from typing import Any

from omegaconf import DictConfig, OmegaConf

from agents.floor import floor
from agents.learned.external import ENVIRONMENTS
from envs.tasks import TASKS, load
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row, heuristics, warm_up
from experiments.figures.figure import Figure, Rows
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel, between
from experiments.plotting.palette import INK
from simulator import Machine
from simulator.limits import limit_bytes

RANDOM = "random"
BEST_HEURISTIC = "best heuristic"
FLOOR = "floor"
PLANNERS = ("dqn", "best", BEST_HEURISTIC, FLOOR)
LABELS = {
    RANDOM: "random",
    "maskable_ppo": "MaskablePPO",
    "sb3_dqn": "masked DQN",
    "dqn": "our DQN, zero-shot",
    "best": "`best`",
    BEST_HEURISTIC: "best heuristic",
    FLOOR: "floor",
}
LEAST = 0.03  # per cent; smaller overheads are drawn here


class Baselines(Figure):
    """Overheads of agents and planners on every named task of both environments."""

    name = "baselines"
    on_demand = True  # needs the extra `sb3`
    inks = ("#9a9a9a", "#1f5fa8", "#5b5be0", "#d6336c", "#fb6a4a", "#238b45", INK)
    markers = "xs^oP*|"

    def tasks(self, settings: DictConfig) -> Rows:
        names = figures.choices(settings, "tasks", TASKS, "task ")
        figures.choices(settings, "agents", _algorithms(), "agent ")
        config = cli.to_dict(settings)
        trainings = {
            (entry["family"], name): {key: entry[key] for key in ("steps", "seeds")}
            for entry in config["trainings"]
            for name in figures.choices(OmegaConf.create(entry), "tasks", TASKS, "task ")
        }
        shared = {key: config[key] for key in ("agents", "buffer_size", "learning_starts", "greedy_episodes")}
        planning = [{"task": name, "seeds": config["seeds"], "seconds": config["seconds"]} for name in names]
        acting = [
            {"task": name, "family": family, **{key: config[key][family] for key in ("reward_scale", "episodes")}}
            | {**shared, **trainings.get((family, name), {"steps": 0, "seeds": []})}
            for family in ENVIRONMENTS
            for name in names
        ]
        return acting + planning

    def run(self, task: Row, machine: Machine) -> Row:
        return _act(task) if "family" in task else _plan(task)

    def template_values(self, rows: Rows) -> Row:
        planned = {row["task"]: row["found"] for row in rows if "family" not in row}
        families = []
        for family in ENVIRONMENTS:
            members = [row for name in TASKS for row in rows if (row["task"], row.get("family")) == (name, family)]
            lines = [{**row, "by_agent": row["found"] | planned[row["task"]]} for row in members]
            for line in lines:
                line["cells"] = [_cell(line["by_agent"][agent]) for agent in line["by_agent"]]
            heuristic, learned = (
                [line for line in lines if _mean(line["by_agent"][RANDOM]) < _mean(line["by_agent"][rival])]
                for rival in (BEST_HEURISTIC, "dqn")
            )
            trained = [
                {
                    "label": LABELS[agent],
                    "better": sum(_mean(line["by_agent"][agent]) < _mean(line["by_agent"][RANDOM]) for line in lines),
                    "trained": sum(bool(line["by_agent"][agent]) for line in lines),
                }
                for agent in lines[0]["by_agent"]
                if agent not in (RANDOM, *PLANNERS)
            ]
            families.append(
                {
                    "name": family,
                    "lines": lines,
                    "beats_heuristic": len(heuristic),
                    "beats_dqn": len(learned),
                    "trained": trained,
                    "train_s": sum(row["train_s"] for row in members),
                }
            )
        heads = [LABELS[agent] for agent in families[0]["lines"][0]["by_agent"]]
        return {"families": families, "heads": heads}

    def chart(self, rows: Rows) -> Chart:
        panels = []
        families = self.template_values(rows)["families"]
        for family in families:
            lines = family["lines"]
            marks: list[Mark] = []
            for agent, ink, marker in zip(lines[0]["by_agent"], self.inks, self.markers, strict=False):
                values = [line["by_agent"][agent] for line in lines]
                x = [max(_mean(value), LEAST) if _mean(value) < math.inf else None for value in values]
                y = [i + 0.11 * (len(marks) - (len(lines[0]["by_agent"]) - 1) / 2) for i in range(len(lines))]
                marks.append(Line(x, y, ink, LABELS[agent].strip("`"), marker, "", size=7))
            floors, randoms = (
                [max(_mean(line["by_agent"][agent]), LEAST) for line in lines] for agent in (FLOOR, RANDOM)
            )
            marks.append(between(floors, randoms, range(len(lines)), "#d9d9d9"))
            axis = Axis("overhead, % of the ideal iteration", "{:g}", (LEAST / 1.3, 300), "log", [0.1, 1, 10, 100])
            panels.append(Panel(family["name"], marks, axis, Axis(names=[line["task"] for line in lines])))
        heuristic, learned = (sum(family[f"beats_{rival}"] for family in families) for rival in ("heuristic", "dqn"))
        count = sum(len(family["lines"]) for family in families)
        title = f"Random actions beat the best heuristic on {heuristic} of {count} tasks, our DQN on {learned}"
        note = f"Means over episodes and seeds (planners 3, trainings 1 or 3); below {LEAST:g} %: drawn there."
        return Chart(title, panels, 2, (4.4, 3.9), (1.2, 0.9), 7, note=note)


def _algorithms() -> list[str]:
    """Returns the agents of Stable-Baselines3."""
    return sorted(path.stem for path in (cli.CONFIGS / "algo").glob("*.yaml"))


def _plan(task: Row) -> Row:
    """Returns the overheads in % that planners reach, by planner and seed, and their calls and seconds."""
    named = TASKS[task["task"]]
    program, machine = load(named.program)
    limit = limit_bytes(named.limit, program)
    calls = 2 * len(program.gaps(2**20))
    options: dict[str, dict[str, Any]] = {"dqn": {"calls": calls}, "best": {"seconds": task["seconds"], "jobs": 1}}
    found = {}
    cost = {}
    for name, chosen in options.items():
        warm_up(machine, name)
        results = [figures.evaluate(program, machine, limit, name, **chosen, seed=seed) for seed in task["seeds"]]
        found[name] = [result["overhead_percent"] for result in results]
        cost[name] = {key: [result[key] for result in results] for key in ("plan_s", "simulator_calls")}
    published = {name: figures.evaluate(program, machine, limit, name)["overhead_percent"] for name in heuristics()}
    fastest = min((name for name in published if published[name] is not None), key=lambda name: published[name])
    found[BEST_HEURISTIC] = [published[fastest]]
    found[FLOOR] = [round(100 * floor(program, machine, limit).overhead, 4)]
    return {"found": found, "heuristic": fastest, "calls": calls, "cost": cost}


def _act(task: Row) -> Row:
    """Returns the overheads in % of a random agent's episodes and of greedy policies after a training, by agent."""
    from agents.learned import sb3  # slow to import

    environment = {"id": f"{task['family']}/{task['task']}-v1"}
    env = sb3.make_env(environment)
    random = [random_episode(env, seed) for seed in range(task["episodes"])]
    found = {RANDOM: [overhead for overhead, _ in random]}
    best: dict[str, list[float | None]] = {}
    begin = time.perf_counter()
    for algorithm in task["agents"]:
        settings = cli.to_dict(OmegaConf.load(cli.CONFIGS / "algo" / f"{algorithm}.yaml"))
        settings |= {key: task[key] for key in ("reward_scale", "buffer_size", "learning_starts") if key in settings}
        key = "sb3_dqn" if algorithm == "dqn" else algorithm
        found[key] = []
        best[key] = []
        for seed in task["seeds"]:
            model = sb3.make(algorithm, environment, seed, **settings)
            record = sb3.EpisodeRecorder(algorithm)
            model.learn(task["steps"], record)
            episodes = task["greedy_episodes"] if task["family"] == ENVIRONMENTS[0] else 1
            overheads = [sb3.overhead_of(sb3.run_episode(model, env, 100 + i)) for i in range(episodes)]
            found[key].append(_percent(fmean(overheads)))
            best[key].append(_percent(record.history[-1].best_overhead) if record.history else None)
    return {
        "found": found,
        "best_in_training": best,
        "episode_steps": round(fmean(steps for _, steps in random)),
        "train_s": round(time.perf_counter() - begin, 1),
    }


def random_episode(env: Any, seed: int) -> tuple[float | None, int]:
    """Returns overhead in % (None in a dead end) and steps of an episode of uniformly drawn valid actions."""
    from agents.learned import sb3

    observation, info = env.reset(seed=seed)
    env.action_space.seed(seed)
    steps = 0
    has_ended = False
    while not has_ended:
        action = env.action_space.sample(mask=observation["action_mask"])
        observation, _, terminated, truncated, info = env.step(action)
        has_ended = terminated or truncated
        steps += 1
    return _percent(sb3.overhead_of(info)), steps


def _percent(overhead: float) -> float | None:
    """Returns an overhead in per cent, or None if it is NaN."""
    return None if math.isnan(overhead) else round(100 * overhead, 4)


def _mean(overheads: list[float | None]) -> float:
    """Returns the mean of the overheads, infinite if one is None or none is given."""
    numbers = [value for value in overheads if value is not None]
    return fmean(numbers) if numbers and len(numbers) == len(overheads) else math.inf


def _cell(overheads: list[float | None]) -> str:
    """Formats the mean of some overheads with their range, and the number of dead ends."""
    numbers = [value for value in overheads if value is not None]
    ends = len(overheads) - len(numbers)
    if not numbers:
        return "dead end" if overheads else "–"
    text = f"{fmean(numbers):.2f}"
    if max(numbers) - min(numbers) >= 0.005:
        text += f" ({min(numbers):.2f} to {max(numbers):.2f})"
    return f"{text}, {ends} dead ends" if ends else text
