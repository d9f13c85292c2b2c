"""One-page report of a training step: memory peak, moved tensors, recomputed kernels and their cost.

All figures come from simulator timelines of the step with and without a plan. ``executor.report`` simulates these
timelines and adds the source locations of a capture's kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from simulator.machine import Machine
from simulator.plan import Plan, Swap
from simulator.program import Phase, Program
from simulator.timeline import Breakdown, Timeline

MODEL_ITSELF = "(the model itself)"  # module name of the model's own kernels
KINDS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "optimizer_state": "optimizer state",
    "input": "inputs",
    "gradient": "gradients",
    "activation": "activations",
    "workspace": "workspace",
}


class Place(NamedTuple):
    """Source location of a kernel."""

    module: str  # dotted path, "" for the model itself; outside modules: "loss_fn", "step" or "optimizer"
    line: str  # "package/file.py:12"; "" if no line of user code is known


class Origins(NamedTuple):
    """Source locations of a program's kernels and tensors."""

    places: tuple[Place, ...]  # per kernel
    owners: tuple[str, ...]  # per tensor: the path of a module, or "inputs"


@dataclass(frozen=True)
class Peak:
    """First moment of a step at which memory use is highest."""

    nbytes: int
    kernel: int  # index of the kernel that runs (or waits) at the peak
    name: str
    phase: Phase
    place: Place | None  # source location of the kernel; None for a program that was not captured here
    kinds: dict[str, int]  # bytes by kind of tensor, and "workspace"; they sum to ``nbytes``
    modules: dict[str, int]  # bytes by module path, with the same sum; {} if source locations are unknown

    def __str__(self) -> str:
        return f"{size(self.nbytes)} in {self.moment}"

    @property
    def moment(self) -> str:
        """Kernel that runs at the peak, with its source location."""
        module, line = self.place or ("", "")
        location = "".join((f" of {module}" if module else "", f" ({line})" if line else ""))
        return f"kernel {self.kernel}, {self.name}, {self.phase}{location}"


class Moved(NamedTuple):
    """Swapped tensors of one kind in one step."""

    tensors: int
    out_bytes: int  # to the host
    back_bytes: int


class Rerun(NamedTuple):
    """Recomputed kernels of one kind in one step."""

    kernels: int
    duration_ns: int


@dataclass(frozen=True)
class Report:
    """Effect of a plan on a step.

    Attributes:
        program: Name of the program.
        machine: Name of the machine.
        limit: Memory limit in bytes.
        planner: Key of the planner; "" without decisions.
        persistent_bytes: Bytes of persistent tensors.
        least_bytes: Smallest limit in bytes at which the plan is feasible.
        without: Peak without a plan.
        under: Peak under the plan.
        swapped: Swapped tensors and bytes per step, by kind of tensor.
        rerun: Recomputed kernels and their duration, by kind of kernel.
        iteration_ns: Predicted time of an iteration.
        ideal_ns: Time without evictions and recomputation.
        breakdown: Parts of ``iteration_ns`` by cause.
        floor_ns: Certified lower bound of the iteration time at this limit; None: unknown.
        packed_bytes: Memory with a fixed address for every block, under the plan if any.
        issued: How the step runs ("as one CUDA graph"); "" if it is not executed.
    """

    program: str
    machine: str
    limit: int
    planner: str
    persistent_bytes: int
    least_bytes: int
    without: Peak
    under: Peak
    swapped: dict[str, Moved]
    rerun: dict[str, Rerun]
    iteration_ns: int
    ideal_ns: int
    breakdown: Breakdown
    floor_ns: int | None
    packed_bytes: int
    issued: str = ""

    @property
    def overhead(self) -> float:
        """Iteration time over ideal time, minus 1."""
        return self.iteration_ns / self.ideal_ns - 1 if self.ideal_ns else 0.0

    def __str__(self) -> str:
        peaks = (self.without, self.under) if self.planner else (self.without,)
        lines = [
            f"{self.program} on {self.machine}: limit {size(self.limit)}, of which {size(self.persistent_bytes)} are "
            "persistent",
            "",
            f"peak without a plan: {self.without}",
        ]
        if self.planner:
            lines.append(f"peak under the plan: {self.under}")
        elif self.without.nbytes <= self.limit:
            lines.append("the step fits without a plan")
        else:
            lines.append("the step does not fit without a plan, and no plan is given")
        if self.planner or self.without.nbytes <= self.limit:
            verdict = "" if self.packed_bytes <= self.limit else ", more than the limit: plan for a lower limit"
            lines.append(f"with fixed addresses it takes {size(self.packed_bytes)}{verdict}")
        lines += [
            "",
            *_table("kind", [k for k in KINDS if any(k in p.kinds for p in peaks)], [p.kinds for p in peaks], KINDS),
        ]
        if self.without.modules:
            names, columns = by_module(peaks)
            lines += ["", *_table("module", names, columns, {"": MODEL_ITSELF})]
        return "\n".join([*lines, "", *(self._plan() if self.planner else ()), *self._times()])

    def _plan(self) -> Iterable[str]:
        yield f"plan of {self.planner}, which needs {size(self.least_bytes)}:"
        for kind, moved in self.swapped.items():
            tensors = _count(moved.tensors, "tensor")
            out = size(moved.out_bytes)
            back = size(moved.back_bytes)
            yield f"  swap {KINDS[kind]}: {tensors}; per step {out} swapped out, {back} swapped in"
        if self.rerun:
            kernels = _count(sum(r.kernels for r in self.rerun.values()), "kernel")
            kinds = ", ".join(f"{r.kernels} {kind} {_time(r.duration_ns)}" for kind, r in self.rerun.items())
            yield f"  recompute: {kernels} ({kinds})"

    def _times(self) -> Iterable[str]:
        parts = self.breakdown
        losses = {
            "recomputation": parts.recompute_ns,
            "waits for memory": parts.stall_memory_ns,
            "waits for data": parts.stall_data_ns,
            "waits for the host": parts.stall_issue_ns,
        }
        causes = ", ".join(f"{cause} {_time(ns)}" for cause, ns in losses.items() if ns)
        yield (
            f"predicted: {_time(self.iteration_ns)} a step, {self.overhead:.2%} over the ideal {_time(self.ideal_ns)}"
            + (f" ({causes})" if causes else "")
        )
        if self.floor_ns is not None:
            overhead = self.floor_ns / self.ideal_ns - 1 if self.ideal_ns else 0.0
            yield f"floor: every plan takes at least {_time(self.floor_ns)}, {overhead:.2%} over the ideal"
        if self.issued:
            yield f"runs {self.issued}"


