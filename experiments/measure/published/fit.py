"""Fits the coefficients of the kernel-time model (executor/capture/durations.py) to measurements.

1. *H100*: least squares of ln(modeled / measured) with a soft-l1 loss over a trace's operators of at least LEAST_US,
   one group of coefficients after the other; the better fit of two initial values.
2. *V100*: only sums per kind of kernel are published. Each coefficient makes the sum of its kinds exact.
3. *H200*: the same residuals over all kernels of three profiled steps, weighted by their share of the step's time.
   Each network is also held out in turn. Coefficients that affect no kernel keep the H100's values.

Coefficients without a measurement keep the value in the machine's file, which names its source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq, least_squares

from executor.capture.captured import Captured
from executor.capture.durations import kernel_ns
from experiments.measure.measured_step import MeasuredStep, calls, serialize
from experiments.measure.published.steps import DATA, LEAST_US, Operator, Trace, paired, v100
from simulator.files import load_json
from simulator.kernel_times import KernelTimes
from simulator.machine import Machine

OUTLIER = 0.1  # soft-l1 scale: larger |ln(modeled / measured)| count less
# Coefficients fitted to profiled steps of an H200, with their initial values; None: the H100's value.
STEP_STARTS: dict[str, float | None] = {
    **dict.fromkeys(
        (
            "launch_ns",
            "elementwise",
            "norm",
            "pool",
            "pool_backward",
            "conv",
            "conv_backward",
            "conv_1x1",
            "conv_1x1_backward",
            "conv_bandwidth",
            "conv_channels",
            "matmul",
            "attention",
        )
    ),
    "attention_backward": 0.4,
    "unaligned": 0.3,
    "columns": 0.5,
    "row_ns": 300.0,
    "element_flops": 150.0,
}
Selector = Callable[[Operator], bool]


def _named(*parts: str) -> Selector:
    return lambda row: any(part in row.name for part in parts)


# Groups of coefficients with the operators they are fitted to; ordered, because pooling needs the elementwise share.
GROUPS: dict[str, tuple[tuple[str, ...], Selector]] = {
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

# Coefficient -> kinds of kernels whose total time determines it.
KINDS = {
    "elementwise": ("relu fwd", "relu bwd", "residual add fwd", "gradient add"),
    "norm": ("bn fwd", "bn bwd"),
    "pool": ("maxpool fwd",),
    "pool_backward": ("maxpool bwd",),
    "conv_float32": ("conv fwd",),
    "conv_float32_backward": ("conv bwd",),
}


class Errors(NamedTuple):
    """Errors of modeled kernel times.

    Attributes:
        kernels: number of kernels.
        median: median of |modeled / measured - 1|; None if only a sum is published.
        spread: standard deviation of ln(modeled / measured); None if only a sum is published.
        total: modeled sum / measured sum - 1.
    """

    kernels: int
    median: float | None
    spread: float | None
    total: float

    @classmethod
    def from_times(cls, modeled: Sequence[float], measured: Sequence[float]) -> Errors:
        """Returns the errors of kernels from their modeled and measured times."""
        modeled_us = np.array(modeled)
        measured_us = np.array(measured)
        return cls.from_ratios(modeled_us / measured_us, float(modeled_us.sum() / measured_us.sum() - 1))

    @classmethod
    def from_ratios(cls, ratios: NDArray[np.float64], total: float) -> Errors:
        """Returns the errors of kernels from the ratios modeled / measured and the error of the sum."""
        return cls(len(ratios), _median_error(ratios), float(np.std(np.log(ratios))), total)


class Group(NamedTuple):
    """Coefficients that were fitted together.

    Attributes:
        found: fitted values.
        written: values in the machine's file.
        errors: errors of the kernels that the coefficients were fitted to.
    """

    found: dict[str, float]
    written: dict[str, float]
    errors: Errors


class HeldOut(NamedTuple):
    """Errors of a profiled step when it is part of the fit and when it is held out.

    Attributes:
        workload: the step's network.
        fitted, left_out: modeled sum / measured sum - 1.
        middle, left_middle: median of |modeled / measured - 1| over kernels of at least LEAST_US.
    """

    workload: str
    fitted: float
    left_out: float
    middle: float
    left_middle: float


class Fit(NamedTuple):
    """Fit of one machine.

    Attributes:
        machine: name of the preset.
        groups: fitted coefficients.
        errors: errors of all kernels of at least LEAST_US; ``total`` is that of the whole step.
        held_out: errors of held-out kernels. H100: every second shape of each group with more shapes than
            coefficients. H200: each network in turn.
        networks: one entry per profiled step.
    """

    machine: str
    groups: tuple[Group, ...]
    errors: Errors
    held_out: Errors | None = None
    networks: tuple[HeldOut, ...] = ()


Pair = tuple[Operator, list[int]]


class _Model:
    """Model of a trace's operator times as a function of the coefficients; computes equal kernels once."""

    def __init__(self, captured: Captured, machine: Machine):
        self.captured = captured
        self.machine = machine
        nodes = captured.nodes
        self.keys = [str((n[0].target, [serialize(a) for a in n[0].args]) if n else ()) for n in nodes]

    def key(self, pair: Pair) -> str:
        """Returns a key that is equal for operators with equal modeled times."""
        return str([self.keys[k] for k in pair[1]])

    def us(self, times: KernelTimes, rows: Sequence[Pair]) -> NDArray[np.float64]:
        """Returns the operators' modeled times in microseconds, float64[n]."""
        machine = replace(self.machine, kernel_times=times)
        ns_by_key = dict[str, int]()
        for k in (k for _, kernels in rows for k in kernels):
            if self.keys[k] not in ns_by_key:
                kernel = self.captured.program.kernels[k]
                ns_by_key[self.keys[k]] = kernel_ns(
                    kernel, self.captured.nodes[k], machine, self.captured.precision, kernel.kind == "optimizer"
                )
        return np.array([sum(ns_by_key[self.keys[k]] for k in kernels) / 1e3 for _, kernels in rows])

    def fitted(self, times: KernelTimes, name: str, rows: Sequence[Pair]) -> KernelTimes:
        """Returns ``times`` with a group's coefficients fitted to ``rows``."""
        us = np.array([row.us for row, _ in rows])
        return _fitted(times, GROUPS[name][0], lambda t: np.log(self.us(t, rows) / us))


