"""The core suite of the benchmark."""

from experiments.figures.figure import Figure
from experiments.figures.suite import chart, numbers, run, tasks

FIGURE = Figure("core", tasks, run, numbers, chart, alone=True)
