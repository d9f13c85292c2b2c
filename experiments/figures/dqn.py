"""Trainings of the DQN paper's Algorithm 1 on one task."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap
from typing import TYPE_CHECKING

import numpy as np
from omegaconf import DictConfig, OmegaConf

from agents.learned.dqn_config import PaperConfig
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import group_by, network, program, share_of_peak
from experiments.figures.figure import Figure, Rows
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel, Rule
from simulator import Machine
from simulator.limits import limit_bytes

if TYPE_CHECKING:
    from agents.learned.dqn_paper import Trainer


SAME = 1e-6  # overheads that differ by less count as equal


class Paper(Figure):
    """Trainings of the DQN paper's plain form on one task: as printed, tuned, and fine-tuned from a smaller network."""

    name = "dqn_paper"
    on_demand = True
    parts = 10  # of a training, whose mean overheads are stored
    keys = ("network", "episodes", "tuned", "agent", "small", "small_episodes")  # of a line in the settings
    kinds = ("printed", "returns", "equation5", "scratch", "pretrained", "walks", "other")
    inks = ("#d6336c", "#1f5fa8", "#238b45", "#f16913", "#8e5bd0", "#777777")

    def tasks(self, settings: DictConfig) -> Rows:
        config = cli.to_dict(settings)
        for name, line in config["lines"].items():
            if not isinstance(line, dict) or not {"network", "episodes"} <= set(line) <= set(self.keys):
                raise cli.UsageError(
                    f"figure.lines.{name}: expected network, episodes and some of {', '.join(self.keys)}"
                )
            for key in ("network", "small"):
                network(str(line.get(key, line["network"])), f"lines.{name}.{key}")
        limit = share_of_peak(config["limit"])
        return [
            {"line": name, "seed": seed, "limit": limit, **line}
            for name, line in config["lines"].items()
            for seed in config["seeds"]
        ]

    def run(self, task: Row, machine: Machine) -> Row:
        config = paper_config(task)
        small_calls = 0
        with TemporaryDirectory() as folder:
            if "small" in task:
                small_config = paper_config({**task, "agent": {}, "episodes": task["small_episodes"]})
                small_trainer, _ = train(task["small"], task, machine, small_config)
                small_trainer.save(Path(folder) / "checkpoint.pt")
                small_calls = small_trainer.simulator_calls
                config = replace(config, weights=folder)
            trainer, initial = train(task["network"], task, machine, config)
        overheads = [100 * episode.overhead for episode in trainer.history]
        return {
            **initial,
            "greedy": percent(trainer.greedy_overhead()),
            "q_after": trainer.first_value(),
            "best": percent(trainer.best_overhead),
            "mean": round(float(np.mean(overheads)), 4),
            "parts": [round(float(part.mean()), 4) for part in np.array_split(overheads, self.parts)],
            "updates": trainer.updates,
            "steps": float(np.mean([e.steps for e in trainer.history[-self.parts :]])),
            "simulator_calls": trainer.simulator_calls,
            "small_simulator_calls": small_calls,
        }

    def template_values(self, rows: Rows) -> Row:
        lines = []
        for name, runs in group_by(rows, "line").items():
            learns = runs[0]["updates"] > 0
            lines.append(
                {
                    "label": name,
                    **{key: runs[0][key] for key in ("network", "episodes")},
                    "greedy": _cell(runs, "greedy", learns),
                    "best": _cell(runs, "best"),
                    "last": f"{np.mean([run['parts'][-1] for run in runs]):.2f}",
                    "calls": round(np.mean([run["simulator_calls"] + run["small_simulator_calls"] for run in runs])),
                }
            )
        greedy = {key: [run["greedy"] for run in rows if training_kind(run) == key] for key in self.kinds}
        walks = [run["mean"] for run in rows if training_kind(run) == "walks"]
        best = {key: [run["best"] for run in rows if training_kind(run) == key] for key in ("walks", "printed")}
        chance = float(np.mean(walks)) if walks else None
        below = {}
        for key, values in greedy.items():
            below[key] = None if chance is None or not values else sum(v is not None and v < chance for v in values)
        pairs = list(zip(greedy["pretrained"], greedy["scratch"], strict=False))
        return {
            "lines": lines,
            "chance": chance,
            "below": below,
            "seeds": len({row["seed"] for row in rows}),
            "solved_by_walks": sum(value <= 100 * SAME for value in best["walks"]) if walks else None,
            "found": best["printed"],
            "fine_tuned": sum(a is not None and (b is None or a < b) for a, b in pairs),
            "not_fine_tuned": sum(b is not None and (a is None or a > b) for a, b in pairs),
            "pairs": len(pairs),
        }

    def chart(self, rows: Rows) -> Chart:
        values = self.template_values(rows)
        panels = []
        for (name, runs), ink in zip(group_by(rows, "line").items(), cycle(self.inks)):
            parts = np.array([run["parts"] for run in runs])
            middle = (np.arange(self.parts) + 0.5) * runs[0]["episodes"] / self.parts
            marks: list[Mark] = [
                Line(middle, parts.mean(0), ink, marker="o", size=4, band=(parts.min(0), parts.max(0)))
            ]
            if values["chance"] is not None:
                marks.append(Rule(values["chance"], horizontal=True, label="mean of uniform random walks"))
            axes = [Axis("episode", limits=(0, None)), Axis("overhead of episodes, %", limits=(0, 50))]
            panels.append(Panel("\n".join(wrap(name, 28)), marks, *axes))
        below = values["below"]
        shown = {"as printed": below["printed"], "whole returns": below["returns"], "equation 5": below["equation5"]}
        seeds = values["seeds"]
        counts = [f"{name} {count}/{seeds}" for name, count in shown.items() if count is not None]
        title = f"Seeds below random walks: {', '.join(counts) or 'not compared'}"
        network, limit = (figures.label(rows[0]["network"]), rows[0]["limit"])
        note = f"{network} in {limit:.0%} of its peak. Means of tenths of a training; bands: least and largest seed."
        return Chart(title, panels, 3, (3.3, 2.7), (0.0, 1.0), note=note)


