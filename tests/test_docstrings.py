"""Tests that names in the product's docstrings exist: names in double backticks, and names followed by a parenthesis.

A name exists if its file uses it, or if its package defines it: a module, class, function, argument, attribute or
module-level name. Other packages count with what they define at the top of a module or of a class. Names that our code
does not spell stand in OTHERS.
"""

from __future__ import annotations

import ast
import builtins
import functools
import pkgutil
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import agents

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("simulator", "envs", "agents", "executor", "experiments")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
WORD = re.compile(r"[A-Za-z_]\w*")
QUOTED = re.compile(r"``([A-Za-z_][\w.]*)(?:\([^`]*\))?``")
CALL = re.compile(r"(?<![\w.`])([A-Za-z_][\w.]*)\((?!\d)")
OTHERS = {
    "torch": """round_size get_free_block get_allocation_size should_split try_merge_blocks release_cached_blocks
        is_fused_kernel_acceptable _select_batch_norm_backend rms_norm_symint can_accumulate_inplace _fused_adamw_
        SchedulerNode decide_inplace_update OpOverload decompose tree_unflatten transpose_ set_to_none foreach fused
        activation_memory_budget clip_grad_norm_ memory_efficient aten _fused_rms_norm view""",
    "gymnasium": "env unwrapped tasks action_mask",
    "stable_baselines3": "learn model logger dump",
    "transformers": "BatchEncoding",
    "SmartPool": "Malloc Free Exec PoolOpt",
    "mathematics": "O ln log2 sign N A Q_2 A_2 E_2",
    "examples": "history Class v1",
}


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yields the line and the text of each docstring of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)) is not None:
            yield node.body[0].lineno, text


@functools.cache
def used(path: Path) -> frozenset[str]:
    """Returns every identifier of a file's code, and every word of its strings and comments outside docstrings."""
    lines = {line for line, _ in docstrings(path)}
    found = set[str]()
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.start[0] not in lines or token.type == tokenize.NAME:
                found.update(WORD.findall(token.string))
    return frozenset(found)


@functools.cache
def defined(package: str, top_only: bool = False) -> frozenset[str]:
    """Returns the names that a package defines; ``top_only``: at the top of a module or of a class."""
    found = {package}
    for path in (ROOT / package).rglob("*.py"):
        found.update((path.stem, path.parent.name))
        tree = ast.parse(path.read_text())
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
        top = [*tree.body, *(node for cls in classes for node in cls.body)]
        for node in top if top_only else ast.walk(tree):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(node.name)
            elif isinstance(node, ast.arg):
                found.add(node.arg)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names = [name for target in targets for name in ast.walk(target)]
                found.update(name.attr for name in names if isinstance(name, ast.Attribute))
                found.update(name.id for name in names if isinstance(name, ast.Name))
    return frozenset(found)


def exists_outside(name: str) -> bool:
    """Returns whether a dotted name is a file, or an attribute of an installed library."""
    if name.endswith((".py", ".json", ".jsonl")):
        return not name.endswith(".py") or any(next((ROOT / package).rglob(name), None) for package in PACKAGES)
    try:
        return "." in name and pkgutil.resolve_name(name) is not None
    except (ImportError, AttributeError, ValueError):
        return False


def missing(package: str) -> list[str]:
    """Returns each name in a docstring of the package that does not exist, with its file and line."""
    known = {*dir(builtins), *agents.PLANNERS, *" ".join(OTHERS.values()).split()}
    known |= defined(package).union(*(defined(other, top_only=True) for other in PACKAGES))
    found = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for line, text in docstrings(path):
            names = (name.strip(".") for name in (*QUOTED.findall(text), *CALL.findall(text)))
            unknown = [name for name in names if not exists_outside(name) and set(name.split(".")) - known - used(path)]
            found += [f"{path.relative_to(ROOT)}:{line}: {name}" for name in unknown]
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_names_in_docstrings_exist(package: str) -> None:
    assert missing(package) == []
