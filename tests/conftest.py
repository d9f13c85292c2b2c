"""Several test processes share the cores: threads of PyTorch's would wait for each other."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when PyTorch is imported


def pytest_collection_finish() -> None:
    """What was imported stays: garbage is not to be looked for in it."""
    gc.collect()
    gc.freeze()
