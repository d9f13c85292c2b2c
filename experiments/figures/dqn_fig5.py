"""Fig. 5 of "GPU memory management for neural networks using deep Q-network" (2020), section 5: overhead against memory
reduction for DQN (swap), DQN (swap and recompute), MXNet-memonger, SuperNeurons and TFLMS; GTX 1080 Ti. Lines are means
over the seeds and bands their range; the grey line is the floor of agents/floor/, below which no plan can be.

The paper's text gives neither depths, sizes nor numbers, only claims, which the notes quote. Ours:

1. Depths and sizes are our choice; ResNet's and VGG's iteration times are SmartPool's Table I, the others' roofline.
2. Limits are those of the YAML, and the smallest at which each baseline finds a plan.
3. A baseline has the settings that serve it best at a limit; each mode of SuperNeurons plans at every limit it reaches.
4. The DQN is one agent that carries over limits, modes and the networks of a group (agents/learned/transfer.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter
from omegaconf import DictConfig, OmegaConf

import agents
from agents.floor import floor
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.plotting.palette import FAINT, INK, colour
from experiments.plotting.plots import panel_grid
from simulator import Machine, Program, simulate

TITLE = "DQN, Fig. 5: overhead against memory reduction"
CLOSE = 0.005  # of the peak: how exactly the smallest limit of a baseline is found
SAME = 1e-6  # overheads that differ by less are equal


class Baseline(NamedTuple):
    """A planner that the paper compares with."""

    label: str
    planner: str
    options: dict[str, Any]
    marker: str
    cannot: tuple[str, ...]  # families that the paper's program could not run (section 5.1)


_OTHERS = ("kmeans", "resnet_stochastic")
BASELINES = {
    "tflms": Baseline("TFLMS", "tflms", {}, "D", _OTHERS),
    "memonger": Baseline("MXNet-memonger", "memonger", {}, "s", ("lstm", *_OTHERS)),
    "sn_swap": Baseline("SuperNeurons, swap", "superneurons", {"mode": "swap"}, "v", ("lstm", *_OTHERS)),
    "sn_recompute": Baseline(
        "SuperNeurons, recompute", "superneurons", {"mode": "recompute"}, "^", ("resnet", "lstm", *_OTHERS)
    ),
    "sn_joint": Baseline("SuperNeurons, both", "superneurons", {"mode": "joint"}, "P", ("lstm", *_OTHERS)),
}
RIVALS = {"swap": ("tflms", "sn_swap"), "joint": tuple(BASELINES)}  # who does no more than this mode of the DQN
ORDER = ("resnet", "vgg", "unet", "lstm", "kmeans", "resnet_stochastic")  # of families, as the paper has them
WHY = {  # a family: why baselines have no plan for it
    "unet": "SuperNeurons swaps outputs of convolutions only: without batch norm these die at the next ReLU in U-Net.",
    "lstm": "An LSTM has no convolution, and memonger cuts where one tensor crosses: between its steps four states do.",
    "kmeans": "All five plan what a backward pass uses again, and K-means has none.",
}
TOP = 0.6  # of the axis of overheads: what is above is named
MODES = {"swap": "DQN, swap", "joint": "DQN, swap and recompute"}


def tasks(settings: DictConfig) -> list[Row]:
    """One per group of networks and seed."""
    groups = [[str(name) for name in group] for group in cli.values(settings, "groups")]
    figures.networks(OmegaConf.create({"networks": [name for group in groups for name in group]}))
    limits = cli.values(settings, "limits")
    for value in limits:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1:
            raise cli.UsageError(f"figure.limits: expected fractions between 0 and 1, got {value!r}")
    seeds = cli.values(settings, "seeds")
    for value in seeds:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise cli.UsageError(f"figure.seeds: expected integers of at least 0, got {value!r}")
    shared: Row = {"limits": sorted(limits, reverse=True), "min_bytes": cli.integer(settings, "min_bytes", least=1)}
    for key in ("transfer", "agent"):
        shared[key] = cli.plain(settings[key])
    _agent(0, shared)  # a wrong key is an error before anything is computed
    changes, kernels = cli.plain(settings.changes), cli.integer(settings, "floor_kernels")
    return [
        {"networks": group, "seed": seed, **shared, "changes": {n: changes[n] for n in group if n in changes},
         "floor_kernels": kernels if seed == seeds[0] else 0}
        for seed in seeds
        for group in groups
    ]  # fmt: skip


def _agent(seed: int, task: Row) -> Any:
    """The agent of a task; raises UsageError where a setting is wrong."""
    from agents.learned.dqn_config import DQNConfig
    from agents.learned.transfer import Agent, TransferConfig  # PyTorch takes seconds to import

    config = cli.dataclass_of(DQNConfig, OmegaConf.create({**task["agent"], "min_bytes": task["min_bytes"]}), "agent")
    return Agent(config, cli.dataclass_of(TransferConfig, OmegaConf.create(task["transfer"]), "transfer"), seed)


def run(task: Row, machine: Machine) -> Row:
    """For each network of the group what each planner achieves; fractions of its peak, overheads."""
    agent = _agent(task["seed"], task)
    found = {}
    for name in task["networks"]:
        program = figures.program(name, machine, **task["changes"].get(name, {}))
        found[name] = compare(program, machine, agent, task)
    return {"found": found}


def compare(program: Program, machine: Machine, agent: Any, task: Row) -> Row:
    """One program: the baselines, the agent in both modes, the floor."""
    peak, min_bytes = program.peak_bytes, task["min_bytes"]
    grid = [int(f * peak) for f in task["limits"]]
    ends = [end for key in BASELINES if (end := smallest(key, program, machine, grid, min_bytes)) is not None]
    limits = sorted({*grid, *ends}, reverse=True)
    baselines = {}
    for key in BASELINES:
        scored = [(limit, overhead(key, program, machine, limit, min_bytes)) for limit in limits]
        baselines[key] = [[limit / peak, o] for limit, o in scored if o is not None]
    dqn: Row = {}
    swaps: list[Any] = []
    for mode in MODES:
        swept = agent.sweep(program, machine, limits, mode, swaps)
        swaps = swept
        dqn[mode] = [
            {"limit": f.limit / peak, "overhead": f.overhead, "walked": _number(f.walked), "greedy": _number(f.greedy),
             "calls": f.simulator_calls}
            for f in swept if f.plan is not None
        ]  # fmt: skip
    transfer = machine.d2h_ns(peak - sum(t.nbytes for t in program.tensors if t.persistent))
    floors = []
    if len(program.kernels) <= task["floor_kernels"]:
        bounds = [(limit, floor(program, machine, limit)) for limit in limits]
        floors = [[limit / peak, bound.overhead] for limit, bound in bounds if bound.feasible]
    return {"peak": peak, "ideal_ns": program.ideal_ns, "kernels": len(program.kernels), "transfer_ns": transfer,
            "baselines": baselines, "dqn": dqn, "floor": floors}  # fmt: skip


def _number(value: float) -> float | None:
    return None if np.isnan(value) else value


def overhead(key: str, program: Program, machine: Machine, limit: int, min_bytes: int) -> float | None:
    """A baseline's overhead within a limit; None where it has no plan."""
    baseline = BASELINES[key]
    try:
        plan = agents.make(baseline.planner, min_bytes=min_bytes, **baseline.options).plan(program, machine, limit)
    except agents.Infeasible:
        return None
    return simulate(program, plan, machine, limit).overhead


