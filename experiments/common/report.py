"""Rows, tables and run directories: how every entry point says what it found.

A row is what one planner achieved on one program, machine and limit. Its keys are ROW_KEYS, and ``reason`` if it found
no plan. From the floor under all plans of ``mode`` (agents/floor/):

- ``bound_overhead``: no plan has less; None where no plan fits the limit.
- ``bound_bytes``: no plan fits a smaller limit.
- ``gap``: overhead - bound_overhead, how far from the best plan it is at most; None where it is infeasible.

``workspace`` says which algorithms kernels run with (agents/heuristics/workspace.py): false, their own; "least", those
of the least workspace; true, under that plan the fastest that fit the memory it leaves.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

import agents
import simulator
from agents.floor import Floor
from agents.heuristics.workspace import least_workspaces, plan_with_variants, with_fastest_variants
from agents.host import host_needed
from agents.planner import LEAST
from experiments.common.endings import UsageError, expected_errors
from experiments.common.lock import held
from experiments.common.own_files import own_overrides
from simulator.compiled import warm
from simulator.compiled.engine import rows_of
from simulator.files import label as safe, write_json, write_text
from simulator.machine import Machine
from simulator.modes import KINDS_OF
from simulator.plan import Plan, Recompute
from simulator.program import Program
from simulator.report import size
from simulator.timeline import Timeline

ROW_KEYS = (
    "workload", "machine", "limit_bytes", "limit_fraction", "planner", "mode", "workspace", "seed", "feasible",
    "overhead", "bound_overhead", "bound_bytes", "gap", "iteration_ns", "ideal_ns", "peak_bytes", "plan_ms",
    "simulator_calls", "breakdown",
)  # fmt: skip

Row = dict[str, Any]
T = TypeVar("T")
Workspace = Literal["least"] | bool
CONTROL = "uniform edits"  # the DQN's walk over edits that are drawn alike, without a network
OURS = ("search", "learned")  # families of planners that are no published heuristics
SLOW = ("autoswap_bo", "home", "smartpool+autoswap")  # heuristics that search for long, or plan addresses
MB = 1e6
VERSIONS = ("torch", "torch-geometric", "stable-baselines3", "sb3-contrib", "numpy", "numba", "gymnasium", "hydra-core")


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
    mode: str = "joint",
    workspace: Workspace = False,
) -> Row:
    """One line of results.jsonl, to be certified; without a timeline the planner was infeasible for ``reason``."""
    found = {
        "workload": program.name,
        "machine": machine.name,
        "limit_bytes": limit,
        "limit_fraction": limit / program.peak_bytes if program.peak_bytes else 1.0,
        "planner": planner,
        "mode": mode,
        "workspace": workspace,
        "seed": seed,
        "feasible": timeline is not None,
        "overhead": timeline.overhead if timeline else None,
        "bound_overhead": None,
        "bound_bytes": None,
        "gap": None,
        "iteration_ns": timeline.iteration_ns if timeline else None,
        "ideal_ns": program.ideal_ns,
        "peak_bytes": timeline.peak_bytes if timeline else None,
        "plan_ms": None if plan_s is None else round(plan_s * 1000, 3),
        "simulator_calls": calls,
        "breakdown": asdict(timeline.breakdown) if timeline else None,
    }
    return found if timeline else {**found, "reason": reason}


def certified(found: Row, floor: Floor) -> Row:
    """A row with the floor under all plans of its mode within its limit."""
    bound = floor.overhead if floor.feasible else None
    gap = found["overhead"] - bound if found["feasible"] and bound is not None else None
    return {**found, "bound_overhead": bound, "bound_bytes": floor.least_bytes, "gap": gap}


def score(
    name: str, program: Program, machine: Machine, limit: int, seed: int, mode: str | None = None,
    workspace: Workspace = False, **options: Any,
) -> tuple[Row, Plan | None]:  # fmt: skip
    """Plans with the planner ``name``, simulates the plan, and says what it achieved.

    Args:
        mode: swap, recompute or joint, for every planner that has the option; a plan of a planner without it
            counts when it happens to be of the mode. None: the planner's own.
        workspace: which algorithms kernels run with, as in a row.
        options: more options for the planners that have them, as ``made``.
    """
    return score_with(made(name, seed=seed, mode=mode, **options), program, machine, limit, seed, mode, workspace)[:2]


def score_with(
    planner: agents.Planner, program: Program, machine: Machine, limit: int, seed: int, mode: str | None = None,
    workspace: Workspace = False, named: str = "",
) -> tuple[Row, Plan | None, Timeline | None]:  # fmt: skip
    """``score`` of a planner that is made, and the plan's timeline; the row has its name, or another one."""
    start = time.perf_counter()
    plan, why = None, ""
    try:
        if workspace:
            plan = plan_with_variants(planner, program, machine, limit, fill=workspace is True)
        else:
            plan = planner.plan(program, machine, limit)
    except agents.Infeasible as error:
        why = str(error)
    spent = time.perf_counter() - start
    if why and (host := host_needed(program, machine, limit, mode or "joint")):
        why += f"; the host has too little: {size(machine.host_bytes)} for what is swapped, and {size(host)} would do"
    if plan is not None and (why := other_mode(plan, mode)):
        plan = None
    # A plan can be for less than was asked: the addresses of smartpool+autoswap hold under its own limit only.
    timeline = simulator.simulate(program, plan, machine, min(limit, plan.limit)) if plan is not None else None
    calls, mode = planner.simulator_calls, mode or "joint"
    found = row(program, machine, limit, named or planner.name, seed, timeline, spent, calls, why, mode, workspace)
    return found, plan, timeline


