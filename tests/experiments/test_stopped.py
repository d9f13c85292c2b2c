"""SIGTERM, as schedulers send it; two runs in one directory."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from experiments.common.report import LOCK
from tests.experiments.conftest import ROOT, Run


def test_a_terminated_training_says_how_it_goes_on(program_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = (f"program={program_file}", "limit=0.5", "planners=[]", "agent.mode=swap")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "experiments.train_dqn", *words, f"out={out}", "agent.episodes=99999"]
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        while not (out / "tb").exists() and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=240)
    assert process.returncode == 143 and said == f"terminated; resume={out} continues this run\n", said
    assert (out / "checkpoint.pt").exists() and not (out / LOCK).exists()


def test_a_directory_is_one_runs_at_a_time(run: Run, program_file: Path, tmp_path: Path) -> None:
    (out := tmp_path / "out").mkdir()
    words = ("evaluate", f"program={program_file}", "limits=[0.95]", "planners=[none]", f"out={out}")
    with (out / LOCK).open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        done = run(*words)
        assert done.returncode == 2 and "another run is at work in" in done.stderr
        assert [path.name for path in out.iterdir()] == [LOCK]
    assert run(*words).returncode == 0 and not (out / LOCK).exists()  # whoever had it has died
