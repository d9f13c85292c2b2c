"""Tests that imports point one way: simulator <- envs <- agents <- experiments, simulator <- executor <- experiments.

``executor/fit`` and ``envs/edit/starts`` import planners inside functions. Subpackages of a package are ordered, too:
each uses only the ones before it.
"""

import ast
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
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
ABOVE = {
    "executor/fit.py": {"agents"},
    "envs/edit/starts.py": {"agents"},
}  # further imports that these files may have inside functions
# Subpackages in order; "" is the top level without __init__.py, which re-exports all of them.
ROOMS = {
    "simulator": ["", "compiled", "moves", "pool"],
    "agents": ["floor", "", "heuristics", "search", "learned"],
    "executor": ["memory", "capture", "training", "replay", "", "compiled", "integrations"],
    # The top level and a subpackage's __main__ have commands, which use all subpackages.
    "experiments": [
        "workloads",
        "common",
        "plotting",
        "plan",
        "measure",
        "examples",
        "figures",
        "validate_gpu",
        "measured",
        "benchmark",
    ],
}


FILES = {package: sorted((ROOT / package).rglob("*.py")) for package in MAY_IMPORT}
EVERY = [file for files in FILES.values() for file in files]


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(), str(file))


def modules(file: Path, top: bool = False) -> list[str]:
    """Returns the full names that a file may import; ``top``: without those inside functions."""
    names = []
    for node in tree(file).body if top else ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def imported(file: Path, top: bool = False) -> set[str]:
    """Returns the packages of ``modules``."""
    return {name.partition(".")[0] for name in modules(file, top)}


def room_of(parts: Sequence[str], rooms: Sequence[str]) -> str:
    """Returns the subpackage of a module, given by the names after its package's."""
    return parts[0] if parts and parts[0] in rooms else ""


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package: str) -> None:
    for file in FILES[package]:
        above = ABOVE.get(file.relative_to(ROOT).as_posix(), set())
        may = {package} | MAY_IMPORT[package] | above
        assert not imported(file) & MAY_IMPORT.keys() - may, file
        assert above <= imported(file) - imported(file, top=True), file


@pytest.mark.nightly
def test_a_machine_that_trains_may_lack_most_libraries() -> None:
    """Executor, planners and validation work without trainers' libraries; capturing alone imports no planner."""
    code = """if True:
        import sys
        for name in ("hydra", "omegaconf", "gymnasium", "stable_baselines3", "sklearn", "torch_geometric", "highspy",
                     "transformers", "accelerate", "lightning"):
            sys.modules[name] = None
        import executor.integrations, executor
        assert "agents" not in sys.modules
        import agents, experiments.validate_gpu.__main__ as command, experiments.validate_gpu.probe
        for name in ("lp_round", *command.Settings().planners):
            agents.make(name)
    """
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_only_the_benchmark_imports_the_reference_rules() -> None:
    """Only the simulator and its benchmark import the reference implementation of the rules."""
    files = {f for f in EVERY for name in modules(f) if name.startswith("simulator.rules")} - {*FILES["simulator"]}
    assert {file.parent.name for file in files} == {"speed"}


def test_the_checker_shares_no_code_with_what_it_checks() -> None:
    others = {"packing.py", "walk.py", "enumeration.py"}  # of packings, walks and plans
    files = [file for file in (ROOT / "tests" / "oracle").glob("*.py") if file.name not in others]
    names = {name.split(".")[1] for file in files for name in modules(file) if name.startswith("simulator.")}
    assert names == {"machine", "plan", "program", "timeline"}


@pytest.mark.parametrize("package", ROOMS)
def test_folders_import_only_earlier_folders(package: str) -> None:
    rooms = ROOMS[package]
    folders = {p.name for p in (ROOT / package).iterdir() if p.is_dir() and (p / "__init__.py").exists()}
    assert folders == set(rooms) - {""}
    wrong = []
    for file in FILES[package]:
        parts = file.relative_to(ROOT / package).with_suffix("").parts
        command = parts[-1] == "__main__"
        if parts == ("__init__",) or command or (room := room_of(parts, rooms)) not in rooms:
            continue
        for name in modules(file):
            top, *rest = name.split(".")
            if top == package and (other := room_of(rest, rooms)) in rooms and rooms.index(other) > rooms.index(room):
                wrong.append(f"{file.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_libraries_are_imported_only_where_they_are_needed() -> None:
    needs = set().union(*map(imported, FILES["simulator"])) - sys.stdlib_module_names
    assert needs == {"numpy", "numba", "yaml", "simulator"}
    assert len([file for file in EVERY if "cupy" in imported(file)]) <= 1
    trainers = {f.parent.name for f in EVERY if imported(f, top=True) & {"transformers", "accelerate", "lightning"}}
    assert trainers == {"integrations", "examples"}


UNPICKLER = ROOT / "simulator" / "pool" / "files.py"  # PyTorch writes its allocator's snapshots as pickles


def test_nothing_is_unpickled() -> None:
    """Files are JSON, or loaded by torch.load(weights_only=True); one file reads pickles without resolving names."""
    wrong = []
    for file in EVERY:
        if file != UNPICKLER:
            serializers = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
            wrong += [f"{file.relative_to(ROOT)} imports {name}" for name in serializers & imported(file)]
        for node in ast.walk(tree(file)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            called = ast.unparse(node.func)
            safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
            if called.startswith(("pickle.", "dill.", "joblib.")) or (called == "torch.load" and not safe):
                wrong.append(f"{file.relative_to(ROOT)}:{node.lineno} calls {called}")
    assert not wrong
