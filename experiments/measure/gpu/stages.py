"""Stages of a validation run; later stages read the files that earlier stages wrote.

    machine.yaml                              calibrate
    profiles/NAME.json, NAME.program.json.gz  profile: durations, and the program with them
    measured/NAME.json                        profile: for publication (experiments/measured)
    plans/NAME-LIMIT-PLANNER.json             plan: the only stage without a GPU

Existing files are not measured again. A limit of 0.7 means persistent bytes plus 70 % of the activation peak.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import agents
from executor import open_backend, replay as replayed
from executor.calibrate import Calibration, calibrate as calibrated, with_process_figures
from executor.capture.profile import ProfileError, with_profile
from executor.capture.profiler import measure
from executor.fit import machine_of
from executor.memory.engines import line
from executor.memory.pinned import CUDA
from experiments.common.workers import Pool
from experiments.measure.conditions import deterministic, sampled_conditions
from experiments.measure.gpu import pytorch_baselines as baselines, results
from experiments.measure.gpu.largest_batch import Tries
from experiments.measure.gpu.pytorch_baselines import Trial, Unreachable, best_plan, trial
from experiments.measure.gpu.training import Case, Training, eager_bits, without_batch_swaps
from experiments.measure.measured_step import measured_step
from experiments.measure.networks import build, free_cache, get_planner, host_bytes, limit_of, own_batch
from experiments.measure.record import DEATHS, LATE, Record
from experiments.measure.runner import Status, run_part, run_process
from experiments.measure.settings import STAGES, Settings, UsageError
from simulator import Machine, OutOfMemory, Plan, Program, simulate
from simulator.files import write_text
from simulator.plan import PlanError
from simulator.schedule import lower

# Simulated GPU of the host backend: transfers about as slow as CPU kernels.
HOST = Machine(
    "host",
    2**30,
    500_000_000,
    500_000_000,
    host_bytes=2**30,
    flops_per_s={"float32": 10**10},
    memory_bytes_per_s=10**10,
    launch_ns=1400,
    graph_launch_ns=600,
    issue_ns=5000,
)
AIMS = (1.0, 0.985, 0.97)  # fractions of a limit to plan for in ``compare``; the measured peak may exceed a plan
OURS = "ours"  # pseudo-planner: the fastest plan of pytorch_baselines.OURS


@dataclass(frozen=True)
class Run:
    """One run of a stage: its settings and the record of its results folder."""

    settings: Settings
    record: Record

    @property
    def machine(self) -> Machine:
        """Calibrated machine, or the one named in the settings; raises UsageError if neither exists."""
        path = self.record.out / "machine.yaml"
        if path.exists():
            return Machine.load(path)
        if self.settings.machine:
            return Machine.load(self.settings.machine)
        raise UsageError(f"machine: {path} does not exist; calibrate first (stages=calibrate) or set machine=")

    def profile(self, name: str) -> Path:
        """Returns the path of a network's profile."""
        return Path(self.settings.profiles or self.record.out / "profiles") / f"{name}.json"

    def program(self, name: str) -> Path:
        """Returns the path of a network's program with measured durations."""
        return self.profile(name).with_suffix(".program.json.gz")

    def plan(self, workload: str, fraction: float, planner: str, aim: int = 0) -> Path:
        """Returns the path of a plan; ``aim`` is the index into AIMS for planner OURS."""
        folder = Path(self.settings.plans or self.record.out / "plans")
        return folder / f"{workload}-{fraction}-{planner}{f'-{aim}' if planner == OURS else ''}.json"

    def cases(self) -> list[Case]:
        """Returns every profiled workload at every limit, in the order of the settings."""
        out = []
        for name in self.settings.workloads:
            if (file := self.program(name)).exists():
                program = Program.load(file)
                out += [Case(name, program, f, limit_of(program, f)) for f in self.settings.limits]
        return out


def base_machine(device: str) -> Machine:
    """Returns the preset of the GPU, or the simulated machine of the host backend."""
    return machine_of(torch.cuda.get_device_name()) if device == "cuda" else HOST


