"""A measured step as others can read it, ``measured/1``: what a model of times is fitted to and compared with.

It has the device, the software, and every kernel's time with its operator and what that was called with: shapes,
strides and types, no content. From these the model of time gives its own (``modelled``) on whatever coefficients a
machine has then. Nothing in it is about a person: names of modules and tensors, lines of code, paths and hosts are not
written, and ``from_dict`` refuses paths and addresses in the words that a person types.

``contribution`` makes it of a captured program and its profile (profile.py); ``python -m experiments.measured
profile`` measures a network, and ``add`` checks a file of others.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from math import isfinite
from typing import Any, get_args

import torch
from torch import Tensor, fx
from torch.fx.passes.shape_prop import TensorMetadata, _extract_tensor_metadata

from executor.capture.captured import Captured
from executor.capture.kernel_times import Precision, kernel_ns
from executor.capture.profile import Cache, Profile
from simulator.files import FormatError, fields
from simulator.machine import Machine
from simulator.program import Kernel, KernelKind, Phase

FORMAT = "measured/1"
# Measured rates of a machine, as its file names them.
RATES = ("memory_bytes", "h2d_bytes_per_s", "d2h_bytes_per_s", "duplex_h2d_bytes_per_s", "duplex_d2h_bytes_per_s",
         "copy_latency_ns", "copy_engines", "launch_ns", "issue_ns", "wait_ns")  # fmt: skip
MANY = ("_foreach_", "_fused_")  # what updates many parameters in a kernel is called
MOST = 2**60  # of a size, a count, or ns

Value = Any  # a tensor as {"shape", "stride", "dtype"}, a number, a truth value, None, or a list of these

# What would say who or where: e-mail addresses, absolute paths (not URLs), a home directory.
_PERSONAL = (
    (re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]+"), "an e-mail address"),
    (re.compile(r"(?<![\w:/])/[\w.]|\bfile:|\b[A-Za-z]:\\|\\\\\w|~\w*/"), "a path"),
)
_WORDS = {  # what the entries may look like, and what to say where they do not
    "workload": (re.compile(r"[\w.+-]{1,60}"), "a name of letters, digits and ._+-"),
    "device": (re.compile(r"[\w .()+-]{1,80}"), "the name of a device"),
    "machine": (re.compile(r"\w{1,40}"), "the name of a machine"),
    "torch": (re.compile(r"\d[\w.+]{0,40}"), "a version"),
    "cuda": (re.compile(r"(\d[\d.]{0,20})?"), "a version"),
    "cudnn": (re.compile(r"(\d[\d.]{0,20})?"), "a version"),
}


@dataclass(frozen=True)
class Operator:
    """What a kernel runs.

    Attributes:
        name: as in "aten.convolution.default".
        arguments, named: what it was called with. What is no tensor, number, truth value or list of them is None.
        result: its tensor; None where it has several.
        flops, bytes: of one call, as the program has them.
    """

    name: str
    kind: KernelKind
    arguments: tuple[Value, ...]
    named: dict[str, Value]
    result: Value
    flops: int
    bytes: int


@dataclass(frozen=True)
class Contributed:
    """A measured step; None stands for what was not measured.

    Attributes:
        source: who measured it, or where it is published; ``licence``: under which it may be passed on.
        workload: a name for people.
        device: as its driver names it; ``machine``: the preset of configs/machine that is compared with it.
        cuda, cudnn: versions; "" without.
        cache, event_ns: as of ``Profile``.
        operators: each once; ``kernels``: in order, (operator, phase, ns, workspace in bytes).
        rates: of RATES, as ``executor.calibrate`` measures them.
        step_ns: an eager step, the median.
        context_bytes: of the GPU, that a process takes besides tensors (executor/memory/context.py).
        reserved_bytes, allocated_bytes: peaks of PyTorch's allocator in the first steps.
    """

    source: str
    licence: str
    workload: str
    device: str
    machine: str
    torch: str
    cuda: str
    cudnn: str
    precision: Precision
    cache: Cache
    event_ns: int
    operators: tuple[Operator, ...]
    kernels: tuple[tuple[int, Phase, int, int | None], ...]
    rates: dict[str, int] | None = None
    step_ns: int | None = None
    context_bytes: int | None = None
    reserved_bytes: int | None = None
    allocated_bytes: int | None = None

    @property
    def kernels_ns(self) -> int:
        """The sum of the kernels' times."""
        return sum(ns for _, _, ns, _ in self.kernels)

    def to_dict(self) -> dict[str, Any]:
        """The ``measured/1`` dictionary."""
        out: dict[str, Any] = {"format": FORMAT, "source": self.source, "licence": self.licence}
        out |= {key: getattr(self, key) for key in _WORDS}
        out["precision"] = {key: getattr(self.precision, key) for key in _PRECISION}
        out |= {"cache": self.cache, "event_ns": self.event_ns, "rates": self.rates}
        out |= {key: getattr(self, key) for key in _FIGURES}
        out["operators"] = [
            {"name": o.name, "kind": o.kind, "arguments": list(o.arguments), "named": o.named, "result": o.result,
             "flops": o.flops, "bytes": o.bytes} for o in self.operators
        ]  # fmt: skip
        out["kernels"] = [list(kernel) for kernel in self.kernels]
        return out

    @classmethod
    def from_dict(cls, data: object) -> Contributed:
        """Reads a ``measured/1`` dictionary.

        Raises:
            FormatError: naming the first entry that is malformed, or has personal data in it.
        """
        words = ("format", "source", "licence", *_WORDS, "cache")
        numbers = dict.fromkeys(("rates", *_FIGURES), object)
        top = fields(
            data, "measured",
            {**dict.fromkeys(words, str), "precision": dict, "event_ns": int, **numbers, "operators": list,
             "kernels": list}, {},
        )  # fmt: skip
        if top.pop("format") != FORMAT:
            raise FormatError(f"measured.format: expected {FORMAT!r}, got {data['format']!r}")  # type: ignore[index]
        check_words(top, "measured")
        if top["cache"] not in get_args(Cache):
            raise FormatError(f"measured.cache: expected one of {', '.join(get_args(Cache))}, got {top['cache']!r}")
        top["precision"] = Precision(**fields(top["precision"], "measured.precision", _PRECISION, {}))
        top["event_ns"] = _count(top["event_ns"], "measured.event_ns")
        for key in _FIGURES:
            top[key] = None if top[key] is None else _count(top[key], f"measured.{key}")
        if top["rates"] is not None:
            fields(top["rates"], "measured.rates", {}, dict.fromkeys(RATES, (int, 0)))
            for key, rate in top["rates"].items():
                _count(rate, f"measured.rates.{key}")
        top["operators"] = tuple(_operator(o, f"measured.operators[{i}]") for i, o in enumerate(top["operators"]))
        top["kernels"] = tuple(
            _kernel(k, len(top["operators"]), f"measured.kernels[{i}]") for i, k in enumerate(top["kernels"])
        )
        if not sum(ns for _, _, ns, _ in top["kernels"]):
            raise FormatError("measured.kernels: no kernel takes time")
        return cls(**top)


