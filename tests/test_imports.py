"""Imports point one way: simulator <- envs <- agents <- experiments, and simulator <- executor <- experiments."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {
    "simulator": set(),
    "envs": {"simulator"},
    "agents": {"simulator", "envs"},
    "executor": {"simulator"},
    "experiments": {"simulator", "envs", "agents", "executor"},
}


def imported(file: Path) -> Iterator[str]:
    """Top-level names of every import statement of a file, those inside functions too."""
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            yield str(node.module).split(".")[0]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in imported(file)
        if name in MAY_IMPORT and name != package and name not in MAY_IMPORT[package]
    ]
    assert not wrong


def test_the_simulator_needs_numpy_numba_and_yaml_only() -> None:
    known = {"numpy", "numba", "yaml", "simulator"}
    others = {n for f in (ROOT / "simulator").rglob("*.py") for n in imported(f)} - known - sys.stdlib_module_names
    assert not others


def test_cupy_is_imported_in_at_most_one_file() -> None:
    files = [f for package in MAY_IMPORT for f in (ROOT / package).rglob("*.py") if "cupy" in set(imported(f))]
    assert len(files) <= 1, files


def test_nothing_is_unpickled() -> None:
    """Files are JSON, or torch.load(weights_only=True)."""
    wrong = []
    for file in (f for package in MAY_IMPORT for f in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
            if called.startswith(("pickle.", "dill.", "joblib.")) or (called == "torch.load" and not safe):
                wrong.append(f"{file.relative_to(ROOT)}:{node.lineno} calls {called}")
    assert not wrong
