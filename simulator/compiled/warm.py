"""``start``: compiles common code in another process, while the command imports modules and captures a program.

The code is ``score_plans`` for plans of swaps. If the command needs it earlier, it waits as for any other process
(jit.py); if the process fails, the command compiles the code itself.
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
    """Starts the process, unless one is running, the cache already has the code, or no core is free.

    The process prints nothing and ends with this one at the latest.
    """
    if busy() or cores() < 2 or _cached():
        return None
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    except OSError:
        return None
    threading.Thread(target=process.wait, daemon=True).start()  # avoids a zombie process
    atexit.register(_end, process)
    _started.append(process)
    return process


def busy() -> bool:
    """Returns whether the process is still compiling."""
    return any(process.poll() is None for process in _started)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()


def _cached() -> bool:
    """Returns whether ``score_plans`` is compiled for plans of swaps."""
    return any(types.none in key[0] for key in score_plans._cache._cache_file._load_index())


if __name__ == "__main__":
    simulate(TINY, SWAPPED, Machine("any", 10**9, 10**9, 10**9), 2 * TINY.peak_bytes)
