"""Gymnasium environments over the simulator; importing this package registers ``GpuMemory-v0`` and
``GpuMemoryJobs-v0``."""

import gymnasium

from envs.jobs_env import JobsEnv
from envs.jobs_walk import JobsTask, JobsWalk, Scenario
from envs.memory_env import MemoryEnv, MemoryVectorEnv
from envs.task import Task
from envs.walk import Walk

gymnasium.register(
    "GpuMemory-v0", entry_point="envs.memory_env:MemoryEnv", vector_entry_point="envs.memory_env:MemoryVectorEnv"
)

gymnasium.register("GpuMemoryJobs-v0", entry_point="envs.jobs_env:JobsEnv")

__all__ = ["JobsEnv", "JobsTask", "JobsWalk", "MemoryEnv", "MemoryVectorEnv", "Scenario", "Task", "Walk"]
