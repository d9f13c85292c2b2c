"""Does the simulator say what a GPU does?

    python -m experiments.validate_gpu [backend=cuda|host] [key=value …]

It calibrates the machine, captures and profiles each workload, plans it by every planner that needs no training,
replays each plan, and trains real steps under some of them; ``compare=true`` adds what PyTorch offers
(pytorch_baselines.py), ``largest=true`` the largest batch of each (largest_batch.py). A limit of 0.7 is persistent
tensors and 70 % of what the peak has above them. Every measurement is appended to ``measurements.jsonl`` at once and
gathered, also when the run is stopped, in results.json, table.md and PNGs.

Each stage has a share of the time that is left; what is left out or broken off has a row that says so. ``backend=host``
does the same in small without a GPU. Needed: PyTorch, CuPy, NumPy, SciPy, Numba, Matplotlib, PyYAML and rich.
Stages, times and results: executor/README.md, experiments/README.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

# Before PyTorch is imported: experiments/validate_gpu/flags.py says why.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from rich.console import Console
from rich.table import Table

import agents
from agents.deadline import TimeUp, within
from executor import CaptureError, ReplayError, open_backend, replay
from executor.calibrate import calibrate
from executor.capture.profile import ProfileError, measure, path_of, with_profile
from executor.replay.backend import BackendError
from experiments.common import help
from experiments.common.lock import Busy, held
from experiments.validate_gpu import largest_batch, pytorch_baselines
from experiments.validate_gpu.clocks import watched
from experiments.validate_gpu.flags import deterministic, report
from experiments.validate_gpu.networks import MIB, give_back, host_bytes, made
from experiments.validate_gpu.plots import batches, scatter, timelines
from experiments.validate_gpu.pytorch_baselines import GRACE, LATE, METHODS, STOPPED
from experiments.validate_gpu.settings import Settings, UsageError, parse
from experiments.validate_gpu.training import (
    Case,
    eager_bits,
    fresh,
    losses_only,
    replanned,
    timed_beside,
    train_capped,
)
from simulator import Machine, OutOfMemory, Plan, Program, simulate
from simulator.files import FormatError, write_json, write_text
from simulator.plan import PlanError

FORMAT = "validation/1"
# Of the time that is left when it begins; less for the last two where the comparison comes after them.
CALIBRATING, PROFILING, PLANNING, REPLAYING, TRAINING = 0.06, 0.35, 0.4, 0.65, 1.0
REPLAYING_BEFORE, TRAINING_BEFORE = 0.3, 0.2
# Less work for planners that search, so that all have their turn.
LESS = {"cuda": {"calls": 4000, "seconds": 20.0, "iterations": 50},
        "host": {"calls": 500, "seconds": 3.0, "iterations": 10, "particles": 50}}  # fmt: skip
PAGE = 2**21  # a GPU gives memory in pages
REPLAY: dict[str, dict[str, Any]] = {"cuda": {}, "host": {"iterations": 3, "warmup": 1, "seconds": 1.0}}
# The host as a GPU: transfers slow enough for threads.
HOST = Machine("host", 2**30, 50_000_000, 50_000_000, copy_latency_ns=200_000, host_bytes=2**30,
               flops_per_s={"float32": 10**10}, memory_bytes_per_s=10**10)  # fmt: skip
HOST_ITERATION_NS, HOST_KERNEL_NS = 40_000_000, 150_000  # about, and at least


class Record:
    """What was measured: rows in memory and, at once, lines of a file."""

    def __init__(self, out: Path, seconds: float, console: Console):
        out.mkdir(parents=True, exist_ok=True)
        self.out, self.console, self.begin, self.seconds = out, console, time.monotonic(), seconds
        self.rows: list[dict[str, Any]] = []
        self.file = (out / "measurements.jsonl").open("w")

    def add(self, kind: str, **row: Any) -> None:
        """One row."""
        self.rows.append({"kind": kind, **row})
        self.file.write(json.dumps(self.rows[-1]) + "\n")
        self.file.flush()
        head = " ".join(str(row[k]) for k in ("workload", "fraction", "planner", "method") if k in row)
        times = (f"{k.removesuffix('_ns')} {row[k] / 1e6:.2f} ms" for k in row if k.endswith("_ns") and row[k])
        what = row.get("failed") or ", ".join(times) or (f"batch {row['batch']}" if "batch" in row else "")
        line = f"[{time.monotonic() - self.begin:5.0f} s, {self.left():5.0f} s left] {kind} {head}: {what}"
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def left(self, until: float | None = None) -> float:
        """Seconds until then; else until the budget is spent."""
        return (self.begin + self.seconds if until is None else until) - time.monotonic()

    def share(self, part: float) -> float:
        """When this part of what is left now is spent."""
        return time.monotonic() + part * self.left()

    def of(self, kind: str) -> list[dict[str, Any]]:
        """The rows of a kind that did not fail."""
        return [r for r in self.rows if r["kind"] == kind and "failed" not in r]


def cases(settings: Settings, machine: Machine, record: Record) -> list[Case]:
    """Captures and profiles the workloads."""
    out, until = [], record.share(PROFILING)
    for name in settings.workloads:
        if record.left(until) <= 0:
            record.add("profile", workload=name, failed=f"{LATE}; it is not planned, replayed or trained")
            continue
        try:
            with within(record.left(until) + GRACE):
                program = profiled(settings, name, machine, record, record.left(until))
        except (ProfileError, TimeUp) as error:
            record.add("profile", workload=name, failed=str(error) or STOPPED)
            continue
        persistent = sum(t.nbytes for t in program.tensors if t.persistent)
        out += [
            Case(name, program, f, persistent + round(f * (program.peak_bytes - persistent))) for f in settings.limits
        ]
    return out


def profiled(settings: Settings, name: str, machine: Machine, record: Record, seconds: float) -> Program:
    """The program of a workload with measured durations."""
    captured = fresh(name, settings.device).captured(machine)
    try:
        profile = measure(captured, settings.device, machine.name, seconds=seconds, cache=settings.cache)  # type: ignore[arg-type]
    except ProfileError:
        if settings.cache != "step":
            raise
        give_back()  # all of a step does not fit, one kernel may
        profile = measure(captured, settings.device, machine.name, seconds=seconds / 2, cache="cold")
    profile.save(record.out / "profiles" / path_of(profile).name)
    program = with_profile(captured.program, profile)
    if settings.backend == "host":
        scale = HOST_ITERATION_NS / max(program.ideal_ns, 1)
        durations = [k.duration_ns and max(HOST_KERNEL_NS, round(k.duration_ns * scale)) for k in program.kernels]
        program = program.with_durations(durations)
    record.add("profile", workload=name, kernels=len(program.kernels), ideal_ns=program.ideal_ns,
               peak_bytes=program.peak_bytes, device=profile.device, cache=profile.cache)  # fmt: skip
    return program


# ------------------------------------------------------------------------------------------- plans


def plan_one(planner: str, case: Case, machine: Machine, less: dict[str, float]) -> tuple[Plan | str, float]:
    """The plan, or why there is none; and seconds. Of the options ``less``, those that the planner has."""
    begin = time.monotonic()
    try:
        found: Plan | str = made(planner, case.program, **less).plan(case.program, machine, case.limit)
    except agents.Infeasible as error:
        found = str(error)
    except ImportError as error:
        found = f"{planner} is left out: {error}"
    except Exception as error:  # a planner that breaks must not end the run; the row says so
        found = f"{planner} raised {type(error).__name__}: {error}"
    return found, time.monotonic() - begin


@contextmanager
def planning(workers: int) -> Iterator[Any]:
    """A pool of processes; what still runs at the end is terminated.

    They are forked, so it must be made before there are threads and before CUDA is used.
    """
    ignore = signal.SIGINT, signal.SIG_IGN  # Ctrl-C is for the parent
    with multiprocessing.get_context("fork").Pool(workers, signal.signal, ignore) as pool:
        yield pool


def make_plans(
    settings: Settings, todo: list[Case], machine: Machine, record: Record, pool: Any
) -> list[tuple[Case, Plan]]:
    """Plans of all planners for all cases, those that came in time."""
    found: list[tuple[Case, Plan]] = []

    def keep(case: Case, planner: str, answer: tuple[Plan | str, float] | None) -> None:
        row = {"workload": case.workload, "fraction": case.fraction, "limit": case.limit, "planner": planner}
        if answer is None:
            record.add("plan", **row, failed="no plan within the time")
        elif isinstance(answer[0], str):
            record.add("plan", **row, failed=answer[0], seconds=answer[1])
        else:
            predicted = simulate(case.program, answer[0], machine, case.limit)
            record.add("plan", **row, seconds=answer[1], predicted_ns=predicted.iteration_ns,
                       ideal_ns=case.program.ideal_ns, decisions=len(answer[0].decisions))  # fmt: skip
            answer[0].save(record.out / "plans" / f"{case.workload}-{case.fraction}-{planner}.json")
            found.append((case, answer[0]))

    less, until = LESS[settings.backend], record.share(PLANNING)
    jobs = [(planner, case, machine, less) for planner in settings.planners for case in todo]  # the exact one is last
    answers = [pool.apply_async(plan_one, job) for job in jobs]
    for job, answer in zip(jobs, answers, strict=True):
        try:
            keep(job[1], job[0], answer.get(max(0.0, record.left(until))))
        except multiprocessing.TimeoutError:
            keep(job[1], job[0], None)
    pool.terminate()  # nothing else may run while times are measured
    pool.join()
    return found


# ------------------------------------------------------------------------------------------- measurements


def replay_all(settings: Settings, plans: list[tuple[Case, Plan]], machine: Machine, record: Record) -> None:
    """Replays every plan; draws the one that moves most."""
    most: tuple[int, Any] = (0, None)
    give_back()
    checked: set[tuple[str, float]] = set()
    until = record.share(REPLAYING_BEFORE if settings.compare else REPLAYING)
    options = {**REPLAY[settings.backend], "kernels": settings.kernels}
    with (
        open_backend(settings.backend, HOST if settings.backend == "host" else machine, settings.pause_ns) as backend,
        watched(settings.device) as clocks,
    ):
        for case, plan in plans:
            row = {"workload": case.workload, "fraction": case.fraction, "limit": case.limit, "planner": plan.planner}
            if record.left(until) <= 0:
                record.add("replay", **row, failed=LATE)
                continue
            try:
                with within(record.left(until) + GRACE):
                    found = replay(case.program, plan, machine, case.limit, backend, **options)
                    if (case.workload, case.fraction) not in checked and plan.decisions:
                        checked.add((case.workload, case.fraction))
                        row["checks"] = replay(case.program, plan, machine, case.limit, backend, 2, 1, "check").checks
            except (ReplayError, BackendError, PlanError, OutOfMemory, TimeUp) as error:
                record.add("replay", **row, failed=str(error) or STOPPED)
                continue
            record.add(
                "replay", **row, predicted_ns=found.predicted_ns, measured_ns=found.iteration_ns, error=found.error,
                predicted_peak=found.predicted.peak_bytes, measured_peak=found.timeline.peak_bytes,
                footprint=found.footprint, device_bytes=found.device_bytes, fits=found.fits, device=found.device,
                kernels=found.kernels, absorbed_ns=found.absorbed_ns,
            )  # fmt: skip
            moves = sum(s.stream != "compute" for s in found.timeline.spans)
            if moves > most[0]:
                most = moves, (found, f"{case.workload} at {case.fraction:.0%}", plan.planner)
    record.add("clocks", stage="replay", pause_ns=settings.pause_ns, clocks=clocks)
    if most[1]:
        timelines(record.out / "timeline.png", *most[1])


def train_all(settings: Settings, plans: list[tuple[Case, Plan]], machine: Machine, record: Record) -> None:
    """Real steps under the plans of ``settings.train``, and of ``settings.graph`` as graphs, each twice: for time, in
    turns with eager steps, as PyTorch does them by default; and for bits, where operators take their deterministic
    form, beside eager steps that do."""
    eager: dict[tuple[str, bool], dict[str, Any]] = {}
    until = record.share(TRAINING_BEFORE if settings.compare else TRAINING)
    passes = [(case, plan, graph) for case, plan in plans if plan.planner in settings.train
              for graph in (False, True)[: 1 + (plan.planner in settings.graph)]]  # fmt: skip
    for case, plan, graph in passes:
        kind, name = "graph" if graph else "train", case.workload
        row = {"workload": name, "fraction": case.fraction, "limit": case.limit, "planner": plan.planner}
        if record.left(until) <= 0:
            record.add(kind, **row, failed=LATE)
            continue
        try:
            with within(record.left(until) + GRACE):
                if (name, graph) not in eager:  # twice: the second tells whether eager is equal to itself
                    eager[name, graph] = eager_bits(name, settings.device, graph)
                if graph:
                    seconds, less = record.left(until), LESS[settings.backend]
                    case, plan = replanned(case, plan, machine, settings.device, seconds, less)
                    row["limit"] = case.limit
                got = bits = train_capped(
                    settings.device, case, plan, machine, timed_beside, count=settings.steps, graph=graph
                )
                if "failed" not in got:
                    with deterministic():
                        bits = train_capped(settings.device, case, plan, machine, losses_only, graph=graph)
        except TimeUp:
            got = {"failed": STOPPED}
        except (ProfileError, agents.Infeasible) as error:
            got = {"failed": f"for a graph: {error}"}
        if "failed" not in got:
            timeline = simulate(case.program, plan, machine, case.limit)
            same = eager[name, graph]
            got |= {"equal": bits.get("losses") == same["losses"], "eager_equal": same["equal"],
                    "not_deterministic": same["loose"], "measured_peak": got.get("device_peak", got["ledger"]),
                    "predicted_ns": timeline.iteration_ns if settings.device == "cuda" else None,
                    "predicted_peak": timeline.peak_bytes}  # fmt: skip
            if "failed" in bits:
                got["equal_failed"] = bits["failed"]
            if got["predicted_ns"]:
                got["error"] = got["measured_ns"] / got["predicted_ns"] - 1
        record.add(kind, **row, **got)


# ------------------------------------------------------------------------------------------- results


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Errors of the time and of the peak, mean absolute and worst; how many took more than their limit, and how many
    replays' arenas did by the device's own count, which is of whole pages."""
    time_errors = [abs(r["error"]) for r in rows if r.get("error") is not None]
    peaks = [abs(r["measured_peak"] / r["predicted_peak"] - 1) for r in rows]
    out: dict[str, Any] = {"count": len(rows)}
    for name, errors in (("time", time_errors), ("peak", peaks)):
        if errors:
            out[name] = {"mean_absolute": sum(errors) / len(errors), "worst": max(errors)}
    arenas = [r for r in rows if "device_bytes" in r]
    return out | {
        "over_limit": sum(r["measured_peak"] > r["limit"] for r in rows),
        "arenas_over_limit": sum(r["device_bytes"] > -(-r["limit"] // PAGE) * PAGE for r in arenas),
    }


def write_results(settings: Settings, machine: Machine | None, record: Record) -> None:
    """results.json, table.md and the scatter, of what there is."""
    sums = {kind: summary(record.of(kind)) for kind in ("replay", "train", "graph")}
    write_json(record.out / "results.json", {
        "format": FORMAT, "settings": asdict(settings), "torch": str(torch.__version__),
        "device": torch.cuda.get_device_name() if settings.device == "cuda" else "host", "flags": report(),
        "machine": machine.to_dict() if machine else None, "seconds": time.monotonic() - record.begin,
        "summary": sums, "rows": record.rows,
    }, indent=1)  # fmt: skip
    head = ("", "workload", "limit", "planner", "predicted ms", "measured ms", "error", "peak MiB", "measured", "limit")
    lines = [("---",) * len(head)]
    table = Table(*head)
    for kind in ("replay", "train", "graph"):
        for r in record.of(kind):
            cells = (
                kind, r["workload"], f"{r['fraction']:.0%}", r["planner"],
                f"{r['predicted_ns'] / 1e6:.2f}" if r["predicted_ns"] else "", f"{r['measured_ns'] / 1e6:.2f}",
                f"{r['error']:+.2%}" if r.get("error") is not None else "",
                *(f"{r[k] / MIB:.2f}" for k in ("predicted_peak", "measured_peak", "limit")),
            )  # fmt: skip
            lines.append(cells)
            table.add_row(*cells)
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in [head, *lines]) + "\n"
    for kind, found in sums.items():
        for what in ("time", "peak"):
            if what in found:
                e = found[what]
                said = f"{kind}, {what}: mean absolute error {e['mean_absolute']:.2%}, worst {e['worst']:.2%}"
                text += f"\n{said} over {found['count']} plans.\n"
                record.console.print(said, markup=False)
    for r in record.of("graph"):
        text += (f"\ngraph {r['workload']} {r['fraction']:.0%} {r['planner']}: pool {r['pool_bytes'] / MIB:.2f} MiB, "
                 f"packing {r['packed_bytes'] / MIB:.2f} MiB, eager {r['eager_ns'] / 1e6:.2f} ms, bits "
                 f"{'equal' if r['equal'] else 'differ'}.\n")  # fmt: skip
    failed = [r for r in record.rows if "failed" in r]
    text += "".join(f"\n- {r['kind']} {r.get('workload', '')} {r.get('fraction', '')} "
                    f"{r.get('planner', r.get('method', ''))}: {r['failed']}" for r in failed) + "\n"  # fmt: skip
    for kind, shown in (("compare", pytorch_baselines.table), ("largest", largest_batch.table)):
        if any(r["kind"] == kind for r in record.rows):
            text += "\n" + shown(record.of(kind))
    write_text(record.out / "table.md", text)
    record.console.print(table)
    if record.of("replay"):
        scatter(record.out / "predicted_vs_measured.png", record.of("replay"), record.of("train"))
    if record.of("largest"):
        batches(record.out / "largest_batch.png", record.of("largest"))


def main(words: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    keys = help.table(help.attributes(Settings))
    parser = argparse.ArgumentParser("experiments.validate_gpu", description=str(__doc__), epilog=f"keys:\n{keys}",
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("settings", nargs="*", metavar="key=value")
    try:
        settings = parse(parser.parse_args(words).settings)
        if settings.backend == "cuda" and not torch.cuda.is_available():
            raise UsageError("there is no CUDA GPU here; backend=host runs the same in small without one")
        base = HOST if settings.backend == "host" else Machine.load(settings.machine)
    except (UsageError, FormatError) as error:
        print(error, file=sys.stderr)
        return 2
    out = Path(settings.out or f"runs/validate_gpu-{time.strftime('%Y%m%d-%H%M%S')}")
    out.mkdir(parents=True, exist_ok=True)
    try:
        with held(out):
            return measured(settings, base, out)
    except Busy as error:
        print(error, file=sys.stderr)
        return 2


def measured(settings: Settings, base: Machine, out: Path) -> int:
    """Everything, in a directory of its own; returns the exit status."""
    record, machine = Record(out, settings.seconds, Console(width=None if sys.stdout.isatty() else 150)), None
    try:
        with planning(settings.workers) as pool:
            with open_backend(settings.backend, base) as backend:
                seconds = CALIBRATING * settings.seconds
                with within(seconds + GRACE):
                    found = calibrate(backend, base, 2**20 if settings.backend == "host" else 2**30, seconds=seconds)
            machine = found.machine
            if settings.backend == "cuda":
                machine = replace(machine, host_bytes=min(machine.host_bytes, host_bytes()))
            found.save(out / "machine.yaml")
            record.add("calibration", device=found.device, fit_error=found.fit_error, machine=machine.to_dict())
            plans = make_plans(settings, cases(settings, machine, record), machine, record, pool)
        replay_all(settings, plans, machine, record)
        train_all(settings, plans, machine, record)
        names, device = settings.workloads, settings.device
        methods = [m for m in METHODS if m != "compile" or device == "cuda"]
        if settings.compare:
            pytorch_baselines.compare(names, settings.limits, device, machine, record, methods, settings.steps)
        if settings.largest:
            record.seconds = time.monotonic() - record.begin + settings.largest_seconds
            largest_batch.search(names, device, machine, record, settings.largest_seconds, methods)
    except TimeUp:
        record.add("calibration", failed=f"{STOPPED}; nothing else was measured")
    except (BackendError, CaptureError, FormatError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; what was measured until now is kept", file=sys.stderr)
        return 130
    finally:
        write_results(settings, machine, record)
        record.file.close()
        record.console.print(f"results are in {out}", markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
