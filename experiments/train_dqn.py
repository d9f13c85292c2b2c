"""Trains the DQN from scratch on several programs and tests it on unseen ones; or plans one training step with it.

    python -m experiments.train_dqn                                    # from scratch, three minutes (train_unseen.py)
    python -m experiments.train_dqn workload=vgg16                     # fine-tunes the shipped DQN, compares planners
    python -m experiments.train_dqn workload=resnet50 machine=gtx1080ti limit=0.6 seed=1
    python -m experiments.train_dqn workload=my_net.yaml machine=my_machine.yaml limit=24GiB
    python -m experiments.train_dqn resume=RUN agent.iterations=100

With a key of one task (``ONE_TASK``) the run directory contains summary.json, results.jsonl (a row per planner),
program.json, plan.json (the DQN's best plan), checkpoint.pt, weights.pt (for ``agents.make("dqn", weights=...)``), tb/
(TensorBoard; see ``tracker=``), learning_curve.png, memory_curve.png and timeline.json (for Perfetto). The last line
printed is its path.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

import agents
import simulator
from agents.floor import Floor
from experiments.common import cli, report
from experiments.common.curves import Curve
from experiments.common.resume import SETTINGS, DelayedStop, checkpoint_of, resumable, resume_args, run_path
from experiments.common.tracking import Tracker, tracker_class
from simulator.files import load_json, write_json
from simulator.limits import limit_bytes
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

if TYPE_CHECKING:
    from rich.console import Console

    from agents.learned.dqn_paper import Variant
    from agents.learned.training import DQNResult, Episode, Trainer

EDIT_AGENTS = "dqn", "dqn_scratch"  # options of the config group ``agent`` that edit whole plans
# Keys that select the training on one task.
ONE_TASK = "workload program machine limit agent reward actions network planners greedy_every resume".split()


def complete(words: list[str]) -> list[str]:
    """Returns the command line's words with those that a training on one task needs: an agent and a workload."""
    if run := run_of_several(words):
        refused = next((key for key in map(key_of, words) if key in ONE_TASK and key != "resume"), None)
        if refused:
            raise cli.UsageError(f"{refused}: {run} trains on several programs; leave it out")
        return settings_of(words)
    words = settings_of(words)
    assigned = {word.lstrip("+~").partition("=")[0] for word in words if word != "agent=dqn_scratch"}
    if not {key.partition(".")[0] for key in assigned if not key.startswith("agent.")} & {*ONE_TASK}:
        return words
    defaults = [] if "agent" in assigned or "agent=dqn_scratch" in words else ["agent=dqn"]
    return [*defaults, *([] if {"workload", "program"} & assigned else ["workload=vgg16"]), *words]


def key_of(word: str) -> str:
    """Returns the first part of the key that a word of the command line sets."""
    return word.lstrip("+~").partition("=")[0].partition(".")[0]


def run_of_several(words: list[str]) -> Path | None:
    """Returns the unfinished run of ``resume=`` if it trains on several programs, else None."""
    for run in resumed(words):
        if (run / SETTINGS).is_file():
            config = load_json(run / SETTINGS, lambda data: data.get("config") if isinstance(data, dict) else None)
            if isinstance(config, dict) and config.get("workload") is None and config.get("program") is None:
                return run
    return None


def settings_of(words: list[str]) -> list[str]:
    """Returns the command line's words; with ``resume=RUN``, the run's settings come before them."""
    files = [file for run in resumed(words) for file in (run / SETTINGS, run / "summary.json") if file.is_file()]
    return [american(word) for word in (resume_args(files[0], words) if files else words)]


def resumed(words: list[str]) -> list[Path]:
    """Returns the run directories that ``resume=`` names."""
    return [Path(word.removeprefix("resume=")).expanduser() for word in words if word.startswith("resume=")]


def american(word: str) -> str:
    """Returns a word with the present spelling of its key; prints a note if that changes it.

    ``agent.neighbours`` is accepted in version 0.5, also in the settings of older runs.
    """
    if not word.startswith("agent.neighbours="):
        return word
    print("note: agent.neighbours is now spelled agent.neighbors", file=sys.stderr)
    return word.replace("agent.neighbours=", "agent.neighbors=")


