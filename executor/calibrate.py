"""Measures a machine's transfers and launches on a backend.

    python -m executor.calibrate machine.yaml [--backend cuda|host] [--machine h200] [--max-bytes N]

Writes a YAML file for ``Machine.load`` and ``machine=machine.yaml`` with a comment on how each figure was measured, and
machine.json with all measurements. Figures that are not measured (FLOP rates, memory bandwidth, efficiencies,
alignment, driver calls) are copied from the given machine. Methods: executor/README.md.
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

SMALLEST = 2**12  # copy, in bytes; each size is four times the one before
LARGEST = 2**30
LATENCY_UPTO = 2**18  # largest copy for latencies, in bytes
RATE_FROM = 2**24  # smallest copy for rates, in bytes
REPEATS = 7
LAUNCHES = 300  # consecutive kernels on a stream
NODES = 1000  # consecutive kernels in a graph
MOST_LAUNCHES = 5000  # when measuring the depth of the launch queue

Direction = Literal["d2h", "h2d"]
DIRECTIONS: tuple[Direction, Direction] = ("h2d", "d2h")


@dataclass(frozen=True)
class Calibration:
    """Result of a calibration.

    Attributes:
        machine: machine with the measured figures.
        device: description of the device.
        transfers: direction -> (bytes, ns) in ascending order of size.
        fit_error: largest relative error of latency + bytes / bandwidth over all copies.
        duplex: direction -> slowdown factor of the largest copy while another copy runs in the other direction.
        share: direction -> fraction of its bandwidth while both directions are busy.
        share_error: largest interquartile range of the shares' measurements, at least 2 %.
        depth: whether the launch queue filled up, so that its depth was measured.
        context: how ``machine.context_bytes`` was measured; "" if it was not (see ``with_process_figures``).
        issue: whether ``machine.issue_ns`` was measured (see ``with_process_figures``).
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
        """Returns the machine as YAML for Machine.load, with a comment on each figure."""
        largest = size(self.transfers["h2d"][-1][0])
        rate = f"measured: copies of {size(RATE_FROM)} to {largest}; largest error of all copies {self.fit_error:.1%}"
        latency = f"measured: median over copies of at most {size(LATENCY_UPTO)}, from the end of the kernel"
        share_comment = "measured: {:.1%} of alone, +/- {:.1%}; 0: same as alone"
        slower = " and ".join(f"{d} {self.duplex[d]:.2f}" for d in DIRECTIONS)
        measured = {
            "name": "",
            "memory_bytes": "as reported by the device",
            **{f"{d}_bytes_per_s": rate for d in DIRECTIONS},
            **{f"{d}_latency_ns": latency for d in DIRECTIONS},
            "copy_engines": f"measured: both directions at once take {slower} times as long as alone",
            **{f"duplex_{d}_bytes_per_s": share_comment.format(self.share[d], self.share_error) for d in DIRECTIONS},
            "launch_ns": f"measured: pause between consecutive kernels of a stream ({LAUNCHES} kernels)",
            "graph_launch_ns": f"measured: pause between consecutive kernels of a graph ({NODES} kernels)",
            "event_ns": "measured: addition to the pause by an event after each kernel that a copy stream waits for",
            "wait_ns": "measured: addition to the pause by a wait before each kernel for a pending event",
        }
        if self.depth:
            measured["queue_depth"] = "measured: launches after a long kernel until the host blocks"
        if self.context:
            measured["context_bytes"] = f"measured: {self.context}"
        if self.issue:
            measured["issue_ns"] = "measured: the host's time per kernel of a planned step, without a graph"
        lines = [f"# {self.device}: measured by executor.calibrate.", "#", "# GB/s        h2d     d2h"]
        for (nbytes, h2d_ns), (_, d2h_ns) in zip(self.transfers["h2d"], self.transfers["d2h"], strict=True):
            lines.append(f"# {size(nbytes):11}{nbytes / h2d_ns:6.2f}  {nbytes / d2h_ns:6.2f}")
        for key, value in self.machine.to_dict().items():
            comment = measured.get(key, "not measured")
            head, *continuation = yaml.safe_dump({key: value}, sort_keys=False).rstrip().split("\n")
            lines += [f"{head}  # {comment}" if comment else head, *continuation]
        return "\n".join(lines) + "\n"

    def to_dict(self) -> dict[str, Any]:
        """Returns all measurements."""
        return {"format": "calibration/3", **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Writes the machine as YAML and all measurements as a JSON file of the same name."""
        write_text(path, self.to_yaml())
        write_json(Path(path).with_suffix(".json"), self.to_dict(), indent=1)


def calibrate(
    backend: Backend, base: Machine, max_bytes: int = LARGEST, name: str = "", seconds: float = math.inf
) -> Calibration:
    """Measures the transfers and launches of a backend.

    Args:
        backend: device to measure.
        base: machine with the figures that are not measured.
        max_bytes: maximum size of a copy, at least 16 KiB.
        name: name of the new machine; default: the name of ``base``.
        seconds: time after which no larger copy is measured; the two smallest sizes are always measured.

    Returns:
        The machine with the measured figures, and the measurements.

    Raises:
        ValueError: if memory or ``max_bytes`` allows fewer than two sizes.
        BackendError: if the device refused or failed.
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
        depths = [depth for _ in range(3) if (depth := _depth(backend)) is not None]
        depth = sorted(depths)[1] if len(depths) == 3 else None
        for i, n in enumerate(sizes):
            if i >= 2 and time.monotonic() - begin > seconds:
                break
            largest = n
            _copies(backend, DIRECTIONS, n)  # warm-up: first copies are slow
            single = {d: [_copies(backend, [d], n)[d] for _ in range(REPEATS)] for d in DIRECTIONS}
            for d in DIRECTIONS:
                transfers[d].append((n, round(median(single[d]))))
        duplex_times = [_copies(backend, DIRECTIONS, largest) for _ in range(REPEATS)]
        single_ns = {d: transfers[d][-1][1] for d in DIRECTIONS}
    duplex = {str(d): median(times[d] for times in duplex_times) / single_ns[d] for d in DIRECTIONS}
    duplex_ns = median(max(times.values()) for times in duplex_times)
    fits = {d: _fit(transfers[d]) for d in DIRECTIONS}
    shares = {str(d): [_shares(single_ns, times)[d] for times in duplex_times] for d in DIRECTIONS}
    share = {d: median(repeats) for d, repeats in shares.items()}
    spreads = (_range(times) / median(times) for times in single.values())
    share_error = max(0.02, *map(_range, shares.values()), *spreads)
    # One engine makes both copies in the sum of their times, two in the time of the longer one.
    engines = 1 if duplex_ns >= 0.85 * sum(single_ns.values()) else 2
    figures: dict[str, Any] = {"copy_engines": engines}
    for d, (latency, bytes_per_s, _) in fits.items():
        slower = engines == 2 and share[d] < 1 - share_error
        figures |= {
            f"{d}_bytes_per_s": bytes_per_s,
            f"{d}_latency_ns": latency,
            f"duplex_{d}_bytes_per_s": max(1, round(share[d] * bytes_per_s)) if slower else 0,
        }
    machine = replace(
        base,
        name=name or base.name,
        memory_bytes=backend.memory_bytes,
        launch_ns=round(launch),
        graph_launch_ns=round(graph),
        event_ns=max(0, round(event - launch)),
        wait_ns=max(0, round(wait - launch)),
        queue_depth=depth or base.queue_depth,
        **figures,
    )
    return Calibration(
        machine,
        backend.name,
        transfers,
        max(error for _, _, error in fits.values()),
        duplex,
        share,
        share_error,
        depth is not None,
    )


def with_process_figures(calibration: Calibration, device: str) -> Calibration:
    """Adds the figures that need PyTorch: size of the CUDA context and host time per kernel of a planned step.

    Args:
        calibration: result of ``calibrate``.
        device: "cuda" or "cpu".

    Returns:
        The calibration with both figures in its machine.

    Raises:
        ContextError: if the context cannot be measured.
    """
    machine = replace(calibration.machine, issue_ns=planned_issue_ns(device))
    context = ""
    if device == "cuda":
        nbytes, context = measure_context()
        import torch

        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        machine = replace(machine, context_bytes=nbytes, capability=capability)
    return replace(calibration, machine=machine, context=context, issue=True)


def planned_issue_ns(device: str) -> int:
    """Returns the host time per kernel of a planned step without a graph, in ns (median over 20 steps).

    The step is a chain of small layers with an empty plan. On the CPU the time includes the kernels themselves.
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
        for _ in range(40):
            begin = time.perf_counter_ns()
            step(*batch)
            times.append(time.perf_counter_ns() - begin)
            if device == "cuda":
                torch.cuda.synchronize()
    return round(median(times[20:]) / len(captured.program.kernels))  # the first half warms up


def _shares(single_ns: dict[Direction, int], duplex_ns: dict[str, int]) -> dict[str, float]:
    """Returns each direction's fraction of its bandwidth while both are busy, from ns alone and started together."""
    first = min(duplex_ns.values())  # then the other copy continues at full speed
    return {str(d): max(0.0, single_ns[d] - (duplex_ns[d] - first)) / first for d in DIRECTIONS}


def _range(values: Sequence[float]) -> float:
    """Returns the interquartile range."""
    low, _, high = quantiles(values, n=4)
    return high - low


def _copies(backend: Backend, directions: Sequence[Direction], nbytes: int) -> dict[str, int]:
    """Copies in one or both directions at once; returns ns of each from the end of the preceding kernel."""
    backend.task = f"copy {' and '.join(directions)} of {nbytes:,} bytes"
    backend.spin(1_000_000)  # the host issues the copies meanwhile
    begin = backend.record("compute", timed=True)
    ends = {}
    for i, direction in enumerate(directions):
        backend.wait(direction, begin)
        backend.copy(direction, i * nbytes, i * nbytes, nbytes)
        ends[direction] = backend.record(direction, timed=True)
    backend.synchronize()
    return {d: max(backend.elapsed_ns(begin, end), 1) for d, end in ends.items()}


def _pause(backend: Backend, kind: Literal["stream", "graph", "event", "wait"]) -> float:
    """Returns the pause between consecutive kernels in ns; a long kernel delays them until the host has issued all."""
    backend.task = f"kernels in a row, {kind}"
    backend.spin(20_000_000)
    backend.wait("h2d", backend.record("compute"))
    pending = backend.record("h2d")
    count = NODES if kind == "graph" else LAUNCHES
    kernel_ns = 2000

    def issue() -> None:
        for slot in range(count):
            if kind == "wait":  # each kernel waits for a pending event
                backend.wait("compute", pending)
            backend.spin(kernel_ns, slot=slot)
            if kind == "event":  # a copy stream waits for each kernel
                backend.wait("d2h", backend.record("compute"))

    if kind == "graph":
        launch = backend.graph(issue)
        launch()  # the first launch uploads the graph
        launch()
    else:
        issue()
    backend.synchronize()
    ends = backend.log().end[:count]
    return int(ends[-1] - ends[0]) / (count - 1) - kernel_ns


def _depth(backend: Backend) -> int | None:
    """Returns the number of launches that may be pending on a stream; None if the host never blocked."""
    backend.task = "launches behind a long kernel"
    backend.spin(80_000_000)
    depth = None
    for i in range(MOST_LAUNCHES):
        begin = backend.host_ns()
        backend.spin(0)
        if backend.host_ns() - begin > 2_000_000:  # a launch takes microseconds unless the queue is full
            depth = i + 1  # the long kernel and i short ones
            break
    backend.synchronize()
    return depth


def _fit(times: list[tuple[int, int]]) -> tuple[int, int, float]:
    """Returns latency in ns, bytes per second and largest relative error of copies, (bytes, ns) in order of size."""
    sizes, ns = np.array(times, np.float64).T
    # Latency: median excess of small copies. Rate: least-squares fit of relative errors of large ones.
    small = sizes <= max(LATENCY_UPTO, sizes[0])
    large = sizes >= min(RATE_FROM, sizes[-2])
    per_byte = (ns[-1] - ns[-2]) / (sizes[-1] - sizes[-2])
    for _ in range(3):  # latency and rate depend weakly on each other
        latency = max(0.0, float(np.median((ns - sizes * per_byte)[small])))
        relative = sizes[large] / ns[large]
        per_byte = float((relative * (1 - latency / ns[large])).sum() / (relative**2).sum())
    if per_byte <= 0:
        raise BackendError(f"larger copies do not take longer: {times}; calibrate again while the device is idle")
    return round(latency), round(1e9 / per_byte), float(np.abs((latency + sizes * per_byte) / ns - 1).max())


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    parser = argparse.ArgumentParser("executor.calibrate", description="Measures transfers and launches of a GPU.")
    parser.add_argument("out", type=Path, help="YAML file to write; measurements go to a JSON file of the same name")
    parser.add_argument("--backend", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--machine", default="h200", help="preset or YAML file with the figures that are not measured")
    parser.add_argument("--max-bytes", type=int, default=LARGEST, help="maximum size of a copy in bytes")
    options = parser.parse_args(arguments)
    try:
        base = Machine.load(options.machine)
        with open_backend(options.backend, base) as backend:
            calibration = calibrate(backend, base, options.max_bytes, options.out.stem)
        if options.backend == "cuda":
            calibration = with_process_figures(calibration, "cuda")
        calibration.save(options.out)
    except (BackendError, ContextError, FormatError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    print(calibration.to_yaml(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
