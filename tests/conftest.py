"""Several test processes share the cores: PyTorch's threads would wait for each other, which takes most of the time."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when PyTorch is imported
