"""Measures the duration and the workspace of each kernel of a captured program on a device.

    profile = measure(captured, "cuda", machine="h200")
    profile.save(path_of(profile))                      # configs/profiles/<program>-<machine>.json
    program = with_profile(captured.program, profile)

With ``cache="cold"`` or ``"hot"`` each kernel runs alone on temporary inputs, so a model larger than the GPU can be
profiled. With ``cache="step"`` all kernels run in order in a real step, which has to fit. Equal kernels (operator,
shapes, strides, dtypes, constants) are measured once. executor/capture/README.md describes the method.
"""

from __future__ import annotations

import math
import operator
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from executor.capture.capture import Captured
from executor.capture.operators import arguments
from executor.capture.step_profiler import CYCLES_PER_NS, StepRunner, timed, workspace
from executor.memory import cuda_index
from simulator.files import FormatError, fields, integers, load_json, write_json
from simulator.program import Program

FORMAT = "profile/1"
PROFILES = Path(__file__).resolve().parents[2] / "configs" / "profiles"
WARMUP = 3
SHORT_NS, ROW = 1_000_000, 8
EMPTY = 50  # empty kernels that are timed with and without events around each
AWAKE = 0.5  # seconds of GPU work before measuring, because an idle GPU has low clocks
CORE_BYTES = 2**22  # upper bound of a CPU core's private cache
COMPUTE_BOUND = ("conv", "matmul")  # kinds of kernels whose time depends on the clock of the multiprocessors
SLOW_NS = 50_000_000  # longer runs are repeated only three times

Cache = Literal["cold", "hot", "step"]

aten = torch.ops.aten
# Arguments of attention's backward pass that hold the forward pass's random state and are read on the host.
_DRAWN = ("philox_seed", "philox_offset", "rng_state", "unused")
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


class ProfileError(RuntimeError):
    """Raised if a kernel or step cannot be profiled; the message is one sentence."""


@dataclass(frozen=True)
class Profile:
    """Measurements of one program on one device.

    Attributes:
        program: Name of the program.
        fingerprint: Fingerprint of the program without durations, workspaces and variants (``shape_of``).
        machine: Name of the machine, as in ``configs/machine``.
        device: Description of the device.
        torch: PyTorch version.
        durations_ns: Duration of each kernel in ns.
        workspaces: Workspace of each kernel in bytes; None if the device does not report it.
        cache: State of the cache before each kernel (``measure``).
        event_ns: Overhead of the events around a kernel in ns, already subtracted from the durations.
        step_ns: Duration in ns of all kernels of a step without events in between, at sustained clocks if the host
            keeps the device busy; an upper bound of the sum of ``durations_ns``; 0 if not measured (on the CPU, or with
            each kernel alone).
    """

    program: str
    fingerprint: str
    machine: str
    device: str
    torch: str
    durations_ns: tuple[int, ...]
    workspaces: tuple[int, ...] | None = None
    cache: Cache = "hot"
    event_ns: int = 0
    step_ns: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Returns the ``profile/1`` dictionary; the key ``workspaces`` is optional.

        Older files lack ``cache`` (it was "hot"), ``event_ns`` and ``step_ns``.
        """
        out = {"format": FORMAT, "program": self.program, "fingerprint": self.fingerprint, "machine": self.machine,
               "device": self.device, "torch": self.torch, "cache": self.cache, "event_ns": self.event_ns,
               "step_ns": self.step_ns, "durations_ns": list(self.durations_ns)}  # fmt: skip
        return out if self.workspaces is None else {**out, "workspaces": list(self.workspaces)}

    @classmethod
    def from_dict(cls, data: object) -> Profile:
        """Reads a ``profile/1`` dictionary.

        Raises:
            FormatError: If an entry is malformed; the message names the first one.
        """
        words = ("format", "program", "fingerprint", "machine", "device", "torch")
        optional = {"workspaces": (list, None), "cache": (str, "hot"), "event_ns": (int, 0), "step_ns": (int, 0)}
        top = fields(data, "profile", {**dict.fromkeys(words, str), "durations_ns": list}, optional)
        if top.pop("format") != FORMAT:
            raise FormatError(f"profile.format: expected {FORMAT!r}, got {data['format']!r}")
        if top["cache"] not in get_args(Cache):
            raise FormatError(f"profile.cache: expected one of {', '.join(get_args(Cache))}, got {top['cache']!r}")
        top["durations_ns"] = integers(top["durations_ns"], "profile.durations_ns")
        if top["workspaces"] is not None:
            top["workspaces"] = integers(top["workspaces"], "profile.workspaces", len(top["durations_ns"]))
        for name in ("durations_ns", "workspaces"):
            for i, value in enumerate(top[name] or ()):
                if value < 0:
                    raise FormatError(f"profile.{name}[{i}]: expected an integer of at least 0, got {value}")
        return cls(**top)

    def save(self, path: str | Path) -> None:
        """Writes ``profile/1`` JSON."""
        write_json(path, self.to_dict())

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads ``profile/1`` JSON.

        Raises:
            FormatError: If an entry is malformed; the message names the file and the entry.
        """
        return load_json(path, cls.from_dict)


