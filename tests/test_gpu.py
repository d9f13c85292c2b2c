"""Tests that GPU tests can be collected on a machine with little more than PyTorch, CuPy and Numba."""

import os
import subprocess
import sys
from pathlib import Path

from tests.gpu import ROOT, files

MISSING = """accelerate gymnasium highspy hydra hypothesis lightning lxml matplotlib mlflow networkx omegaconf
pandas ray rich sb3_contrib simpy sklearn stable_baselines3 tensorboard torch_geometric transformers""".split()


def test_one_command_has_them_all_on_a_bare_machine(tmp_path: Path) -> None:
    for name in MISSING:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError('no {name} here', name={name!r})\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "--collect-only", "-p", "no:cacheprovider", *files()],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(files()) >= 13 and all(f"{file}::" in done.stdout for file in files())
