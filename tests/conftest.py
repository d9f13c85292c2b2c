"""Several test processes share the cores: threads of PyTorch's would wait for each other, and garbage is looked for
seldom."""

import gc
import os

from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when PyTorch is imported

# No test depends on how busy the machine is.
settings.register_profile("no clock", settings.default, deadline=None)
settings.load_profile("no clock")


def pytest_collection_finish() -> None:
    """What was imported stays: garbage is not to be looked for in it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
