"""TENSILE: saved memory against the iteration time, and the MLP of section 4.1."""

from __future__ import annotations

from omegaconf import DictConfig

import agents
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.figure import Figure
from experiments.figures.smartpool_loads import ZERO
from experiments.figures.tensile import smallest
from experiments.plotting.charts import Axis, Chart, Line, Panel, Rule
from simulator import simulate
from simulator.machine import Machine

CLAIM = 0.335  # fraction of an MLP's peak saved without extra time, section 4.1
VGG = 0.2241  # Table 1
NETWORKS = ("vgg16_imagenet", "mlp")
STYLES = (("#1f5fa8", "o"), ("#f16913", "^"), ("#238b45", "s"), ("#8e5bd0", "D"))


class Speed(Figure):
    """Memory saved by TENSILE's plans with kernels that take several times as long."""

    name = "tensile_speed"

    def tasks(self, settings: DictConfig) -> list[Row]:
        factors = figures.numbers(settings, "factors", lambda x: x > 0, "positive numbers")
        found = []
        for name, batches in cli.plain(settings.batches).items():
            figures.network(name, "batches")
            if not all(isinstance(batch, int) and batch > 0 for batch in batches):
                raise cli.UsageError(f"figure.batches.{name}: expected a list of positive integers, got {batches!r}")
            found += [{"network": name, "batch": batch, "factor": x} for batch in batches for x in factors]
        return found

    def run(self, task: Row, machine: Machine) -> Row:
        program = figures.program(task["network"], machine, batch_size=task["batch"])
        program = program.with_durations([round(task["factor"] * k.duration_ns) for k in program.kernels])
        planner = agents.make("tensile", mode="swap")
        plan = smallest(program.peak_bytes, 1000, lambda limit: figures.attempt(planner, program, machine, limit))
        row = {"peak_bytes": program.peak_bytes, "ideal_ns": program.ideal_ns, "planned": None}
        if plan is None:
            return row
        alone, held = (simulate(program, plan, machine, limit) for limit in (machine.memory_bytes, plan.limit))
        return {
            **row, "planned": plan.limit, "decisions": len(plan.decisions),
            "alone": {"peak_bytes": alone.peak_bytes, "overhead": alone.overhead},
            "held": {"peak_bytes": held.peak_bytes, "overhead": held.overhead},
        }  # fmt: skip

    def numbers(self, rows: list[Row]) -> Row:
        found = [facts(row) for row in rows]
        vgg, mlp = ([one for one in found if one["network"] == name] for name in NETWORKS)
        free = [one for one in mlp if one["overhead"] <= ZERO]
        enough = [one["factor"] for one in free if one["alone"] >= CLAIM]
        return {
            "lines": found, "claim": CLAIM, "enough": min(enough, default=None),
            "mlp": max((one["alone"] for one in free if one["factor"] == 1), default=None),
            "vgg": [min(one["planned"] for one in vgg), max(one["planned"] for one in vgg)] if vgg else None,
        }  # fmt: skip

    def chart(self, rows: list[Row]) -> Chart:
        found = [facts(row) for row in rows]
        claims = ((CLAIM, "the paper's MLP"), (VGG, "the paper's VGG"))
        marks: list[Line | Rule] = [Rule(share, across=True, line=":", text=text) for share, text in claims]
        keys = dict.fromkeys((one["network"], one["batch"]) for one in found)
        for key, (colour, marker) in zip(keys, STYLES, strict=False):
            lines = [one for one in found if (one["network"], one["batch"]) == key]
            label, x = f"{lines[0]['label']}, batch {key[1]:,}", [one["ms"] for one in lines]
            marks.append(Line(x, [one["planned"] for one in lines], colour, f"{label}, planned", marker))
            marks.append(Line(x, [one["alone"] for one in lines], colour, f"{label}, run", marker, "--", hollow=True))
        where = Axis("iteration without a plan, ms", "{:g}", scale="log"), Axis("saved of the peak", "%", (0, None))
        return Chart(
            "TENSILE: saved memory against the iteration time", [Panel("", marks, *where)], size=(9.0, 4.4), keys=3
        )


def facts(row: Row) -> Row:
    """Returns the saved shares of the peak: as planned, in the whole GPU memory, and within the plan's limit."""
    saved = {
        key: 1 - row[key]["peak_bytes"] / row["peak_bytes"] if row["planned"] else 0.0 for key in ("alone", "held")
    }
    planned = 1 - row["planned"] / row["peak_bytes"] if row["planned"] else 0.0
    over = {f"{key}_overhead": row[key]["overhead"] if row["planned"] else 0.0 for key in ("alone", "held")}
    return {**row, **saved, **over, "planned": planned, "overhead": over["alone_overhead"],
            "label": figures.label(row["network"]), "ms": row["ideal_ns"] / 1e6}  # fmt: skip