def with_host(measured: Calibration, base: Machine, device: str) -> Calibration:
    """Returns the calibration with the host's pinnable memory and the figures of this PyTorch process."""
    if device == "cuda":
        measured = replace(measured, machine=replace(measured.machine, host_bytes=min(base.host_bytes, host_bytes())))
    return with_process_figures(measured, device)


def calibrate(run: Run) -> None:
    """Measures transfers, launches, the CUDA context and the pinnable host memory."""
    settings = run.settings
    cuda = run.settings.backend == "cuda"
    base = Machine.load(settings.machine) if settings.machine else base_machine(settings.device)

    def figures() -> dict[str, Any]:
        with open_backend(settings.backend, base) as backend:
            measured = calibrated(backend, base, 2**30 if cuda else 2**20, seconds=run.record.seconds_left())
        if cuda:
            measured = with_host(measured, measured.machine, settings.device)
        measured.save(run.record.out / "machine.yaml")
        return {"device": measured.device, "fit_error": measured.fit_error, "machine": measured.machine.to_dict()}

    run.record.measure({"kind": "calibration"}, figures)


# ------------------------------------------------------------------------------------------- profiles


def profile(run: Run) -> None:
    """Measures kernel times, eager step times and peaks of each network."""
    for name in run.settings.workloads:
        if not run.program(name).exists():
            run.record.measure({"kind": "profile", "workload": name}, partial(profiled, run, name))


def profiled(run: Run, name: str) -> dict[str, Any]:
    """Profiles one network, writes its files and returns the row."""
    settings = run.settings
    machine = run.machine
    baselines.warm_up(name, settings.device)
    eager = trial(name, settings.device)
    captured = build(name, settings.device).captured(machine)
    seconds = run.record.seconds_left()
    try:
        result = measure(captured, settings.device, machine.name, seconds=seconds, cache=settings.cache)
    except ProfileError:
        if settings.cache != "step":
            raise
        free_cache()  # the whole step does not fit into memory; single kernels may
        result = measure(captured, settings.device, machine.name, seconds=seconds / 2, cache="cold")
    result.save(run.profile(name))
    program = with_profile(captured.program, result)
    words = {"source": settings.source, "license": settings.license, "workload": name}
    step = measured_step(captured, result, machine, **words, step_ns=round(eager.ns))
    write_text(run.record.out / "measured" / f"{name}.json", step.to_json())
    program.save(run.program(name))
    return {
        "eager_ns": eager.ns,
        "eager_peak": eager.peak,
        "eager_between": eager.between,
        "kernels": len(program.kernels),
        "ideal_ns": program.ideal_ns,
        "step_ns": result.step_ns,
        "peak_bytes": program.peak_bytes,
        "device": result.device,
        "cache": result.cache,
    }


# ------------------------------------------------------------------------------------------- plans


def plan_one(
    planner: str, file: Path, machine: Machine, limit: int, budget: dict[str, float]
) -> tuple[Plan | None, dict[str, Any]]:
    """Plans a saved program with those options of ``budget`` that the planner accepts.

    Returns:
        The plan, or None; and entries of its row: ``seconds`` of planning, and without a plan the reason ``failed``,
        with ``again`` if a library is missing that another host may have.
    """
    begin = time.monotonic()
    program = Program.load(file)
    plan = None
    row: dict[str, Any] = {}
    try:
        if planner == OURS:
            plan = best_plan(program, machine, limit)
        else:
            plan = get_planner(planner, program, **budget).plan(program, machine, limit)
    except (agents.Infeasible, Unreachable) as error:
        row["failed"] = str(error)
    except ImportError as error:
        row = {"failed": f"{planner} is left out: {error}", "again": True}
    except Exception as error:  # a failing planner must not stop the run
        row["failed"] = f"{planner} raised {type(error).__name__}: {error}"
    return plan, row | {"seconds": time.monotonic() - begin}


