"""Tests that imports point one way: simulator <- envs <- agents <- experiments, simulator <- executor <- experiments.

``executor/fit`` and ``envs/edit/starts`` import planners inside functions. Subpackages of a package are ordered, too:
each uses only the ones before it.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAY_IMPORT = {"simulator": set(), "envs": {"simulator"}, "agents": {"simulator", "envs"}, "executor": {"simulator"},
              "experiments": {"simulator", "envs", "agents", "executor"}}  # fmt: skip
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
    "experiments": ["workloads", "common", "plotting", "plan", "validate_gpu", "measured", "examples", "figures",
                    "benchmark"],
}  # fmt: skip


@cache
def nodes(file: Path) -> list[ast.AST]:
    """Returns the import statements of a file and its calls by dotted names."""
    found = ast.walk(ast.parse(file.read_text(), str(file)))
    return [n for n in found if isinstance(n, (ast.Import, ast.ImportFrom))
            or (isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute))]  # fmt: skip


@cache
def modules(file: Path) -> list[str]:
    """Returns the full names that the import statements of a file may import, including those inside functions."""
    names = []
    for node in nodes(file):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports are absolute"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def imported(file: Path) -> Iterator[str]:
    """Yields the top-level names of every import statement of a file."""
    return (name.split(".")[0] for name in modules(file))


def room_of(parts: Sequence[str], rooms: Sequence[str]) -> str:
    """Returns the subpackage of a module, given by the names after its package's."""
    return parts[0] if parts and parts[0] in rooms else ""


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_point_one_way(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    for file in files:
        path = file.relative_to(ROOT).as_posix()
        may = {package} | MAY_IMPORT[package] | ABOVE.get(path, set())
        assert not set(imported(file)) & MAY_IMPORT.keys() - may, path


@pytest.mark.parametrize("file", ABOVE)
def test_the_file_above_imports_planners_when_it_is_called(file: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    top = {name for node in tree.body for name in _names(node)}
    inside = {name for node in ast.walk(tree) for name in _names(node)} - top
    assert not top & ABOVE[file] and inside >= ABOVE[file]


def _names(node: ast.AST) -> list[str]:
    """Returns the top-level names that an import statement imports."""
    if isinstance(node, ast.ImportFrom):
        return [(node.module or "").split(".")[0]]
    return [alias.name.split(".")[0] for alias in node.names] if isinstance(node, ast.Import) else []


@pytest.mark.nightly
def test_a_machine_that_trains_may_lack_most_libraries() -> None:
    """Executor, planners and validation work without trainers' libraries; capturing alone imports no planner."""
    code = """if True:
        import sys
        for name in ("hydra", "omegaconf", "gymnasium", "stable_baselines3", "sklearn", "torch_geometric",
                     "transformers", "accelerate", "lightning"):
            sys.modules[name] = None
        import executor.integrations, executor
        assert "agents" not in sys.modules
        import agents, experiments.validate_gpu.__main__ as command
        for name in ("lp_round", *command.Settings().planners):
            agents.make(name)
    """
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)


def test_only_the_benchmark_imports_the_reference_rules() -> None:
    """Only the simulator and its benchmark import the reference implementation of the rules."""
    files = [f for package in MAY_IMPORT if package != "simulator" for f in (ROOT / package).rglob("*.py")]
    found = {f.relative_to(ROOT).parts[:2] for f in files for name in modules(f) if name.startswith("simulator.rules")}
    assert found == {("experiments", "benchmark")}


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
    for file in sorted((ROOT / package).rglob("*.py")):
        parts = file.relative_to(ROOT / package).with_suffix("").parts
        command = parts[-1] == "__main__"
        if parts == ("__init__",) or command or (room := room_of(parts, rooms)) not in rooms:
            continue
        for name in modules(file):
            top, *rest = name.split(".")
            if top == package and (other := room_of(rest, rooms)) in rooms and rooms.index(other) > rooms.index(room):
                wrong.append(f"{file.relative_to(ROOT)} imports {name}")
    assert not wrong


def test_the_simulator_needs_numpy_numba_and_yaml_only() -> None:
    known = {"numpy", "numba", "yaml", "simulator"}
    others = {n for f in (ROOT / "simulator").rglob("*.py") for n in imported(f)} - known - sys.stdlib_module_names
    assert not others


def test_cupy_is_imported_in_at_most_one_file() -> None:
    files = [f for package in MAY_IMPORT for f in (ROOT / package).rglob("*.py") if "cupy" in set(imported(f))]
    assert len(files) <= 1, files


UNPICKLER = ROOT / "simulator" / "pool" / "files.py"  # PyTorch writes its allocator's snapshots as pickles


def test_nothing_is_unpickled() -> None:
    """Files are JSON, or loaded by torch.load(weights_only=True); one file reads pickles without resolving names."""
    wrong = []
    for file in (f for package in MAY_IMPORT for f in (ROOT / package).rglob("*.py")):
        if file != UNPICKLER:
            serializers = {"pickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
            wrong += [f"{file.relative_to(ROOT)} imports {name}" for name in serializers & set(imported(file))]
        for node in nodes(file):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            called = ast.unparse(node.func)
            safe = any(k.arg == "weights_only" and ast.unparse(k.value) == "True" for k in node.keywords)
            if called.startswith(("pickle.", "dill.", "joblib.")) or (called == "torch.load" and not safe):
                wrong.append(f"{file.relative_to(ROOT)}:{node.lineno} calls {called}")
    assert not wrong


def test_trainers_are_imported_with_their_class_only() -> None:
    extras = {"transformers", "accelerate", "lightning"}
    files = [f for package in MAY_IMPORT for f in (ROOT / package).rglob("*.py")]
    top = {f.relative_to(ROOT).as_posix() for f in files
           if extras & {name for node in ast.parse(f.read_text()).body for name in _names(node)}}  # fmt: skip
    assert top and all(f.startswith(("executor/integrations/", "experiments/examples/")) for f in top)
