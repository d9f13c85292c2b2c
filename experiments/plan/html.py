"""The page of ``experiments.plan``: one HTML file that opens alone. It loads nothing and runs no script.

Pictures are SVG within the page, whose words are HTML beside it: they keep their size on a telephone. Colours follow
the reader's choice of light or dark. Whatever comes from outside (names of programs, modules, files) is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from experiments.common.report import MB, duration
from experiments.plan import summary as words
from experiments.plan.summary import Answer
from experiments.plotting.palette import DARK, LIGHT, label
from experiments.plotting.plots import steady_memory
from simulator.report import Unit
from simulator.timeline import Timeline

WIDTH, HEIGHT = 1000, 300  # of the picture, in its own units
MANY = 4  # columns of a table: with more, its rows are blocks on a telephone
CLASS = ' class="n"'
POINTS = 500  # of a curve, across

STYLE = """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--line); padding-bottom: .25rem; }
p { margin: .5rem 0; }
.verdict { font-size: 1.1rem; padding: .75rem 1rem; background: var(--soft); border-left: 4px solid var(--after);
  border-radius: 4px; }
.no { border-color: var(--limit); }
.faint { color: var(--faint); }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; width: 100%; }
th, td { text-align: left; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--faint); font-weight: 600; white-space: nowrap; }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; overflow-wrap: normal; }
.best td { font-weight: 700; }
.wide td:first-child { white-space: nowrap; overflow-wrap: normal; }
.wide td:last-child { min-width: 8rem; overflow-wrap: normal; }
@media (max-width: 40rem) {  /* a telephone: a row of many columns is a block of lines, each with its head */
  .many thead { display: none; }
  .many tr { display: block; padding: .4rem 0; border-bottom: 1px solid var(--line); }
  .many td { display: flex; justify-content: space-between; gap: 1rem; padding: 0; border: 0; min-width: 0; }
  .many td::before { content: attr(data-head); color: var(--faint); font-weight: 400; }
  .many td:empty { display: none; }
}
.bars { display: grid; grid-template-columns: max-content minmax(3rem, 1fr) max-content; gap: .25rem .75rem;
  align-items: center; font-size: .9rem; }
.bar { height: .55rem; border-radius: 2px; margin: 1px 0; min-width: 1px; }
.b0 { background: var(--before); } .b1 { background: var(--after); } .b2 { background: var(--limit); }
.key { display: inline-block; margin-right: 1.25rem; font-size: .9rem; }
.key i { display: inline-block; width: 1rem; height: .35rem; margin-right: .4rem; vertical-align: middle; }
.plot { display: grid; grid-template-columns: max-content 1fr; column-gap: .5rem; font-size: .8rem;
  color: var(--faint); }
.y { display: flex; flex-direction: column; justify-content: space-between; text-align: right; }
.x { grid-column: 2; display: flex; justify-content: space-between; }
svg { display: block; width: 100%; height: 16rem; border-left: 1px solid var(--line);
  border-bottom: 1px solid var(--line); }
svg path, svg line { vector-effect: non-scaling-stroke; }
pre { background: var(--soft); padding: .75rem 1rem; border-radius: 4px; overflow-x: auto; font-size: .85rem;
  overflow-wrap: normal; }
