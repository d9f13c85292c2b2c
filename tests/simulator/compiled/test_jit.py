"""Tests that functions compiled by ``jit`` are recompiled when anything compiled into them changes."""

import os
import re
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from numba import njit

from simulator.compiled.jit import call, jit
from simulator.compiled.lowering import copied_at
from tests.test_imports import ROOT

COSTS = "FACTOR = {factor}\n"
RULES = """
from simulator.compiled.jit import jit
from workshop.costs import FACTOR

@jit
def scaled(x):
    return FACTOR * x {more}
"""
WORK = """
from simulator.compiled.jit import jit
from workshop.costs import FACTOR
from workshop.rules import scaled

@jit
def by_constant(x):
    return FACTOR * x

@jit
def by_function(x):
    return scaled(x)
"""
RUN = "from workshop.work import by_constant, by_function; print(by_constant(10), by_function(10))"


class Workshop:
    """A package whose work.py uses a constant and a function of two other files, which plain njit would not track."""

    def __init__(self, folder: Path):
        self.folder = folder
        (folder / "workshop").mkdir()
        (folder / "workshop" / "__init__.py").touch()
        (folder / "workshop" / "work.py").write_text(WORK)

    def run(self, factor: int, more: str = "") -> list[int]:
        """Returns the results of the two functions of work.py for 10, in a separate process."""
        (self.folder / "workshop" / "costs.py").write_text(COSTS.format(factor=factor))
        (self.folder / "workshop" / "rules.py").write_text(RULES.format(more=more))
        env = os.environ | {
            "NUMBA_CACHE_DIR": str(self.folder / "cache"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join([str(self.folder), str(ROOT)]),
        }
        done = subprocess.run([sys.executable, "-c", RUN], env=env, capture_output=True, text=True, check=True)
        return [int(word) for word in done.stdout.split()]

    def compiled(self) -> dict[Path, int]:
        """Returns the files in the cache and their modification times."""
        return {path: path.stat().st_mtime_ns for path in self.folder.rglob("work.*.nbc")}


@pytest.mark.nightly
def test_changes_in_other_files_trigger_recompilation(tmp_path):
    shop = Workshop(tmp_path)
    assert shop.run(factor=2) == [20, 20]
    before = shop.compiled()
    assert len(before) == 2
    assert shop.run(factor=2) == [20, 20]
    assert shop.compiled() == before  # read from the cache
    # The constant of another file, directly and through a function; the code of a function of another file.
    assert shop.run(factor=3, more="+ 1") == [30, 31]


def stamp(function):
    return jit(function).py_func.stamp


def test_a_stamp_is_of_values_and_not_of_names_elsewhere():
    def made(unit):
        def scaled(x):
            return x * unit

        return scaled

    assert stamp(made(2)) == stamp(made(2))
    values = [
        2,
        3,
        2.0,
        True,
        (2, 3),
        (3, 2),
        np.int32(2),
        np.arange(2),
        np.arange(3),
        np.arange(2.0),
        np.dtype("i4"),
        copied_at,
        call,
        namedtuple("Pair", "a b"),
        namedtuple("Pair", "b a"),
    ]
    assert len({stamp(made(value)) for value in values}) == len(values)


@njit
def plain(x):
    return x


TABLE = {1: 2}


@pytest.mark.parametrize("name", ["plain", "TABLE", "subprocess", "Workshop", "not_there"])
def test_values_without_a_stamp_are_refused(name):
    names: dict[str, object] = {**globals(), "__name__": "shop"}
    exec(f"def scaled(x):\n    return {name}", names)
    with pytest.raises(TypeError, match=rf"shop\.scaled: {name} "):
        jit(names["scaled"])


def test_nothing_is_compiled_without_a_stamp():
    for folder in ("simulator", "envs", "agents", "executor", "experiments"):
        for path in (ROOT / folder).rglob("*.py"):
            if path != ROOT / "simulator" / "compiled" / "jit.py":
                assert not re.search(r"\bn?jit\b.*\bnumba\b|\bnumba\b.*\bn?jit\b", path.read_text()), path


@pytest.mark.nightly
def test_a_damaged_cache_is_ignored(tmp_path):
    shop = Workshop(tmp_path)
    assert shop.run(3) == [30, 30]
    for damage in (b"garbage", None, b"\x80\x04\x8c\x05nopes\x8c\x01X\x93."):  # the last one names a missing class
        for file in (tmp_path / "cache").rglob("*.nb[ic]"):
            file.write_bytes(file.read_bytes()[:-40] if damage is None else damage)
        assert shop.run(3) == [30, 30]


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["full", "nowhere"])
def test_without_room_for_a_cache_it_is_compiled_each_time(tmp_path, where):
    """On a full disk files stay empty; without a writable folder, nothing is cached."""
    before = {
        "full": "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))",
        "nowhere": "from numba.core import caching; caching.CacheImpl._locator_classes = []",
    }
    code = f"""{before[where]}
from simulator.compiled.jit import jit
from simulator.compiled.lowering import copied_at
import numpy as np
print(copied_at(np.zeros((1, 6), np.int64), 0))
"""
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )
    said = "" if where == "full" else "compiled code is not cached: set NUMBA_CACHE_DIR to a writable folder\n"
    assert done.stdout == "0\n" and done.stderr == said
