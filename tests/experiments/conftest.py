"""A small program for the entry points, and a way to run them as a user does."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from simulator import Kernel, Program, Tensor

ROOT = Path(__file__).resolve().parents[2]
MB = 2**20

Run = Callable[..., subprocess.CompletedProcess[str]]


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


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs ``python -m experiments.<name>`` in an empty directory, the checkout not installed."""
    work = tmp_path / "work"
    work.mkdir()

    def call(name: str, *words: object) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, "-m", f"experiments.{name}", *map(str, words)],
            cwd=work, env=environment, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip

    return call
