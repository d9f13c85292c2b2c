"""Checks that compiled code stays within its arrays (Numba's bounds check on random cases) and is compiled once.

python -m tests.bounds
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import replace

import numpy as np
from numba import config

from envs.memory_env import small_task
from envs.task import Task
from simulator import Plan, Swap, simulate
from simulator.compiled import event_loop, scoring
from simulator.compiled.jit import stage
from tests import tiny
from tests.envs.test_batch import follow
from tests.random_cases import any_case, difference

CASES = 300
STEPS = 60


@stage(entry=True)
def beyond(values):
    """Reads one element beyond the end of an array."""
    return values[values.size]


def main() -> None:
    """Runs the command."""
    if not config.BOUNDSCHECK:
        with tempfile.TemporaryDirectory() as folder:
            environment = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": folder}
            sys.exit(subprocess.run([sys.executable, "-m", "tests.bounds"], env=environment).returncode)
    try:
        beyond(np.zeros(3, np.int64))
    except IndexError:
        pass
    else:
        sys.exit("nothing is checked")
    simulate(tiny.PROGRAM, Plan((Swap(tiny.A1, 1, 6),)), tiny.MACHINE, tiny.LIMIT)
    if (len(scoring.score_plans.signatures), len(scoring.lower_recomputations.signatures)) != (1, 0):
        sys.exit("plans of swaps compile what they do not need")
    if twice := [name for name, x in vars(event_loop).items() if len(getattr(x, "signatures", ())) > 1]:
        sys.exit(f"compiled in several versions: {twice}")
    for seed in range(CASES):
        if found := difference(any_case(seed)):
            sys.exit(f"seed {seed}: {found}")
    program, machine = small_task()
    short = replace(machine, d2h_bytes_per_s=6 * 10**9, host_bytes=20 * 2**20)
    tasks = [
        Task(program, on, program.peak_bytes // 2, 2**20, mode) for on in (machine, short) for mode in ("swap", "joint")
    ]
    for reward in ("paper", "causal"):
        follow(tasks, reward, "full", 1, 8, STEPS, True)


if __name__ == "__main__":
    main()
