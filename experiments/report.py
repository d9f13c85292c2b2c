"""Rows, tables and run directories: how every entry point says what it found.

A row is what one planner achieved on one program, machine and limit. Its keys are ROW_KEYS, and
``reason`` where it found no plan.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import agents
import simulator
from experiments.cli import UsageError, expected_errors
from simulator.files import write_json, write_text
from simulator.machine import Machine
from simulator.plan import Plan, Recompute
from simulator.program import Kernel, Program, Tensor
from simulator.timeline import Timeline

ROW_KEYS = (
    "workload", "machine", "limit_bytes", "limit_fraction", "planner", "seed", "feasible", "overhead",
    "iteration_ns", "ideal_ns", "peak_bytes", "plan_ms", "simulator_calls", "breakdown",
)  # fmt: skip

Row = dict[str, Any]
MB = 1e6


def row(
    program: Program,
    machine: Machine,
    limit: int,
    planner: str,
    seed: int,
    timeline: Timeline | None,
    plan_s: float | None = None,
    calls: int | None = None,
    reason: str = "",
) -> Row:
    """One line of results.jsonl; without a timeline the planner was infeasible for ``reason``."""
    found = {
        "workload": program.name,
        "machine": machine.name,
        "limit_bytes": limit,
        "limit_fraction": limit / program.peak_bytes if program.peak_bytes else 1.0,
        "planner": planner,
        "seed": seed,
        "feasible": timeline is not None,
        "overhead": timeline.overhead if timeline else None,
        "iteration_ns": timeline.iteration_ns if timeline else None,
        "ideal_ns": program.ideal_ns,
        "peak_bytes": timeline.peak_bytes if timeline else None,
        "plan_ms": None if plan_s is None else round(plan_s * 1000, 3),
        "simulator_calls": calls,
        "breakdown": asdict(timeline.breakdown) if timeline else None,
    }
    return found if timeline else {**found, "reason": reason}


def score(name: str, program: Program, machine: Machine, limit: int, seed: int) -> tuple[Row, Plan | None]:
    """Plans with the planner ``name``, simulates the plan, and says what it achieved."""
    planner = agents.make(name, **({} if name == "none" else {"seed": seed}))
    start = time.perf_counter()
    try:
        plan = planner.plan(program, machine, limit)
    except agents.Infeasible as error:
        spent = time.perf_counter() - start
        return row(program, machine, limit, name, seed, None, spent, planner.simulator_calls, str(error)), None
    spent = time.perf_counter() - start
    timeline = simulator.simulate(program, plan, machine, limit)
    return row(program, machine, limit, name, seed, timeline, spent, planner.simulator_calls), plan


def score_plan(plan: Plan, program: Program, machine: Machine, limit: int, seed: int) -> Row:
    """What an existing plan achieves. Raises PlanError when it is for another program."""
    name = plan.planner or "plan"
    try:
        return row(program, machine, limit, name, seed, simulator.simulate(program, plan, machine, limit))
    except simulator.OutOfMemory as error:
        return row(program, machine, limit, name, seed, None, reason=str(error))


def warm_up(machine: Machine) -> None:
    """Compiles the simulator (Numba) on a program of four kernels, so that no planner is timed doing it."""
    tensors = (Tensor("x", 2**21), Tensor("y", 2**21), Tensor("z", 2**21))
    kernels = (
        Kernel("a", "other", "forward", (), (0,), 1000),
        Kernel("b", "other", "forward", (0,), (1,), 1000),
        Kernel("c", "other", "forward", (1,), (2,), 1000),
        Kernel("d", "other", "backward", (0, 2), (2,), 1000),
    )
    tiny = Program("warm-up", tensors, kernels)
    simulator.simulate(tiny, Plan((Recompute(0, 1, 3),)), machine, 2 * tiny.peak_bytes)
    for name in agents.PLANNERS:
        if not learned(name) and name != "annealing":  # annealing compiles nothing that random does not
            score(name, tiny, machine, 3 * 2**21, 0)


def learned(name: str) -> bool:
    """Is this planner trained, rather than run?"""
    return name.startswith("dqn")


def planner_names(asked: list[Any]) -> list[str]:
    """The planners of a config, 'all' standing for every one that needs no training.

    Raises:
        UsageError: there is no such planner, or it needs training.
    """
    names: list[str] = []
    for name in asked:
        if name == "all":
            names += [p for p in agents.PLANNERS if not learned(p)]
            continue
        if learned(str(name)):
            raise UsageError(f"planners: {name} is learned: train_dqn trains it, evaluate plan=FILE scores its plan")
        try:
            agents.make(str(name))
        except ValueError as error:
            raise UsageError(f"planners: {error}") from None
        names.append(str(name))
    return list(dict.fromkeys(names))


# ------------------------------------------------------------------------------------------ for people


def table(rows: Iterable[Row], limits: bool = False) -> Table:
    """The rows for people, in the order given; the best overhead at each limit in bold."""
    rows = list(rows)
    best: dict[int, float] = {}
    for r in rows:
        if r["feasible"]:
            best[r["limit_bytes"]] = min(best.get(r["limit_bytes"], float("inf")), r["overhead"])
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    if limits:
        out.add_column("limit", justify="right", no_wrap=True)
    out.add_column("planner", no_wrap=True)
    for name in ("overhead", "iteration", "peak", "plan time", "simulator calls"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("feasible", overflow="fold")
    last = None
    for r in rows:
        if limits and last not in (None, r["limit_bytes"]):
            out.add_section()
        cells = [r["planner"]]
        if limits:
            cells.insert(0, f"{r['limit_fraction']:.0%}" if r["limit_bytes"] != last else "")
        last = r["limit_bytes"]
        if r["feasible"]:
            cells += [f"{r['overhead']:.2%}", f"{r['iteration_ns'] / 1e6:.1f} ms", f"{r['peak_bytes'] / MB:,.0f} MB"]
        else:
            cells += ["–", "–", "–"]
        cells.append("–" if r["plan_ms"] is None else duration(r["plan_ms"] / 1000))
        cells.append("–" if r["simulator_calls"] is None else f"{r['simulator_calls']:,}")
        cells.append("yes" if r["feasible"] else f"no: {reason(r)}")
        out.add_row(*cells, style="bold" if r["feasible"] and r["overhead"] == best[r["limit_bytes"]] else "")
    return out


def reason(r: Row) -> str:
    """Why a row is infeasible, for the table: the part that the other columns do not say already."""
    text: str = r["reason"]
    return text.rpartition("; ")[2]


def duration(seconds: float) -> str:
    """A duration in the unit that reads best."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def console(stderr: bool = False) -> Console:
    """A console: as wide as the terminal, and wide enough for a table where there is none."""
    out = Console(stderr=stderr, highlight=False)
    return out if out.is_terminal else Console(stderr=stderr, highlight=False, width=150)


