"""Kernel times before and during execution (TENSILE, section 4.3).

Before a job is measured, "a 3 layers MLP network" predicts its kernel times from kind, work and GPU utilization
(``KernelTimes``); at run time an exponential moving average corrects them (``corrected``), and a drift triggers
replanning (``drift``; section 3.2, step 4).

1. FLOPs, bytes and workspace, known for every kernel of a program, replace shapes and parameters as inputs;
   ``Sample.shapes`` adds them.
2. Utilization is the number of running jobs.
3. Predictions are clipped to the range of the training times, because other kinds of kernels would extrapolate.
4. As printed, the average has t_j twice; here it is t' = β t + (1 - β) measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulator.program import KERNEL_KINDS, Program

if TYPE_CHECKING:
    from torch import nn

KINDS = sorted(KERNEL_KINDS)
WIDTH = 64  # of both hidden layers
STEPS = 400  # of Adam, on all samples

Times = NDArray[np.int64]  # (n,), ns of each kernel


class Sample(NamedTuple):
    """Measured kernel times of a program at a number of running jobs.

    Attributes:
        shapes: Further inputs, (n, f), such as the logarithms of operators' dimensions; all samples have equally many.
    """

    program: Program
    jobs: int
    times: Times
    shapes: NDArray[np.float32] | None = None


class KernelTimes:
    """Predictor of kernel times; deterministic for a seed."""

    def __init__(
        self, net: nn.Module, mean: NDArray[np.float32], scale: NDArray[np.float32], lowest: float, highest: float
    ) -> None:
        self._net = net
        self._mean = mean
        self._scale = scale
        self._range = (lowest, highest)

    @classmethod
    def fit(cls, samples: Sequence[Sample], seed: int = 0) -> KernelTimes:
        """Fits log times by full-batch Adam on the squared error.

        Raises:
            ValueError: ``samples`` is empty.
        """
        import torch
        from torch import nn

        if not samples:
            raise ValueError("samples: expected at least one")
        x = np.concatenate([features(sample.program, sample.jobs, sample.shapes) for sample in samples])
        y = np.log(np.maximum(np.concatenate([sample.times for sample in samples]), 1.0))
        mean = x.mean(0)
        scale = np.where(x.std(0) > 1e-3, x.std(0), 1).astype(np.float32)
        torch.manual_seed(seed)
        layers = nn.Linear(x.shape[1], WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        nn.init.constant_(layers[2].bias, float(y.mean()))
        net = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        inputs = torch.from_numpy((x - mean) / scale)
        targets = torch.from_numpy(y.astype(np.float32))
        for _ in range(STEPS):
            loss = nn.functional.mse_loss(net(inputs)[:, 0], targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        return cls(net, mean, scale, float(y.min()), float(y.max()))

    def predict(self, program: Program, jobs: int, shapes: NDArray[np.float32] | None = None) -> Times:
        """Returns (n,) ns of the program's kernels at a number of running jobs, itself included."""
        import torch

        x = features(program, jobs, shapes)
        with torch.no_grad():
            log_ns = self._net(torch.from_numpy((x - self._mean) / self._scale))[:, 0].numpy()
        times: Times = np.rint(np.exp(np.clip(log_ns.astype(np.float64), *self._range))).astype(np.int64)
        return times


def features(program: Program, jobs: int, shapes: NDArray[np.float32] | None = None) -> NDArray[np.float32]:
    """Returns (n, f): kind (one-hot), logarithms of FLOPs, bytes and workspace, the number of jobs, and ``shapes``."""
    out = np.zeros((len(program.kernels), len(KINDS) + 4), np.float32)
    for row, kernel in zip(out, program.kernels, strict=True):
        row[KINDS.index(kernel.kind)] = 1
        row[-4:] = np.log1p(kernel.flops), np.log1p(kernel.bytes), np.log1p(kernel.workspace), jobs
    return out if shapes is None else np.hstack([out, shapes])


def r_squared(predicted: Times, measured: Times) -> float:
    """Returns 1 - squared error / variance of the times (the paper's "average R²")."""
    error = ((predicted - measured).astype(np.float64) ** 2).sum()
    spread = ((measured - measured.mean()) ** 2).sum()
    return 1.0 - float(error / spread) if spread else float(error == 0)


def corrected(times: Times, measured: Times, beta: float) -> Times:
    """Returns the exponential moving average; ``beta`` is the weight of the old estimate."""
    return np.rint(beta * times + (1 - beta) * measured).astype(np.int64)


def drift(times: Times, measured: Times) -> float:
    """Returns the drift of the Tensor Access Sequence from the planned one.

    The result is the largest shift of a kernel's start as a fraction of the planned iteration. Single kernel times are
    not compared, because time slicing makes them arbitrary.

    Args:
        times: planned times of the kernels in ns.
        measured: their measured times in ns.
    """
    return float(np.abs(np.cumsum(measured - times)).max() / max(times.sum(), 1))


def sequence(times: Times) -> list[int]:
    """Returns the Tensor Access Sequence: n + 1 times in ns, when each kernel starts and the iteration ends."""
    return [0, *np.cumsum(times).tolist()]
