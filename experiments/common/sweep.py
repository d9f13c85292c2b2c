"""Sweeps (``-m``): a summary table of all jobs, and a Hydra launcher for Ray.

The table has limits and planners side by side. It is printed at the end and saved in the sweep's directory as
table.txt; results.jsonl holds all rows of all jobs.

``hydra/launcher=ray`` runs every job as a task of a Ray cluster; ``hydra.launcher.jobs=N`` limits the concurrent jobs.
workers.py documents the choice of cluster and the retries. hydra-ray-launcher is no alternative: it depends on the AWS
cluster launcher, the dashboard and an old cloudpickle.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, run_job, setup_globals
from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict
from rich import box
from rich.console import Console
from rich.table import Table

import agents
from experiments.common import report, workers
from experiments.common.own_files import restore_file_names
from simulator.files import write_json, write_text

OVERRIDE = f"+hydra.callbacks.sweep._target_={__name__}.SweepTable"


class SweepTable(Callback):
    """Hydra callback that records the run directory of each job, on any host; ``show_table`` merges the records."""

    folder: Path | None = None  # of the sweep that this process started

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Stores the folder of the sweep."""
        SweepTable.folder = Path(str(config.hydra.sweep.dir))

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Records the overrides and the run directory of a completed job."""
        run = job_return.return_value if job_return.status == JobStatus.COMPLETED else None
        if isinstance(run, Path):
            job = {"overrides": list(map(restore_file_names, job_return.overrides or ())), "run": str(run.absolute())}
            write_json(Path(str(config.hydra.sweep.dir)) / f".job-{config.hydra.job.num}.json", job)


def discard_folder() -> None:
    """Removes the folder of a sweep whose jobs could not be composed, if it only holds multirun.yaml."""
    folder = SweepTable.folder
    SweepTable.folder = None
    if folder is not None and [file.name for file in folder.glob("*")] == ["multirun.yaml"]:
        shutil.rmtree(folder)


def show_table() -> None:
    """Prints and saves the table of the finished sweep; does nothing if no job wrote rows."""
    folder = SweepTable.folder
    SweepTable.folder = None
    files = sorted(folder.glob(".job-*.json"), key=lambda file: (len(file.name), file.name)) if folder else []
    rows: list[dict[str, Any]] = []
    for file in files:
        job = json.loads(file.read_text())
        results = Path(job["run"]) / "results.jsonl"
        if results.exists():
            rows += [{**json.loads(line), **job} for line in results.read_text().splitlines()]
        file.unlink()
    if folder is None or not rows or any("planner" not in row for row in rows):
        return
    report.write_rows(folder / "results.jsonl", rows)
    with (text_console := Console(width=200, highlight=False, markup=False)).capture() as text:
        text_console.print(table(rows))
    write_text(folder / "table.txt", text.get())
    report.console().print(table(rows))
    print(folder)


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns a table with a line per job and limit: swept keys, floor, and the overheads of the best planners.

    Trained planners come first; the lowest overhead of a line is in brackets.
    """
    words = dict.fromkeys(word for row in rows for word in row["overrides"])
    keys = [word.partition("=")[0] for word in words]
    swept = list(dict.fromkeys(key for key in keys if keys.count(key) > 1))
    lines: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        lines.setdefault((row["run"], row["workload"], row["limit_bytes"]), []).append(row)
    planners = list(dict.fromkeys(row["planner"] for row in rows))
    costs = {name: [row["overhead"] for row in rows if row["planner"] == name and row["feasible"]] for name in planners}
    trained = {name for name, facts in agents.PLANNERS.items() if facts.learned}
    planners.sort(key=lambda name: (name not in trained, -len(costs[name]), sum(costs[name])))
    chosen = [name for name in planners if costs[name]][:6]  # fits a terminal
    out = Table(*swept, box=box.SIMPLE_HEAD, pad_edge=False)
    for head in ("limit", "floor", *chosen):
        out.add_column(head, justify="right", no_wrap=True)
    for line in lines.values():
        values = dict(word.partition("=")[::2] for word in line[0]["overrides"])
        by_name = {row["planner"]: row["overhead"] for row in line if row["feasible"]}
        lowest = min(by_name.values(), default=None)
        floor = line[0]["bound_overhead"]
        cells = [report.percent(by_name.get(name)) for name in chosen]
        marked = [
            f"[{c}]" if by_name.get(name) == lowest is not None else c for name, c in zip(chosen, cells, strict=True)
        ]
        out.add_row(
            *(values.get(key, "") for key in swept), f"{line[0]['limit_fraction']:.0%}", report.percent(floor), *marked
        )
    return out


class RayLauncher(Launcher):
    """Runs the jobs of a sweep on Ray; a failed job does not stop the others."""

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = jobs

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Stores context, task and config (called by Hydra)."""
        self.context = hydra_context
        self.task = task_function
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs the jobs and returns their results in order; raises Ray's error for a job that ran out of retries."""
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        tasks = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            config = self.context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(config):
                config.hydra.job.id = f"{config.hydra.job.name}_{number}"
                config.hydra.job.num = number
            tasks.append((self.context, config, self.task, Singleton.get_state()))
        results = dict(workers.results("ray", self.jobs, run_one, tasks))
        for job in results.values():
            if isinstance(job, Exception):
                raise job
        return [results[i] for i in range(len(tasks))]


def run_one(context: HydraContext, config: DictConfig, task: TaskFunction, state: dict[Any, Any]) -> JobReturn:
    """Runs one job on a worker; the result carries its errors."""
    setup_globals()
    Singleton.set_state(state)
    HydraConfig.instance().set_config(config)
    return run_job(task, config, "hydra.sweep.dir", "hydra.sweep.subdir", context)


def register_ray() -> None:
    """Registers ``hydra/launcher=ray`` if Ray is installed; Hydra only accepts plugins in ``hydra_plugins``."""
    if find_spec("ray"):
        RayLauncher.__module__ = "hydra_plugins.headroom"
        Plugins.instance().register(RayLauncher)  # after the installed plugins
        sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins"))
        sys.modules[RayLauncher.__module__] = sys.modules[__name__]
        node = {"_target_": f"{RayLauncher.__module__}.RayLauncher", "jobs": None}
        ConfigStore.instance().store("ray", node, "hydra/launcher", provider="headroom")
