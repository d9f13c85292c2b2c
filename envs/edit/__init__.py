"""Environments that edit complete plans: ``GpuMemoryEdit-v1`` and its vector form."""
