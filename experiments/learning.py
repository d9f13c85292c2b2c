"""What finished training runs learned, over the seeds: the agent beside its search without the network (`mutation`, at
equal simulator calls and at equal seconds), AutoSwap's best score, annealing and the floor.

    python -m experiments.train_dqn -m seed=0,1,2 limit=0.7,0.65,0.6 agent.episodes=600
    python -m experiments.learning runs=runs out=experiments/results/learning.json

Prints a table and writes JSON: per workload, limit and mode, each seed's overheads, the commands that made them,
and whether the agent is never above the best AutoSwap score and within 0.5 points of annealing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from rich.table import Table

from experiments.common import cli, report
from simulator.files import FormatError, read_json, write_json

Row = dict[str, Any]
MARGIN = 0.005  # of ideal time, over annealing
SHOWN = {  # keys of a run, and their headings
    "dqn": "DQN", "mutation_calls": "mutation, equal calls", "mutation_seconds": "mutation, equal seconds",
    "greedy": "greedy policy", "autoswap": "best AutoSwap", "annealing": "annealing",
}  # fmt: skip


@cli.entry("learning")
def main(cfg: DictConfig) -> None:
    folder, out = cli.path(cfg, "runs"), cli.path(cfg, "out")
    found = sorted(folder.rglob("summary.json")) if folder is not None else []
    groups: dict[tuple[str, str, float, str], list[Row]] = {}
    for file in found:
        one = summarise(file)
        if one is not None:
            key = (one["workload"], one["machine"], one["limit_fraction"], one["mode"])
            groups.setdefault(key, []).append(one)
    if not groups:
        raise cli.UsageError(f"runs: there is no finished run of train_dqn under {folder}")
    headings = (*SHOWN.values(), "floor", "holds")
    table = Table("workload", "limit", "mode", "seeds", *headings, box=None)
    cases = []
    for (workload, machine, fraction, mode), runs in sorted(groups.items()):
        runs.sort(key=lambda r: r["seed"])
        holds = all(r["dqn"] <= r["autoswap"] and r["dqn"] <= r["annealing"] + MARGIN for r in runs)
        cases.append(
            {"workload": workload, "machine": machine, "limit_fraction": fraction, "mode": mode, "holds": holds,
             "runs": runs}
        )  # fmt: skip
        columns = [spread([r[key] for r in runs]) for key in SHOWN]
        floor = "–" if runs[0]["floor"] is None else f"{runs[0]['floor']:.2%}"
        table.add_row(workload, f"{fraction:.0%}", mode, str(len(runs)), *columns, floor, "yes" if holds else "no")
    report.console().print(table)
    if out is not None:
        write_json(out, {"margin": MARGIN, "cases": cases}, indent=1)
        print(out)


def summarise(file: Path) -> Row | None:
    """One run's overheads; None for a summary that is not of train_dqn or has no comparison in it, as one of a run that
    was resumed or made before there was `mutation`.

    Raises:
        FormatError: the file is not a summary.
    """
    summary = read_json(file)
    try:
        rows = {r["planner"]: r for r in summary["results"]}
        dqn = rows.get("dqn")
        autoswap = [r["overhead"] for n, r in rows.items() if n.startswith("autoswap_") and r["feasible"]]
        there = {"dqn", "mutation, equal calls", "mutation, equal seconds"} <= set(rows)
        if dqn is None or not there or not autoswap or not rows.get("annealing", {}).get("feasible"):
            return None
        return {
            "workload": dqn["workload"], "machine": dqn["machine"], "limit_fraction": round(dqn["limit_fraction"], 4),
            "mode": summary["config"]["agent"]["mode"], "seed": dqn["seed"], "episodes": summary["episodes"],
            "command": " ".join(w for w in summary["command"] if not w.startswith("out=")),
            "train_s": round(summary["train_s"], 1), "simulator_calls": dqn["simulator_calls"],
            "dqn": dqn["overhead"], "greedy": rows["dqn_greedy"]["overhead"],
            "mutation_calls": rows["mutation, equal calls"]["overhead"],
            "mutation_seconds": rows["mutation, equal seconds"]["overhead"],
            "autoswap": min(autoswap), "annealing": rows["annealing"]["overhead"],
            "floor": dqn["bound_overhead"], "gap": dqn["gap"],
        }  # fmt: skip
    except (KeyError, TypeError) as error:
        raise FormatError(f"{file}: not the summary of a run ({json.dumps(str(error))})") from None


def spread(values: list[float | None]) -> str:
    """Mean, least and largest; how many are missing."""
    known = [v for v in values if v is not None]
    if not known:
        return "infeasible"
    text = f"{sum(known) / len(known):.2%} ({min(known):.2%} to {max(known):.2%})"
    return text if len(known) == len(values) else f"{text}, {len(values) - len(known)} infeasible"


if __name__ == "__main__":
    main()
