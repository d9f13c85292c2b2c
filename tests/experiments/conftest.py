"""Fixtures: a small program, and runs of commands as a user starts them."""

import atexit
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from runpy import run_module
from typing import Any

import numpy as np
import pytest
import torch

from simulator import Kernel, Program, Tensor

ROOT = Path(__file__).resolve().parents[2]
MB = 2**20


class Done(subprocess.CompletedProcess[str]):
    """Result of a command."""

    def ok(self) -> "Done":
        """Returns the result of a command that ended with status 0 and printed its directory last."""
        assert self.returncode == 0, self.stderr
        out = [word.removeprefix("out=") for word in self.args if word.startswith("out=")]
        assert not out or self.stdout.splitlines()[-1] == out[-1]
        return self


Run = Callable[..., Done]


def figure_settings(name: str, quick: bool = False, **more: Any) -> Any:
    """Returns the settings of a figure's YAML file with changes."""
    from omegaconf import OmegaConf

    config = OmegaConf.to_container(OmegaConf.load(ROOT / "configs" / "figure" / f"{name}.yaml"))
    assert isinstance(config, dict)
    fewer = config.pop("quick")
    return OmegaConf.create({**config, **(fewer if quick else {}), **more})


def refused(done: Done, *words: str) -> None:
    """Asserts that a command ended with status 2 and one sentence on stderr that contains all the words."""
    assert done.returncode == 2, done.stderr
    (sentence,) = done.stderr.strip().splitlines()
    for word in words:
        assert word in sentence


def rows_in(directory: Path) -> list[dict[str, Any]]:
    """Returns the rows of a run directory."""
    return [json.loads(line) for line in (directory / "results.jsonl").read_text().splitlines()]


def check_rows(rows: list[dict[str, Any]]) -> None:
    """Asserts properties of every planner's row."""
    from experiments.common.report import ROW_KEYS  # optional dependency

    for row in rows:
        assert set(row) - {"reason"} == set(ROW_KEYS) and ("reason" in row) == (not row["feasible"])
        if row["feasible"]:
            assert row["peak_bytes"] <= row["limit_bytes"]
            assert row["gap"] == row["overhead"] - row["bound_overhead"] >= 0
        else:
            assert row["gap"] is row["overhead"] is row["iteration_ns"] is row["peak_bytes"] is row["breakdown"] is None


def chain(layers: int = 6, nbytes: int = 32 * MB) -> Program:
    """Returns a chain of layers, forward and backward, whose activations live until the backward pass."""
    tensors = [Tensor("weight", 4 * MB, "parameter", True)]
    kernels = []
    for i in range(layers):
        tensors.append(Tensor(f"x{i + 1}", nbytes))
        inputs: tuple[int, ...] = (0, i) if i else (0,)
        kernels.append(Kernel(f"forward{i}", "conv", "forward", inputs, (i + 1,), 2_000_000))
    gradient = -1
    for i in reversed(range(layers)):
        tensors.append(Tensor(f"dx{i + 1}", nbytes, "gradient"))
        inputs = (0, i + 1) if gradient < 0 else (0, i + 1, gradient)
        gradient = len(tensors) - 1
        kernels.append(Kernel(f"backward{i}", "conv", "backward", inputs, (gradient,), 4_000_000))
    return Program("chain", tuple(tensors), tuple(kernels))


@pytest.fixture
def program() -> Program:
    return chain()


@pytest.fixture
def program_file(program: Program, tmp_path: Path) -> Path:
    program.save(tmp_path / "chain.json")
    return tmp_path / "chain.json"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs ``python -m experiments.<name>`` in this process, in an empty directory, with the state of a new process."""
    (work := tmp_path / "work").mkdir(exist_ok=True)

    def call(name: str, *words: object) -> Done:
        typed = [f"experiments.{name}", *map(str, words)]
        with process_state(work), captured_output() as output:
            status = status_of(typed)
        return Done(typed, status, *output)

    return call


@pytest.fixture
def start(tmp_path: Path) -> Run:
    """Runs ``python -m experiments.<name>`` as ``run``, in its own process and session.

    Its output goes to files, since a leftover process would keep a pipe open and block the test.
    """
    (work := tmp_path / "work").mkdir(exist_ok=True)

    def call(name: str, *words: object) -> Done:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            done = subprocess.run(
                [sys.executable, "-m", f"experiments.{name}", *map(str, words)],
                cwd=work,
                check=False,
                stdout=out,
                stderr=err,
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
            for file in (out, err):
                file.seek(0)
            return Done(done.args, done.returncode, out.read(), err.read())

    return call


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives planners of ``experiments.plan`` simulator calls instead of seconds, so results do not depend on load."""
    from experiments.common import report
    from experiments.plan import planning

    made = report.make
    monkeypatch.setattr(report, "make", lambda name, **more: made(name, **{**more, "seconds": None, "calls": 300}))
    monkeypatch.setattr(planning, "within", lambda seconds: nullcontext())


def status_of(typed: list[str]) -> int:
    """Runs a module as ``python -m`` does, and returns its exit status."""
    sys.argv[:] = ["-m", *typed[1:]]
    try:
        run_module(typed[0], run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


@contextmanager
def captured_output() -> Iterator[list[str]]:
    """Collects stdout and stderr of this process and its children: two texts, complete at the end."""
    output: list[str] = []
    streams = (sys.stdout, sys.stderr)
    copies = (os.dup(1), os.dup(2))
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        for number, file, stream in zip((1, 2), (out, err), streams, strict=True):
            stream.flush()
            os.dup2(file.fileno(), number)
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
        try:
            yield output
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            sys.stdout, sys.stderr = streams
            for number, copy in zip((1, 2), copies, strict=True):
                os.dup2(copy, number)
                os.close(copy)
            for file in (out, err):
                file.seek(0)
                output.append(file.read().decode())


@contextmanager
def process_state(folder: Path) -> Iterator[None]:
    """Works in a folder with the state of a new process; restores everything afterwards."""
    from hydra.core.global_hydra import GlobalHydra  # optional dependency
    from hydra.core.hydra_config import HydraConfig

    from experiments.common.errors import flush_stdout

    environment = dict(os.environ)
    argv = sys.argv[:]
    path = sys.path[:]
    modules = {*sys.modules}
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)
    handlers = [signal.getsignal(number) for number in numbers]
    before = Path.cwd()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    threads = torch.get_num_threads()
    os.environ.update(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1")
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    GlobalHydra.instance().clear()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* found in sys.modules")  # left by another test
            yield
    finally:
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None
        atexit.unregister(flush_stdout)
        for number, handler in zip(numbers, handlers, strict=True):
            signal.signal(number, handler)
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])
        torch.set_num_threads(threads)
        os.chdir(before)
        sys.argv[:] = argv
        sys.path[:] = path
        os.environ.clear()
        os.environ.update(environment)
        for name in {*sys.modules} - modules:  # imported from the folder; other tests have modules of the same name
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder.parent)):
                del sys.modules[name]
