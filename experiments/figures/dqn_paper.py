"""Trainings of the DQN paper's plain form on one task: as printed, tuned, and fine-tuned from a smaller network."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
from omegaconf import DictConfig, OmegaConf

from agents.learned.dqn_config import PaperConfig
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import grouped, network, program, share_of_peak
from experiments.figures.figure import Figure
from experiments.plotting.charts import Axis, Chart, Line, Panel
from simulator.limits import limit_bytes
from simulator.machine import Machine

if TYPE_CHECKING:
    from agents.learned.dqn_paper import Trainer

PARTS = 10  # of a training, whose mean overheads are kept
KEYS = {"network", "episodes", "tuned", "agent", "small", "small_episodes"}
INKS = ("#d6336c", "#1f5fa8", "#238b45", "#f16913", "#8e5bd0", "#777777")


def tasks(settings: DictConfig) -> list[Row]:
    """One per line and seed."""
    found = cli.plain(settings)
    for name, line in found["lines"].items():
        if not isinstance(line, dict) or not {"network", "episodes"} <= set(line) <= KEYS:
            raise cli.UsageError(f"figure.lines.{name}: expected network, episodes and some of {', '.join(KEYS)}")
        for key in ("network", "small"):
            network(str(line.get(key, line["network"])), f"lines.{name}.{key}")
    limit = share_of_peak(found["limit"])
    return [{"line": name, "seed": seed, "limit": limit, **line}
            for name, line in found["lines"].items() for seed in found["seeds"]]  # fmt: skip


def config_of(task: Row) -> PaperConfig:
    """The settings of ``agent=dqn_paper``, or of ``agent=dqn_paper_tuned``, with those that the task changes."""
    file = cli.CONFIGS / "agent" / ("dqn_paper_tuned.yaml" if task.get("tuned") else "dqn_paper.yaml")
    known = cli.plain(OmegaConf.load(file))  # type: ignore[arg-type]
    found = {**known, "mode": "swap", "episodes": task["episodes"], **task.get("agent", {})}
    return cli.dataclass_of(PaperConfig, OmegaConf.create(found), "agent")


def trained(name: str, task: Row, machine: Machine, config: PaperConfig) -> tuple[Trainer, Row]:
    """A training on the network ``name``, and its greedy overhead and first Q-value before it."""
    from agents.learned.dqn_paper import Trainer  # PyTorch

    built = program(name, machine)
    trainer = Trainer(built, machine, limit_bytes(task["limit"], built), config, task["seed"])
    before = {"greedy_before": percent(trainer.greedy_overhead()), "q_before": trainer.first_value()}
    while not trainer.done:
        trainer.step()
    return trainer, before


def run(task: Row, machine: Machine) -> Row:
    """Overheads in per cent; Q-values in units of the return, which is minus the overhead."""
    config = config_of(task)
    small_calls = 0
    with TemporaryDirectory() as folder:
        if "small" in task:
            before = config_of({**task, "agent": {}, "episodes": task["small_episodes"]})
            first, _ = trained(task["small"], task, machine, before)
            first.save(Path(folder) / "checkpoint.pt")
            small_calls, config = first.simulator_calls, replace(config, weights=folder)
        trainer, start = trained(task["network"], task, machine, config)
    overheads = [100 * episode.overhead for episode in trainer.history]
    return {
        **start, "greedy": percent(trainer.greedy_overhead()), "q_after": trainer.first_value(),
        "best": percent(trainer.best_overhead), "mean": round(float(np.mean(overheads)), 4),
        "parts": [round(float(part.mean()), 4) for part in np.array_split(overheads, PARTS)],
        "updates": trainer.updates, "steps": float(np.mean([one.steps for one in trainer.history[-PARTS:]])),
        "simulator_calls": trainer.simulator_calls, "small_simulator_calls": small_calls,
    }  # fmt: skip


def percent(overhead: float) -> float | None:
    """In per cent; None for a dead end."""
    return None if math.isnan(overhead) else round(100 * overhead, 4)


# ------------------------------------------------------------------------------------------ for people


def numbers(rows: list[Row]) -> Row:
    """Each line over its seeds; random walks have no greedy policy."""
    lines = []
    for name, runs in grouped(rows, "line").items():
        learns = runs[0]["updates"] > 0
        lines.append({
            "label": name, **{key: runs[0][key] for key in ("network", "episodes")},
            "before": _cell(runs, "greedy_before", learns), "greedy": _cell(runs, "greedy", learns),
            "q": _cell(runs, "q_after", learns, ".3g"),
            "steps": _cell(runs, "steps", spec=".0f"), "mean": _cell(runs, "mean"), "best": _cell(runs, "best"),
            "last": f"{np.mean([run['parts'][-1] for run in runs]):.2f}",
            "calls": round(np.mean([run["simulator_calls"] + run["small_simulator_calls"] for run in runs])),
        })  # fmt: skip
    return {"lines": lines, "seeds": rows[0]["seed"], "limit": rows[0]["limit"]}


def _cell(runs: list[Row], key: str, known: bool = True, spec: str = ".2f") -> str:
    return ", ".join("none" if run[key] is None else format(run[key], spec) for run in runs) if known else "–"


def chart(rows: list[Row]) -> Chart:
    """Mean overhead of the episodes of each tenth of a training, over the seeds, with their range."""
    marks = []
    for (name, runs), ink in zip(grouped(rows, "line").items(), INKS, strict=False):  # the others are in the table
        parts = np.array([run["parts"] for run in runs])
        marks.append(Line((np.arange(PARTS) + 1) * runs[0]["episodes"] / PARTS, parts.mean(0), ink, name,
                          band=(parts.min(0), parts.max(0))))  # fmt: skip
    panel = Panel("", marks, Axis("episodes"), Axis("overhead of the episodes, %"))
    return Chart("The DQN paper's form on VGG16 at 60 % of its peak", [panel], 1, (9.0, 4.2), keys=3)


FIGURE = Figure("dqn_paper", tasks, run, numbers, chart, on_demand=True)
