"""Tests G10's networks and published times as programs, and its machine."""

import pytest
from omegaconf import OmegaConf

from experiments.common.cli import UsageError
from experiments.figures import g10
from simulator import Machine, Program
from tests.experiments.conftest import figure_settings

PEAKS = {"BERT_Base": 102_128_611_328, "ResNet152": 293_624_078_336}


@pytest.mark.parametrize("network", PEAKS)
def test_the_sum_of_kernels_is_the_published_ideal_time(network: str) -> None:
    program = Program.load(g10.DATA / g10.data(network)["program"])
    assert program.ideal_ns == pytest.approx(g10.data(network)["ideal_ns"], rel=1e-6)
    assert program.peak_bytes == PEAKS[network]


def test_the_host_memory_is_the_swept_one() -> None:
    machine = g10.g10_machine(Machine.load("a100_40gb"), 64)
    assert (machine.memory_bytes, machine.host_bytes) == (40 * 2**30, 64 * 2**30)
    assert machine.h2d_ns(15_754_000) == machine.d2h_ns(15_754_000) == 1_005_000


@pytest.mark.nightly
def test_swaps_within_g10s_memory_and_link_are_above_their_floor() -> None:
    (task,) = g10.G10().tasks(figure_settings("g10", quick=True))
    row = g10.G10().run(task, Machine.load("a100_40gb"))
    assert row["floor"] <= row["found"]["swap"] < g10.by_host("BERT_Base")[128]


def test_an_unpublished_host_memory_is_refused() -> None:
    settings = OmegaConf.create({"host_gib": {"BERT_Base": [48]}, "modes": ["swap"]})
    with pytest.raises(UsageError, match=r"figure\.host_gib\.BERT_Base: .*64.*got 48"):
        g10.G10().tasks(settings)
