"""Fig. 5 of the DQN paper: the DQN over edits, its controls, the paper's agent, and the paper's baselines."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import cycle
from typing import Any, NamedTuple

import numpy as np
from omegaconf import DictConfig, OmegaConf

import agents
from agents.floor import floor
from agents.planner import LEAST
from experiments import figures
from experiments.common import cli
from experiments.common.bisection import bisect
from experiments.common.report import Row
from experiments.figures.dqn import SAME, paper_config
from experiments.figures.figure import Figure, Rows
from experiments.plotting.charts import Axis, Chart, Line, Mark, Panel
from experiments.plotting.palette import FAINT, color
from simulator import Machine, Program


class Baseline(NamedTuple):
    """Baseline planner of the paper."""

    label: str
    planner: str
    options: dict[str, Any]
    marker: str


BASELINES = {
    "tflms": Baseline("TFLMS", "tflms", {}, "D"),
    "memonger": Baseline("MXNet-memonger", "memonger", {}, "s"),
    "sn_swap": Baseline("SuperNeurons, swap", "superneurons", {"mode": "swap"}, "v"),
    "sn_recompute": Baseline("SuperNeurons, recompute", "superneurons", {"mode": "recompute"}, "^"),
    "sn_joint": Baseline("SuperNeurons, both", "superneurons", {"mode": "joint"}, "P"),
}
SEARCHES: dict[str, tuple[str, dict[str, str]]] = {  # planner and options by key of the rows; equal simulator calls
    "planned": ("dqn", {}),
    "uniform": ("dqn", {"ranks": "uniform"}),
    "policy_search": ("policy_search", {}),
    "annealing": ("annealing", {}),
}
CONTROLS = {  # label, planner of the color, and style of a search's line
    "annealing": ("annealing, both, equal calls", "annealing", "-"),
    "policy_search": ("policy_search, both, equal calls", "policy_search", "-."),
    "uniform": ("DQN without the network, both, equal calls", "annealing", ":"),
}
MODES = {"swap": "DQN over edits, swap", "joint": "DQN over edits, swap and recompute"}


class Fig5(Figure):
    """Fig. 5: overhead against memory reduction, for the DQN over edits and the paper's baselines."""

    name = "dqn_fig5"
    families = ("resnet", "vgg", "unet", "lstm", "kmeans", "resnet_stochastic")  # in the paper's order
    close = 0.005  # of the peak; resolution of a baseline's smallest limit
    top = 0.6  # of the overhead axis; points above it are labeled
    harder = ("unet", "lstm", "resnet_stochastic")  # families that section 5.2 finds worse than ``easier``
    easier = ("resnet", "vgg")

    def tasks(self, settings: DictConfig) -> Rows:
        groups = [[str(name) for name in group] for group in cli.values(settings, "groups")]
        figures.networks(OmegaConf.create({"networks": [name for group in groups for name in group]}))
        limits = figures.numbers(settings, "limits", lambda value: 0 < value < 1, "fractions between 0 and 1")
        seeds = figures.integers(settings, "seeds", 0)
        shared: Row = {"limits": sorted(limits, reverse=True), "min_bytes": cli.integer(settings, "min_bytes", least=1)}
        shared["calls"] = cli.integer(settings, "calls", least=LEAST)
        shared["trained"] = trained_settings(cli.to_dict(settings.trained))
        changes = cli.to_dict(settings.changes)
        kernels = cli.integer(settings, "floor_kernels")
        return [
            {
                "networks": group,
                "seed": seed,
                **shared,
                "changes": {n: changes[n] for n in group if n in changes},
                "floor_kernels": kernels if seed == seeds[0] else 0,
            }
            for seed in seeds
            for group in groups
        ]

    def run(self, task: Row, machine: Machine) -> Row:
        results = {}
        for name in task["networks"]:
            program = figures.program(name, machine, **task["changes"].get(name, {}))
            trained = train_paper(program, machine, task) if name in task["trained"]["networks"] else {}
            results[name] = {**compare(program, machine, task), "trained": trained}
        return {"found": results}

    def template_values(self, rows: Rows) -> Row:
        networks = results_by_network(rows)
        limits = rows[0]["limits"][-4:]
        all_duels = [duel for net in networks for duel in duels(net)]
        above = [duel for duel in all_duels if duel["worst"] > duel["theirs"] + SAME]
        won = [duel for duel in all_duels if duel["worst"] < duel["theirs"] - SAME]
        all_leads = [d["theirs"] - d["mean"] for d in all_duels if d["mean"] < float("inf")]
        paid_leads = [d["theirs"] - d["mean"] for d in all_duels if d["theirs"] > SAME and d["mean"] < float("inf")]
        searched = [duel for duel in all_duels if duel["controls"]]
        tightest = {net.name: overheads_at(net.dqn["joint"], min(limits)) for net in networks}
        mean = {name: float(np.mean(overheads)) if overheads else math.inf for name, overheads in tightest.items()}
        easy = [mean[net.name] for net in networks if family(net.name) in self.easier and mean[net.name] < math.inf]
        harder = []
        for hard in [net.name for net in networks if family(net.name) in self.harder]:
            leads = [mean[hard] - other for other in easy]
            worse, better = sum(lead > SAME for lead in leads), sum(lead < -SAME for lead in leads)
            harder.append({"label": figures.label(hard), "more": worse, "less": better, "pairs": len(leads)})
        details = [point for net in networks for mode in MODES for point in net.details[mode]]
        # Searches are compared where all of them ran and found a plan, and none is free.
        planned = [point for point in details if (point["planned"] or 0.0) > SAME]
        compared = [point for point in planned if all(point[key] is not None for key in SEARCHES)]
        means = {key: 100 * np.mean([point[key] for point in compared]) if compared else None for key in SEARCHES}
        gaps = [
            float(np.mean(net.dqn["joint"][limit])) - bound
            for net in networks
            for limit, bound in net.common["floor"]
            if net.dqn["joint"].get(limit)
        ]
        heads = [f"−{1 - limit:.0%} memory" for limit in limits]
        lines = [{"label": figures.label(net.name), "lines": cells(net, limits)} for net in networks]
        at_floor = [gap for gap in gaps if gap <= SAME]
        return {
            "heads": heads,
            "pairs": len(all_duels),
            "above": len(above),
            "won": len(won),
            "networks": lines,
            "below": 100 * np.median(all_leads) if all_leads else None,
            "below_paid": 100 * np.median(paid_leads) if paid_leads else None,
            "searched": len(searched) or None,
            "controls_above": {key: sum(d["controls"][key] > d["theirs"] + SAME for d in searched) for key in SEARCHES},
            "better": sum(point["planned"] < point["uniform"] - SAME for point in compared),
            "worse": sum(point["planned"] > point["uniform"] + SAME for point in compared),
            "points": len(compared),
            "harder": harder,
            "all": len(compared) or None,
            **means,
            "seeds": max(net.seeds for net in networks),
            "gaps": len(gaps),
            "gap": 100 * max(gaps) if gaps else None,
            "at_floor": len(at_floor),
            "trained": trained_lines(networks, rows[0]["calls"]),
        }

    def chart(self, rows: Rows) -> Chart:
        limits = rows[0]["limits"]
        panels = []
        for net in results_by_network(rows):
            marks: list[Mark] = []
            heights = [0.05]
            if net.common["floor"]:
                bounds = net.common["floor"]
                x, y = [1 - share for share, _ in bounds], [bound for _, bound in bounds]
                marks.append(Line(x, y, FAINT, "the floor: no plan is below", width=1, front=2))
            for key, baseline in BASELINES.items():
                points = sorted(net.common["baselines"][key], reverse=True)
                hollow = family(net.name) in self.published[key]
                heights += [o for _, o in points]
                x = [1 - share for share, _ in points]
                y = [o for _, o in points]
                ink = color(baseline.planner)
                name = "" if hollow else baseline.label
                marks.append(Line(x, y, ink, name, baseline.marker, width=1.1, hollow=hollow))
            for mode, label in MODES.items():
                line = sorted(net.dqn[mode].items(), reverse=True)
                heights += [o for _, overheads in line for o in overheads]
                marks.append(
                    Line(
                        [1 - share for share, _ in line],
                        [float(np.mean(o)) for _, o in line],
                        color("dqn"),
                        label,
                        "",
                        "-" if mode == "joint" else (0, (3, 1.4)),
                        2.4 if mode == "joint" else 1.8,
                        front=5,
                        band=([min(o) for _, o in line], [max(o) for _, o in line]),
                    )
                )
            for key, (label, planner, style) in CONTROLS.items():  # at the limits where the searches ran
                by_limit = figures.group_by([p for p in net.details["joint"] if p[key] is not None], "limit")
                searched = {limit: [p[key] for p in by_limit[limit]] for limit in sorted(by_limit, reverse=True)}
                marks.append(mean_line(searched, color(planner), label, style))
            for (label, trained), ink in zip(
                net.trained.items(), cycle((color("dqn_paper"), color("dqn_paper_greedy"), FAINT))
            ):
                found = {limit: overheads for limit, overheads in trained.items() if overheads}
                heights += [float(np.mean(overheads)) for overheads in found.values()]
                marks.append(mean_line(found, ink, label, "--", "x"))
            highest = max(heights)
            top = min(1.08 * highest, self.top)
            overflow = f", to {highest:.0%}" if highest > top else ""
            missing = [b.label for key, b in BASELINES.items() if not net.common["baselines"][key]]
            none = ", ".join(missing) if len(missing) < len(BASELINES) else "any baseline"
            title = f"{figures.label(net.name)}, {net.common['peak'] / 2**30:.3g} GiB{overflow}"
            label = "memory reduction" + (f"\nno plan by {none}" if missing else "\n")
            panels.append(
                Panel(
                    title,
                    marks,
                    Axis(label, "%", (1 - limits[0] - 0.04, 1 - limits[-1] + 0.04)),
                    Axis("overhead over the ideal time", "%", (-0.02 * top, top)),
                )
            )
        values = self.template_values(rows)
        title = f"Above a baseline: DQN over edits at {values['above']} of {values['pairs']} pairs"
        if values["trained"]:
            printed = values["trained"][0]
            title += f", {printed['label']} at {printed['above']} of {printed['pairs']}"
        note = f"Lines: means over {values['seeds']} seeds; bands: least to largest. Hollow: not run in the paper."
        return Chart(title, panels, 2, (4.95, 3.6), (0.0, 1.1), keys=3, note=note)


