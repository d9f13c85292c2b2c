"""Measures the duration and the workspace of each kernel of a captured program on a device.

With ``cache="cold"`` or ``"hot"`` each kernel runs alone on temporary inputs, so a model larger than the GPU can be
profiled, and equal kernels (operator, shapes, strides, dtypes, constants) are measured once. With ``cache="step"`` all
kernels run in order in a real step, which has to fit (see README.md): on the user's tensors, restored from the host.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable
from functools import partial
from itertools import starmap
from statistics import median
from typing import Any, get_args

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from executor.capture.capture import Captured
from executor.capture.operators import arguments, is_profiler_node
from executor.capture.profile import Cache, Profile, ProfileError, limit_to_row, shape_of, slow_down
from executor.capture.state import view_memory
from executor.memory import cache_bytes, cuda_index
from executor.memory.pinned import available

WARMUP = 3  # unmeasured runs of a kernel
EMPTY_KERNELS = 50  # empty kernels that are timed with and without events around each
SEGMENT = 250  # kernels; with two events each they fit a stream's queue of about a thousand entries


aten = torch.ops.aten
# Operator -> (position of the index argument, function from the arguments to the exclusive bound of the indices).
_BOUNDS: dict[Any, tuple[int, Callable[[list[Any]], int]]] = {
    aten.embedding: (1, lambda a: a[0].shape[0]),
    aten.embedding_dense_backward: (1, lambda a: a[2]),
    aten.nll_loss_forward: (1, lambda a: a[0].shape[-1]),
    aten.nll_loss_backward: (2, lambda a: a[1].shape[-1]),
    aten.nll_loss2d_forward: (1, lambda a: a[0].shape[1]),
    aten.nll_loss2d_backward: (2, lambda a: a[1].shape[1]),
    aten.gather: (2, lambda a: a[0].shape[a[1]]),
    aten.scatter: (2, lambda a: a[0].shape[a[1]]),
    aten.scatter_add: (2, lambda a: a[0].shape[a[1]]),
    aten.index_select: (2, lambda a: a[0].shape[a[1]]),
    aten.max_pool2d_with_indices_backward: (7, lambda a: a[1].shape[-1] * a[1].shape[-2]),
}


def measure(
    captured: Captured,
    device: str | torch.device,
    machine: str = "",
    repeats: int = 7,
    seconds: float = math.inf,
    cache: Cache = "cold",
) -> Profile:
    """Measures every kernel of a captured program.

    Args:
        captured: Captured step whose kernels are measured.
        device: "cuda" or "cpu".
        machine: Name of the machine to record in the profile.
        repeats: Measured runs of each kernel, at least 1.
        seconds: Time budget after which no further kernel is started.
        cache: "cold" reads twice the cache size before each run. "hot" repeats runs on the same inputs. "step" runs
            the kernels in order, each with the cache that its predecessors left.

    Returns:
        The measured duration and workspace of each kernel, and of the step.

    Raises:
        ProfileError: If a kernel cannot run alone, the step does not fit the device ("step"), the time budget is
            exhausted, or the device does not exist.
        ValueError: If ``repeats`` is below 1, or ``cache`` is unknown.
    """
    if repeats < 1:
        raise ValueError(f"repeats: expected at least 1, got {repeats}")
    if cache not in get_args(Cache):
        raise ValueError(f"cache: expected one of {', '.join(get_args(Cache))}, got {cache!r}")
    target = torch.device(device)
    if target.type == "cuda" and not torch.cuda.is_available():
        raise ProfileError("there is no CUDA GPU to profile on; device='cpu' profiles on the CPU")
    deadline = time.monotonic() + seconds
    if target.type == "cuda":
        _wake(target)
    runner = _Runner(captured, target, repeats, deadline, cache)
    name = torch.cuda.get_device_name(target) if target.type == "cuda" else f"{target.type} ({torch.get_num_threads()})"
    devices = [cuda_index(target)] if target.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad(), torch._C._DisableAutocast():
        # oneDNN's LSTM saves values for its backward pass only in grad mode; no input requires a gradient.
        figures = runner.in_step() if cache == "step" else [runner.kernel(k) for k in range(len(captured.nodes))]
    durations, workspaces = zip(*figures, strict=True)
    return Profile(
        captured.program.name,
        shape_of(captured.program).fingerprint,
        machine,
        name,
        str(torch.__version__),
        durations,
        workspaces if target.type == "cuda" else None,
        cache,
        runner.event_ns,
        runner.step_ns,
    )


class _Runner:
    """Runs and times kernels; ``event_ns`` and ``step_ns`` are those of ``Profile``."""

    def __init__(
        self, captured: Captured, device: torch.device, repeats: int, deadline: float = math.inf, cache: Cache = "hot"
    ):
        self.captured = captured
        self.device = device
        self.repeats = repeats
        self.deadline = deadline
        self.flush_buffer: Tensor | None = None  # read to fill the cache with clean lines
        if cache == "cold":
            self.flush_buffer = torch.zeros(cache_bytes(device) // 2, device=device)
        self.event_ns = _events_ns(device) if device.type == "cuda" and cache != "hot" else 0
        self.step_ns = 0
        self.measured: dict[str, tuple[int, int]] = {}
        used = [d for node, d in zip(captured.placeholders, captured.devices, strict=True) if node in captured.values]
        main = next((d for d in used if d.type != "cpu"), torch.device("cpu"))
        self.is_moved = main.type != device.type  # measured elsewhere than captured
        devices = captured.node_devices()
        self.devices = dict.fromkeys(devices, device) if self.is_moved else devices

    def kernel(self, k: int) -> tuple[int, int]:
        """Returns (ns, workspace in bytes) of one kernel."""
        nodes = self.captured.nodes[k]
        if not nodes:
            return 0, 0
        node = nodes[0]
        key = self._key(node)
        if key not in self.measured:
            if time.monotonic() > self.deadline:
                raise ProfileError(
                    f"the time for profiling was over at kernel {k} of {len(self.captured.nodes)}; allow more seconds"
                )
            try:
                args, kwargs = self._inputs(node)
                self.measured[key] = self._measure(partial(node.target, *args, **kwargs))
            except _ERRORS as error:
                raise ProfileError(
                    f"kernel {k} ({node.target}) cannot be run alone: {_reason(error)}; profile with cache='step'"
                ) from error
        return self.measured[key]

    def in_step(self) -> list[tuple[int, int]]:
        """Returns (ns, workspace in bytes) of all kernels, timed within a step."""
        sustained = None
        try:
            with StepRunner(self.captured, self.device, self.devices, self.is_moved) as runner:
                durations, workspaces, segments = runner.measure(self.repeats, self.deadline)
                sustained = runner.sustained_ns() if self.device.type == "cuda" else None
        except ProfileError:
            raise
        except _ERRORS as error:
            raise ProfileError(
                f"the step cannot be run to profile it: {_reason(error)}; run it once without a plan on this device"
            ) from error
        minimums = [int(bool(nodes)) for nodes in self.captured.nodes]
        times = [max(ns - self.event_ns, minimum) for ns, minimum in zip(durations, minimums, strict=True)]
        for kernels, row_ns in segments:
            shorter = limit_to_row([times[k] for k in kernels], row_ns)
            for k, ns in zip(kernels, shorter, strict=True):
                times[k] = ns
        self.step_ns = sum(row_ns for _, row_ns in segments)
        if sustained:
            # The time of these kernels depends on the clock of the multiprocessors.
            bound = [kernel.kind in ("conv", "matmul") for kernel in self.captured.program.kernels]
            times = slow_down(times, bound, sustained - self.step_ns)
            self.step_ns = max(self.step_ns, sustained)
        return list(zip(times, workspaces, strict=True))

    def _flush(self) -> None:
        """Evicts the kernel's data from the cache if ``cache`` is "cold"."""
        if self.flush_buffer is not None:
            self.flush_buffer.sum()

    def _measure(self, call: Callable[[], Any]) -> tuple[int, int]:
        if self.device.type != "cuda":
            for _ in range(WARMUP):
                out, ns = time_call(call)
            times = []
            for _ in range(self._runs(ns)):
                self._flush()
                times.append(time_call(call)[1])
            del out
            return round(median(times)), 0
        with torch.cuda.device(self.device):
            for _ in range(WARMUP):
                begin = _event()
                _, issue_ns = time_call(call)
                end = _event()
                torch.cuda.synchronize()
            # Kernels under 1 ms are timed in rows. With a cold cache only the first run of a row would find it cold.
            row = 8 if _ns(begin, end) < 1_000_000 and self.flush_buffer is None else 1
            runs = self._runs(_ns(begin, end))
            out, nbytes = measure_workspace(call, self.device)
            torch.cuda.synchronize()
            del out
            _occupy(issue_ns * runs * (row + 1))
            spans = []
            for _ in range(runs):
                self._flush()
                begin = _event()
                for _ in range(row):
                    call()
                spans.append((begin, _event()))
            torch.cuda.synchronize()
            ns = median(starmap(_ns, spans)) - self.event_ns
            return max(1, round(ns / row)), nbytes

    def _runs(self, ns: float) -> int:
        return self.repeats if ns < 50_000_000 else min(3, self.repeats)

    def _inputs(self, node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
        """Returns fresh arguments for a kernel, one value per node."""
        values: dict[fx.Node, Any] = {}
        seeds = set[Any]()
        if isinstance(node.target, OpOverload):
            # Attention's backward pass reads the forward pass's random state on the host.
            names = ("philox_seed", "philox_offset", "rng_state", "unused")
            seeds = {
                a
                for argument, a in arguments(node.target, node.args, node.kwargs)
                if argument.name in names and isinstance(a, fx.Node)
            }

        def value(a: fx.Node) -> Any:
            if a not in values:
                meta = a.meta.get("tensor_meta")
                if meta is not None and (meta.dtype == torch.uint8 or a in seeds) and (producer := _producer(a)):
                    args, kwargs = self._inputs(producer[0])
                    values[a] = producer[0].target(*args, **kwargs)[producer[1]]
                else:
                    values[a] = _number(a) if meta is None else _random_tensor(meta, self.devices[a])
            return values[a]

        args = list(map_arg(node.args, value))
        kwargs = dict(map_arg(node.kwargs, value))
        if self.is_moved and isinstance(kwargs.get("device"), torch.device):
            kwargs["device"] = self.device
        packet = getattr(node.target, "overloadpacket", None)
        if packet in _BOUNDS:
            position, limit = _BOUNDS[packet]
            args[position].random_(max(1, limit(args)))
        elif packet in (aten.index, aten.index_put, aten.index_put_):  # a list of indices, one per dimension
            for d, index in enumerate(args[1]):
                if isinstance(index, Tensor) and index.dtype == torch.int64:
                    index.random_(max(1, args[0].shape[d]))
        return args, kwargs

    def _key(self, node: fx.Node) -> str:
        """Returns a key that is equal for kernels with the same measurement."""
        order: dict[fx.Node, int] = {}  # one tensor passed twice differs from two tensors

        def describe(a: fx.Node) -> str:
            meta = a.meta.get("tensor_meta")
            text = _number(a) if meta is None else (tuple(meta.shape), meta.stride, meta.dtype, str(self.devices[a]))
            return f"<{order.setdefault(a, len(order))} {text}>"

        return f"{node.target} {map_arg(node.args, describe)} {map_arg(node.kwargs, describe)}"


class StepRunner:
    """Executes the step of a capture on a device; a context manager at whose end the user's tensors are as before.

    A step on the device of the capture uses the user's tensors in place, so that it needs no more device memory than
    the eager step. Copies of those that it writes are on the host meanwhile.

    On CUDA the host issues SEGMENT kernels while the stream is kept busy, so that host time is not measured. Each
    segment is also timed as a whole, because events between kernels take time, and steps in a row, because their power
    lowers clocks.

    Args:
        devices: Device of each node's value.
        is_moved: Whether the device differs from the one of the capture.

    Raises:
        ProfileError: If the host has too little memory for the copies.
    """

    def __init__(
        self, captured: Captured, device: torch.device, devices: dict[fx.Node, torch.device], is_moved: bool
    ) -> None:
        self.device = device
        self.is_moved = is_moved
        self.count = len(captured.nodes)
        self.schedule = _schedule(captured)
        self.start: dict[fx.Node, Any] = {}
        memory: dict[int, torch.UntypedStorage] = {}  # preserves memory sharing among the tensors
        written = {t for kernel in captured.program.kernels for t in kernel.outputs}
        in_place: dict[int, torch.UntypedStorage] = {}
        for node, source in zip(captured.placeholders, captured.sources, strict=True):
            target = torch.device("cpu") if is_moved and not node.meta["tensor_meta"].shape else devices[node]
            if source is None or source.device.type == "meta":
                self.start[node] = _random_tensor(node.meta["tensor_meta"], target)
                continue
            storage = source.untyped_storage()
            if not is_moved:
                self.start[node] = view_memory(storage, source, source.device)
                if captured.values.get(node) in {None, *written}:
                    in_place[storage.data_ptr()] = storage
                continue
            if storage.data_ptr() not in memory:
                copy = torch.empty(0, dtype=torch.uint8, device=source.device).set_(storage)
                memory[storage.data_ptr()] = copy.to(target, copy=True).untyped_storage()
            self.start[node] = view_memory(memory[storage.data_ptr()], source, target)
        for node, *_ in self.schedule:  # once: a host copy in mid-step would wait for the stream
            if node.op == "get_attr":
                value = getattr(captured.graph, str(node.target))
                self.start[node] = value.to(device) if is_moved and isinstance(value, Tensor) else value
        nbytes = sum(storage.nbytes() for storage in in_place.values())
        if nbytes > (free := available()[0]):
            raise ProfileError(
                f"copies of the step's tensors need {nbytes:,} bytes on the host, which has {free:,}; free some"
            )
        self._saved = [
            (storage, torch.UntypedStorage(storage.nbytes()).copy_(storage)) for storage in in_place.values()
        ]

    def __enter__(self) -> StepRunner:
        return self

    def __exit__(self, *_: object) -> None:
        self.start.clear()
        for storage, copy in self._saved:
            storage.copy_(copy)

    def measure(self, repeats: int, deadline: float) -> tuple[list[int], list[int], list[tuple[list[int], int]]]:
        """Measures ``repeats`` steps, or fewer (at least one) after ``deadline`` (``time.monotonic``).

        Returns:
            Median ns of each kernel including event overhead, workspace bytes of each kernel, and on CUDA for each
            segment its kernels and their median ns in a row.

        Raises:
            ProfileError: If no step was measured before ``deadline``.
        """
        cuda = self.device.type == "cuda"
        kernels = [k for _, k, _ in self.schedule if k >= 0]
        workspaces = [0] * self.count
        issue_ns = 0
        for _ in range(2):  # the last one measures workspaces and the host's issue times
            begin = time.perf_counter_ns()
            workspaces = self._measure_each(lambda call: measure_workspace(call, self.device))
            if cuda:
                torch.cuda.synchronize(self.device)
            issue_ns = (time.perf_counter_ns() - begin) * SEGMENT // max(self.count, 1)
        if time.monotonic() >= deadline:
            raise ProfileError("the time for profiling was over before a step was measured; allow more seconds")
        times: list[list[int]] = []
        rows: list[list[int]] = []
        while len(times) < repeats and (time.monotonic() <= deadline or not times):
            if cuda:
                rows.append([ns for _, ns in self._time_rows(issue_ns, SEGMENT)])
            times.append([0] * self.count if cuda else self._measure_each(time_call))
            for k, ns in self._time_rows(issue_ns, 1) if cuda else ():
                times[-1][k] = ns
        segments = [
            (kernels[i * SEGMENT : (i + 1) * SEGMENT], round(median(samples)))
            for i, samples in enumerate(zip(*rows, strict=True))
        ]
        return [round(median(samples)) for samples in zip(*times, strict=True)], workspaces, segments

    def _run(self, around: Callable[[int, Callable[[], Any]], Any]) -> None:
        """Executes one step and passes each kernel with its call to ``around``."""
        values = dict(self.start)
        for node, kernel, dead in self.schedule:
            if node.op != "get_attr":
                args, kwargs = (map_arg(a, values.__getitem__) for a in (node.args, node.kwargs))
                if self.is_moved and isinstance(kwargs.get("device"), torch.device):
                    kwargs = {**kwargs, "device": self.device}
                call = partial(node.target, *args, **kwargs)
                values[node] = around(kernel, call) if kernel >= 0 else call()
                del args, kwargs, call
            for value in dead:
                del values[value]

    def _measure_each(self, measure_call: Callable[[Callable[[], Any]], tuple[Any, int]]) -> list[int]:
        """Executes one step and returns the number that ``measured`` reports for each kernel."""
        values = [0] * self.count

        def around(k: int, call: Callable[[], Any]) -> Any:
            out, values[k] = measure_call(call)
            return out

        self._run(around)
        return values

    def _time_rows(self, issue_ns: int, kernels: int) -> list[tuple[int, int]]:
        """Executes one step on CUDA and returns the last kernel and the ns of each row of ``kernels`` kernels."""
        spans: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        begin = None
        count = 0
        last = sum(k >= 0 for _, k, _ in self.schedule)

        def around(k: int, call: Callable[[], Any]) -> Any:
            nonlocal begin, count
            if count % SEGMENT == 0:
                torch.cuda.synchronize(self.device)
                _occupy(issue_ns)
            if count % kernels == 0:
                begin = _event()
            out = call()
            count = count + 1
            if count % kernels == 0 or count == last:
                spans.append((k, begin, _event()))
            return out

        with torch.cuda.device(self.device):
            self._run(around)
            torch.cuda.synchronize()
        return [(k, round(_ns(*span))) for k, *span in spans]

    def sustained_ns(self) -> int | None:
        """Returns the median ns of steps in a row on CUDA, or None if the host does not keep the device busy."""
        with torch.cuda.device(self.device):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            marks = [_event()]
            while len(marks) < 5 or time.perf_counter() - begin < 0.6:  # seconds, until clocks have settled
                self._run(lambda _, call: call())
                marks.append(_event())
            issued_s = time.perf_counter() - begin
            torch.cuda.synchronize()
            lead_s = time.perf_counter() - begin - issued_s
        times = list(map(_ns, marks, marks[1:]))
        step_ns = median(times[len(times) // 2 :])
        return round(step_ns) if 1e9 * lead_s > step_ns / 4 else None


def _event() -> torch.cuda.Event:
    """Records and returns a CUDA event."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _ns(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return 1e6 * begin.elapsed_time(end)


def _occupy(issue_ns: float) -> None:
    """Keeps the stream busy while the host takes ``issue_ns`` to issue kernels."""
    cycles_per_ns = 2.0  # upper bound of a GPU's clock rate
    torch.cuda._sleep(round(cycles_per_ns * (500_000 + 1.5 * issue_ns)))


_ERRORS = RuntimeError, TypeError, IndexError, ZeroDivisionError


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def time_call(call: Callable[[], Any]) -> tuple[Any, int]:
    """Returns the result of a call and its host time in ns."""
    begin = time.perf_counter_ns()
    out = call()
    return out, time.perf_counter_ns() - begin


def measure_workspace(call: Callable[[], Any], device: torch.device) -> tuple[Any, int]:
    """Returns the result of a call and its workspace in bytes (0 on devices other than CUDA).

    The workspace is the peak of CUDA's caching allocator minus the bytes in use before or after the call.
    """
    if device.type != "cuda":
        return call(), 0
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    out = call()
    return out, max(0, torch.cuda.max_memory_allocated(device) - max(before, torch.cuda.memory_allocated(device)))


def _schedule(captured: Captured) -> list[tuple[fx.Node, int, list[fx.Node]]]:
    """Returns each node, its kernel (-1 if it is not a kernel's operator), and the values that die after it."""
    operators = {nodes[0]: k for k, nodes in enumerate(captured.nodes) if nodes}
    nodes = [n for n in captured.graph.graph.nodes if n.op in ("get_attr", "call_function") and not is_profiler_node(n)]
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        last |= dict.fromkeys((node, *node.all_input_nodes), node)
    dead: dict[fx.Node, list[fx.Node]] = {}
    for value, node in last.items():
        if value.op != "placeholder":
            dead.setdefault(node, []).append(value)
    return [(node, operators.get(node, -1), dead.get(node, [])) for node in nodes]


def _wake(device: torch.device) -> None:
    """Keeps the GPU busy for half a second, until its clocks have ramped up."""
    with torch.cuda.device(device):
        a = torch.ones(1024, 1024, device=device)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            a = a @ a * 0
            torch.cuda.synchronize()


def _events_ns(device: torch.device) -> int:
    """Returns the event overhead per kernel in ns: empty kernels timed one by one minus the same in a row."""
    with torch.cuda.device(device):
        spans = []
        _occupy(3_000_000)
        for kernels in (*[1] * EMPTY_KERNELS, EMPTY_KERNELS):
            begin = _event()
            for _ in range(kernels):
                torch.cuda._sleep(0)
            spans.append((begin, _event()))
        torch.cuda.synchronize()
        *single, row = starmap(_ns, spans)
        return max(0, round(median(single) - row / EMPTY_KERNELS))


def _random_tensor(meta: Any, device: torch.device) -> Tensor:
    """Returns a tensor of this shape, stride and dtype: random floats and booleans, zeros otherwise."""
    reach = 1 + sum((n - 1) * s for n, s in zip(meta.shape, meta.stride, strict=True)) if meta.shape.numel() else 0
    flat = torch.empty(reach, dtype=meta.dtype, device=device)
    if meta.dtype == torch.bool:
        flat.random_(2)
    elif meta.dtype.is_floating_point and meta.dtype.itemsize > 1:
        flat.uniform_()
    else:
        flat.zero_()
    return flat.as_strided(tuple(meta.shape), tuple(meta.stride))


def _producer(node: fx.Node) -> tuple[fx.Node, int] | None:
    """Returns the multi-output kernel that produces a value, and the output's index."""
    while node.target in (aten.detach.default, aten.alias.default):
        node = node.args[0]
    return (node.args[0], node.args[1]) if node.target is operator.getitem else None


def _number(node: fx.Node) -> Any:
    """Returns the value of a non-tensor node; a number read from a tensor is 1."""
    if node.op == "get_attr":
        return getattr(node.graph.owning_module, str(node.target))
    if node.target is aten._local_scalar_dense.default:
        return 1
    return node.target(*map_arg(node.args, _number), **map_arg(node.kwargs, _number))
