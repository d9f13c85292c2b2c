"""Measured training steps as JSON (``measured/1``): time, operator and arguments of each kernel.

Arguments carry shapes, strides and types but no values: enough for ``modeled`` to predict the same calls with other
cost-model coefficients. Names of modules, tensors, files and hosts are not written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx.passes.shape_prop import TensorMetadata, _extract_tensor_metadata

from executor.capture.captured import Captured
from executor.capture.durations import Precision, kernel_ns
from executor.capture.profile import Cache, Profile
from simulator.files import FormatError
from simulator.machine import Machine
from simulator.program import Kernel, KernelKind, Phase

FORMAT = "measured/1"

Value = Any  # a tensor as {"shape", "stride", "dtype"}, a number, a bool, None, or a list of these


@dataclass(frozen=True)
class Operator:
    """Operator of a kernel."""

    name: str  # for example "aten.convolution.default"
    kind: KernelKind
    # Positional and keyword arguments; None replaces all but tensors, numbers, bools and lists.
    arguments: list[Value]
    named: dict[str, Value]
    result: Value  # the output tensor; None if there are several
    flops: int  # of one call, as in the program
    bytes: int  # of one call


@dataclass(frozen=True)
class MeasuredStep:
    """Measured training step; None marks a quantity that was not measured."""

    source: str  # author or publication of the measurement
    license: str  # license of the data
    workload: str  # display name
    device: str  # name that the driver reports
    machine: str  # preset of configs/machine to compare with
    torch: str  # version
    cuda: str  # version; "" without
    cudnn: str  # version
    precision: Precision
    cache: Cache  # as in ``Profile``
    event_ns: int
    rates: dict[str, int] | None  # the entries of ``measured_rates``, as ``executor.calibrate`` measures them
    step_ns: int | None  # median duration of an eager step
    context_bytes: int | None  # device memory of a process beyond its tensors (executor/memory/context.py)
    reserved_bytes: int | None  # peaks of PyTorch's allocator in the first steps
    allocated_bytes: int | None
    operators: list[Operator]  # distinct
    kernels: list[tuple[int, Phase, int, int | None]]  # in order: operator index, phase, ns, workspace in bytes

    def to_json(self) -> str:
        """Returns the file's text, one operator per line."""
        text = json.dumps({"format": FORMAT, **vars(self)}, separators=(",", ":"), default=vars)
        return text.replace('{"name"', '\n{"name"') + "\n"

    @classmethod
    def from_dict(cls, data: Any) -> MeasuredStep:
        """Reads a ``measured/1`` dictionary; raises FormatError if it is of another format."""
        try:
            if (entries := dict(data)).pop("format") != FORMAT:
                raise ValueError("unknown format")
            if "licence" in entries:  # spelling of files written before version 0.5
                entries["license"] = entries.pop("licence")
            entries["precision"] = Precision(**entries["precision"])
            entries["operators"] = [Operator(**operator) for operator in entries["operators"]]
            entries["kernels"] = [(index, phase, ns, workspace) for index, phase, ns, workspace in entries["kernels"]]
            return cls(**entries)
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"expected {FORMAT}, as `experiments.measured profile` writes it ({error})") from None


def measured_step(captured: Captured, profile: Profile, rates: Machine | None = None, **entries: Any) -> MeasuredStep:
    """Returns the measured step of a profile.

    Args:
        captured: the profiled step.
        profile: measured durations of its kernels.
        rates: machine as measured by ``executor.calibrate``.
        entries: attributes of MeasuredStep that a profile lacks (default: None).

    Raises:
        FormatError: the profile is of another program.
    """
    if len(profile.durations_ns) != len(captured.nodes):
        raise FormatError(f"the profile is of another program ({profile.program!r}); profile this step")
    indices: dict[str, int] = {}
    operators: list[Operator] = []
    kernels: list[tuple[int, Phase, int, int | None]] = []
    workspaces = profile.workspaces or [None] * len(captured.nodes)
    for kernel, nodes, ns, workspace in zip(
        captured.program.kernels, captured.nodes, profile.durations_ns, workspaces, strict=True
    ):
        if not nodes:
            continue  # a marker
        node = nodes[0]
        operator = Operator(
            str(node.target),
            kernel.kind,
            serialize(list(node.args)),
            {key: serialize(value) for key, value in node.kwargs.items()},
            serialize(node),
            kernel.flops,
            kernel.bytes,
        )
        key = repr(operator)
        if key not in indices:
            indices[key] = len(operators)
            operators.append(operator)
        kernels.append((indices[key], kernel.phase, ns, workspace))
    cuda = profile.workspaces is not None
    unmeasured = dict.fromkeys(("step_ns", "context_bytes", "reserved_bytes", "allocated_bytes"))
    return MeasuredStep(
        **unmeasured
        | entries
        | {
            "device": profile.device,
            "machine": profile.machine,
            "torch": profile.torch,
            "cuda": (torch.version.cuda or "") if cuda else "",
            "cudnn": str(torch.backends.cudnn.version() or "") if cuda else "",
            "precision": captured.precision,
            "cache": profile.cache,
            "event_ns": profile.event_ns,
            "rates": None if rates is None else measured_rates(rates),
            "operators": operators,
            "kernels": kernels,
        }
    )


