"""Table 2 and Figure 6 of "TENSILE: A Tensor granularity dynamic GPU memory scheduler method towards multitasking
dynamic workloads system" (2021), section 5.3: one, two and three jobs that are launched at the same time, and mixtures.

Ratios, batch, image and durations are those of Table 1 (tensile_table1.py), over all jobs: the peak of all together,
and the makespan of a fixed amount of work (agents/jobs.py), both against the jobs without plans in the same memory.

1. TENSILE only swaps, at the smallest limit that it has plans for.
2. The others plan job by job: vDNN offloads the inputs of all layers; Capuchin (section 5.1) and the two that the paper
   has not are held to parts of TENSILE's peak that are in proportion to the jobs' own peaks.
3. Kernels of several jobs run one at a time, first come, first served.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from agents.heuristics.tensile import TENSILE
from agents.jobs import JobsPlanner, Split, jobs_of
from agents.planner import Infeasible
from experiments import figures
from experiments.common import cli
from experiments.common.bisection import largest
from experiments.common.report import Row
from experiments.figures import tensile
from experiments.plotting import palette
from simulator.jobs import simulate_jobs
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

TITLE = "TENSILE, Table 2 and Figure 6: several jobs on one GPU"
PLANNERS = {"vDNN": "vdnn_all", "Capuchin": "capuchin", "TENSILE": "tensile", "AutoSwap": "autoswap_swdoa",
            "LP rounding": "lp_round"}  # fmt: skip
METHODS = tuple(PLANNERS)
PAPER = {  # of VGG x 1, 2, 3: MSR, EOR, CBR
    "vDNN": ((0.2822, 0.8507, 0.3317), (0.2368, 0.9103, 0.2602), (0.2613, 0.9202, 0.2840)),
    "Capuchin": ((0.1003, 0.8921, 0.1124), (0.0056, 0.9208, 0.006), (0.1109, 0.9215, 0.1204)),
    "TENSILE": ((0.2001, 0.0838, 2.5112), (0.2295, 0.1016, 3.2256), (0.2767, 0.2793, 1.0478)),
}  # fmt: skip
OF_PAPER = "vgg16_imagenet"
STEPS = 200  # of the peak, in which TENSILE's least limit is sought


def tasks(settings: DictConfig) -> list[Row]:
    """One per mixture."""
    batch = cli.integer(settings, "batch", least=1)
    mixtures = cli.values(settings, "jobs")
    for i, names in enumerate(mixtures):
        if not isinstance(names, list) or not names:
            raise cli.UsageError(f"figure.jobs[{i}]: expected a list of workloads, got {names!r}")
    return [{"jobs": [figures.network(str(name), "jobs") for name in names], "batch": batch} for names in mixtures]


def run(task: Row, machine: Machine) -> Row:
    """Peak and makespan of each method; None where it has no plans."""
    known = {name: figures.program(name, machine, batch_size=task["batch"], algorithms=False) for name in task["jobs"]}
    programs = [known[name] for name in task["jobs"]]
    without = [Plan((), program.fingerprint, "none") for program in programs]
    lowest = smallest(programs, machine)
    found = {
        "vDNN": outcome(programs, planned(Split("vdnn_all"), programs, machine, machine.memory_bytes), machine),
        "TENSILE": outcome(programs, lowest, machine),
    }
    limit = found["TENSILE"]["peak_bytes"] if found["TENSILE"] else sum(p.peak_bytes for p in programs)
    for method in ("Capuchin", "AutoSwap", "LP rounding"):
        found[method] = outcome(programs, planned(Split(PLANNERS[method]), programs, machine, limit), machine)
    return {"without": outcome(programs, without, machine), "methods": found}


def outcome(programs: Sequence[Program], plans: Sequence[Plan] | None, machine: Machine) -> Row | None:
    """What jobs do under plans in the GPU's memory."""
    if plans is None:
        return None
    timeline = simulate_jobs(jobs_of(programs, plans), machine, machine.memory_bytes)
    return {
        "peak_bytes": timeline.peak_bytes, "makespan_ns": timeline.end_ns,
        "decisions": [len(plan.decisions) for plan in plans], "evictions": len(timeline.evictions),
        "channel": round((timeline.copies_ns("d2h") + timeline.copies_ns("h2d")) / timeline.end_ns, 4),
    }  # fmt: skip


