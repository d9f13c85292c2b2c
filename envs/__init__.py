"""Gymnasium environments over the simulator. Importing this package registers them.

In an episode of ``GpuMemory-v0`` the agent walks through one training iteration. In ``GpuMemoryEdit-v0`` it edits
complete plans. Both exist for every named task of tasks.py (``GpuMemory/vgg16-45-v0``,
``GpuMemoryEdit/vgg16-45-v0``, …).
"""

import gymnasium

from envs.edit.env import MemoryEditEnv, MemoryEditVectorEnv
from envs.memory_env import MemoryEnv, MemoryVectorEnv
from envs.task import Task
from envs.tasks import SUITES, TASKS
from envs.walk import Walk

for _kind, _entry in [("GpuMemory", "envs.memory_env:Memory"), ("GpuMemoryEdit", "envs.edit.env:MemoryEdit")]:
    for _name, _kwargs in [("-v0", {}), *((f"/{name}-v0", task.kwargs) for name, task in TASKS.items())]:
        gymnasium.register(_kind + _name, _entry + "Env", vector_entry_point=_entry + "VectorEnv", kwargs=_kwargs)

__all__ = ["SUITES", "MemoryEditEnv", "MemoryEditVectorEnv", "MemoryEnv", "MemoryVectorEnv", "Task", "Walk"]