@cli.entry("train_dqn", prepare=complete)
def main(cfg: DictConfig) -> Path:
    """Trains the DQN on several programs, or on one and compares the planners; returns the run directory."""
    if cfg.get("workload") is None and cfg.program is None:
        from experiments.train_unseen import train_unseen

        return train_unseen(cfg)
    from agents.learned.checkpoint import save_weights  # PyTorch is slow to import
    from agents.learned.dqn import FineTuning

    run = read_run(cfg)
    program, machine, _ = run.task
    screen = report.console()
    log = report.console(stderr=True)
    screen.print(report.headline(*run.task))
    with log.status("compiling the simulator"):
        for planner in ("annealing", "lp_round", "dqn"):  # moves, weighted moves, ranked ones
            report.warm_up(machine, planner)

    with resumable(run.directory) as out:
        start = time.perf_counter()
        trainer, result, curve = train_agent(run, cfg, out, log)
        train_s = time.perf_counter() - start

        mode = None if run.config.mode == "joint" else run.config.mode  # None: each planner's default
        calls = result.simulator_calls
        plans = {
            run.agent: (result.best, calls),
            f"{run.agent}_greedy": (result.greedy, run.config.greedy_calls if run.edits else calls),
        }
        controls = controls_of(run, calls, None if run.resume else train_s)
        rows = compare_planners(run.task, run.seed, mode, run.names, controls, plans, train_s, curve.bound)
        from experiments.plotting.plots import write_training  # Matplotlib is slow to import

        training_curves = None
        if isinstance(trainer, FineTuning):
            training_curves = trainer.dqn.history, curve.points
            save_weights(trainer.dqn.net, out / "weights.pt")
        write_training(out, program, machine, result.best, run.agent, result.history, rows, training_curves)
        report.write_summary(out / "summary.json", cfg, program, rows, episodes=len(result.history), train_s=train_s)
        (out / SETTINGS).unlink(missing_ok=True)  # the summary contains the settings
    screen.print(report.table(rows))
    print(out)
    return out


@dataclass(frozen=True)
class Run:
    """Settings of a training run."""

    task: tuple[Program, Machine, int]  # program, machine, limit in bytes
    seed: int
    choice: str  # option of the config group ``agent``
    config: Any  # Args of agent=dqn; else PaperConfig
    variant: Variant  # of the agents other than dqn
    names: list[str]  # planners to compare with
    every: int  # simulator calls between points of the curve
    tracker: type[Tracker]
    resume: Path | None  # checkpoint
    directory: report.RunDirectory

    @property
    def edits(self) -> bool:
        """Whether the agent edits whole plans."""
        return self.choice in EDIT_AGENTS

    @property
    def agent(self) -> str:
        """Name of the agent's rows."""
        return self.choice.removesuffix("_tuned").removesuffix("_scratch")


def read_run(cfg: DictConfig) -> Run:
    """Reads the settings and captures the step; raises UsageError that names the key."""
    from agents.learned.dqn_config import Args, PaperConfig
    from agents.learned.dqn_paper import Variant

    machine = cli.machine(cfg)
    seed = cli.integer(cfg, "seed")
    tracker = tracker_class(cfg)
    every = cli.integer(cfg, "greedy_every", least=1)
    names = report.planner_names(cli.values(cfg, "planners")) if cfg.planners else []
    choice = HydraConfig.get().runtime.choices["agent"]
    config: Any = cli.dataclass_from_config(Args if choice in EDIT_AGENTS else PaperConfig, cfg.agent, "agent")
    variant = Variant(*variant_of(cfg))
    for key in ("reward", "actions", "network"):
        if choice in EDIT_AGENTS and cfg[key] is not None:
            raise cli.UsageError(f"{key}: only agent=dqn_paper has this option; remove it or select that agent")
    resume = checkpoint_of(cli.path(cfg, "resume"))
    program = cli.program(cfg, machine, "limit")
    limit = limit_bytes(cfg.limit, program)
    label = f"{program.name}-{limit / program.peak_bytes:.3g}-seed{seed}"
    directory = report.RunDirectory(run_path(cfg, resume), label, finished="summary.json")
    task = program, machine, limit
    return Run(task, seed, choice, config, variant, names, every, tracker, resume, directory)


def train_agent(run: Run, cfg: DictConfig, out: Path, log: Console) -> tuple[Trainer, DQNResult, Curve]:
    """Trains with a progress bar, a tracker and a learning curve; returns the trainer, its result and the curve.

    Raises:
        UsageError: The custom network is invalid.
    """
    from agents.learned import dqn, dqn_paper
    from agents.learned.structure2vec import CustomNetworkError
    from agents.learned.training import train

    config = run.config

    def open_tracker() -> Tracker:
        run.task[0].save(out / "program.json")
        write_json(out / SETTINGS, report.run_info(cfg), indent=1)  # for resume=
        return run.tracker(out, cli.to_dict(cfg))

    suffix = ", from scratch" if run.edits and config.init == "scratch" else run.variant.label_suffix
    about = {
        "agent": f"train_dqn, {run.choice}{suffix}",
        "seed": run.seed,
        "reward": "log" if run.edits else run.variant.reward,
    }
    resumed = None if run.resume is None else run.resume.parent / "curve.json"
    curve = Curve(out / "curve.json", *run.task, config.mode, about, run.every, resumed=resumed)
    with Watch(config.iterations if run.edits else config.episodes, open_tracker, log, curve) as watch:
        try:
            if run.edits:
                trainer: Trainer = dqn.FineTuning(*run.task, config, run.seed)
            else:
                trainer = dqn_paper.Trainer(*run.task, config, run.seed, run.variant)
            result = train(trainer, out / "checkpoint.pt", run.resume, watch, watch.step)
        except CustomNetworkError as error:
            raise cli.UsageError(str(error)) from None
        program, machine, limit = run.task
        overhead = math.nan
        if result.greedy is not None:
            overhead = simulator.simulate(program, result.greedy, machine, limit).overhead
        curve.add_point(result.simulator_calls, overhead)
    return trainer, result, curve


