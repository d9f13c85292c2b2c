"""Figure 6 of "HOME: A Holistic GPU Memory Management Framework for Deep Learning" (2022), section 4.2: images per
second against the batch size of PyTorch, vDNN, SuperNeurons, Capuchin and HOME; six networks on CIFAR-10, RTX 2080 Ti.

The paper's text gives none of the figure's numbers, but claims (``CLAIMS``) and, in Table 2, three points of every
panel. Networks, limit and durations are those of experiments/figures/home_table2.py.

1. Batch sizes are multiples of the largest one that fits without a plan.
2. vDNN is ``vdnn_conv``, else ``vdnn_all``; SuperNeurons drops all it may; the others act only if memory is short.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from omegaconf import DictConfig

from experiments.common import cli
from experiments.common.report import Row
from experiments.figures import home
from experiments.figures.home import METHODS, NETWORKS, TABLE2
from experiments.plotting import palette
from experiments.plotting.palette import INK
from experiments.plotting.plots import panel_grid
from simulator.machine import Machine

TITLE = "HOME, Fig. 6: throughput against batch size"
CLAIMS = {"vDNN": 5.7, "SuperNeurons": 2.0, "Capuchin": 1.3}  # "up to": HOME's throughput over theirs, at one batch


def tasks(settings: DictConfig) -> list[Row]:
    """One per network and batch size; a network's one after the other."""
    shares = cli.values(settings, "shares")
    for value in shares:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < float("inf"):
            raise cli.UsageError(f"figure.shares: expected positive numbers, got {value!r}")
    options = home.search(settings)
    return [
        {"network": name, "share": share, **options} for name in home.networks(settings) for share in sorted(shares)
    ]


def run(task: Row, machine: Machine) -> Row:
    """What each method achieves on one network at one batch size."""
    of = home.sizes(task["network"], machine)
    options = {key: task[key] for key in ("particles", "iterations")}
    batch = round(task["share"] * home.unplanned(of))
    program = of.at(batch)
    return {
        "batch": batch,
        "limit": machine.memory_bytes,
        "ideal_ns": program.ideal_ns,
        "methods": {
            method: home.outcome(program, home.planned(method, program, machine, options), machine)
            for method in METHODS
        },
    }


# ------------------------------------------------------------------------------------------ for people


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Images/s of every method at every batch size."""
    heads = ["images/s", "batch", "over the largest without a plan", *METHODS]
    cells = [
        [NETWORKS[row["network"]].label, f"{row['batch']:,}", f"{row['share']:.2f}",
         *(_cell(row, method) for method in METHODS)]
        for row in rows
    ]  # fmt: skip
    return heads, cells


def _cell(row: Row, method: str) -> str:
    found = row["methods"][method]
    if found is None:
        return "does not fit"
    return f"{rate(row, method):,.0f}{' (all)' if found['planner'] == 'vdnn_all' else ''}"


def rate(row: Row, method: str) -> float:
    """Images per second; 0 where nothing fits."""
    found = row["methods"][method]
    return float(row["batch"] / found["iteration_ns"] * 1e9) if found else 0.0


def notes(rows: list[Row]) -> list[str]:
    """The paper's claims beside ours, then a sentence per network."""
    out = []
    for rival, theirs in CLAIMS.items():
        both = [(rate(r, "HOME") / rate(r, rival), r) for r in rows if rate(r, "HOME") and rate(r, rival)]
        if not both:
            continue
        (most, at), (least, there) = max(both, key=lambda x: x[0]), min(both, key=lambda x: x[0])
        out.append(
            f"HOME over {rival} at one batch size: the paper has up to {theirs}×, ours is {least:.3f} "
            f"({_where(there)}) to {most:.2f} ({_where(at)})."
        )
    needed = [r for r in rows if not rate(r, "PyTorch") and rate(r, "HOME") and rate(r, "Capuchin")]
    if needed:
        behind = sum(rate(r, "Capuchin") > rate(r, "HOME") for r in needed)
        out.append(
            f"Capuchin is the faster one at {behind} of the {len(needed)} points where a plan is needed and both have "
            "one (paper: at none): HOME's swarm has come to rest too early there, see Fig. 8."
        )
    gain = max(ideal(lines[-1]) / ideal(lines[0]) - 1 for lines in by_network(rows).values())
    over_plain = [
        max(rate(r, "HOME") for r in lines) / plain
        for lines in by_network(rows).values()
        if (plain := max(rate(r, "PyTorch") for r in lines))
    ]
    ours = f"at most {max(over_plain):.3f} times as fast" if over_plain else "not"
    out.append(
        "The paper's HOME is up to 2.46 times as fast as PyTorch because larger batches use the GPU better. Ours is "
        f"{ours}: kernel times are linear in the batch but for the launches, and without a plan "
        f"the largest batch shown would have at most {gain:.2%} more images/s than the smallest."
    )
    return [*out, *(why(lines) for lines in by_network(rows).values())]


