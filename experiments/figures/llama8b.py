"""One training step of an 8-billion-parameter Llama on one H100: what each planning method costs under a memory limit,
and the floor. The model is that of "The Llama 3 Herd of Models" (2024), Table 3, in bfloat16 with AdamW, one sequence
of 8,192 tokens; no paper of the methods has it.

1. The step is captured without weights, its durations are the roofline's (configs/workload/llama3_8b.yaml).
2. A limit is on all that the GPU holds: parameters, optimizer state, gradients, activations. GB are 10^9 bytes.
3. Methods have their own options, but for those in the YAML, which bound the search of the slow ones.
"""

from __future__ import annotations

import json
import time
from functools import lru_cache
from pathlib import Path

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter
from omegaconf import DictConfig

import agents
from agents.floor import floor
from experiments import figures
from experiments.common import cli
from experiments.common.report import Row
from experiments.plotting.palette import FAINT, FLOOR, INK, look
from experiments.plotting.plots import figure
from simulator import Machine, Plan, Program, simulate

TITLE = "Llama 3 8B on an H100: overhead against the memory limit"
WORKLOAD = "llama3_8b"
ALONE = True  # the searches that have seconds have all cores
LOWER = "floor"  # among the methods: agents/floor/
GB = 10**9


def tasks(settings: DictConfig) -> list[Row]:
    """The program itself, then one per method and limit; the tight limits, which take longest, last."""
    asked = cli.plain(settings)
    limits, changes, options = sorted(asked["limits"], reverse=True), asked["workload"], asked["options"]
    known = {LOWER, *agents.untrained()}
    for method in (*asked["methods"], *options):
        if method not in known:
            raise cli.UsageError(f"figure.methods: there is no method {method!r}{cli.nearest(method, known)}")
    for limit in limits:
        if isinstance(limit, bool) or not isinstance(limit, (int, float)) or limit <= 0:
            raise cli.UsageError(f"figure.limits: expected numbers of GB above 0, got {limit!r}")
    return [
        {"workload": changes, "method": None, "limit_gb": None, "options": {}},
        *(
            {"workload": changes, "method": method, "limit_gb": limit, "options": options.get(method, {})}
            for limit in limits
            for method in asked["methods"]
        ),
    ]


def run(task: Row, machine: Machine) -> Row:
    """Facts of the program, or overheads in per cent and planning times in s; without a plan, why."""
    program = _captured(json.dumps(task["workload"]), json.dumps(machine.to_dict()))
    if task["method"] is None:
        return facts(program, machine)
    limit, begin = round(task["limit_gb"] * GB), time.perf_counter()
    if task["method"] == LOWER:
        low = floor(program, machine, limit, "joint")
        over = round(100 * low.overhead, 4) if low.feasible else None
        return {"overhead_percent": over, "least_bytes": low.least_bytes,
                "seconds": round(time.perf_counter() - begin, 1)}  # fmt: skip
    try:
        plan = agents.make(task["method"], **task["options"]).plan(program, machine, limit)
    except agents.Infeasible as error:
        return {"overhead_percent": None, "reason": str(error).rpartition("; ")[2],
                "seconds": round(time.perf_counter() - begin, 1)}  # fmt: skip
    seconds = time.perf_counter() - begin
    timeline = simulate(program, plan, machine, min(limit, plan.limit))
    return {
        "overhead_percent": round(100 * timeline.overhead, 4), "peak_bytes": timeline.peak_bytes,
        "decisions": len(plan.decisions), "seconds": round(seconds, 1),
    }  # fmt: skip


@lru_cache(maxsize=1)  # a process has the tasks of one program
def _captured(changes: str, machine: str) -> Program:
    return figures.program(WORKLOAD, Machine.from_dict(json.loads(machine)), **json.loads(changes))


def facts(program: Program, machine: Machine) -> Row:
    """Sizes of a program; what lies in memory at its peak, by kind."""
    peak = simulate(program, Plan(), machine, program.peak_bytes)
    kinds: dict[str, int] = {}
    for tensor in program.tensors:
        if tensor.persistent:
            kinds[tensor.kind] = kinds.get(tensor.kind, 0) + tensor.nbytes
    return {
        "kernels": len(program.kernels), "tensors": len(program.tensors),
        "flops": sum(kernel.flops for kernel in program.kernels), "ideal_ns": program.ideal_ns,
        "peak_bytes": program.peak_bytes, "persistent": kinds,
        "peak_by": peak.peak_by(lambda t: program.tensors[t].kind),
    }  # fmt: skip


# ------------------------------------------------------------------------------------------ for people


def split(rows: list[Row]) -> tuple[Row, list[float], dict[str, dict[float, Row]]]:
    """The program's row, the limits from the loosest, and of each method its row by limit."""
    found: dict[str, dict[float, Row]] = {}
    for row in rows[1:]:
        found.setdefault(row["method"], {})[row["limit_gb"]] = row
    return rows[0], sorted({row["limit_gb"] for row in rows[1:]}, reverse=True), found


