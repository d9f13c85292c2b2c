"""Compares measured training steps with the kernel-time model, one row per operator or kind of operators.

1. *Traces*: NAME.csv has the time of every outermost operator of a step (tests/data/measured/README.md), NAME.yaml its
   network, device and source. An operator may correspond to several kernels and a kernel to several operators.
2. *Profiles*: NAME.json (experiments/measure/measured_step.py), written by ``python -m experiments.measured profile``.
3. *By kind*: a V100's step, for which only sums per kind of kernel are published.
4. *Whole steps*: steps.csv, for which only the step time or the throughput is published.

``control`` is a single roofline: the float32 rate for every kernel and a fixed launch time.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import yaml

from executor.capture.capture import capture
from executor.capture.captured import Captured
from executor.capture.durations import Precision, with_roofline
from experiments import workloads
from experiments.measure.measured_step import MeasuredStep, modeled
from simulator.files import FormatError, fields, load_json
from simulator.machine import Machine
from simulator.program import Kernel, Program

T = TypeVar("T")
DATA = Path(__file__).resolve().parents[3] / "tests" / "data" / "measured"
SMALL = 4096  # bytes; a smaller add only increments a counter (batch norm's batches, Adam's steps)

# Traced operator -> ATen packets of the capture that implement it, in order; several alternatives if captures differ.
KERNELS: dict[str, tuple[tuple[str, ...], ...]] = {
    "aten::conv2d": (("convolution",),),
    "aten::batch_norm": (("native_batch_norm",),),
    "aten::relu_": (("relu_",), ("threshold",)),
    "aten::relu": (("relu",), ("threshold",)),
    "aten::max_pool2d": (("max_pool2d_with_indices",),),
    "aten::linear": (("addmm",), ("mm",)),
    "aten::adaptive_avg_pool2d": (("mean",), ("_adaptive_avg_pool2d",)),
    "aten::dropout": (("native_dropout",), ("bernoulli_", "div_", "mul")),
    "aten::ones_like": (("ones_like",),),
    "aten::cross_entropy_loss": (("_log_softmax", "nll_loss_forward"),),
    "NllLossBackward0": (("nll_loss_backward",),),
    "LogSoftmaxBackward0": (("_log_softmax_backward_data",),),
    "AddmmBackward0": (("mm", "mm", "sum"), ("mm", "sum")),
    "MeanBackward1": (("div",),),
    "AdaptiveAvgPool2DBackward0": (("_adaptive_avg_pool2d_backward",),),
    "NativeDropoutBackward0": (("native_dropout_backward",), ("mul",)),
    "ReluBackward0": (("threshold_backward",),),
    "CudnnBatchNormBackward0": (("native_batch_norm_backward",),),
    "ConvolutionBackward0": (("convolution_backward",),),
    "MaxPool2DWithIndicesBackward0": (("max_pool2d_with_indices_backward",),),
}
BY_KIND = "v100_resnet50_by_kind"
LEAST_US = 20.0  # minimum time of a kernel that is compared individually
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, momentum=0.9),
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
}
NETWORKS: dict[str, dict[str, Any]] = {
    "resnet50": {"family": "resnet_imagenet", "stages": "3-4-6-3", "halve": 3},
    "vgg13": {"family": "vgg_imagenet", "depth": 13, "pooled": True},
}


@dataclass(frozen=True)
class Operator:
    """One row of a trace: an operator and its time in microseconds."""

    stage: str
    name: str
    us: float
    elements: int  # elements of the largest input; 0: unknown


class Comparison(NamedTuple):
    """Measured, modeled and control times: microseconds of an operator or a kind of operators, or ms of a step.

    Attributes:
        kind: kind of the kernels; of a step: "sum of kernels", or "iteration", which includes the host and the data
            loader.
    """

    name: str
    kind: str
    measured: float
    modeled: float
    control: float


@dataclass(frozen=True)
class Trace:
    """A published trace with its network, device and source.

    Attributes:
        machine: name of the preset.
        torch: measured PyTorch version.
        network: settings for ``workloads.build``.
        optimizer: key of OPTIMIZERS.
        operators: rows of the trace.
    """

    name: str
    source: str
    license: str
    device: str
    machine: str
    torch: str
    precision: Precision
    network: dict[str, Any]
    optimizer: str
    operators: tuple[Operator, ...]

    @classmethod
    def load(cls, path: Path) -> Trace:
        """Reads NAME.csv and NAME.yaml from the same folder.

        Raises:
            FormatError: if a file is invalid; the message names the file and its line or entry.
        """
        operators = tuple(read_operators(path))
        header = path.with_suffix(".yaml")
        keys = ("format", "source", "licence", "device", "machine", "torch", "optimizer")
        try:
            data = yaml.safe_load(header.read_text())
            top = fields(data, "trace", {**dict.fromkeys(keys, str), "network": dict, "precision": dict}, {})
            if top.pop("format") != "trace/1":
                raise FormatError(f"trace.format: expected 'trace/1', got {data['format']!r}")
            top["precision"] = Precision(**top["precision"])
            top["license"] = top.pop("licence")  # the spelling of the file format
        except (OSError, TypeError, FormatError) as error:
            raise FormatError(f"{header}: {error}") from None
        return cls(path.stem, operators=operators, **top)

    def captured(self) -> Captured:
        """Returns the captured step with durations for the trace's machine."""
        return captured_step(self.network, self.optimizer, Machine.load(self.machine), self.precision)


