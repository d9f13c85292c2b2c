"""Single entry point of the commands: ``headroom evaluate …`` runs ``python -m experiments.evaluate …``.

headroom evaluate workload=vgg16 limits=[0.8,0.6]
headroom train limit=0.5 seed=1
headroom evaluate --help
"""

from __future__ import annotations

import ast
import difflib
import sys
from importlib.util import find_spec
from pathlib import Path
from runpy import run_module

from experiments import install_import_handler

COMMANDS = {
    "plan": "plan",
    "train": "train_dqn",
    "evaluate": "evaluate",
    "verify": "verify",
    "pack": "pack",
    "reproduce": "reproduce",
    "benchmark": "benchmark",
    "validate": "validate_gpu",
    "measured": "measured",
}


def main() -> None:
    """Runs the command named by the first argument as ``python -m`` does; exits with its status."""
    modules = {name: f"experiments.{module}" for name, module in COMMANDS.items() if find_spec(f"experiments.{module}")}
    name, *words = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        from experiments.common import help

        rows = [f"{name:10} {summary(module)}" for name, module in modules.items()]
        end = "\nheadroom COMMAND --help lists its keys; other commands are `python -m experiments.NAME`."
        return help.show("\n".join([(__doc__ or "").strip(), *rows, end]))
    if name not in modules:
        matches = difflib.get_close_matches(name, modules, n=1)
        hint = f"; the nearest is {matches[0]!r}" if matches else ""
        print(f"error: {name!r}: expected one of {', '.join(modules)}{hint}", file=sys.stderr)
        sys.exit(2)
    install_import_handler()
    sys.argv = [modules[name], *words]
    run_module(modules[name], run_name="__main__", alter_sys=True)


def summary(module: str) -> str:
    """Returns the summary line of a command's docstring without importing the module."""
    spec = find_spec(module)
    if spec is not None and spec.submodule_search_locations:
        spec = find_spec(f"{module}.__main__")
    assert spec is not None and spec.origin is not None
    doc = ast.get_docstring(ast.parse(Path(spec.origin).read_text())) or ""
    return " ".join(doc.partition("\n\n")[0].split()).rstrip(".")


if __name__ == "__main__":
    main()
