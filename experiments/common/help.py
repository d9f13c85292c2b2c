"""``--help`` of a command: what it does, with examples (its module's docstring), and its settings as their YAML files
have them, where a comment beside each key or above it says what it means."""

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

WIDTH = 118
HYDRA = """\
Options:
  -m, --multirun        several values of a key, separated by commas, are a sweep: seed=1,2,3
  hydra/launcher=NAME   of a sweep: joblib, submitit_local, submitit_slurm or ray (extras joblib, submitit, ray)
  --cfg job             print the settings, and do nothing
  -h, --help            this text; with GROUP=OPTION, the keys of that option"""
GROUP = re.compile(r"  - (\w+): (\S+)(?:  # (.*))?")  # a default of a command: group, option, meaning


def text(configs: Path, name: str, doc: str, chosen: Sequence[str] = ()) -> str:
    """The help of a command.

    Args:
        configs: the folder of the YAML files.
        name: the command's own file in it.
        doc: the docstring of the command's module.
        chosen: words of the command line; of each GROUP=OPTION the option's keys are listed.
    """
    parts = [doc.strip(), f"Keys, to be changed as KEY=VALUE:\n{_written(configs / f'{name}.yaml')}"]
    for group, (option, meaning) in groups(configs, name, chosen).items():
        known = sorted(path.stem for path in (configs / group).glob("*.yaml"))
        lines = [f"{group}={option}: {meaning}" if meaning else f"{group}={option}"]
        lines.append(textwrap.fill(", ".join(known), WIDTH, initial_indent="  one of ", subsequent_indent="  "))
        if option in known:
            lines += [f"  as {group}.KEY=VALUE:", _written(configs / group / f"{option}.yaml", " " * 4)]
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, HYDRA])


def groups(configs: Path, name: str, chosen: Sequence[str] = ()) -> dict[str, tuple[str, str]]:
    """The option and the meaning of each config group of a command; options in ``chosen`` come before the defaults."""
    options = dict(word.split("=", 1) for word in chosen if "=" in word)
    defaults = (configs / f"{name}.yaml").read_text().partition("defaults:\n")[2].partition("  - _self_")[0]
    found = map(GROUP.fullmatch, defaults.splitlines())
    return {line[1]: (options.get(line[1], line[2]), line[3] or "") for line in found if line}


def names(configs: Path, name: str, chosen: Sequence[str] = ()) -> set[str]:
    """Every dotted key of a command, with its config groups and the keys of their options."""
    found = [key for key, _ in flat(yaml.safe_load((configs / f"{name}.yaml").read_text()))]
    for group, (option, _) in groups(configs, name, chosen).items():
        file = configs / group / f"{option}.yaml"
        own = yaml.safe_load(file.read_text()) if file.is_file() else {}
        found += [group, *(key for key, _ in flat(own, f"{group}."))]
    parts = (key.split(".") for key in found if not key.startswith(("defaults", "hydra.")))
    return {".".join(key[: n + 1]) for key in parts for n in range(len(key))}


def flat(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the leaves of nested mappings with their dotted keys."""
    for key, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _written(file: Path, indent: str = "  ") -> str:
    """The settings of a YAML file with their comments, without what is Hydra's and what the file begins with."""
    written = re.sub(r"\A(#.*\n)+\n*", "", file.read_text())
    settings = re.sub(r"^(defaults|hydra):.*\n(?: .*\n|\n)*", "", written, flags=re.MULTILINE)
    return textwrap.indent(settings.strip(), indent)


def show(help_: str) -> None:
    """Prints a help. Where its reader ends first (``--help | head``), so does this process, as other commands do."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(help_, flush=True)


def attributes(kind: type) -> str:
    """The fields of a dataclass with their defaults, each with its line under Attributes in the docstring."""
    entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", inspect.getdoc(kind) or "", re.MULTILINE)
    meaning, lines = dict(entries), []
    for field in fields(kind):
        value = ",".join(map(str, field.default)) if isinstance(field.default, tuple) else str(field.default).lower()
        head = textwrap.shorten(f"{field.name}={value or repr('')}".replace(",", ", "), WIDTH, placeholder=" …")
        text = f"{head.replace(', ', ',')}  {meaning.get(field.name, '')}"
        lines.append(textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent=" " * 6))
    return "\n".join(lines)