def captured_step(
    network: dict[str, Any],
    optimizer: str,
    machine: Machine,
    precision: Precision,
    half: bool = False,
    channels_last: bool = False,
) -> Captured:
    """Returns a network's step with durations for a machine; equal networks are captured once."""
    captured = _captured(tuple(sorted(network.items())), optimizer, half, channels_last)
    return replace(captured, precision=precision).on(machine)


@cache
def _captured(network: tuple[tuple[str, Any], ...], optimizer: str, half: bool, channels_last: bool) -> Captured:
    with torch.device("meta"):
        model, loss_fn, _, batch = workloads.build(dict(network))
        if channels_last:
            model = model.to(memory_format=torch.channels_last)
            x = batch[0]
            batch = x.to(memory_format=torch.channels_last), batch[1]
        optimizing = OPTIMIZERS[optimizer](model.parameters())
        return capture(model, loss_fn, optimizing, batch, autocast=torch.float16 if half else None, check=False)


def read_csv(path: Path, make: Callable[[dict[str, str]], T]) -> list[T]:
    """Reads a CSV file with a header and returns ``make(row)`` of each row.

    Raises:
        FormatError: if ``make`` fails; the message names the file and the line.
    """
    found = []
    with path.open(newline="") as file:
        for line, row in enumerate(csv.DictReader(file), 2):
            try:
                found.append(make(row))
            except (KeyError, TypeError, ValueError) as error:
                raise FormatError(f"{path}: line {line}: {error} ({type(error).__name__}); correct the file") from None
    return found


def read_operators(path: Path) -> list[Operator]:
    """Reads the rows of a trace; raises FormatError as in ``read_csv``."""

    def operator(row: dict[str, str]) -> Operator:
        stage = row["stage"]
        us = float(row["us"])
        sizes = [int(n) for n in (row.get("input_elements") or "").split(";") if n.strip()]
        if stage not in ("forward", "backward", "optimizer") or not 0 <= us < 1e12:
            raise ValueError("expected a stage of forward, backward, optimizer and microseconds")
        return Operator(stage, row["operator"], us, max(sizes, default=0))

    return read_csv(path, operator)


