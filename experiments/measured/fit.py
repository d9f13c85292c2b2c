"""The coefficients of the model of time (executor/capture/kernel_times.py), fitted to published measurements.

1. *H100*: least squares of ln(modelled / measured) over the operators of a trace of at least LEAST_US, a group of
   coefficients after the other; outliers count less (soft l1). The better of those that begin at STARTS, whatever the
   machine's file has: from one alone it can end where no small change is better, and on which computer it does differs.
2. *V100*: only sums over kinds of kernels are published; each coefficient is that with which its kinds' sum is right.

What neither has (attention, matrix products on tensor cores, the V100's tensor cores) stays as the machine's file has
it, which says where that is from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, least_squares

from executor.capture.captured import Captured
from executor.capture.kernel_times import kernel_ns
from experiments.common.measured_step import written
from experiments.measured import traces
from experiments.measured.steps import LEAST_US, Trace, v100
from experiments.measured.traces import Operator
from simulator.kernel_times import KernelTimes
from simulator.machine import Machine

STARTS = (0.4, 8.0), (0.7, 20.0)  # of shares, and of the two counts of channels
CHANNELS = ("norm_channels", "conv_channels")
OUTLIER = 0.1  # of ln(modelled / measured): from here on an error counts less
PLACES = 3  # decimals in a machine's file
Which = Callable[[Operator], bool]


def _named(*parts: str) -> Which:
    return lambda row: any(part in row.name for part in parts)


# What is fitted together, and to which operators; in this order, as pooling needs the elementwise share.
GROUPS: dict[str, tuple[tuple[str, ...], Which]] = {
    "elementwise": (
        ("elementwise",),
        lambda row: row.name in ("aten::relu_", "ReluBackward0") or (row.name == "aten::add_" and row.elements > 1),
    ),
    "optimizer": (("multi_tensor",), lambda row: row.stage == "optimizer"),
    "norm": (("norm", "norm_channels"), _named("batch_norm", "BatchNorm")),
    "pool": (("pool",), _named("aten::max_pool2d")),
    "pool, backward": (("pool_backward",), _named("MaxPool")),
    "matmul": (("matmul_float32",), _named("aten::linear", "AddmmBackward0")),
    "conv": (
        ("conv", "conv_backward", "conv_1x1", "conv_1x1_backward", "conv_bandwidth", "conv_channels"),
        _named("onv"),
    ),
}

# Coefficient -> the kinds whose sum makes it.
KINDS = {
    "elementwise": ("relu fwd", "relu bwd", "residual add fwd", "gradient add"), "norm": ("bn fwd", "bn bwd"),
    "pool": ("maxpool fwd",), "pool_backward": ("maxpool bwd",), "conv_float32": ("conv fwd",),
    "conv_float32_backward": ("conv bwd",),
}  # fmt: skip


@dataclass(frozen=True)
class Group:
    """Coefficients that were fitted together.

    Attributes:
        found, written: by the fit, and in the machine's file.
        kernels: how many they were fitted to.
        middle, spread: of |modelled / measured − 1| the median, of ln(modelled / measured) the standard deviation;
            None where only a sum is published.
        total: the sum modelled over that measured, less 1.
    """

    name: str
    found: dict[str, float]
    written: dict[str, float]
    kernels: int
    middle: float | None
    spread: float | None
    total: float


@dataclass(frozen=True)
class HeldOut:
    """Kernels by coefficients that were fitted to others: every second shape of a group by its other shapes, of groups
    with shapes enough. Figures as of ``Group``."""

    kernels: int
    middle: float
    spread: float
    total: float


@dataclass(frozen=True)
class Fit:
    """What was fitted of a machine; ``groups``, then over all kernels: see ``Group``.

    Attributes:
        error: ``spread`` over all kernels of at least LEAST_US; None where only sums are published.
        step: the sum of all modelled over that of all measured, less 1.
        held_out: the control.
    """

    machine: str
    groups: tuple[Group, ...]
    error: float | None
    middle: float | None
    step: float
    held_out: HeldOut | None = None


Pair = tuple[Operator, list[int]]


class _Model:
    """What the model says of a trace's operators, by its coefficients. Equal kernels are computed once."""

    def __init__(self, captured: Captured, machine: Machine):
        self.captured, self.machine = captured, machine
        nodes = captured.nodes
        self.keys = [str((n[0].target, [written(a) for a in n[0].args]) if n else ()) for n in nodes]

    def key(self, pair: Pair) -> str:
        """Equal for operators that the model cannot tell apart."""
        return str([self.keys[k] for k in pair[1]])

    def us(self, times: KernelTimes, rows: Sequence[Pair]) -> NDArray[np.float64]:
        """Of the operators, float64[n]."""
        on, known = replace(self.machine, kernel_times=times), dict[str, int]()
        for k in (k for _, mine in rows for k in mine):
            if self.keys[k] not in known:
                kernel = self.captured.program.kernels[k]
                known[self.keys[k]] = kernel_ns(
                    kernel, self.captured.nodes[k], on, self.captured.precision, kernel.kind == "optimizer"
                )
        return np.array([sum(known[self.keys[k]] for k in mine) / 1e3 for _, mine in rows])

    def fitted(self, times: KernelTimes, name: str, rows: Sequence[Pair]) -> KernelTimes:
        """``times`` with the coefficients of a group that are best for ``rows``."""
        us = np.array([row.us for row, _ in rows])
        return _fitted(times, GROUPS[name][0], lambda t: np.log(self.us(t, rows) / us))


