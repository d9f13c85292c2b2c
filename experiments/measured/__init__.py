"""Command that fits the kernel-time model and measures steps; experiments/measure implements it."""
