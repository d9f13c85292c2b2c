"""Planners on named tasks, beside what others have published for them.

    python -m experiments.benchmark suite=checkmate                         # two networks, six budgets each
    python -m experiments.benchmark suite=core                              # a dozen tasks against the planning time
    python -m experiments.benchmark suite=scale                             # seconds of every workload, in every mode
    python -m experiments.benchmark suite=checkmate quick=true
    python -m experiments.benchmark suite=checkmate out=experiments/results

A suite is a figure of its own name (experiments/figures/README.md): ``python -m experiments.reproduce
figure=checkmate`` makes it with other settings, and draws it again.
"""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from experiments import cli, reproduce

SUITES = ("checkmate", "core", "scale")


@cli.entry("benchmark")
def main(cfg: DictConfig) -> None:
    suite = cli.choice(cfg, "suite", SUITES)
    settings = cli.plain(OmegaConf.load(reproduce.CONFIGS / f"{suite}.yaml"))  # type: ignore[arg-type]
    out = cli.path(cfg, "out") or Path("runs/benchmark")
    reproduce.make([settings], cli.choice(cfg, "quick", (False, True)), None, *cli.launcher(cfg), out)


if __name__ == "__main__":
    main()
