"""Several test processes share the cores: PyTorch's threads would wait for each other, which takes most of the time."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when PyTorch is imported


def pytest_collection_finish() -> None:
    """What was imported stays: looking for garbage in it takes a tenth of the time."""
    gc.collect()
    gc.freeze()
