"""Table 2 of "HOME: A Holistic GPU Memory Management Framework for Deep Learning" (2022), section 4.4: the largest
batch size and the images per second there of PyTorch, Capuchin and HOME; six networks on CIFAR-10, RTX 2080 Ti.

1. The limit is all the memory that CUDA reports; what CUDA, cuDNN and workspaces take in the paper is not known.
2. Durations are the roofline's times a factor per network: PyTorch's largest batch of the paper takes the paper's time.
3. Programs are captured at two batch sizes (every number is affine in it); the sizes found are captured once more.
4. What fits with everything away that a method may move is asked first; below it the largest is bisected.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from omegaconf import DictConfig

from agents.heuristics.layers import feature_maps
from agents.planner import MIB, Candidates
from experiments.common import cli
from experiments.common.bisection import largest
from experiments.common.report import Row
from experiments.figures import home
from experiments.figures.home import NETWORKS, TABLE2
from experiments.plotting import palette
from experiments.plotting.palette import INK
from experiments.plotting.plots import figure
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

TITLE = "HOME, Table 2: largest batch and throughput in 11 GB"


def tasks(settings: DictConfig) -> list[Row]:
    """One per network."""
    resolution = cli.number(settings, "resolution")
    if not 0 < resolution < 1:
        raise cli.UsageError(f"figure.resolution: expected a number between 0 and 1, got {resolution}")
    return [{"network": name, "resolution": resolution, **home.search(settings)} for name in home.networks(settings)]


def run(task: Row, machine: Machine) -> Row:
    """Largest batches of one network, and what an iteration takes there."""
    network, options = task["network"], {key: task[key] for key in ("particles", "iterations")}
    of = home.sizes(network, machine)

    plans: dict[tuple[str, int], Plan | None] = {}

    def plan(method: str, batch: int) -> Plan | None:
        if (method, batch) not in plans:
            plans[method, batch] = home.planned(method, of.at(batch), machine, options)
        return plans[method, batch]

    def within(method: str, batch: int) -> bool:
        return least(method, of.at(batch)) <= machine.memory_bytes

    def fits(method: str, batch: int) -> bool:
        return plan(method, batch) is not None

    plain = home.unplanned(of)
    bounds = {method: largest(partial(within, method), plain, home.MOST) for method in TABLE2}
    largest_of = {
        method: highest(partial(fits, method), plain, bound, task["resolution"]) for method, bound in bounds.items()
    }
    found = {}
    for i, (method, batch) in enumerate(largest_of.items()):
        program = of.timed(home.program(network, machine, batch))
        if program.fingerprint != of.at(batch).fingerprint:
            raise AssertionError(f"{network}: the capture at batch {batch} is not the one that was planned")
        theirs = NETWORKS[network].batch[i]
        found[method] = {
            "batch": batch, "bound": bounds[method], "peak_bytes": program.peak_bytes, "ideal_ns": program.ideal_ns,
            **(home.outcome(program, plan(method, batch), machine) or {}),
            "at_paper": home.outcome(of.at(theirs), plan(method, theirs), machine),
        }  # fmt: skip
    return {"limit": machine.memory_bytes, "factor": of.factor, "found": found}


def least(method: str, program: Program) -> int:
    """Bytes that a method cannot get below: the peak with everything away that it may move."""
    if method == "PyTorch":
        return program.peak_bytes
    gaps = [m.gap for m in feature_maps(program)] if method == "HOME" else program.gaps(MIB)
    return Candidates(program, gaps).least


def highest(fits: Callable[[int], bool], low: int, high: int, resolution: float) -> int:
    """The largest batch that fits, from ``low``, which does, to ``high``, which is tried first: itself, or less than
    ``resolution`` of it below one that does not fit."""
    if fits(high):
        return high
    while high - low > max(1, resolution * low):
        middle = min(2 * low, (low + high) // 2)  # from below: a planner takes longest to find that it has no plan
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# ------------------------------------------------------------------------------------------ for people


def rate(row: Row, method: str) -> float:
    """Images per second at a method's largest batch."""
    found = row["found"][method]
    return float(found["batch"] / found["iteration_ns"] * 1e9)