def name(method: str) -> str:
    """A method's name for people."""
    return "the floor" if method == LOWER else look(method).label


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """A line per method, a column per limit: overhead and planning time."""
    _, limits, found = split(rows)
    cells = [[name(method), *(_cell(by[limit]) for limit in limits)] for method, by in found.items()]
    return ["overhead (time to plan)", *(f"{limit:g} GB" for limit in limits)], cells


def _cell(row: Row) -> str:
    over = "–" if row["overhead_percent"] is None else f"{row['overhead_percent']:.2f}%"
    return f"{over} ({row['seconds']:,.0f} s)"


def notes(rows: list[Row]) -> list[str]:
    """The program's sizes; at each limit the best, and who has no plan and why."""
    step, limits, found = split(rows)

    def in_gb(sizes: dict[str, int]) -> str:
        large = {kind: size for kind, size in sizes.items() if size >= GB / 10}
        return ", ".join(f"{kind.replace('_', ' ')} {size / GB:.1f}" for kind, size in large.items())

    out = [
        f"The step: {step['kernels']:,} kernels, {step['tensors']:,} tensors, {step['flops'] / 1e12:,.0f} TFLOP, "
        f"{step['ideal_ns'] / 1e6:,.0f} ms without a limit. Its peak is {step['peak_bytes'] / GB:.1f} GB "
        f"({in_gb(step['peak_by'])}); {sum(step['persistent'].values()) / GB:.1f} GB are there from step to step "
        f"({in_gb(step['persistent'])}).",
    ]
    state = sum(step["persistent"].values()) + step["persistent"].get("parameter", 0)
    out.append(
        f"When the backward pass ends, that and a gradient of every parameter make {state / GB:.1f} GB. Whoever moves "
        "nothing but activations, or does not move state between its last use and the next step's first, has no plan "
        "below."
    )
    low = found.get(LOWER, {})
    if low:
        out.append(f"No plan fits less than {next(iter(low.values()))['least_bytes'] / GB:.1f} GB (agents/floor/).")
    for limit in limits:
        ranked = sorted(
            (by[limit]["overhead_percent"], name(method))
            for method, by in found.items()
            if method != LOWER and by[limit]["overhead_percent"] is not None
        )
        under = low.get(limit, {}).get("overhead_percent")
        beaten = "" if under is None else f"; the floor is {under:.2f} %"
        best = f"{ranked[0][1]} has the least overhead, {ranked[0][0]:.2f} %" if ranked else "none has a plan"
        out.append(f"{limit:g} GB: {len(ranked)} of {len(found) - bool(low)} methods have a plan; {best}{beaten}.")
    for method, by in found.items():
        missing = [limit for limit in limits if by[limit].get("reason")]
        if missing:
            where = ", ".join(f"{limit:g}" for limit in missing)
            out.append(f"{name(method)}, no plan at {where} GB: {by[missing[0]]['reason']}.")
    return out


def draw(rows: list[Row], path: Path) -> None:
    """A panel per limit, a line per method: a point, or a cross at the right where there is no plan."""
    _, limits, found = split(rows)
    methods = [method for method in found if method != LOWER]
    most = max([row["overhead_percent"] or 0.0 for by in found.values() for row in by.values()] + [1.0])
    with figure(path, 2.2 + 3.6 * len(limits), 1.4 + 0.27 * len(methods), 1, len(limits)) as made:
        for axes, limit in zip([made] if len(limits) == 1 else made, limits, strict=True):
            axes.set_xscale("symlog", linthresh=1.0, linscale=0.6)
            axes.set(xlim=(-0.1, 6 * most), ylim=(len(methods) - 0.4, -0.6), title=f"{limit:g} GB",
                     xlabel="overhead of an iteration")  # fmt: skip
            low = found.get(LOWER, {}).get(limit, {}).get("overhead_percent")
            if low is not None:
                axes.axvspan(-0.1, low, color=FLOOR, linewidth=0, zorder=0)
                axes.axvline(low, color=FAINT, linewidth=1.4, zorder=1)
            for y, method in enumerate(methods):
                over, style = found[method][limit]["overhead_percent"], look(method)
                if over is None:
                    axes.text(5.4 * most, y, "no plan", color=FAINT, fontsize=9, ha="right", va="center")
                    continue
                axes.plot(over, y, marker=style.marker, color=style.colour, markersize=8, linestyle="none", zorder=3,
                          clip_on=False)  # fmt: skip
                axes.annotate(f"{over:.1f}%", (over, y), (7, 0), "data", "offset points", va="center", fontsize=8.5,
                              color=INK)  # fmt: skip
            first = limit == limits[0]
            axes.set_yticks(range(len(methods)), [name(method) for method in methods] if first else [])
            axes.tick_params(axis="y", length=0)
            axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}%"))
        if LOWER in found:
            key = Line2D([], [], color=FAINT, linewidth=1.4, label="floor: no plan is below")
            axes.figure.legend(handles=[key], loc="outside lower left", fontsize=10)
