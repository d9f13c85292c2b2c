"""Fig. 10 of "Efficient Memory Management for GPU-based Deep Learning Systems" (2020), section VI-C: footprint against
batch size with cudaMalloc, CnMem, SmartPool and SmartPool+AutoSwap; GTX 1080 Ti.

The paper's text gives neither the figure's networks and batch sizes nor its numbers, only claims (``CLAIMS``). Ours:

1. Networks and batch sizes are our choice (configs/figure/smartpool_fig10.yaml).
2. Iterations were measured at batch size 100 only; elsewhere the roofline is scaled by the factor found there.
3. SmartPool+AutoSwap at an overhead: the smallest footprint that the planner finds (``smallest``); 0 % is up to 0.05 %.
4. Footprints are the highest address in use, aligned; every packing is checked. cudaMalloc's is the load.
5. What SINGA keeps besides (experiments/figures/smartpool_table1.py) is not in the programs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.ticker import FuncFormatter
from omegaconf import DictConfig

from agents.heuristics.smartpool_autoswap import SmartPoolAutoSwap
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.figures.smartpool_table1 import kept_by_singa
from experiments.plotting.palette import ALLOCATORS, INK, SWAPPED, Look
from experiments.plotting.plots import labels_at_right, panel_grid
from simulator import Machine, Program, simulate
from simulator.pool import ALLOCATORS as POOLS, program_lifetimes, timeline_lifetimes

TITLE = "SmartPool, Fig. 10: footprint against batch size"
MB = 2**20
ZERO = 0.0005  # an overhead below it is 0.0 %
PLAIN = ("cudamalloc", "cnmem", "smartpool")
CLAIMS = (  # overhead, least reduction of CnMem's footprint, quotation
    (0.0, 1 / 3, "up to 1/3 of the footprint without increasing the training time"),
    (0.15, 0.6, "no less than 60% of the footprint with smaller than 15% overhead"),
)


def tasks(settings: DictConfig) -> list[Row]:
    """One per network and batch size."""
    overheads, batches = (cli.values(settings, key) for key in ("overheads", "batches"))
    for value in overheads:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
            raise cli.UsageError(f"figure.overheads: expected numbers of at least 0, got {value!r}")
    for value in batches:
        if isinstance(value, bool) or not isinstance(value, int) or value < 2:
            raise cli.UsageError(f"figure.batches: expected integers of at least 2, got {value!r}")
    pool = cli.choice(settings, "pool", tuple(name for name, how in POOLS.items() if not how.online))
    search = {
        "pool": pool,
        "seconds": cli.number(settings, "seconds"),
        "steps": cli.integer(settings, "steps", least=2),
    }
    return [
        {"network": name, "batch": batch, "overheads": sorted(overheads), **search}
        for name in figures.networks(settings)
        for batch in batches
    ]


def run(task: Row, machine: Machine) -> Row:
    """Footprints of one network at one batch size, in bytes."""
    from experiments import workloads  # PyTorch is only needed to capture

    config = figures.workload(task["network"])
    program = at_batch(config, task["batch"], machine)
    lives = program_lifetimes(program).intervals
    footprints = {name: figures.packed(name, lives, machine.alignment).footprint for name in PLAIN}
    return {
        "load": program.peak_bytes,
        "ideal_ns": program.ideal_ns,
        "memory": machine.memory_bytes,
        "kept_by_singa": sum(t.nbytes for tensors in kept_by_singa(workloads.build(config)[0]) for t in tensors),
        "footprints": footprints,
        "swapped": smallest(program, machine, task),
    }


def at_batch(config: dict[str, Any], batch: int, machine: Machine) -> Program:
    """A workload at another batch size; its durations as the module says."""
    from experiments import workloads

    captured = workloads.load({**config, "batch_size": batch, "iteration_ms": {}}, machine)
    measured = figures.measured_ms(config, machine)
    if measured is None:
        return captured.program
    roofline = captured.program.ideal_ns
    if batch != config["batch_size"]:
        roofline = workloads.load({**config, "iteration_ms": {}}, machine).program.ideal_ns
    return captured.on(machine, iteration_ns=round(measured * 1e6 * captured.program.ideal_ns / roofline)).program


def smallest(program: Program, machine: Machine, search: Row) -> list[Row]:
    """For each of the overheads the smallest footprint that the planner finds."""
    pool, seconds = search["pool"], search["seconds"]
    planner = SmartPoolAutoSwap(pool=pool, seconds=seconds, steps=search["steps"])
    out = []
    plans = planner.smallest(program, machine, [max(overhead, ZERO) for overhead in search["overheads"]])
    for overhead, plan in zip(search["overheads"], plans, strict=True):
        timeline = simulate(program, plan, machine, plan.limit)
        lives = timeline_lifetimes(timeline).intervals
        out.append({
            "at_most": overhead, "overhead": timeline.overhead, "load": lives.peak_bytes, "swaps": len(plan.decisions),
            "footprint": figures.packed(pool, lives, machine.alignment, seconds).footprint,
        })  # fmt: skip
    return out


# ------------------------------------------------------------------------------------------ for people


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Per network: footprints at the batch size nearest to 100, what swapping saves at all, slopes."""
    overheads = rows[0]["overheads"]
    batch = min((row["batch"] for row in rows), key=lambda b: abs(b - 100))
    heads = [
        f"MB at batch {batch} (less than CnMem, at all)", "cudaMalloc", "CnMem", "SmartPool",
        *(f"+AutoSwap {o:.0%}" for o in overheads), "MB per image: CnMem", f"+AutoSwap {overheads[-1]:.0%}",
    ]  # fmt: skip
    cells = []
    for network, lines in _by_network(rows).items():
        here = next(row for row in lines if row["batch"] == batch)
        cells.append([
            figures.label(network), *(f"{here['footprints'][pool] / MB:,.0f}" for pool in PLAIN),
            *(f"{s['footprint'] / MB:,.0f} ({_range([_saved(row, i) for row in lines])})"
              for i, s in enumerate(here["swapped"])),
            *(f"{_line(lines, sizes)[0] / MB:.2f}" for sizes in (_plain(lines, "cnmem"), _swapped(lines, -1))),
        ])  # fmt: skip
    return heads, cells