def score_plan(
    plan: Plan, program: Program, machine: Machine, limit: int, seed: int, mode: str | None = None,
    workspace: Workspace = False,
) -> Row:  # fmt: skip
    """What an existing plan achieves, as ``score``; with ``workspace`` its variants are replaced.

    Raises:
        PlanError: it is for another program.
    """
    name, timeline, why = plan.planner or "plan", None, other_mode(plan, mode)
    if not why:
        try:
            if workspace == "least":
                plan = replace(plan, variants=least_workspaces(program))
            elif workspace:
                plan = with_fastest_variants(program, plan, machine, limit)
            timeline = simulator.simulate(program, plan, machine, limit)
        except (simulator.OutOfMemory, agents.Infeasible) as error:
            why = str(error)
    return row(program, machine, limit, name, seed, timeline, reason=why, mode=mode or "joint", workspace=workspace)


def made(name: str, **options: Any) -> agents.Planner:
    """A planner with those of the ``options`` that it has and that are not None; raises ValueError as ``make``."""
    known = agents.options(name)
    return agents.make(name, **{k: v for k, v in options.items() if k in known and v is not None})


def controls(calls: int, seconds: float | None, **options: Any) -> dict[str, agents.Planner]:
    """Returns the controls of a training by name: uniform edits with as many simulator calls, and with as many seconds
    (None: not known, since the run was resumed)."""
    found = {f"{CONTROL}, equal calls": agents.make("dqn", ranks="uniform", calls=max(calls, LEAST), **options)}
    if seconds is not None:
        found[f"{CONTROL}, equal seconds"] = agents.make("dqn", ranks="uniform", seconds=seconds, **options)
    return found


def contenders(rows: list[Row]) -> list[Row]:
    """The rows without the published methods that are not the best of them."""
    published = [r for r in rows if r["planner"] in heuristics()]
    best = min((r for r in published if r["feasible"]), key=lambda r: r["overhead"], default=None)
    return [r for r in rows if r is best or r not in published]


def other_mode(plan: Plan, mode: str | None) -> str:
    """Why a plan is none of ``mode`` (swap, recompute, joint or None for any); '' where it is."""
    mode_of = {kind: mode for mode in ("swap", "recompute") for kind in KINDS_OF[mode]}
    kinds = {mode_of.get(d.kind, d.kind) for d in plan.decisions}
    if mode in (None, "joint") or kinds <= {mode}:
        return ""
    return f"its plan has decisions to {' and '.join(sorted(kinds))}"


def warm_up(machine: Machine, name: str, mode: str | None = None) -> None:
    """Compiles what a planner calls (Numba) on a program of four kernels, so that it is not timed doing it."""
    tiny = warm.TINY
    if "swap" not in (mode, agents.PLANNERS[name].moves):  # then first, because that serves plans of swaps, too
        plan = Plan((Recompute(0, 1, 3),))
        simulator.simulate(tiny, plan, machine, 2 * tiny.peak_bytes)
        simulator.Engine(tiny, machine, 2 * tiny.peak_bytes).residency(rows_of(plan.decisions))
    simulator.simulate(tiny, warm.SWAPPED, machine, 2 * tiny.peak_bytes)
    for limit in (3 * 2**21, 2 * 2**21):  # a search that is at the ideal time compiles nothing more
        score(name, tiny, machine, limit, 0, mode, calls=40, jobs=1)


