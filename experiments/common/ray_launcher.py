"""Hydra launcher for Ray: ``-m hydra/launcher=ray`` runs every job of a sweep as a task of a Ray cluster.

hydra-ray-launcher is no alternative: it depends on the AWS cluster launcher, the dashboard and an old cloudpickle.
``hydra.launcher.jobs=N`` limits the concurrent jobs. workers.py documents the choice of cluster and the retries.
``register`` announces the launcher under a module name in ``hydra_plugins``, the only package that Hydra accepts.
"""

from __future__ import annotations

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
from hydra.core.utils import JobReturn, configure_log, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

from experiments.common import workers


class RayLauncher(Launcher):
    """Runs the jobs of a sweep on Ray; a failed job does not stop the others."""

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = jobs

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Stores context, task and config (called by Hydra)."""
        self.context, self.task, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs the jobs and returns their results in order; raises Ray's error for a job that ran out of retries."""
        setup_globals()
        configure_log(self.config.hydra.hydra_logging, self.config.hydra.verbose)
        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        tasks = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            config = self.context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(config):
                config.hydra.job.id, config.hydra.job.num = f"{config.hydra.job.name}_{number}", number
            tasks.append((self.context, config, self.task, Singleton.get_state()))
        found = dict(workers.results("ray", self.jobs, run_one, tasks))
        for job in found.values():
            if isinstance(job, Exception):
                raise job
        return [found[i] for i in range(len(tasks))]


def run_one(context: HydraContext, config: DictConfig, task: TaskFunction, state: dict[Any, Any]) -> JobReturn:
    """Runs one job on a worker; the result carries its errors."""
    setup_globals()
    Singleton.set_state(state)
    HydraConfig.instance().set_config(config)
    return run_job(task, config, "hydra.sweep.dir", "hydra.sweep.subdir", context)


def register() -> None:
    """Registers ``hydra/launcher=ray`` if Ray is installed."""
    if find_spec("ray"):
        RayLauncher.__module__ = "hydra_plugins.headroom"
        Plugins.instance().register(RayLauncher)  # after the installed plugins
        sys.modules.setdefault("hydra_plugins", ModuleType("hydra_plugins"))
        sys.modules[RayLauncher.__module__] = sys.modules[__name__]
        node = {"_target_": f"{RayLauncher.__module__}.RayLauncher", "jobs": None}
        ConfigStore.instance().store("ray", node, "hydra/launcher", provider="headroom")