def rate_at_paper(row: Row, method: str) -> float | None:
    """Images per second at the paper's largest batch of a method; None: it does not fit."""
    batch, found = NETWORKS[row["network"]].batch[TABLE2.index(method)], row["found"][method]["at_paper"]
    return float(batch / found["iteration_ns"] * 1e9) if found else None


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Paper / ours in every cell."""
    heads = [
        "paper / ours", *(f"largest batch, {m}" for m in TABLE2), "HOME over PyTorch",
        *(f"images/s there, {m}" for m in TABLE2), *(f"at the paper's batch, {m}" for m in TABLE2[1:]),
    ]  # fmt: skip
    cells = []
    for row in rows:
        paper = NETWORKS[row["network"]]
        ours = [row["found"][m]["batch"] for m in TABLE2]
        cells.append([
            paper.label,
            *(f"{p:,} / {o:,}" for p, o in zip(paper.batch, ours, strict=True)),
            f"{paper.batch[2] / paper.batch[0]:.2f}× / {ours[2] / ours[0]:.2f}×",
            *(f"{p:,} / {rate(row, m):,.0f}" for p, m in zip(paper.throughput, TABLE2, strict=True)),
            *(f"{p:,} / {_number(rate_at_paper(row, m))}"
              for p, m in zip(paper.throughput[1:], TABLE2[1:], strict=True)),
        ])  # fmt: skip
    return heads, cells


def _number(value: float | None) -> str:
    return "does not fit" if value is None else f"{value:,.0f}"


def notes(rows: list[Row]) -> list[str]:
    """What is general, then a sentence per network."""
    more = [r["found"]["PyTorch"]["batch"] / NETWORKS[r["network"]].batch[0] - 1 for r in rows]
    gains = [gain(r) for r in rows]
    theirs = [NETWORKS[r["network"]].throughput[2] / NETWORKS[r["network"]].throughput[0] - 1 for r in rows]
    larger = sum(r["found"]["HOME"]["batch"] > r["found"]["Capuchin"]["batch"] for r in rows)
    faster = sum(rate(r, "HOME") > rate(r, "Capuchin") for r in rows)
    return [
        f"The limit is {rows[0]['limit'] / 2**20:,.0f} MiB, all that CUDA reports. PyTorch's own largest batch is then "
        f"{min(more):+.0%} to {max(more):+.0%} against the paper's, where CUDA, cuDNN's workspaces and holes in "
        "PyTorch's cache take their shares of it, too, which the paper does not give.",
        "Our largest batches are those whose bytes fit: a few kernels' tensors, and what has nowhere to go, fill the "
        "memory there. The paper's end earlier, at "
        f"{min(_part(r) for r in rows):.0%} to {max(_part(r) for r in rows):.0%} of ours; that convolutions need "
        "workspaces which grow with the batch, too, is inferred.",
        f"The paper's HOME has {min(theirs):+.0%} to {max(theirs):+.0%} images/s compared with PyTorch, as larger "
        "batches use the GPU better. Ours has not: kernel times are linear in the batch but for the launches, and "
        f"without any overhead HOME's largest batch would have {min(gains):+.2%} to {max(gains):+.2%} images/s "
        "compared with PyTorch's. So ours is below PyTorch's by what the plan costs.",
        f"HOME holds more images than Capuchin on {larger} of {len(rows)} networks, and has more images/s at its "
        f"largest batch on {faster}; the paper's does on all. Our Capuchin may move parameters and optimizer state, "
        "too, HOME feature maps only.",
        *(why(row) for row in rows),
    ]


def gain(row: Row) -> float:
    """By how much images/s without overhead grow from PyTorch's largest batch to HOME's."""
    plain, most = (row["found"][m]["batch"] / row["found"][m]["ideal_ns"] for m in ("PyTorch", "HOME"))
    return float(most / plain - 1)


def _part(row: Row) -> float:
    """HOME's largest batch in the paper, of ours."""
    return float(NETWORKS[row["network"]].batch[2] / row["found"]["HOME"]["batch"])