def planner_names(asked: list[Any], **options: Any) -> list[str]:
    """The planners of a config, 'all' standing for every one that needs no training, 'published' for ``heuristics``.

    Args:
        options: as for ``made``.

    Raises:
        UsageError: there is no such planner, it needs training, or it refuses its options.
    """
    names: list[str] = []
    for name in map(str, asked):
        if name in agents.PLANNERS and agents.PLANNERS[name].learned:
            raise UsageError(f"planners: {name} is learned: train_dqn trains it, evaluate plan=FILE scores its plan")
        names += {"all": agents.untrained(), "published": heuristics()}.get(name, [name])
    for name in names:
        try:
            made(name, **options)
        except ValueError as error:
            raise UsageError(f"planners: {name}: {error}") from None
    return list(dict.fromkeys(names))


def heuristics() -> list[str]:
    """The published heuristics that plan in seconds."""
    facts = [f for f in agents.PLANNERS.values() if f.paper and f.family not in OURS]
    return [f.key for f in facts if f.key not in SLOW]


def planner_list() -> str:
    """Lines of a help text: key, what it moves, label and paper of every planner that ``planner_names`` knows."""
    entries = [agents.PLANNERS[name] for name in agents.untrained()]
    keys, moves = (max(len(getattr(facts, what)) for facts in entries) for what in ("key", "moves"))
    named = ((facts, f"{facts.label}, {facts.paper}" if facts.paper else facts.label) for facts in entries)
    return "\n".join(f"{facts.key:{keys}}  {facts.moves:{moves}}  {text}" for facts, text in named)


OmegaConf.register_new_resolver("planner_list", planner_list, replace=True)  # of the help texts in configs/


# ------------------------------------------------------------------------------------------ for people


def headline(program: Program, machine: Machine, limit: int) -> str:
    """What is planned, in a sentence."""
    peak, fraction = program.peak_bytes, limit / program.peak_bytes
    return (
        f"{program.name} on {machine.name}: {len(program.kernels):,} kernels, {program.ideal_ns / 1e6:.1f} ms an "
        f"iteration, peak {peak / MB:,.0f} MB; limit {limit / MB:,.0f} MB ({fraction:.0%})"
    )


