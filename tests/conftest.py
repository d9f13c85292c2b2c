"""Settings of every test process, and a report of the seconds per folder with their budgets.

Several test processes share the cores, so PyTorch uses one thread in each, and garbage is collected seldom.
"""

import gc
import json
import os
import signal
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # GPU machines may lack optional libraries (tests/gpu.py)
    settings = None

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when PyTorch is imported
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs, and theirs, ignore Ctrl-C

# No test has a deadline, and cases are deterministic unless SEED=random (make nightly SEED=random).
if settings is not None:
    for name, cases in (("quick", 15), ("long", 150)):
        settings.register_profile(
            name,
            deadline=None,
            max_examples=cases,
            suppress_health_check=list(HealthCheck),
            derandomize=os.environ.get("SEED") != "random",
        )
    settings.load_profile("quick")


def is_in_part(nodeid: str, part: str) -> bool:
    """Returns whether a test is in a part, such as "2/3" (the second third); its name decides."""
    k, n = map(int, part.split("/"))
    return zlib.crc32(nodeid.encode()) % n == k - 1


def pytest_addoption(parser: Any) -> None:
    """Adds ``--part 2/3``."""
    parser.addoption("--part", default="1/1", help="run only a part of the tests, such as 2/3")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    """Keeps the tests of the part that ``--part`` names."""
    part = config.getoption("part")
    config.hook.pytest_deselected(items=[item for item in items if not is_in_part(item.nodeid, part)])
    items[:] = [item for item in items if is_in_part(item.nodeid, part)]


def pytest_collection_finish() -> None:
    """Freezes imported objects, so that the garbage collector skips them."""
    gc.collect()
    gc.freeze()
    frozen = gc.get_freeze_count()
    gc.get_freeze_count = lambda: frozen  # the count visits all of them, in every capture
    gc.set_threshold(20_000, 10, 10)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Prints the seconds that the tests of each folder took, and exceeded budgets."""
    budget = json.loads(Path(__file__).with_name("budget.json").read_text())["seconds"]
    seconds: Counter[str] = Counter()
    for report in (one for reports in terminalreporter.stats.values() for one in reports if hasattr(one, "duration")):
        seconds["/".join(report.nodeid.split("/")[:2]).partition(".py")[0]] += report.duration
    terminalreporter.section("seconds by folder")
    for folder, spent in seconds.most_common():
        limit = budget.get(folder)
        note = f"  over its budget of {limit}" if limit is not None and spent > limit else ""
        terminalreporter.write_line(f"{spent:8.1f}  {folder}{note}")
