"""Cost of plans for a part of the link, executed with copies at other speeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from omegaconf import DictConfig

import agents
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.figure import Figure, Rows
from experiments.plotting.charts import Axis, Chart, Line, Panel
from experiments.plotting.palette import MEASURED, SWAPPED
from simulator import Machine, Program, simulate

TRACES = cli.CONFIGS.parent / "experiments" / "results" / "gpu_h200" / "traces"


class LinkMargin(Figure):
    """Overhead of plans that use a part of the link, against the speed that its copies reach."""

    name = "link_margin"
    labels: ClassVar = {"llama_fused_bf16": "Llama, 12 blocks", "gpt2_medium_bf16": "GPT-2 medium"}

    def tasks(self, settings: DictConfig) -> Rows:
        config = cli.to_dict(settings)
        for name in config["programs"]:
            if name not in self.labels:
                raise cli.UsageError(f"figure.programs: unknown program {name!r}{cli.nearest(name, set(self.labels))}")
        shared = {key: config[key] for key in ("limit", "links", "calls")}
        return [{"network": name, "margin": m, **shared} for name in config["programs"] for m in config["margins"]]

    def run(self, task: Row, machine: Machine) -> Row:
        program = Program.load(TRACES / f"{task['network']}-program.json.gz")
        limit = int(task["limit"] * program.peak_bytes)
        plan = agents.make("annealing", calls=task["calls"]).plan(program, machine.with_link(task["margin"]), limit)
        links = [machine.with_link(share) for share in task["links"]]
        return {"overheads": [round(simulate(program, plan, link, limit).overhead, 6) for link in links]}

    def template_values(self, rows: Rows) -> Row:
        margins = {row["margin"] for row in rows}
        shown = [i for i, link in enumerate(rows[0]["links"]) if link in margins]
        lines = [
            {**row, "label": self.labels[row["network"]], "shown": [row["overheads"][i] for i in shown]} for row in rows
        ]
        speeds = [f"at {rows[0]['links'][i]:.0%}" for i in shown]
        return {"lines": lines, "speeds": speeds, "losses": _losses(rows)}

    def chart(self, rows: Rows) -> Chart:
        panels = [
            Panel(
                self.labels[network],
                [
                    Line(row["links"], row["overheads"], color, f"planned for {row['margin']:.0%}", "o")
                    for row, color in zip(lines, (MEASURED, *SWAPPED), strict=False)
                ],
                Axis("speed of copies, of the link's", "%"),
                Axis("overhead of an iteration", "%", (0, None)),
            )
            for network, lines in figures.group_by(rows).items()
        ]
        title = "Overhead by speed of copies"
        margins = sorted({row["margin"] for row in rows} & {*rows[0]["links"]})
        if margins:
            slow = margins[(len(margins) - 1) // 2]
            worst = [
                max(row["overheads"][row["links"].index(slow)] for row in rows if row["margin"] == margin)
                for margin in (slow, margins[-1])
            ]
            losses = (
                f"{overhead:.1%} by plans for {margin:.0%}"
                for margin, overhead in zip((slow, margins[-1]), worst, strict=True)
            )
            title = f"Most lost at {slow:.0%} copy speed: {', '.join(losses)}"
        note = f"One plan of simulated annealing each: {rows[0]['calls']:,} calls, {rows[0]['limit']:.0%} of the peak."
        return Chart(title, panels, 2, (4.95, 3.9), (0.0, 1.1), note=note)


def _losses(rows: Rows) -> Sequence[Row]:
    """Returns, per margin below 1, the largest overhead that its plans add at its speed, and at the full one."""
    losses = []
    for margin in dict.fromkeys(row["margin"] for row in rows if row["margin"] < 1):
        same = [row for row in rows if row["margin"] == margin]
        full = {row["network"]: row["overheads"][0] for row in rows if row["margin"] == 1}
        at = [
            row["overheads"][row["links"].index(margin)] - row["overheads"][0] for row in same if margin in row["links"]
        ]
        costs = [row["overheads"][0] - full[row["network"]] for row in same if row["network"] in full]
        losses.append({"margin": margin, "slow": max(at, default=None), "cost": max(costs, default=None)})
    return losses
