"""Base class of figures, and the templates of their texts.

A figure is a class in its paper's module, and a section of the paper's page (Markdown). A section has a title, a
paragraph, a table and a list of notes; text after its ``###`` is not on the generated page.
``{name}`` is replaced as in ``str.format`` (see ``fill``). A table row or note that begins with ``[networks]`` is
repeated for each mapping in the list ``networks`` (``[networks if batch in 1; 8]``, in brief: for those with such a
``batch``, if all of these exist); ``label`` is by default that of its ``network``. A cell ``[limits]`` becomes a column
per entry of that list.
"""

from __future__ import annotations

import re
import string
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from experiments.common.report import Row
from experiments.figures import label, networks
from simulator.machine import Machine

if TYPE_CHECKING:
    from experiments.plotting.charts import Chart

FOLDER = Path(__file__).parent
UNITS = {"M": 2**20, "G": 2**30, "B": 10**9, "t": 10**6}  # MiB, GiB, GB; ms of ns


class Figure:
    """One figure or table.

    Attributes:
        name: Name of its YAML in configs/figure and of its section in a page.
        paper_networks: Networks of the paper's table; if empty, any shipped workload.
        needs_all_cores: Whether a task needs all cores.
        on_demand: Whether ``figure=all`` skips the figure.
        simulated: Whether the picture's title says "(simulated)"; False for measurements.
    """

    name = ""
    paper_networks: Collection[str] = ()
    needs_all_cores = False
    on_demand = False
    simulated = True

    def tasks(self, settings: DictConfig) -> list[Row]:
        """Returns the tasks, by default one per network, as JSON-serializable data.

        The longest task comes last, since tasks start from the end; a process runs one at a time.

        Raises:
            UsageError: A setting of the YAML is invalid.
        """
        return [{"network": name} for name in networks(settings, self.paper_networks)]

    def run(self, task: Row, machine: Machine) -> Row:
        """Returns the result of a task, which is added to the task to form a row."""
        raise NotImplementedError

    def numbers(self, rows: list[Row]) -> Row:
        """Returns the values that the table and the notes use, by default the rows as ``networks``."""
        return {"networks": rows}

    def chart(self, rows: list[Row]) -> Chart:
        """Returns the picture of the rows."""
        raise NotImplementedError

    @property
    def text(self) -> str:
        """Markdown of the figure's section."""
        return _sections()[self.name]

    @property
    def title(self) -> str:
        """Heading of the section."""
        return self.text.partition("\n")[0].removeprefix("## ")

    @property
    def introduction(self) -> str:
        """First paragraph of the section."""
        return " ".join(self.text.partition("\n")[2].partition("\n|")[0].split())

    def format_text(self, rows: list[Row], brief: bool = False) -> tuple[list[str], list[list[str]], list[str]]:
        """Returns headings and cells of the table (empty without a value), and the notes with all values present.

        ``brief`` selects the rows of the committed page.
        """
        head, *notes = re.split(r"\n- ", self.text.partition("\n### ")[0])
        table = [[cell.strip() for cell in line.strip("|").split("|")] for line in head.splitlines() if line[:1] == "|"]
        numbers = self.numbers(rows)
        cells = [_cells(parts, row) for line in table[2:] for parts, row in _rows(line, numbers, brief)]
        text = [fill(parts[0], row) for note in notes for parts, row in _rows([" ".join(note.split())], numbers, brief)]
        return _cells(table[0], numbers), cells, [note for note in text if note]

    def draw(self, rows: list[Row], path: Path) -> None:
        """Saves the picture as PNG."""
        from experiments.plotting import charts  # importing Matplotlib is slow

        chart = self.chart(rows)
        if self.simulated and "imulated" not in chart.title:
            chart = replace(chart, title=f"{chart.title} (simulated)")
        charts.draw(path, chart)


@cache
def find(name: str) -> Figure:
    """Returns a figure by name; raises KeyError if no module defines it."""
    for path in FOLDER.glob("*.py"):
        if f'name = "{name}"\n' in path.read_text():
            module = vars(import_module(f"experiments.figures.{path.stem}"))
            return next(cls for cls in module.values() if isinstance(cls, type) and cls.__dict__.get("name") == name)()
    raise KeyError(name)


@cache
def _sections() -> dict[str, str]:
    """Returns the section of each figure on all pages."""
    text = "\n".join(page.read_text() for page in sorted(FOLDER.glob("*.md")))
    _, *parts = re.split(r'<a id="(\w+)"></a>\n', text)
    return dict(zip(parts[::2], parts[1::2], strict=True))


class Range:
    """Range of some numbers; ``{:.0%}`` formats it as "10% to 20%"."""

    def __init__(self, values: Iterable[float]) -> None:
        self.values = list(values)

    def __format__(self, spec: str) -> str:
        low, high = (format(extremum(self.values), spec) for extremum in (min, max))
        return low if low == high else f"{low} to {high}"


def span(values: Iterable[float | None]) -> Range | None:
    """Returns the range of the values that are not None, or None if all are."""
    numbers = [value for value in values if value is not None]
    return Range(numbers) if numbers else None


def fill(template: str, values: Mapping[str, Any]) -> str | None:
    """Fills a template, or returns None if one of its values is None.

    A list is joined by commas. ``{x!M}`` converts to MiB, ``!G`` to GiB, ``!B`` to GB of 10^9 bytes, ``!t`` ns to ms.

    Raises:
        KeyError: A name has no value.
    """
    try:
        return _Formatter().vformat(template, (), values)
    except _Missing:
        return None


def _rows(parts: list[str], numbers: Row, brief: bool) -> Iterator[tuple[list[str], Row]]:
    """Yields a row or note once per entry of the list that it names, with the values of each."""
    match = re.match(r"\[(\w+)(?: if (\w+) in ([^\]]+))?\] ", parts[0])
    entries: list[Row] = numbers[match[1]] if match else [{}]
    entries = [{"label": label(entry["network"]), **entry} if "network" in entry else entry for entry in entries]
    if match and match[2] and brief:
        brief_values = set(match[3].split("; "))
        if brief_values <= {str(entry[match[2]]) for entry in entries}:  # else a user's own settings: show all
            entries = [entry for entry in entries if str(entry[match[2]]) in brief_values]
    for entry in entries:
        yield [parts[0][match.end() :] if match else parts[0], *parts[1:]], {**numbers, **entry}


def _cells(templates: list[str], values: Row) -> list[str]:
    out: list[str] = []
    for cell in templates:
        match = re.fullmatch(r"\[(\w+)\]", cell)
        out += map(str, values[match[1]]) if match else [fill(cell, values) or ""]
    return out


class _Missing(Exception):
    """Raised if a value of a template is None."""


class _Formatter(string.Formatter):
    def get_field(self, name: str, args: Sequence[Any], values: Mapping[str, Any]) -> tuple[Any, str]:
        """Looks up a field as ``str.format`` does; raises _Missing for None."""
        first, *keys = re.findall(r"[^\[\].]+", name)
        value = values[first]
        for key in keys:
            value = None if value is None else value[int(key) if isinstance(value, (list, tuple)) else key]
        if value is None:
            raise _Missing
        return value, first

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        if conversion not in UNITS:
            return value
        unit = UNITS[conversion]
        return Range(number / unit for number in value.values) if isinstance(value, Range) else value / unit

    def format_field(self, value: Any, spec: str) -> str:
        return ", ".join(format(entry, spec) for entry in value) if isinstance(value, list) else format(value, spec)
