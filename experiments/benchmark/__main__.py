"""The benchmark: agents on named tasks, pinned by fingerprint, within equal simulator calls and equal seconds.

    python -m experiments.benchmark suite=core                              # a score per agent and budget, by split
    python -m experiments.benchmark suite=core agents=mymodule:MyPlanner     # one's own, beside the results here
    python -m experiments.benchmark suite=core agents=[annealing,lp_round]   # some again, on this computer
    python -m experiments.benchmark suite=checkmate                         # beside published results: 12 budgets
    python -m experiments.benchmark suite=tracks tracks=one                 # a track of the environments
    python -m experiments.benchmark suite=tracks check=mine.json            # rows that are to be submitted
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
TRACKS = "tracks"
SUITES = ("core", "large", "checkmate", "scale", TRACKS, SPEED)
SCORED = ("core", "large", TRACKS)  # whose agents can be chosen


@cli.entry("benchmark")
def main(cfg: DictConfig) -> None:
    suite = cli.choice(cfg, "suite", SUITES)
    if suite == SPEED:
        print(json.dumps(speed(cfg), indent=1))
        return
    if (file := cli.path(cfg, "check")) is not None:
        print(checked(suite, file))
        return
    settings = cli.plain(OmegaConf.load(reproduce.CONFIGS / f"{suite}.yaml"))  # type: ignore[arg-type]
    if (chosen := agents_of(cfg, suite, settings)) is not None:
        settings |= {"agents": chosen, "beside": True} if suite != TRACKS else {"agents": list(chosen)}
    if cfg.tracks is not None:
        if suite != TRACKS:
            raise cli.UsageError(f"tracks: the suite {suite} has none")
        settings["tracks"] = cli.values(cfg, "tracks") if OmegaConf.is_list(cfg.tracks) else [cfg.tracks]
    out = cli.path(cfg, "out") or Path("runs/benchmark")
    own = {key for key in ("agents", "tracks") if cfg[key] is not None}
    reproduce.make([settings], cli.choice(cfg, "quick", (False, True)), None, *cli.launcher(cfg), out, own)


def speed(cfg: DictConfig) -> dict[str, Any]:
    """What the suite finds, by its own settings; raises UsageError where one of the other suites' is given."""
    for key in ("agents", "quick", "jobs", "out"):
        if cfg[key]:
            raise cli.UsageError(f"{key}: the suite {SPEED} takes none; its settings are {SPEED}.KEY")
    from experiments.benchmark.speed import measured

    return measured(cfg.speed)


def checked(suite: str, file: Path) -> str:
    """What is said of rows that are to be submitted; raises UsageError, FormatError where one is wrong."""
    if suite != TRACKS:
        raise cli.UsageError(f"check: rows are of the suite {TRACKS}, not of {suite}")
    from experiments.figures.tracks import check

    count = check(file)
    return f"{file}: {count} row{'s' * (count != 1)}, {'each' if count != 1 else 'which'} is worth what it says"


def known_agents() -> list[str]:
    """Those of the tracks, and all planners."""
    import agents
    from experiments.figures.tracks_agents import OWN

    return [*OWN, *agents.PLANNERS]


def agents_of(cfg: DictConfig, suite: str, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The agents of ``agents=``, names of the suite's or "module:Class"; None: not asked for. Raises UsageError."""
    if cfg.agents is None:
        return None
    if suite not in SCORED:
        raise cli.UsageError(f"agents: the suites {', '.join(SCORED)} take one, {suite} does not")
    asked = [str(name) for name in (cli.values(cfg, "agents") if OmegaConf.is_list(cfg.agents) else [cfg.agents])]
    known = settings["agents"] if suite != TRACKS else {one: {} for one in known_agents()}
    for name in asked:
        if name not in known and ":" not in name:
            raise cli.UsageError(
                f"agents: {name!r} is neither 'module:Class' nor of the suite{cli.nearest(name, set(known))}"
            )
    return {name: known.get(name, {"target": name}) for name in asked}


if __name__ == "__main__":
    main()
