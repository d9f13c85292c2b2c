"""Tests the built wheel in a fresh read-only environment: commands, configs and examples outside the checkout."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from tests.experiments.conftest import ROOT, chain


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """Returns the bin folder of a read-only environment that has the wheel and the packages of this environment."""
    python = [sys.executable, "-m"]
    subprocess.run([*python, "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("headroom-*.whl")
    environment = tmp_path / "venv"
    venv.create(environment, symlinks=True)
    binaries = environment / "bin"
    pip = [*python, "pip", "--python", str(binaries / "python"), "install", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--quiet", str(wheel)], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join([place for place in sys.path if place.endswith("site-packages")]))
    for folder in [path for path in packages.rglob("*") if path.is_dir()]:
        shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        (folder / "__pycache__").touch()  # root ignores modes, but cannot write below a file
        folder.chmod(0o555)
    return binaries


@pytest.mark.nightly
def test_the_wheel_works_where_nothing_of_it_can_be_written(fresh: Path, tmp_path: Path) -> None:
    work = tmp_path / "work"
    home = tmp_path / "home"
    work.mkdir()
    home.mkdir()
    chain().save(work / "chain.json")
    variables = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "NUMBA_CACHE_DIR")}
    environment = {**variables, "HOME": str(home), "XDG_CACHE_HOME": str(home), "OMP_NUM_THREADS": "1"}

    def output(*words: str) -> str:
        done = subprocess.run(
            [str(fresh / words[0]), *words[1:]], cwd=work, env=environment, capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    location = output("python", "-c", "import experiments; print(experiments.__file__)")
    assert location.startswith(str(fresh.parent)) and (Path(location.strip()).parent / "py.typed").exists()
    assert "evaluate" in output("headroom", "--help")
    printed = output(
        "headroom",
        "evaluate",
        "program=chain.json",
        "machine=h100",
        "planners=[autoswap_swdoa]",
        "limits=[0.7]",
        "out=found",
    )
    assert printed.endswith("found\n")
    summary = json.loads((work / "found" / "summary.json").read_text())
    assert summary["command"][2] == "experiments.evaluate" and summary["results"][0]["feasible"]
    assert list(home.rglob("*.nbi"))  # what was compiled
    output("python", "-c", "import gymnasium; gymnasium.make('envs:GpuMemory-v1')")
    (work / "agents").mkdir()
    (work / "agents" / "__init__.py").touch()
    hiding = subprocess.run(
        [str(fresh / "python"), "-c", "import simulator"], cwd=work, env=environment, capture_output=True, text=True
    )
    assert f"{work / 'agents'} hides Headroom's package 'agents'" in hiding.stderr
    shutil.rmtree(work / "agents")
    assert "--steps" in output("python", "-m", "experiments.examples.dqn_single_file", "--help")
    output("python", "-c", "import agents; agents.make('policy_search')")  # with its weights


def test_project_metadata_is_consistent() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "Apache License" in (ROOT / "LICENSE").read_text() and project["license"] == "Apache-2.0"
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["license"] == project["license"] and citation["version"] == project["version"]
    assert len({paper["title"] for paper in citation["references"]}) == 5
    assert all(paper["authors"] and paper["year"] for paper in citation["references"])


def test_the_dev_extra_includes_the_launchers() -> None:
    """Each launcher is tested, so its extra must be installed wherever the tests are."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name in ("joblib", "submitit", "ray"):
        (needed,) = extras[name]
        assert needed in extras["dev"] and metadata.version(needed.partition(">")[0])
