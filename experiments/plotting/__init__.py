"""Plotting: shared panels and axes, colors and labels, and pictures of packings."""