_FIGURES = ("step_ns", "context_bytes", "reserved_bytes", "allocated_bytes")
_PRECISION: dict[str, type] = {"conv_tf32": bool, "matmul_tf32": bool}
_NAME = re.compile(r"\w+\.\w+\.\w+")


# ------------------------------------------------------------------------------------------ written


def contribution(
    captured: Captured, profile: Profile, *, source: str, licence: str, workload: str, rates: Machine | None = None,
    step_ns: int | None = None, context_bytes: int | None = None, reserved_bytes: int | None = None,
    allocated_bytes: int | None = None,
) -> Contributed:  # fmt: skip
    """What others may read of a captured program and its profile.

    Args:
        rates: as ``executor.calibrate`` measured the machine.
        others: see ``Contributed``.

    Raises:
        FormatError: a word says who or where; the profile is of another program.
    """
    if len(profile.durations_ns) != len(captured.nodes):
        raise FormatError(f"the profile is of another program ({profile.program!r})")
    known: dict[str, int] = {}
    operators: list[Operator] = []
    kernels: list[tuple[int, Phase, int, int | None]] = []
    spaces = profile.workspaces or [None] * len(captured.nodes)
    for kernel, nodes, ns, space in zip(
        captured.program.kernels, captured.nodes, profile.durations_ns, spaces, strict=True
    ):
        if not nodes:
            continue  # a marker
        node = nodes[0]
        made = Operator(
            str(node.target), kernel.kind, tuple(map(written, node.args)),
            {key: written(value) for key, value in node.kwargs.items()}, written(node), kernel.flops, kernel.bytes,
        )  # fmt: skip
        key = repr(made)
        if key not in known:
            known[key] = len(operators)
            operators.append(made)
        kernels.append((known[key], kernel.phase, ns, space))
    cuda = profile.workspaces is not None
    found = Contributed(
        source, licence, workload, profile.device, profile.machine, profile.torch,
        (torch.version.cuda or "") if cuda else "", str(torch.backends.cudnn.version() or "") if cuda else "",
        captured.precision, profile.cache, profile.event_ns, tuple(operators), tuple(kernels),
        None if rates is None else {key: value for key, value in rates.to_dict().items() if key in RATES},
        step_ns, context_bytes, reserved_bytes, allocated_bytes,
    )  # fmt: skip
    return Contributed.from_dict(found.to_dict())


