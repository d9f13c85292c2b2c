"""Measures transfer and launch costs of a device and writes them as a Machine.

    python -m executor.calibrate machine.yaml [--backend cuda|host] [--machine h200] [--max-bytes N]

The YAML file is accepted by ``Machine.load`` and by ``machine=machine.yaml`` in every command; comments give the method
of each figure. machine.json holds all measurements. Figures that are not measured (FLOP rates, memory bandwidth,
efficiencies, alignment, driver calls) are copied from --machine. Methods: executor/README.md.
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

from executor.memory.context import ContextError, measure_context
from executor.replay import open_backend
from executor.replay.backend import Backend, BackendError
from simulator.files import FormatError, write_json, write_text
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.report import size

FORMAT = "calibration/3"
SMALLEST, LARGEST = 2**12, 2**30
LATENCY_UPTO, RATE_FROM = 2**18, 2**24  # sizes for fitting latencies (at most) and rates (at least), in bytes
REPEATS = 7
LAUNCHES, NODES = 300, 1000  # kernels in a row on a stream (also with an event or wait each), and in a graph
SPIN_NS = 2000  # duration of each of these kernels
MOST_LAUNCHES = 5000  # maximum number of launches to find the queue depth
HELD_NS, STUCK_NS = 80_000_000, 2_000_000  # preceding kernel's duration; a launch slower than STUCK_NS waited
ISSUE_NS = 1_000_000  # duration of a kernel that covers a few host calls
STEPS = 20  # steps for the median host time per kernel
ONE_ENGINE = 0.85  # concurrent over sequential time; from here on: one copy engine
DUPLEX_ERROR = 0.02  # minimum error of the bandwidth shares; a larger spread of repeats replaces it

Direction = Literal["d2h", "h2d"]
DIRECTIONS: tuple[Direction, Direction] = ("h2d", "d2h")


@dataclass(frozen=True)
class Calibration:
    """Measured machine with its measurements.

    Attributes:
        machine: with the measured figures.
        device: description.
        transfers: direction -> (bytes, ns) by size.
        fit_error: largest relative error of latency + bytes / bandwidth over all copies.
        duplex: direction -> slowdown factor of the largest copy while the other direction is busy.
        share: direction -> fraction of its bandwidth while both directions are busy.
        share_error: largest interquartile range of their measurements, at least DUPLEX_ERROR.
        depth: whether the launch queue was filled.
        context: measurement method of the machine's ``context_bytes``; "" if not measured.
        issue: whether ``issue_ns`` was measured (``of_process`` measures both).
    """

    machine: Machine
    device: str
    transfers: dict[str, list[tuple[int, int]]]
    fit_error: float
    duplex: dict[str, float]
    share: dict[str, float]
    share_error: float
    depth: bool = True
    context: str = ""
    issue: bool = False

    def to_yaml(self) -> str:
        """Returns the machine as YAML for Machine.load, with comments."""
        largest = size(self.transfers["h2d"][-1][0])
        rate = f"measured: copies from {size(RATE_FROM)} on, up to {largest}; largest error {self.fit_error:.1%}"
        latency = f"measured: median over copies of at most {size(LATENCY_UPTO)}, from the end of the kernel"
        beside = "measured: {:.1%} (± {:.1%}) of the rate alone; 0: same rate"
        slower = " and ".join(f"{d} {self.duplex[d]:.2f}" for d in DIRECTIONS)
        measured = {
            "name": "",
            "memory_bytes": "as reported by the device",
            **{f"{d}_bytes_per_s": rate for d in DIRECTIONS},
            **{f"{d}_latency_ns": latency for d in DIRECTIONS},
            "copy_engines": f"measured: slowdown {slower} with both directions busy",
            **{f"duplex_{d}_bytes_per_s": beside.format(self.share[d], self.share_error) for d in DIRECTIONS},
            "launch_ns": f"measured: pause between {LAUNCHES} kernels of one stream",
            "graph_launch_ns": f"measured: pause between {NODES} kernels of a graph",
            "event_ns": "measured: extra pause for an event after each kernel that a copy stream waits for",
            "wait_ns": "measured: extra pause for a wait before each kernel on an event pending at issue",
        }
        if self.depth:
            measured["queue_depth"] = "measured: launches behind a long kernel until the host blocks"
        if self.context:
            measured["context_bytes"] = f"measured: {self.context}"
        if self.issue:
            measured["issue_ns"] = "measured: host time per kernel of a planned step, without a graph"
        lines = [f"# {self.device}: measured by executor.calibrate.", "#", "# GB/s        h2d     d2h"]
        for (nbytes, there), (_, back) in zip(self.transfers["h2d"], self.transfers["d2h"], strict=True):
            lines.append(f"# {size(nbytes):11}{nbytes / there:6.2f}  {nbytes / back:6.2f}")
        for key, value in self.machine.to_dict().items():
            comment = measured.get(key, "not measured")
            text = yaml.safe_dump({key: value}, sort_keys=False).rstrip()
            head, _, rest = text.partition("\n")
            lines.append(f"{head}  # {comment}" if comment else head)
            lines += [rest] if rest else []
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Returns all measurements."""
        return {"format": FORMAT, **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Writes the machine as YAML and all measurements as JSON beside it."""
        write_text(path, self.to_yaml())
        write_json(Path(path).with_suffix(".json"), self.to_dict(), indent=1)


def calibrate(
    backend: Backend, base: Machine, max_bytes: int = LARGEST, name: str = "", seconds: float = math.inf
) -> Calibration:
    """Measures a backend.

    Args:
        base: machine with defaults for unmeasured figures.
        max_bytes: size of the largest copy, at least 16 KiB.
        name: of the new machine; "" for that of ``base``.
        seconds: time after which no larger size is started; the two smallest are always measured.

    Raises:
        ValueError: memory suffices for only one size.
        BackendError: a device operation failed.
    """
    room = min(max_bytes, backend.memory_bytes // 4, base.host_bytes // 4)
    sizes = [s for s in (SMALLEST * 4**i for i in range(32)) if s <= room]
    if len(sizes) < 2:
        raise ValueError(f"copies of at most {room:,} bytes are too small; expected at least {4 * SMALLEST:,}")
    begin = time.monotonic()
    transfers: dict[str, list[tuple[int, int]]] = {str(d): [] for d in DIRECTIONS}
    with backend.arena(2 * sizes[-1], 2 * sizes[-1], NODES):
        launch, graph, event, wait = (
            median(_pause(backend, kind) for _ in range(REPEATS)) for kind in ("stream", "graph", "event", "wait")
        )
        depths = [_depth(backend) for _ in range(3)]
        depth = None if None in depths else sorted(depths)[1]  # type: ignore[type-var]
        for i, n in enumerate(sizes):
            if i >= 2 and time.monotonic() - begin > seconds:
                break
            largest = n
            _copies(backend, DIRECTIONS, n)  # warm-up
            single = {d: [_copies(backend, [d], n)[d] for _ in range(REPEATS)] for d in DIRECTIONS}
            for d in DIRECTIONS:
                transfers[d].append((n, round(median(single[d]))))
        both = [_copies(backend, DIRECTIONS, largest) for _ in range(REPEATS)]
        alone = {d: transfers[d][-1][1] for d in DIRECTIONS}
    duplex = {str(d): median(times[d] for times in both) / alone[d] for d in DIRECTIONS}
    at_once = median(max(times.values()) for times in both)
    fits = {d: _fit(transfers[d]) for d in DIRECTIONS}
    shares = {str(d): [_shares(alone, times)[d] for times in both] for d in DIRECTIONS}
    share = {d: median(each) for d, each in shares.items()}
    share_error = max(DUPLEX_ERROR, *map(_range, shares.values()), *map(_spread, single.values()))
    engines = 1 if at_once >= ONE_ENGINE * sum(alone.values()) else 2
    figures: dict[str, Any] = {"copy_engines": engines}
    for d, (latency, bytes_per_s, _) in fits.items():
        slower = engines == 2 and share[d] < 1 - share_error
        figures |= {f"{d}_bytes_per_s": bytes_per_s, f"{d}_latency_ns": latency,
                    f"duplex_{d}_bytes_per_s": max(1, round(share[d] * bytes_per_s)) if slower else 0}  # fmt: skip
    machine = replace(
        base, name=name or base.name, memory_bytes=backend.memory_bytes, launch_ns=round(launch),
        graph_launch_ns=round(graph), event_ns=max(0, round(event - launch)), wait_ns=max(0, round(wait - launch)),
        queue_depth=depth or base.queue_depth, **figures,
    )  # fmt: skip
    return Calibration(
        machine, backend.name, transfers, max(error for _, _, error in fits.values()), duplex, share, share_error,
        depth is not None,
    )  # fmt: skip


def of_process(found: Calibration, device: str) -> Calibration:
    """Adds measurements that need PyTorch: context size (CUDA) and host time per kernel of a planned step.

    Raises:
        ContextError: the context cannot be measured.
    """
    machine, context = replace(found.machine, issue_ns=planned_issue_ns(device)), ""
    if device == "cuda":
        nbytes, context = measure_context()
        import torch

        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        machine = replace(machine, context_bytes=nbytes, capability=capability)
    return replace(found, machine=machine, context=context, issue=True)


def planned_issue_ns(device: str) -> int:
    """Returns the host time per kernel of a planned step without a graph, the median over STEPS steps.

    The step is a chain of small layers without a plan. On the CPU the time includes the kernels themselves.
    """
    import torch
    from torch import nn

    from executor.capture.capture import capture
    from executor.training.planned_step import PlannedStep

    layers = [layer for _ in range(32) for layer in (nn.Linear(4, 4), nn.ReLU())]
    model = nn.Sequential(*layers).to(device)
    batch = torch.ones(2, 4, device=device), torch.ones(2, 4, device=device)
    machine = Machine.load("h200")
    captured = capture(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1), batch, machine=machine)
    times = []
    with PlannedStep(captured, Plan(()), machine, machine.memory_bytes, graph=False) as step:
        for _ in range(2 * STEPS):
            begin = time.perf_counter_ns()
            step(*batch)
            times.append(time.perf_counter_ns() - begin)
            if device == "cuda":
                torch.cuda.synchronize()
    return round(median(times[STEPS:]) / len(captured.program.kernels))


def _shares(alone: dict[Direction, int], both: dict[str, int]) -> dict[str, float]:
    """Returns by direction the fraction of its bandwidth while the other is busy (``Machine.h2d_share``).

    Args:
        alone: ns of each copy alone.
        both: ns of each from the common start. The first to end overlapped throughout; the other then continues alone.
    """
    first = min(both.values())
    return {str(d): max(0.0, alone[d] - (both[d] - first)) / first for d in DIRECTIONS}


def _spread(times: Sequence[float]) -> float:
    """Interquartile range over the median."""
    return _range(times) / median(times)


def _range(values: Sequence[float]) -> float:
    """Interquartile range."""
    low, _, high = quantiles(values, n=4)
    return high - low


def _copies(backend: Backend, directions: Sequence[Direction], nbytes: int) -> dict[str, int]:
    """Copies in one or both directions at once; returns ns of each from the end of the kernel before."""
    backend.task = f"copy {' and '.join(directions)} of {nbytes:,} bytes"
    backend.spin(ISSUE_NS)
    begin = backend.record("compute", timed=True)
    ends = {}
    for i, direction in enumerate(directions):
        backend.wait(direction, begin)
        backend.copy(direction, i * nbytes, i * nbytes, nbytes)
        ends[direction] = backend.record(direction, timed=True)
    backend.synchronize()
    return {d: max(backend.elapsed_ns(begin, end), 1) for d, end in ends.items()}


def _pause(backend: Backend, kind: Literal["stream", "graph", "event", "wait"]) -> float:
    """Returns ns between consecutive kernels, which queue behind a long one until all are issued.

    Args:
        kind: "event": a copy stream waits for each kernel; "wait": each kernel waits for a pending event.
    """
    backend.task = f"kernels in a row, {kind}"
    backend.spin(20 * ISSUE_NS)
    backend.wait("h2d", backend.record("compute"))
    pending = backend.record("h2d")
    count = NODES if kind == "graph" else LAUNCHES

    def row() -> None:
        for slot in range(count):
            if kind == "wait":
                backend.wait("compute", pending)
            backend.spin(SPIN_NS, slot=slot)
            if kind == "event":
                backend.wait("d2h", backend.record("compute"))

    if kind == "graph":
        launch = backend.graph(row)
        launch()  # the first launch uploads the graph
        launch()
    else:
        row()
    backend.synchronize()
    ends = backend.log().end[:count]
    return int(ends[-1] - ends[0]) / (count - 1) - SPIN_NS


def _depth(backend: Backend) -> int | None:
    """Returns the number of launches that can be pending on a stream; None if the host never blocked."""
    backend.task = "launches behind a long kernel"
    backend.spin(HELD_NS)
    depth = None
    for i in range(MOST_LAUNCHES):
        begin = backend.host_ns()
        backend.spin(0)
        if backend.host_ns() - begin > STUCK_NS:
            depth = i + 1  # the long kernel plus i others
            break
    backend.synchronize()
    return depth


def _fit(times: list[tuple[int, int]]) -> tuple[int, int, float]:
    """Fits latency (ns) and bytes per second of one direction; also returns the largest relative error.

    Args:
        times: (bytes, ns) by ascending size, at least two. The rate is fitted to sizes from RATE_FROM (least squares of
            relative errors), or to the two largest; the latency is the median excess time of copies up to LATENCY_UPTO.
    """
    sizes, ns = np.array(times, np.float64).T
    small, large = sizes <= max(LATENCY_UPTO, sizes[0]), sizes >= min(RATE_FROM, sizes[-2])
    per_byte = (ns[-1] - ns[-2]) / (sizes[-1] - sizes[-2])
    for _ in range(3):  # fixed-point iteration, converges fast
        latency = max(0.0, float(np.median((ns - sizes * per_byte)[small])))
        relative = sizes[large] / ns[large]
        per_byte = float((relative * (1 - latency / ns[large])).sum() / (relative**2).sum())
    if per_byte <= 0:
        raise BackendError(f"cannot fit a bandwidth: larger copies do not take longer: {times}")
    return round(latency), round(1e9 / per_byte), float(np.abs((latency + sizes * per_byte) / ns - 1).max())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser("executor.calibrate", description="Measures transfers and launches of a GPU.")
    parser.add_argument("out", type=Path, help="YAML file to write; a JSON file is written beside it")
    parser.add_argument("--backend", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--machine", default="h200", help="preset or YAML file with defaults for unmeasured figures")
    parser.add_argument("--max-bytes", type=int, default=LARGEST, help="size of the largest copy")
    options = parser.parse_args(arguments)
    try:
        base = Machine.load(options.machine)
        with open_backend(options.backend, base) as backend:
            found = calibrate(backend, base, options.max_bytes, options.out.stem)
        if options.backend == "cuda":
            found = of_process(found, "cuda")
        found.save(options.out)
    except (BackendError, ContextError, FormatError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(found.to_yaml(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