def h100() -> Fit:
    """Fits the H100's coefficients to TrioSim's trace of ResNet-50."""
    trace = Trace.load(DATA / "h100_resnet50.csv")
    captured = trace.captured()
    machine = Machine.load("h100")
    pairs = paired(captured, trace.operators)
    model = _Model(captured, machine)
    in_file = _times(machine)
    times = in_file
    groups = []
    unseen: list[float] = []  # modeled us of held-out operators
    unseen_us: list[float] = []  # their measured us
    for name, (keys, chosen) in GROUPS.items():
        rows = [pair for pair in pairs if chosen(pair[0]) and pair[0].us >= LEAST_US]
        distinct = sorted({model.key(pair) for pair in rows})
        halves = [[pair for pair in rows if distinct.index(model.key(pair)) % 2 == i] for i in (0, 1)]
        if len(distinct) > len(keys) + 1:
            for half, other in (halves, halves[::-1]):
                unseen += list(model.us(model.fitted(times, name, other), half))
                unseen_us += [row.us for row, _ in half]
        times = model.fitted(times, name, rows)
        errors = Errors.from_times(model.us(times, rows), [row.us for row, _ in rows])
        groups.append(Group(_only(times, keys), _only(in_file, keys), errors))
    us = np.array([row.us for row, _ in pairs])
    modeled = model.us(times, pairs)
    errors = Errors.from_ratios((modeled / us)[us >= LEAST_US], float(modeled.sum() / us.sum() - 1))
    return Fit("h100", tuple(groups), errors, Errors.from_times(unseen, unseen_us))


