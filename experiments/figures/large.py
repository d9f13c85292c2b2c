"""The large suite of the benchmark: agents on programs of up to 4,000 kernels within equal simulator calls and equal
seconds, all cores, as certified gaps. No paper has this figure.

1. Every budget is a run of its own: nothing is carried from one to the next.
2. Planning is timed where the agent has planned the program once already, with the program in memory.
3. Intervals: tasks are drawn again with replacement, and the seeds of each.
"""

from experiments.figures.suite import draw, notes, run, table, tasks

__all__ = ["ALONE", "TITLE", "draw", "notes", "run", "table", "tasks"]

TITLE = "Benchmark, large suite: the gap to the floor"
ALONE = True  # a planner has all cores
