"""Tests Ctrl-C and SIGTERM (one sentence, the right status, resumption), and two runs in one directory."""

import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from select import select
from typing import Any

import pytest

from experiments import train_dqn
from experiments.common.lock import LOCK
from experiments.train_dqn import SETTINGS
from tests.experiments.conftest import ROOT, Run, refused

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # on a terminal
TRAINING = ("limit=0.5", "planners=[]", "agent.mode=swap")
SLOW = """
import time
print("importing", flush=True)
try:
    time.sleep(600)
except BaseException:  # as libraries do around what is optional
    print("went on", flush=True)
"""

Press = Callable[..., tuple[int, str, str]]


@pytest.fixture
def interrupted(tmp_path: Path) -> Press:
    """Runs a command in its own process, an empty directory and a pseudo-terminal, and presses Ctrl-C.

    Ctrl-C is pressed once ``until``, given the output so far, is true.

    Returns:
        The status, all output, and its last line.
    """
    (work := tmp_path / "work").mkdir(exist_ok=True)

    def press(until: Callable[[str], bool], *words: object) -> tuple[int, str, str]:
        ours, theirs = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "150"}
        shown = b""
        pressed = False
        with subprocess.Popen(
            [sys.executable, "-m", *map(str, words)],
            cwd=work,
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        ) as process:
            os.close(theirs)
            with suppress(OSError):  # ends if no leftover process keeps the terminal
                while process.poll() is None or select([ours], [], [], 0)[0]:
                    if select([ours], [], [], 0.1)[0]:
                        shown += os.read(ours, 65536)
                    if not pressed and until(CODES.sub("", shown.decode(errors="replace"))):
                        os.killpg(process.pid, signal.SIGINT)
                        pressed = True
        os.close(ours)
        screen = CODES.sub("", shown.decode())
        assert pressed and "Traceback" not in screen, screen
        return process.returncode, screen, screen.replace("\r", "\n").strip().splitlines()[-1]

    return press


@pytest.mark.parametrize(
    ("agent", "length", "count"),
    [
        ("dqn_paper", "episodes", 8),
        pytest.param("dqn", "iterations", 4, marks=pytest.mark.nightly),
    ],
)
def test_a_terminated_training_resumes(
    agent: str, length: str, count: int, run: Run, program_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    told = train_dqn.Watch.__call__

    def terminate(watch: train_dqn.Watch, episode: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        told(watch, episode)

    machine = ("machine=h100", "machine.host_bytes=8589934592")
    chosen = (f"agent={agent}", f"agent.{length}={count}")
    with monkeypatch.context() as patch:
        patch.setattr(train_dqn.Watch, "__call__", terminate)
        done = run("train_dqn", f"program={program_file}", *TRAINING, *machine, *chosen, f"out={out}")
    assert (done.returncode, done.stderr) == (143, f"terminated; resume={out} continues this run\n")
    assert (out / "checkpoint.pt").exists() and not (out / LOCK).exists()
    # The directory alone determines the settings; typed arguments override them.
    refused(run("train_dqn", f"resume={out}", "seed=1"), "seed")
    done = run("train_dqn", f"resume={out}").ok()
    summary = json.loads((out / "summary.json").read_text())
    assert summary["episodes"] >= count and not (out / SETTINGS).exists()
    config = summary["config"]
    assert (config["limit"], config["planners"], config["agent"]["mode"]) == (0.5, [], "swap")
    assert config["machine"]["name"] == "h100" and config["machine"]["host_bytes"] == 2**33
    # A finished run is extended in a new directory, with more episodes or iterations.
    done = run("train_dqn", f"resume={out}", f"agent.{length}={count + 6}", f"out={tmp_path / 'more'}").ok()
    more = json.loads((tmp_path / "more" / "summary.json").read_text())
    assert (
        more["episodes"] >= count + 6
        and more["config"]["limit"] == 0.5
        and more["config"]["machine"] == config["machine"]
    )


@pytest.mark.nightly
def test_an_interrupted_figure_resumes(run: Run, interrupted: Press, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("figure=smartpool_table1", "figure.networks=[vgg11,vgg13,vgg16]", f"out={out}", "jobs=1")
    rows = out / "smartpool_table1.jsonl"
    begun = re.compile(r"smartpool_table1 .*1/3 .* left")
    status, screen, last = interrupted(lambda screen: bool(begun.search(screen)), "experiments", "reproduce", *words)
    assert status == 130 and last == "interrupted; run the same command to continue", screen
    kept = len(re.findall(r'"code"', rows.read_text()))
    assert 0 < kept < 3 and not (out / "smartpool_table1.json").exists()
    done = run("reproduce", *words).ok()
    assert done.stderr == ""
    assert len(json.loads((out / "smartpool_table1.json").read_text())["rows"]) == 3 and not rows.exists()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("plan", "workload=resnet50", "machine=h100", "memory=3GiB"), r"capturing"),
        (("plan", "workload=mlp", "machine=h100", "memory=0.7", "largest=false"), r"search.*left 0:\d\d:\d\d"),
        (
            (
                "benchmark",
                "suite=speed",
                "speed.workloads=[vgg16,mlp]",
                "speed.calls=10",
                "speed.home.particles=2",
                "speed.home.iterations=2",
            ),
            r"simulating mlp.* [1-9]\d?/100 .*left",
        ),
        (("evaluate", "workload=mlp", "limits=[0.5]", "planners=[annealing]", "seconds=600", "jobs=2"), None),
    ],
)
def test_commands_that_do_not_resume_leave_nothing(
    words: tuple[str, ...], shown: str | None, interrupted: Press, tmp_path: Path
) -> None:
    """The same holds in worker processes; the command shows its remaining time."""
    runs = tmp_path / "work" / "runs"
    status, screen, last = interrupted(
        lambda screen: bool(re.search(shown, screen) if shown else [*runs.glob("evaluate-*")]),
        f"experiments.{words[0]}",
        *words[1:],
    )
    assert status == 130 and last == "interrupted", screen
    assert not any(runs.glob("*"))


@pytest.mark.parametrize("words", [("experiments.plan", "workload=mlp"), ("experiments", "plan")])
def test_before_a_command_has_begun(tmp_path: Path, words: tuple[str, ...]) -> None:
    """Interrupts a command during its imports."""
    (tmp_path / "hydra.py").write_text(SLOW)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    with subprocess.Popen(
        [sys.executable, "-m", *words],
        env=environment,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "interrupted\n") and process.returncode == 130


def test_imports_do_not_change_ctrl_c() -> None:
    code = """if True:
        import os, signal, sys
        sys.argv[0] = "mine.py"
        import experiments
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            print("caught", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "caught True\n"


@pytest.mark.parametrize(
    "words",
    [
        ("evaluate", "program={program}", "limits=[0.95]", "planners=[none]"),
        ("pretrain",),
        ("validate_gpu", "backend=host"),
    ],
)
def test_a_run_directory_is_exclusive(words: tuple[str, ...], run: Run, program_file: Path, tmp_path: Path) -> None:
    (out := tmp_path / "out").mkdir()
    typed = [word.format(program=program_file) for word in (*words, f"out={out}")]
    with (out / LOCK).open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        refused(run(*typed), "out", str(out))
    if words[0] == "evaluate":
        assert [path.name for path in out.iterdir()] == [LOCK]
        assert run(*typed).returncode == 0 and not (out / LOCK).exists()  # the lock's owner has died
