"""Gymnasium environments over the simulator; importing this package registers ``GpuMemory-v0`` and the tasks that have
names (``GpuMemory/vgg16-45-v0``, …: tasks.py)."""

import gymnasium

from envs.memory_env import MemoryEnv, MemoryVectorEnv
from envs.task import Task
from envs.tasks import SUITES, TASKS
from envs.walk import Walk

for _id, _kwargs in [("GpuMemory-v0", {}), *((f"GpuMemory/{name}-v0", task.kwargs) for name, task in TASKS.items())]:
    gymnasium.register(
        _id, "envs.memory_env:MemoryEnv", vector_entry_point="envs.memory_env:MemoryVectorEnv", kwargs=_kwargs
    )

__all__ = ["SUITES", "MemoryEnv", "MemoryVectorEnv", "Task", "Walk"]
