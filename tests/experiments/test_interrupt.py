"""Ctrl-C in a terminal: one sentence, status 130, and what was promised to go on goes on. Progress is for terminals."""

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

import pytest

from tests.experiments.conftest import ROOT, Run

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # of a terminal


Press = Callable[..., tuple[int, str, str]]


@pytest.fixture
def interrupted(tmp_path: Path) -> Press:
    """Runs a command in a process of its own, in an empty directory and a pseudo-terminal, and presses Ctrl-C there as
    soon as ``until``, given all that was shown.

    Returns:
        The status, all that was on the screen, and the last line of it.
    """
    (work := tmp_path / "work").mkdir(exist_ok=True)

    def press(until: Callable[[str], bool], *words: object) -> tuple[int, str, str]:
        ours, theirs = pty.openpty()
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "150"}
        shown, pressed = b"", False
        with subprocess.Popen(
            [sys.executable, "-m", *map(str, words)], cwd=work, env=environment, stdin=theirs, stdout=theirs,
            stderr=theirs, start_new_session=True,
        ) as process:  # fmt: skip
            os.close(theirs)
            with suppress(OSError):  # at its end
                while more := os.read(ours, 65536):
                    shown += more
                    if not pressed and until(CODES.sub("", shown.decode(errors="replace"))):
                        os.killpg(process.pid, signal.SIGINT)
                        pressed = True
        os.close(ours)
        screen = CODES.sub("", shown.decode())
        assert pressed, screen
        last = screen.replace("\r", "\n").strip().splitlines()[-1].removeprefix("^C")
        return process.returncode, screen, last

    return press


@pytest.mark.nightly
def test_training_goes_on(run: Run, interrupted: Press, program_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = (f"program={program_file}", "limit=0.5", "planners=[]", "agent=dqn_paper", "agent.mode=swap")
    begun = re.compile(r"training, best .* left")
    status, screen, last = interrupted(
        lambda screen: bool(begun.search(screen)), "experiments", "train", *words, f"out={out}", "agent.episodes=120"
    )
    assert status == 130 and last == f"interrupted; resume={out} continues this run", screen
    assert "Traceback" not in screen
    done = run("train_dqn", *words, f"resume={out}", "agent.episodes=120")
    assert done.returncode == 0 and done.stderr == "", done.stderr  # quiet where there is no terminal
    assert json.loads((out / "summary.json").read_text())["episodes"] >= 120


@pytest.mark.nightly
def test_a_figure_goes_on(run: Run, interrupted: Press, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("figure=smartpool_table1", "figure.networks=[vgg11,vgg13,vgg16]", f"out={out}", "jobs=1")
    rows = out / "smartpool_table1.jsonl"
    begun = re.compile(r"smartpool_table1 .*1/3 .* left")
    status, screen, last = interrupted(lambda screen: bool(begun.search(screen)), "experiments", "reproduce", *words)
    assert status == 130 and last == "interrupted; the same command goes on from what is done", screen
    assert "Traceback" not in screen
    kept = len(re.findall(r'"code"', rows.read_text()))
    assert 0 < kept < 3 and not (out / "smartpool_table1.json").exists()
    done = run("reproduce", *words)
    assert done.returncode == 0 and done.stderr == ""  # quiet where there is no terminal
    assert len(json.loads((out / "smartpool_table1.json").read_text())["rows"]) == 3 and not rows.exists()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (("plan", "workload=mlp", "machine=h100", "memory=0.7", "largest=false"), r"search.*left 0:\d\d:\d\d"),
        (("benchmark", "suite=speed", "speed.workloads=[vgg16,mlp]", "speed.calls=10", "speed.home.particles=2",
          "speed.home.iterations=2"), r"simulating mlp.* [1-9]\d?/100 .*left"),
        (("evaluate", "workload=mlp", "limits=[0.5]", "planners=[annealing]", "seconds=600", "jobs=2"), None),
    ],
)  # fmt: skip
def test_the_time_that_is_left_is_shown(
    words: tuple[str, ...], shown: str | None, interrupted: Press, tmp_path: Path
) -> None:
    """And what does not go on leaves nothing, in worker processes, too."""
    runs = tmp_path / "work" / "runs"
    status, screen, last = interrupted(
        lambda screen: bool(re.search(shown, screen) if shown else [*runs.glob("evaluate-*")]),
        f"experiments.{words[0]}", *words[1:],
    )  # fmt: skip
    assert status == 130 and last == "interrupted" and "Traceback" not in screen, screen
    assert not any(runs.glob("*"))


def test_rows_go_where_they_are_sent(tmp_path: Path) -> None:
    """A bar on the terminal does not take what is printed for a file."""
    script = "from experiments.common import report\nfor i in report.tracked(range(2), 'counting'): print('row', i)\n"
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, stdout=subprocess.PIPE,
                          stderr=theirs, text=True, check=True)  # fmt: skip
    shown = os.read(ours, 65536).decode()
    os.close(ours)
    os.close(theirs)
    assert done.stdout == "row 0\nrow 1\n" and "counting" in shown and "row" not in shown


SLOW = """
print("importing", flush=True)
try:
    time.sleep(600)
except BaseException:  # as libraries do around what is optional
    print("went on", flush=True)
"""


@pytest.mark.parametrize("words", [("-m", "experiments.plan", "workload=mlp"), ("-m", "experiments", "plan")])
def test_before_a_command_has_begun(tmp_path: Path, words: tuple[str, ...]) -> None:
    """While it imports what it needs."""
    (tmp_path / "hydra.py").write_text(SLOW)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    with subprocess.Popen(
        [sys.executable, *words], env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("", "interrupted\n") and process.returncode == 130


def test_outside_of_imports_it_is_an_exception(tmp_path: Path) -> None:
    """What is no command of ours, but lies beside them; a library that is imported leaves Ctrl-C alone."""
    code = """if True:
        import os, signal, sys
        sys.argv[0] = NAME
        import experiments
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            print("caught", signal.getsignal(signal.SIGINT) is signal.default_int_handler)
            experiments.begun()
            print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    """
    for name, untouched in (("-m", "False"), ("mine.py", "True")):
        done = subprocess.run(
            [sys.executable, "-c", code.replace("NAME", repr(name))], cwd=ROOT, capture_output=True, text=True,
            timeout=60, check=True,
        )  # fmt: skip
        assert done.stdout == f"caught {untouched}\nTrue\n"
