"""Result rows, tables and run directories shared by all commands.

A row describes what one planner achieved on a program, machine and limit. Its keys are ROW_KEYS, plus ``reason`` if the
planner found no plan. Three keys come from the floor of all plans of ``mode`` (agents/floor/):

- ``bound_overhead``: certified lower bound of the overhead; None if no plan fits the limit.
- ``bound_bytes``: certified lower bound of the feasible limits.
- ``gap``: overhead - bound_overhead, an upper bound of the optimality gap; None if infeasible.

``workspace`` selects the kernels' algorithms (agents/heuristics/workspace.py): false: those of the program; "least":
smallest workspace; true: under that plan the fastest that fit the free memory.
"""

from __future__ import annotations

import inspect
import json
import platform
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from importlib import metadata
from itertools import count, groupby
from pathlib import Path
from typing import Any, Literal

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
from experiments.common.errors import UsageError, expected_errors
from experiments.common.lock import lock_directory
from experiments.common.own_files import typed_overrides
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
    "workload",
    "machine",
    "limit_bytes",
    "limit_fraction",
    "planner",
    "mode",
    "workspace",
    "seed",
    "feasible",
    "overhead",
    "bound_overhead",
    "bound_bytes",
    "gap",
    "iteration_ns",
    "ideal_ns",
    "peak_bytes",
    "plan_ms",
    "simulator_calls",
    "breakdown",
)

Row = dict[str, Any]
Workspace = Literal["least"] | bool
ABLATION = "without the network"  # the DQN's walk with uniformly drawn edits
MIB = 2**20


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
    """Returns a row of results.jsonl without its bounds; without a timeline it is infeasible for ``reason``."""
    result = dict.fromkeys(ROW_KEYS) | {
        "workload": program.name,
        "machine": machine.name,
        "limit_bytes": limit,
        "limit_fraction": limit / program.peak_bytes if program.peak_bytes else 1.0,
        "planner": planner,
        "mode": mode,
        "workspace": workspace,
        "seed": seed,
        "feasible": timeline is not None,
        "ideal_ns": program.ideal_ns,
        "plan_ms": None if plan_s is None else round(plan_s * 1000, 3),
        "simulator_calls": calls,
    }
    if timeline is None:
        return {**result, "reason": reason}
    measured = {key: getattr(timeline, key) for key in ("overhead", "iteration_ns", "peak_bytes")}
    return result | measured | {"breakdown": asdict(timeline.breakdown)}


def with_bounds(result: Row, floor: Floor) -> Row:
    """Returns a row with the floor of its mode and limit filled in."""
    bound = floor.overhead if floor.feasible else None
    gap = result["overhead"] - bound if result["feasible"] and bound is not None else None
    return {**result, "bound_overhead": bound, "bound_bytes": floor.least_bytes, "gap": gap}


def score(
    name: str,
    program: Program,
    machine: Machine,
    limit: int,
    seed: int,
    mode: str | None = None,
    workspace: Workspace = False,
    **options: Any,
) -> tuple[Row, Plan | None]:
    """Plans with the planner ``name``, simulates the plan and returns its row and the plan.

    Args:
        mode: swap, recompute or joint; passed to planners that have the option. A plan of any other planner counts only
            if all its decisions are of this mode. None: the planner's default.
        workspace: kernel algorithms, as in a row.
        options: further planner options, as in ``make``.
        program, machine, limit: The task; the limit is in bytes.
        seed: Seed of the planner.

    Returns:
        The row, and the plan if one was found.
    """
    return score_with(make(name, seed=seed, mode=mode, **options), program, machine, limit, seed, mode, workspace)[:2]


