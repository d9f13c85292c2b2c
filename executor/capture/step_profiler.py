"""Times each kernel within repeated executions of a captured step.

Caches are those of a real step, but the whole step must fit the device. The step uses copies of the user's tensors. On
CUDA the host issues SEGMENT kernels while the stream is kept busy, so that host time is not measured. Each segment is
also timed as a whole, because events between kernels take time, and steps in a row, because their power lowers clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from executor.capture.capture import Captured
from executor.capture.operators import for_profiler
from executor.capture.state import over

WARMUP = 2  # steps; the last one measures workspaces and the host's issue times
SEGMENT = 250  # kernels; with two events each they fit a stream's queue of about a thousand entries
SUSTAINED_S = 0.6  # seconds of steps in a row, until clocks have settled
CYCLES_PER_NS = 2.0  # upper bound of a GPU's clock rate, to convert ns into cycles of ``_sleep``


@dataclass(frozen=True)
class _Work:
    """One graph node: its kernel (-1 if it is not a kernel's operator), and the values that die after it."""

    node: fx.Node
    kernel: int
    dead: tuple[fx.Node, ...]


class StepRunner:
    """Executes the step of a capture on a device.

    Args:
        place: Device of each node's value.
        fresh: Creates a tensor for a placeholder without one.
        moved: Whether the device differs from the one of the capture.
    """

    def __init__(
        self, captured: Captured, device: torch.device, place: dict[fx.Node, torch.device],
        fresh: Callable[[Any, torch.device], Tensor], moved: bool,
    ) -> None:  # fmt: skip
        self.device, self.moved, self.count = device, moved, len(captured.nodes)
        self.graph = captured.graph
        self.work = _work(captured)
        self.start: dict[fx.Node, Any] = {}
        memory: dict[int, torch.UntypedStorage] = {}  # preserves memory sharing among the tensors
        for node, source in zip(captured.placeholders, captured.sources, strict=True):
            where = torch.device("cpu") if moved and not node.meta["tensor_meta"].shape else place[node]
            if source is None or source.device.type == "meta":
                self.start[node] = fresh(node.meta["tensor_meta"], where)
                continue
            storage = source.untyped_storage()
            if storage.data_ptr() not in memory:
                copy = torch.empty(0, dtype=torch.uint8, device=source.device).set_(storage)
                memory[storage.data_ptr()] = copy.to(where, copy=True).untyped_storage()
            self.start[node] = over(memory[storage.data_ptr()], source, where)
        for w in self.work:  # once: a host copy in mid-step would wait for the stream
            if w.node.op == "get_attr":
                value = getattr(self.graph, str(w.node.target))
                self.start[w.node] = value.to(device) if moved and isinstance(value, Tensor) else value

    def measure(self, repeats: int, until: float) -> tuple[list[int], list[int], list[tuple[list[int], int]]]:
        """Measures ``repeats`` steps.

        Returns:
            Median ns of each kernel including event overhead, workspace bytes of each kernel, and on CUDA for each
            segment its kernels and their median ns in a row.

        Raises:
            TimeoutError: If no step was measured before ``until`` (of ``time.monotonic``).
        """
        cuda, kernels = self.device.type == "cuda", [w.kernel for w in self.work if w.kernel >= 0]
        workspaces, issue_ns = [0] * self.count, 0
        for _ in range(WARMUP):
            begin = time.perf_counter_ns()
            workspaces = self._each(lambda call: workspace(call, self.device))
            if cuda:
                torch.cuda.synchronize(self.device)
            issue_ns = (time.perf_counter_ns() - begin) * SEGMENT // max(self.count, 1)
        times: list[list[int]] = []
        rows: list[list[int]] = []
        while len(times) < repeats and (time.monotonic() < until or times):
            if cuda:
                rows.append([ns for _, ns in self._between(issue_ns, SEGMENT)])
            times.append([0] * self.count if cuda else self._each(timed))
            for k, ns in self._between(issue_ns, 1) if cuda else ():
                times[-1][k] = ns
            if time.monotonic() > until:
                break
        if not times:
            raise TimeoutError
        segments = [(kernels[i * SEGMENT : (i + 1) * SEGMENT], round(median(each)))
                    for i, each in enumerate(zip(*rows, strict=True))]  # fmt: skip
        return [round(median(each)) for each in zip(*times, strict=True)], workspaces, segments

    def _run(self, around: Callable[[int, Callable[[], Any]], Any]) -> None:
        """Executes one step and passes each kernel with its call to ``around``."""
        values = dict(self.start)
        for w in self.work:
            node = w.node
            if node.op != "get_attr":
                args, kwargs = (map_arg(a, values.__getitem__) for a in (node.args, node.kwargs))
                if self.moved and isinstance(kwargs.get("device"), torch.device):
                    kwargs = {**kwargs, "device": self.device}

                def call(node: fx.Node = node, args: Any = args, kwargs: Any = kwargs) -> Any:
                    return node.target(*args, **kwargs)

                values[node] = around(w.kernel, call) if w.kernel >= 0 else call()
                del args, kwargs, call
            for dead in w.dead:
                del values[dead]

    def _each(self, measured: Callable[[Callable[[], Any]], tuple[Any, int]]) -> list[int]:
        """Executes one step and returns the number that ``measured`` reports for each kernel."""
        found = [0] * self.count

        def around(k: int, call: Callable[[], Any]) -> Any:
            out, found[k] = measured(call)
            return out

        self._run(around)
        return found

    def _between(self, issue_ns: int, kernels: int) -> list[tuple[int, int]]:
        """Executes one step on CUDA with events around each row of ``kernels`` kernels.

        The stream is kept busy for ``issue_ns`` before each segment is issued. Returns each row's last kernel and ns.
        """
        marks: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        count = 0

        def around(k: int, call: Callable[[], Any]) -> Any:
            nonlocal count
            if count % SEGMENT == 0:
                torch.cuda.synchronize(self.device)
                torch.cuda._sleep(round(CYCLES_PER_NS * (500_000 + 1.5 * issue_ns)))
            if count % kernels == 0:
                marks.append((k, torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
                marks[-1][1].record()
            out, count = call(), count + 1
            if count % kernels == 0 or count == last:
                marks[-1] = k, *marks[-1][1:]
                marks[-1][2].record()
            return out

        last = sum(w.kernel >= 0 for w in self.work)
        with torch.cuda.device(self.device):
            self._run(around)
            torch.cuda.synchronize()
        return [(k, round(1e6 * begin.elapsed_time(end))) for k, begin, end in marks]

    def sustained_ns(self) -> int | None:
        """Returns the median ns of steps in a row on CUDA, or None if the host does not keep the device busy."""
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            begin, marks = time.perf_counter(), [torch.cuda.Event(enable_timing=True)]
            marks[0].record()
            while len(marks) < 5 or time.perf_counter() - begin < SUSTAINED_S:
                self._run(lambda _, call: call())
                marks.append(torch.cuda.Event(enable_timing=True))
                marks[-1].record()
            issued = time.perf_counter() - begin
            torch.cuda.synchronize()
            ahead = time.perf_counter() - begin - issued
        times = [1e6 * first.elapsed_time(second) for first, second in zip(marks, marks[1:], strict=False)]
        whole = median(times[len(times) // 2 :])
        return round(whole) if 1e9 * ahead > whole / 4 else None


def timed(call: Callable[[], Any]) -> tuple[Any, int]:
    """Returns the result of a call and its host time in ns."""
    begin = time.perf_counter_ns()
    out = call()
    return out, time.perf_counter_ns() - begin


def workspace(call: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    """Returns the result of a call and its workspace in bytes (0 on devices other than CUDA).

    The workspace is the peak of CUDA's caching allocator minus the bytes in use before or after the call.
    """
    if device.type != "cuda":
        return call(), 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    out = call()
    return out, max(0, torch.cuda.max_memory_allocated(device) - max(before, torch.cuda.memory_allocated(device)))


def _work(captured: Captured) -> list[_Work]:
    """Returns the graph's nodes in order, with the values that die after each."""
    operators = {nodes[0]: k for k, nodes in enumerate(captured.nodes) if nodes}
    nodes = [n for n in captured.graph.graph.nodes if n.op in ("get_attr", "call_function") and not for_profiler(n)]
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        last |= dict.fromkeys((node, *node.all_input_nodes), node)
    dead: dict[fx.Node, list[fx.Node]] = {}
    for value, node in last.items():
        if value.op != "placeholder":
            dead.setdefault(node, []).append(value)
    return [_Work(node, operators.get(node, -1), tuple(dead.get(node, ()))) for node in nodes]
