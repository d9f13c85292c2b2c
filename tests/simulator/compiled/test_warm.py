"""Tests that only one of several processes compiles: a command's background process, or whichever is first."""

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from simulator.compiled import engine, jit, warm
from tests.test_imports import ROOT

STAND_IN = """
# Python imports this file at its start. Replaces code that takes ten seconds to compile by trivial code, whose
# compilation takes as long as a file "hold" exists in the other process.
import time
from pathlib import Path
from numba.core.dispatcher import _FunctionCompiler
from simulator.compiled import engine, scoring
from simulator.compiled.jit import jit

@jit
def score_plans(x, none):
    return x

def compile(self, *types):
    (folder / "compiling").touch()
    while waits and (folder / "hold").exists():
        time.sleep(0.01)
    return compiled(self, *types)

folder, waits = Path(__file__).parent, True
compiled, _FunctionCompiler.compile = _FunctionCompiler.compile, compile
scoring.score_plans = score_plans
engine.simulate = lambda *case: score_plans(1, None)
"""
START = """
import sitecustomize, sys, time
from pathlib import Path
from types import SimpleNamespace
from simulator.compiled import engine, jit, warm
from simulator.compiled.scoring import score_plans

engine.cores.__code__ = (lambda: 2).__code__
hold, sitecustomize.waits = Path("hold"), False

def waited(seconds):
    hold.unlink(missing_ok=True)
    time.sleep(seconds)

jit.time = SimpleNamespace(monotonic=time.monotonic, sleep=waited)

def at_work():
    "The other process, which compiles until this one waits for it."
    hold.touch()
    child = warm.start()
    while not Path("compiling").exists():
        time.sleep(0.01)
    return child

def run():
    "How often this process compiled what a plan of swaps needs."
    warm.simulate()
    return sum(score_plans.stats.cache_misses.values())
"""


def environment(folder: Path) -> dict[str, str]:
    path = os.pathsep.join((str(folder), str(ROOT)))
    return os.environ | {"NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": path}


def output(folder: Path, script: str) -> list[str]:
    """Returns the words that a process prints after START and ``script``, with an empty cache in ``folder``."""
    (folder / "sitecustomize.py").write_text(STAND_IN)
    done = subprocess.run(
        [sys.executable, "-c", START + script],
        env=environment(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_compilations_of_other_processes_are_awaited_and_reused(tmp_path: Path) -> None:
    script = "at_work(); print(warm.busy(), warm.start(), run(), warm.start())"
    assert output(tmp_path, script) == ["True", "None", "0", "None"]  # one at a time, and none once all is cached


@pytest.mark.nightly
@pytest.mark.parametrize(
    "script",
    [
        "sys.executable = '/bin/false'; warm.start()",
        "sys.executable = '/nowhere'; assert warm.start() is None",
        "at_work().kill()",  # it holds the lock
        "engine.cores.__code__ = (lambda: 1).__code__; assert warm.start() is None",
    ],
    ids=["it fails", "it cannot be started", "it is killed", "there is one core"],
)
def test_without_the_other_process_a_command_compiles_itself(tmp_path: Path, script: str) -> None:
    assert output(tmp_path, f"{script}; print(run())") == ["1"]


def test_waiting_for_the_lock_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process keeps the lock; others must not wait forever."""
    slept: list[float] = []
    monkeypatch.setattr(jit, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append))
    with jit._compile_lock(warm.score_plans._cache, "of a test"):
        assert not slept
        with jit._compile_lock(warm.score_plans._cache, "of a test"):
            assert sum(slept) == pytest.approx(jit.LOCK_TIMEOUT_S, abs=0.1)


@pytest.mark.nightly
def test_a_worker_process_has_one_core() -> None:
    assert engine.cores() == len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(engine.cores).result() == 1