def report(
    program: Program,
    machine: Machine,
    limit: int,
    packed_bytes: int,
    base: Timeline,
    planned: Timeline | None = None,
    plan: Plan | None = None,
    floor_ns: int | None = None,
    origins: Origins | None = None,
    issued: str = "",
) -> Report:
    """Returns the report of ``plan`` on a step, or of the unplanned step.

    Args:
        program: The step.
        machine: Machine of both timelines.
        limit: memory limit in bytes.
        packed_bytes: packed size of the executed timeline (``simulator.pool.packed.packed_bytes``).
        base: timeline of the step without a plan.
        planned: timeline under the plan; None without a plan or without decisions.
        plan: Plan of ``planned``; None: the step runs without a plan.
        floor_ns: as in ``agents.floor.floor``.
        origins: None for a program that was not captured here.
        issued: how the step runs; "" if it is not executed.

    Returns:
        The report, with bytes and ns as in ``Timeline``.
    """
    timeline = planned or base
    without = _peak(program, origins, base)
    return Report(
        program.name,
        machine.name,
        limit,
        (plan.planner or "the caller") if plan is not None and planned else "",
        sum(t.nbytes for t in program.tensors if t.persistent),
        timeline.required_bytes,
        without,
        _peak(program, origins, planned) if planned else without,
        _swap_totals(program, plan, timeline) if plan is not None else {},
        _recompute_totals(program, timeline),
        timeline.iteration_ns,
        program.ideal_ns,
        timeline.breakdown,
        floor_ns,
        packed_bytes,
        issued,
    )


def _peak(program: Program, origins: Origins | None, timeline: Timeline) -> Peak:
    time_ns, held = timeline.peak
    k = timeline.span_at(time_ns).index
    kinds = timeline.peak_by(lambda owner: program.tensors[owner].kind if owner >= 0 else "workspace")
    modules: dict[str, int] = {}
    if origins is not None:
        places, owners = origins
        modules = timeline.peak_by(lambda owner: owners[owner] if owner >= 0 else places[-1 - owner].module)
    kernel = program.kernels[k]
    place = origins.places[k] if origins is not None else None
    return Peak(sum(held.values()), k, kernel.name, kernel.phase, place, kinds, modules)


def _swap_totals(program: Program, plan: Plan, timeline: Timeline) -> dict[str, Moved]:
    """Returns the tensors swapped in the last iteration by kind, most bytes first."""
    tensors: defaultdict[str, set[int]] = defaultdict(set)
    plan.only("the report", "swap", "recompute", "rerun")
    for d in plan.of_kind(Swap):
        tensors[program.tensors[d.tensor].kind].add(d.tensor)
    moved = {kind: defaultdict[str, int](int) for kind in tensors}
    for span in timeline.spans:
        if span.stream != "compute" and span.start_ns >= timeline.last_start_ns:
            moved[program.tensors[span.index].kind][span.kind] += program.tensors[span.index].nbytes
    totals = {kind: Moved(len(tensors[kind]), n["swap_out"], n["swap_in"]) for kind, n in moved.items()}
    return dict(sorted(totals.items(), key=lambda entry: -entry[1].out_bytes - entry[1].back_bytes))


