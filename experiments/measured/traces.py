"""Published times of a training step's operators, and the captured kernels that they are times of.

A trace is a CSV file: stage, operator and microseconds of every outermost operator of a step, in the order of their
calls (tests/data/measured/README.md). An operator may be several of our kernels (a cross entropy, the gradients of a
linear layer), and many of ours one of a GPU's (an update with ``foreach``); its time is shared out by the model's
times. What was not recorded (autograd's own sums of gradients) keeps the model's time.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from executor.capture.captured import Captured
from simulator.files import FormatError
from simulator.program import Kernel, Program

DATA = Path(__file__).resolve().parents[2] / "tests" / "data" / "measured"
STAGES = ("forward", "backward", "optimizer")
COLUMNS = ("stage", "operator", "us")
SMALL = 4096  # bytes: an add that only counts (batch norm's batches, Adam's steps)

# Operator as traced -> the packets of ours that do it, in order; several where captures differ.
KERNELS: dict[str, tuple[tuple[str, ...], ...]] = {
    "aten::conv2d": (("convolution",),), "aten::batch_norm": (("native_batch_norm",),),
    "aten::relu_": (("relu_",), ("threshold",)), "aten::relu": (("relu",), ("threshold",)),
    "aten::max_pool2d": (("max_pool2d_with_indices",),), "aten::linear": (("addmm",), ("mm",)),
    "aten::adaptive_avg_pool2d": (("mean",), ("_adaptive_avg_pool2d",)),
    "aten::dropout": (("native_dropout",), ("bernoulli_", "div_", "mul")), "aten::ones_like": (("ones_like",),),
    "aten::cross_entropy_loss": (("_log_softmax", "nll_loss_forward"),),
    "NllLossBackward0": (("nll_loss_backward",),), "LogSoftmaxBackward0": (("_log_softmax_backward_data",),),
    "AddmmBackward0": (("mm", "mm", "sum"), ("mm", "sum")),
    "MeanBackward1": (("div",),), "AdaptiveAvgPool2DBackward0": (("_adaptive_avg_pool2d_backward",),),
    "NativeDropoutBackward0": (("native_dropout_backward",), ("mul",)), "ReluBackward0": (("threshold_backward",),),
    "CudnnBatchNormBackward0": (("native_batch_norm_backward",),),
    "ConvolutionBackward0": (("convolution_backward",),),
    "MaxPool2DWithIndicesBackward0": (("max_pool2d_with_indices_backward",),),
}  # fmt: skip
ADDS = ("aten::add", "aten::add_")  # of tensors, or of a count


@dataclass(frozen=True)
class Operator:
    """A row of a trace."""

    stage: str
    name: str
    us: float
    elements: int  # of its largest input; 0: not known


def load(path: Path) -> list[Operator]:
    """Reads a trace.

    Raises:
        FormatError: it is none; the message names the line.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise FormatError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    rows = csv.DictReader(lines)
    if missing := [c for c in COLUMNS if c not in (rows.fieldnames or ())]:
        raise FormatError(f"{path}: line 1: no trace of operators, as it has no column {missing[0]!r}")
    found = []
    for row in rows:
        try:
            us, sizes = float(row["us"]), [int(n) for n in (row.get("input_elements") or "").split(";") if n.strip()]
        except (TypeError, ValueError) as error:
            raise FormatError(f"{path}: line {rows.line_num}: {error}") from None
        if row["stage"] not in STAGES or not 0 <= us < 1e12:
            raise FormatError(f"{path}: line {rows.line_num}: expected a stage of {', '.join(STAGES)} and microseconds")
        found.append(Operator(row["stage"], row["operator"], us, max(sizes, default=0)))
    return found


def paired(captured: Captured, trace: Sequence[Operator]) -> list[tuple[Operator, list[int]]]:
    """Each operator of the trace with the kernels that it is the time of.

    Raises:
        ValueError: the trace has an operator that is not known, or more of one than the capture; it names the line.
    """
    left: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i, kernel in enumerate(captured.program.kernels):
        left[kernel.phase, _class(kernel)].append(i)
    for queue in left.values():
        queue.reverse()
    found: list[tuple[Operator, list[int]]] = []
    for line, row in enumerate(trace, 2):
        if row.stage == "optimizer":  # one operator updates all parameters
            packet = row.name.removeprefix("aten::_foreach_")
            mine = left.pop(("optimizer", packet), []) + left.pop(("optimizer", packet.rstrip("_")), [])
            found.append((row, mine))
            continue
        if row.name in ADDS:
            ways: tuple[tuple[str, ...], ...] = (("count" if row.elements * 4 < SMALL else "add",),)
        elif row.name in KERNELS:
            ways = KERNELS[row.name]
        elif row.us:
            raise ValueError(f"line {line}: operator {row.name!r} is not known")
        else:  # a view
            ways = ((),)
        stage = "backward" if row.name == "aten::ones_like" else row.stage
        for packets in ways:
            queues = [left[stage, packet] for packet in packets]
            if all(len(queue) >= packets.count(packet) for packet, queue in zip(packets, queues, strict=True)):
                found.append((row, [queue.pop() for queue in queues]))
                break
        else:
            raise ValueError(f"line {line}: the trace has more of {row.name} than the capture")
    return found


def _class(kernel: Kernel) -> str:
    packet = kernel.name.split(".")[1] if "." in kernel.name else kernel.name
    if kernel.phase != "optimizer" and packet in ("add", "add_"):
        return "count" if kernel.bytes < SMALL else "add" if kernel.phase == "forward" else "sum of gradients"
    return packet


def measured(captured: Captured, trace: Sequence[Operator]) -> Program:
    """The captured program with the trace's times; raises ValueError as ``paired`` does."""
    durations = [k.duration_ns for k in captured.program.kernels]
    for row, kernels in paired(captured, trace):
        total = sum(durations[k] for k in kernels)
        for k in kernels:
            share = durations[k] / total if total else 1 / len(kernels)
            durations[k] = round(row.us * 1e3 * share)
    return captured.program.with_durations(durations)
