"""Compares published GPU measurements with the simulator's predictions; data and sources: tests/data/measured."""