def smallest(key: str, program: Program, machine: Machine, grid: list[int], min_bytes: int) -> int | None:
    """About the smallest limit at which a baseline finds a plan; None where it finds none at any of the grid."""
    fits = [limit for limit in grid if overhead(key, program, machine, limit, min_bytes) is not None]
    if not fits:
        return None
    high = min(fits)
    low = max((limit for limit in grid if limit < high), default=high)
    while high - low > CLOSE * program.peak_bytes:
        middle = (low + high) // 2
        if overhead(key, program, machine, middle, min_bytes) is None:
            low = middle
        else:
            high = middle
    return high


# ------------------------------------------------------------------------------------------ for people


class Panel(NamedTuple):
    """One network over the seeds."""

    name: str
    first: Row  # what does not depend on the seed
    dqn: dict[str, dict[float, list[float]]]  # by mode and limit, over the seeds that found a plan
    details: dict[str, list[Row]]  # by mode, over limits and seeds
    seeds: int


def panels(rows: list[Row]) -> list[Panel]:
    """In the order of the paper's families, else of the tasks."""
    names = list(dict.fromkeys(name for row in rows for name in row["networks"]))
    names.sort(key=lambda name: [*ORDER, family(name)].index(family(name)))
    out = []
    for name in names:
        runs = [row["found"][name] for row in sorted(rows, key=lambda r: r["seed"]) if name in row["networks"]]
        dqn: dict[str, dict[float, list[float]]] = {mode: {} for mode in MODES}
        for run in runs:
            for mode in MODES:
                for point in run["dqn"][mode]:
                    dqn[mode].setdefault(point["limit"], []).append(point["overhead"])
        details = {mode: [point for run in runs for point in run["dqn"][mode]] for mode in MODES}
        first = max(runs, key=lambda run: len(run["floor"]))
        out.append(Panel(name, first, dqn, details, len(runs)))
    return out


