"""Tests that a planner is added by one file: everything else is derived from the facts at its class."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import agents
from experiments import evaluate
from tests.experiments.conftest import ROOT

NEW = """
from agents.planner import MIB, Candidates, PlannerInfo, finish
from simulator.compiled.engine import Engine


class Everything:
    facts = PlannerInfo("everything", "every gap", "a journal of 2031", moves="swap", slow=9)
    name = facts.key

    def __init__(self, min_bytes=MIB, seed=0, mode="swap"):
        self.min_bytes = min_bytes

    def plan(self, program, machine, limit):
        rows = Candidates(program, program.gaps(self.min_bytes)).rows
        return finish(self, program, machine, limit, Engine(program, machine, limit), rows)
"""
ASK = """
import agents, json
from experiments import evaluate
from experiments.common import report
from experiments.plotting import palette
from simulator import Machine
from tests.experiments.conftest import chain

row, _ = report.score("new_heuristics", chain(), Machine.load("h100"), int(0.8 * chain().peak_bytes), 0)
print(json.dumps([list(agents.PLANNERS), agents.options("new_search"), report.planner_names(["all"]),
                  list(evaluate.SLOW), palette.look("new_search"), palette.family("new_search"), row["feasible"]]))
"""


def python(copy: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with the package ``agents`` of ``copy`` and this project's other packages."""
    path = os.pathsep.join([str(copy), str(ROOT)])
    return subprocess.run(
        [sys.executable, *words],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_file_in_a_planner_folder_is_a_planner(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "agents", tmp_path / "agents", ignore=shutil.ignore_patterns("__pycache__"))
    for room in agents.FOLDERS:
        (tmp_path / "agents" / room / "new.py").write_text(NEW.replace('"everything"', f'"new_{room}"'))
    done = python(tmp_path, "-c", ASK)
    assert done.returncode == 0, done.stderr
    planners, options, everyone, slow, look, family, feasible = json.loads(done.stdout)
    new = [f"new_{room}" for room in sorted(agents.FOLDERS)]
    assert planners == [*agents.PLANNERS, *new] and options == ["min_bytes", "seed", "mode"]
    assert everyone == [*agents.untrained(), *new]
    assert slow == [*new, *evaluate.SLOW]
    assert look[0] == "every gap" and look[1].startswith("#") and family == "other" and feasible
    (tmp_path / "agents" / "search" / "new.py").write_text(NEW.replace('"everything"', '"home"'))
    done = python(tmp_path, "-c", "import agents")
    assert done.returncode == 1 and "'home'" in done.stderr  # duplicate key
