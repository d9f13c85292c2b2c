"""Timings of the simulator, searches, environments, allocators and planned steps (suite ``speed``)."""
