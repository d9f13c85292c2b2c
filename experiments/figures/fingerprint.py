"""Fingerprint of a figure's result: what its rows depend on, so that a test can tell a stale result.

The code part covers the modules that the figure's module imports, directly or through others, and those of the planners
that it, its settings or its paper's module names; not all planners, although importing ``agents`` imports them all. A
module counts by its syntax tree without docstrings, annotations of functions and messages of exceptions, so that
comments and layout do not matter either, and without methods of a figure that only present rows.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import agents
from experiments.common.cli import CONFIGS

ROOT = CONFIGS.parent
PACKAGES = ("agents", "envs", "executor", "experiments.figures", "experiments.workloads", "simulator")
NOT_COMPUTING = {f"experiments.figures.{name}" for name in ("figure", "fingerprint", "verdicts")}
PRESENTING = ("chart", "charts", "panels", "template_values")  # methods of a figure
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
LEARNED = "agents.learned.dqn"  # prefix of modules that load the weights beside them
REGISTRY = "agents"  # imports all planners


def fingerprint(module: str, settings: dict[str, Any], machine: dict[str, Any]) -> dict[str, Any]:
    """Returns the fingerprint of a result.

    Args:
        module: Module of the figure's class.
        settings: Settings of the figure's YAML, without name, machine and ``quick``.
        machine: ``Machine.to_dict``.
    """
    text = json.dumps([settings, machine], sort_keys=True)
    names = set(_strings(settings)) | set(_constants(module))
    planners = [type(agents.make(name)).__module__ for name in agents.PLANNERS if name in names]
    modules = sorted(_closure([module, *planners]))
    has_weights = any(name.startswith((LEARNED, "agents.learned.policy")) for name in modules)
    weights = sorted((ROOT / "agents" / "learned").glob("*.pt")) if has_weights else []
    return {
        "settings": _digest(text),
        "code": _digest(*(module_digest(name) for name in modules)),
        "weights": _digest(*(path.read_bytes() for path in weights)) if weights else None,
    }


def _closure(modules: list[str]) -> set[str]:
    """Returns modules and all that they import, but for other planners of the registry."""
    found: set[str] = set()
    while modules:
        name = modules.pop()
        if name not in found and name not in NOT_COMPUTING and _path(name) is not None:
            found.add(name)
            modules += [] if name == REGISTRY else imported(name)
    return found


@cache
def imported(name: str) -> list[str]:
    """Returns the modules of PACKAGES that a module imports anywhere in its source."""
    names = []
    for node in ast.walk(_tree(name)):
        if isinstance(node, ast.Import):
            names += [entry.name for entry in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{entry.name}" for entry in node.names)]
    return [name for name in names if name.startswith(PACKAGES)]


def _constants(name: str) -> Iterator[str]:
    """Yields the strings in a module of figures and in the modules of figures that it imports."""
    for member in _closure([name]):
        if member.startswith("experiments.figures"):
            for node in ast.walk(_tree(member)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    yield node.value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for entry in value:
            yield from _strings(entry)


@cache
def _tree(name: str) -> ast.Module:
    path = _path(name)
    return ast.parse(path.read_text() if path else "")


@cache
def module_digest(name: str) -> str:
    """Returns the digest of a module (see ``source_digest``)."""
    path = _path(name)
    return source_digest(path.read_text() if path else "")


def source_digest(source: str) -> str:
    """Returns the digest of a module's syntax tree without docstrings, annotations, messages and PRESENTING methods."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            node.exc.args = [value for value in node.exc.args if not isinstance(value, ast.Constant | ast.JoinedStr)]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.ClassDef):
            node.body = [part for part in node.body if getattr(part, "name", "") not in PRESENTING]
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            node.body = node.body[1:]
    return _digest(ast.dump(tree))


def _path(name: str) -> Path | None:
    stem = ROOT.joinpath(*name.split("."))
    return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.exists()), None)


def _digest(*parts: str | bytes) -> str:
    return hashlib.sha256(b"".join(part.encode() if isinstance(part, str) else part for part in parts)).hexdigest()[:16]