def table(rows: Iterable[Row], limits: bool = False) -> Table:
    """The rows for people, in the order given, the floor above those of a limit; the best at each in bold."""
    rows = list(rows)
    best: dict[int, float] = {}
    for r in rows:
        if r["feasible"]:
            best[r["limit_bytes"]] = min(best.get(r["limit_bytes"], float("inf")), r["overhead"])
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    if limits:
        out.add_column("limit", justify="right", no_wrap=True)
    out.add_column("planner", no_wrap=True)
    for name in ("overhead", "gap, points", "iteration", "peak", "plan time", "simulator calls"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("feasible", overflow="fold")
    last = None
    for r in rows:
        if last != r["limit_bytes"]:
            if last is not None:
                out.add_section()
            last = r["limit_bytes"]
            overhead = "–" if r["bound_overhead"] is None else f"{r['bound_overhead']:.2%}"
            cells = ["floor" if r["mode"] == "joint" else f"floor ({r['mode']})", overhead, "", "", "", "", ""]
            text = f"no plan fits: the smallest limit is {r['bound_bytes'] / MB:,.0f} MB" if overhead == "–" else ""
            out.add_row(*([f"{r['limit_fraction']:.0%}"] if limits else []), *cells, text, style="italic")
        cells = [*([""] if limits else []), r["planner"]]
        if r["feasible"]:
            cells += [f"{r['overhead']:.2%}", "–" if r["gap"] is None else f"{100 * r['gap']:.2f}"]
            cells += [f"{r['iteration_ns'] / 1e6:.1f} ms", f"{r['peak_bytes'] / MB:,.0f} MB"]
        else:
            cells += ["–", "–", "–", "–"]
        cells.append("–" if r["plan_ms"] is None else duration(r["plan_ms"] / 1000))
        cells.append("–" if r["simulator_calls"] is None else f"{r['simulator_calls']:,}")
        cells.append("yes" if r["feasible"] else f"no: {reason(r)}")
        out.add_row(*cells, style="bold" if r["feasible"] and r["overhead"] == best[r["limit_bytes"]] else "")
    return out


def reason(r: Row, said: Callable[[int], str] = lambda nbytes: f"{nbytes / MB:,.0f} MB") -> str:
    """Why a row is infeasible, for the table: the part that the other columns do not say already; ``said``: bytes for
    people."""
    if r["bound_overhead"] is None:
        return "no plan fits (the floor)"
    text: str = r["reason"].rpartition("; ")[2].replace("the smallest limit it can reach is", "its smallest limit is")
    return re.sub(r"([\d,]+) bytes$", lambda m: said(int(m[1].replace(",", ""))), text)


def duration(seconds: float) -> str:
    """A duration in the unit that reads best."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def console(stderr: bool = False) -> Console:
    """A console: as wide as the terminal, and wide enough for a table where there is none."""
    out = Console(stderr=stderr, highlight=False, markup=False)  # a name may have brackets
    return out if out.is_terminal else Console(stderr=stderr, highlight=False, markup=False, width=150)


def progress(on: Console | None = None, still: bool = False) -> Progress:
    """A progress bar with the time that is left, for work that comes in pieces.

    Args:
        on: where; stderr by default. Nothing is shown on what is no terminal.
        still: it is drawn on demand only (``refresh``), so that no thread runs beside what is timed.
    """
    on = on or console(stderr=True)
    return Progress(TextColumn("{task.description}"), BarColumn(40), MofNCompleteColumn(), TimeElapsedColumn(),
                    TextColumn("left"), TimeRemainingColumn(), console=on, refresh_per_second=4,
                    auto_refresh=not still, disable=not on.is_terminal,
                    speed_estimate_period=3600,  # a piece may take minutes; the default forgets it after 30 seconds
                    redirect_stdout=sys.stdout.isatty())  # fmt: skip  # what goes into a file is not for stderr


def tracked(items: Sequence[T], doing: str, on: Console | None = None) -> Iterator[T]:
    """The items, with a progress bar (as ``progress``) that says which one is at work: ``doing`` and its name."""
    with progress(on) as bar:
        shown = bar.add_task(doing, total=len(items))
        for item in items:
            bar.update(shown, description=f"{doing} {getattr(item, 'name', item)}")
            yield item
            bar.advance(shown)


@contextmanager
def staged(stages: Mapping[str, float], still: bool = False) -> Iterator[Callable[[str], None]]:
    """A progress bar (as ``progress``) of 100 parts over stages that differ in length; gives what is to be called with
    the name of a stage when it begins, in their order (some may be left out). Where stderr is no terminal, a line for
    each stage that is over.

    Args:
        stages: what each is expected to take, in any unit.
        still: drawn again when a stage begins only, as ``progress``.
    """
    names, whole = list(stages), sum(stages.values())
    with progress(still=still) as bar:
        shown = bar.add_task(names[0], total=100)
        present: list[tuple[str, float]] = []

        def end() -> None:
            if present and bar.disable:
                (name, began), now = present.pop(), time.monotonic()
                print(f"{name}: {duration(now - began)}", file=sys.stderr, flush=True)

        def begin(name: str) -> None:
            end()
            present.append((name, time.monotonic()))
            before = sum(stages[other] for other in names[: names.index(name)])
            bar.update(shown, completed=100 * before / whole, description=name, refresh=True)

        yield begin
        end()
        bar.update(shown, completed=100)


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
        self.default = Path("runs") / f"{safe(label)}-{time.strftime('%Y%m%d-%H%M%S')}"
        self._new: Path | None = None

    def __enter__(self) -> Path:
        path = self._made()
        self._held = held(path)
        self._held.__enter__()
        if HydraConfig.initialized():  # Hydra's own directory is the working directory
            (path / ".hydra").mkdir(exist_ok=True)
            write_text(path / ".hydra" / "overrides.yaml", OmegaConf.to_yaml(own_overrides()))
        return path

    def _made(self) -> Path:
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
        self._held.__exit__(None, None, None)
        if self._new is None or error is None:
            return
        if isinstance(error, expected_errors()) or not (self._new / "checkpoint.pt").exists():
            shutil.rmtree(self._new)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Writes results.jsonl."""
    write_text(path, "".join(json.dumps(r) + "\n" for r in rows))


def write_summary(path: Path, cfg: DictConfig, program: Program, rows: list[Row], **more: Any) -> None:
    """Writes summary.json (what was asked, with what, and what came out), and program.json beside it."""
    program.save(path.with_name("program.json"))
    write_json(path, {
        **asked(cfg),
        "program": {"name": program.name, "fingerprint": program.fingerprint, "kernels": len(program.kernels),
                    "tensors": len(program.tensors), "peak_bytes": program.peak_bytes, "ideal_ns": program.ideal_ns},
        "results": rows,
        **more,
    }, indent=1)  # fmt: skip


def asked(cfg: DictConfig) -> Row:
    """What was typed, every setting, and the versions of what it runs with: the beginning of summary.json."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in VERSIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    config = OmegaConf.to_container(cfg, resolve=True)
    return {"command": ["python", "-m", *sys.argv], "config": config, "versions": versions}


def command() -> str:
    """The command that was typed (as cli.py leaves it in ``sys.argv``), without where its result went."""
    words = [w for w in sys.argv[1:] if not w.startswith(("out=", "resume="))]
    return " ".join(["python", "-m", sys.argv[0], *words])
