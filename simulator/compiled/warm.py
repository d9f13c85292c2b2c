"""``start``: what almost every command needs is compiled in another process, while the command imports and captures.

It is ``score_plans`` for plans of swaps. The command goes on; when it comes to need it before it is there, it waits as
for any other process (jit.py), and if that fails, it compiles it itself.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading

from numba import types

from simulator.compiled.engine import cores, simulate
from simulator.compiled.scoring import score_plans
from simulator.machine import Machine
from simulator.plan import Plan, Swap
from simulator.program import Kernel, Program, Tensor

TINY = Program(
    "warm-up",
    (Tensor("x", 2**21), Tensor("y", 2**21), Tensor("z", 2**21)),
    (
        Kernel("a", "other", "forward", (), (0,), 1000),
        Kernel("b", "other", "forward", (0,), (1,), 1000),
        Kernel("c", "other", "forward", (1,), (2,), 1000),
        Kernel("d", "other", "backward", (0, 2), (2,), 1000),
    ),
)
SWAPPED = Plan((Swap(0, 1, 3),))
_started: list[subprocess.Popen[bytes]] = []


def start() -> subprocess.Popen[bytes] | None:
    """Starts the process, unless one is at work, the cache has what it would compile, or no core is to spare.

    It is silent, and ends with this one at the latest.
    """
    if busy() or cores() < 2 or _cached():
        return None
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__], env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    except OSError:
        return None
    threading.Thread(target=process.wait, daemon=True).start()  # that it leaves no zombie
    atexit.register(_end, process)
    _started.append(process)
    return process


def busy() -> bool:
    """Whether it is still compiling: what needs no simulator is best done now."""
    return any(process.poll() is None for process in _started)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()


def _cached() -> bool:
    """Whether ``score_plans`` has been compiled for plans of swaps."""
    return any(types.none in key[0] for key in score_plans._cache._cache_file._load_index())


if __name__ == "__main__":
    simulate(TINY, SWAPPED, Machine("any", 10**9, 10**9, 10**9), 2 * TINY.peak_bytes)
