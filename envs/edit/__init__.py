"""Environments that edit complete plans: ``GpuMemoryEdit-v0`` and its vector form."""
