"""Gymnasium environments over the simulator; importing this package registers ``GpuMemory-v0``."""

import gymnasium

from envs.memory_env import MemoryEnv, MemoryVectorEnv
from envs.walk import Task, Walk

gymnasium.register(
    "GpuMemory-v0", entry_point="envs.memory_env:MemoryEnv", vector_entry_point="envs.memory_env:MemoryVectorEnv"
)

__all__ = ["MemoryEnv", "MemoryVectorEnv", "Task", "Walk"]