def score_with(
    planner: agents.Planner,
    program: Program,
    machine: Machine,
    limit: int,
    seed: int,
    mode: str | None = None,
    workspace: Workspace = False,
    label: str = "",
) -> tuple[Row, Plan | None, Timeline | None]:
    """Scores an existing planner as ``score``, and returns the timeline; ``label`` replaces its name in the row."""
    start = time.perf_counter()
    plan = None
    reason = ""
    try:
        if workspace:
            plan = plan_with_variants(planner, program, machine, limit, fill=workspace is True)
        else:
            plan = planner.plan(program, machine, limit)
    except agents.Infeasible as error:
        reason = str(error)
    plan_s = time.perf_counter() - start
    if reason and (host := host_needed(program, machine, limit, mode or "joint")):
        reason += f"; host memory is too small: {size(machine.host_bytes)} for swapped tensors, {size(host)} needed"
    if plan is not None and (reason := mode_mismatch(plan, mode)):
        plan = None
    # A plan's limit may be lower: addresses of smartpool+autoswap are only valid under its own limit.
    timeline = simulator.simulate(program, plan, machine, min(limit, plan.limit)) if plan is not None else None
    calls = planner.simulator_calls
    mode = mode or "joint"
    result = row(program, machine, limit, label or planner.name, seed, timeline, plan_s, calls, reason, mode, workspace)
    return result, plan, timeline


def score_plan(
    plan: Plan,
    program: Program,
    machine: Machine,
    limit: int,
    seed: int,
    mode: str | None = None,
    workspace: Workspace = False,
) -> Row:
    """Returns the row of an existing plan, as ``score``; with ``workspace`` its variants are replaced.

    Raises:
        PlanError: the plan is for another program.
    """
    name = plan.planner or "plan"
    timeline = None
    reason = mode_mismatch(plan, mode)
    if not reason:
        try:
            if workspace == "least":
                plan = replace(plan, variants=least_workspaces(program))
            elif workspace:
                plan = with_fastest_variants(program, plan, machine, limit)
            timeline = simulator.simulate(program, plan, machine, limit)
        except (simulator.OutOfMemory, agents.Infeasible) as error:
            reason = str(error)
    return row(program, machine, limit, name, seed, timeline, reason=reason, mode=mode or "joint", workspace=workspace)


def is_external(name: str) -> bool:
    """Returns whether a planner's name is ``module:Class``, ``module:function`` or an archive (.zip)."""
    return ":" in name or name.endswith(".zip")


def external_factory(name: str) -> Callable[..., agents.Planner]:
    """Returns what makes the planner of an external name (``is_external``).

    Raises:
        UsageError: the name cannot be imported.
        FormatError: the archive is malformed.
    """
    if name.endswith(".zip"):
        from agents.learned.external import ArchivePlanner

        ArchivePlanner(Path(name).expanduser())  # checks the file
        return partial(ArchivePlanner, Path(name).expanduser())
    from experiments.workloads.module import WorkloadError, import_target  # PyTorch

    try:
        target = import_target(name)
    except WorkloadError as error:
        raise UsageError(f"cannot import {name!r} as 'module:Class' ({error})") from None
    if callable(getattr(target, "plan", None)):
        return target
    if inspect.isclass(target):
        raise UsageError(f"{name} must have a method plan(program, machine, limit), or be a function of an observation")
    from agents.learned.external import FunctionPlanner

    return partial(FunctionPlanner, target)


def make(name: str, **options: Any) -> agents.Planner:
    """Makes a planner with those ``options`` that it has and that are not None.

    Raises:
        ValueError: as in ``agents.make``.
        UsageError, FormatError: as in ``external_factory``.
    """
    if is_external(name):
        factory = external_factory(name)
        accepted = inspect.signature(factory).parameters
        planner = factory(**{k: v for k, v in options.items() if k in accepted and v is not None})
        for attribute in ("name", "simulator_calls"):
            if not hasattr(planner, attribute):
                raise UsageError(f"{name}: its planner has no attribute {attribute!r}; see agents.Planner")
        return planner
    known = agents.options(name)
    return agents.make(name, **{k: v for k, v in options.items() if k in known and v is not None})


def ablations(calls: int, seconds: float | None, **options: Any) -> dict[str, agents.Planner]:
    """Returns the DQN's walk without the network, by name: with equal simulator calls, and with equal seconds.

    ``seconds`` is None for a resumed run, whose total time is unknown; the second ablation is then left out.
    """
    planners = {f"{ABLATION}, equal calls": agents.make("dqn", ranks="uniform", calls=max(calls, LEAST), **options)}
    if seconds is not None:
        planners[f"{ABLATION}, equal seconds"] = agents.make("dqn", ranks="uniform", seconds=seconds, **options)
    return planners


def contenders(rows: list[Row]) -> list[Row]:
    """Returns the rows without the published methods, except the best of them."""
    published = [r for r in rows if r["planner"] in heuristics()]
    best = min((r for r in published if r["feasible"]), key=lambda r: r["overhead"], default=None)
    return [r for r in rows if r is best or r not in published]


