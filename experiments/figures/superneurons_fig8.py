"""Fig. 8 of the SuperNeurons paper: time and memory by type of layer."""

from __future__ import annotations

from omegaconf import DictConfig

from experiments import figures
from experiments.common.report import Row
from experiments.figures.figure import Figure, span
from experiments.plotting.charts import Axis, Bars, Chart, Panel
from experiments.plotting.palette import LAYERS
from simulator.machine import Machine

GROUPS = {
    "CONV": ("conv",), "POOL, ACT, BN, LRN": ("pool", "activation", "norm", "lrn"), "FC": ("matmul",),
}  # fmt: skip
OTHER = "other"


def tasks(settings: DictConfig) -> list[Row]:
    """One per network."""
    return [{"network": name} for name in figures.networks(settings)]


def run(task: Row, machine: Machine) -> Row:
    """Shares of a step's time, and of the bytes of all tensors that a step creates, by the kernel that writes first."""
    program = figures.program(task["network"], machine)
    group_of = {kind: group for group, kinds in GROUPS.items() for kind in kinds}
    times, sizes = dict.fromkeys(LAYERS, 0), dict.fromkeys(LAYERS, 0)
    for kernel in program.kernels:
        times[group_of.get(kernel.kind, OTHER)] += kernel.duration_ns
    for tensor, writes in zip(program.tensors, program.writes, strict=True):
        if writes and not tensor.persistent:
            sizes[group_of.get(program.kernels[writes[0]].kind, OTHER)] += tensor.nbytes
    return {"time": _shares(times), "memory": _shares(sizes)}


def _shares(amounts: dict[str, int]) -> dict[str, float]:
    return {name: amount / sum(amounts.values()) for name, amount in amounts.items()}


# ------------------------------------------------------------------------------------------ for people


def numbers(rows: list[Row]) -> Row:
    """Each network's shares, and those of convolutions and of cheap layers over all networks."""
    conv, cheap = list(GROUPS)[:2]
    found = [
        {"label": figures.label(row["network"]), "conv_time": row["time"][conv], "conv_memory": row["memory"][conv],
         "cheap_time": row["time"][cheap], "cheap_memory": row["memory"][cheap], "fc_time": row["time"]["FC"],
         "fc_memory": row["memory"]["FC"]}
        for row in rows
    ]  # fmt: skip
    keys = ("conv_time", "cheap_time", "cheap_memory")
    return {"networks": found, **{f"{key}s": span(one[key] for one in found) for key in keys}}


def chart(rows: list[Row]) -> Chart:
    """Stacked bars: a panel for time and one for memory."""
    names, panels = [figures.label(row["network"]) for row in rows], []
    for key, title in (("time", "Time"), ("memory", "Memory")):
        base, bars = [0.0] * len(rows), []
        for name, colour in LAYERS.items():
            shares = [100 * row[key][name] for row in rows]
            bars.append(Bars(list(range(len(rows))), shares, colour, name, base=list(base)))
            base = [a + b for a, b in zip(base, shares, strict=True)]
        panels.append(Panel(title, bars, Axis("% of a step", "{:g}", (0, 100)), Axis(names=names)))
    return Chart("Simulated time and memory by type of layer", panels, size=(5.0, 0.4 * len(rows) + 1.0))


FIGURE = Figure("superneurons_fig8", tasks, run, numbers, chart)