def measured_rates(machine: Machine) -> dict[str, int]:
    """Returns the entries of a machine that ``executor.calibrate`` measures."""
    keys = (
        "memory_bytes",
        "h2d_bytes_per_s",
        "d2h_bytes_per_s",
        "duplex_h2d_bytes_per_s",
        "duplex_d2h_bytes_per_s",
        "d2h_latency_ns",
        "h2d_latency_ns",
        "copy_engines",
        "launch_ns",
        "issue_ns",
        "wait_ns",
    )
    return {key: value for key, value in machine.to_dict().items() if key in keys}


def serialize(value: object) -> Value:
    """Serializes a node's argument or result as in ``Operator``."""
    if isinstance(value, fx.Node):
        meta = value.meta.get("tensor_meta")
        if not isinstance(meta, TensorMetadata):
            return None  # a computed number, or several tensors
        return {"shape": list(meta.shape), "stride": list(meta.stride), "dtype": str(meta.dtype).removeprefix("torch.")}
    if isinstance(value, (list, tuple)):
        return [serialize(v) for v in value]
    return value if isinstance(value, (bool, int, float)) and isfinite(value) else None


class Call(NamedTuple):
    """Kernel of a measured step with its operator, as arguments of ``kernel_ns``."""

    kernel: Kernel
    node: fx.Node
    multi_tensor: bool

    def ns(self, machine: Machine, precision: Precision) -> int:
        """Returns the modeled duration in ns."""
        return kernel_ns(self.kernel, (self.node,), machine, precision, self.multi_tensor)


def calls(measured: MeasuredStep) -> dict[tuple[int, Phase], Call]:
    """Returns one call per operator and phase of the step, except operators missing in this PyTorch version."""
    result = {}
    for index, phase in dict.fromkeys((index, phase) for index, phase, _, _ in measured.kernels):
        operator = measured.operators[index]
        if (node := _node(operator)) is not None:
            kernel = Kernel(operator.name, operator.kind, phase, (), (), 0, 0, operator.flops, operator.bytes)
            multi_tensor = phase == "optimizer" and any(part in operator.name for part in ("_foreach_", "_fused_"))
            result[index, phase] = Call(kernel, node, multi_tensor)
    return result


def modeled(measured: MeasuredStep, machine: Machine) -> list[int | None]:
    """Returns each kernel's modeled duration in ns; None for an operator missing in this PyTorch version."""
    durations = {key: call.ns(machine, measured.precision) for key, call in calls(measured).items()}
    return [durations.get((index, phase)) for index, phase, _, _ in measured.kernels]


def _node(operator: Operator) -> fx.Node | None:
    """Returns a call of the operator; None if this PyTorch version lacks it."""
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
        return list(map(value, data)) if isinstance(data, list) else data

    kwargs = {key: value(v) for key, v in operator.named.items()}
    call = graph.call_function(target, tuple(value(operator.arguments)), kwargs)
    if isinstance(operator.result, dict):
        call.meta["tensor_meta"] = _meta(operator.result)
    return call


def _meta(data: dict[str, Any]) -> TensorMetadata:
    dtype = getattr(torch, data["dtype"])
    tensor: Tensor = torch.empty_strided(data["shape"], data["stride"], dtype=dtype, device="meta")
    return _extract_tensor_metadata(tensor)