def mode_mismatch(plan: Plan, mode: str | None) -> str:
    """Returns why a plan is not of ``mode`` (swap, recompute, joint or None for any); '' if it is."""
    mode_of = {kind: mode for mode in ("swap", "recompute") for kind in KINDS_OF[mode]}
    kinds = {mode_of.get(d.kind, d.kind) for d in plan.decisions}
    if mode in (None, "joint") or kinds <= {mode}:
        return ""
    return f"its plan has decisions to {' and '.join(sorted(kinds))}"


def warm_up(machine: Machine, name: str, mode: str | None = None) -> None:
    """Compiles a planner's Numba functions on a program of four kernels, to keep compilation out of timings."""
    tiny = warm.TINY
    if is_external(name):
        simulator.simulate(tiny, warm.SWAPPED, machine, 2 * tiny.peak_bytes)
        return
    if "swap" not in (mode, agents.PLANNERS[name].moves):  # first, since that also covers plans of swaps
        plan = Plan((Recompute(0, 1, 3),))
        simulator.simulate(tiny, plan, machine, 2 * tiny.peak_bytes)
        simulator.Engine(tiny, machine, 2 * tiny.peak_bytes).residency(rows_of(plan.decisions))
    simulator.simulate(tiny, warm.SWAPPED, machine, 2 * tiny.peak_bytes)
    for limit in (3 * 2**21, 2 * 2**21):  # a search that reaches the ideal time skips functions
        score(name, tiny, machine, limit, 0, mode, calls=40, jobs=1)


def planner_names(requested: list[Any], **options: Any) -> list[str]:
    """Expands the planners of a config: 'all' to every untrained planner, 'published' to ``heuristics``.

    Args:
        options: options of the planners, as in ``make``.
        requested: Names as typed.

    Returns:
        Keys of planners, or names of classes.

    Raises:
        UsageError: a planner is unknown, needs training, or rejects its options.
    """
    names: list[str] = []
    for name in map(str, requested):
        if name in agents.PLANNERS and agents.PLANNERS[name].learned:
            raise UsageError(f"planners: {name} needs training: use train_dqn, or evaluate plan=FILE")
        names += {"all": agents.untrained(), "published": heuristics()}.get(name, [name])
    for name in names:
        try:
            make(name, **options)
        except ValueError as error:  # also UsageError and FormatError
            raise UsageError(f"planners: {name}: {error}") from None
    return list(dict.fromkeys(names))


def heuristics() -> list[str]:
    """Returns the published heuristics that plan within seconds."""
    slow = ("autoswap_bo", "home", "smartpool+autoswap")  # they search for long, or plan addresses
    facts = (f for f in agents.PLANNERS.values() if f.paper and f.family not in ("search", "learned"))
    return [f.key for f in facts if f.key not in slow]


def planner_list() -> str:
    """Returns help lines with key, eviction kinds, label and paper of every planner for ``planner_names``."""
    entries = [agents.PLANNERS[name] for name in agents.untrained()]
    keys, moves = (max(len(getattr(facts, field)) for facts in entries) for field in ("key", "moves"))
    labels = ((facts, f"{facts.label}, {facts.paper}" if facts.paper else facts.label) for facts in entries)
    return "\n".join(f"{facts.key:{keys}}  {facts.moves:{moves}}  {text}" for facts, text in labels)


OmegaConf.register_new_resolver("planner_list", planner_list, replace=True)  # for help texts in configs/


# ------------------------------------------------------------------------------------------ terminal output


def headline(program: Program, machine: Machine, limit: int) -> str:
    """Describes program, machine and limit in one sentence."""
    peak = program.peak_bytes
    fraction = limit / program.peak_bytes
    return (
        f"{program.name} on {machine.name}: {len(program.kernels):,} kernels, {program.ideal_ns / 1e6:.1f} ms an "
        f"iteration, peak {peak / MIB:,.0f} MiB; limit {limit / MIB:,.0f} MiB ({fraction:.0%})"
    )


