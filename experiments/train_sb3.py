"""Trains an agent of Stable-Baselines3 to plan one training step, and compares the planners.

    python -m experiments.train_sb3 algo=maskable_ppo steps=6000 seed=1                  # the small built-in task
    python -m experiments.train_sb3 task=GpuMemory/vgg16-45-v1 reward=causal actions=full
    python -m experiments.train_sb3 task=GpuMemoryEdit/unet-50-v1 algo.reward_scale=1000
    python -m experiments.train_sb3 algo=dqn workload=vgg16 machine=gtx1080ti limit=0.5 mode=swap

The run directory contains summary.json, results.jsonl (a row per planner), plan.json (the agent's best plan), model.zip
(by Stable-Baselines3), tb/ (TensorBoard; see ``tracker=``), learning_curve.png, memory_curve.png and timeline.json (for
Perfetto). The last line printed is its path.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

import agents
import simulator
from agents.learned.external import ENVIRONMENTS
from envs.memory_env import small_task
from envs.tasks import TASKS, load
from experiments.common import cli, report
from experiments.common.curves import Curve
from experiments.common.tracking import tracker_class
from experiments.train_dqn import compare_planners, variant_of
from simulator.limits import limit_bytes
from simulator.modes import MODES

if TYPE_CHECKING:
    from stable_baselines3.common.base_class import BaseAlgorithm

    from agents.learned.sb3 import Env, EpisodeRecorder
    from agents.learned.training import Episode


@cli.entry("train_sb3")
def main(cfg: DictConfig) -> Path:
    """Trains the agent, compares it with the planners, and returns the run directory."""
    try:
        from agents.learned import sb3  # slow to import
    except ModuleNotFoundError as error:
        raise cli.UsageError(f"{error.name} is not installed: install the extra `sb3`") from None
    from agents.learned.dqn_paper import Variant
    from agents.learned.training import check_reachable

    seed = cli.integer(cfg, "seed")
    steps = cli.integer(cfg, "steps", least=1)
    tracker = tracker_class(cfg)
    every = cli.integer(cfg, "greedy_every", least=1)
    mode = cli.choice(cfg, "mode", MODES)
    min_bytes = cli.size(cfg, "min_bytes")
    names = report.planner_names(cli.values(cfg, "planners")) if cfg.planners else []
    algorithm = HydraConfig.get().runtime.choices["algo"]
    agent = f"sb3_{algorithm}"
    task = program, machine, limit = task_of(cfg)
    if cfg.get("machine") is None:  # recorded in the summary, so that the run can be repeated
        with open_dict(cfg):
            cfg.machine = machine.to_dict()
    reward, actions, network = variant_of(cfg)
    if program.peak_bytes <= limit:
        raise cli.UsageError(f"limit: {program.name} fits without a plan (peak {program.peak_bytes:,} bytes); lower it")
    check_reachable(program, limit, min_bytes, mode)
    label = f"{program.name}-{limit / program.peak_bytes:.3g}-{algorithm}-seed{seed}"
    directory = report.RunDirectory(cli.path(cfg, "out"), label, finished="summary.json")
    screen = report.console()
    screen.print(report.headline(*task))

    environment = {"program": program, "machine": machine, "limit": limit, "min_bytes": min_bytes, "mode": mode}
    if str(cfg.task).startswith("GpuMemoryEdit/"):
        if (reward, actions, network) != ("paper", "paper", None):
            raise cli.UsageError(f"task: {cfg.task} takes no reward=, actions= or network=; leave them out")
        reward = "best"
        environment["id"] = "GpuMemoryEdit-v1"
    else:
        environment |= {"reward": reward, "actions": actions}
    with directory as out:
        with report.console(stderr=True).status("compiling the simulator"):
            model = make_model(algorithm, environment, seed, network, cli.to_dict(cfg.algo))
            sb3.greedy(model, environment, agent)
            for planner in ("annealing", "lp_round"):  # moves, weighted moves
                report.warm_up(machine, planner)
        with closing(tracker(out, cli.to_dict(cfg))) as scalars:
            suffix = Variant(reward, actions).label_suffix
            about = {"agent": f"train_sb3, {algorithm}{suffix}", "seed": seed, "reward": reward}
            curve = Curve(out / "curve.json", *task, mode, about, every, scalars.log_scalars)
            record, train_s = train(model, steps, agent, sb3.make_env(environment), reward == "causal", curve)
        model.save(out / "model.zip")
        if record.best is None:
            raise agents.Infeasible(
                f"no feasible plan for {limit:,} bytes in {len(record.history)} episodes; raise limit= or steps="
            )

        controls = report.ablations(record.calls, train_s, mode=mode, min_bytes=min_bytes, seed=seed)
        greedy = sb3.greedy(model, environment, agent)
        plans = {agent: (record.best, record.calls), f"{agent}_greedy": (greedy, record.calls)}
        rows = compare_planners(task, seed, mode, names, controls, plans, train_s, curve.bound)
        from experiments.plotting.plots import write_training  # Matplotlib is slow to import

        write_training(out, program, machine, record.best, agent, record.history, rows)
        episodes = len(record.history)
        report.write_summary(out / "summary.json", cfg, program, rows, episodes=episodes, train_s=train_s)
    screen.print(report.table(rows))
    print(out)
    return out


def make_model(
    algorithm: str, environment: Mapping[str, Any], seed: int, network: Any, settings: dict[str, Any]
) -> BaseAlgorithm:
    """Returns a model of Stable-Baselines3; raises UsageError if a setting or the custom network is invalid."""
    from agents.learned import sb3
    from agents.learned.structure2vec import CustomNetworkError

    try:
        return sb3.make(algorithm, environment, seed, custom_network=network, **settings)
    except CustomNetworkError as error:
        raise cli.UsageError(str(error)) from None
    except (TypeError, ValueError, AssertionError) as error:
        raise cli.UsageError(f"algo: {algorithm} rejects its settings ({error}); correct them") from None


def train(
    model: BaseAlgorithm, steps: int, agent: str, eval_env: Env, causal: bool, curve: Curve
) -> tuple[EpisodeRecorder, float]:
    """Trains with a progress bar and a learning curve; returns the episodes and the training time in s."""
    from agents.learned import sb3

    assert curve.log is not None

    def greedy() -> float:
        return sb3.greedy_overhead(model, eval_env)

    with report.progress() as bar:
        task = bar.add_task("training", total=steps)

        def on_episode(e: Episode) -> None:
            curve.add_episode(e.overhead)
            text = f"training, best {e.best_overhead:.2%}"
            bar.update(task, completed=min(record.num_timesteps, steps), description=text)

        def on_step() -> None:
            curve.add_point_if_due(record.calls, greedy)

        record = sb3.EpisodeRecorder(agent, causal, on_episode, on_step)
        sb3.watch(model, record, curve.log)
        start = time.perf_counter()
        model.learn(steps, record)
        train_s = time.perf_counter() - start
        model.logger.dump(model.num_timesteps)
        curve.add_point(record.calls, greedy())
    return record, train_s


def task_of(cfg: DictConfig) -> tuple[simulator.Program, simulator.Machine, int]:
    """Returns program, machine and limit in bytes.

    The small built-in task is the default if no task, workload or program is given.

    Raises:
        UsageError: The task is unknown, or it is given with a setting that it contains.
    """
    if cfg.task is not None:
        tasks = {f"{kind}/{name}-v1": task for kind in ENVIRONMENTS for name, task in TASKS.items()}
        if str(cfg.task) not in tasks:
            raise cli.UsageError(f"task: unknown task {cfg.task!r}{cli.nearest(str(cfg.task), set(tasks))}")
        typed = [word.partition("=")[0] for word in HydraConfig.get().overrides.task]
        if conflicts := {"workload", "program", "machine", "limit"} & set(typed):
            raise cli.UsageError(f"task: {cfg.task} already sets {min(conflicts)}=; remove one of the two")
        named_task = tasks[str(cfg.task)]
        program, machine = load(named_task.program)
        cfg.limit = named_task.limit
        return program, machine, limit_bytes(named_task.limit, program)
    small, machine = small_task()
    is_small = cfg.program is None and cfg.get("workload") is None
    if cfg.get("machine") is not None:
        machine = cli.machine(cfg)
    elif not is_small:
        machine = simulator.Machine.load("gtx1080ti")
    program = small if is_small else cli.program(cfg, machine, "limit")
    return program, machine, limit_bytes(cfg.limit, program)


if __name__ == "__main__":
    main()