def notes(rows: list[Row]) -> list[str]:
    """The paper's claims beside ours, and a sentence per network."""
    out = [
        "Networks and batch sizes are our choice, and durations at other batch sizes than 100 are scaled: the paper's "
        "text gives neither, and no numbers of the figure, only the claims quoted here."
    ]
    networks = _by_network(rows)
    for overhead, share, quotation in CLAIMS:
        for i in (i for i, o in enumerate(rows[0]["overheads"]) if o == overhead):
            saved = [_saved(row, i) for row in rows]
            loads = [1 - row["swapped"][i]["load"] / row["footprints"]["cnmem"] for row in rows]
            enough, perfect = (sum(s >= share for s in some) for some in (saved, loads))
            without = f" ({perfect} if addresses took no more than the load)" if perfect > enough else ""
            out.append(
                f'"{quotation}": ours is {_range(saved)}; {enough} of {len(saved)} points save at least {share:.0%}'
                f"{without}. With what SINGA keeps on both sides, and never swapped, it would be "
                f"{_range([_saved(row, i, row['kept_by_singa']) for row in rows])}."
            )
    out.append(
        "Without overhead ours saves more than the paper's: the simulator has no cost of synchronisation, and the "
        "programs have none of what SINGA keeps."
    )
    if all(len(lines) > 2 for lines in networks.values()):
        swapped = [_line(lines, _swapped(lines, -1)) for lines in networks.values()]
        slopes = [s / _line(n, _plain(n, "cnmem"))[0] for (s, _), n in zip(swapped, networks.values(), strict=True)]
        out.append(
            '"The curve for each network is linear with a smaller slope than the baseline": at '
            f"{rows[0]['overheads'][-1]:.0%} overhead ours has {min(slopes):.2f} to {max(slopes):.2f} of CnMem's slope "
            f"and is at most {max(off for _, off in swapped):.1%} off a line."
        )
    return [*out, *(why(lines) for lines in networks.values())]


def why(lines: list[Row]) -> str:
    """A network's sentence: what its footprint is made of where swapping is most."""
    last = max(lines, key=lambda row: row["batch"])
    tight, name = last["swapped"][-1], figures.label(last["network"])
    return (
        f"{name} at batch {last['batch']}: CnMem's holes are {_over(last, 'cnmem'):.1%} of the load, SmartPool's "
        f"{_over(last, 'smartpool'):.2%}; at {tight['at_most']:.0%} overhead {tight['swaps']} swaps leave "
        f"{tight['load'] / last['load']:.0%} of the load, in {tight['footprint'] / tight['load'] - 1:.1%} more "
        "addresses, as blocks come back in another order than they went."
    )


