"""Noise: kernel times that vary and change, and what a tenant takes of the link."""

import numpy as np
import pytest

from simulator import Kernel, Program, Tensor
from simulator.jobs import Noise

PROGRAM = Program(
    "many", (Tensor("x", 1),), tuple(Kernel(f"k{i}", "other", "forward", (), (0,), 10_000 * (i + 1)) for i in range(50))
)
OWN = np.array([kernel.duration_ns for kernel in PROGRAM.kernels])


def test_no_noise_is_the_programs_own_times() -> None:
    assert Noise().durations(PROGRAM, 10, 0) == () == Noise().tenants(PROGRAM, 10, 0)
    assert Noise(tenant=0.5).durations(PROGRAM, 10, 0) == ()


def test_jitter_has_the_size_and_the_mean_that_it_says() -> None:
    rows = np.array(Noise(jitter=0.3).durations(PROGRAM, 400, 1)) / OWN
    assert rows.shape == (400, 50)
    assert np.log(rows).std() == pytest.approx(0.3, rel=0.02) and rows.mean() == pytest.approx(1, rel=0.01)
    assert Noise(jitter=0.3).durations(PROGRAM, 4, 1) != Noise(jitter=0.3).durations(PROGRAM, 4, 2)


def test_a_drift_begins_in_the_middle_and_stays() -> None:
    rows = np.array(Noise(drift=-0.2).durations(PROGRAM, 6, 3))
    assert (rows[:3] == OWN).all() and (rows[3:] == rows[3]).all()
    factors = rows[3] / OWN
    assert 0.6 <= factors.min() < 0.7 < 0.9 < factors.max() <= 1 and factors.mean() == pytest.approx(0.8, abs=0.05)


def test_a_tenant_takes_another_share_in_each_iteration() -> None:
    taken = Noise(tenant=0.6).tenants(PROGRAM, 100, 0)
    assert [at for at, _ in taken] == [i * PROGRAM.ideal_ns for i in range(200)]
    shares = [share for _, share in taken]
    assert 0 <= min(shares) < 0.1 and 0.5 < max(shares) <= 0.6


@pytest.mark.parametrize("wrong", [{"jitter": -0.1}, {"drift": -0.5}, {"drift": 11}, {"tenant": 0.96}])
def test_sizes_out_of_range_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected a number"):
        Noise(**wrong)