def planned(
    planner: JobsPlanner, programs: Sequence[Program], machine: Machine, limit: int
) -> tuple[Plan, ...] | None:  # fmt: skip
    """Plans; None: it has none."""
    try:
        return planner.plan_jobs(programs, machine, limit)
    except Infeasible:
        return None


def smallest(programs: Sequence[Program], machine: Machine) -> tuple[Plan, ...] | None:
    """TENSILE's plans for the smallest limit that it has some for; None: it saves nothing."""
    peak = sum(program.peak_bytes for program in programs)
    plans: dict[int, tuple[Plan, ...] | None] = {}

    def fits(saved: int) -> bool:
        plans[saved] = planned(TENSILE("swap"), programs, machine, peak * (STEPS - saved) // STEPS)
        return plans[saved] is not None

    return plans.get(largest(fits, STEPS // 10, STEPS - 1))


# ------------------------------------------------------------------------------------------ for people


def ratios(row: Row, method: str) -> tensile.Ratios | None:
    """MSR, EOR, CBR; None: no plans."""
    found, without = row["methods"][method], row["without"]
    if found is None:
        return None
    return tensile.ratios(
        found["peak_bytes"], found["makespan_ns"], without["peak_bytes"], without["makespan_ns"]
    )  # fmt: skip


def label(row: Row) -> str:
    """The jobs, those of one kind with their number."""
    counts = {name: row["jobs"].count(name) for name in dict.fromkeys(row["jobs"])}
    return ", ".join(
        figures.label(name) + (f" × {n}" if n > 1 or len(counts) == 1 else "") for name, n in counts.items()
    )


def paper(row: Row) -> dict[str, tensile.Ratios]:
    """The paper's ratios, by method."""
    n = len(row["jobs"])
    return {m: values[n - 1] for m, values in PAPER.items()} if set(row["jobs"]) == {OF_PAPER} and n <= 3 else {}


def table(rows: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Paper / ours."""
    heads = ["paper / ours", "MSR", "EOR", "CBR", "decisions", "channel busy", "evicted on demand"]
    cells = []
    for row in rows:
        for method in METHODS:
            name, ours, theirs = f"{label(row)}, {method}", ratios(row, method), paper(row).get(method)
            if ours is None:
                cells.append([name, "no plan", "", "", "", "", ""])
                continue
            found = row["methods"][method]
            cells.append([
                name, *(tensile.pair(theirs[i] if theirs else None, value) for i, value in enumerate(ours)),
                " + ".join(map(str, found["decisions"])), f"{found['channel']:.0%}", f"{found['evictions']}",
            ])  # fmt: skip
    return heads, cells


def notes(rows: list[Row]) -> list[str]:
    """The order of the cost-benefit ratios, and why ours differs."""
    found = [{m: r for m in METHODS if (r := ratios(row, m)) is not None} for row in rows]
    ahead = {m: [one["TENSILE"][2] > one[m][2] for one in found if {"TENSILE", m} <= one.keys()] for m in PLANNERS}
    out = [
        f"TENSILE's cost-benefit ratio is above vDNN's in {sum(ahead['vDNN'])} of {len(ahead['vDNN'])} rows and above "
        f"Capuchin's in {sum(ahead['Capuchin'])} of {len(ahead['Capuchin'])}; in the paper it is above both. There "
        "Capuchin waits for its transfers and recomputes (section 5.2: 0.9 of the time is lost); ours first takes "
        "transfers that nothing waits for, and loses hardly any time for the same memory."
    ]
    for row, one in zip(rows, found, strict=True):
        order = sorted(one, key=lambda method: -one[method][2])
        text = f"{label(row)}: CBR " + " > ".join(f"{method} ({one[method][2]:.2f})" for method in order)
        if "TENSILE" in one:
            text += f"; under TENSILE the channel is busy for {row['methods']['TENSILE']['channel']:.0%} of the time"
        out.append(text + ".")
    return out


def draw(rows: list[Row], path: Path) -> None:
    """Memory saved and time lost, a row per mixture."""
    tensile.draw(
        path, [label(row) for row in rows], [{method: ratios(row, method) for method in METHODS} for row in rows],
        [paper(row) for row in rows], {method: palette.look(key) for method, key in PLANNERS.items()}, [],
        "the paper's", f"Several jobs that share an RTX 2080 Ti, batch size {rows[0]['batch']}",
    )  # fmt: skip
