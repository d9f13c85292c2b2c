"""Gymnasium environments over the simulator. Importing this package registers them.

In an episode of ``GpuMemory-v1`` the agent walks through one training iteration. In ``GpuMemoryEdit-v1`` it edits
complete plans. Both exist for every named task of tasks.py (``GpuMemory/vgg16-45-v1``,
``GpuMemoryEdit/vgg16-45-v1``, …). ``GpuMemoryEdit-v1`` is VGG16 at 40 %. Pages: gpu_memory.md, gpu_memory_edit.md.
"""

import gymnasium

from envs.edit.env import MemoryEditEnv, MemoryEditVectorEnv
from envs.memory_env import MemoryEnv, MemoryVectorEnv
from envs.task import Task
from envs.tasks import SUITES, TASKS
from envs.walk import Walk

_DEFAULTS = {"GpuMemory": {}, "GpuMemoryEdit": TASKS["vgg16-40"].kwargs}
for _kind, _entry in [("GpuMemory", "envs.memory_env:Memory"), ("GpuMemoryEdit", "envs.edit.env:MemoryEdit")]:
    for _name, _kwargs in [("", _DEFAULTS[_kind]), *((f"/{name}", task.kwargs) for name, task in TASKS.items())]:
        _id = f"{_kind}{_name}-v1"
        gymnasium.register(_id, _entry + "Env", vector_entry_point=_entry + "VectorEnv", kwargs=_kwargs)

__all__ = ["SUITES", "MemoryEditEnv", "MemoryEditVectorEnv", "MemoryEnv", "MemoryVectorEnv", "Task", "Walk"]
