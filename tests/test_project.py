"""Tests that workflows and hooks run only what the Makefile has, on the versions that pyproject.toml supports."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import is_in_part

ROOT = Path(__file__).resolve().parent.parent
GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE))
VARIABLES = set(re.findall(r"\$\(([A-Z_]+)\)", MAKEFILE))

# The keys of GitHub's workflow syntax that ours use.
KEYS = {
    "workflow": {"name", "on", "permissions", "concurrency", "jobs"},
    "job": {"if", "runs-on", "timeout-minutes", "strategy", "env", "steps"},
    "step": {"uses", "with", "run"},
}
EVENTS = {"push", "pull_request", "schedule", "workflow_dispatch"}


def load(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text())
    found["on"] = found.pop(True, None) or found.get("on")  # YAML 1.1 reads `on` as true
    return found


def matrix(job: dict[str, Any]) -> list[dict[str, str]]:
    return job.get("strategy", {}).get("matrix", {}).get("include", [])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_calls_targets_of_the_makefile(path: Path) -> None:
    workflow = load(path)
    assert workflow.keys() <= KEYS["workflow"] and workflow["on"].keys() <= EVENTS
    assert workflow["permissions"] == {"contents": "read"}
    for name, job in workflow["jobs"].items():
        assert job.keys() <= KEYS["job"] and re.fullmatch(r"[a-z]+", name), name
        assert job["timeout-minutes"] <= (180 if path.stem == "nightly" else 40)
        for step in job["steps"]:
            assert step.keys() <= KEYS["step"] and ("run" in step) != ("uses" in step), step
            if "uses" in step:
                assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"]), step
                continue
            program, target, *words = step["run"].replace("${{ ", "${{").replace(" }}", "}}").split()
            assert program == "make" and target in TARGETS, step
            assert {word.partition("=")[0] for word in words} <= VARIABLES, step
        used = set(re.findall(r"\$\{\{ matrix\.(\w+) \}\}", path.read_text()))
        for row in matrix(job):
            assert row.keys() == used


def test_the_tests_run_on_every_supported_version() -> None:
    """Each Python of the classifiers with the newest PyTorch, and the oldest PyTorch once."""
    pythons = {name.rsplit(" ")[-1] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)}
    (torch,) = (name for name in PROJECT["dependencies"] if name.startswith("torch>"))
    oldest, above = re.fullmatch(r"torch>=2\.(\d+),<2\.(\d+)", torch).groups()
    rows = matrix(load(GITHUB / "workflows" / "ci.yml")["jobs"]["test"])
    newest = f"2.{int(above) - 1}"
    assert {row["python"] for row in rows if row["torch"] == newest} == pythons
    assert f"2.{oldest}" in {row["torch"] for row in rows}


def test_issue_forms_have_what_github_requires() -> None:
    for path in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text())
        if path.stem == "config":
            assert form.keys() == {"blank_issues_enabled"}
            continue
        assert {"name", "description", "body"} <= form.keys()
        identifiers = [entry["id"] for entry in form["body"]]
        assert len(set(identifiers)) == len(identifiers)
        assert all(entry["attributes"]["label"] for entry in form["body"])


def test_hooks_call_the_environments_tools() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    lint = MAKEFILE.partition("\nlint:")[2].partition("\n\n")[0]
    for hook in repository["hooks"]:
        folder, _, words = hook["entry"].rpartition("/")
        assert folder == ".venv/bin" and f"$(BIN)/{words.split()[0]}" in lint


def test_packages_say_that_they_are_typed() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    packages = [name for name in build["packages"] if name != "configs"]
    assert len(packages) == 5 and all((ROOT / name / "py.typed").exists() for name in packages)


def test_a_test_is_in_one_part_of_the_nightly_tier() -> None:
    names = [f"tests/test_{i}.py::test" for i in range(100)]
    parts = [[name for name in names if is_in_part(name, f"{k}/3")] for k in (1, 2, 3)]
    assert all(parts) and sorted(name for part in parts for name in part) == sorted(names)
