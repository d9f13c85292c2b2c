"""Several test processes share the cores: threads of PyTorch's would wait for each other, and garbage is looked for
seldom."""

import gc
import os
import signal

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a GPU machine may have none of the libraries that its tests do without (tests/gpu.py)
    settings = None

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when PyTorch is imported
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and theirs, ignore Ctrl-C

# No test looks at a clock, and no case is drawn anew unless SEED=random asks for it (make nightly SEED=random).
if settings is not None:
    for name, cases in (("quick", 15), ("long", 300)):
        settings.register_profile(
            name, deadline=None, max_examples=cases, suppress_health_check=list(HealthCheck),
            derandomize=os.environ.get("SEED") != "random",
        )  # fmt: skip
    settings.load_profile("quick")


def pytest_collection_finish() -> None:
    """What was imported stays: garbage is not to be looked for in it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)