def _fitted(
    times: KernelTimes, keys: Sequence[str], errors: Callable[[KernelTimes], NDArray[np.float64]]
) -> KernelTimes:
    """Returns ``times`` with the coefficients ``keys`` fitted by least squares."""

    def changed(values: Sequence[float]) -> KernelTimes:
        return replace(times, **dict(zip(keys, map(float, values), strict=True)))

    def by_key(share: float, channels: float) -> list[float]:
        return [channels if key.endswith("_channels") else share for key in keys]

    # The loss has local minima, so the better of two initial values counts.
    solutions = (
        least_squares(
            lambda values: errors(changed(values)),
            start,
            bounds=(by_key(0.01, 0.01), by_key(1.0, 60.0)),
            loss="soft_l1",
            f_scale=OUTLIER,
            diff_step=1e-3,
        )
        for start in (by_key(0.4, 8.0), by_key(0.7, 20.0))
    )
    return changed(min(solutions, key=lambda solution: float(solution.cost)).x)


class _Step:
    """A profiled step with each operator once: its mean measured ns and its number of kernels, float64[n]."""

    def __init__(self, measured: MeasuredStep, machine: Machine):
        distinct = calls(measured)
        self.measured = measured
        self.machine = machine
        self.calls = list(distinct.values())
        times: dict[tuple[int, str], list[int]] = {key: [] for key in distinct}
        for operator, phase, ns, _ in measured.kernels:
            if (operator, phase) in times:
                times[operator, phase].append(ns)
        self.ns = np.array([np.mean(repeats) for repeats in times.values()])
        self.counts = np.array([float(len(repeats)) for repeats in times.values()])

    def modeled(self, times: KernelTimes) -> NDArray[np.float64]:
        """Returns the modeled ns per operator, float64[n]."""
        machine = replace(self.machine, kernel_times=times)
        return np.array([float(call.ns(machine, self.measured.precision)) for call in self.calls])

    def residuals(self, times: KernelTimes) -> NDArray[np.float64]:
        """Returns residuals whose squares are each operator's soft-l1 loss times its share of the step's time."""
        is_timed = self.ns > 0
        logs = np.log(self.modeled(times)[is_timed] / self.ns[is_timed])
        weights = (self.counts * self.ns / (self.counts @ self.ns))[is_timed]
        return np.sign(logs) * OUTLIER * np.sqrt(2 * weights * (np.sqrt(1 + (logs / OUTLIER) ** 2) - 1))

    def sums(self, times: KernelTimes) -> NDArray[np.float64]:
        """Returns the modeled and the measured sum over the step's kernels in ns, float64[2]."""
        return np.array([self.counts @ self.modeled(times), self.counts @ self.ns])

    def ratios(self, times: KernelTimes) -> NDArray[np.float64]:
        """Returns modeled / measured of each kernel of at least LEAST_US."""
        large = self.ns >= 1e3 * LEAST_US
        return np.repeat((self.modeled(times) / self.ns.clip(1))[large], self.counts[large].astype(int))


def h200() -> Fit:
    """Fits the H200's coefficients to all of its profiled steps, then with each step held out in turn."""
    machine = Machine.load("h200")
    files = sorted(DATA.glob("nvidia_h200-*.json"))
    steps = [_Step(load_json(path, MeasuredStep.from_dict), machine) for path in files]
    times = _fitted_to_steps(steps)
    others = [_fitted_to_steps([other for other in steps if other is not step]) for step in steps]
    sums, held_out_sums = (
        np.array([step.sums(held_out) for step, held_out in zip(steps, fitted, strict=True)])
        for fitted in ([times] * len(steps), others)
    )
    ratios = [(step.ratios(times), step.ratios(held_out)) for step, held_out in zip(steps, others, strict=True)]
    networks = tuple(
        HeldOut(step.measured.workload, _total(sums[i]), _total(held_out_sums[i]), *map(_median_error, ratios[i]))
        for i, step in enumerate(steps)
    )
    ratio, unseen = (np.concatenate(held_out) for held_out in zip(*ratios, strict=True))
    keys = tuple(STEP_STARTS)
    errors = Errors.from_ratios(ratio, _total(sums.sum(axis=0)))
    group = Group(_only(times, keys), _only(_times(machine), keys), errors)
    return Fit("h200", (group,), errors, Errors.from_ratios(unseen, _total(held_out_sums.sum(axis=0))), networks)


