"""Gymnasium environments over the simulator; importing this package registers ``GpuMemory-v0``, the tasks that have
names (``GpuMemory/vgg16-45-v0``, …: tasks.py) and ``GpuMemoryJobs-v0``."""

import gymnasium

from envs.jobs_env import JobsEnv, JobsVectorEnv
from envs.jobs_task import JobsTask, Scenario
from envs.memory_env import MemoryEnv, MemoryVectorEnv
from envs.task import Task
from envs.tasks import SUITES, TASKS
from envs.walk import Walk

for _id, _kwargs in [("GpuMemory-v0", {}), *((f"GpuMemory/{name}-v0", task.kwargs) for name, task in TASKS.items())]:
    gymnasium.register(
        _id, "envs.memory_env:MemoryEnv", vector_entry_point="envs.memory_env:MemoryVectorEnv", kwargs=_kwargs
    )

gymnasium.register("GpuMemoryJobs-v0", "envs.jobs_env:JobsEnv", vector_entry_point="envs.jobs_env:JobsVectorEnv")

__all__ = ["SUITES", "JobsEnv", "JobsTask", "JobsVectorEnv", "MemoryEnv", "MemoryVectorEnv", "Scenario", "Task", "Walk"]