"""


def page(a: Answer, before: Timeline, after: Timeline | None, command: str) -> str:
    """The whole page.

    Args:
        before: the step without a plan.
        after: the step under the recommended plan; None: there is none.
        command: what was typed.
    """
    no = not a.fits and a.best is None
    title = f"Will {a.program.name} fit?"
    parts = [
        f"<h1>{escape(title)}</h1>",
        _p(f"{a.machine.name}, {a.size(a.memory or a.limit)}; {len(a.program.kernels):,} kernels, "
           f"{a.program.ideal_ns / 1e6:,.1f} ms a step", "faint"),
        _p(words.verdict(a), "verdict no" if no else "verdict"),
        "<h2>Memory over one step</h2>", _picture(a.limit, before, after, a.size),
        "<h2>The peak by kind</h2>", _bars(words.kinds(a.page), a.size),
        "<h2>The peak by module</h2>", _modules(a),
        "<h2>The moment of the peak</h2>",
        *(_p(f"{name}: {a.size(peak.nbytes)}, {words.moment(peak)}.")
          for name, peak in zip(("Without a plan", "Under the plan"), words.peaks_of(a.page), strict=False)),
    ]  # fmt: skip
    parts += ["<h2>What the card counts, likely</h2>", *map(_p, words.card(a))]
    if sentences := words.batches(a):
        parts += ["<h2>The largest batch</h2>", *map(_p, sentences)]
    if a.families:
        heads, cells = words.methods(a)
        proven = " The floor is proven: no plan of any method has less." if a.floor is not None else ""
        said = f"Overhead over the step in unlimited memory; bytes moved both ways in a step.{proven}"
        best = ["best" if line[-1] == "recommended" else "" for line in cells]
        parts += ["<h2>What methods cost</h2>", _table(heads, cells, range(2, 7), best), _p(said, "faint")]
    if a.best is not None:
        parts += ["<h2>The recommended plan</h2>", _p(words.moves(a)), *map(_p, words.gap(a)), _p(
            f"By {label(a.page.planner)}; it needs {a.size(a.page.least_bytes)} for tensors. {words.packed(a)}.",
            "faint")]  # fmt: skip
    if sentences := words.uncertainty(a):
        parts += ["<h2>How sure the times are</h2>", *map(_p, sentences)]
    heads, cells = a.slowest
    if cells:
        parts += ["<h2>The slowest kernels</h2>", _table(heads, cells, range(2, 5))]
    if a.checkpoints is not None:
        parts += ["<h2>The same in plain PyTorch</h2>", _p(a.checkpoints.said(a.size)),
                  f"<pre>{escape(a.checkpoints.code)}</pre>"]  # fmt: skip
    code = a.run_it or ("train as ever: no plan is needed" if a.fits else "there is no plan to run")
    parts += ["<h2>How to run it</h2>", f"<pre>{escape(code)}</pre>", _p(
        "Beside this page: "
        + ("plan.json, " if a.best else "")
        + "memory.png, results.jsonl, summary.json, and timeline.json, which opens in Perfetto (ui.perfetto.dev). "
        f"Made by {command} in {duration(a.seconds)}. All times are simulated.", "faint")]  # fmt: skip
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_colours()}{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _colours() -> str:
    """The colours as variables, by the reader's choice."""
    light, dark = ("".join(f"--{name}: {ink}; " for name, ink in inks.items()) for inks in (LIGHT, DARK))
    return f":root {{ color-scheme: light dark; {light}}}\n@media (prefers-color-scheme: dark) {{ :root {{ {dark}}} }}"


def _p(text: str, kind: str = "") -> str:
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def _bars(rows: Sequence[tuple[str, list[int]]], size: Unit) -> str:
    """A bar for each of a row's numbers, and the numbers."""
    most = max((n for _, columns in rows for n in columns), default=1) or 1
    cells = []
    for name, columns in rows:
        bars = "".join(
            f'<div class="bar b{i}" style="width:{100 * n / most:.1f}%"></div>' for i, n in enumerate(columns)
        )
        cells += [f"<div>{escape(name)}</div>", f"<div>{bars}</div>",
                  f'<div class="n">{escape(" → ".join(map(size, columns)))}</div>']  # fmt: skip
    return f'<div class="bars">{"".join(cells)}</div>'


def _modules(a: Answer) -> str:
    rows = words.modules(a.page)
    if not rows:
        return _p("Not known of a program file: only a capture knows the modules.", "faint")
    heads = ["module", "without a plan", "under the plan"][: 1 + len(rows[0][1])]
    return _table(heads, [[name, *map(a.size, columns)] for name, columns in rows], range(1, 3))


