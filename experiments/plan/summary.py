"""Will it fit? The answer of ``experiments.plan`` in words and tables, for the terminal and for its pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agents.search.other_times import Spread
from experiments.common import report
from experiments.common.report import Row
from experiments.plan.times import Times, ranged, said as said_of
from experiments.plotting.palette import label
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.pool.card import CardPeak
from simulator.program import Program
from simulator.report import ITSELF, KINDS, Peak, Report, by_module, size
from simulator.timeline import Timeline

MODULES = 8  # rows of a table in a terminal
LITTLE = 5e-5  # overhead that counts as none
ERROR = 0.029  # of the card's peak: mean over the published points, as `python -m experiments.measured.peaks` prints it
DEAR = 1.0  # overhead above which a plan is not what to do first


@dataclass(frozen=True)
class Best:
    """The best plan of a family of methods.

    Attributes:
        row: of results.jsonl; of a family without a plan that of the method which came nearest.
        plan: None where there is none.
        timeline: of the plan.
        seconds: that all methods of the family took.
        left_out: methods that there was no time for.
        card: bytes that the card counts under the plan, and whether its allocator serves it; None: only tensors count.
    """

    family: str
    row: Row | None
    plan: Plan | None
    timeline: Timeline | None
    seconds: float
    left_out: tuple[str, ...] = ()
    card: tuple[int, bool] | None = None

    @property
    def served(self) -> bool:
        """There is a plan, and it fits the card, not its tensors alone."""
        return self.timeline is not None and (self.card is None or self.card[1])


@dataclass(frozen=True)
class Largest:
    """The largest batch, and smaller ones whose gradients are added up.

    Attributes:
        own: examples of the step as it was given; None: not known.
        without: the largest batch without a plan; 0: none.
        planned: a batch that fits with a plan of ``planner`` at an overhead of at most ``most_overhead``, the largest
            that was found; None: not looked for.
        checked: the peak at ``without`` was captured, too, and is as foretold.
        micro: size and number of micro-batches that make up the own batch and fit without a plan, gradients held;
            None: there are none, or nothing needs to be split.
        micro_overhead: what they cost, of the ideal time.
        most: nothing larger was looked at.
        why: why nothing is known, a sentence; "" where it is.
    """

    own: int | None = None
    without: int = 0
    planned: int | None = None
    planner: str = ""
    most_overhead: float = 0.0
    checked: bool = False
    micro: tuple[int, int] | None = None
    micro_overhead: float = 0.0
    most: int = 0
    why: str = ""


@dataclass(frozen=True)
class Answer:
    """What ``experiments.plan`` found.

    Attributes:
        page: under the recommended plan; without one, of the step as it is.
        families: in the order of the table; empty where nothing is to be planned.
        best: the one that is recommended; None: it fits without a plan, or with none.
        least_bytes: no plan fits less memory.
        reached_bytes: the smallest limit with a plan that was found; None: not looked for.
        floor: no plan has a lower overhead; None: not known.
        seconds: of wall-clock time, all in all.
        card: the parts of what the card counts without a plan, where ``memory`` is bytes of the card, of which
            ``limit`` is left for tensors; None: the limit is a fraction of the tensors' peak.
        times: what is known of the kernel times; None: nothing.
        spread: what the recommended plan costs under other times; None: there is no plan, or it is not known.
    """

    program: Program
    machine: Machine
    limit: int
    mode: str
    page: Report
    families: tuple[Best, ...]
    best: Best | None
    least_bytes: int
    reached_bytes: int | None
    floor: float | None
    largest: Largest
    seconds: float
    card: CardPeak | None = None
    memory: int | None = None
    times: Times | None = None
    spread: Spread | None = None

    @property
    def fits(self) -> bool:
        """Without a plan."""
        return self.program.peak_bytes <= self.limit

    @property
    def card_planned(self) -> int | None:
        """What the card counts under the recommended plan: its blocks by PyTorch's allocator, the rest as without."""
        return None if self.best is None or self.best.card is None else self.best.card[0]


def verdict(a: Answer) -> str:
    """The answer in a sentence or two."""
    of_card = a.card is not None and a.memory is not None
    need, there = (a.card.nbytes, a.memory) if of_card else (a.program.peak_bytes, a.limit)  # type: ignore[union-attr]
    what = "the card counts" if of_card else "the peak is"
    if a.fits:
        return (
            f"It fits without a plan: {what} {size(need)}, {need / there:.0%} of {size(there)}. Nothing is worth doing."
        )
    over = f"{what} {size(need)}, {size(max(need - there, 0))} more than the {size(there)} that there are"
    if a.best is None or a.best.plan is None:
        if a.least_bytes > a.limit:
            least = f"even with every tensor away whenever it is not used the step needs {size(a.least_bytes)}"
        else:
            found = "" if a.reached_bytes is None else f"; the smallest limit with one is {size(a.reached_bytes)}"
            least = f"no plan was found{found}, and none needs less than {size(a.least_bytes)}"
        return f"It does not fit: {over}, and {least}.{_instead(a)}"
    more = overhead(a.best)
    cost = f"takes {percent(more)[1:]} more time" if more >= LITTLE else "costs no time"
    return f"It fits with a plan that {cost}{ranged(a.spread)}: {over}." + (
        _instead(a) if overhead(a.best) > max(DEAR, a.largest.micro_overhead) else ""
    )