def why(row: Row) -> str:
    """A network's sentence: what bounds the batch, and what the plans cost there and at the paper's batch."""
    found, paper = row["found"]["HOME"], NETWORKS[row["network"]]
    bound = (
        "all that fit with every feature map away"
        if found["batch"] == found["bound"]
        else f"the most for which its swarm finds a plan (with every feature map away {found['bound']:,} would fit)"
    )
    there = found["at_paper"]
    costs = f"{there['overhead']:.1%}" if there else "not possible"
    return (
        f"{paper.label}: HOME's {found['batch']:,} images are {bound}; its plan swaps "
        f"{found['swapped_bytes'] / 2**30:.0f} GiB and recomputes {found['recomputed_bytes'] / 2**30:.0f} GiB of "
        f"{found['peak_bytes'] / 2**30:.0f}, for {found['overhead']:.0%} more time; at the paper's {paper.batch[2]:,} "
        f"images the overhead is {costs}. The roofline was made {_times(row['factor'])} to meet the paper's PyTorch."
    )


def _times(factor: float) -> str:
    return f"{factor:.2f} times slower" if factor >= 1 else f"{1 / factor:.2f} times faster"


def draw(rows: list[Row], path: Path) -> None:
    """Three panels of a row per network: largest batch, throughput at the paper's batch, and at one's own; all over
    PyTorch's. The paper hollow, ours filled."""
    looks = {"Capuchin": palette.look("capuchin"), "HOME": palette.look("home")}
    with figure(path, 14.0, 2.1 + 0.5 * len(rows), 1, 3) as (batches, there, own):
        for axes in (batches, there, own):
            for y, row in enumerate(rows):
                axes.axhspan(y - 0.5, y + 0.5, color="none" if y % 2 else "#f6f6f6", linewidth=0, zorder=0)
                paper, plain = NETWORKS[row["network"]], row["found"]["PyTorch"]
                for shift, (method, look) in zip((-0.17, 0.17), looks.items(), strict=True):
                    i = TABLE2.index(method)
                    rates = rate_at_paper(row, method) if axes is there else rate(row, method)
                    theirs, ours = (
                        (paper.batch[i] / paper.batch[0], row["found"][method]["batch"] / plain["batch"])
                        if axes is batches
                        else (paper.throughput[i] / paper.throughput[0], rates and rates / rate(row, "PyTorch"))
                    )
                    axes.plot(theirs, y + shift, look.marker, color=look.colour, markerfacecolor="white", zorder=3,
                              markersize=7.5, markeredgewidth=1.6)  # fmt: skip
                    if ours:
                        axes.plot([theirs, ours], [y + shift] * 2, color=look.colour, linewidth=1, alpha=0.4)
                        axes.plot(ours, y + shift, look.marker, color=look.colour, markersize=7.5, zorder=4)
            names = [NETWORKS[r["network"]].label for r in rows] if axes is batches else [""] * len(rows)
            axes.set_yticks(range(len(rows)), names)
            axes.set(ylim=(len(rows) - 0.4, -0.6), xlabel="over PyTorch's largest batch")
            axes.tick_params(axis="y", length=0)
            axes.grid(axis="y", visible=False)
            axes.axvline(1, color=INK, linewidth=1)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}×"))
        batches.set(title="Largest batch", xlim=(0, None))
        there.set(title="Images/s at the paper's batch", xlabel="over PyTorch's at its largest batch", xlim=(0, None))
        own.set(title="Images/s at one's own largest batch", xlabel="over PyTorch's at its largest batch",
                xlim=(0, None))  # fmt: skip
        keys = []
        for method, look in looks.items():
            keys += [
                Line2D([], [], linestyle="", marker=look.marker, color=look.colour, markerfacecolor="white",
                       markersize=7.5, markeredgewidth=1.6, label=f"{method}, paper"),
                Line2D([], [], linestyle="", marker=look.marker, color=look.colour, markersize=7.5,
                       label=f"{method}, ours"),
            ]  # fmt: skip
        fig = batches.figure
        fig.legend(handles=keys, loc="outside lower center", ncols=4, fontsize=10)
        fig.suptitle("Largest batch and throughput in the 11 GB of an RTX 2080 Ti", x=0.01, ha="left", fontsize=13,
                     fontweight="bold", color=INK)  # fmt: skip
