"""What is compiled from another file does not go stale in Numba's cache."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from simulator.compiled.jit import jit

ROOT = Path(__file__).resolve().parents[3]
OUTER = """
import {of}
from other import RATE, twice
@{how}
def priced(x):
    return twice(x) * RATE
print(priced(5))
"""
INNER = """
import {of}
RATE = {rate}
@{how}
def twice(x):
    return {factor} * x
"""
UNKNOWN = """
def look(x):
    return TABLE[x]
def early(x):
    return later(x)
"""


def prices(folder: Path, how: str, rate: int, factor: int) -> int:
    """What a file prints that compiles in a constant and a function of another; only the other one is written anew."""
    of = "numba" if how.startswith("numba") else "simulator.compiled.jit"
    outer = folder / "outer.py"
    if not outer.exists():
        outer.write_text(OUTER.format(of=of, how=how))
    (folder / "other.py").write_text(INNER.format(of=of, how=how, rate=rate, factor=factor))
    os.utime(folder / "other.py", (rate, factor))  # another time, however fast the test is
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "NUMBA_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run([sys.executable, "-B", outer], env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_the_cache_knows_what_was_compiled_in(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir()
    theirs.mkdir()
    for rate, factor in ((7, 2), (11, 2), (11, 3)):
        assert prices(ours, "simulator.compiled.jit.jit", rate, factor) == 5 * rate * factor
        # The control: plain Numba keeps what it compiled first.
        assert prices(theirs, "numba.njit(cache=True)", rate, factor) == 5 * 7 * 2


def test_what_cannot_be_stamped_is_refused() -> None:
    namespace: dict[str, Any] = {"__name__": "somewhere", "TABLE": {1: 2}}
    exec(UNKNOWN, namespace)
    with pytest.raises(TypeError, match=r"somewhere\.look: TABLE is \{1: 2\}, which cannot be stamped"):
        jit(namespace["look"])
    with pytest.raises(TypeError, match=r"somewhere\.early: later has to be defined above it"):
        jit(namespace["early"])