def table(rows: Iterable[Row], limits: bool = False) -> Table:
    """Returns a table of the rows in the given order, with the floor above each limit and the best row in bold."""
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    if limits:
        out.add_column("limit", justify="right", no_wrap=True)
    out.add_column("planner", no_wrap=True)
    for name in ("overhead", "gap, points", "iteration", "peak", "plan time", "simulator calls"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("feasible", overflow="fold")
    for _, group in groupby(rows, key=lambda r: r["limit_bytes"]):
        members = list(group)
        first = members[0]
        out.add_section()
        out.add_row(*([f"{first['limit_fraction']:.0%}"] if limits else []), *_floor_cells(first), style="italic")
        lowest = min((r["overhead"] for r in members if r["feasible"]), default=None)
        for r in members:
            is_best = r["feasible"] and r["overhead"] == lowest
            out.add_row(*([""] if limits else []), *_cells(r), style="bold" if is_best else "")
    return out


def _floor_cells(r: Row) -> list[str]:
    name = "floor" if r["mode"] == "joint" else f"floor ({r['mode']})"
    if r["bound_overhead"] is not None:
        return [name, percent(r["bound_overhead"])]
    return [name, "–", "", "", "", "", "", f"no plan fits: the smallest limit is {r['bound_bytes'] / MIB:,.0f} MiB"]


def _cells(r: Row) -> list[str]:
    return [
        r["planner"],
        percent(r["overhead"]),
        _optional(r["gap"], lambda gap: f"{100 * gap:.2f}"),
        _optional(r["iteration_ns"], lambda ns: f"{ns / 1e6:.1f} ms"),
        _optional(r["peak_bytes"], lambda nbytes: f"{nbytes / MIB:,.0f} MiB"),
        _optional(r["plan_ms"], lambda ms: duration(ms / 1000)),
        _optional(r["simulator_calls"], "{:,}".format),
        "yes" if r["feasible"] else f"no: {reason(r)}",
    ]


def percent(value: float | None) -> str:
    """Formats a fraction as a percentage; None as a dash."""
    return _optional(value, "{:.2%}".format)


def _optional(value: Any, text: Callable[[Any], str]) -> str:
    return "–" if value is None else text(value)


def reason(r: Row, format_bytes: Callable[[int], str] = lambda nbytes: f"{nbytes / MIB:,.0f} MiB") -> str:
    """Returns why a row is infeasible, without facts in other columns; ``format_bytes`` formats bytes."""
    if r["bound_overhead"] is None:
        return "no plan fits (the floor)"
    text: str = r["reason"].rpartition("; ")[2].replace("the smallest limit it can reach is", "its smallest limit is")
    return re.sub(r"([\d,]+) bytes$", lambda m: format_bytes(int(m[1].replace(",", ""))), text)


def duration(seconds: float) -> str:
    """Formats a duration in a readable unit."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def console(stderr: bool = False) -> Console:
    """Returns a console as wide as the terminal; without a terminal, wide enough for a table."""
    out = Console(stderr=stderr, highlight=False, markup=False)  # names may contain brackets
    return out if out.is_terminal else Console(stderr=stderr, highlight=False, markup=False, width=150)


def progress(target: Console | None = None, manual_refresh: bool = False) -> Progress:
    """Returns a progress bar with the estimated remaining time.

    Args:
        target: console (default: stderr); the bar is hidden if it is not a terminal.
        manual_refresh: draw only on ``refresh``, so that no thread disturbs timings.
    """
    target = target or console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(40),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=target,
        refresh_per_second=4,
        auto_refresh=not manual_refresh,
        disable=not target.is_terminal,
        speed_estimate_period=3600,  # steps may take minutes; default: 30 s
        redirect_stdout=sys.stdout.isatty(),
    )  # keep redirected stdout out of stderr


def track(items: Sequence[Any], description: str) -> Iterator[Any]:
    """Yields the items with a progress bar labeled ``description`` and the current item's name."""
    with progress() as bar:
        task = bar.add_task(description, total=len(items))
        for item in items:
            bar.update(task, description=f"{description} {getattr(item, 'name', item)}")
            yield item
            bar.advance(task)


@contextmanager
def track_stages(stages: Mapping[str, float], manual_refresh: bool = False) -> Iterator[Callable[..., None]]:
    """Shows a progress bar over stages of different length; yields a function to call when a stage begins.

    The function takes the name of the stage; call it in order (stages may be skipped). With a detail, it shows that of
    the running stage on a terminal. If stderr is not a terminal, it prints a line per finished stage.

    Args:
        stages: expected duration of each stage, in any unit; may change until the stage begins.
        manual_refresh: redraw only when a stage begins, as in ``progress``.
    """
    names = list(stages)
    with progress(manual_refresh=manual_refresh) as bar:
        task = bar.add_task(names[0], total=100)
        running: list[tuple[str, float]] = []

        def end() -> None:
            if running and bar.disable:
                name, start = running.pop()
                print(f"{name}: {duration(time.monotonic() - start)}", file=sys.stderr, flush=True)

        def begin(name: str, detail: str = "") -> None:
            if detail:
                bar.update(task, description=f"{name}, {detail}")
                return
            end()
            running.append((name, time.monotonic()))
            elapsed = sum(stages[earlier] for earlier in names[: names.index(name)])
            bar.update(task, completed=100 * elapsed / sum(stages.values()), description=name, refresh=True)

        yield begin
        end()
        bar.update(task, completed=100)


# --------------------------------------------------------------------------------- the run directory


class RunDirectory:
    """Context manager of a run's output directory; removes a new directory if the run fails.

    Files are written atomically, so a killed run leaves only complete files. An interrupted or crashed run keeps its
    directory if it has a checkpoint.

    Args:
        path: the directory; None: a name from ``label`` and the time.
        finished: file that marks a finished run, which is never overwritten.

    Raises:
        UsageError: the directory cannot be created, or already holds a finished run.
    """

    def __init__(self, path: Path | None, label: str, finished: str | None = None):
        if path is not None and finished and (path / finished).exists():
            raise UsageError(f"out: {path} already holds a finished run ({finished}); choose another directory")
        self.path = path
        self.default = Path("runs") / f"{safe(label)}-{time.strftime('%Y%m%d-%H%M%S')}"
        self._created: Path | None = None

    def __enter__(self) -> Path:
        path = self._make()
        self._lock = lock_directory(path)
        self._lock.__enter__()
        if HydraConfig.initialized():  # Hydra's run directory is the working directory
            (path / ".hydra").mkdir(exist_ok=True)
            write_text(path / ".hydra" / "overrides.yaml", OmegaConf.to_yaml(typed_overrides()))
        return path

    def _make(self) -> Path:
        if self.path is not None and self.path.is_dir():
            return self.path
        path = self.path or self.default
        try:
            for n in count(2):
                try:
                    path.mkdir(parents=True)
                    break
                except FileExistsError:  # another job of the sweep started in the same second
                    if self.path is not None:
                        raise
                    path = self.default.with_name(f"{self.default.name}-{n}")
        except OSError as error:
            raise UsageError(f"out: {path} cannot be created ({error.strerror}); choose another directory") from None
        self._created = path
        return path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._lock.__exit__(None, None, None)
        if self._created is None or error is None:
            return
        if isinstance(error, expected_errors()) or not (self._created / "checkpoint.pt").exists():
            shutil.rmtree(self._created)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Writes results.jsonl."""
    write_text(path, "".join(json.dumps(r) + "\n" for r in rows))


def write_summary(path: Path, cfg: DictConfig, program: Program, rows: list[Row], **extra: Any) -> None:
    """Writes summary.json (command, config, versions, results) and program.json beside it."""
    program.save(path.with_name("program.json"))
    write_json(
        path,
        {
            **run_info(cfg),
            "program": {
                "name": program.name,
                "fingerprint": program.fingerprint,
                "kernels": len(program.kernels),
                "tensors": len(program.tensors),
                "peak_bytes": program.peak_bytes,
                "ideal_ns": program.ideal_ns,
            },
            "results": rows,
            **extra,
        },
        indent=1,
    )


def run_info(cfg: DictConfig) -> Row:
    """Returns command, config and package versions: the first entries of summary.json."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    packages = "torch torch-geometric stable-baselines3 sb3-contrib numpy numba gymnasium hydra-core"
    for name in packages.split():
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    config = OmegaConf.to_container(cfg, resolve=True)
    return {"command": ["python", "-m", *sys.argv], "config": config, "versions": versions}


def command() -> str:
    """Returns the typed command (cli.py stores it in ``sys.argv``) without out= and resume=."""
    words = [w for w in sys.argv[1:] if not w.startswith(("out=", "resume="))]
    return " ".join(["python", "-m", sys.argv[0], *words])
