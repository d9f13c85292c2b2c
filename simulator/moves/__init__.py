"""Moves between plans, for searches and environments over whole plans, and what a network reads of a plan's gaps."""