def mean_line(points: dict[float, list[float]], ink: str, label: str, style: str, marker: str = "") -> Line:
    """Returns the line of the mean overheads over the seeds, by limit."""
    return Line(
        [1 - limit for limit in points],
        [float(np.mean(overheads)) for overheads in points.values()],
        ink,
        label,
        marker,
        style,
        1.2,
        front=4,
    )


def trained_settings(trained: Row) -> Row:
    """Checks the settings of the paper's agent and of its control.

    Raises:
        UsageError: A network is unknown, a limit no share of the peak, or a line has an unknown entry.
    """
    for label, line in trained["lines"].items():
        if not isinstance(line, dict) or not {"episodes"} <= set(line) <= {"episodes", "tuned", "agent"}:
            raise cli.UsageError(f"figure.trained.lines.{label}: expected episodes and some of tuned, agent")
    return {
        "networks": [figures.network(str(name), "trained.networks") for name in trained["networks"]],
        "limits": [figures.share_of_peak(limit, "trained.limits") for limit in trained["limits"]],
        "lines": trained["lines"],
    }


def train_paper(program: Program, machine: Machine, task: Row) -> dict[str, Rows]:
    """Returns the overhead of the best episode of every training by label and limit; None if no episode had a plan."""
    results: dict[str, Rows] = {}
    for label, line in task["trained"]["lines"].items():
        config = paper_config(
            {**line, "agent": {"mode": "joint", "min_bytes": task["min_bytes"], **line.get("agent", {})}}
        )
        for share in task["trained"]["limits"]:
            limit = int(share * program.peak_bytes)
            planner = agents.make("dqn_paper", config=config, seed=task["seed"])
            found = figures.overhead(planner, program, machine, limit)
            point = {"limit": limit / program.peak_bytes, "overhead": found, "calls": planner.simulator_calls}
            results.setdefault(label, []).append(point)
    return results


