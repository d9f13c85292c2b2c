"""Section 4.3 of "TENSILE: A Tensor granularity dynamic GPU memory scheduler method towards multitasking dynamic
workloads system" (2021): how well a small network predicts the times of kernels that were never measured
(agents/heuristics/tensile/times.py): R² on a network that it did not learn from, over all kernels and over convolutions
and matrix products.

1. Times are those of the model of kernel times (executor/capture/kernel_times.py), and those measured on the processor
   of the computer that made this (`executor.capture.profile.measure`, hot cache); the paper's are of a GPU.
2. The paper has the mean over operators; here it is over the kernels of each network held out, and their median.
3. One job runs: no utilisation is learned.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median

import numpy as np
from matplotlib.ticker import FuncFormatter
from omegaconf import DictConfig

from agents.heuristics.tensile.times import KernelTimes, Sample, r_squared
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.plotting import palette
from experiments.plotting.plots import figure
from simulator.machine import Machine
from simulator.program import Program

TITLE = "TENSILE, section 4.3: kernel times predicted"
ALONE = True
PAPER = {"all": 0.582, "expensive": 0.805}
EXPENSIVE = ("conv", "matmul")
SOURCES = ("model", "measured")


def tasks(settings: DictConfig) -> list[Row]:
    """One per source of times; each has all networks, as they learn from each other."""
    batch, repeats = cli.integer(settings, "batch", least=1), cli.integer(settings, "repeats", least=1)
    names, sources = figures.networks(settings), cli.values(settings, "sources")
    if not sources or not set(sources) <= set(SOURCES):
        raise cli.UsageError(f"figure.sources: expected some of {', '.join(SOURCES)}, got {sources!r}")
    if len(names) < 2:
        raise cli.UsageError("figure.networks: expected at least two, one to learn from")
    return [{"source": source, "networks": names, "batch": batch, "repeats": repeats} for source in sources]


def run(task: Row, machine: Machine) -> Row:
    """R² of each network by a predictor that learned from the others, and its predicted time over the true one."""
    known: dict[str, Program] = {}
    device = machine.name
    for name in task["networks"]:
        known[name], device = timed(name, task, machine)
    samples = {name: Sample(p, 1, np.array([k.duration_ns for k in p.kernels])) for name, p in known.items()}
    held: dict[str, Row] = {}
    for name, program in known.items():
        learned = KernelTimes.fit([sample for other, sample in samples.items() if other != name])
        found, true = learned.predict(program, 1), samples[name].times
        of = np.array([kernel.kind in EXPENSIVE for kernel in program.kernels])
        held[name] = {"kernels": len(true), "all": r_squared(found, true), "expensive": r_squared(found[of], true[of]),
                      "iteration": float(found.sum() / true.sum())}  # fmt: skip
    return {"device": device, "held": held}


def timed(name: str, task: Row, machine: Machine) -> tuple[Program, str]:
    """A network's program with the source's times, and on what they are."""
    if task["source"] == "model":
        return figures.program(name, machine, batch_size=task["batch"], iteration_ms=None), machine.name
    from executor.capture.profile import measure, with_profile  # PyTorch
    from experiments import workloads

    captured = workloads.load({**figures.workload(name), "batch_size": task["batch"]}, machine)
    profile = measure(captured, "cpu", repeats=task["repeats"], cache="hot")
    return with_profile(captured.program, profile), profile.device


# ------------------------------------------------------------------------------------------ for people


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """A line per network, and the medians beside the paper's means."""
    cells = [
        [figures.label(name)]
        + [f"{row['held'][name][key]:.3f}" for row in rows for key in PAPER]
        + [f"{row['held'][name]['iteration']:.2f}" for row in rows]
        for name in rows[0]["networks"]
    ]
    middle = [f"{paper:.3f} / {median(one[key] for one in row['held'].values()):.3f}"
              for row in rows for key, paper in PAPER.items()]  # fmt: skip
    heads = [f"{row['source']}, {'all kernels' if key == 'all' else 'convolutions, products'}"
             for row in rows for key in PAPER]  # fmt: skip
    return (["held out", *heads, *(f"{row['source']}, iteration" for row in rows)],
            [*cells, ["paper's mean / our median", *middle, *("" for _ in rows)]])  # fmt: skip


def notes(rows: list[Row]) -> list[str]:
    """What the times are of, and where the prediction fails."""
    out = [f"Times of {row['source']} are of: {row['device']}." for row in rows]
    for row in rows:
        worst = min(row["held"], key=lambda name: row["held"][name]["all"])
        best = max(row["held"], key=lambda name: row["held"][name]["all"])
        out.append(f"R², {row['source']}, is from {row['held'][worst]['all']:.2f} ({figures.label(worst)}) to "
                   f"{row['held'][best]['all']:.2f} ({figures.label(best)}).")  # fmt: skip
    out.append("Inputs are a kernel's kind, FLOPs, bytes and workspace, where the paper has shapes and parameters; "
               "iteration is the predicted sum over the true one.")  # fmt: skip
    return out


def draw(rows: list[Row], path: Path) -> None:
    """A panel per source: two bars per network, the paper's means as lines."""
    looks = {"all": ("#9a9a9a", "all kernels"), "expensive": ("#b3123d", "convolutions and matrix products")}
    with figure(path, 11.5, 5.2, 1, len(rows)) as made:
        panels = np.atleast_1d(made)
        for row, axes in zip(rows, panels, strict=True):
            names = row["networks"]
            for i, (key, (colour, label)) in enumerate(looks.items()):
                values = [max(row["held"][name][key], -0.02) for name in names]
                axes.barh(np.arange(len(names)) + 0.36 * i - 0.18, values, height=0.32, color=colour, label=label)
                axes.axvline(
                    PAPER[key], color=colour, linestyle="--", linewidth=1.4, label=f"the paper's mean, {label}"
                )
            axes.set_yticks(range(len(names)), [figures.label(name) for name in names] if axes is panels[0] else [])
            axes.set(ylim=(len(names) - 0.4, -0.6), xlim=(-0.03, 1.0), title=f"{row['source']}: {row['device']}",
                     xlabel="R² on the network held out")  # fmt: skip
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.1f}"))
            axes.grid(axis="y", visible=False)
        handles, labels = panels[0].get_legend_handles_labels()
        panels[0].figure.legend(handles, labels, loc="outside lower center", ncols=2, labelcolor=palette.INK)
