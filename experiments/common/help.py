"""``--help`` of a command: what it does, with examples (its module's docstring), and every key with its default and its
meaning, which are read from the YAML file, so that the help is what the command has.

The meaning of a key is the comment at the end of its line with the indented comments below it, or else the comments
right above it.
"""

from __future__ import annotations

import inspect
import re
import signal
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

import yaml

WIDTH = 118
NOT_KEYS = ("defaults", "hydra")
HYDRA = """\
Options:
  -m, --multirun        several values of a key, separated by commas, are a sweep: seed=1,2,3
  hydra/launcher=NAME   of a sweep: joblib, submitit_local, submitit_slurm or ray (extras joblib, submitit, ray)
  --cfg job             print the settings, and do nothing
  -h, --help            this text; with GROUP=OPTION, the keys of that option"""


class Key(NamedTuple):
    """A key of a YAML file: its dotted name, its value as it is written ('' for a mapping), and its meaning."""

    name: str
    value: str
    meaning: str


def text(configs: Path, name: str, doc: str, chosen: Sequence[str] = ()) -> str:
    """The help of a command.

    Args:
        configs: the folder of the YAML files.
        name: the command's own file in it.
        doc: the docstring of the command's module.
        chosen: words of the command line; of each GROUP=OPTION the option's keys are listed.
    """
    file = configs / f"{name}.yaml"
    parts = [doc.strip(), "Keys, as KEY=VALUE, with their defaults:\n" + table(keys(file))]
    for key in keys(file, "defaults"):
        group, option = key.name, key.value
        option = dict(word.split("=", 1) for word in chosen if "=" in word).get(group, option)
        known = sorted(path.stem for path in (configs / group).glob("*.yaml"))
        lines = [f"{group}={option}: {key.meaning}" if key.meaning else f"{group}={option}"]
        lines.append(textwrap.fill(", ".join(known), WIDTH, initial_indent="  one of ", subsequent_indent="  "))
        if option in known:
            own = keys(configs / group / f"{option}.yaml")
            lines.append(table([each._replace(name=f"{group}.{each.name}") for each in own]))
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, HYDRA])


def show(help_: str) -> None:
    """Prints a help. Where its reader ends first (``--help | head``), so does this process, as other commands do."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(help_, flush=True)


def keys(file: Path, under: str | None = None) -> list[Key]:
    """The keys of a YAML file but for NOT_KEYS, or its groups: the single keys of the list ``under``."""
    written = file.read_text()
    lines, tree = written.splitlines(), yaml.compose(written)
    assert isinstance(tree, yaml.MappingNode)
    if under is None:
        return [key for key in _keys(tree, lines, written) if key.name.partition(".")[0] not in NOT_KEYS]
    (groups,) = (value for key, value in tree.value if key.value == under)
    entries = [entry for entry in groups.value if isinstance(entry, yaml.MappingNode)]
    found = [key for entry in entries for key in _keys(entry, lines, written)]
    return [key for key in found if not key.name.startswith("override")]


def _keys(tree: yaml.MappingNode, lines: list[str], written: str, prefix: str = "") -> Iterator[Key]:
    for key, value in tree.value:
        block = isinstance(value, yaml.CollectionNode) and not value.flow_style
        end = key.end_mark if block else value.end_mark
        nested = block and isinstance(value, yaml.MappingNode)
        shown = "" if block else written[value.start_mark.index : value.end_mark.index]
        yield Key(prefix + key.value, " ".join(shown.split()), _meaning(lines, key.start_mark, end))
        if nested:
            yield from _keys(value, lines, written, f"{prefix}{key.value}.")


def _meaning(lines: list[str], start: yaml.Mark, end: yaml.Mark) -> str:
    if found := re.match(r"[:\s]*#\s*(.*)", lines[end.line][end.column :]):
        said = [found[1]]
        for line in lines[end.line + 1 :]:
            if not (more := re.match(rf"\s{{{start.column + 1},}}#\s*(.*)", line)):
                break
            said.append(more[1])
        return " ".join(said)
    above: list[str] = []
    for line in reversed(lines[: start.line]):
        if not (more := re.match(rf"\s{{{start.column}}}#\s*(.*)", line)):
            return " ".join(above)
        above.insert(0, more[1])
    return ""  # what a file begins with is about all of it


def attributes(kind: type) -> list[Key]:
    """The fields of a dataclass with their defaults, each with its line under Attributes in the docstring."""
    said = inspect.getdoc(kind) or ""
    entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", said.partition("Attributes:")[2], re.MULTILINE)
    meaning = {name: " ".join(words.split()) for name, words in entries}
    return [Key(field.name, _written(field.default), meaning.get(field.name, "")) for field in fields(kind)]


def _written(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value).lower() or "''"


def table(found: Sequence[Key]) -> str:
    """Lines of a text: each key, and its meaning beside it, or below where there is no room."""
    out = []
    for key in found:
        head = f"  {key.name}={key.value}" if key.value else f"  {key.name}"
        head = head.strip() if len(head) < WIDTH else f"{head.strip()[: WIDTH - 4]} …"
        room = max(len(head) + 2, 28)
        if room > 44:
            out += [f"  {head}", *textwrap.wrap(key.meaning, WIDTH - 30, initial_indent=" " * 30,
                                                subsequent_indent=" " * 30)]  # fmt: skip
        else:
            out += textwrap.wrap(
                key.meaning, WIDTH, initial_indent=f"  {head:{room}}", subsequent_indent=" " * (room + 2)
            ) or [f"  {head}"]
    return "\n".join(out)
