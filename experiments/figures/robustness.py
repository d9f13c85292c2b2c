"""How plans stand noise: the overhead of an iteration against jitter of the kernels' times, drift, and a link that is
shared with a tenant, per planner; and what planning anew does after a drift. No paper has this figure.

The measure is that of `experiments.robustness`, where the numbers of its settings are explained.

1. The limit is a share of each program's peak at which all planners have a plan.
2. The robust plan is searched for one noise and measured under all, beside the same search without noise, with as
   many simulations and more time: a plan takes one of them there, and four here.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from experiments import figures, robustness
from experiments.common import cli
from experiments.common.report import Row
from experiments.plotting.noise import noise_panels, style
from simulator.machine import Machine

TITLE = "Overhead against noise"


def tasks(settings: DictConfig) -> list[Row]:
    """One per network."""
    config = cli.plain(settings)
    share = cli.number(settings, "limit")
    if share > 1:
        raise cli.UsageError(f"figure.limit: expected a share of the peak, got {share}")
    common = {"limit": share, "planners": config["planners"], **robustness.settings_of(settings)}
    return [{"network": name, **common} for name in figures.networks(settings)]


def run(task: Row, machine: Machine) -> Row:
    """What ``robustness.measure`` finds."""
    program = figures.program(task["network"], machine)
    return robustness.measure(program, machine, int(task["limit"] * program.peak_bytes), task["planners"], task)


# ------------------------------------------------------------------------------------------ for people


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """A line for each network and planner."""
    heads, cells = [], []
    for row in rows:
        heads, lines = robustness.table(row)
        cells += [[figures.label(row["network"]), style(line[0]).label, *line[1:]] for line in lines]
    return ["network", "planner", *heads[1:]], cells


def notes(rows: list[Row]) -> list[str]:
    """Which plans lose least, and what planning anew gains."""
    out = ["Mean (95th percentile) over iterations under the largest noise of each kind; the picture has the others."]
    for row in rows:
        both = row["noise"]["both"][0]
        order = sorted(both["planners"], key=lambda name: both["planners"][name]["mean"])
        found = ", ".join(f"{style(name).label} {both['planners'][name]['mean']:.2%}" for name in order)
        still = {entry["size"]: entry["planners"] for entry in row["noise"]["jitter"]}.get(0.0, {})
        text = (
            f"{figures.label(row['network'])}, jitter {both['jitter']:g}, a tenant of up to {both['tenant']:g}: {found}"
        )
        if robustness.ROBUST in still:
            text += f"; without noise the plan made for it has {still[robustness.ROBUST]['mean']:.2%}"
        out.append(text + ".")
        for entry in row["recovery"][:1]:
            again = ", ".join(
                f"{style(name).label} {one['kept']:.1%} → {one['replanned']:.1%} in {one['iterations']} iterations"
                for name, one in entry["planners"].items()
            )
            out.append(f"{figures.label(row['network'])}, planned anew after a drift of {entry['size']:g}: {again}.")
    return out


def draw(rows: list[Row], path: Path) -> None:
    """A row of panels for each network."""
    titled = [
        {**row, "title": f"{figures.label(row['network'])} in {row['limit']:.0%}, {row['machine']}"} for row in rows
    ]
    noise_panels(path, titled)
