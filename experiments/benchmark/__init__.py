"""Benchmark of agents on named tasks, and the speed suite (`make bench`) with its SimPy baseline."""