def path_of(profile: Profile) -> Path:
    """Returns ``configs/profiles/<program>-<machine>.json``, with ``_`` for characters unsafe in file names."""
    return PROFILES / (re.sub(r"[^\w.+-]", "_", f"{profile.program}-{profile.machine}") + ".json")


def shape_of(program: Program) -> Program:
    """Returns the program without durations, workspaces and variants: its fingerprint is equal on every machine."""
    kernels = tuple(replace(k, duration_ns=0, workspace=0, variants=()) for k in program.kernels)
    return Program(program.name, program.tensors, kernels)


def with_profile(program: Program, profile: Profile) -> Program:
    """Returns the program with the profile's durations and, if the profile has them, workspaces.

    Variants are dropped, because their durations are modeled rather than measured.

    Raises:
        FormatError: If the profile belongs to another program.
    """
    shape = shape_of(program)
    if profile.fingerprint != shape.fingerprint or len(profile.durations_ns) != len(program.kernels):
        raise FormatError(
            f"the profile is of another program ({profile.program!r}, fingerprint {profile.fingerprint[:12]}; "
            f"{program.name!r} has {shape.fingerprint[:12]})"
        )
    spaces = profile.workspaces or [k.workspace for k in program.kernels]
    kernels = tuple(replace(k, duration_ns=ns, workspace=space)
                    for k, ns, space in zip(shape.kernels, profile.durations_ns, spaces, strict=True))  # fmt: skip
    return Program(program.name, program.tensors, kernels)


def measure(
    captured: Captured, device: str | torch.device, machine: str = "", repeats: int = 7, seconds: float = math.inf,
    cache: Cache = "cold",
) -> Profile:  # fmt: skip
    """Measures every kernel of a captured program.

    Args:
        device: "cuda" or "cpu".
        machine: Name of the machine to record in the profile.
        repeats: Measured runs of each kernel, at least 1.
        seconds: Time budget after which no further kernel is started.
        cache: "cold" reads twice the cache size before each run. "hot" repeats runs on the same inputs. "step" runs
            the kernels in order, each with the cache that its predecessors left.

    Raises:
        ProfileError: If a kernel cannot run alone, the step does not fit the device ("step"), the time budget is
            exhausted, or the device does not exist.
    """
    if repeats < 1:
        raise ValueError(f"repeats: expected at least 1, got {repeats}")
    if cache not in get_args(Cache):
        raise ValueError(f"cache: expected one of {', '.join(get_args(Cache))}, got {cache!r}")
    where = torch.device(device)
    if where.type == "cuda" and not torch.cuda.is_available():
        raise ProfileError("there is no CUDA GPU to profile on")
    until = time.monotonic() + seconds
    if where.type == "cuda":
        _awake(where)
    run = _Runner(captured, where, repeats, until, cache)
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else f"{where.type} ({torch.get_num_threads()})"
    with torch.random.fork_rng([cuda_index(where)] if where.type == "cuda" else []), torch.enable_grad():
        # oneDNN's LSTM saves values for its backward pass only in grad mode; no input requires a gradient.
        figures = run.in_step() if cache == "step" else [run.kernel(k) for k in range(len(captured.nodes))]
    durations, workspaces = zip(*figures, strict=True)
    return Profile(
        captured.program.name, shape_of(captured.program).fingerprint, machine, name, str(torch.__version__),
        durations, workspaces if where.type == "cuda" else None, cache, run.event_ns, run.step_ns,
    )  # fmt: skip


