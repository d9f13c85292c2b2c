"""Search over plans: random, annealing, local search, ruin and recreate, rounding of the floor's program."""