def progress() -> Progress:
    """A progress bar on stderr for work that comes in equal pieces."""
    return Progress(TextColumn("{task.description}"), BarColumn(40), MofNCompleteColumn(), TimeElapsedColumn(),
                    console=console(stderr=True), refresh_per_second=4)  # fmt: skip


# --------------------------------------------------------------------------------- the run directory


class RunDirectory:
    """The directory that a run leaves behind. As a context: when the run fails, a new directory goes again.

    Files are written whole or not at all, so a run that is killed leaves only whole files. A run that is
    interrupted, or that a bug ends, keeps its checkpoint.

    Args:
        path: the directory; a default is named after ``label`` and the time.
        finished: a file that marks a finished run, which is not overwritten.

    Raises:
        UsageError: it cannot be made, or already holds a finished run.
    """

    def __init__(self, path: Path | None, label: str, finished: str | None = None):
        if path is not None and finished and (path / finished).exists():
            raise UsageError(f"out: {path} already holds a finished run ({finished}); name another directory")
        self.named = path
        self.default = Path("runs") / f"{label}-{time.strftime('%Y%m%d-%H%M%S')}"
        self._new: Path | None = None

    def __enter__(self) -> Path:
        try:
            if self.named is not None and self.named.is_dir():
                return self.named
            path, n = self.named or self.default, 1
            while True:
                try:
                    path.mkdir(parents=True)
                    break
                except FileExistsError:  # another job of a sweep, in the same second
                    if self.named is not None:
                        raise
                    n += 1
                    path = self.default.with_name(f"{self.default.name}-{n}")
        except OSError as error:
            raise UsageError(f"out: {path} cannot be made ({error.strerror})") from None
        self._new = path
        return path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._new is None or error is None:
            return
        if isinstance(error, expected_errors()) or not (self._new / "checkpoint.pt").exists():
            shutil.rmtree(self._new)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Writes results.jsonl."""
    write_text(path, "".join(json.dumps(r) + "\n" for r in rows))


def write_summary(path: Path, cfg: DictConfig, program: Program, rows: list[Row], **more: Any) -> None:
    """Writes summary.json: what was asked, with what, and what came out."""
    packages: dict[str, str | None] = {}
    for name in ("torch", "torch-geometric", "numpy", "numba", "gymnasium", "hydra-core"):
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            packages[name] = None
    write_json(path, {
        "command": ["python", "-m", _module(), *sys.argv[1:]],
        "config": OmegaConf.to_container(cfg, resolve=True),
        "versions": {"python": platform.python_version(), **packages},
        "program": {"name": program.name, "fingerprint": program.fingerprint, "kernels": len(program.kernels),
                    "tensors": len(program.tensors), "peak_bytes": program.peak_bytes, "ideal_ns": program.ideal_ns},
        "results": rows,
        **more,
    }, indent=1)  # fmt: skip


def command() -> str:
    """The command that was typed, without where its result went."""
    words = [w for w in sys.argv[1:] if not w.startswith(("out=", "resume="))]
    return " ".join(["python", "-m", _module(), *words])


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec else Path(sys.argv[0]).name