@contextmanager
def planning(workers: int) -> Iterator[Pool]:
    """Yields a pool of spawned workers and kills the busy ones on exit.

    Workers receive file paths, not programs: a thread writing a large argument to a killed worker would block the exit.
    """
    with Pool(workers) as pool:
        try:
            yield pool
        finally:
            for process in multiprocessing.active_children():
                process.kill()


def trained_first(settings: Settings) -> list[str]:
    """Returns the planners, those used for training first; the slow exact planner stays last."""
    return sorted(settings.planners, key=lambda planner: planner not in settings.train)


def plan(run: Run) -> None:
    """Plans all cases with all planners, and OURS at the limits of ``compare``."""
    settings = run.settings
    machine = run.machine
    jobs = [(planner, case, 0) for planner in trained_first(settings) for case in run.cases()]
    eager = eager_steps(run) if OURS in settings.methods else {}
    for case in run.cases():
        if case.workload in eager:
            limit = baselines.limit_at(case.fraction, eager[case.workload])
            jobs += [(OURS, replace(case, limit=int(factor * limit)), i) for i, factor in enumerate(AIMS)]
    with planning(settings.workers or os.cpu_count() or 1) as pool:
        make_plans(run, jobs, machine, pool)


def make_plans(run: Run, jobs: Sequence[tuple[str, Case, int]], machine: Machine, pool: Executor) -> None:
    """Computes the missing plans in the pool and saves those that finish in time."""
    record = run.record
    # Reduced search budgets, so that every planner finishes within the stage's time.
    budget: dict[str, float] = (
        {"calls": 4000, "seconds": 20.0, "iterations": 50}
        if run.settings.backend == "cuda"
        else {"calls": 500, "seconds": 3.0, "iterations": 10, "particles": 50}
    )
    pending = []
    for planner, case, aim in jobs:
        key = {"kind": "plan", "workload": case.workload, "fraction": case.fraction, "planner": planner, "aim": aim}
        file = run.plan(case.workload, case.fraction, planner, aim)
        if not record.has(**key) and not file.exists():
            task = planner, run.program(case.workload), machine, case.limit, budget
            pending.append((key, case, file, pool.submit(plan_one, *task)))
    for key, case, file, answer in pending:
        row = key | {"limit": case.limit}
        try:
            plan, entries = answer.result(max(0.0, record.seconds_left()))
        except TimeoutError:
            record.add(**row, failed=LATE)
            continue
        except BrokenExecutor as error:
            record.add(**row, failed=line(error), again=True)
            continue
        if plan is not None:
            plan.save(file)
            entries |= {
                "predicted_ns": simulate(case.program, plan, machine, case.limit).iteration_ns,
                "ideal_ns": case.program.ideal_ns,
                "decisions": len(plan.decisions),
            }
        record.add(**row, **entries)


def planned(run: Run, planners: Sequence[str]) -> list[tuple[Case, Plan]]:
    """Returns every saved plan with its case, grouped by network."""
    files = [(case, run.plan(case.workload, case.fraction, planner)) for case in run.cases() for planner in planners]
    return [(case, Plan.load(file)) for case, file in files if file.exists()]


def eager_steps(run: Run) -> dict[str, Trial]:
    """Returns the eager measurement of each profiled network."""
    rows = run.record.successful(kind="profile")
    return {r["workload"]: Trial(r["eager_ns"], r["eager_peak"], r["eager_between"]) for r in rows}


# ------------------------------------------------------------------------------------------- measurements