def _over(row: Row, pool: str) -> float:
    return float(row["footprints"][pool] / row["load"] - 1)


def _saved(row: Row, i: int, more: int = 0) -> float:
    """What part of CnMem's footprint the i-th overhead saves, ``more`` bytes on both sides."""
    return float(1 - (row["swapped"][i]["footprint"] + more) / (row["footprints"]["cnmem"] + more))


def _by_network(rows: list[Row]) -> dict[str, list[Row]]:
    out: dict[str, list[Row]] = {}
    for row in rows:
        out.setdefault(row["network"], []).append(row)
    return {name: sorted(lines, key=lambda row: row["batch"]) for name, lines in out.items()}


def _plain(lines: list[Row], pool: str) -> list[int]:
    return [row["footprints"][pool] for row in lines]


def _swapped(lines: list[Row], i: int) -> list[int]:
    return [row["swapped"][i]["footprint"] for row in lines]


def _line(lines: list[Row], sizes: list[int]) -> tuple[float, float]:
    """Slope of the least-squares line, bytes per image, and how far the sizes are off it, of themselves, at most."""
    x, y = np.array([row["batch"] for row in lines], float), np.array(sizes, float)
    if len(x) < 2:
        return float(y[0] / x[0]), 0.0
    slope, start = np.polyfit(x, y, 1)
    return float(slope), float(np.abs((slope * x + start) / y - 1).max())


def _range(shares: list[float]) -> str:
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    return low if low == high else f"{low}–{high}"


def draw(rows: list[Row], path: Path) -> None:
    """A panel per network: footprint across batch sizes, named at the right with what is saved there."""
    networks = _by_network(rows)
    overheads = rows[0]["overheads"]
    shades = [SWAPPED[round(i * (len(SWAPPED) - 1) / max(len(overheads) - 1, 1))] for i in range(len(overheads))]
    with panel_grid(path, len(networks), 3, (5.2, 3.7), (0.0, 0.5)) as (grid, columns):
        for axes, (network, lines) in zip(grid, networks.items(), strict=True):
            x = [row["batch"] for row in lines]
            series: list[tuple[Look, list[int], str]] = [
                (ALLOCATORS[pool], _plain(lines, pool), ALLOCATORS[pool].label.partition(",")[0]) for pool in PLAIN
            ]
            series += [
                (Look("", shade, "o"), _swapped(lines, i), f"+AutoSwap {o:.0%}: −{_saved(lines[-1], i):.0%}")
                for i, (o, shade) in enumerate(zip(overheads, shades, strict=True))
            ]
            levels = []
            for look, sizes, name in series:
                y = [s / 2**30 for s in sizes]
                over = look is ALLOCATORS["cudamalloc"]  # SmartPool lies on it
                axes.plot(x, y, color=INK if over else look.colour, marker="" if over else look.marker, markersize=5,
                          linewidth=1.2 if over else 1.8, linestyle=(0, (1, 1.5)) if over else "-",
                          zorder=4 if over else 3)  # fmt: skip
                levels.append((y[-1], name, INK if over else look.colour))
            axes.set_ylim(0, 1.06 * max(s for _, sizes, _ in series for s in sizes) / 2**30)
            axes.set_xlim(0, x[-1] * 1.02)
            memory = lines[0]["memory"] / 2**30
            if memory < axes.get_ylim()[1]:
                axes.axhline(memory, color=INK, linewidth=1, linestyle=(0, (5, 3)))
                axes.annotate(
                    "the GPU's memory", (0, memory), (4, 3), textcoords="offset points", fontsize=9.5, color=INK
                )
            axes.set_xticks(x)
            axes.set_title(figures.label(network))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
            labels_at_right(axes, levels)
        for axes in grid[::columns]:
            axes.set_ylabel("footprint (GiB)")
        for axes in grid[-columns:]:
            axes.set_xlabel("batch size")
        fig = grid[0].figure
        fig.suptitle("Footprint against batch size on a GTX 1080 Ti", x=0.01, ha="left", fontsize=13, fontweight="bold",
                     color=INK)  # fmt: skip
        keys = ", ".join(f"{o:.0%}" for o in overheads)
        fig.supxlabel(
            f"+AutoSwap {keys}: SmartPool+AutoSwap with at most so much simulated overhead, and what it saves of "
            "CnMem's footprint at the largest batch size. cudaMalloc (dotted) is the peak load.",
            x=0.01, ha="left", fontsize=10, color=INK,
        )  # fmt: skip