def h100() -> Fit:
    """The fit to TrioSim's trace of ResNet-50."""
    trace = Trace.load(traces.DATA / "h100_resnet50.csv")
    captured, machine = trace.captured(), Machine.load("h100")
    pairs = traces.paired(captured, trace.operators)
    model, in_file = _Model(captured, machine), _times(machine)
    times, groups, held = in_file, [], [[], []]  # type: ignore[var-annotated]
    for name, (keys, chosen) in GROUPS.items():
        rows = [pair for pair in pairs if chosen(pair[0]) and pair[0].us >= LEAST_US]
        known = sorted({model.key(pair) for pair in rows})
        halves = [[pair for pair in rows if known.index(model.key(pair)) % 2 == i] for i in (0, 1)]
        if len(known) > len(keys) + 1:
            for half, other in (halves, halves[::-1]):
                us = np.array([row.us for row, _ in half])
                held[0] += list(model.us(model.fitted(times, name, other), half))
                held[1] += list(us)
        times = model.fitted(times, name, rows)
        us = np.array([row.us for row, _ in rows])
        ratio = model.us(times, rows) / us
        groups.append(Group(
            name, _only(times, keys), _only(in_file, keys), len(rows), float(np.median(abs(ratio - 1))),
            float(np.std(np.log(ratio))), float((ratio * us).sum() / us.sum() - 1),
        ))  # fmt: skip
    us, ours = np.array([row.us for row, _ in pairs]), model.us(times, pairs)
    ratio = (ours / us)[us >= LEAST_US]
    unseen = np.array(held[0]) / np.array(held[1])
    return Fit("h100", tuple(groups), float(np.std(np.log(ratio))), float(np.median(abs(ratio - 1))),
               float(ours.sum() / us.sum() - 1), HeldOut(
                   len(unseen), float(np.median(abs(unseen - 1))), float(np.std(np.log(unseen))),
                   float(sum(held[0]) / sum(held[1]) - 1)))  # fmt: skip


def _fitted(
    times: KernelTimes, keys: Sequence[str], errors: Callable[[KernelTimes], NDArray[np.float64]]
) -> KernelTimes:
    """``times`` with the best ``keys``."""

    def changed(values: Sequence[float]) -> KernelTimes:
        return replace(times, **dict(zip(keys, map(float, values), strict=True)))

    found = (least_squares(
        lambda values: errors(changed(values)), [channels if key in CHANNELS else share for key in keys],
        bounds=([0.01] * len(keys), [60.0 if key in CHANNELS else 1.0 for key in keys]), loss="soft_l1",
        f_scale=OUTLIER, diff_step=1e-3,
    ) for share, channels in STARTS)  # fmt: skip
    return changed(min(found, key=lambda one: float(one.cost)).x)


def of_v100() -> Fit:
    """The fit to Kineto's sums by kind."""
    captured, kinds, measured = v100()
    machine = Machine.load("v100")
    in_file = times = _times(machine)

    def said(times: KernelTimes, chosen: Sequence[str]) -> float:
        """us of all kernels of some kinds; that PyTorch updated each parameter by itself."""
        on = replace(machine, kernel_times=times)
        mine = [k for kind in chosen for k in kinds.get(kind, ())]
        return (
            sum(kernel_ns(captured.program.kernels[k], captured.nodes[k], on, captured.precision) for k in mine) / 1e3
        )

    groups = []
    for key, chosen in KINDS.items():
        us = sum(measured[kind] for kind in chosen)
        best = brentq(lambda share: said(replace(times, **{key: share}), chosen) - us, 0.05, 1.0, xtol=1e-6)  # noqa: B023
        times = replace(times, **{key: float(best)})
        count = sum(len(kinds[kind]) for kind in chosen)
        groups.append(
            Group(key, _only(times, (key,)), _only(in_file, (key,)), count, None, None, said(times, chosen) / us - 1)
        )
    return Fit("v100", tuple(groups), None, None, said(times, list(measured)) / sum(measured.values()) - 1)


def _times(machine: Machine) -> KernelTimes:
    assert machine.kernel_times is not None
    return machine.kernel_times


def _only(times: KernelTimes, keys: Sequence[str]) -> dict[str, float]:
    return {key: getattr(times, key) for key in keys}


def table(found: Fit) -> tuple[list[str], list[list[str]]]:
    """Heads, and a line for each coefficient."""
    heads = ["coefficient", "fitted", "in the file", "kernels", "median error", "sd of ln", "sum"]
    lines = []
    for group in found.groups:
        spread = "" if group.spread is None else f"{group.spread:.3f}"
        middle = "" if group.middle is None else f"{group.middle:.1%}"
        ends = [[str(group.kernels), middle, spread, f"{group.total:+.1%}"], ["", "", "", ""]]
        for i, (key, value) in enumerate(group.found.items()):
            lines.append([key, f"{value:.{PLACES}f}", f"{group.written[key]:g}", *ends[i > 0]])
    return heads, lines
