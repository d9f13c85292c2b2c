"""The benchmark: agents on named tasks, pinned by fingerprint, within equal simulator calls and equal seconds.

    python -m experiments.benchmark suite=core                              # a score per agent and budget, by split
    python -m experiments.benchmark suite=core agents=mymodule:MyPlanner     # one's own, beside the results here
    python -m experiments.benchmark suite=core agents=[annealing,lp_round]   # some again, on this computer
    python -m experiments.benchmark suite=checkmate                         # beside published results: 12 budgets
    python -m experiments.benchmark suite=speed > bench.json                # of the simulator and the rest (make bench)

``speed`` prints one JSON object and nothing else. Any other suite is a figure of its own name
(experiments/figures/README.md): ``python -m experiments.reproduce figure=core`` makes it with other settings, and draws
it again. How others add an agent: experiments/README.md, The benchmark.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments import reproduce
from experiments.common import cli

SPEED = "speed"
CORE = "core"
SUITES = (CORE, "checkmate", SPEED)


@cli.entry("benchmark")
def main(cfg: DictConfig) -> None:
    suite = cli.choice(cfg, "suite", SUITES)
    if suite == SPEED:
        print(json.dumps(speed(cfg), indent=1))
        return
    settings = cli.plain(OmegaConf.load(reproduce.CONFIGS / f"{suite}.yaml"))  # type: ignore[arg-type]
    if (chosen := agents_of(cfg, suite, settings)) is not None:
        settings |= {"agents": chosen, "beside": True}
    out = cli.path(cfg, "out") or Path("runs/benchmark")
    own = {"agents"} if chosen is not None else set()
    reproduce.make([settings], cli.choice(cfg, "quick", (False, True)), None, *cli.launcher(cfg), out, own)


def speed(cfg: DictConfig) -> dict[str, Any]:
    """What the suite finds, by its own settings; raises UsageError where one of the other suites' is given."""
    for key in ("agents", "quick", "jobs", "out"):
        if cfg[key]:
            raise cli.UsageError(f"{key}: the suite {SPEED} takes none; its settings are {SPEED}.KEY")
    from experiments.benchmark.speed import measured

    return measured(cfg.speed)


def agents_of(cfg: DictConfig, suite: str, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The agents of ``agents=``, names of the suite's or "module:Class"; None: not asked for. Raises UsageError."""
    if cfg.agents is None:
        return None
    if suite != CORE:
        raise cli.UsageError(f"agents: the suite {CORE} takes one, {suite} does not")
    asked = [str(name) for name in (cli.values(cfg, "agents") if OmegaConf.is_list(cfg.agents) else [cfg.agents])]
    known = settings["agents"]
    for name in asked:
        if name not in known and ":" not in name:
            raise cli.UsageError(
                f"agents: {name!r} is neither 'module:Class' nor of the suite{cli.nearest(name, set(known))}"
            )
    return {name: known.get(name, {"target": name}) for name in asked}


if __name__ == "__main__":
    main()
