"""Validation of the simulator on a GPU: networks, PyTorch baselines, largest batch, measurement conditions, plots."""
