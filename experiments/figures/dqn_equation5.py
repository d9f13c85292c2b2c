"""Equation 5 of the DQN paper: targets of n steps with a target network, at limits that random walks do not solve."""

from __future__ import annotations

import numpy as np
from omegaconf import DictConfig

from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import dqn, group_by, network, share_of_peak
from experiments.figures.figure import Figure, Rows
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel, Rule
from experiments.plotting.palette import FAINT, color
from simulator import Machine

PARTS = 10  # of a training, whose mean overheads are stored
POINTS = 30  # of the best overhead so far


class Equation5(Figure):
    """Trainings with equation 5 beside uniform random walks of equally many episodes."""

    name = "dqn_equation5"
    on_demand = True
    keys = ("agent", "limits", "seeds")  # of a line in the settings

    def tasks(self, settings: DictConfig) -> Rows:
        config = cli.to_dict(settings)
        name = network(str(config["network"]), "network")
        for label, line in config["lines"].items():
            if not isinstance(line, dict) or not {"agent"} <= set(line) <= set(self.keys):
                raise cli.UsageError(f"figure.lines.{label}: expected agent and some of {', '.join(self.keys)}")
        return [
            {
                "line": label,
                "seed": seed,
                "limit": share_of_peak(limit),
                "network": name,
                "episodes": config["episodes"],
                "tuned": True,
                "agent": line["agent"],
            }
            for label, line in config["lines"].items()
            for limit in line.get("limits", config["limits"])
            for seed in line.get("seeds", config["seeds"])
        ]

    def run(self, task: Row, machine: Machine) -> Row:
        trainer, _ = dqn.train(task["network"], task, machine, dqn.paper_config(task))
        overheads = [100 * episode.overhead for episode in trainer.history]
        ends = sorted({round((i + 1) * len(overheads) / POINTS) for i in range(POINTS)} - {0})
        return {
            "greedy": dqn.percent(trainer.greedy_overhead()),
            "best": dqn.percent(trainer.best_overhead),
            "dead_ends": sum(not episode.feasible for episode in trainer.history),
            "mean": round(float(np.nanmean(overheads)), 4),
            "parts": [round(float(np.nanmean(part)), 4) for part in np.array_split(overheads, PARTS)],
            "best_so_far": [[end, dqn.percent(trainer.history[end - 1].best_overhead)] for end in ends],
            "updates": trainer.updates,
            "simulator_calls": trainer.simulator_calls,
        }

    def template_values(self, rows: Rows) -> Row:
        walks = [row for row in rows if not row["updates"]]
        swept, tested = split(rows)
        chance = {
            limit: float(np.mean([run["mean"] for run in runs])) for limit, runs in group_by(walks, "limit").items()
        }
        mean_best = {
            limit: float(np.mean([run["best"] for run in runs])) for limit, runs in group_by(walks, "limit").items()
        }
        best = {(run["limit"], run["seed"]): run["best"] for run in walks}
        pairs = [
            (run["best"], best[run["limit"], run["seed"]]) for run in tested if (run["limit"], run["seed"]) in best
        ]
        lines = [
            {
                "label": runs[0]["line"],
                "limit": runs[0]["limit"],
                "seeds": ", ".join(str(run["seed"]) for run in runs),
                "greedy": "–" if part is walks else _cell(runs, "greedy"),
                "last": f"{np.mean([run['parts'][-1] for run in runs]):.2f}",
                "best": _cell(runs, "best"),
                "calls": round(np.mean([run["simulator_calls"] for run in runs])),
            }
            for part in (swept, tested, walks)
            for group in group_by(part, "line").values()
            for runs in group_by(group, "limit").values()
        ]
        compared = [run for run in tested if run["limit"] in chance]
        ranked = sorted(swept, key=lambda run: run["parts"][-1])
        rank = next((i for i, run in enumerate(ranked) if tested and run["agent"] == tested[0]["agent"]), None)
        return {
            "lines": lines,
            "episodes": rows[0]["episodes"],
            "chance": ", ".join(f"{mean:.1f} % at {limit:.0%}" for limit, mean in chance.items()) or None,
            "swept": len(swept) or None,
            "swept_below": sum(below(run, chance) for run in swept),
            "swept_ahead": sum(run["best"] < mean_best[run["limit"]] for run in swept if run["limit"] in mean_best),
            "walks_best": ", ".join(f"{mean:.1f} % at {limit:.0%}" for limit, mean in mean_best.items()) or None,
            "chosen": None if rank is None else ranked[rank]["line"],
            "rank": None if rank is None else rank + 1,
            "steps": np.mean([run["simulator_calls"] / run["episodes"] for run in tested]) if tested else None,
            "tested": len(compared),
            "below": sum(below(run, chance) for run in compared),
            "ahead": sum(ours < theirs for ours, theirs in pairs),
            "behind": sum(ours > theirs for ours, theirs in pairs),
            "pairs": len(pairs),
        }

    def chart(self, rows: Rows) -> Chart:
        values = self.template_values(rows)
        walks = [row for row in rows if not row["updates"]]
        swept, tested = split(rows)
        panels = []
        for limit, runs in group_by([*walks, *tested], "limit").items():
            marks: list[Mark] = []
            for name, part in group_by(runs, "line").items():
                ends = [end for end, _ in part[0]["best_so_far"]]
                overheads = np.array([[value for _, value in run["best_so_far"]] for run in part], np.float64)
                ink, label = FAINT, "uniform random walks"
                if part[0]["updates"]:
                    ink, label = color("dqn_paper"), f"equation 5, {values['chosen'] or name}"
                band = (overheads.min(0), overheads.max(0))
                marks.append(Line(ends, overheads.mean(0), ink, label, band=band, step=True))
            for run in (run for run in swept if run["limit"] == limit):
                x, y = zip(*run["best_so_far"], strict=True)
                label = "equation 5, settings of the sweep"
                marks.append(Line(x, y, color("dqn_paper"), label, width=0.9, alpha=0.6, step=True))
            y_axis = Axis("best plan so far, overhead in %", limits=(0, None))
            panels.append(Panel(f"{limit:.0%} of the peak", marks, Axis("episodes"), y_axis))
        if swept:
            limit = swept[0]["limit"]
            swept = sorted(swept, key=lambda run: run["parts"][-1])
            places = range(len(swept))
            ink = color("dqn_paper")
            last, greedy = [run["parts"][-1] for run in swept], [run["greedy"] for run in swept]
            marks = [
                Line(last, places, ink, "last tenth of the episodes", "o", ""),
                Line(greedy, places, ink, "greedy policy", "D", "", hollow=True),
            ]
            chance = [run["mean"] for run in walks if run["limit"] == limit]
            if chance:
                marks.append(Rule(float(np.mean(chance)), label="mean of random walks"))
            names = Axis(names=[run["line"].replace(", rate", "\nrate") for run in swept])
            panels.append(Panel(f"Sweep, {limit:.0%}, one seed", marks, Axis("overhead in %", limits=(0, None)), names))
        counts = f"below random walks' in {values['ahead']}, above in {values['behind']} of {values['pairs']} runs"
        title = f"Equation 5, best plan: {counts}"
        if not values["pairs"]:
            policies = f"{values['swept_below']} of {values['swept']} settings"
            title = f"Below random walks: greedy policy with {policies}, best plan with {values['swept_ahead']}"
        note = f"VGG16, swaps, {values['episodes']} episodes. Lines: means over the seeds; bands: least to largest."
        return Chart(title, panels, 3, (3.3, 3.4), (0.0, 1.2), keys=3, note=note)


def split(rows: Rows) -> tuple[Rows, Rows]:
    """Returns the trainings of the sweep, whose seed has no random walks, and the others."""
    seeds = {row["seed"] for row in rows if not row["updates"]}
    trained = [row for row in rows if row["updates"]]
    return [row for row in trained if row["seed"] not in seeds], [row for row in trained if row["seed"] in seeds]


def below(run: Row, chance: dict[float, float]) -> bool:
    """Returns whether the greedy policy is below the mean of random walks in the same memory."""
    return run["greedy"] is not None and run["greedy"] < chance.get(run["limit"], 0.0)


def _cell(runs: Rows, key: str) -> str:
    return ", ".join("none" if run[key] is None else f"{run[key]:.2f}" for run in runs)