def _fitted_to_steps(steps: Sequence[_Step]) -> KernelTimes:
    """Fits the coefficients that affect the steps' kernels; the other ones keep the H100's values."""
    base = _times(Machine.load("h100"))
    base = replace(base, **{key: value for key, value in STEP_STARTS.items() if value is not None})

    def residuals(values: dict[str, float]) -> NDArray[np.float64]:
        times = replace(base, **values)
        return np.concatenate([step.residuals(times) for step in steps])

    starts = _only(base, tuple(STEP_STARTS))
    initial = residuals({})
    starts = {key: value for key, value in starts.items() if (residuals({key: 0.8 * value}) != initial).any()}
    scale = np.array(list(starts.values()))
    unbounded = ("launch_ns", "conv_channels", "row_ns", "element_flops")  # not shares of a peak: may exceed 1
    upper = np.array([np.inf if key in unbounded else 1 / value for key, value in starts.items()])
    solution = (
        least_squares(
            lambda values: residuals(dict(zip(starts, map(float, values * scale), strict=True))),
            np.ones(len(starts)),
            bounds=(np.full(len(starts), 0.01), upper),
            diff_step=1e-2,
            xtol=1e-6,
        ).x
        * scale
    )
    fitted = dict(zip(starts, map(float, solution), strict=True))
    return replace(base, **{**fitted, "launch_ns": round(fitted["launch_ns"])})


def fit_v100() -> Fit:
    """Fits the V100's coefficients to Kineto's sums per kind of kernel."""
    captured, kinds, measured = v100()
    machine = Machine.load("v100")
    in_file = times = _times(machine)

    def total(times: KernelTimes, chosen: Iterable[str]) -> Errors:
        """Returns the error of the sum over all kernels of some kinds."""
        tuned = replace(machine, kernel_times=times)  # kernel_ns: that PyTorch had no fused optimizer
        kernels = [k for kind in chosen for k in kinds.get(kind, ())]
        ns = sum(kernel_ns(captured.program.kernels[k], captured.nodes[k], tuned, captured.precision) for k in kernels)
        return Errors(len(kernels), None, None, ns / 1e3 / sum(measured[kind] for kind in chosen) - 1)

    groups = []
    for key, chosen in KINDS.items():
        best = brentq(lambda share: total(replace(times, **{key: share}), chosen).total, 0.05, 1.0, xtol=1e-6)  # noqa: B023
        times = replace(times, **{key: float(best)})
        groups.append(Group(_only(times, (key,)), _only(in_file, (key,)), total(times, chosen)))
    return Fit("v100", tuple(groups), total(times, list(measured)))


def _times(machine: Machine) -> KernelTimes:
    assert machine.kernel_times is not None
    return machine.kernel_times


def _total(sums: NDArray[np.float64]) -> float:
    return float(sums[0] / sums[1] - 1)


def _median_error(ratios: NDArray[np.float64]) -> float:
    return float(np.median(abs(ratios - 1)))


def _only(times: KernelTimes, keys: Sequence[str]) -> dict[str, float]:
    return {key: getattr(times, key) for key in keys}


def table(fit: Fit) -> tuple[list[str], list[list[str]]]:
    """Returns the table's header and one line per coefficient."""
    heads = ["coefficient", "fitted", "in file", "kernels", "median error", "sd of ln", "sum"]
    lines = []
    for group in fit.groups:
        kernels, median, spread, total = group.errors
        ends = [
            str(kernels),
            "" if median is None else f"{median:.1%}",
            "" if spread is None else f"{spread:.3f}",
            f"{total:+.1%}",
        ]
        for key, value in group.found.items():
            lines.append([key, f"{value:.3f}", f"{group.written[key]:g}", *ends])
            ends = [""] * len(ends)
    return heads, lines
