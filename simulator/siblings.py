"""Warns if another package hides one of Headroom's, whose top-level names are common."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path

SIBLINGS = ("envs", "agents", "executor", "experiments")


def hidden() -> dict[str, str]:
    """Returns the path of each package that an import finds instead of Headroom's, by its name.

    A package that is not installed, as in a copy of a part of Headroom, is not hidden.
    """
    root = Path(__file__).resolve().parent.parent
    found = {}
    for name in SIBLINGS:
        try:
            spec = find_spec(name)
        except ValueError:  # a module that another program put into sys.modules
            continue
        if spec is not None and spec.origin is not None and (root / name).is_dir():
            path = Path(spec.origin).resolve().parent
            if path != root / name:
                found[name] = str(path)
    return found


def warn_if_hidden() -> None:
    """Warns, in a sentence for each hidden package, what hides it and what to do."""
    for name, path in hidden().items():
        warnings.warn(
            f"{path} hides Headroom's package {name!r}, because it comes first on sys.path: rename it, or start Python "
            "in another folder",
            stacklevel=3,
        )
