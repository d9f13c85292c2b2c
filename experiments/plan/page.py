"""Rendering of the answer of ``experiments.plan``: one list of sections, as an HTML page and as terminal text.

The page is a self-contained HTML file without scripts. Plots are inline SVG with HTML labels, which keep their size on
small screens. Colors follow the reader's light or dark mode. External text (names of programs, modules, files) is
escaped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from experiments.common.report import MIB, duration
from experiments.plan import words
from experiments.plan.answer import Answer
from experiments.plotting.palette import DARK, LIGHT, label
from experiments.plotting.plots import steady_memory
from simulator.program import Phase, Program
from simulator.report import KINDS, MODEL_ITSELF, Unit, by_module
from simulator.timeline import Timeline

# of the plot, in SVG units
WIDTH = 1000
HEIGHT = 300
POINTS = 500  # horizontal resolution of a curve
NEAR_END = 0.85  # of the width: labels of later lines are to their left
PHASES: dict[Phase, str] = {"forward": "forward", "backward": "backward", "optimizer": "update"}
PEAK = "The peak"  # the section below the plot
CHOSEN = "recommended"  # last cell of the row in bold


class Table(NamedTuple):
    """Table; ``numbers`` are the numeric columns."""

    heads: Sequence[str]
    cells: Sequence[Sequence[str]]
    numbers: range


class Bars(NamedTuple):
    """Bytes by name in one or two columns: bars on the page, a table in a terminal."""

    heads: Sequence[str]
    rows: Sequence[tuple[str, Sequence[int]]]


class Code(str):
    """Python code."""


Part = str | Table | Bars


class Section(NamedTuple):
    """Part of the page with its title; ``page_only``: omitted in a terminal."""

    title: str
    parts: Sequence[Part]
    page_only: bool = False


def sections(a: Answer, command: str) -> Iterator[Section]:
    """Yields the sections below the verdict; ``command`` is the typed command."""
    size = a.size
    page = a.page
    peaks = (page.without, page.under) if page.planner else (page.without,)
    heads = ("without a plan", "under the plan")[: len(peaks)]
    parts: list[Part] = [
        Bars(
            ["peak by kind", *heads],
            [(KINDS[k], [p.kinds.get(k, 0) for p in peaks]) for k in KINDS if any(k in p.kinds for p in peaks)],
        )
    ]
    if page.without.modules:
        names, columns = by_module(peaks, 12)
        cells = [[name or MODEL_ITSELF, *(size(column.get(name, 0)) for column in columns)] for name in names]
        parts.append(Table(["by module", *heads], cells, range(1, 3)))
    else:
        parts.append("Modules are unknown for a program file; plan from target= or workload= to see them.")
    for head, peak in zip(heads, peaks, strict=True):
        parts.append(f"{head.capitalize()}: {size(peak.nbytes)} in {peak.moment}.")
    peak_section = Section(PEAK, parts)
    code = a.run_code or ("train as usual: no plan is needed" if a.fits else "there is no plan to run")
    yield Section("How to run it", [Code(code), *words.batches(a), *words.sequences(a)])
    if a.what_if:
        text = (
            "Simulated; without a plan as PyTorch runs it. Time is over that of the step in unlimited memory. A plan "
            "checkpoints and offloads where that is cheapest."
        )
        yield Section("What if", [Table(*words.what_if(a), range(1, 3)), *words.adapters(a), text, words.how(a)])
    yield peak_section
    yield Section("Estimated device memory", words.card(a))
    yield Section("Optimizer in the backward pass", words.update_order(a))
    if a.families:
        proven = " The floor is a certified lower bound for every plan." if a.floor is not None else ""
        text = f"Overhead relative to the step in unlimited memory; bytes swapped per step in both directions.{proven}"
        yield Section("Overhead by method", [Table(*words.methods(a), range(2, 7)), text])
    if a.best is not None:
        text = f"By {label(page.planner)}; it needs {size(page.least_bytes)} for tensors. {words.packed_summary(a)}."
        yield Section("The recommended plan", [f"The plan: {words.plan_summary(a)}", *words.gap_hints(a), text])
    yield Section("Uncertainty of the times", words.uncertainty(a))
    if a.slowest[1]:
        yield Section("Slowest kernels", [Table(*a.slowest, range(2, 5))], True)
    if a.checkpoints is not None:
        yield Section("Equivalent in plain PyTorch", [a.checkpoints.describe(size), Code(a.checkpoints.code)], True)
    yield Section(
        "Files",
        [
            (
                f"Files in this folder: {'plan.json, ' if a.best else ''}memory.png, results.jsonl, summary.json, and "
                f"timeline.json, which opens in Perfetto (ui.perfetto.dev). "
                f"Created by {command} in {duration(a.seconds)}. "
                "All times are simulated."
            ),
        ],
        True,
    )


# ------------------------------------------------------------------------------------ terminal


def render_text(a: Answer) -> RenderableType:
    """Renders the answer for a terminal."""
    lines: list[RenderableType] = [
        Text(f"{a.program.name} on {_headline(a)}"),
        Text(words.verdict(a), style="bold"),
        Text(""),
    ]
    if a.folder is not None:
        lines += [Text(f"The page: {a.folder / 'report.html'}"), Text("")]
    for section in sections(a, ""):
        if section.page_only:
            continue
        grid = RichTable.grid(padding=(0, 3))
        tables = [_rich(part, a.size) for part in section.parts if isinstance(part, (Table, Bars))]
        if tables:
            grid.add_row(*tables)
            lines.append(grid)
        lines += [
            Text(part, style="cyan" if isinstance(part, Code) else "")
            for part in section.parts
            if isinstance(part, str)
        ]
    return Group(*lines)


def _rich(part: Table | Bars, size: Unit) -> RichTable:
    if isinstance(part, Bars):
        cells = [[name, *map(size, columns)] for name, columns in part.rows]
        part = Table(part.heads, cells, range(1, len(part.heads)))
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, head in enumerate(part.heads):
        right = i in part.numbers
        table.add_column(head, justify="right" if right else "left", no_wrap=right, overflow="fold")
    for line in part.cells:
        table.add_row(*line, style="bold" if line[-1] == CHOSEN else "")
    return table


def _headline(a: Answer) -> str:
    return (
        f"{a.machine.name}, {a.size(a.memory or a.limit)}: {len(a.program.kernels):,} kernels, "
        f"{a.program.ideal_ns / 1e6:,.1f} ms a step"
    )


# ------------------------------------------------------------------------------------------ HTML


def render_html(a: Answer, command: str) -> str:
    """Renders the HTML page; ``command`` is the typed command."""
    title = f"Will {a.program.name} fit?"
    no = not a.fits and a.best is None
    parts = [
        f"<h1>{escape(title)}</h1>",
        _p(_headline(a), "faint"),
        _p(words.verdict(a), "verdict no" if no else "verdict"),
    ]
    for section in sections(a, command):
        if section.title == PEAK:
            parts += ["<h2>Memory over one step</h2>", _picture(a)]
        if section.parts:
            parts += [f"<h2>{escape(section.title)}</h2>", *(_html(part, a.size) for part in section.parts)]
    style = _colors() + Path(__file__).with_name("page.css").read_text()
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _html(part: Part, size: Unit) -> str:
    if isinstance(part, Code):
        return f"<pre>{escape(part)}</pre>"
    if isinstance(part, str):
        return _p(part)
    return _table(part) if isinstance(part, Table) else _p(part.heads[0], "faint") + _bars(part.rows, size)


def _colors() -> str:
    """Returns the colors as CSS variables for light and dark mode."""
    light, dark = ("".join(f"--{name}: {ink}; " for name, ink in inks.items()) for inks in (LIGHT, DARK))
    return f":root {{ color-scheme: light dark; {light}}}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}"


def _p(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def _bars(rows: Sequence[tuple[str, Sequence[int]]], size: Unit) -> str:
    """Renders a bar and a label for each number of a row."""
    largest = max((n for _, columns in rows for n in columns), default=1) or 1
    cells = []
    for name, columns in rows:
        bars = "".join(
            f'<div class="bar b{i}" style="width:{100 * n / largest:.1f}%"></div>' for i, n in enumerate(columns)
        )
        cells += [
            f"<div>{escape(name)}</div>",
            f"<div>{bars}</div>",
            f'<div class="n">{escape(" → ".join(map(size, columns)))}</div>',
        ]
    return f'<div class="bars">{"".join(cells)}</div>'


def _table(table: Table) -> str:
    def row(tag: str, line: Sequence[str]) -> str:
        cells = []
        for i, text in enumerate(line):
            head = f' data-head="{escape(table.heads[i])}"' if tag == "td" else ""
            number = ' class="n"' if i in table.numbers else ""
            cells.append(f"<{tag}{number}{head}>{escape(text)}</{tag}>")
        best = ' class="best"' if line[-1] == CHOSEN else ""
        return f"<tr{best}>{''.join(cells)}</tr>"

    kind = "wide many" if len(table.heads) > 4 else "wide"  # rows become blocks on small screens
    body = "".join(row("td", line) for line in table.cells)
    return f'<div class="{kind}"><table><thead>{row("th", table.heads)}</thead><tbody>{body}</tbody></table></div>'


def _picture(a: Answer) -> str:
    """Plots memory over one step, unplanned and planned, with the limit."""
    limit = a.limit
    size = a.size
    before = a.before
    after = a.after
    curves = [steady_memory(t) for t in (before, after) if t is not None]
    end = max(x[-1] for x, _ in curves) or 1.0
    top = 1.05 * max(limit / MIB, *(y.max() for _, y in curves))
    keys = [("b0", f"without a plan, at most {size(before.peak_bytes)}")]
    if after is not None:
        keys.append(("b1", f"under the plan, at most {size(after.peak_bytes)}"))
    keys.append(("b2", f"limit for tensors, {size(limit)}"))
    paths = [_path(x * WIDTH / end, HEIGHT - y * HEIGHT / top) for x, y in curves]
    fill = f'<path d="{paths[0]}L{curves[0][0][-1] * WIDTH / end:.1f} {HEIGHT}L0 {HEIGHT}Z" fill="var(--soft)"/>'
    strokes = "".join(
        f'<path d="{d}" fill="none" stroke="var(--{name})" stroke-width="1.5"/>'
        for d, name in zip(paths, ("before", "after"), strict=False)
    )
    y = HEIGHT - limit / MIB * HEIGHT / top
    lines = (
        f'<line x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--limit)" stroke-width="1.5" '
        'stroke-dasharray="6 4"/>'
    )
    labels = f'<span class="limit" style="top:{100 * y / HEIGHT:.1f}%">limit {escape(size(limit))}</span>'
    for start, phase in _phases(a.program, after or before):
        x = start * WIDTH / end
        lines += f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{HEIGHT}" stroke="var(--faint)" stroke-dasharray="2 3"/>'
        side = "phase left" if x > NEAR_END * WIDTH else "phase"
        labels += f'<span class="{side}" style="left:{100 * x / WIDTH:.1f}%">{PHASES[phase]}</span>'
    legend = "".join(f'<span class="key"><i class="{kind}"></i>{escape(text)}</span>' for kind, text in keys)
    caption = f"Memory in use over one step: {'; '.join(text for _, text in keys)}"
    return (
        f'<div>{legend}</div><div class="plot"><div class="y"><span>{size(round(top * MIB))}</span><span>0</span></div>'
        '<div class="canvas">'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{escape(caption)}">'
        f"{fill}{strokes}{lines}</svg>{labels}</div>"
        f'<div class="x"><span>0 ms</span><span>{end:,.1f} ms</span></div></div>'
    )


def _phases(program: Program, timeline: Timeline) -> Iterator[tuple[float, Phase]]:
    """Yields start in ms and name of each phase of the last iteration.

    The update begins after the last kernel of the backward pass; updates within that pass are no phase of their own.
    """
    begin = timeline.last_start_ns
    kernels = [s for s in timeline.spans if s.stream == "compute" and s.kind == "kernel" and s.start_ns >= begin]
    phases = [program.kernels[span.index].phase for span in kernels]
    first = 0
    for phase in PHASES:
        if phase == "optimizer" and "backward" in phases:
            first = len(phases) - phases[::-1].index("backward")
        if phase in phases[first:]:
            yield (kernels[phases.index(phase, first)].start_ns - begin) / 1e6, phase


def _path(x: NDArray[np.float64], y: NDArray[np.float64]) -> str:
    """Returns an SVG step path through points, x ascending.

    Within each POINTS-th of the width only the first, highest, lowest and last point are kept.
    """
    if len(x) > 2 * POINTS:
        cells = np.minimum(x * POINTS // WIDTH, POINTS - 1)
        starts = np.flatnonzero(np.r_[True, cells[1:] != cells[:-1]])
        keep: set[int] = set()
        for begin, end in zip(starts, np.r_[starts[1:], len(x)], strict=True):
            part = y[begin:end]
            keep |= {int(begin), int(begin + part.argmin()), int(begin + part.argmax()), int(end) - 1}
        chosen = sorted(keep)
        x = x[chosen]
        y = y[chosen]
    steps = "".join(f"H{a:.1f}V{b:.1f}" for a, b in zip(x[1:], y[1:], strict=True))
    return f"M{x[0]:.1f} {y[0]:.1f}{steps}"