def _recompute_totals(program: Program, timeline: Timeline) -> dict[str, Rerun]:
    """Returns the kernels recomputed in the last iteration by kind, longest first."""
    totals: dict[str, Rerun] = {}
    for span in timeline.spans:
        if span.kind == "recompute" and span.start_ns >= timeline.last_start_ns:
            kind = program.kernels[span.index].kind
            count, ns = totals.get(kind, (0, 0))
            totals[kind] = Rerun(count + 1, ns + span.end_ns - span.start_ns)
    return dict(sorted(totals.items(), key=lambda entry: -entry[1].duration_ns))


# ------------------------------------------------------------------------------------ the page


def by_module(peaks: Sequence[Peak], rows: int = 15) -> tuple[list[str], list[dict[str, int]]]:
    """Groups the bytes of each peak by module, truncating module paths.

    Returns:
        At most ``rows`` names, sorted by bytes in the first peak, the smallest merged into one; a column per peak.
    """
    columns = [_group_by_prefix(p.modules, _depth(peaks, rows)) for p in peaks]
    keys = list(dict.fromkeys(key for column in columns for key in column))
    keys.sort(key=lambda key: [-column.get(key, 0) for column in columns])
    if len(keys) > rows:
        for column in columns:
            column["(others)"] = sum(column.get(key, 0) for key in keys[rows - 1 :])
        keys = [*keys[: rows - 1], "(others)"]
    return keys, columns


def _depth(peaks: Sequence[Peak], rows: int) -> int:
    """Returns the path length with at most ``rows`` modules, or more while one has over half of the peak."""
    paths = {tuple(path.split(".")) for peak in peaks for path in peak.modules}
    depths = range(1, max(map(len, paths)) + 1)
    depth = max((d for d in depths if len({path[:d] for path in paths}) <= rows), default=1)
    while True:
        merged = _group_by_prefix(peaks[0].modules, depth)
        largest = max(merged, key=merged.__getitem__)
        parts = {path[: depth + 1] for path in paths if ".".join(path[:depth]) == largest}
        if 2 * merged[largest] <= peaks[0].nbytes or len(parts) == 1:
            return depth
        depth += 1


def _group_by_prefix(modules: Mapping[str, int], depth: int) -> dict[str, int]:
    merged: defaultdict[str, int] = defaultdict(int)
    for path, nbytes in modules.items():
        merged[".".join(path.split(".")[:depth])] += nbytes
    return dict(merged)


def _table(title: str, keys: list[str], columns: list[dict[str, int]], names: Mapping[str, str]) -> Iterable[str]:
    """Yields the lines of a table with one row per key: its name, then its bytes in each column."""
    width = max(24, *(len(names.get(key, key)) for key in keys))
    heads = ("without a plan", "under the plan")[: len(columns)]
    yield f"{'peak by ' + title:{width}}" + "".join(f"{head:>16}" for head in heads)
    for key in keys:
        yield f"{names.get(key, key):{width}}" + "".join(f"{size(column.get(key, 0)):>16}" for column in columns)


UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


@dataclass(frozen=True)
class Unit:
    """Unit for all sizes on a page. Sums and differences use the rounded figures."""

    nbytes: int  # bytes per unit
    name: str
    digits: int = 2  # decimal places

    @classmethod
    def for_sizes(cls, *sizes: int, distinct: Iterable[tuple[int, int]] = ()) -> Unit:
        """Returns the unit of the largest value, with 2 to 4 digits, to distinguish unequal pairs in ``distinct``."""
        nbytes, name = next((unit for unit in UNITS if max(sizes) >= unit[0]), UNITS[-1])
        units = [cls(nbytes, name, digits) for digits in (2, 3, 4)]
        pairs = [pair for pair in distinct if pair[0] != pair[1]]
        return next((u for u in units if all(u.steps(a) != u.steps(b) for a, b in pairs)), units[-1])

    def __call__(self, nbytes: int) -> str:
        """Formats bytes in this unit; a positive size below the last digit is "<" that digit."""
        steps = self.steps(nbytes)
        return f"<{self.text(1)}" if nbytes and not steps else self.text(steps)

    def steps(self, nbytes: int) -> int:
        """Rounds bytes to multiples of the last digit."""
        return round(nbytes * 10.0**self.digits / self.nbytes)

    def text(self, steps: int) -> str:
        """Formats a multiple of the last digit."""
        return f"{steps / 10**self.digits:,.{self.digits}f} {self.name}"


def size(nbytes: int) -> str:
    """Formats bytes in a readable unit."""
    for unit, name in UNITS:
        if nbytes >= unit:
            return f"{nbytes / unit:,.2f} {name}"
    return f"{nbytes} B"


def _time(ns: int) -> str:
    """Formats a time in a readable unit."""
    return f"{ns / 1e6:,.2f} ms" if ns >= 1e6 else f"{ns / 1e3:.1f} us" if ns >= 1e3 else f"{ns} ns"


def _count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'s' if n != 1 else ''}"
