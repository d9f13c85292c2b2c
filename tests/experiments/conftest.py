"""A small program for the entry points, and a way to run them as a user does."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from simulator import Kernel, Program, Tensor

ROOT = Path(__file__).resolve().parents[2]
MB = 2**20

Run = Callable[..., subprocess.CompletedProcess[str]]


def figure_settings(name: str, quick: bool = False, **more: Any) -> Any:
    """The settings of a figure's YAML, some of them changed."""
    from omegaconf import OmegaConf

    config = OmegaConf.to_container(OmegaConf.load(ROOT / "configs" / "figure" / f"{name}.yaml"))
    assert isinstance(config, dict)
    fewer = config.pop("quick")
    return OmegaConf.create({**config, **(fewer if quick else {}), **more})


def chain(layers: int = 6, nbytes: int = 32 * MB) -> Program:
    """A chain of layers, forward and backward: activations wait for the way back, as in training."""
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


@pytest.fixture(scope="session")
def forks() -> Iterator[subprocess.Popen[str]]:
    """The process of forked.py."""
    with subprocess.Popen(
        [sys.executable, Path(__file__).with_name("forked.py")], cwd=ROOT, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        yield process
        process.terminate()


@pytest.fixture
def run(forks: subprocess.Popen[str], tmp_path: Path) -> Run:
    """Runs ``python -m experiments.<name>`` in an empty directory, the checkout not installed: in a fork of a process
    that has imported what commands import, with one seed of Python's hashes for all."""
    (work := tmp_path / "work").mkdir(exist_ok=True)

    def call(name: str, *words: object, package: str = "experiments.") -> subprocess.CompletedProcess[str]:
        assert forks.stdin is not None and forks.stdout is not None
        typed = [package + name, *map(str, words)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        with tempfile.TemporaryDirectory() as output:
            forks.stdin.write(json.dumps([typed, str(work), environment, output]) + "\n")
            forks.stdin.flush()
            if not select.select([forks.stdout], [], [], 300)[0]:
                os.killpg(forks.pid, signal.SIGKILL)
            said = [(Path(output) / name).read_text() for name in ("stdout", "stderr")]
            status = forks.stdout.readline()
        assert status, f"{typed}: not done in time: {said}"
        return subprocess.CompletedProcess(typed, int(status), *said)

    return call