def paired(captured: Captured, trace: Sequence[Operator]) -> list[tuple[Operator, list[int]]]:
    """Returns each operator of the trace with the indices of the captured kernels that it timed.

    Raises:
        ValueError: if an operator is unknown or occurs more often than in the capture; the message names the line.
    """
    unpaired: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, kernel in enumerate(captured.program.kernels):
        unpaired[kernel.phase, _class(kernel)].append(i)
    for queue in unpaired.values():
        queue.reverse()
    found: list[tuple[Operator, list[int]]] = []
    for line, row in enumerate(trace, 2):
        if row.stage == "optimizer":  # one operator updates all parameters
            packet = row.name.removeprefix("aten::_foreach_")
            indices = unpaired.pop(("optimizer", packet), []) + unpaired.pop(("optimizer", packet.rstrip("_")), [])
            found.append((row, indices))
            continue
        if row.name in ("aten::add", "aten::add_"):  # adds tensors or increments a counter
            alternatives: tuple[tuple[str, ...], ...] = (("count" if row.elements * 4 < SMALL else "add",),)
        elif row.name in KERNELS:
            alternatives = KERNELS[row.name]
        elif row.us:
            raise ValueError(
                f"line {line}: operator {row.name!r} is unknown; add it to the operators of the trace format"
            )
        else:  # a view
            alternatives = ((),)
        stage = "backward" if row.name == "aten::ones_like" else row.stage
        for packets in alternatives:
            queues = [unpaired[stage, packet] for packet in packets]
            if all(len(queue) >= packets.count(packet) for packet, queue in zip(packets, queues, strict=True)):
                found.append((row, [queue.pop() for queue in queues]))
                break
        else:
            raise ValueError(f"line {line}: the trace has more of {row.name} than the capture; correct `network`")
    return found


def _class(kernel: Kernel) -> str:
    packet = kernel.name.split(".")[1] if "." in kernel.name else kernel.name
    if kernel.phase != "optimizer" and packet in ("add", "add_"):
        return "count" if kernel.bytes < SMALL else "add" if kernel.phase == "forward" else "sum of gradients"
    return packet


def with_trace_times(captured: Captured, trace: Sequence[Operator]) -> Program:
    """Returns the captured program with the trace's times; raises ValueError as in ``paired``."""
    durations = [k.duration_ns for k in captured.program.kernels]
    for row, kernels in paired(captured, trace):
        total = sum(durations[k] for k in kernels)
        for k in kernels:
            share = durations[k] / total if total else 1 / len(kernels)
            durations[k] = round(row.us * 1e3 * share)
    return captured.program.with_durations(durations)


def of_trace(trace: Trace) -> list[Comparison]:
    """Compares each operator of a trace with the model; raises FormatError if trace and network do not match."""
    captured = trace.captured()
    try:
        pairs = paired(captured, trace.operators)
    except ValueError as error:
        raise FormatError(f"{trace.name}.csv: {error}") from None
    control_ns = control_durations(captured, Machine.load(trace.machine))
    kernels = captured.program.kernels
    return [
        Comparison(
            row.name,
            kernels[indices[0]].kind if indices else "other",
            row.us,
            sum(kernels[k].duration_ns for k in indices) / 1e3,
            sum(control_ns[k] for k in indices) / 1e3,
        )
        for row, indices in pairs
    ]


def of_profile(measured: MeasuredStep) -> list[Comparison]:
    """Compares the time of each profiled kernel with the prediction of the kernel-time model.

    Skips operators that this version of PyTorch does not have.
    """
    machine = Machine.load(measured.machine)
    predicted = modeled(measured, machine)
    control_machine = one_roofline(machine)
    found = []
    for (index, _, ns, _), modeled_ns in zip(measured.kernels, predicted, strict=True):
        if modeled_ns is not None:
            op = measured.operators[index]
            control = control_machine.kernel_ns(op.kind, op.flops, op.bytes) if op.flops or op.bytes else 0
            found.append(Comparison(op.name, op.kind, ns / 1e3, modeled_ns / 1e3, control / 1e3))
    return found


