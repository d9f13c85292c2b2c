"""Tests that a cold cache is announced in one line, and that ``python -m envs`` fills it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from envs import compilation
from tests.test_imports import ROOT

MAKE = "import gymnasium, envs; envs.{}(limit=0.6).reset(seed=0); envs.{}(limit=0.7).reset(seed=0)"


class Entry:
    """Stands for a compiled function whose cache has, or lacks, its code."""

    def __init__(self, stored: bool):
        self.signatures: list[object] = []
        self._cache = self._cache_file = self
        self._load_index = lambda: {"signature": "file"} if stored else {}


@pytest.mark.parametrize("kind", compilation.ENTRIES)
def test_only_a_cold_cache_is_announced(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    announce = compilation.announce.__wrapped__
    for stored in (True, False):
        monkeypatch.setitem(compilation.ENTRIES, kind, (Entry(True), Entry(stored)))
        announce(kind)
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == (not stored) and all(f"compiling {kind}, once" in line for line in lines)


@pytest.mark.nightly
def test_the_command_fills_the_cache_and_the_first_reset_announces(tmp_path: Path) -> None:
    paths = {"NUMBA_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    environment = {**os.environ, **paths, "PYTHONPATH": str(ROOT)}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *arguments]
        return subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)

    cold = run("-c", MAKE.format("MemoryEnv", "MemoryEnv"))
    assert cold.stderr == "compiling GpuMemory, once, for up to a minute (ahead: python -m envs)\n"
    first = run("-m", "envs")
    assert first.stdout.startswith("GpuMemory: already compiled\nGpuMemoryEdit: compiled in ")
    assert first.stderr.startswith("compiling GpuMemoryEdit") and len(first.stderr.splitlines()) == 1
    assert run("-m", "envs").stdout == "GpuMemory: already compiled\nGpuMemoryEdit: already compiled\n"
    assert run("-c", MAKE.format("MemoryEnv", "MemoryEditEnv")).stderr == ""
