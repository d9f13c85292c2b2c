"""Command that fits the kernel-time model and measures steps; its parts: experiments/measure."""
