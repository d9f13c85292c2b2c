"""Tests machines: presets, durations computed by hand, and errors."""

import re
from dataclasses import replace
from fractions import Fraction
from math import ceil

import pytest
from hypothesis import given, strategies as st

from simulator import FormatError, Machine
from simulator.machine import COMBINED, PRESETS

GOOD = {"name": "m", "memory_bytes": 100, "h2d_bytes_per_s": 10**9, "d2h_bytes_per_s": 10**9}


@pytest.mark.parametrize("name", sorted(p.stem for p in PRESETS.glob("*.yaml")))
def test_presets(name):
    machine = Machine.load(name)
    assert machine.name == name
    assert 2**32 < machine.memory_bytes < 2**38
    assert machine.memory_bytes_per_s > machine.h2d_bytes_per_s >= 10**9
    assert 10**12 <= machine.flops_per_s["float32"] < 10**16
    assert machine.malloc_ns > 0 and machine.free_ns > 0 and machine.malloc_bytes_per_s > 0
    assert machine.with_one_copy_stream() == replace(machine, copy_engines=1)


def test_every_figure_of_a_preset_has_its_source():
    for path in PRESETS.glob("*.yaml"):
        figures = set()
        for line in path.read_text().splitlines():
            figure = re.match(r"(\s*)(\w+): (\d[\d_.]*)(.*)", line)
            if figure and figure[1] == "":
                figures.add(figure[2])
                if figure[2] != "free_ns":  # the source of malloc_ns is its source too
                    assert re.match(r" +# .{4}", figure[4]), f"{path.name}: {line}"
        values = Machine.load(path.stem).to_dict()
        if "copy_latency_ns" in figures:
            figures = figures - {"copy_latency_ns"} | set(COMBINED["copy_latency_ns"])
        assert figures == {name for name, value in values.items() if type(value) in (int, float)}


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nmemory_bytes: 8\nh2d_bytes_per_s: 2\nd2h_bytes_per_s: 3\nefficiency: {conv: 1}\n")
    machine = Machine.load(path)
    assert (machine.memory_bytes, machine.h2d_bytes_per_s, machine.d2h_bytes_per_s) == (8, 2, 3)
    assert machine.copy_engines == 2 and machine.efficiency == {"conv": 1}


def test_optional_keys_have_defaults():
    """Defaults: pinned host memory of 64 GiB, copies and launches of 10 and 5 us, two engines, CUDA's alignment."""
    assert Machine.from_dict(GOOD) == Machine(
        "m",
        100,
        10**9,
        10**9,
        d2h_latency_ns=10_000,
        h2d_latency_ns=10_000,
        copy_engines=2,
        host_bytes=68_719_476_736,
        alignment=512,
        queue_depth=1024,
        event_ns=0,
        graph_launch_ns=0,
        flops_per_s={},
        memory_bytes_per_s=1,
        launch_ns=5_000,
        issue_ns=0,
        wait_ns=0,
        copy_contention=0.0,
        malloc_ns=0,
        free_ns=0,
        malloc_bytes_per_s=0,
        efficiency={},
        kernel_times=None,
        switch_ns=0,
        concurrency=1.0,
    )


@given(st.integers(0, 2**43), st.integers(1, 10**12), st.integers(0, 10**5))
def test_copies_round_up(nbytes, rate, latency):
    machine = Machine("m", 1, rate, 1, h2d_latency_ns=latency)
    assert machine.h2d_ns(nbytes) == latency + ceil(Fraction(nbytes * 10**9, rate))
    assert Machine("m", 1, 1, rate, d2h_latency_ns=latency).d2h_ns(nbytes) == machine.h2d_ns(nbytes)


@given(*[st.integers(2**20, 10**12)] * 2, st.integers(0, 2 * 10**12))
def test_what_both_carry_together_slows_both_down_alike(h2d, d2h, together):
    """Files with a single figure keep their shares exactly, for links of at least 1 MiB/s."""
    rates = {"h2d_bytes_per_s": h2d, "d2h_bytes_per_s": d2h}
    machine = Machine.from_dict({**GOOD, **rates, "duplex_bytes_per_s": together})
    share = max(1, (together << 20) // (h2d + d2h)) if 0 < together < h2d + d2h else 2**20
    assert machine.h2d_share == machine.d2h_share == share
    assert Machine.from_dict(machine.to_dict()) == machine == Machine("m", 100, h2d, d2h).with_shared_link(together)


def test_the_roofline():
    machine = Machine(
        "m",
        1,
        1,
        1,
        flops_per_s={"float32": 2 * 10**12},
        memory_bytes_per_s=10**11,
        launch_ns=7,
        efficiency={"conv": 0.5, "default": 0.25},
    )
    assert machine.kernel_ns("conv", 10**6, 0) == 7 + 1000  # 500 ns at the peak, half of it reached
    assert machine.kernel_ns("conv", 10**6, 10**6) == 7 + 20_000  # memory decides: 10 us, half of it
    assert machine.kernel_ns("pool", 0, 1000) == 7 + 40  # 10 ns at a quarter
    assert machine.kernel_ns("pool", 0, 1000, "int8") == 7 + 40  # no arithmetic, no figure needed
    whole = Machine("m", 1, 1, 1, memory_bytes_per_s=10**9, launch_ns=0)  # default efficiency 1
    assert whole.kernel_ns("pool", 0, 1000) == 1000
    with pytest.raises(FormatError, match=r"machine\.flops_per_s: m has no figure for bfloat16"):
        machine.kernel_ns("conv", 1, 0, "bfloat16")


def test_no_such_machine():
    with pytest.raises(FormatError, match=r"no preset .gtx9000.; there are a10, a100_40gb, a100_80gb, a40, "):
        Machine.load("gtx9000")
    with pytest.raises(FormatError, match=r"the nearest is 'rtx4090'$"):
        Machine.load("rtx4091")
