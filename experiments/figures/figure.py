"""Base class of figures, and the Jinja2 templates of their texts.

A figure is a class in its paper's module, and a section of the paper's page (Markdown). A section has a title, a
paragraph, a table and a list of notes, then ``### Claims`` (rows of claim, paper, ours and verdict) and
``### Choices``. The template's variables are the figure's ``template_values`` and ``rows``; the functions of
``verdicts`` decide a claim. Filters beside Jinja's: ``f`` formats as ``str.format`` does; ``MiB``, ``GiB``, ``GB`` and
``ms`` convert from bytes and ns; ``columns`` writes a list as table cells; ``brief`` selects the rows of the committed
page. A cell of a missing value (None) is empty. A note or claim with one is left out, and so is one that names a
network that is not among the rows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jinja2
from jinja2.runtime import Context
from omegaconf import DictConfig

from experiments.common.report import Row
from experiments.figures import WORKLOADS, label, networks, published
from experiments.figures.verdicts import CONTROLS, OURS, RULES, VERDICTS
from simulator.machine import Machine

if TYPE_CHECKING:
    from experiments.plotting.charts import Chart

FOLDER = Path(__file__).parent
Rows = list[Row]
CLAIMS = "\n### Claims\n"
CHOICES = "\n### Choices\n"


class Claim(NamedTuple):
    """Claim of a paper, its number, ours, and the verdict (one of ``VERDICTS``)."""

    claim: str
    paper: str
    ours: str
    verdict: str

    @property
    def verdict_shown(self) -> str:
        """The verdict in the words of a control or of a claim of ours, if it is one."""
        return CONTROLS.get(self.verdict, self.verdict) if self.paper == OURS else self.verdict


class Section(NamedTuple):
    """A figure's section: stem of its page, and Markdown."""

    page: str
    text: str


class Figure:
    """One figure or table; a subclass with a ``name`` is found by it.

    Attributes:
        name: Name of its YAML in configs/figure and of its section in a page.
        paper_networks: Networks of the paper's table; if empty, any shipped workload.
        needs_all_cores: Whether a task needs all cores.
        on_demand: Whether ``figure=all`` skips the figure.
        simulated: Whether the picture's title says "(simulated)"; False for measurements.
        pictures: Suffixes of its pictures' file names, as in ``charts``.
    """

    by_name: ClassVar[dict[str, type[Figure]]] = {}
    name = ""
    paper_networks: Collection[str] = ()
    needs_all_cores = False
    on_demand = False
    simulated = True
    pictures: tuple[str, ...] = ("",)

    def __init_subclass__(cls) -> None:
        Figure.by_name[cls.name] = cls

    def tasks(self, settings: DictConfig) -> Rows:
        """Returns the tasks, by default one per network, as JSON-serializable data.

        The longest task comes last, since tasks start from the end; a process runs one at a time.

        Raises:
            UsageError: A setting of the YAML is invalid.
        """
        return [{"network": name} for name in networks(settings, self.paper_networks)]

    def run(self, task: Row, machine: Machine) -> Row:
        """Returns the result of a task, which is added to the task to form a row."""
        raise NotImplementedError

    def template_values(self, rows: Rows) -> Row:
        """Returns the variables of the section's template, by default the rows as ``networks``."""
        return {"networks": rows}

    def chart(self, rows: Rows) -> Chart:
        """Returns the picture of the rows."""
        raise NotImplementedError

    def charts(self, rows: Rows) -> dict[str, Chart]:
        """Returns the pictures of the rows by suffix of their file names; one without panels is not drawn."""
        return {"": self.chart(rows)}

    @property
    def published(self) -> Any:
        """The paper's numbers."""
        return published(self.name)

    @property
    def text(self) -> str:
        """Markdown of the figure's section."""
        return _sections()[self.name].text

    @property
    def page(self) -> str:
        """Stem of the page with the figure's section."""
        return _sections()[self.name].page

    @property
    def choices(self) -> str:
        """Markdown of what we chose because the paper leaves it open, or because we differ."""
        return self.text.partition(CHOICES)[2].partition("\n### ")[0].strip()

    @property
    def title(self) -> str:
        """Heading of the section."""
        return self.text.partition("\n")[0].removeprefix("## ")

    @property
    def introduction(self) -> str:
        """First paragraph of the section."""
        return " ".join(self.text.partition("\n")[2].partition("\n|")[0].split())

    def format_text(self, rows: Rows, brief: bool = False) -> tuple[list[str], list[list[str]], list[str]]:
        """Returns headings and cells of the table (empty without a value), and the notes with all values present.

        ``brief`` selects the rows of the committed page.
        """
        filled = self._render(self.text.partition("\n### ")[0], rows, brief)
        head, *notes = re.split(r"\n- ", filled)
        lines = [line.strip("|").split("|") for line in head.splitlines() if line.startswith("|")]
        heads, _, *cells = [["" if MISSING in cell else cell.strip() for cell in line] for line in lines]
        shown = _networks_shown(rows)
        return heads, cells, [" ".join(note.split()) for note in notes if _is_supported(note, shown)]

    def claims(self, rows: Rows) -> list[Claim]:
        """Returns the claims that the rows decide, with their verdicts.

        Raises:
            ValueError: A line of the section is no claim with a verdict.
        """
        filled = self._render(self.text.partition(CLAIMS)[2].partition("\n### ")[0], rows, brief=False)
        shown = _networks_shown(rows)
        claims = []
        for line in filled.splitlines():
            if not line.startswith("|") or not _is_supported(line, shown):
                continue
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            if len(cells) != len(Claim._fields) or cells[-1] not in VERDICTS:
                raise ValueError(
                    f"{self.name}: expected a claim of {len(Claim._fields)} cells, the last of {', '.join(VERDICTS)}, "
                    f"got {line!r}"
                )
            claims.append(Claim(*cells))
        return claims

    def _render(self, text: str, rows: Rows, brief: bool) -> str:
        return TEMPLATES.from_string(text).render(self.template_values(rows), rows=rows, brief=brief)

    def draw(self, rows: Rows, path: Path) -> None:
        """Saves the pictures as PNG; the others' suffixes are added to the name of ``path``."""
        from experiments.plotting import charts  # importing Matplotlib is slow

        for suffix, chart in self.charts(rows).items():
            if self.simulated and "imulated" not in chart.title:
                chart = replace(chart, title=f"{chart.title} (simulated)")
            if chart.panels:
                charts.draw(path.with_stem(f"{path.stem}{suffix}"), chart)


