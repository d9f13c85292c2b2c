"""Tests that ``--help`` shows a command's purpose, examples, and every key with default and description."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.__main__ import COMMANDS
from experiments.common import help as helping
from experiments.common.cli import CONFIGS
from experiments.measure.settings import Settings
from tests.experiments.conftest import ROOT, Run

NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
GROUPS = ("agent/dqn", "agent/dqn_paper", "agent/dqn_paper_tuned", "algo/dqn", "algo/maskable_ppo")


@pytest.mark.parametrize("name", [*NAMES, *GROUPS])
def test_every_key_has_a_meaning(name: str) -> None:
    above = ""
    for line in (CONFIGS / f"{name}.yaml").read_text().partition("\nhydra:")[0].splitlines():
        if re.match(r"(  )?\w+:", line) and not line.startswith("defaults:"):
            assert "# " in line or re.match(r" *# ", above), line
        above = line


@pytest.mark.parametrize("name", NAMES)
def test_every_key_is_in_the_help(name: str) -> None:
    text = helping.text(name, "What it does.")
    assert text.startswith("What it does.\n") and "defaults:" not in text and "hydra:" not in text
    for key in helping.names(name):
        assert re.search(rf"\b{key.rpartition('.')[2]}[:=]", text), key
    if name == "train_dqn":
        assert "optimizer: sgd" in helping.text(name, "", ["agent=dqn_paper"])


def test_a_command_prints_its_help(run: Run, tmp_path: Path) -> None:
    done = run("evaluate", "machine=h100", "--help").ok()
    for words in ("python -m experiments.evaluate workload=", "  seed: 0", "machine=h100", "lp_round", "--multirun"):
        assert words in done.stdout
    done = run("validate_gpu", "--help")
    for key in Settings.__dataclass_fields__:
        assert re.search(rf"^  {key}=\S+( …)?\s+\"?\w", done.stdout, re.MULTILINE), key
    assert run("__main__").ok().stdout == run("__main__", "--help").ok().stdout
    done = run("__main__", "--help")
    for name in COMMANDS:
        assert re.search(rf"^{name} +[A-Z].* .* ", done.stdout, re.MULTILINE)
    assert not any((tmp_path / "work").iterdir())


def test_a_reader_may_end_first() -> None:
    """Closes the pipe early, as ``--help | head`` does."""
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run(
        [sys.executable, "-m", "experiments", "--help"],
        cwd=ROOT,
        stdout=theirs,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(theirs)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")
