"""Will it fit? The answer of ``experiments.plan`` in words and tables, for the terminal and for its pages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from agents.search.other_times import Spread
from experiments.common import report
from experiments.common.report import Row
from experiments.plan.how_to_run import Checkpoints
from experiments.plan.times import Times, percent, ranged, said as said_of
from experiments.plotting.palette import label
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.pool.card import CardPeak
from simulator.program import Program
from simulator.report import ITSELF, KINDS, Peak, Report, Unit, by_module
from simulator.timeline import Timeline

MODULES = 12  # rows of a table
FAR = 0.03  # overhead above the floor that is said to be far from it
SLOW = 6  # rows of kernels in a terminal
LITTLE = 5e-5  # overhead that counts as none
ERROR = 0.029  # of the card's peak: mean over the published points, as `python -m experiments.measured.peaks` prints it
GIB = 2**30
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
        goes_on: seconds of planning with which the search for ``planned``, which had no more time, gets further; None:
            it came to its end.
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
    goes_on: float | None = None
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
        card: the parts of what the card counts without a plan; None: not known.
        memory: bytes of the card, of which ``limit`` is left for tensors; None: the limit is a fraction of the peak of
            the tensors, which is all that counts.
        times: what is known of the kernel times; None: nothing.
        spread: what the recommended plan costs under other times; None: there is no plan, or it is not known.
        budget: seconds of planning.
        host: bytes of host memory with which there is a plan, where the machine's are too few for any; None: it is not
            the host that is too small.
        slowest: heads and rows of the table of the slowest kernels.
        run_it: lines of Python that train under the recommended plan.
        checkpoints: the recommended plan as plain PyTorch does it; None: it does more than that.
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
    budget: float = 0.0
    host: int | None = None
    slowest: tuple[list[str], list[list[str]]] = ((), ())  # type: ignore[assignment]
    run_it: str = ""
    checkpoints: Checkpoints | None = None

    @cached_property
    def size(self) -> Unit:
        """All sizes are said in one unit, with digits that tell apart what is compared."""
        need, there = self.compared
        apart = [(need, there), (self.limit, self.reached_bytes or self.least_bytes)]
        return Unit.of(need, there, self.program.peak_bytes, apart=apart)

    @property
    def compared(self) -> tuple[int, int]:
        """What is needed without a plan, and what there is: of the card or, where that is not asked, of tensors."""
        if self.card is None or self.memory is None:
            return self.program.peak_bytes, self.limit
        return self.card.nbytes, self.memory

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
    (need, there), size = a.compared, a.size
    what = "the peak is" if a.card is None or a.memory is None else "the card counts"
    if a.fits:
        part = 100 * need // there if need <= there else -(-100 * need // there)
        return f"It fits without a plan: {what} {size(need)}, {part}% of {size(there)}. Nothing is worth doing."
    more = size.text(max(size.steps(need) - size.steps(there), 0))
    over = f"{what} {size(need)}, {more} more than the {size(there)} that there are"
    if a.best is None or a.best.plan is None:
        if a.least_bytes > a.limit:
            least = f"even with every tensor away whenever it is not used the step needs {size(a.least_bytes)}"
        elif a.host is not None:
            least = (
                f"it is the host that is too small for a plan: it has {size(a.machine.host_bytes)} for what is "
                f"swapped, and {size(a.host)} would do (machine.host_bytes={-(-a.host // GIB)}GiB, if it has them)"
            )
        elif counted := [b.card[0] for b in a.families if b.timeline is not None and b.card is not None]:
            least = (
                "plans that fit the tensors leave holes that PyTorch's allocator cannot use: of those that were found "
                f"one needs {size(min(counted))} of the card; seconds={rounded_up(4 * a.budget):g} may find a tighter "
                "one"
            )
        else:
            reached = a.reached_bytes if a.reached_bytes is not None and a.reached_bytes > a.limit else None
            found = "" if reached is None else f"; the smallest limit with one is {size(reached)}"
            least = f"no plan was found{found}, and none needs less than {size(a.least_bytes)}"
        return f"It does not fit: {over}, and {least}.{_instead(a)}"
    costs = overhead(a.best)
    cost = f"takes {percent(costs)[1:]} more time" if costs >= LITTLE else "costs no time"
    return f"It fits with a plan that {cost}{ranged(a.spread)}: {over}." + (
        _instead(a) if costs > max(DEAR, a.largest.micro_overhead) else ""
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
    """Sentences about what the card counts, likely, beside the exact peak of the tensors."""
    found, size = a.card, a.size
    alone = "The memory is a fraction of the tensors' peak: what the card counts besides is not in it."
    if found is None:
        return [alone]
    loop = "the loop and the optimizer's first step" + (", CUDA's operators taking less," if found.loop < 0 else "")
    parts = [("tensors", found.tensors), (loop, found.loop),
             ("workspaces of libraries", found.workspaces), ("the CUDA context", found.context),
             ("what PyTorch's allocator rounds up and keeps", found.allocator)]  # fmt: skip
    said, before = [], 0
    for i, (name, _) in enumerate(parts):
        upto = size.steps(sum(n for _, n in parts[: i + 1]))
        said += [f"{name} {size.text(upto - before)}"] if upto != before else []
        before = upto
    lines = [
        f"The peak of the tensors, {size(found.tensors)}, is exact. Likely real on the card, as nvidia-smi counts: "
    ]
    if a.page.without.modules:
        low, high = (size(round(found.nbytes * (1 + sign * ERROR))) for sign in (-1, 1))
        lines[0] += f"{size(found.nbytes)} ({low} to {high}, by the mean error of {ERROR:.1%} on published peaks): "
    else:
        lines[0] += f"{size(found.nbytes)} and what the loop and libraries take, which a program file does not say: "
    lines[0] += f"{', '.join(said)}."
    if a.memory is not None and found.fits and found.nbytes > a.memory:
        lines.append("It fits nevertheless: PyTorch gives back what it caches before it runs out of memory.")
    if a.card_planned is not None:
        left = "" if a.memory is None else f"; of {size(a.memory)}, {size(a.limit)} are left for tensors"
        lines.append(f"Under the plan the card likely counts {size(a.card_planned)}{left}.")
    return lines if a.memory is not None else [*lines, alone]


def moves(a: Answer) -> str:
    """The recommended plan in words."""
    if a.best is None or a.best.plan is None:
        return "No plan is needed." if a.fits else "There is none."
    said, swapped = [], a.page.swapped
    if swapped:
        kinds = _listed([_tensors(m.tensors, kind) for kind, m in swapped.items()])
        out, back = (a.size(sum(getattr(m, way) for m in swapped.values())) for way in ("out_bytes", "back_bytes"))
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


def gap(a: Answer) -> list[str]:
    """A sentence where the plan is far above the floor, with what would help."""
    if a.best is None or (far := overhead(a.best) - (a.floor or 0.0)) <= FAR:
        return []
    help_ = [f"seconds={rounded_up(4 * a.budget):g} (it was {a.budget:g}) lets the searches and the floor go on"]
    if a.mode != "joint":
        help_.append("mode=joint may swap and recompute")
    return [f"The best plan there is may take up to {100 * far:.1f} points less: {'; '.join(help_)}."]


def rounded_up(seconds: float) -> float:
    """To 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(max(seconds, 1.0)))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= seconds - 1e-9)


