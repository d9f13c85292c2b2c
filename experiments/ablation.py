"""What each change to the paper's agent is worth: one variant of the configuration beside another.

    python -m experiments.ablation workload=vgg16 limit=0.5

Every variant (``variants`` in configs/ablation.yaml) is trained for the same number of episodes from every
seed. The table and ``ablation.json`` give the overhead of the best plan found, of the best that the variant's
search finds in as many simulator calls with its network never asked, and of the final greedy policy's plan, mean
and range over the seeds, and the simulator calls.
"""

from __future__ import annotations

import itertools
from concurrent.futures import as_completed
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.table import Table

import agents
from experiments.common import cli, report, workers
from experiments.learning import spread
from simulator import Machine, Program, simulate
from simulator.files import write_json
from simulator.limits import limit_bytes


@cli.entry("ablation")
def main(cfg: DictConfig) -> None:
    from agents.learned import dqn

    machine = cli.machine(cfg)
    base = replace(cli.dataclass_of(dqn.DQNConfig, cfg.agent, "agent"), episodes=cli.integer(cfg, "episodes", 1))
    variants = {
        str(name): cli.dataclass_of(
            dqn.DQNConfig, OmegaConf.create({**base.__dict__, **dict(changes)}), f"variants.{name}"
        )
        for name, changes in cfg.variants.items()
    }
    for name in cli.values(cfg, "only") if cfg.only is not None else []:
        if name not in variants:
            raise cli.UsageError(f"only: there is no variant {name!r}{cli.nearest(name, set(variants))}")
    variants = {n: v for n, v in variants.items() if cfg.only is None or n in cli.values(cfg, "only")}
    program = cli.program(cfg, machine)
    limit = limit_bytes(cfg.limit, program)
    jobs = cli.jobs(cfg)
    tasks = list(itertools.product(variants, cli.values(cfg, "seeds")))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    bar = report.progress()
    with report.RunDirectory(cli.path(cfg, "out"), f"ablation-{program.name}") as out:
        with bar, workers.Pool(min(jobs, len(tasks))) as pool:
            shown = bar.add_task("training", total=len(tasks))
            futures = {pool.submit(run, program, machine, limit, variants[n], int(s)): n for n, s in tasks}
            for future in as_completed(futures):
                found[futures[future]].append(future.result())
                bar.update(shown, advance=1)
        for results in found.values():
            results.sort(key=lambda r: r["seed"])
        write_json(out / "ablation.json", {
            "command": report.command(), "machine": machine.name, "limit_bytes": limit, "episodes": base.episodes,
            "variants": {n: {"changes": OmegaConf.to_container(cfg.variants[n]), "runs": found[n]} for n in found},
        }, indent=1)  # fmt: skip
    report.console().print(table(found))
    print(out)


def run(program: Program, machine: Machine, limit: int, config: Any, seed: int) -> dict[str, Any]:
    """Trains one agent; overheads are None where there is no feasible plan."""
    import torch

    from agents.learned import dqn
    from agents.learned.planner import without_network

    torch.set_num_threads(1)
    result = dqn.train(program, machine, limit, config, seed)
    greedy = simulate(program, result.greedy, machine, limit).overhead if result.greedy is not None else None
    best = simulate(program, result.best, machine, limit).overhead
    try:
        plan = without_network(config, seed, max(result.simulator_calls, 2)).plan(program, machine, limit)
        alone: float | None = simulate(program, plan, machine, limit).overhead
    except agents.Infeasible:
        alone = None
    return {"seed": seed, "best": best, "without_network": alone, "greedy": greedy,
            "simulator_calls": result.simulator_calls}  # fmt: skip


def table(found: dict[str, list[dict[str, Any]]]) -> Table:
    """Mean (least to largest) over the seeds."""
    out = Table("variant", "best found", "network never asked", "greedy policy", "simulator calls", box=None)
    for name, runs in found.items():
        columns = (spread([r[key] for r in runs]) for key in ("best", "without_network", "greedy"))
        out.add_row(name, *columns, f"{sum(r['simulator_calls'] for r in runs) // max(1, len(runs)):,}")  # fmt: skip
    return out


if __name__ == "__main__":
    main()
