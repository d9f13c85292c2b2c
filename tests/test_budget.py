"""Tests the budgets of budget.json: code tokens by folder, words of Markdown, and the frozen list of public names.

A token is a NAME, OP, NUMBER or STRING of ``tokenize`` outside docstrings, so that no layout changes the count. A
folder's budget is its entry in ``tokens`` plus the additions in ``raised``, each with a reason. Removed names leave
the list in the same commit; for a new name, ``raised`` states which old one it replaces, or why none.
"""

import ast
import functools
import json
import subprocess
import tokenize
from pathlib import Path

import pytest
import yaml

import agents

ROOT = Path(__file__).resolve().parent.parent
BUDGET = json.loads((ROOT / "tests" / "budget.json").read_text())
TEMPLATES = ROOT / "experiments" / "figures"
GENERATED = ROOT / "experiments" / "results"  # its pages are made from templates and the results


def tracked(pattern: str) -> list[Path]:
    """Returns the files that git tracks or would add; all files outside a repository (sdist)."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    names = found.stdout.split() if found.returncode == 0 else ROOT.rglob(pattern)
    return [path for path in (ROOT / name for name in names) if path.is_file()]


def folder(path: Path) -> str:
    """Returns the package of a file with its first subfolder."""
    return "/".join(path.relative_to(ROOT).parent.parts[:2])


DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
COUNTED = (tokenize.NAME, tokenize.OP, tokenize.NUMBER, tokenize.STRING)


def count_tokens(path: Path) -> int:
    """Returns the number of code tokens of a file."""
    tree = ast.parse(path.read_text())
    documented = [node for node in ast.walk(tree) if isinstance(node, DOCUMENTED)]
    docstrings = {(node.body[0].lineno, node.body[0].col_offset) for node in documented if ast.get_docstring(node)}
    with path.open("rb") as file:
        return sum(k.type in COUNTED and k.start not in docstrings for k in tokenize.tokenize(file.readline))


@functools.cache
def tokens_by_folder() -> dict[str, int]:
    """Returns the code tokens by folder."""
    total: dict[str, int] = {}
    for path in tracked("*.py"):
        total[folder(path)] = total.get(folder(path), 0) + count_tokens(path)
    return total


def keys(config: dict[str, object], prefix: str = "") -> list[str]:
    """Returns the dotted keys of a config's leaves."""
    found = []
    for key, value in config.items():
        nested = isinstance(value, dict) and value and prefix.count(".") < 1
        found += keys(value, f"{prefix}{key}.") if nested else [f"{prefix}{key}"]
    return found


def public_names() -> dict[str, dict[str, list[str]]]:
    """Returns commands, agents and algorithms with settings, planners with options, figures, and entry points."""
    config = ROOT / "configs"
    commands = {
        path.relative_to(config).with_suffix("").as_posix(): sorted(
            key for key in keys(yaml.safe_load(path.read_text())) if key.partition(".")[0] not in ("defaults", "hydra")
        )
        for pattern in ("*.yaml", "agent/*.yaml", "algo/*.yaml")
        for path in sorted(config.glob(pattern))
    }
    modules = [path for path in tracked("*.py") if not path.is_relative_to(ROOT / "tests")]
    entries = {
        path.relative_to(ROOT).as_posix() for path in modules if 'if __name__ == "__main__":' in path.read_text()
    }
    figures = sorted(path.stem for path in (config / "figure").glob("*.yaml"))
    planners = {name: sorted(agents.options(name)) for name in sorted(agents.PLANNERS)}
    found = {"commands": commands, "planners": planners}
    return found | {"figures": {name: [] for name in figures}, "entries": {name: [] for name in sorted(entries)}}


def allowed(kind: str, base: int) -> int:
    """Returns the budget of ``kind`` with all additions."""
    assert all(len(entry["reason"]) > 20 for entry in BUDGET["raised"])
    return base + sum(entry["by"] for entry in BUDGET["raised"] if entry["budget"] == kind)


@pytest.mark.parametrize("name", sorted({*map(folder, tracked("*.py"))} | BUDGET["tokens"].keys()))
def test_a_folder_has_no_more_tokens_than_its_budget(name: str) -> None:
    assert tokens_by_folder().get(name, 0) <= allowed(name, BUDGET["tokens"].get(name, 0))


def test_the_markdown_has_no_more_words_than_its_budget() -> None:
    pages = [path for path in tracked("*.md") if path.parent != TEMPLATES or path.name == "README.md"]
    words = {
        path.relative_to(ROOT).as_posix(): len(path.read_text().split()) for path in pages if path.parent != GENERATED
    }
    assert sum(words.values()) <= allowed("words", BUDGET["words"]), sorted(words.items(), key=lambda one: -one[1])[:10]


@pytest.mark.parametrize("kind", ["commands", "planners", "figures", "entries"])
def test_public_names_equal_the_frozen_list(kind: str) -> None:
    found = public_names()[kind]
    frozen = BUDGET["names"][kind]
    assert found.keys() == frozen.keys()
    for name, options in found.items():
        assert options == frozen[name], name
