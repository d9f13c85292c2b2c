"""Plotting: shared panels and axes, colours and labels, and pictures of packings."""
