"""Search over plans: random, annealing, local search, rounding of the floor's program."""
