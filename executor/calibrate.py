"""Measures what a Machine says about transfers and launches, on a backend.

    python -m executor.calibrate machine.yaml [--backend cuda|host] [--machine h200] [--max-bytes N]

writes a Machine that ``Machine.load`` and every command's ``machine=machine.yaml`` read, each figure with how it was
measured, and machine.json with every measurement. What is not measured (FLOP rates, memory bandwidth, efficiencies,
alignment, the driver's calls) is that of the machine given. How (reasons in executor/README.md):

1. *Transfers*: the median of REPEATS copies of 4 KiB to 1 GiB, from the end of a kernel to that of the copy (rule 4).
2. *Latency and bandwidths*: least squares of the relative errors of latency + bytes / bandwidth, one latency for both.
3. *Duplex*: the largest copy in both directions at once, beside each alone: what each carries beside the other.
4. *Launch*: LAUNCHES empty kernels, issued while a long one runs. *Issue*: the host's part of a replayed one.
5. *Contention*: a kernel that streams through the GPU's memory, beside a copy in each direction and alone.
6. *Context* (CUDA): what a second process takes of the GPU besides tensors (executor/memory/context.py).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Literal

import numpy as np
import yaml

from executor.memory.context import ContextError, context_bytes
from executor.replay import open_backend
from executor.replay.backend import Backend, BackendError
from executor.replay.replay import Run
from executor.replay.streams import circle
from simulator.files import FormatError, write_json, write_text
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Kernel, Program

FORMAT = "calibration/2"
SMALLEST, LARGEST = 2**12, 2**30
REPEATS = 7
LAUNCHES = 500  # a stream takes about a thousand before the host must wait
ISSUE_NS = 1_000_000  # of the kernel during which the host issues a few calls
ONE_ENGINE = 0.85  # of one after the other: from here on, both at once are one engine
DUPLEX_ERROR = 0.02  # the least measuring error of the shares; a larger spread of the repeats counts
MOST = 0.49  # that a copy can be said to take of a kernel's speed (Machine.copy_contention)

Direction = Literal["d2h", "h2d"]
DIRECTIONS: tuple[Direction, Direction] = ("h2d", "d2h")


@dataclass(frozen=True)
class Calibration:
    """What was measured.

    Attributes:
        machine: with the measured figures.
        device: in words.
        transfers: direction -> (bytes, ns) by size.
        fit_error: the largest relative error of latency + bytes / bandwidth.
        duplex: direction -> how many times as long a copy of the largest size takes while one goes the other way.
        share: direction -> of its own speed while both are busy.
        share_error: the largest spread between the quartiles of their measurements, at least DUPLEX_ERROR.
        contention: direction -> what a copy takes of the speed of a kernel that streams.
        contention_error: the largest spread between quartiles, of its measurements and of that kernel's times alone.
        context: the machine's ``context_bytes`` is measured, too (executor/memory/context.py).
    """

    machine: Machine
    device: str
    transfers: dict[str, list[tuple[int, int]]]
    fit_error: float
    duplex: dict[str, float]
    share: dict[str, float]
    share_error: float
    contention: dict[str, float]
    contention_error: float
    context: bool = False

    def to_yaml(self) -> str:
        """The machine as Machine.load reads it, with comments."""
        sizes = f"copies of {_size(self.transfers['h2d'][0][0])} to {_size(self.transfers['h2d'][-1][0])}"
        fit = f"measured: least squares over {sizes}, worst error {self.fit_error:.1%}"
        beside = "measured: {:.1%} of alone, give or take {:.1%}; 0: as alone"
        slower = " and ".join(f"{d} {self.duplex[d]:.2f}" for d in DIRECTIONS)
        taken = " and ".join(f"{d} {self.contention[d]:.1%}" for d in DIRECTIONS)
        measured = {
            "name": "",
            "memory_bytes": "as the device says",
            "h2d_bytes_per_s": fit,
            "d2h_bytes_per_s": fit,
            "d2h_latency_ns": f"{fit}; from the end of the kernel",
            "h2d_latency_ns": f"{fit}; from the end of the kernel",
            "copy_engines": f"measured: with both directions at once {slower} times as long as alone",
            **{f"duplex_{d}_bytes_per_s": beside.format(self.share[d], self.share_error) for d in DIRECTIONS},
            "issue_ns": "measured: the host's time for a kernel and its event, as replays issue them",
            "wait_ns": f"measured: mean of {LAUNCHES // 2} waits for events that are over, before empty kernels",
            "copy_contention": f"measured: a copy takes {taken} of a streaming kernel's speed, give or take "
            f"{self.contention_error:.1%}",
            "launch_ns": f"measured: mean of {LAUNCHES} empty kernels on one stream",
        }
        if self.context:
            measured["context_bytes"] = "measured: what a second process takes of the GPU besides tensors"
        lines = [f"# {self.device}: measured by executor.calibrate.", "#", "# GB/s     h2d     d2h"]
        for (nbytes, there), (_, back) in zip(self.transfers["h2d"], self.transfers["d2h"], strict=True):
            lines.append(f"# {_size(nbytes):8}{nbytes / there:6.2f}  {nbytes / back:6.2f}")
        for key, value in self.machine.to_dict().items():
            comment = measured.get(key, "not measured")
            text = yaml.safe_dump({key: value}, sort_keys=False).rstrip()
            head, _, rest = text.partition("\n")
            lines.append(f"{head}  # {comment}" if comment else head)
            lines += [rest] if rest else []
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Every measurement."""
        return {"format": FORMAT, **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Writes the machine as YAML and, beside it, every measurement as JSON."""
        write_text(path, self.to_yaml())
        write_json(Path(path).with_suffix(".json"), self.to_dict(), indent=1)


def calibrate(
    backend: Backend, base: Machine, max_bytes: int = LARGEST, name: str = "", seconds: float = math.inf
) -> Calibration:
    """Measures a backend.

    Args:
        base: gives what is not measured.
        max_bytes: of the largest copy, at least 16 KiB.
        name: of the new machine; "" for that of ``base``.
        seconds: when they are over, no larger size is begun. The two smallest are always measured.

    Raises:
        ValueError: there is room for one size only.
        BackendError: the device refused or failed.
    """
    room = min(max_bytes, backend.memory_bytes // 4, base.host_bytes // 4)
    sizes = [s for s in (SMALLEST * 4**i for i in range(32)) if s <= room]
    if len(sizes) < 2:
        raise ValueError(f"copies of at most {room:,} bytes are too small; expected at least {4 * SMALLEST:,}")
    begin = time.monotonic()
    transfers: dict[str, list[tuple[int, int]]] = {str(d): [] for d in DIRECTIONS}
    with backend.arena(2 * sizes[-1], 2 * sizes[-1]):
        for i, n in enumerate(sizes):
            if i >= 2 and time.monotonic() - begin > seconds:
                break
            largest = n
            _copies(backend, DIRECTIONS, n)  # the first of everything is slow
            single = {d: [_copies(backend, [d], n)[d] for _ in range(REPEATS)] for d in DIRECTIONS}
            for d in DIRECTIONS:
                transfers[d].append((n, round(median(single[d]))))
        both = [_copies(backend, DIRECTIONS, largest) for _ in range(REPEATS)]
        launch = median(_launch(backend) for _ in range(REPEATS))
        issue = median(_issue(backend, base) for _ in range(REPEATS))
        wait = median(_launch(backend, LAUNCHES // 2, True) - _launch(backend, LAUNCHES // 2) for _ in range(REPEATS))
        alone = {d: transfers[d][-1][1] for d in DIRECTIONS}
        contention, contention_error = _contention(backend, alone, largest)
    duplex = {str(d): median(times[d] for times in both) / alone[d] for d in DIRECTIONS}
    at_once = median(max(times.values()) for times in both)
    latency, rates, error = _fit(transfers)
    shares = {str(d): [_shares(alone, times)[d] for times in both] for d in DIRECTIONS}
    share = {d: median(each) for d, each in shares.items()}
    share_error = max(DUPLEX_ERROR, *map(_range, shares.values()), *map(_spread, single.values()))
    engines = 1 if at_once >= ONE_ENGINE * sum(alone.values()) else 2
    beside = {
        d: max(1, round(share[d] * rates[d])) if engines == 2 and share[d] < 1 - share_error else 0 for d in DIRECTIONS
    }
    machine = replace(
        base, name=name or base.name, memory_bytes=backend.memory_bytes, h2d_bytes_per_s=rates["h2d"],
        d2h_bytes_per_s=rates["d2h"], d2h_latency_ns=latency, h2d_latency_ns=latency,
        launch_ns=round(launch), issue_ns=round(issue),
        wait_ns=max(0, round(wait)), copy_contention=_taken(contention, contention_error),
        copy_engines=engines, duplex_h2d_bytes_per_s=beside["h2d"], duplex_d2h_bytes_per_s=beside["d2h"],
    )  # fmt: skip
    return Calibration(
        machine, backend.name, transfers, error, duplex, share, share_error, contention, contention_error
    )


def _shares(alone: dict[Direction, int], both: dict[str, int]) -> dict[str, float]:
    """By direction, the share of its own speed that a copy has while the other is under way (``Machine.h2d_share``).

    Args:
        alone: ns of each alone.
        both: ns from when they begin together: the first to end had the other beside it all the time, and the other
            goes on alone.
    """
    first = min(both.values())
    return {str(d): max(0.0, alone[d] - (both[d] - first)) / first for d in DIRECTIONS}


def _spread(times: Sequence[float]) -> float:
    """Between the quartiles, over the median."""
    return _range(times) / median(times)


def _range(values: Sequence[float]) -> float:
    """Between the quartiles."""
    low, _, high = quantiles(values, n=4)
    return high - low


def _copies(backend: Backend, directions: Sequence[Direction], nbytes: int) -> dict[str, int]:
    """Copies in one or both directions at once; ns of each from the end of the kernel before them."""
    backend.task = f"copy {' and '.join(directions)} of {nbytes:,} bytes"
    backend.spin(ISSUE_NS)
    begin = backend.record("compute")
    ends = {}
    for i, direction in enumerate(directions):
        backend.wait(direction, begin)
        backend.copy(direction, i * nbytes, i * nbytes, nbytes)
        ends[direction] = backend.record(direction)
    backend.synchronize()
    return {d: max(backend.time_ns(end) - backend.time_ns(begin), 1) for d, end in ends.items()}


def _launch(backend: Backend, count: int = LAUNCHES, waits: bool = False) -> float:
    """ns per empty kernel; ``waits``: each waits for the event of a copy engine, which is over."""
    backend.task = "empty kernels"
    over = backend.record("h2d")
    backend.spin(20 * ISSUE_NS)
    begin = backend.record("compute")
    for _ in range(count):
        if waits:
            backend.wait("compute", over)
        backend.spin(0)
    end = backend.record("compute")
    backend.synchronize()
    return (backend.time_ns(end) - backend.time_ns(begin)) / count


def _issue(backend: Backend, machine: Machine) -> float:
    """ns of the host per kernel, as a replay issues it; the stream has room for all of them."""
    kernels = tuple(Kernel("empty", "other", "forward", (), (), 1) for _ in range(LAUNCHES // 2))
    run = Run(circle(Program("empty", (), kernels), Plan(()), machine, machine.memory_bytes), backend, False, False)
    backend.spin(ISSUE_NS)
    begin = time.perf_counter_ns()
    run.issue(0)
    ended = time.perf_counter_ns()
    backend.synchronize()
    return (ended - begin) / len(kernels)


def _contention(backend: Backend, copies: dict[Direction, int], nbytes: int) -> tuple[dict[str, float], float]:
    """By direction, what a copy of ``nbytes`` (``copies`` ns alone) takes of the speed of a kernel that streams half
    as long; the largest spread between quartiles, of these and of the kernel's times alone."""
    aim, streamed = min(copies.values()) / 2, nbytes
    for _ in range(2):  # the first of everything is slow
        streamed = max(1024, round(streamed * aim / _streaming(backend, streamed)[0]))
    alone = [_streaming(backend, streamed)[0] for _ in range(REPEATS)]
    found, errors = {}, [_spread(alone)]
    for d in DIRECTIONS:
        beside = [_streaming(backend, streamed, d, nbytes) for _ in range(REPEATS)]
        taken = [(took - median(alone)) / shared for took, shared in beside]
        found[str(d)] = median(taken)
        errors.append(_range(taken))
    return found, max(errors)


def _taken(contention: dict[str, float], error: float) -> float:
    """``Machine.copy_contention``: the mean of both directions; 0 where it is no more than the measuring error."""
    mean = sum(contention.values()) / len(contention)
    return round(min(mean, MOST), 4) if mean > error else 0.0


def _streaming(backend: Backend, streamed: int, direction: Direction | None = None, copied: int = 0) -> tuple[int, int]:
    """ns of a kernel that moves so many bytes as fast as it can, and how much of it a copy was under way beside it."""
    backend.task = f"a kernel over {streamed:,} bytes"
    backend.spin(ISSUE_NS)
    begin = backend.record("compute")
    if direction:
        backend.wait(direction, begin)
        backend.copy(direction, 0, 0, copied)
        over = backend.record(direction)
    backend.spin(0, streamed)
    end = backend.record("compute")
    backend.synchronize()
    took = max(backend.time_ns(end) - backend.time_ns(begin), 1)
    return took, max(1, min(took, backend.time_ns(over) - backend.time_ns(begin))) if direction else 0


def _fit(transfers: dict[str, list[tuple[int, int]]]) -> tuple[int, dict[str, int], float]:
    """Latency, bandwidths, and the largest relative error of latency + bytes / bandwidth."""
    rows = [(1.0, *(n * (d == e) for e in DIRECTIONS), ns) for d in DIRECTIONS for n, ns in transfers[d]]
    table = np.array(rows, np.float64)
    table /= table[:, -1:]
    terms, ones = table[:, :-1], table[:, -1]
    latency, *per_byte = np.linalg.lstsq(terms, ones)[0].tolist()
    if latency < 0:
        latency, per_byte = 0.0, np.linalg.lstsq(terms[:, 1:], ones)[0].tolist()
    if min(per_byte) <= 0:
        raise BackendError(f"larger copies do not take longer: {transfers}")
    error = float(np.abs(terms @ np.array([latency, *per_byte]) - 1).max())
    return round(latency), {d: round(1e9 / x) for d, x in zip(DIRECTIONS, per_byte, strict=True)}, error


def _size(nbytes: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes} {unit}"
        nbytes //= 1024
    return f"{nbytes} GiB"


def beside(machine: Machine, other: Machine) -> list[str]:
    """What is measured in both, a line for each figure, and how they differ."""
    lines = [f"{'':26}{'this':>16}{'other':>16}"]
    for key in ("h2d_bytes_per_s", "d2h_bytes_per_s", "duplex_h2d_bytes_per_s", "duplex_d2h_bytes_per_s",
                "copy_engines", "d2h_latency_ns",
                "h2d_latency_ns", "launch_ns", "issue_ns", "wait_ns", "copy_contention"):  # fmt: skip
        mine, its = getattr(machine, key), getattr(other, key)
        lines.append(f"{key:26}{mine:16,}{its:16,}" + (f"  {mine / its - 1:+.1%}" if its else ""))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    parser = argparse.ArgumentParser("executor.calibrate", description="Measures transfers and launches of a GPU.")
    parser.add_argument("out", type=Path, help="YAML file of the machine; a JSON file of the same name beside it")
    parser.add_argument("--backend", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--machine", default="h200", help="preset or YAML file that gives what is not measured")
    parser.add_argument("--beside", type=Path, help="YAML file of another calibration, to compare the figures with")
    parser.add_argument("--max-bytes", type=int, default=LARGEST, help="of the largest copy")
    options = parser.parse_args(arguments)
    try:
        base = Machine.load(options.machine)
        other = Machine.load(options.beside) if options.beside else None
        with open_backend(options.backend, base) as backend:
            found = calibrate(backend, base, options.max_bytes, options.out.stem)
        if options.backend == "cuda":
            found = replace(found, machine=replace(found.machine, context_bytes=context_bytes()), context=True)
        found.save(options.out)
    except (BackendError, ContextError, FormatError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(found.to_yaml(), end="")
    if other:
        print("\n".join(beside(found.machine, other)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
