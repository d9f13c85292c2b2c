"""Benchmarks agents on named tasks (pinned by fingerprint) with equal simulator calls and equal seconds.

    python -m experiments.benchmark suite=core                              # score per agent, budget and split
    python -m experiments.benchmark suite=core agents=mymodule:MyPlanner    # your planner, compared with our results
    python -m experiments.benchmark suite=core agents=[annealing,lp_round]  # rerun some agents on this computer
    python -m experiments.benchmark suite=checkmate                         # published results: 12 budgets
    python -m experiments.benchmark suite=speed > bench.json                # timings of the code base (make bench)

``speed`` prints one JSON object. Every other suite is also a figure (experiments/figures/README.md):
``python -m experiments.reproduce figure=core`` changes its settings and redraws it. How to add an agent:
experiments/README.md, The benchmark.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments import reproduce
from experiments.common import cli, report


@cli.entry("benchmark")
def main(cfg: DictConfig) -> None:
    """Runs the chosen suite: prints timings, or computes and draws the figure of its scores."""
    suite = cli.choice(cfg, "suite", ("core", "checkmate", "speed"))
    if suite == "speed":
        print(json.dumps(speed(cfg), indent=1))
        return
    settings = cli.to_dict(OmegaConf.load(reproduce.CONFIGS / f"{suite}.yaml"))
    if (agents := requested_agents(cfg, suite, settings)) is not None:
        settings |= {"agents": agents, "beside": True}
    out = cli.path(cfg, "out") or Path("runs/benchmark")
    typed_keys = {"agents"} if agents is not None else set()
    reproduce.make([settings], cli.choice(cfg, "quick", (False, True)), None, *cli.launcher(cfg), out, typed_keys)


def speed(cfg: DictConfig) -> dict[str, Any]:
    """Runs the suite ``speed``; raises UsageError if a setting of the other suites is given."""
    for key in ("agents", "quick", "jobs", "out"):
        if cfg[key]:
            raise cli.UsageError(f"{key}: not a setting of suite=speed; use speed.KEY")
    from experiments.measure.speed.suite import run_suite

    return run_suite(cfg.speed)


def requested_agents(cfg: DictConfig, suite: str, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the agents of ``agents=`` (names of the suite, "module:Class" or a .zip), or None; raises UsageError."""
    if cfg.agents is None:
        return None
    if suite != "core":
        raise cli.UsageError(f"agents: only suite=core accepts agents, not suite={suite}")
    requested = [str(name) for name in (cli.values(cfg, "agents") if OmegaConf.is_list(cfg.agents) else [cfg.agents])]
    options = settings["agents"]
    for name in requested:
        if name not in options and not report.is_external(name):
            raise cli.UsageError(
                f"agents: {name!r} is neither 'module:Class', an archive (.zip), nor an agent of the suite"
                f"{cli.nearest(name, set(options))}"
            )
    return {name: options.get(name, {"target": name}) for name in requested}


if __name__ == "__main__":
    main()