def text_of(measured: Contributed) -> str:
    """JSON, an operator a line, so that a change can be read."""
    return json.dumps(measured.to_dict(), separators=(",", ":")).replace('{"name"', '\n{"name"') + "\n"


def written(value: object) -> Value:
    """An argument of a node, or a node's result, as ``Operator`` has it."""
    if isinstance(value, fx.Node):
        meta = value.meta.get("tensor_meta")
        if not isinstance(meta, TensorMetadata):
            return None  # a number that the graph computes, or several tensors
        return {"shape": list(meta.shape), "stride": list(meta.stride), "dtype": str(meta.dtype).removeprefix("torch.")}
    if isinstance(value, (list, tuple)):
        return [written(v) for v in value]
    return value if isinstance(value, (bool, int, float)) and isfinite(value) else None


# ------------------------------------------------------------------------------------------ read


def _impersonal(text: str, where: str) -> None:
    for shape, what in _PERSONAL:
        if found := shape.search(text):
            raise FormatError(f"{where}: has {what} in it ({found[0]!r}); leave out who or where it was measured")
    if not 0 < len(text) <= 300 or not text.isprintable():
        raise FormatError(f"{where}: expected one line of at most 300 characters, got {text[:40]!r}")


def check_words(entries: dict[str, Any], where: str) -> None:
    """Checks the entries that are words, as far as they are there.

    Raises:
        FormatError: naming the first that is not what it should be, or has personal data in it.
    """
    for key in ("source", "licence"):
        _impersonal(entries[key], f"{where}.{key}")
    for key, (shape, expected) in _WORDS.items():
        if key in entries and not shape.fullmatch(entries[key]):
            raise FormatError(f"{where}.{key}: expected {expected}, got {entries[key]!r}")