class _Runner:
    """Runs and times kernels.

    Attributes:
        event_ns, step_ns: See ``Profile``.
    """

    def __init__(
        self, captured: Captured, device: torch.device, repeats: int, until: float = math.inf, cache: Cache = "hot"
    ):
        self.captured, self.device, self.repeats, self.until = captured, device, repeats, until
        self.other: Tensor | None = None  # read to fill the cache with clean lines
        if cache == "cold":
            self.other = torch.zeros(cache_bytes(device) // 2, device=device)
        self.event_ns = _events_ns(device) if device.type == "cuda" and cache != "hot" else 0
        self.step_ns = 0
        self.known: dict[str, tuple[int, int]] = {}
        own = [d for node, d in zip(captured.placeholders, captured.devices, strict=True) if node in captured.values]
        main = next((d for d in own if d.type != "cpu"), torch.device("cpu"))
        self.moved = main.type != device.type  # measured elsewhere than captured
        self.devices = self._devices()

    def kernel(self, k: int) -> tuple[int, int]:
        """Returns (ns, workspace in bytes) of one kernel."""
        nodes = self.captured.nodes[k]
        if not nodes:
            return 0, 0
        node = nodes[0]
        key = self._key(node)
        if key not in self.known:
            if time.monotonic() > self.until:
                raise ProfileError(f"the time for profiling was over at kernel {k} of {len(self.captured.nodes)}")
            try:
                args, kwargs = self._inputs(node)
                self.known[key] = self._measure(lambda: node.target(*args, **kwargs))
            except (RuntimeError, TypeError, IndexError, NotImplementedError) as error:
                reason = str(error).splitlines()[0] if str(error) else type(error).__name__
                raise ProfileError(f"kernel {k} ({node.target}) cannot be run alone: {reason}") from error
        return self.known[key]

    def in_step(self) -> list[tuple[int, int]]:
        """Returns (ns, workspace in bytes) of all kernels, timed within a step."""
        try:
            runner = StepRunner(self.captured, self.device, self.devices, _fresh, self.moved)
            durations, workspaces, segments = runner.measure(self.repeats, self.until)
        except TimeoutError:
            raise ProfileError("the time for profiling was over before a step was measured") from None
        except (RuntimeError, TypeError, IndexError, ZeroDivisionError, NotImplementedError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ProfileError(f"the step cannot be run to profile it: {reason}") from error
        least = [int(bool(nodes)) for nodes in self.captured.nodes]
        times = [max(ns - self.event_ns, some) for ns, some in zip(durations, least, strict=True)]
        for kernels, whole in segments:
            shorter = together([times[k] for k in kernels], whole)
            for k, ns in zip(kernels, shorter, strict=True):
                times[k] = ns
        self.step_ns = sum(whole for _, whole in segments)
        if self.device.type == "cuda" and (sustained := runner.sustained_ns()):
            bound = [kernel.kind in COMPUTE_BOUND for kernel in self.captured.program.kernels]
            times = slowed(times, bound, sustained - self.step_ns)
            self.step_ns = max(self.step_ns, sustained)
        return list(zip(times, workspaces, strict=True))

    def _flush(self) -> None:
        """Evicts the kernel's data from the cache if ``cache`` is "cold"."""
        if self.other is not None:
            self.other.sum()

    def _measure(self, call: Callable[[], Any]) -> tuple[int, int]:
        if self.device.type != "cuda":
            for _ in range(WARMUP):
                out, ns = timed(call)
            times = []
            for _ in range(self.repeats if ns < SLOW_NS else min(3, self.repeats)):
                self._flush()
                times.append(timed(call)[1])
            del out
            return round(median(times)), 0
        with torch.cuda.device(self.device):
            for _ in range(WARMUP):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                _, issue_ns = timed(call)
                end.record()
                torch.cuda.synchronize()
            ns = begin.elapsed_time(end) * 1e6
            runs, row = min(3, self.repeats) if ns >= SLOW_NS else self.repeats, ROW if ns < SHORT_NS else 1
            row = 1 if self.other is not None else row  # the second run of a row would find a warm cache
            out, nbytes = workspace(call, self.device)
            torch.cuda.synchronize()
            del out
            pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(runs)]
            torch.cuda._sleep(round(CYCLES_PER_NS * (500_000 + 1.5 * issue_ns * runs * (row + 1))))
            for begin, end in pairs:
                self._flush()
                begin.record()
                for _ in range(row):
                    call()
                end.record()
            torch.cuda.synchronize()
            ns = median(a.elapsed_time(b) for a, b in pairs) * 1e6 - self.event_ns
            return max(1, round(ns / row)), nbytes

    # ------------------------------------------------------------------------------------ inputs

    def _devices(self) -> dict[fx.Node, torch.device]:
        """Returns each node's device: the one its operator names, else that of its inputs (a GPU before the host)."""
        given = dict(zip(self.captured.placeholders, self.captured.devices, strict=True))
        out: dict[fx.Node, torch.device] = {}
        for node in self.captured.graph.graph.nodes:
            if node.op == "get_attr":
                value = getattr(self.captured.graph, node.target, None)
                place = value.device if isinstance(value, Tensor) else torch.device("cpu")
            elif node in given:
                place = given[node]
            elif isinstance(named := node.kwargs.get("device"), torch.device):
                place = named
            else:
                places = [out[a] for a in node.all_input_nodes]
                place = next((p for p in places if p.type != "cpu"), torch.device("cpu"))
            out[node] = self.device if self.moved else place
        return out

    def _inputs(self, node: fx.Node) -> tuple[list[Any], dict[str, Any]]:
        """Returns fresh arguments for a kernel, one value per node."""
        values: dict[fx.Node, Any] = {}
        drawn = set[Any]()
        if isinstance(node.target, OpOverload):
            drawn = {a for argument, a in arguments(node.target, node.args, node.kwargs) if argument.name in _DRAWN
                     and isinstance(a, fx.Node)}  # fmt: skip

        def value(a: fx.Node) -> Any:
            if a not in values:
                meta = a.meta.get("tensor_meta")
                if meta is not None and (meta.dtype == torch.uint8 or a in drawn) and (maker := _maker(a)):
                    args, kwargs = self._inputs(maker[0])
                    values[a] = maker[0].target(*args, **kwargs)[maker[1]]
                else:
                    values[a] = _number(a) if meta is None else _fresh(meta, self.devices[a])
            return values[a]

        args, kwargs = list(map_arg(node.args, value)), dict(map_arg(node.kwargs, value))
        if self.moved and isinstance(kwargs.get("device"), torch.device):
            kwargs["device"] = self.device
        packet = getattr(node.target, "overloadpacket", None)
        if packet in _BOUNDS:
            at, bound = _BOUNDS[packet]
            args[at].random_(max(1, bound(args)))
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
            what = _number(a) if meta is None else (tuple(meta.shape), meta.stride, meta.dtype, str(self.devices[a]))
            return f"<{order.setdefault(a, len(order))} {what}>"

        return f"{node.target} {map_arg(node.args, describe)} {map_arg(node.kwargs, describe)}"


def cache_bytes(device: torch.device) -> int:
    """Returns the bytes of a GPU's L2 cache, or ``CORE_BYTES`` for a CPU."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else CORE_BYTES


def _awake(device: torch.device) -> None:
    """Keeps the GPU busy until its clocks have ramped up."""
    with torch.cuda.device(device):
        a, until = torch.ones(1024, 1024, device=device), time.monotonic() + AWAKE
        while time.monotonic() < until:
            a = a @ a * 0
            torch.cuda.synchronize()


def _events_ns(device: torch.device) -> int:
    """Returns the event overhead per kernel in ns: empty kernels timed one by one minus the same in a row."""
    with torch.cuda.device(device):
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(EMPTY + 1)]
        torch.cuda._sleep(round(CYCLES_PER_NS * 5_000_000))
        for i, (begin, end) in enumerate(pairs):
            begin.record()
            for _ in range(1 if i < EMPTY else EMPTY):
                torch.cuda._sleep(0)
            end.record()
        torch.cuda.synchronize()
        *single, row = (1e6 * a.elapsed_time(b) for a, b in pairs)
        return max(0, round(median(single) - row / EMPTY))


def together(times: Sequence[int], whole: int) -> list[int]:
    """Returns kernel times (ns) corrected so that their sum is at most ``whole``, their duration in a row.

    The excess is subtracted in equal parts, at most half of each time; any rest is removed proportionally.
    """
    excess = (sum(times) - whole) / max(1, sum(ns > 0 for ns in times))
    if excess <= 0:
        return list(times)
    shorter = [max(ns / 2, ns - excess) for ns in times]
    scale = min(1.0, whole / sum(shorter))
    return [max(round(ns * scale), min(was, 1)) for ns, was in zip(shorter, times, strict=True)]


def slowed(times: Sequence[int], bound: Sequence[bool], excess: int) -> list[int]:
    """Returns kernel times (ns) with ``excess`` ns, if positive, spread over the ``bound`` ones in proportion."""
    total = sum(ns for ns, is_bound in zip(times, bound, strict=True) if is_bound)
    scale = 1 + max(0, excess) / max(total, 1)
    return [round(ns * scale) if is_bound else ns for ns, is_bound in zip(times, bound, strict=True)]


def _fresh(meta: Any, device: torch.device) -> Tensor:
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


def _maker(node: fx.Node) -> tuple[fx.Node, int] | None:
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
