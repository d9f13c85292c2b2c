"""Tests tasks on workers: one result per task with every launcher, even if a worker is killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from omegaconf import OmegaConf

from experiments.common import cli, workers
from simulator.compiled.engine import cores

if TYPE_CHECKING:  # workers import this module, without PyTorch
    from tests.experiments.conftest import Run

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of workers
    return tmp_path


def square(x: int) -> tuple[int, str, int, int]:
    """Prints in several ways, also from a subprocess; one task raises an error."""
    print(f"printed {x}")
    sys.stderr.write(f"warned {x}\n")
    os.write(1, f"written {x}\n".encode())
    subprocess.run(["echo", f"echoed {x}"], check=True)
    if x == 2:
        raise cli.UsageError("two is refused")
    return x * x, os.getcwd(), os.getpid(), cores()


@pytest.mark.parametrize(
    "launcher", [pytest.param(name, marks=[pytest.mark.nightly] * (name != "processes")) for name in workers.LAUNCHERS]
)
def test_every_task_has_one_result(launcher: str, elsewhere: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found = list(workers.results(launcher, 2, square, [(x,) for x in range(5)]))
    assert sorted(i for i, _ in found) == [0, 1, 2, 3, 4]
    results = dict(found)
    error = results.pop(2)
    assert isinstance(error, cli.UsageError) and str(error) == "two is refused"
    assert "in square" in "".join(error.__notes__)  # traceback of the worker
    for i, (value, folder, process, alone) in results.items():
        assert value == i * i and folder == str(elsewhere) and process != os.getpid() and alone == 1
    if launcher == "ray":  # output of tasks is forwarded
        out, err = capfd.readouterr()
        assert sorted(err.splitlines()) == [f"warned {x}" for x in range(5)]
        lines = out.splitlines()
        assert len(lines) == 15
        for i in range(0, 15, 3):  # lines of a task stay together
            assert len({line[-1] for line in lines[i : i + 3]}) == 1
            assert {line[:-2] for line in lines[i : i + 3]} == {"printed", "written", "echoed"}


def hold(x: int, folder: str) -> int:
    """Records its start; the first call waits until it is killed."""
    place = Path(folder)
    (place / f"begun-{x}-{os.getpid()}").touch()
    try:
        (place / "first").mkdir()
    except FileExistsError:
        return x
    (place / "victim").write_text(str(os.getpid()))
    time.sleep(600)
    return -1


@pytest.mark.nightly
def test_tasks_of_a_lost_node_are_repeated(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a local Ray cluster: a head without tasks, and two nodes with one core each."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = {made.add_node(num_cpus=1) for _ in range(2)}
        monkeypatch.setenv("RAY_ADDRESS", made.address)
        found = []
        for i, result in workers.results("ray", 2, hold, [(x, str(elsewhere)) for x in range(6)]):
            found.append((i, result))
            if len(found) == 3:  # while running
                victim = (elsewhere / "victim").read_text()
                parent = int(subprocess.check_output(["ps", "-o", "ppid=", "-p", victim]))
                (its,) = (node for node in nodes if node.all_processes["raylet"][0].process.pid == parent)
                made.remove_node(its, allow_graceful=False)
    finally:
        made.shutdown()
    assert sorted(found) == [(x, x) for x in range(6)]
    assert len(list(elsewhere.glob("begun-*"))) == 7


def test_a_pool_that_fails_ends_its_processes_at_once() -> None:
    with pytest.raises(ZeroDivisionError), workers.Pool(2) as pool:
        long = pool.submit(time.sleep, 600)
        pool.submit(int).result()
        raise ZeroDivisionError
    assert isinstance(long.exception(), BrokenProcessPool)


def test_a_missing_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.launcher(OmegaConf.create({"launcher": "ray", "jobs": None})) == ("ray", None)
    monkeypatch.setattr(workers, "find_spec", lambda name: None)
    with pytest.raises(cli.UsageError, match="launcher: ray"):
        cli.launcher(OmegaConf.create({"launcher": "ray", "jobs": None}))
    assert cli.launcher(OmegaConf.create({"launcher": "processes", "jobs": 3})) == ("processes", 3)


# ------------------------------------------------------------------------------------------- sweeps


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("launcher", "planner"),
    [
        ("joblib", "lp_round"),
        ("submitit_local", "autoswap_doa"),
        ("ray", "lp_round"),
    ],
)
def test_a_sweep_on_other_launchers(
    launcher: str, planner: str, start: Run, program_file: Path, tmp_path: Path
) -> None:
    """A slow planner runs in a subprocess of each job, so its functions must not belong to __main__."""
    words = (f"program={program_file}", "limits=[0.5],[0.55]", f"planners=[{planner}]", "calls=100", "jobs=2")
    done = start("evaluate", "-m", *words, f"hydra/launcher={launcher}").ok()
    found = [json.loads(file.read_text()) for file in (tmp_path / "work").glob("runs/evaluate-*/summary.json")]
    assert sorted(one["config"]["limits"][0] for one in found) == [0.5, 0.55]
    for one in found:
        assert len(one["results"]) == 1 and one["command"][:4] == ["python", "-m", "experiments.evaluate", "-m"]
    if launcher == "ray":  # same output as without Ray: complete tables, nothing on stderr
        assert done.stderr == ""
        here = start("evaluate", "-m", *words)
        timed = re.compile(r"\d{8}-\d{6}(-\d+)?|[\d.]+ m?s")  # directory names and times
        printed, expected = (
            sorted(timed.sub("", line).split() for line in text.splitlines()) for text in (done.stdout, here.stdout)
        )
        assert printed == expected and len(printed) > 8
