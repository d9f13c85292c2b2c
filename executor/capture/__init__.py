"""Converts a PyTorch training step into a Program: tracing, operators, state, durations."""
