"""The mixed-integer program of a plan, and the planner that solves it."""