def training_kind(task: Row) -> str:
    """Returns which of ``Paper.kinds`` a training is, by its settings."""
    if task["updates"] == 0:
        return "walks"
    if "small" in task:
        return "pretrained"
    changes = task.get("agent", {})
    if not task.get("tuned"):
        return "other" if changes else "printed"
    if "n_step" in changes:
        return "equation5"
    return "scratch" if "epsilon_start" in changes else "other" if changes else "returns"


def paper_config(task: Row) -> PaperConfig:
    """Returns the settings of ``agent=dqn_paper`` or ``agent=dqn_paper_tuned``, with the task's changes."""
    file = cli.CONFIGS / "agent" / ("dqn_paper_tuned.yaml" if task.get("tuned") else "dqn_paper.yaml")
    changes = {"mode": "swap", "episodes": task["episodes"], **task.get("agent", {})}
    return cli.dataclass_from_config(PaperConfig, OmegaConf.merge(OmegaConf.load(file), changes), "agent")


def train(name: str, task: Row, machine: Machine, config: PaperConfig) -> tuple[Trainer, Row]:
    """Trains on the network ``name``; returns the trainer, the initial greedy overhead and first Q-value."""
    from agents.learned.dqn_paper import Trainer  # PyTorch

    built = program(name, machine)
    trainer = Trainer(built, machine, limit_bytes(task["limit"], built), config, task["seed"])
    initial = {"greedy_before": percent(trainer.greedy_overhead()), "q_before": trainer.first_value()}
    while not trainer.done:
        trainer.step()
    return trainer, initial


def percent(overhead: float) -> float | None:
    """Converts an overhead to per cent; None for a dead end."""
    return None if math.isnan(overhead) else round(100 * overhead, 4)


def _cell(runs: Rows, key: str, has_value: bool = True) -> str:
    return ", ".join("none" if run[key] is None else f"{run[key]:.2f}" for run in runs) if has_value else "–"
