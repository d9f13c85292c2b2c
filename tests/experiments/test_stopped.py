"""SIGTERM, as schedulers send it; two runs in one directory."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import hydra
import pytest

from experiments.common import cli
from experiments.common.lock import LOCK
from experiments.train_dqn import SETTINGS
from experiments.validate_gpu import __main__ as validate_gpu
from tests.experiments.conftest import ROOT, Run


def test_a_terminated_training_goes_on(run: Run, program_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = (f"program={program_file}", "limit=0.5", "planners=[]", "agent=dqn_paper", "agent.mode=swap",
             "machine=h100", "machine.host_bytes=8589934592")  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "experiments.train_dqn", *words, f"out={out}", "agent.episodes=120"]
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        while not (out / "tb").exists() and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=240)
    assert process.returncode == 143 and said == f"terminated; resume={out} continues this run\n", said
    assert (out / "checkpoint.pt").exists() and not (out / LOCK).exists()
    # The directory alone says the rest of what was asked; what is typed beside it wins.
    done = run("train_dqn", f"resume={out}", "seed=1")
    assert done.returncode == 2 and "of a run with another seed" in done.stderr
    done = run("train_dqn", f"resume={out}")
    assert done.returncode == 0, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["episodes"] >= 120 and not (out / SETTINGS).exists()
    config = summary["config"]
    assert (config["limit"], config["planners"], config["agent"]["mode"]) == (0.5, [], "swap")
    assert config["machine"]["name"] == "h100" and config["machine"]["host_bytes"] == 2**33
    # A run that is done goes on in a new directory, with more episodes.
    done = run("train_dqn", f"resume={out}", "agent.episodes=126", f"out={tmp_path / 'more'}")
    assert done.returncode == 0, done.stderr
    more = json.loads((tmp_path / "more" / "summary.json").read_text())
    assert more["episodes"] >= 126 and more["config"]["limit"] == 0.5 and more["config"]["machine"] == config["machine"]


def test_a_directory_is_one_runs_at_a_time(run: Run, program_file: Path, tmp_path: Path) -> None:
    (out := tmp_path / "out").mkdir()
    words = ("evaluate", f"program={program_file}", "limits=[0.95]", "planners=[none]", f"out={out}")
    with (out / LOCK).open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        done = run(*words)
        assert done.returncode == 2 and "another run is at work in" in done.stderr
        assert [path.name for path in out.iterdir()] == [LOCK]
    assert run(*words).returncode == 0 and not (out / LOCK).exists()  # whoever had it has died


@pytest.mark.parametrize("command", ["pretrain", "validate_gpu"])
def test_so_is_that_of_commands_that_go_on(
    command: str,
    program_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (out := tmp_path / "out").mkdir()
    with (out / LOCK).open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        if command == "validate_gpu":
            assert validate_gpu.main(["backend=host", f"out={out}"]) == 2
            assert "another run is at work in" in capsys.readouterr().err
            return
        with hydra.initialize_config_dir(str(cli.CONFIGS), version_base="1.3"):
            cfg = hydra.compose(command, overrides=[f"out={out}"])
        main = import_module(f"experiments.{command}").main
        task = dict(zip(main.__code__.co_freevars, main.__closure__, strict=True))["task"].cell_contents
        with pytest.raises(cli.UsageError, match="another run is at work in"):
            task(cfg)
