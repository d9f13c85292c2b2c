"""Search over plans: random search, simulated annealing, local search, and rounding of the floor's linear program."""