@cache
def find(name: str) -> Figure:
    """Returns a figure by name; raises KeyError if no module of its paper (the name's first word) defines it."""
    for path in FOLDER.glob(f"{name.partition('_')[0]}*.py"):
        import_module(f"experiments.figures.{path.stem}")
    return Figure.by_name[name]()


@cache
def _sections() -> dict[str, Section]:
    """Returns the section of each figure on all pages."""
    sections = {}
    for page in sorted(FOLDER.glob("*.md")):
        _, *parts = re.split(r'<a id="(\w+)"></a>\n', page.read_text())
        sections |= {name: Section(page.stem, text) for name, text in zip(parts[::2], parts[1::2], strict=True)}
    return sections


def page_title(page: str) -> str:
    """Returns the heading of a page."""
    return (FOLDER / f"{page}.md").read_text().partition("\n")[0].removeprefix("# ")


@cache
def _network_pattern() -> re.Pattern[str]:
    """Returns the pattern of a network's display name, or of a family such as "ResNets"."""
    labels = {label(path.stem) for path in WORKLOADS.glob("*.yaml")}
    plain = sorted(map(re.escape, labels), key=len, reverse=True)
    return re.compile(rf"\b(?:(?:VGG|ResNet)-?\d*|{'|'.join(plain)})(?=s?\b)")


def _strings(value: Any) -> Iterator[str]:
    """Yields the strings in nested data, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from _strings(key)
            yield from _strings(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _strings(entry)


def _plain(name: str) -> str:
    return re.sub(r"\W", "", name).lower()


def _networks_shown(rows: Rows) -> set[str]:
    """Returns the plain display names of everything that the rows name."""
    return {_plain(label(word)) for word in set(_strings(rows))}


def _is_supported(text: str, shown: set[str]) -> bool:
    """Returns whether no value of a text is missing, and all networks that it names are shown."""
    named = map(_plain, _network_pattern().findall(text))
    return MISSING not in text and all(any(name.startswith(network) for name in shown) for network in named)


class Range:
    """Range of some numbers; ``{:.0%}`` formats it as "10% to 20%"."""

    def __init__(self, values: Iterable[float]) -> None:
        self.values = list(values)

    def __truediv__(self, unit: float) -> Range:
        return Range(value / unit for value in self.values)

    def __format__(self, spec: str) -> str:
        low, high = (format(extremum(self.values), spec) for extremum in (min, max))
        return low if low == high else f"{low} to {high}"


def span(values: Iterable[float | None]) -> Range | None:
    """Returns the range of the values that are not None, or None if all are."""
    numbers = [value for value in values if value is not None]
    return Range(numbers) if numbers else None


MISSING = "\0"  # what a template writes for None


class _Absent(jinja2.ChainableUndefined):
    """An entry of None, which is missing too; every other undefined name is an error."""

    def __init__(self, hint: str | None = None, obj: Any = jinja2.runtime.missing, name: Any = None, *_: Any) -> None:
        if obj is not None and not isinstance(obj, _Absent):
            raise KeyError(f"the template has an unknown name, {name!r}; let template_values return it")
        super().__init__(hint, obj, name)


def _format(value: Any, spec: str = "") -> str:
    """Formats a value, or each entry of a list."""
    if value is None or isinstance(value, _Absent):
        return MISSING
    return ", ".join(format(entry, spec) for entry in value) if isinstance(value, list) else format(value, spec)


def _in_unit(unit: float, value: Any) -> Any:
    return value if value is None or isinstance(value, _Absent) else value / unit


def _columns(values: Iterable[object], spec: str = "") -> str:
    """Formats the values as cells."""
    return " | ".join(format(value, spec) for value in values)


@jinja2.pass_context
def _brief(context: Context, rows: Rows, key: str, *values: object) -> Rows:
    """Keeps the rows with one of the values of ``key`` on the committed page, and all rows if a value has no row."""
    chosen = [row for row in rows if row[key] in values]
    is_complete = {row[key] for row in chosen} == set(values)  # else these are a user's own settings
    return chosen if context["brief"] and is_complete else rows


TEMPLATES = jinja2.Environment(undefined=_Absent, finalize=_format, trim_blocks=True, keep_trailing_newline=True)
TEMPLATES.globals |= RULES
TEMPLATES.filters |= {"f": _format, "columns": _columns, "brief": _brief, "label": label}
TEMPLATES.filters |= {
    unit: partial(_in_unit, size) for unit, size in {"MiB": 2**20, "GiB": 2**30, "GB": 10**9, "ms": 10**6}.items()
}