def _instead(a: Answer) -> str:
    """What to do where a plan is no help."""
    if a.largest.micro is None:
        smaller = a.largest.own is not None and 0 < a.largest.without < a.largest.own
        return f" Without a plan a batch of {a.largest.without} fits." if smaller else ""
    return f" A smaller batch is likely the better way: {accumulation(a.largest)}."


def accumulation(found: Largest) -> str:
    """Micro-batches in words."""
    assert found.micro is not None
    each, count = found.micro
    return f"{count} batches of {each}, their gradients added up, fit and cost about {percent(found.micro_overhead)}"


def card(a: Answer) -> list[str]:
    """Sentences about what the card counts, in parts; of tensors alone it is said that they are all."""
    if a.card is None:
        return ["The memory is a fraction of the tensors' peak: what the card counts besides is not in it."]
    found, known = a.card, a.page.without.modules
    parts = [("tensors", found.tensors), ("the loop and the optimizer's first step", found.loop),
             ("workspaces", found.workspaces), ("the allocator", found.allocator),
             ("the CUDA context", found.context)]  # fmt: skip
    text = ", ".join(f"{name} {size(nbytes)}" for name, nbytes in parts if nbytes)
    lines = [f"The card counts {size(found.nbytes)} of {size(a.memory or 0)}: {text}"]
    lines[0] += f" (mean error {ERROR:.1%} on published peaks)." if known else "; of a program file no more is known."
    if found.fits and found.nbytes > (a.memory or 0):
        lines.append("It fits nevertheless: PyTorch gives back what it caches before it runs out of memory.")
    if a.card_planned is not None:
        lines.append(f"Under the plan it counts {size(a.card_planned)}; {size(a.limit)} of it are left for tensors.")
    return lines


def moves(a: Answer) -> str:
    """The recommended plan in words."""
    if a.best is None or a.best.plan is None:
        return "No plan is needed." if a.fits else "There is none."
    said, swapped = [], a.page.swapped
    if swapped:
        kinds = _listed([_tensors(m.tensors, kind) for kind, m in swapped.items()])
        out, back = (size(sum(getattr(m, way) for m in swapped.values())) for way in ("out_bytes", "back_bytes"))
        said.append(f"swap {kinds}, {out}" + ("" if out == back else f" out and {back} back"))
    again = sum(r.kernels for r in a.page.rerun.values())
    if again:
        ns = sum(r.duration_ns for r in a.page.rerun.values())
        said.append(f"run {again} kernel{'s' if again != 1 else ''} again, {report.duration(ns / 1e9)}")
    text = "; ".join([*said, percent(overhead(a.best))])
    return text[0].upper() + text[1:] + f"; {_floor(a)}."


def _floor(a: Answer) -> str:
    if a.best is not None and overhead(a.best) < LITTLE:
        return "no plan is faster"
    if a.floor is None or a.floor < LITTLE:
        return "no floor above 0 was proven in this time"
    return f"no plan can be below {percent(a.floor)}"