def _count(value: object, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < MOST:
        raise FormatError(f"{where}: expected an integer of at least 0, got {value!r}")
    return value


def _operator(data: object, where: str) -> Operator:
    required = {
        "name": str,
        "kind": str,
        "arguments": list,
        "named": dict,
        "result": object,
        "flops": int,
        "bytes": int,
    }
    top = fields(data, where, required, {})
    if not _NAME.fullmatch(top["name"]):
        raise FormatError(f"{where}.name: expected an operator as in 'aten.mm.default', got {top['name']!r}")
    if top["kind"] not in get_args(KernelKind):
        raise FormatError(f"{where}.kind: expected one of {', '.join(get_args(KernelKind))}, got {top['kind']!r}")
    top["arguments"] = tuple(_value(v, f"{where}.arguments[{i}]") for i, v in enumerate(top["arguments"]))
    for key, value in top["named"].items():
        if not re.fullmatch(r"[a-z_]\w{0,40}", key):
            raise FormatError(f"{where}.named: {key!r} is no name of an argument")
        _value(value, f"{where}.named.{key}")
    _value(top["result"], f"{where}.result")
    for key in ("flops", "bytes"):
        _count(top[key], f"{where}.{key}")
    return Operator(**top)


def _value(data: object, where: str) -> Value:
    if isinstance(data, list):
        return [_value(v, f"{where}[{i}]") for i, v in enumerate(data)]
    if isinstance(data, dict):
        top = fields(data, where, {"shape": list, "stride": list, "dtype": str}, {})
        for key in ("shape", "stride"):
            for i, n in enumerate(top[key]):
                _count(n, f"{where}.{key}[{i}]")
        if len(top["shape"]) != len(top["stride"]):
            raise FormatError(f"{where}: expected as many strides as dimensions")
        if not isinstance(getattr(torch, top["dtype"], None), torch.dtype):
            raise FormatError(f"{where}.dtype: PyTorch has no type {top['dtype']!r}")
    elif data is not None and not (isinstance(data, (int, float)) and isfinite(data)):
        raise FormatError(f"{where}: expected a tensor, a number, true, false, null or a list of them, got {data!r}")
    return data


def _kernel(data: object, operators: int, where: str) -> tuple[int, Phase, int, int | None]:
    if not isinstance(data, list) or len(data) != 4:
        raise FormatError(f"{where}: expected [operator, phase, ns, workspace], got {data!r}")
    which, phase, ns, space = data
    if _count(which, f"{where}[0]") >= operators:
        raise FormatError(f"{where}[0]: there is no operator {which}")
    if phase not in get_args(Phase):
        raise FormatError(f"{where}[1]: expected one of {', '.join(get_args(Phase))}, got {phase!r}")
    return which, phase, _count(ns, f"{where}[2]"), None if space is None else _count(space, f"{where}[3]")


# ------------------------------------------------------------------------------------------ compared


def modelled(measured: Contributed, machine: Machine) -> list[int | None]:
    """What the model of time says of each kernel, in ns; None where this PyTorch has no such operator.

    Raises:
        FormatError: an operator cannot have been called so, or the machine has no rate for it.
    """

    @cache
    def of(which: int, phase: Phase) -> int | None:
        operator = measured.operators[which]
        try:
            node = _node(operator)
            if node is None:
                return None
            kernel = Kernel(operator.name, operator.kind, phase, (), (), 0, 0, operator.flops, operator.bytes)
            many = any(part in operator.name for part in MANY)
            return kernel_ns(kernel, (node,), machine, measured.precision, many)
        except FormatError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
            said = str(error).partition("\n")[0] or type(error).__name__
            raise FormatError(
                f"measured.operators[{which}]: {operator.name} cannot have been called so ({said})"
            ) from None

    return [of(which, phase) for which, phase, _, _ in measured.kernels]


def _node(operator: Operator) -> fx.Node | None:
    """A call of the operator; None where there is no such one."""
    namespace, name, overload = operator.name.split(".")
    target = getattr(getattr(getattr(torch.ops, namespace), name, None), overload, None)
    if target is None:
        return None
    graph = fx.Graph()
    tensors: list[fx.Node] = []

    def value(data: Value) -> Any:
        if isinstance(data, dict):
            node = graph.placeholder(f"tensor{len(tensors)}")
            node.meta["tensor_meta"] = _meta(data)
            tensors.append(node)
            return node
        return list(map(value, data)) if isinstance(data, (list, tuple)) else data

    arguments = tuple(value(list(operator.arguments)))
    call = graph.call_function(target, arguments, {key: value(v) for key, v in operator.named.items()})
    if isinstance(operator.result, dict):
        call.meta["tensor_meta"] = _meta(operator.result)
    return call


def _meta(data: dict[str, Any]) -> TensorMetadata:
    dtype = getattr(torch, data["dtype"])
    tensor: Tensor = torch.empty_strided(data["shape"], data["stride"], dtype=dtype, device="meta")
    return _extract_tensor_metadata(tensor)
