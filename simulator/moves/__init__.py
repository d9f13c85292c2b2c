"""Moves between plans for searches and environments, and a graph of a plan's gaps as input for networks."""
