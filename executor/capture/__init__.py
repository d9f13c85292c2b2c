"""From a training step of PyTorch to a Program: tracing, operators, state, durations."""