def compare(program: Program, machine: Machine, task: Row) -> Row:
    """Computes one program's baselines, the DQN in both modes, and the certified lower bound."""
    peak = program.peak_bytes
    min_bytes = task["min_bytes"]
    grid = [int(f * peak) for f in task["limits"]]
    mins = [limit for key in BASELINES if (limit := smallest_limit(key, program, machine, grid, min_bytes)) is not None]
    limits = sorted({*grid, *mins}, reverse=True)
    baselines = {}
    for key in BASELINES:
        scored = [(limit, overhead(key, program, machine, limit, min_bytes)) for limit in limits]
        baselines[key] = [[limit / peak, o] for limit, o in scored if o is not None]
    dqn: Row = {}
    for mode in MODES:
        dqn[mode] = sweep(program, machine, limits, task, mode, dqn.get("swap", []))
    transfer = machine.d2h_ns(peak - sum(t.nbytes for t in program.tensors if t.persistent))
    floors = []
    if len(program.kernels) <= task["floor_kernels"]:
        bounds = [(limit, floor(program, machine, limit)) for limit in limits]
        floors = [[limit / peak, bound.overhead] for limit, bound in bounds if bound.feasible]
    return {
        "peak": peak,
        "ideal_ns": program.ideal_ns,
        "kernels": len(program.kernels),
        "transfer_ns": transfer,
        "baselines": baselines,
        "dqn": dqn,
        "floor": floors,
    }