def load(path: Path) -> Trace | MeasuredStep:
    """Reads a trace (.csv) or a profile (.json).

    Raises:
        FormatError: if a file is invalid; the message names the file and its line or entry.
    """
    return Trace.load(path) if path.suffix == ".csv" else load_json(path, MeasuredStep.from_dict)


def one_roofline(machine: Machine) -> Machine:
    """Returns the control's machine: without a kernel-time model, with the old launch time."""
    return replace(machine, launch_ns=5000, kernel_times=None)


def control_durations(captured: Captured, machine: Machine) -> list[int]:
    """Returns the control's ns per kernel."""
    return [k.duration_ns for k in with_roofline(captured.program, one_roofline(machine), "float32").kernels]


# ------------------------------------------------------------------------------------------ by kind

_KINDS = {
    ("forward", "convolution"): "conv fwd",
    ("backward", "convolution_backward"): "conv bwd",
    ("forward", "native_batch_norm"): "bn fwd",
    ("backward", "native_batch_norm_backward"): "bn bwd",
    ("forward", "relu_"): "relu fwd",
    ("backward", "threshold_backward"): "relu bwd",
    ("forward", "max_pool2d_with_indices"): "maxpool fwd",
    ("backward", "max_pool2d_with_indices_backward"): "maxpool bwd",
    ("forward", "add"): "residual add fwd",
    ("forward", "add_"): "residual add fwd",
    ("backward", "add_"): "gradient add",
    ("forward", "addmm"): "matmul",
    ("backward", "mm"): "matmul",
}


def v100() -> tuple[Captured, dict[str, list[int]], dict[str, float]]:
    """Returns the step profiled on a V100, its kernel indices by kind, and the measured microseconds by kind."""
    network = {**NETWORKS["resnet50"], "batch_size": 32}
    captured = captured_step(network, "SGD", Machine.load("v100"), Precision(False, False))
    kinds: dict[str, list[int]] = defaultdict(list)
    for i, kernel in enumerate(captured.program.kernels):
        packet = kernel.name.split(".")[1] if "." in kernel.name else kernel.name
        kinds["optimizer" if kernel.phase == "optimizer" else _KINDS.get((kernel.phase, packet), "other")].append(i)
    measured = read_csv(DATA / f"{BY_KIND}.csv", lambda row: (row["kind"], 1e3 * float(row["ms_per_step"])))
    return captured, dict(kinds), dict(measured)


def by_kind() -> list[Comparison]:
    """Compares the V100's step with the model, one row per kind of kernel."""
    captured, kinds, measured = v100()
    kernels = captured.program.kernels
    control_ns = control_durations(captured, Machine.load("v100"))
    return [
        Comparison(
            kind,
            kind,
            us,
            sum(kernels[k].duration_ns for k in kinds.get(kind, ())) / 1e3,
            sum(control_ns[k] for k in kinds.get(kind, ())) / 1e3,
        )
        for kind, us in measured.items()
    ]


# ------------------------------------------------------------------------------------------ whole steps


def published() -> list[Comparison]:
    """Compares the steps of steps.csv, of which only the time is published, with the model; float16 means autocast."""
    return read_csv(DATA / "steps.csv", _published)


def _published(row: dict[str, str]) -> Comparison:
    machine = Machine.load(row["machine"])
    precision = row["precision"]
    network = {**NETWORKS[row["network"]], "batch_size": int(row["batch"])}
    captured = captured_step(
        network,
        row["optimizer"],
        machine,
        Precision(conv_tf32=precision == "tf32", matmul_tf32=False),
        precision == "float16",
        row["layout"] == "nhwc",
    )
    name = f"{row['machine']}: {row['network']}, {row['batch']}, {precision}, {row['layout'].upper()}"
    modeled_ms = captured.program.ideal_ns / 1e6
    control_ms = sum(control_durations(captured, machine)) / 1e6
    return Comparison(name, row["kind"], float(row["ms"]), modeled_ms, control_ms)