class Duel(NamedTuple):
    """The DQN and a baseline at one limit."""

    network: str
    mode: str
    baseline: str
    limit: float
    mean: float  # the DQN's over its seeds
    worst: float
    theirs: float


def family(network: str) -> str:
    """The family of a workload."""
    return str(figures.workload(network)["family"])


def duels(panel: Panel) -> Iterator[Duel]:
    """Every limit at which a rival of a mode has a plan; the DQN counts as infinite where a seed of it has none."""
    for mode, rivals in RIVALS.items():
        for key in rivals:
            for limit, theirs in panel.first["baselines"][key]:
                ours = panel.dqn[mode].get(limit, [])
                if len(ours) < panel.seeds:
                    ours = [float("inf")]
                yield Duel(panel.name, mode, key, limit, float(np.mean(ours)), max(ours), theirs)


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Per network and memory reduction: the DQN in both modes, means over the seeds, and the best baseline."""
    limits = rows[0]["limits"]
    heads = ["DQN, swap and recompute / DQN, swap / best baseline", *(f"−{1 - f:.0%} memory" for f in limits)]
    cells = []
    for panel in panels(rows):
        line = [figures.label(panel.name)]
        for limit in limits:
            parts = [_mean(_at(panel.dqn[mode], limit)) for mode in reversed(MODES)]
            theirs = [(o, key) for key in BASELINES for at, o in panel.first["baselines"][key] if _near(at, limit)]
            best = min(theirs, default=None)
            parts.append("–" if best is None else f"{best[0]:.2%} {BASELINES[best[1]].label}")
            line.append(" / ".join(parts))
        cells.append(line)
    return heads, cells


def _near(at: float, limit: float) -> bool:
    return abs(at - limit) < 1e-6


def _at(points: dict[float, list[float]], limit: float) -> list[float]:
    return next((found for at, found in points.items() if _near(at, limit)), [])


def _mean(overheads: list[float]) -> str:
    if not overheads:
        return "–"
    low, high = min(overheads), max(overheads)
    spread = f" ({low:.2%} to {high:.2%})" if high - low >= 0.00005 else ""
    return f"{np.mean(overheads):.2%}{spread}"


def notes(rows: list[Row]) -> list[str]:
    """Claims, how far the DQN is from the baselines and the floor, what in it does the work, who cannot run what."""
    found = panels(rows)
    changes = {name: keys for row in rows for name, keys in row.get("changes", {}).items()}
    sizes = [
        f"; {figures.label(name)} has {', '.join(f'{key} {value:,}' for key, value in keys.items())} here"
        for name, keys in changes.items()
    ]
    return [
        "Depths, sizes and limits are our choice: the paper's text names none, and has no numbers of the figure"
        f"{''.join(sizes)}.",
        *_against(found),
        _parts(found),
        *_spread(found),
        *_floors(found),
        *_architectures(rows, found),
        *_runs(found),
    ]


def _against(found: list[Panel]) -> list[str]:
    every = [duel for panel in found for duel in duels(panel)]
    above = [duel for duel in every if duel.worst > duel.theirs + SAME]
    below = [duel.theirs - duel.mean for duel in every if duel.theirs > SAME and duel.mean < float("inf")]
    text = (
        f'"Our results are better than MXNet-memonger, SuperNeurons, and TFLMS": at {len(every)} pairs of a limit and '
        "a baseline that has a plan there (swapping baselines against both modes of the DQN, the others against swap "
        f"and recompute) the DQN is above the baseline at {len(above)}"
    )
    if above:
        worst = max(above, key=lambda duel: duel.worst - duel.theirs)
        text += (
            f", at most by {100 * (worst.worst - worst.theirs):.2f} points ({MODES[worst.mode]} on "
            f"{figures.label(worst.network)} at {worst.limit:.0%} of the peak, {BASELINES[worst.baseline].label})"
        )
    out = [f"{text}, on any seed."]
    if below:
        out[0] += f" Where the baseline has an overhead, the DQN is {100 * np.median(below):.1f} points below (median)."
    swaps = [
        (float(np.mean(panel.dqn["swap"][limit])) - theirs, panel.name, limit, key)
        for panel in found
        for key in ("memonger", "sn_recompute", "sn_joint")
        for limit, theirs in panel.first["baselines"][key]
        if panel.dqn["swap"].get(limit)
    ]
    worse = [entry for entry in swaps if entry[0] > SAME]
    if swaps and not worse:
        out.append(f"DQN (swap) is above none of the recomputing baselines either, at {len(swaps)} pairs.")
    if worse:
        most, name, limit, key = max(worse)
        out.append(
            f"DQN (swap) is above a baseline that recomputes at {len(worse)} of {len(swaps)} pairs, at most by "
            f"{100 * most:.1f} points ({figures.label(name)} at {limit:.0%} of the peak, {BASELINES[key].label}): "
            "there transfers are what is short, and only recomputing takes their place."
        )
    return out


def _parts(found: list[Panel]) -> str:
    points = [p for panel in found for mode in MODES for p in panel.details[mode] if (p["walked"] or 0.0) > SAME]
    spent = sum(p["calls"] for panel in found for mode in MODES for p in panel.details[mode])
    if not points:
        return "The agent's walks found plans without overhead at every limit."
    greedy = [p["greedy"] for p in points if p["greedy"] is not None]
    means = [100 * float(np.mean([p[key] for p in points])) for key in ("walked", "overhead")]
    alone = f" (the network's own, greedy walk: {100 * np.mean(greedy):.1f} %)" if greedy else ""
    return (
        f"What does the work: over the {len(points)} points at which the best walk had an overhead it was "
        f"{means[0]:.1f} % on average{alone}, and {means[1]:.1f} % after the refinement around it "
        f"(agents/learned/transfer.py, 3); {spent:,} simulator calls in all. The control of the network, the same "
        "search with it never asked, is not in these rows; what the network adds where that was run is in "
        "agents/learned/README.md."
    )


def _spread(found: list[Panel]) -> list[str]:
    widths = [
        (max(o) - min(o), panel.name, limit, mode)
        for panel in found
        for mode in MODES
        for limit, o in panel.dqn[mode].items()
        if len(o) > 1
    ]
    if not widths:
        return ["One seed: nothing is said of the spread over seeds."]
    width, name, limit, mode = max(widths)
    return [
        f"{max(panel.seeds for panel in found)} seeds; they differ most for {MODES[mode]} on {figures.label(name)} at "
        f"{limit:.0%} of the peak, by {100 * width:.2f} points."
    ]


def _floors(found: list[Panel]) -> list[str]:
    gaps = [
        (float(np.mean(panel.dqn["joint"][limit])) - bound, panel.name, limit)
        for panel in found
        for limit, bound in panel.first["floor"]
        if panel.dqn["joint"].get(limit)
    ]
    if not gaps:
        return []
    gap, name, limit = max(gaps)
    least = sum(g <= SAME for g, _, _ in gaps)
    without = [figures.label(panel.name) for panel in found if not panel.first["floor"]]
    slow = f"; for {', '.join(without)} it takes too long to compute" if without else ""
    return [
        f"DQN (swap and recompute) is at the floor at {least} of {len(gaps)} limits and at most {100 * gap:.1f} points "
        f"above it ({figures.label(name)} at {limit:.0%} of the peak){slow}."
    ]


def _architectures(rows: list[Row], found: list[Panel]) -> list[str]:
    """Section 5.2."""
    limit = min(rows[0]["limits"], key=lambda f: abs(f - 0.4))
    texts = []
    for panel in found:
        means = [_at(panel.dqn[mode], limit) for mode in MODES]
        said = " / ".join(f"{np.mean(o):.1%}" if o else "no plan" for o in means)
        texts.append(f"{figures.label(panel.name)} {said} ({panel.first['transfer_ns'] / panel.first['ideal_ns']:.0%})")
    return [
        "Section 5.2 has U-Net, LSTM and ResNet with stochastic depth worse than ResNet and VGG. Ours in "
        f"{limit:.0%} of the memory, swap / swap and recompute, and in brackets the time to copy to the host all that "
        f"is not persistent at the peak, of the iteration: {', '.join(texts)}."
    ]


def _runs(found: list[Panel]) -> list[str]:
    """Section 5.1: who can run what."""
    here: dict[str, list[str]] = {}
    never: dict[str, list[str]] = {}
    for panel in found:
        for key, baseline in BASELINES.items():
            if panel.first["baselines"][key] and family(panel.name) in baseline.cannot:
                here.setdefault(panel.name, []).append(baseline.label)
            elif not panel.first["baselines"][key]:
                never.setdefault(panel.name, []).append(baseline.label)
    out = []
    if never:
        text = "; ".join(f"{figures.label(name)}: {', '.join(who)}" for name, who in never.items())
        why = [reason for name, reason in WHY.items() if name in map(family, never)]
        out.append(f"No plan at any of the limits: {text}. {' '.join(why)}".rstrip())
    if here:
        text = "; ".join(f"{figures.label(name)}: {', '.join(who)}" for name, who in here.items())
        out.append(
            f"Planned here, where the paper's program could not run (hollow): {text}. Ours plan a straight line of "
            "kernels: one draw of the stochastic depth, and the LSTM cell by cell; the paper's is a call of cuDNN."
        )
    return out


def draw(rows: list[Row], path: Path) -> None:
    """A panel per network: overhead against memory reduction."""
    found = panels(rows)
    with panel_grid(path, len(found), 4, (4.4, 4.0), (0.0, 0.9)) as (grid, columns):
        for axes, panel in zip(grid, found, strict=True):
            _panel(axes, panel, rows[0]["limits"])
        for axes in grid[::columns]:
            axes.set_ylabel("overhead over the ideal time")
        fig = grid[0].figure
        fig.suptitle("Overhead against memory reduction, GTX 1080 Ti", x=0.01, ha="left", fontsize=13,
                     fontweight="bold", color=INK)  # fmt: skip
        keys = [Line2D([], [], label=MODES[mode], **_style(mode)) for mode in reversed(MODES)]
        keys += [
            Line2D([], [], color=colour(b.planner), marker=b.marker, markersize=6, linewidth=1.2, label=b.label)
            for b in BASELINES.values()
        ]
        keys.append(Line2D([], [], color=FAINT, linewidth=1, label="the floor: no plan is below"))
        keys.append(Line2D([], [], color=INK, marker="o", markerfacecolor="white", linestyle="",
                           label="hollow: the paper's program could not run it"))  # fmt: skip
        fig.legend(handles=keys, loc="outside lower center", ncols=min(5, 2 * columns - 1), fontsize=10)


def _style(mode: str) -> dict[str, Any]:
    """How a mode of the DQN looks: the better one whole, the other dashed."""
    return {"color": colour("dqn"), "linewidth": 2.4 if mode == "joint" else 1.8, "zorder": 5,
            "linestyle": "-" if mode == "joint" else (0, (3, 1.4))}  # fmt: skip


def _panel(axes: Any, panel: Panel, limits: list[float]) -> None:
    gib = panel.first["peak"] / 2**30
    heights = [o for points in panel.first["baselines"].values() for _, o in points]
    heights += [o for mode in MODES for several in panel.dqn[mode].values() for o in several]
    highest = max([*heights, 0.05])
    top = min(1.08 * highest, TOP)
    missing = []
    for key, baseline in BASELINES.items():
        points = sorted(panel.first["baselines"][key], reverse=True)
        if not points:
            missing.append(baseline.label.replace(", ", " "))
            continue
        x, y = zip(*((1 - at, o) for at, o in points), strict=True)
        ink = colour(baseline.planner)
        face = "white" if family(panel.name) in baseline.cannot else ink
        axes.plot(
            x, y, color=ink, marker=baseline.marker, markersize=5.5, linewidth=1.1, markerfacecolor=face, zorder=3
        )
    if panel.first["floor"]:
        x, y = zip(*((1 - at, bound) for at, bound in panel.first["floor"]), strict=True)
        axes.plot(x, y, color=FAINT, linewidth=1, zorder=2)
    for mode in MODES:
        if lines := sorted(panel.dqn[mode].items(), reverse=True):
            x = [1 - at for at, _ in lines]
            axes.plot(x, [np.mean(o) for _, o in lines], **_style(mode))
            low, high = [min(o) for _, o in lines], [max(o) for _, o in lines]
            axes.fill_between(x, low, high, color=colour("dqn"), alpha=0.18, linewidth=0, zorder=4)
    axes.set(
        title=figures.label(panel.name), xlim=(1 - limits[0] - 0.04, 1 - limits[-1] + 0.04), ylim=(-0.02 * top, top)
    )
    if highest > top:
        at, key = max((at, key) for key, points in panel.first["baselines"].items() for at, o in points if o > top)
        axes.annotate(f"to {highest:.0%} ↑", (1 - at, top), (0, -4), textcoords="offset points", ha="left", va="top",
                      fontsize=9, color=colour(BASELINES[key].planner))  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(PercentFormatter(1, decimals=0))
    above = axes.secondary_xaxis("top", functions=(lambda v: (1 - v) * gib, lambda v: 1 - v / gib))
    above.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.3g} GiB"))
    above.xaxis.set_major_locator(MaxNLocator(5))
    above.tick_params(labelsize=8.5, colors=FAINT)
    names = ", ".join(missing) if len(missing) < len(BASELINES) else "any baseline"
    axes.set_xlabel("memory reduction" + (f"\nno plan by {names}" if missing else "\n"))
