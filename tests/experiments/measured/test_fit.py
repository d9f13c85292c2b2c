"""The coefficients in configs/machine are those that the fit to the published measurements gives."""

import pytest

from experiments.measured import fit
from experiments.measured.__main__ import main
from simulator import Machine

# Chosen between Kineto's profile and published iterations, which are faster: configs/machine/v100.yaml.
BETWEEN = ("conv_float32", "conv_float32_backward")


@pytest.fixture(scope="module")
def h100():
    return fit.h100()


@pytest.fixture(scope="module")
def v100():
    return fit.of_v100()


def coefficients(found):
    return {key: (value, group.written[key]) for group in found.groups for key, value in group.found.items()}


def test_the_h100s_are_the_fits(h100):
    found = coefficients(h100)
    assert len(found) == 13
    for key, (fitted, written) in found.items():
        assert written == pytest.approx(fitted, rel=0.01 if key in fit.CHANNELS else 0.003), key


def test_the_h100s_error_is_the_fits(h100):
    assert h100.error is not None and 0.13 < h100.error <= 0.14
    assert h100.middle is not None and h100.middle < 0.07 and abs(h100.step) < 0.02


def test_the_error_on_other_shapes_is_larger_and_within_the_bar(h100):
    held = h100.held_out
    assert held is not None and held.kernels > 250
    assert h100.middle < held.middle < 0.15 and h100.error < held.spread < 0.15
    assert held.spread < Machine.load("h100").kernel_times.error < held.spread + 0.06


def test_groups_say_how_far_they_are_off(h100):
    groups = {group.name: group for group in h100.groups}
    assert groups["conv"].kernels == 106 and groups["pool"].kernels == 1
    assert groups["pool"].total == pytest.approx(0, abs=1e-4)  # one coefficient, one kernel
    assert all(group.middle is not None and group.middle < 0.15 and abs(group.total) < 0.05 for group in h100.groups)


def test_the_v100s_are_the_fits(v100):
    found = coefficients(v100)
    assert set(found) == set(fit.KINDS)
    for key, (fitted, written) in found.items():
        if key in BETWEEN:
            assert fitted < written < 1.15 * fitted, key
        else:
            assert written == pytest.approx(fitted, rel=0.003), key
    assert all(group.total == pytest.approx(0, abs=1e-3) for group in v100.groups) and abs(v100.step) < 0.02


def test_the_command_prints_them(h100, v100, monkeypatch, capsys):
    monkeypatch.setattr(fit, "h100", lambda: h100)
    monkeypatch.setattr(fit, "of_v100", lambda: v100)
    assert main(["fit"]) == 0
    out = capsys.readouterr().out
    assert "conv_bandwidth" in out and "0.797" in out and f"error: {h100.error:.3f}" in out
    assert "by coefficients fitted to other shapes" in out and "v100: the step" in out
