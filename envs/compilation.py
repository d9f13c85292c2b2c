"""Compilation of the environments' code: an announcement, and ``python -m envs``, which fills the cache.

Numba stores compiled code beside the modules, or in $NUMBA_CACHE_DIR. Until it is there, the first episode takes as
long as the compiler.
"""

from __future__ import annotations

import sys
import time
from functools import cache
from typing import Any

import gymnasium

from envs.compiled_walk import step_walks
from envs.edit import walkers

ENTRIES = {
    "GpuMemory": (step_walks,),
    "GpuMemoryEdit": (walkers.draw_all, walkers.step, walkers.show_plans, walkers.show_trials, walkers.show_edits),
}


def is_compiled(kind: str) -> bool:
    """Returns whether the code of ``kind``, a key of ENTRIES, is in the cache or in this process."""
    return all(entry.signatures or _stored(entry) for entry in ENTRIES[kind])


def _stored(entry: Any) -> bool:
    cache_file = getattr(entry._cache, "_cache_file", None)  # None: no folder can be written
    return cache_file is not None and bool(cache_file._load_index())


@cache
def announce(kind: str) -> None:
    """Prints a line to stderr, once per process, if the code of ``kind`` must be compiled first."""
    if not is_compiled(kind):
        print(f"compiling {kind}, once, for up to a minute (ahead: python -m envs)", file=sys.stderr)


def compile_all() -> None:
    """Compiles what is not in the cache, and prints the CPU seconds that it took."""
    for kind in ENTRIES:
        begin = time.process_time()
        was_compiled = is_compiled(kind)
        for mode in ("swap", "joint"):
            env = gymnasium.make(f"{kind}-v1", program=None, limit=0.6, mode=mode)
            _, info = env.reset(seed=0)
            ended = False
            while not ended:
                _, _, terminated, truncated, info = env.step(info["action_mask"].argmax())
                ended = terminated or truncated
        spent = "already compiled" if was_compiled else f"compiled in {time.process_time() - begin:.0f} CPU seconds"
        print(f"{kind}: {spent}")