def sweep(program: Program, machine: Machine, limits: list[int], task: Row, mode: str, extra: Rows) -> Rows:
    """Returns the overheads of SEARCHES at every limit, the loosest first.

    A plan for a tighter limit also fits the next, as does one of ``extra``, from a mode that this mode includes. No
    search is run at limits with a plan of zero overhead.
    """
    peak = program.peak_bytes
    points = list[Row]()
    for limit in sorted(limits):
        candidates = [p for p in (*points[-1:], *extra) if p["limit"] <= limit / peak + SAME]
        point: Row = {
            "limit": limit / peak,
            "overhead": min([p["overhead"] for p in candidates], default=math.inf),
            **dict.fromkeys(SEARCHES),
        }
        shared = {"mode": mode, "min_bytes": task["min_bytes"], "seed": task["seed"], "calls": task["calls"]}
        for key, (planner, options) in SEARCHES.items() if point["overhead"] > 0 else ():
            point[key] = figures.overhead(agents.make(planner, **options, **shared), program, machine, limit)
        if point["planned"] is not None:
            point["overhead"] = min(point["overhead"], point["planned"])
        if point["overhead"] < math.inf:
            points.append(point)
    return points[::-1]


def overhead(key: str, program: Program, machine: Machine, limit: int, min_bytes: int) -> float | None:
    """Returns a baseline's overhead within a limit, or None if it finds no plan."""
    planner = agents.make(BASELINES[key].planner, min_bytes=min_bytes, **BASELINES[key].options)
    return figures.overhead(planner, program, machine, limit)


def smallest_limit(key: str, program: Program, machine: Machine, grid: list[int], min_bytes: int) -> int | None:
    """Returns approximately a baseline's smallest feasible limit, or None if no limit of the grid is feasible."""
    feasible = [limit for limit in grid if overhead(key, program, machine, limit, min_bytes) is not None]
    if not feasible:
        return None
    high = min(feasible)
    low = max((limit for limit in grid if limit < high), default=high)
    tolerance = int(Fig5.close * program.peak_bytes)
    return bisect(lambda n: overhead(key, program, machine, n, min_bytes) is not None, low, high, tolerance)[1]


class Network(NamedTuple):
    """Results of one network over the seeds."""

    name: str
    common: Row  # results that do not depend on the seed
    dqn: dict[str, dict[float, list[float]]]  # by mode and limit, over the seeds that found a plan
    details: dict[str, Rows]  # by mode, over limits and seeds
    trained: dict[str, dict[float, list[float]]]  # by label and limit, over the seeds that found a plan
    calls: dict[str, list[int]]  # simulator calls of those trainings
    seeds: int


def results_by_network(rows: Rows) -> list[Network]:
    """Returns the networks in the order of the paper's families, then of the tasks."""
    names = list(dict.fromkeys(name for row in rows for name in row["networks"]))
    names.sort(key=lambda name: [*Fig5.families, family(name)].index(family(name)))
    results = []
    for name in names:
        runs = [row["found"][name] for row in sorted(rows, key=lambda r: r["seed"]) if name in row["networks"]]
        details = {mode: [point for run in runs for point in run["dqn"][mode]] for mode in MODES}
        dqn = {
            mode: {limit: [p["overhead"] for p in part] for limit, part in figures.group_by(points, "limit").items()}
            for mode, points in details.items()
        }
        trained: dict[str, dict[float, list[float]]] = {}
        calls: dict[str, list[int]] = {}
        for label, point in [
            (label, point) for run in runs for label, line in run["trained"].items() for point in line
        ]:
            overheads = trained.setdefault(label, {}).setdefault(point["limit"], [])
            overheads += [] if point["overhead"] is None else [point["overhead"]]
            calls.setdefault(label, []).append(point["calls"])
        common = max(runs, key=lambda run: len(run["floor"]))
        results.append(Network(name, common, dqn, details, trained, calls, len(runs)))
    return results


