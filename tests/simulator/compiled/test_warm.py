"""Of several processes one compiles: the one that a command starts first of all, or whichever is first."""

import multiprocessing
import os
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from simulator.compiled import engine, jit, warm
from tests.test_imports import ROOT

START = """
import os, sys, time
from pathlib import Path
from simulator.compiled import engine, warm
from simulator.compiled.scoring import score_plans

engine.cores.__code__ = (lambda: 2).__code__

def begun():
    while not list(Path(os.environ["NUMBA_CACHE_DIR"]).rglob("*score_plans*.lock")):
        time.sleep(0.01)
    time.sleep(0.3)

def run():
    "How often this process compiled what a plan of swaps needs."
    warm.simulate(warm.TINY, warm.SWAPPED, warm.Machine("any", 10**9, 10**9, 10**9), 2 * warm.TINY.peak_bytes)
    return sum(score_plans.stats.cache_misses.values())
"""
JIT = """
import time
from pathlib import Path
from simulator.compiled.jit import jit

@jit
def scaled(x):
    return {x: str(x)}[x]

Path("ready-%d" % PID).touch()
while not Path("go").exists():
    time.sleep(0.001)
scaled(10)
print(sum(scaled.stats.cache_misses.values()))
"""


def environment(folder: Path) -> dict[str, str]:
    return os.environ | {"NUMBA_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(ROOT)}


def output(folder: Path, script: str) -> list[str]:
    """The words that a process prints which goes on from START; an empty cache lies in ``folder``."""
    done = subprocess.run(
        [sys.executable, "-c", START + script], env=environment(folder), cwd=folder, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return False


def test_what_another_process_compiles_is_waited_for_and_taken_from_the_cache(tmp_path: Path) -> None:
    script = "print(warm.start().pid); begun(); print(warm.busy(), run(), warm.start())"
    pid, busy, misses, again = output(tmp_path, script)
    assert (busy, misses, again) == ("True", "0", "None")  # all is there: no other process
    assert gone(int(pid))


@pytest.mark.parametrize(
    "script",
    [
        "sys.executable = '/bin/false'; warm.start()",
        "sys.executable = '/nowhere'; assert warm.start() is None",
        "child = warm.start(); begun(); child.kill()",  # at work, it has the lock
        "engine.cores.__code__ = (lambda: 1).__code__; assert warm.start() is None",
    ],
    ids=["it fails", "it cannot be started", "it is killed", "there is one core"],
)
def test_without_the_other_process_a_command_compiles_itself(tmp_path: Path, script: str) -> None:
    assert output(tmp_path, f"{script}; print(run())") == ["1"]


def test_it_ends_with_the_command_and_is_no_zombie(tmp_path: Path) -> None:
    begin = time.monotonic()
    (pid,) = output(tmp_path, "print(warm.start().pid); begun()")
    assert gone(int(pid)) and time.monotonic() - begin < 60
    dead = "child = warm.start(); child.kill(); time.sleep(0.5); print(child.returncode)"
    assert output(tmp_path, dead) == ["-9"]  # waited for by nobody else


def test_of_two_processes_one_compiles(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(JIT.replace("PID", "__import__('os').getpid()"))
    both = [
        subprocess.Popen([sys.executable, "work.py"], env=environment(tmp_path), cwd=tmp_path, stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    while len(list(tmp_path.glob("ready-*"))) < 2:
        assert all(process.poll() is None for process in both)
        time.sleep(0.01)
    (tmp_path / "go").touch()
    assert sorted(int(process.communicate(timeout=60)[0]) for process in both) == [0, 1]


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped in the middle keeps the lock, and others must not wait forever."""
    monkeypatch.setattr(jit, "PATIENCE", 0.2)
    begin = time.monotonic()
    with jit._alone(warm.score_plans._cache, "of a test"), jit._alone(warm.score_plans._cache, "of a test"):
        assert 0.2 <= time.monotonic() - begin < 10


def test_a_worker_process_has_one_core() -> None:
    assert engine.cores() == len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(engine.cores).result() == 1
