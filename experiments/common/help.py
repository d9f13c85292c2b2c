"""``--help`` of a command: its module's docstring with examples, then its settings from their YAML files.

Comments beside or above a key in the YAML file are its description.
"""

from __future__ import annotations

import inspect
import re
import signal
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"
WIDTH = 118
HYDRA = """\
Options:
  -m, --multirun        sweep over comma-separated values of a key: seed=1,2,3
  hydra/launcher=NAME   sweep launcher: joblib, submitit_local, submitit_slurm or ray (extras joblib, submitit, ray)
  --cfg job             print the settings and exit
  -h, --help            show this help; with GROUP=OPTION, the keys of that option"""


def text(name: str, doc: str, overrides: Sequence[str] = ()) -> str:
    """Returns the help of a command.

    Args:
        name: name of the command's YAML file.
        doc: docstring of the command's module.
        overrides: command-line arguments; for each GROUP=OPTION the keys of that option are listed.
    """
    parts = [doc.strip(), f"Keys, set as KEY=VALUE:\n{_settings_text(CONFIGS / f'{name}.yaml')}"]
    for group, (option, meaning) in groups(name, overrides).items():
        presets = sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
        lines = [f"{group}={option}: {meaning}" if meaning else f"{group}={option}"]
        lines.append(textwrap.fill(", ".join(presets), WIDTH, initial_indent="  one of ", subsequent_indent="  "))
        if option in presets:
            lines += [f"  as {group}.KEY=VALUE:", _settings_text(CONFIGS / group / f"{option}.yaml", " " * 4)]
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, HYDRA])


def groups(name: str, overrides: Sequence[str] = ()) -> dict[str, tuple[str, str]]:
    """Returns option and meaning of each config group of a command; options in ``overrides`` override the defaults."""
    options = dict(word.split("=", 1) for word in overrides if "=" in word)
    defaults = (CONFIGS / f"{name}.yaml").read_text().partition("defaults:\n")[2].partition("  - _self_")[0]
    lines = re.findall(r"^  - (\w+): (\S+)(?:  # (.*))?$", defaults, re.MULTILINE)
    return {group: (options.get(group, option), meaning) for group, option, meaning in lines}


def names(name: str, overrides: Sequence[str] = ()) -> set[str]:
    """Returns all dotted keys of a command, with its config groups and the keys of their options."""
    keys = [key for key, _ in flat(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()))]
    for group, (option, _) in groups(name, overrides).items():
        file = CONFIGS / group / f"{option}.yaml"
        settings = yaml.safe_load(file.read_text()) if file.is_file() else {}
        keys += [group, *(key for key, _ in flat(settings, f"{group}."))]
    parts = (key.split(".") for key in keys if not key.startswith(("defaults", "hydra.")))
    return {".".join(key[: n + 1]) for key in parts for n in range(len(key))}


def flat(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested mappings with their dotted keys."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _settings_text(file: Path, indent: str = "  ") -> str:
    """Returns the settings of a YAML file with comments, without Hydra's entries and the file's header."""
    body = re.sub(r"\A(#.*\n)+\n*", "", file.read_text())
    settings = re.sub(r"^(defaults|hydra):.*\n(?: .*\n|\n)*", "", body, flags=re.MULTILINE)
    return textwrap.indent(settings.strip(), indent)


def show(help_: str) -> None:
    """Prints a help text; exits quietly if the pipe closes early (``--help | head``)."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(help_, flush=True)


def attributes(kind: type) -> str:
    """Lists the fields of a dataclass with defaults and their lines under Attributes in the docstring."""
    entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", inspect.getdoc(kind) or "", re.MULTILINE)
    meaning = dict(entries)
    lines = []
    for field in fields(kind):
        value = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default).lower()
        head = textwrap.shorten(f"{field.name}={value or repr('')}".replace(",", ", "), WIDTH, placeholder=" …")
        text = f"{head.replace(', ', ',')}  {meaning.get(field.name, '')}"
        lines.append(textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent=" " * 6))
    return "\n".join(lines)