def _listed(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def _tensors(n: int, kind: str) -> str:
    name = "optimizer states" if kind == "optimizer_state" else KINDS[kind]
    return f"{n} {name if n != 1 else name[:-1]}"


def moment(peak: Peak) -> str:
    """When and where a peak is, in words."""
    module, line = peak.place or ("", "")
    where = [f"in module {module}" if module else "", f"at {line}" if line else ""]
    return ", ".join([f"kernel {peak.kernel} ({peak.name}), {peak.phase}", *filter(None, where)])


def uncertainty(a: Answer) -> list[str]:
    """Sentences about the kernel times."""
    if a.times is None:
        return []
    sure = a.spread is None or a.times.error is None
    return [a.times.said] if sure else [a.times.said, said_of(a.spread, a.times.error)]  # type: ignore[arg-type]


def batches(a: Answer) -> list[str]:
    """Sentences about the largest batch."""
    found = a.largest
    if found.why:
        return [f"The largest batch is not known: {found.why}."]
    if found.own is None:
        return []
    known = "checked by a capture" if found.checked else f"foretold from captures at {found.own} and {2 * found.own}"
    most = f"at least {found.without}" if found.without == found.most else f"{found.without}"
    if found.without:
        lines = [f"The largest batch without a plan is {most} ({known}); the step's own is {found.own}."]
    else:
        lines = [f"Without a plan not even a batch of 1 fits; the step's own is {found.own}."]
    if found.planned is not None:
        at = f"at no more than {percent(found.most_overhead)}"
        if found.planned > found.without:
            lines.append(f"With a plan it is at least {found.planned}, {at} (by {label(found.planner)}).")
        else:
            lines.append(f"A plan makes no larger batch fit {at}.")
    if found.micro is not None:
        lines.append(
            f"Instead of a plan: {accumulation(found)} (batch norm, if there is any, sees the smaller batches)."
        )
    return lines


def overhead(best: Best) -> float:
    """Of the best plan of a family that has one."""
    assert best.timeline is not None
    return best.timeline.overhead


def percent(part: float) -> str:
    """An overhead for people."""
    return f"{'+' if part >= 0 else '−'}{abs(part):.2%}" if abs(part) < 0.1 else f"{part:+.1%}".replace("-", "−")


def methods(a: Answer) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of the table of what families of methods cost; the recommended one's last cell says so."""
    heads = ["methods", "the best of them", "overhead", "moved", "run again", "peak", "planned in", ""]
    cells = []
    for best in a.families:
        name = label(best.row["planner"]) if best.row else "–"
        out = f"no time for {len(best.left_out)} more" if best.left_out else ""
        if best.timeline is None:
            why = "; ".join(filter(None, [report.reason(best.row) if best.row else "", out]))
            cells.append([best.family, name, "–", "–", "–", "–", report.duration(best.seconds), why])
            continue
        moved = sum(
            a.program.tensors[s.index].nbytes
            for s in best.timeline.spans
            if s.stream != "compute" and s.start_ns >= best.timeline.last_start_ns
        )
        again = best.timeline.breakdown.recompute_ns
        said = "recommended" if best is a.best else out if best.served else "too fragmented for the card"
        cells.append([
            best.family, name, percent(best.timeline.overhead), size(moved) if moved else "–",
            report.duration(again / 1e9) if again else "–", size(best.timeline.peak_bytes),
            report.duration(best.seconds), said,
        ])  # fmt: skip
    if a.floor is not None:
        cells.append(["no plan has less", "", percent(a.floor), "", "", "", "", "the floor"])
    return heads, cells


def kinds(page: Report) -> list[tuple[str, list[int]]]:
    """Bytes by kind of tensor, without a plan and, where there is one, under it."""
    peaks = peaks_of(page)
    return [(KINDS[k], [p.kinds.get(k, 0) for p in peaks]) for k in KINDS if any(k in p.kinds for p in peaks)]


def modules(page: Report, rows: int) -> list[tuple[str, list[int]]]:
    """The same by module, in at most so many rows; [] where places are not known."""
    if not page.without.modules:
        return []
    names, columns = by_module(peaks_of(page), rows)
    return [(name or ITSELF, [column.get(name, 0) for column in columns]) for name in names]


def peaks_of(page: Report) -> Sequence[Peak]:
    """Without a plan and, where there is one, under it."""
    return (page.without, page.under) if page.planner else (page.without,)


def shown(a: Answer) -> RenderableType:
    """All of it for a terminal."""
    program = a.program
    lines: list[RenderableType] = [
        Text(f"{program.name} on {a.machine.name}: {len(program.kernels):,} kernels, {program.ideal_ns / 1e6:,.1f} ms "
             f"a step; memory {size(a.memory or a.limit)}"),
        Text(verdict(a), style="bold"),
        Text(""),
    ]  # fmt: skip
    grid = Table.grid(padding=(0, 3))
    grid.add_row(_bytes("peak by kind", kinds(a.page)), _bytes("by module", modules(a.page, MODULES)))
    lines.append(grid)
    lines.append(Text(f"The peak: {moment(a.page.without)}"))
    if a.page.planner:
        lines.append(Text(f"Under the plan: {moment(a.page.under)}"))
    lines += [Text(line) for line in (*card(a), *batches(a))]
    if a.families:
        heads, cells = methods(a)
        table = Table(*heads[:2], box=box.SIMPLE_HEAD, pad_edge=False)
        for head in heads[2:-1]:
            table.add_column(head, justify="right", no_wrap=True)
        table.add_column(heads[-1], overflow="fold")
        for line in cells:
            table.add_row(*line, style="bold" if line[-1] == "recommended" else "")
        lines.append(table)
    if a.best is not None:
        lines.append(Text(f"The plan: {moves(a)}", style="bold"))
    lines += [Text(line) for line in uncertainty(a)]
    return Group(*lines)


def _bytes(title: str, rows: list[tuple[str, list[int]]]) -> Table:
    table = Table(title, box=box.SIMPLE_HEAD, pad_edge=False)
    if rows:
        for head in ("without", "planned")[: len(rows[0][1])]:
            table.add_column(head, justify="right", no_wrap=True)
    else:
        table.add_column("")
        table.add_row("not known of a program file", "")
    for name, columns in rows:
        table.add_row(name, *(size(n) for n in columns))
    return table