def _table(
    heads: Sequence[str], cells: Iterable[Sequence[str]], right: range, kinds: Sequence[str] | None = None
) -> str:
    """A table; the columns in ``right`` are numbers."""

    def cell(tag: str, i: int, text: str) -> str:
        head = f' data-head="{escape(heads[i])}"' if tag == "td" else ""
        return f"<{tag}{CLASS if i in right else ''}{head}>{escape(text)}</{tag}>"

    def row(tag: str, line: Sequence[str]) -> str:
        return "".join(cell(tag, i, text) for i, text in enumerate(line))

    body = "".join(
        f'<tr class="{kinds[i]}">{row("td", line)}</tr>' if kinds and kinds[i] else f"<tr>{row('td', line)}</tr>"
        for i, line in enumerate(cells)
    )
    kind = "wide many" if len(heads) > MANY else "wide"
    return f'<div class="{kind}"><table><thead><tr>{row("th", heads)}</tr></thead><tbody>{body}</tbody></table></div>'


def _picture(limit: int, before: Timeline, after: Timeline | None, size: Unit) -> str:
    """Bytes in use over one step, without and under the plan, and the limit."""
    curves = [steady_memory(t) for t in (before, after) if t is not None]
    end = max(x[-1] for x, _ in curves) or 1.0
    top = 1.05 * max(limit / MB, *(y.max() for _, y in curves))
    keys = [("b0", f"without a plan, at most {size(before.peak_bytes)}")]
    if after is not None:
        keys.append(("b1", f"under the plan, at most {size(after.peak_bytes)}"))
    keys.append(("b2", f"memory, {size(limit)}"))
    paths = [_path(x * WIDTH / end, HEIGHT - y * HEIGHT / top) for x, y in curves]
    fill = f'<path d="{paths[0]}L{curves[0][0][-1] * WIDTH / end:.1f} {HEIGHT}L0 {HEIGHT}Z" fill="var(--soft)"/>'
    strokes = "".join(
        f'<path d="{d}" fill="none" stroke="var(--{name})" stroke-width="1.5"/>'
        for d, name in zip(paths, ("before", "after"), strict=False)
    )
    y = HEIGHT - limit / MB * HEIGHT / top
    line = (
        f'<line x1="0" x2="{WIDTH}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--limit)" stroke-width="1.5" '
        'stroke-dasharray="6 4"/>'
    )
    legend = "".join(f'<span class="key"><i class="{kind}"></i>{escape(text)}</span>' for kind, text in keys)
    said = f"Memory in use over one step: {'; '.join(text for _, text in keys)}"
    return (
        f'<div>{legend}</div><div class="plot"><div class="y"><span>{size(round(top * MB))}</span><span>0</span></div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img" aria-label="{escape(said)}">'
        f'{fill}{strokes}{line}</svg><div class="x"><span>0 ms</span><span>{end:,.1f} ms</span></div></div>'
    )


def _path(x: NDArray[np.float64], y: NDArray[np.float64]) -> str:
    """Steps through points, x ascending; of many within a POINTS-th of the width, the first, highest, lowest and last
    are drawn."""
    if len(x) > 2 * POINTS:
        cells = np.minimum(x * POINTS // WIDTH, POINTS - 1)
        starts = np.flatnonzero(np.r_[True, cells[1:] != cells[:-1]])
        keep: set[int] = set()
        for begin, end in zip(starts, np.r_[starts[1:], len(x)], strict=True):
            part = y[begin:end]
            keep |= {int(begin), int(begin + part.argmin()), int(begin + part.argmax()), int(end) - 1}
        chosen = sorted(keep)
        x, y = x[chosen], y[chosen]
    steps = "".join(f"H{a:.1f}V{b:.1f}" for a, b in zip(x[1:], y[1:], strict=True))
    return f"M{x[0]:.1f} {y[0]:.1f}{steps}"
