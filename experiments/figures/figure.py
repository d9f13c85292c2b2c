"""What a figure is. Its words are Markdown, NAME.md beside its module, with the numbers that the module gives.

The Markdown has a title, a paragraph that names the paper, a table and a list of notes; what stands under a heading of
the second level is not on the generated page. ``{name}`` is a number, as of ``str.format`` (see ``fill``). A row of the
table, or a note, that begins with ``[networks]`` is repeated for each mapping in the list ``networks``; a cell that is
nothing but ``[limits]`` is a column for each entry of that list.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from experiments.common.report import Row
from simulator.machine import Machine

if TYPE_CHECKING:
    from experiments.plotting.charts import Chart

UNITS = {"M": 2**20, "G": 2**30, "D": 10**6, "B": 10**9, "t": 10**6}  # MiB, GiB, MB, GB; ms of ns


@dataclass(frozen=True)
class Figure:
    """One figure or table.

    Attributes:
        name: of its YAML in configs/figure, of its module and of its Markdown.
        tasks: what to compute, from the YAML's settings, as data that can be JSON; the longest last, as they are begun
            from the end; a process runs one at a time. Raises UsageError where a setting is wrong.
        run: the result of a task, which is added to it: a row.
        numbers: what table and notes say of the rows.
        chart: the picture of the rows.
        alone: a task needs all cores to itself.
        on_demand: ``figure=all`` leaves it out.
        text: Markdown in the place of NAME.md.
        simulated: whether the picture's title says so; False for what was measured.
    """

    name: str
    tasks: Callable[[DictConfig], list[Row]]
    run: Callable[[Row, Machine], Row]
    numbers: Callable[[list[Row]], Row]
    chart: Callable[[list[Row]], Chart]
    alone: bool = False
    on_demand: bool = False
    text: str | None = None
    simulated: bool = True

    @property
    def _parts(self) -> tuple[str, list[list[str]], list[str]]:
        """Title and first paragraph; the cells of the table; the notes."""
        text = Path(__file__).with_name(f"{self.name}.md").read_text() if self.text is None else self.text
        head, *notes = re.split(r"\n- ", text.partition("\n## ")[0])
        about, _, lines = head.partition("\n|")
        table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines() if line]
        return about, [table[0], *table[2:]], [" ".join(note.split()) for note in notes]

    @property
    def title(self) -> str:
        """The first line of the Markdown."""
        return self._parts[0].partition("\n")[0].removeprefix("# ")

    @property
    def about(self) -> str:
        """The first paragraph."""
        return " ".join(self._parts[0].partition("\n")[2].split())

    def say(self, rows: list[Row]) -> tuple[list[str], list[list[str]], list[str]]:
        """Headings and cells of the table (empty where there is no number), and the notes that have all numbers."""
        _, (heads, *lines), notes = self._parts
        numbers = self.numbers(rows)
        cells = [_cells(cut, one) for line in lines for cut, one in _each(line, numbers)]
        said = [fill(cut[0], one) for note in notes for cut, one in _each([note], numbers)]
        return _cells(heads, numbers), cells, [note for note in said if note]

    def table(self, rows: list[Row]) -> tuple[list[str], list[list[str]]]:
        """Headings and cells; see ``say``."""
        return self.say(rows)[:2]

    def notes(self, rows: list[Row]) -> list[str]:
        """The notes that have all their numbers; see ``say``."""
        return self.say(rows)[2]

    def draw(self, rows: list[Row], path: Path) -> None:
        """The picture as PNG."""
        from experiments.plotting import charts  # Matplotlib takes long to import

        chart = self.chart(rows)
        if self.simulated and "imulated" not in chart.title:
            chart = replace(chart, title=f"{chart.title} (simulated)")
        charts.draw(path, chart)


class Range:
    """The least and the most of some numbers: ``{:.0%}`` makes "10% to 20%"."""

    def __init__(self, values: Iterable[float]) -> None:
        self.values = list(values)

    def __format__(self, spec: str) -> str:
        low, high = (format(of(self.values), spec) for of in (min, max))
        return low if low == high else f"{low} to {high}"


def span(values: Iterable[float | None]) -> Range | None:
    """The range of those that are there."""
    there = [value for value in values if value is not None]
    return Range(there) if there else None


def fill(template: str, values: Mapping[str, Any]) -> str | None:
    """A template with its values; None where one of them is None.

    ``[[ … ]]`` is left out where one in it is None. ``{x:.1f?none}`` has words for None. A list is joined by commas.
    ``{x!M}`` is in MiB, ``!G`` in GiB, ``!D`` in MB of 10^6 bytes, ``!B`` in GB of 10^9; ``!t`` is ns in ms.

    Raises:
        KeyError: there is no value of a name.
    """
    out = ""
    for i, part in enumerate(re.split(r"\[\[(.*?)\]\]", template)):
        try:
            out += _Formatter().vformat(part, (), values)
        except _Missing:
            if not i % 2:
                return None
    return out


def _each(parts: list[str], numbers: Row) -> Iterator[tuple[list[str], Row]]:
    """A row, or a note, as often as its first part asks for, with the values of each time."""
    found = re.match(r"\[(\w+)\] ", parts[0])
    for one in numbers[found[1]] if found else [{}]:
        yield [parts[0][found.end() :] if found else parts[0], *parts[1:]], {**numbers, **one}


def _cells(templates: list[str], values: Row) -> list[str]:
    out: list[str] = []
    for cell in templates:
        several = re.fullmatch(r"\[(\w+)\]", cell)
        out += map(str, values[several[1]]) if several else [fill(cell, values) or ""]
    return out


class _Missing(Exception):
    """A number that there is not."""


class _Formatter(string.Formatter):
    def get_field(self, name: str, args: Sequence[Any], values: Mapping[str, Any]) -> tuple[Any, str]:
        """As of ``str.format``; what is of None is None."""
        first, *keys = re.findall(r"[^\[\].]+", name)
        found = values[first]
        for key in keys:
            found = None if found is None else found[int(key) if isinstance(found, (list, tuple)) else key]
        return found, first

    def convert_field(self, value: Any, conversion: str | None) -> Any:
        if value is None or conversion not in UNITS:
            return value
        unit = UNITS[conversion]
        return Range(one / unit for one in value.values) if isinstance(value, Range) else value / unit

    def format_field(self, value: Any, spec: str) -> str:
        spec, known, instead = spec.partition("?")
        if value is None and not known:
            raise _Missing
        if isinstance(value, list):
            return ", ".join(format(one, spec) for one in value)
        return instead if value is None else format(value, spec)
