"""Measurements: published ones, those of this computer and its GPU, and their comparison with predictions."""