def ideal(row: Row) -> float:
    """Images per second without any overhead."""
    return float(row["batch"] / row["ideal_ns"] * 1e9)


def _where(row: Row) -> str:
    return f"{NETWORKS[row['network']].label}, batch {row['batch']:,}"


def by_network(rows: list[Row]) -> dict[str, list[Row]]:
    """Rows of each network, from small batches to large ones."""
    out: dict[str, list[Row]] = {}
    for row in rows:
        out.setdefault(row["network"], []).append(row)
    return {name: sorted(lines, key=lambda row: row["batch"]) for name, lines in out.items()}


def why(lines: list[Row]) -> str:
    """A network's sentence: where vDNN ends, and what HOME and Capuchin do at the largest batch that both fit."""
    paper = NETWORKS[lines[0]["network"]]
    conv = [r["batch"] for r in lines if (r["methods"]["vDNN"] or {}).get("planner") == "vdnn_conv"]
    vdnn = f"vDNN's offloading of convolution inputs fits up to batch {max(conv):,} here" if conv else "vDNN never fits"
    if lines[0]["network"] == "inception_v3_cifar":
        vdnn += f" (the paper's up to 160, {160 / paper.batch[0]:.2f} times PyTorch's largest)"
    both = [r for r in lines if r["methods"]["HOME"] and r["methods"]["Capuchin"]]
    if not both:
        return f"{paper.label}: {vdnn}."
    last = both[-1]
    parts = []
    for method in ("HOME", "Capuchin"):
        found = last["methods"][method]
        parts.append(
            f"{method} swaps {found['swapped_bytes'] / 2**30:.1f} GiB and recomputes "
            f"{found['recomputed_bytes'] / 2**30:.1f} GiB for {found['overhead']:.1%} more time"
        )
    return f"{paper.label}: {vdnn}; at batch {last['batch']:,} {' and '.join(parts)}."


def draw(rows: list[Row], path: Path) -> None:
    """A panel per network: images per second across batch sizes, and the paper's points of Table 2."""
    networks = by_network(rows)
    looks = {method: palette.look(planners[0][0]) for method, planners in METHODS.items()}
    hollow = {m: looks[m].marker.replace("x", "o") for m in TABLE2}  # a cross has no inside
    with panel_grid(path, len(networks), 3, (4.9, 3.5), (0.0, 1.1)) as (grid, columns):
        for axes, (network, lines) in zip(grid, networks.items(), strict=True):
            paper = NETWORKS[network]
            for method, look in looks.items():
                shown = [r for r in lines if r["methods"][method]]
                axes.plot([r["batch"] for r in shown], [rate(r, method) for r in shown], color=look.colour, zorder=3,
                          marker=look.marker, markersize=9 if method == "PyTorch" else 5,
                          linewidth=3.5 if method == "Capuchin" else 1.5)  # fmt: skip
            for method, x, y in zip(TABLE2, paper.batch, paper.throughput, strict=True):
                axes.plot(x, y, hollow[method], color=looks[method].colour, markerfacecolor="white", markersize=9,
                          markeredgewidth=1.8, zorder=4)  # fmt: skip
            axes.set(title=paper.label, ylim=(0, None), xlim=(0, None))
            for axis in (axes.xaxis, axes.yaxis):
                axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
        for axes in grid[::columns]:
            axes.set_ylabel("images/s")
        for axes in grid[-columns:]:
            axes.set_xlabel("batch size")
        keys = [
            Line2D([], [], color=look.colour, marker=look.marker, linewidth=3.5 if method == "Capuchin" else 1.5,
                   label=f"{method}, ours{' (after the drop: all layers)' * (method == 'vDNN')}")
            for method, look in looks.items()
        ]  # fmt: skip
        keys += [
            Line2D([], [], linestyle="", color=looks[m].colour, marker=hollow[m], markerfacecolor="white",
                   markersize=9, markeredgewidth=1.8, label=f"{m}'s largest batch in the paper (Table 2)")
            for m in TABLE2
        ]  # fmt: skip
        fig = grid[0].figure
        fig.legend(handles=keys, loc="outside lower center", ncols=4, fontsize=10)
        fig.suptitle("Throughput against batch size on an RTX 2080 Ti (11 GB)", x=0.01, ha="left", fontsize=13,
                     fontweight="bold", color=INK)  # fmt: skip
