"""Published measurements of GPUs beside what the simulator says; the data and their sources: tests/data/measured."""
