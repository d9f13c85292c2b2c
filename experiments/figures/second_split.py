"""Second split: the DQN and its rivals on decoders, an encoder, a mixture of experts and a diffusion U-Net."""

from __future__ import annotations

from itertools import product

import numpy as np
from omegaconf import DictConfig

from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.figure import Rows
from experiments.figures.split_overlap import name_of
from experiments.figures.test_split import TestSplit, gaps_of, with_calls
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel
from experiments.plotting.palette import look

DRAWN = (("dqn", 200), ("policy_search", 200), ("dqn, 1 s", None), ("policy_search, 1 s", None))


class SecondSplit(TestSplit):
    """Overhead at equal calls and seconds on networks of families that no learned planner was trained on, and ViT."""

    name = "second_split"

    def tasks(self, settings: DictConfig) -> Rows:
        config = cli.to_dict(settings)
        shared = {"fresh": True, "weights": {}, "seeds": config["seeds"], "methods": config["methods"]}
        combinations = product(config["networks"].items(), config["machines"], config["limits"])
        return [
            {"network": figures.network(name, "networks"), "changes": changes, "machine": machine, "limit": limit}
            | shared
            for (name, changes), machine, limit in combinations
        ]

    def template_values(self, rows: Rows) -> Row:
        lines = []
        means_by_line = means_of(rows)
        for (line, calls), means in means_by_line.items():
            cells = ["–" if np.isnan(mean) else f"{mean:.2f}" for mean in (*means, means.mean())]
            lines.append({"label": with_calls(line, calls), "cells": cells})
        below: dict[str, int | None] = {"calls": None, "seconds": None}
        for key, ours, rival in (("calls", *DRAWN[:2]), ("seconds", *DRAWN[2:])):
            if ours in means_by_line and rival in means_by_line:
                below[key] = int((means_by_line[ours] < means_by_line[rival]).sum())
        heads = [name_of(row) for row in rows]
        return {"heads": heads, "lines": lines, "below": below, "count": len(rows), "seeds": len(rows[0]["seeds"])}

    def chart(self, rows: Rows) -> Chart:
        values = self.template_values(rows)
        means_by_line = means_of(rows)
        marks: list[Mark] = []
        for line, calls in DRAWN:
            if (line, calls) in means_by_line:
                _, ink, marker = look(line.split(",")[0])
                text = with_calls(line, calls)
                means = [None if np.isnan(mean) else float(mean) for mean in means_by_line[line, calls]]
                y = [i + 0.2 * (len(marks) - (len(DRAWN) - 1) / 2) for i in range(len(rows))]
                marks.append(Line(means, y, ink, text, marker, "", size=8, hollow=calls is not None))
        below = values["below"]["calls"]
        title = "Overhead on the second split"
        if below is not None:
            title = f"DQN below the policy's search on {below} of {len(rows)} networks with 200 calls"
        panel = Panel("", marks, Axis("overhead, %", "{:g}", (0, None)), Axis(names=[name_of(row) for row in rows]))
        note = f"Means over {values['seeds']} seeds."
        return Chart(title, [panel], 1, (8.6, 3.2), keys=2, note=note)


def means_of(rows: Rows) -> dict[tuple[str, int | None], np.ndarray]:
    """Returns the mean overhead over seeds in %, float64[networks], by line and calls."""
    return {key: values[..., 0].mean(1) for key, values in gaps_of(rows).items()}
