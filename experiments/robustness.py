"""How plans stand noise: kernel times that vary (jitter) or change for good (drift), and a link that a tenant shares.

    python -m experiments.robustness workload=vgg16 limit=0.6
    python -m experiments.robustness program=step.json limit=12GiB planners=[lp_round,policy_search] 'drift=[-0.3]'

Every plan is made without noise, for one job, and runs for many iterations of several seeds. An iteration's overhead is
over the time that its own kernels took. ``robust`` is a plan made for samples of other seeds (joint_annealing.py), and
``without_noise`` its control, the same search with as many simulations of the noiseless job and, since each tells of a
plan, more plans and more time.
After the drift the job is planned anew, too, as TENSILE's controller does it (agents/heuristics/tensile/controller.py):
how many iterations until it is as fast as it gets, beside a plan made for the new times? Planning takes no simulated
time.

The run directory holds robustness.json and robustness.png. Its path is the last line printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from omegaconf import DictConfig
from rich.table import Table

import agents
from agents.heuristics.tensile.controller import control
from agents.jobs import JobsPlanner, Split
from agents.planner import Infeasible
from agents.search.joint_annealing import JointAnnealing
from experiments.common import cli, report
from experiments.common.report import Row
from simulator import simulate
from simulator.files import write_json
from simulator.jobs import Job, Noise, simulate_jobs
from simulator.limits import limit_bytes
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

ROBUST, CONTROL = "robust", "without_noise"  # searched for noise, and as long without
KINDS = ("jitter", "drift", "tenant")
FAR = 0.005  # of ideal time: from the overhead of the last iteration
THRESHOLD = 0.05  # drift above which a job is planned anew
Floats = NDArray[np.float64]


@cli.entry("robustness")
def main(cfg: DictConfig) -> None:
    from experiments.plotting.noise import noise_panels  # Matplotlib takes long to import

    machine, settings = cli.machine(cfg), settings_of(cfg)
    names = report.planner_names(cli.values(cfg, "planners"))
    program = cli.program(cfg, machine)
    limit = limit_bytes(cfg.limit, program, "limit")
    with report.RunDirectory(cli.path(cfg, "out"), f"robustness-{program.name}") as out:
        found = measure(program, machine, limit, names, settings)
        write_json(out / "robustness.json", {"config": cli.plain(cfg), **found}, indent=1)
        noise_panels(out / "robustness.png", [{"title": f"{program.name} on {machine.name}", **found}])
    heads, cells = table(found)
    shown = Table(*heads, box=None)
    for line in cells:
        shown.add_row(*line)
    report.console().print(shown)
    print(out)


def settings_of(cfg: DictConfig) -> Row:
    """What ``measure`` asks for, checked.

    Raises:
        UsageError: a value is of the wrong kind or out of range.
    """
    out: Row = {key: cli.integer(cfg, key, least=least)
                for key, least in (("iterations", 4), ("seeds", 1), ("robust_calls", 0))}  # fmt: skip
    for kind in (*KINDS, "robust"):
        sizes = cli.values(cfg, kind) if kind != "robust" else [1]
        try:
            for size in sizes:
                Noise(**(cli.plain(cfg.robust) if kind == "robust" else {kind: size}))
        except (TypeError, ValueError) as error:
            raise cli.UsageError(f"{kind}: {error}") from None
        out[kind] = cli.plain(cfg.robust) if kind == "robust" else [float(size) for size in sizes]
    return out


def measure(program: Program, machine: Machine, limit: int, names: Sequence[str], settings: Mapping[str, Any]) -> Row:
    """Overheads under noise, of each planner that has a plan.

    Args:
        settings: as ``settings_of`` returns them.

    Returns:
        ``noise``: of each kind a list with the size and, of each planner, mean and 95th percentile over iterations;
        ``recovery``: of each drift what became of the job, with and without replanning.
    """
    iterations, seeds = settings["iterations"], range(1, settings["seeds"] + 1)
    plans, without = {}, []
    for name in report.tracked(names, "planning with"):
        try:
            plans[name] = agents.make(name).plan(program, machine, limit)
        except Infeasible:
            without.append(name)
    if settings["robust_calls"] and plans:
        starts = [Given(plan) for plan in plans.values()]
        for name, noise in ((CONTROL, None), (ROBUST, Noise(**settings["robust"]))):
            search = JointAnnealing(starts, settings["robust_calls"], noise=noise)
            try:
                plans[name] = search.plan_jobs([program], machine, limit)[0]
            except Infeasible:
                without.append(name)
    if not plans:
        raise Infeasible(f"no planner has a plan for {program.name!r} within {limit:,} bytes")

    def row(noise: Noise) -> Row:
        found: Row = {}
        for name, plan in plans.items():
            every = [overheads(program, plan, machine, limit, noise, iterations, seed)[1:] for seed in seeds]
            values = np.concatenate(every)
            found[name] = {"mean": float(values.mean()), "p95": float(np.percentile(values, 95))}
        return found

    noise = {kind: [{"size": size, "planners": row(Noise(**{kind: size}))}
                    for size in report.tracked(settings[kind], f"running under {kind}")] for kind in KINDS}  # fmt: skip
    noise["both"] = [{**settings["robust"], "planners": row(Noise(**settings["robust"]))}]
    recovery = [
        {"size": size, "planners": {name: recovered(program, machine, limit, name, Noise(drift=size), iterations)
                                    for name in plans if name not in (ROBUST, CONTROL)}}
        for size in report.tracked([size for size in settings["drift"] if size], "planning anew after drift")
    ]  # fmt: skip
    return {"program": program.name, "machine": machine.name, "limit_bytes": limit, "without_a_plan": without,
            "noise": noise, "recovery": recovery}  # fmt: skip


class Given:
    """A plan that is there already, as a planner of one job: where a search starts."""

    name, simulator_calls = "given", 0

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def plan_jobs(self, programs: Sequence[Program], machine: Machine, limit: int) -> tuple[Plan, ...]:
        """The plan."""
        return (self._plan,)


def overheads(
    program: Program, plan: Plan, machine: Machine, limit: int, noise: Noise, iterations: int, seed: int
) -> Floats:  # fmt: skip
    """(iterations,) of each: its time over that of its own kernels, less 1."""
    rows = noise.durations(program, iterations, seed)
    job = Job(program.name, program, plan, iterations=iterations, durations=rows)
    tenant = noise.tenants(program, iterations, seed)
    return _overheads(simulate_jobs([job], machine, limit, tenant=tenant).jobs[0].iterations_ns, program, rows)


def recovered(program: Program, machine: Machine, limit: int, name: str, noise: Noise, iterations: int) -> Row:
    """What becomes of a job whose kernels' times drift in the middle, with replanning and without.

    Returns:
        ``new``: overhead of a plan made for the new times; ``kept``, ``replanned``: overhead of the last iteration;
        ``plans``: how many were made after the first; ``iterations`` after the drift that were slower than the last.
    """
    rows, half = noise.durations(program, iterations, 1), iterations // 2
    planner: JobsPlanner = Split(name)
    job = Job(program.name, program, Plan(), iterations=iterations, durations=rows)
    long = 20 * iterations * max(program.ideal_ns, 1)
    check_ns = max(min(map(sum, rows)), 1)
    done = control([job], machine, limit, planner, until_ns=long, check_ns=check_ns, threshold=THRESHOLD)
    later = program.with_durations(rows[-1])
    new = simulate(later, agents.make(name).plan(later, machine, limit), machine, limit).overhead
    kept = overheads(program, done.jobs[0].plan, machine, limit, noise, iterations, 1)
    after = _overheads(done.timeline.jobs[0].iterations_ns, program, rows)[half:]
    slow = np.flatnonzero(after > after[-1] + FAR)
    return {"new": new, "kept": float(kept[-1]), "replanned": float(after[-1]), "plans": len(done.replanned) - 1,
            "iterations": int(slow[-1]) + 1 if slow.size else 0}  # fmt: skip


def _overheads(times: Sequence[int], program: Program, rows: Sequence[Sequence[int]]) -> Floats:
    ideal = np.array([sum(row) for row in rows] if rows else [program.ideal_ns] * len(times), np.float64)
    return np.asarray(times / np.maximum(ideal, 1) - 1)


def table(found: Row) -> tuple[list[str], list[list[str]]]:
    """A line for each planner: overhead without noise, and mean and 95th percentile under the largest of each kind."""
    kinds = {f"{kind} {entry['size']:g}": entry["planners"] for kind in KINDS for entry in found["noise"][kind][-1:]}
    both = found["noise"]["both"][0]
    kinds[" + ".join(f"{kind} {both[kind]:g}" for kind in KINDS if both.get(kind))] = both["planners"]
    names = list(both["planners"])
    cells = []
    for name in names:
        line = [f"{one[name]['mean']:.2%} ({one[name]['p95']:.2%})" for one in kinds.values()]
        again = [entry["planners"].get(name) for entry in found["recovery"][:1]]
        cells.append([name, *line, *(_recovery(one) for one in again)])
    heads = ["mean (95th percentile)", *kinds]
    return heads + [f"replanned after drift {entry['size']:g}" for entry in found["recovery"][:1]], cells


def _recovery(one: Row | None) -> str:
    return "" if one is None else f"{one['kept']:.2%} → {one['replanned']:.2%} in {one['iterations']}"


if __name__ == "__main__":
    main()
