"""Noise: kernel times that vary and change, and a tenant who takes a varying part of the link. What a plan is measured
under (``Job.durations``, ``simulate_jobs(tenant=...)``), and what a robust plan is made for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from simulator.job import Tenant
from simulator.program import Program

MOST = 0.95  # of the link that a tenant takes


@dataclass(frozen=True)
class Noise:
    """How much varies.

    Attributes:
        jitter: standard deviation of the logarithm of a kernel's time, drawn for every kernel and iteration; its mean
            is the kernel's own time.
        drift: from the middle of the run on kernels take 1 + ``drift`` times as long, each of them by a part of
            ``drift`` from 0 to 2, drawn once.
        tenant: a share of the link from 0 to ``tenant`` is taken, drawn anew for every ideal iteration time.

    Raises:
        ValueError: a number is out of range.
    """

    jitter: float = 0.0
    drift: float = 0.0
    tenant: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.jitter <= 2:
            raise ValueError(f"jitter: expected a number from 0 to 2, got {self.jitter}")
        if not -0.5 < self.drift <= 10:
            raise ValueError(f"drift: expected a number above -0.5 and at most 10, got {self.drift}")
        if not 0 <= self.tenant <= MOST:
            raise ValueError(f"tenant: expected a number from 0 to {MOST}, got {self.tenant}")

    def durations(self, program: Program, iterations: int, seed: int) -> tuple[tuple[int, ...], ...]:
        """A row of kernel times in ns for every iteration, as ``Job.durations`` has them; none where none varies."""
        if not (self.jitter or self.drift):
            return ()
        random = np.random.default_rng(seed)
        own = np.array([kernel.duration_ns for kernel in program.kernels], np.float64)
        later = own * (1 + self.drift * random.uniform(0, 2, own.size))
        factors = np.exp(self.jitter * random.standard_normal((iterations, own.size)) - self.jitter**2 / 2)
        rows = np.where(np.arange(iterations)[:, None] < iterations // 2, own, later) * factors
        return tuple(tuple(row) for row in np.rint(rows).astype(np.int64).tolist())

    def tenants(self, program: Program, iterations: int, seed: int) -> Tenant:
        """The shares that are taken, for twice as long as so many ideal iterations; none where none is."""
        if not self.tenant:
            return ()
        shares = np.random.default_rng(seed).uniform(0, self.tenant, 2 * iterations)
        return tuple((i * max(program.ideal_ns, 1), float(share)) for i, share in enumerate(shares))