def family(network: str) -> str:
    """Returns the family of a workload."""
    return str(figures.workload(network)["family"])


def duels(net: Network) -> Iterator[Row]:
    """Yields a comparison at every limit at which a rival of a mode has a plan.

    Each has the DQN's mean and worst overhead over its seeds (infinite if a seed has no plan), the rival's overhead,
    and in ``controls`` the worst overhead of each search, empty unless all searches ran and found a plan.
    """
    # A mode is compared with the baselines whose decisions it includes.
    for mode, rivals in {"swap": ("tflms", "sn_swap"), "joint": tuple(BASELINES)}.items():
        points_by_limit = figures.group_by(net.details[mode], "limit")
        for key in rivals:
            for limit, theirs in net.common["baselines"][key]:
                ours = net.dqn[mode].get(limit, [])
                points = points_by_limit.get(limit, [])
                ran = len(points) == net.seeds and all(p[search] is not None for p in points for search in SEARCHES)
                if len(ours) < net.seeds:
                    ours = [float("inf")]
                yield {
                    "network": net.name,
                    "mode": mode,
                    "baseline": key,
                    "limit": limit,
                    "mean": float(np.mean(ours)),
                    "worst": max(ours),
                    "theirs": theirs,
                    "controls": {search: max(p[search] for p in points) for search in SEARCHES} if ran else {},
                }


def trained_lines(networks: list[Network], calls: int) -> Rows:
    """Compares the paper's agent, random walks and the DQN over edits, where the first were run, with the baselines.

    Args:
        networks: Results; those without trainings are left out.
        calls: Simulator calls of the DQN over edits at a limit.

    Returns:
        By contender: label, number of runs and of those with a plan, mean overhead of these, mean simulator calls, and
        numbers of pairs of a limit and a baseline with a plan: all, and those where the worst seed is ``above`` or
        ``below`` the baseline.
    """
    trained = [net for net in networks if net.trained]
    lines = []
    labels = [label for net in trained[:1] for label in (*net.trained, MODES["joint"])]
    for label in labels:
        pairs = []
        overheads = []
        runs = 0
        for net in trained:
            points = net.trained.get(label, net.dqn["joint"])
            for limit in next(iter(net.trained.values())):
                ours = points.get(limit, [])
                overheads += ours
                runs += net.seeds
                worst = max(ours) if len(ours) == net.seeds else math.inf
                for baseline in net.common["baselines"].values():
                    pairs += [(worst, theirs) for share, theirs in baseline if abs(share - limit) < SAME]
        lines.append(
            {
                "label": label,
                "runs": runs,
                "plans": len(overheads),
                "mean": 100 * float(np.mean(overheads)) if overheads else None,
                "calls": np.mean([n for net in trained for n in net.calls.get(label, [calls])]),
                "pairs": len(pairs),
                "above": sum(worst > theirs + SAME for worst, theirs in pairs),
                "below": sum(worst < theirs - SAME for worst, theirs in pairs),
            }
        )
    return lines


def overheads_at(points: dict[float, list[float]], limit: float) -> list[float]:
    """Returns the overheads at a limit, over the seeds."""
    return next((overheads for share, overheads in points.items() if abs(share - limit) < SAME), [])


def cells(net: Network, limits: list[float]) -> dict[str, list[str]]:
    """Returns the means of both modes over the seeds and the best baseline at each limit, by label."""
    lines = {}
    for mode, label in MODES.items():
        found = [overheads_at(net.dqn[mode], limit) for limit in limits]
        lines[label] = [f"{np.mean(overheads):.2%}" if overheads else "–" for overheads in found]
    lines["best baseline"] = []
    for limit in limits:
        theirs = [
            (overhead, BASELINES[key].label)
            for key in BASELINES
            for share, overhead in net.common["baselines"][key]
            if abs(share - limit) < SAME
        ]
        lines["best baseline"].append("{:.2%}, {}".format(*min(theirs)) if theirs else "–")
    return lines