def _listed(parts: list[str]) -> str:
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def _tensors(n: int, kind: str) -> str:
    name = "optimizer states" if kind == "optimizer_state" else KINDS[kind]
    return f"{n} {name if n != 1 else name[:-1]}"


def packed(a: Answer) -> str:
    """What the plan takes once every block has an address."""
    over = a.page.packed_bytes - a.page.limit
    end = f": {a.size(over)} over the limit, so plan for less to run it as one CUDA graph" if over > 0 else ""
    return f"With an address for every block: {a.size(a.page.packed_bytes)}{end}"


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
            lines.append(f"No plan was found that makes a larger batch fit {at}.")
        if found.goes_on is not None:
            lines[-1] += f" The search stopped there for lack of time; it goes on with seconds={found.goes_on:g}."
    if found.micro is not None:
        lines.append(
            f"Instead of a plan: {accumulation(found)} (batch norm, if there is any, sees the smaller batches)."
        )
    return lines


def overhead(best: Best) -> float:
    """Of the best plan of a family that has one."""
    assert best.timeline is not None
    return best.timeline.overhead


def methods(a: Answer) -> tuple[list[str], list[list[str]]]:
    """Heads and cells of the table of what families of methods cost; the recommended one's last cell says so."""
    heads = ["methods", "the best of them", "overhead", "moved", "run again", "peak", "planned in", ""]
    cells, size = [], a.size
    for best in a.families:
        name = label(best.row["planner"]) if best.row else "–"
        more = [label(one) for one in best.left_out]
        out = f"{more[0] if len(more) == 1 else len(more)} not tried, for lack of time" if more else ""
        if best.timeline is None:
            why = report.reason(best.row, size) if best.row else ""
            why = "; ".join(filter(None, ["the host is too small" if a.host is not None else why, out]))
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


def modules(page: Report, rows: int = MODULES) -> list[tuple[str, list[int]]]:
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
             f"a step; memory {a.size(a.memory or a.limit)}"),
        Text(verdict(a), style="bold"),
        Text(""),
    ]  # fmt: skip
    grid = Table.grid(padding=(0, 3))
    by_kind = _bytes("peak by kind", kinds(a.page), a.size)
    grid.add_row(by_kind, _bytes("by module", modules(a.page), a.size))
    lines.append(grid)
    lines.append(Text(f"The peak: {moment(a.page.without)}"))
    if a.page.planner:
        lines.append(Text(f"Under the plan: {moment(a.page.under)}"))
        lines.append(Text(packed(a)))
    lines += [Text(line) for line in (*card(a), *batches(a))]
    if a.families:
        lines.append(_table(*methods(a), numbers=range(2, 7)))
    if a.best is not None:
        lines.append(Text(f"The plan: {moves(a)}", style="bold"))
    lines += [Text(line) for line in (*gap(a), *uncertainty(a))]
    heads, rows = a.slowest
    if rows:
        lines.append(_table(heads, rows[:SLOW], numbers=range(2, 5)))
    return Group(*lines)


def _table(heads: list[str], rows: list[list[str]], numbers: range) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, head in enumerate(heads):
        if i in numbers:
            table.add_column(head, justify="right", no_wrap=True)
        else:
            table.add_column(head, overflow="fold")
    for line in rows:
        table.add_row(*line, style="bold" if line[-1] == "recommended" else "")
    return table


def _bytes(title: str, rows: list[tuple[str, list[int]]], size: Unit) -> Table:
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