def controls_of(run: Run, calls: int, train_s: float | None) -> dict[str, agents.Planner]:
    """Returns the searches without the network, by the name of their rows."""
    config = run.config
    options = {"mode": config.mode, "min_bytes": config.min_bytes, "seed": run.seed}
    controls = report.ablations(calls, train_s, **options)
    if run.edits:
        options["calls"] = config.greedy_calls
        shipped = "pretrained" if config.init == "scratch" else "before training"
        controls |= {
            f"{report.ABLATION}, {config.greedy_calls:,} calls": agents.make("dqn", ranks="uniform", **options),
            f"dqn, {shipped}": agents.make("dqn", message_passing=config.message_passing, **options),
        }
    return controls


def compare_planners(
    task: tuple[Program, Machine, int],
    seed: int,
    mode: str | None,
    names: list[str],
    controls: Mapping[str, agents.Planner],
    plans: Mapping[str, tuple[Plan | None, int]],
    train_s: float,
    bound: Floor,
) -> list[report.Row]:
    """Returns the certified rows of the planners ``names``, of ``controls`` and of the agent's own ``plans``.

    Args:
        task: program, machine and limit in bytes.
        seed: seed of the planners.
        mode: eviction mode; None: the default of each planner.
        names: planners to compare.
        controls: planners by row name.
        plans: plan (None: infeasible) and simulator calls by row name.
        train_s: training time in seconds.
        bound: certified lower bound.
    """
    rows = [report.score(name, *task, seed, mode)[0] for name in report.track(names, "planning with")]
    rows += [
        report.score_with(controls[row_name], *task, seed, mode, label=row_name)[0]
        for row_name in report.track(list(controls), "planning with")
    ]
    reason = "the final greedy policy's plan does not fit the limit"
    for row_name, (plan, calls) in plans.items():
        timeline = None if plan is None else simulator.simulate(task[0], plan, *task[1:])
        rows.append(report.row(*task, row_name, seed, timeline, train_s, calls, reason, mode or "joint"))
    return [report.with_bounds(row, bound) for row in rows]


def variant_of(cfg: DictConfig) -> tuple[str, str, Any]:
    """Returns reward, actions and the class of ``network`` (None: the default network).

    Raises:
        UsageError: ``reward`` or ``actions`` is unknown, or ``network`` cannot be imported.
    """
    from envs.task import ACTIONS, REWARDS
    from experiments.workloads.module import WorkloadError, import_target

    try:
        network = None if cfg.network is None else import_target(cfg.network)
    except WorkloadError as error:
        raise cli.UsageError(f"network: {str(error).removeprefix('target: ')}") from None
    reward = cli.choice(cfg, "reward", (None, *REWARDS))
    actions = cli.choice(cfg, "actions", (None, *ACTIONS))
    return reward or "paper", actions or "paper", network


class Watch(DelayedStop):
    """Reports training progress: a progress bar on stderr, and scalars for the tracker.

    The first Ctrl-C or SIGTERM takes effect at the end of an episode. The bar starts with the first episode, so that
    earlier errors are printed alone.
    """

    def __init__(self, episodes: int, open_tracker: Callable[[], Tracker], console: Any, curve: Curve):
        self.open_tracker = open_tracker
        self.curve = curve
        self.tracker: Tracker | None = None  # created at the first episode, so that earlier errors leave no files
        self.bar = report.progress(console)
        self.resumes = bool(curve.resumed_points)
        self.total = episodes  # parallel walks may finish a few more
        self.task = self.bar.add_task("training, no plan yet", total=episodes)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self.bar.live.is_started:
            self.bar.stop()
        if self.tracker is not None:
            self.tracker.close()

    def __call__(self, e: Episode) -> None:
        """Reports one finished episode."""
        if self.tracker is None:
            self.tracker = self.open_tracker()
            self.curve.log = self.tracker.log_scalars
        best = e.best_overhead
        self.bar.start()
        text = f"best {best:.2%}" if math.isfinite(best) else "no plan yet"
        self.bar.update(self.task, completed=min(e.episode, self.total), description=f"training, {text}")
        if not math.isnan(e.overhead) or not e.feasible:  # skip iterations without an ended episode
            self.curve.add_episode(e.overhead, best)
        self.tracker.log_scalars(e.simulator_calls, {"train/epsilon": e.epsilon, "train/loss": e.loss})
        self.raise_if_stopped()

    def step(self, trainer: Trainer) -> None:
        """Updates the learning curve; called before the first step of training and after each."""
        calls = trainer.simulator_calls
        if self.resumes:
            self.curve.resume(calls)
            self.resumes = False
        self.curve.add_point_if_due(calls, trainer.greedy_overhead)


if __name__ == "__main__":
    main()
