"""Captures in processes of their own: the same as here, with their reasons, and ended with what asked for them."""

from __future__ import annotations

import multiprocessing
import os
import pstats
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from experiments import workloads
from experiments.common.cli import UsageError
from experiments.plan import background_capture
from experiments.plan.background_capture import Captures
from experiments.plan.max_batch import BatchError
from simulator import Machine
from tests.experiments.conftest import ROOT

MACHINE = Machine.load("h100")
MLP = {"name": "mlp", "family": "mlp", "batch_size": 64, "width": 64, "layers": 2}
FACTORIES = """
import os, pathlib, signal, time
from torch import nn, optim, zeros

def waits():
    pathlib.Path(f"{os.getpid()}.pid").touch()
    time.sleep(600)

def killed():
    os.kill(os.getpid(), signal.SIGKILL)

def shapeless():
    model = nn.Linear(4, 4)
    return model, nn.MSELoss(), optim.SGD(model.parameters(), 0.1), (zeros(8, 4), zeros(4))
"""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Captures]:
    """Processes that several tests ask; the module ``factories`` is in their working directory."""
    folder, before = tmp_path_factory.mktemp("factories"), Path.cwd()
    (folder / "factories.py").write_text(FACTORIES)
    os.chdir(folder)
    try:
        with Captures() as captures:
            yield captures
    finally:
        os.chdir(before)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("forks", sorted({background_capture.FORKS, False}))
def test_they_are_as_captured_here(
    forks: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = workloads.load(MLP, MACHINE)
    handler, method = signal.getsignal(signal.SIGINT), multiprocessing.get_start_method(allow_none=True)
    spec = sys.modules["__main__"].__spec__
    monkeypatch.setattr(background_capture, "FORKS", forks)
    with nullcontext(request.getfixturevalue("shared")) if forks else Captures() as captures:
        captures.begin(MLP, MACHINE, True)
        step = captures.step()
        assert step.program == here.program and step.origins == here.origins
        captures.look(step.program, 10 * step.program.peak_bytes)
        found = captures.batches(300)
        assert (found.own, found.other) == (64, 128)
        assert found.larger == workloads.load(MLP, MACHINE, 128).program
        without = found.largest(10 * step.program.peak_bytes)
        assert captures.checked(found.peak_bytes(without), 300)
    assert multiprocessing.get_start_method(allow_none=True) is method
    assert signal.getsignal(signal.SIGINT) is handler and sys.modules["__main__"].__spec__ is spec


def test_what_goes_wrong_is_told(shared: Captures) -> None:
    captures = shared
    captures.begin(MLP, MACHINE, True)
    program = captures.step().program
    captures.look(program, 2 * program.peak_bytes)
    captures.batches(300)
    with pytest.raises(BatchError, match="bytes, not 1 as those at others foretell"):
        captures.checked(1, 300)
    captures.begin(MLP, MACHINE, False)
    captures.step()
    assert not captures._other.poll(0.5)  # at no other batch
    captures.begin(MLP, None, False)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"(?s)Traceback.*AttributeError.*'NoneType'"):
        captures.step()
    captures.begin({"name": "m", "target": "factories:missing"}, MACHINE, False)
    with pytest.raises(UsageError, match="module 'factories' has no attribute 'missing'"):
        captures.step()
    captures.begin({"name": "m", "target": "factories:shapeless"}, MACHINE, True)  # at its own batch it is captured
    captures.look(captures.step().program, 2**30)
    with pytest.raises(BatchError, match="do not share a first dimension"):
        captures.batches(300)
    captures.begin({"name": "m", "target": "factories:killed"}, MACHINE, False)
    with pytest.raises(UsageError, match="was killed; was there memory enough"):
        captures.step()


def test_they_end_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that were forked, in the middle of a capture."""
    (tmp_path / "factories.py").write_text(FACTORIES)
    monkeypatch.chdir(tmp_path)
    with Captures() as captures:
        captures.begin({"name": "m", "target": "factories:waits"}, MACHINE, True)
        end = time.monotonic() + 300
        while len(pids := [int(file.stem) for file in tmp_path.glob("*.pid")]) < 2 and time.monotonic() < end:
            time.sleep(0.05)
        assert len(set(pids)) == 2 and all(map(alive, pids)) and os.getpid() not in pids
    end = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(alive, pids))


def planned(tmp_path: Path, *words: str) -> None:
    """Runs Python with these words, in which a module that plans is one."""
    done = subprocess.run(
        [sys.executable, "-m", *words, "workload=mlp", "seconds=1", f"out={tmp_path / 'out'}"], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and (tmp_path / "out" / "report.html").exists(), done.stderr


@pytest.mark.nightly
def test_within_a_launchers_process(tmp_path: Path) -> None:
    """Whose way to start processes is joblib's own, and known to no other."""
    planned(tmp_path, "experiments.plan", "-m", "memory=1.0", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")


def test_under_a_profiler_which_sees_no_pytorch(tmp_path: Path) -> None:
    """Its module is __main__ in the place of the command's, which imports no PyTorch itself."""
    planned(tmp_path, "cProfile", "-o", "profile", "-m", "experiments.plan", "memory=0.7", "largest=false")
    files = {Path(file) for file, _, _ in pstats.Stats(str(tmp_path / "profile")).stats}  # type: ignore[attr-defined]
    assert ROOT / "experiments" / "plan" / "__main__.py" in files and len(files) > 500
    assert not [file for file in files if file.parts[-2:] == ("torch", "__init__.py")]
