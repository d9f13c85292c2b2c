"""Packs the blocks of a file with every allocator and compares the footprints with the peak load.

    python -m experiments.pack blocks.csv out=packed
    python -m experiments.pack step.json.gz algorithms=[cnmem,smartpool] alignment=512
    python -m experiments.pack -m benchmarks/*.csv algorithms=[smartpool,optimal] seconds=10

The file is a MiniMalloc CSV, a PyTorch allocator snapshot, a log of mallocs and frees, or a program/1 file
(simulator/pool/files.py). The directory holds results.json ({algorithm: {footprint, load, ratio, seconds, proven,
allocation_ns}}), packing.png, solution.csv (the best packing) and summary.json. Its path is the last line printed.
simulator/pool/README.md defines the best packing and the comparison of online allocators.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from rich import box
from rich.table import Table

from experiments.common import cli, report
from experiments.plotting import packing as pack_plot, palette
from experiments.plotting.packing import binary
from simulator.compiled.encoding import NEVER
from simulator.files import write_json
from simulator.limits import size_bytes
from simulator.machine import Machine
from simulator.pool import ALLOCATORS, ITERATIONS, Intervals, Packing, files, run
from simulator.pool.intervals import overlap
from simulator.pool.times import allocation_ns

VIRTUAL = ("cudamalloc",)  # physical footprint, but virtual addresses


class Packed(NamedTuple):
    """Packing by one allocator: the blocks it packed, their addresses, its run time and modeled allocation time."""

    name: str
    intervals: Intervals
    packing: Packing
    seconds: float
    allocation_ns: int


@cli.entry("pack", positional="file")
def main(cfg: DictConfig) -> None:
    """Packs the blocks of ``file`` with every chosen allocator; writes the best packing."""
    file = cli.path(cfg, "file")
    if file is None:
        raise cli.UsageError("file: specify a file to pack, as in python -m experiments.pack blocks.csv")
    names = allocator_names(cli.values(cfg, "algorithms"))
    machine = cli.machine(cfg)
    alignment = cli.integer(cfg, "alignment", least=1)
    seconds = cli.number(cfg, "seconds")
    capacity = size_bytes(cfg.capacity, "capacity", least=1) if cfg.capacity is not None else None
    buffers = files.load(file, cli.choice(cfg, "iteration", (None, True, False)))
    load = buffers.intervals.peak_bytes
    if not load:
        raise cli.UsageError(f"{file}: contains no blocks to pack; expected a row per block below the header")
    sweep = HydraConfig.get().mode == RunMode.MULTIRUN  # sweep jobs must not overwrite each other
    label = f"pack-{file.name.removesuffix('.gz').rpartition('.')[0] or file.name}"
    with report.RunDirectory(cli.path(cfg, "out"), label, "results.json" if sweep else None) as out:
        done = pack_all(names, buffers.intervals, machine, alignment, seconds)
        best = min(
            (p for p in done if p.name not in VIRTUAL),
            key=lambda p: (p.packing.footprint, len(p.intervals), not p.packing.proven),  # ties: the first
        )
        solution = repeated(buffers, best.intervals)
        title = (
            f"{file.name}, {palette.ALLOCATORS[best.name].label}: {best.packing.footprint / load:.4f} of the peak "
            f"load, {binary(best.packing.footprint)}{', proven optimal' * best.packing.proven}"
        )
        pack_plot.draw(out / "packing.png", best.intervals, best.packing, title, solution.ids, capacity)
        files.save_solution(out / "solution.csv", solution, best.packing)
        write_json(out / "summary.json", {**report.run_info(cfg), "best": best.name}, indent=1)
        write_json(out / "results.json", {p.name: row(p, load) for p in done}, indent=1)
    report.console().print(table(done, best, load, capacity))
    repeats = ", one iteration, repeated" if buffers.intervals.period != NEVER else ""
    print(f"{file.name}: {len(buffers.intervals):,} blocks{repeats}; best: {best.name}")
    print(out)


def allocator_names(requested: list[Any]) -> list[str]:
    """Expands the allocators of a config, in the order of ALLOCATORS; 'all' means every one.

    Raises:
        UsageError: an allocator is unknown.
    """
    known = {*ALLOCATORS, "all"}
    for name in map(str, requested):
        if name not in known:
            raise cli.UsageError(f"algorithms: unknown allocator {name!r}{cli.nearest(name, known)}")
    names = [name for name in ALLOCATORS if name in requested or "all" in requested]
    if set(names) <= set(VIRTUAL):
        raise cli.UsageError(f"algorithms: {names[0]} has no physical addresses to write; add another allocator")
    return names


def pack_all(names: list[str], intervals: Intervals, machine: Machine, alignment: int, seconds: float) -> list[Packed]:
    """Runs and validates every allocator; shows a progress bar on stderr.

    Raises:
        RuntimeError: two blocks overlap or one lies outside the footprint (a bug of the allocator).
    """
    done = []
    for name in report.track(names, "packing with"):
        warm_up(name, intervals.period != NEVER)
        start = time.perf_counter()
        packed, packing = run(name, intervals, alignment, seconds)
        elapsed_s = time.perf_counter() - start
        done.append(Packed(name, packed, packing, elapsed_s, allocation_ns(name, intervals, machine)))
        if pair := overlap(packed, packing.offsets):
            raise RuntimeError(f"{name}: blocks {pair[0]} and {pair[1]} overlap; correct this allocator")
        ends = packing.offsets + packed.nbytes
        if packing.offsets.min() < 0 or (name not in VIRTUAL and ends.max() > packing.footprint):
            raise RuntimeError(f"{name}: a block lies outside the footprint; correct this allocator")
    return done


def warm_up(name: str, circle: bool) -> None:
    """Compiles an allocator (Numba) on a few random blocks, to keep compilation out of timings."""
    rng = np.random.default_rng(0)
    lower, length, nbytes = (rng.integers(low, high, 30) for low, high in ((0, 20), (1, 10), (1, 9)))
    blocks = Intervals(lower, lower + length, nbytes, 20 if circle else NEVER)
    run(name, blocks, 1, 0.1)


def repeated(buffers: files.Buffers, intervals: Intervals) -> files.Buffers:
    """Returns the buffers as they were packed: unchanged, or unrolled over several iterations."""
    if intervals.period == buffers.intervals.period:
        return files.Buffers(buffers.ids, intervals)
    _, source = buffers.intervals.unrolled(ITERATIONS)
    numbers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
    return files.Buffers(tuple(f"{buffers.ids[i]}@{next(numbers[i])}" for i in source.tolist()), intervals)


def row(packed: Packed, load: int) -> dict[str, Any]:
    """Returns the entry of results.json."""
    footprint = packed.packing.footprint
    return {
        "footprint": footprint,
        "load": load,
        "ratio": footprint / load,
        "seconds": round(packed.seconds, 6),
        "proven": packed.packing.proven,
        "allocation_ns": packed.allocation_ns,
    }


def table(done: list[Packed], best: Packed, load: int, capacity: int | None) -> Table:
    """Returns the table of packings, the best in bold."""
    out = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    out.add_column("allocator", no_wrap=True)
    for name in ("footprint", "", "load", "ratio", "seconds"):
        out.add_column(name, justify="right", no_wrap=True)
    out.add_column("proven", no_wrap=True)
    out.add_column("ms to allocate", justify="right", no_wrap=True)
    if capacity is not None:
        out.add_column(f"fits {capacity:,}", no_wrap=True)
    for p in done:
        n = p.packing.footprint
        cells = [p.name, f"{n:,}", binary(n), f"{load:,}", f"{n / load:.4f}", f"{p.seconds:.6f}"]
        cells += ["yes" if p.packing.proven else "–", f"{p.allocation_ns / 1e6:.3f}"]
        if capacity is not None:
            cells.append("yes" if n <= capacity else "no")
        out.add_row(*cells, style="bold" if p is best else "")
    return out


if __name__ == "__main__":
    main()