def pin_largest(run: Run, plans: Sequence[tuple[Case, Plan]]) -> None:
    """Pins host memory once for the plan that needs most; if the host has too little, that plan fails later."""
    if run.settings.device == "cuda" and plans:
        with suppress(MemoryError, PlanError, OutOfMemory):
            CUDA.take(max(max(lower(case.program, plan).on_host, default=0) for case, plan in plans) * 17 // 16)


def replay(run: Run) -> None:
    """Replays every plan and plots the one with most transfers."""
    settings = run.settings
    machine = run.machine
    record = run.record
    plans = planned(run, trained_first(settings))
    options: dict[str, Any] = {} if settings.backend == "cuda" else {"iterations": 3}
    busiest: tuple[int, tuple[Any, ...]] = (0, ())
    free_cache()
    pin_largest(run, plans)
    checked = {(r["workload"], r["fraction"]) for r in record.successful(kind="replay") if "checks" in r}
    with open_backend(settings.backend, machine) as backend, sampled_conditions(settings.device) as clocks:

        def measured(case: Case, plan: Plan) -> dict[str, Any]:
            nonlocal busiest
            stats = replayed(case.program, plan, machine, case.limit, backend, **options)
            checks = {}
            if (case.workload, case.fraction) not in checked and plan.decisions:
                checked.add((case.workload, case.fraction))
                checks = {"checks": replayed(case.program, plan, machine, case.limit, backend, 2, 1, "check").checks}
            moves = sum(s.stream != "compute" for s in stats.timeline.spans)
            if moves > busiest[0]:
                busiest = moves, (stats, f"{case.workload} at {case.fraction:.0%}", plan.planner)
            return {
                **checks,
                "predicted_ns": stats.predicted_ns,
                "measured_ns": stats.iteration_ns,
                "error": stats.error,
                "predicted_peak": stats.predicted.peak_bytes,
                "measured_peak": stats.timeline.peak_bytes,
                "footprint": stats.footprint,
                "device_bytes": stats.device_bytes,
                "fits": stats.fits,
                "device": stats.device,
            }

        for case, plan in plans:
            record.measure(key_of("replay", case, plan), partial(measured, case, plan), limit=case.limit)
    if busiest[0]:
        record.add(kind="clocks", stage="replay", clocks=clocks)
        with suppress(ImportError):  # Matplotlib is optional
            from experiments.measure.gpu.plots import timelines

            timelines(record.out / "timeline.png", *busiest[1])


def key_of(kind: str, case: Case, plan: Plan) -> dict[str, Any]:
    """Returns the row entries that identify a plan's measurement."""
    return {"kind": kind, "workload": case.workload, "fraction": case.fraction, "planner": plan.planner}


def train(run: Run) -> None:
    """Trains real steps under plans of ``settings.train``, and as CUDA graphs for ``settings.graph``.

    Each plan runs twice: alternating with eager steps under PyTorch's defaults for time, and with deterministic
    operators to compare losses with eager ones bit by bit.
    """
    settings = run.settings
    machine = run.machine
    device = run.settings.device
    plans = planned(run, settings.train)
    pin_largest(run, plans)

    def measured(case: Case, plan: Plan, graph: bool) -> dict[str, Any]:
        eager = eager_bits(case.workload, device)
        trained = Training(device, case, plan, machine, graph)
        row = trained.within_cap(partial(trained.beside_eager, count=settings.steps))
        if "failed" in row:
            return row
        with deterministic():
            bits = trained.within_cap(trained.losses)
        timeline = simulate(case.program, plan, machine.in_graph() if graph else machine, case.limit)
        row |= {
            "equal": bits.get("losses") == eager["losses"],
            "eager_equal": eager["equal"],
            "not_deterministic": eager["nondeterministic"],
            "measured_peak": row.get("device_peak", row["ledger"]),
            "predicted_ns": timeline.iteration_ns if device == "cuda" else None,
            "predicted_peak": timeline.peak_bytes,
        }
        if "failed" in bits:
            row["equal_failed"] = bits["failed"]
        if row["predicted_ns"]:
            row["error"] = row["measured_ns"] / row["predicted_ns"] - 1
        return row

    for case, plan in plans:
        run.record.measure(key_of("train", case, plan), partial(measured, case, plan, False), limit=case.limit)
        if plan.planner in settings.graph:
            graph, plan = without_batch_swaps(case, plan)
            run.record.measure(key_of("graph", graph, plan), partial(measured, graph, plan, True), limit=graph.limit)


def compare(run: Run) -> None:
    """Measures every method at every limit, with the saved plans; a network without blocks gets one failed row.

    A row has ``measured_ns``, ``measured_peak``, ``limit``, ``setting``, ``eager_ns`` of the alternating eager steps,
    ``overhead`` relative to them and ``clocks``; or ``failed``.
    """
    settings = run.settings
    record = run.record
    machine = run.machine
    device = run.settings.device
    eager_trials = {name: eager for name, eager in eager_steps(run).items() if run.program(name).exists()}
    for name in settings.workloads:
        key: dict[str, Any] = {"kind": "compare", "workload": name, "method": "eager"}
        record.measure(key, partial(baselines.eager_row, name, device, eager_trials.get(name)), fraction=1.0)
        for row in record.successful(**key):
            eager = Trial(row["measured_ns"], row["measured_peak"], row["between"])
            program = Program.load(run.program(name)) if name in eager_trials else None
            for method in settings.methods:
                if method == "eager":
                    continue
                search = (
                    baselines.Ours(name, device, machine, program)
                    if method == OURS
                    else baselines.Levels(name, device, method)
                )
                for f in settings.limits:
                    files = [run.plan(name, f, OURS, i) for i in range(len(AIMS))] if program else []
                    plans = [Plan.load(file) for file in files if file.exists()]
                    limit = baselines.limit_at(f, eager)
                    measured = partial(baselines.row, search, limit, plans, settings.steps)
                    key = {"kind": "compare", "workload": name, "fraction": f, "method": method}
                    record.measure(key, measured, limit=limit)


def largest(run: Run) -> None:
    """Finds the largest batch of each method; each search gets an equal share of the remaining time.

    A row has ``batch`` (the largest), ``own_batch`` (the network's), ``cap`` in bytes, ``too_large`` (smallest batch
    that failed) and ``reason``; or ``failed``.
    """
    settings = run.settings
    record = run.record
    keys = [{"kind": "largest", "workload": name, "method": m} for name in settings.workloads for m in settings.methods]
    todo = [key for key in keys if not record.has(**key)]
    caps: dict[str, int] = {}
    for i, key in enumerate(todo):
        name = key["workload"]
        tries = Tries(name, key["method"], settings.device, run.machine)
        seconds = record.seconds_left() / (len(todo) - i)
        record.measure(key, partial(tries.row, seconds, caps), seconds, own_batch=own_batch(name))


# ------------------------------------------------------------------------------------------- processes


def run_stages(settings: Settings, words: Sequence[str], out: Path) -> int:
    """Runs each stage in its own process with a share of the time and returns the last exit status.

    A stage whose process dies or loses CUDA is restarted and skips the measurement that broke it.

    Args:
        settings: the stages and their time.
        words: ``key=value`` words of the settings.
        out: results folder.
    """
    end = time.monotonic() + settings.seconds
    status = 0
    forwarded = [word for word in words if word.partition("=")[0] not in ("stages", "out", "seconds")]
    for i, stage in enumerate(settings.stages):
        for _ in range(1 + DEATHS):
            share = STAGES[stage] / sum(STAGES[other] for other in settings.stages[i:])
            # All other stages depend on calibrate.
            seconds = max(30.0 if stage == "calibrate" else 1.0, share * (end - time.monotonic()))
            part = f"stages={stage}", f"out={out}", f"seconds={seconds:.0f}"
            status = run_process("experiments.validate_gpu", [*forwarded, *part])
            if status >= 0 and status != Status.BROKEN:
                break
        if status > 0 and status != Status.BROKEN:
            break
    return status


def run_stage(settings: Settings, out: Path) -> int:
    """Runs one stage in this process, writes the results of all stages so far and returns the exit status."""
    settings = replace(settings, out=str(out))
    run = Run(settings, Record(out, settings.seconds, settings.device))
    (name,) = settings.stages
    stage = {
        "calibrate": calibrate,
        "profile": profile,
        "plan": plan,
        "replay": replay,
        "train": train,
        "compare": compare,
        "largest": largest,
    }[name]
    machine = None

    def part() -> None:
        nonlocal machine
        if stage is not calibrate:
            machine = run.machine
        stage(run)

    try:
        status = run_part(part)
    finally:
        results.write(settings, machine, run.record)
    if not status:
        print(f"results of {name} are in {out}, packed in {results.pack(out)}")
    return status
