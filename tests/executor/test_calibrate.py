"""Calibration finds back what the host backend was told, and writes what Machine.load reads."""

from dataclasses import replace

import pytest

from executor import calibrate as calibrate_module
from executor.calibrate import _contention, _fit, _taken, calibrate, main
from executor.replay.backend import BackendError
from simulator import Machine
from simulator.files import read_json
from tests.executor.replay.conftest import Virtual

# The largest copy of these tests, 4 MiB, takes 9.4 ms in and 17.8 ms out, of which 1 ms is latency.
MACHINE = Machine("given", 2**28, 500_000_000, 250_000_000, d2h_latency_ns=1_000_000, h2d_latency_ns=1_000_000,
                  alignment=256, flops_per_s={"float32": 10**13}, efficiency={"default": 0.75})  # fmt: skip


class Device(Virtual):
    """Without noise; a kernel that moves bytes takes 1 ns for each."""

    def __init__(self, machine):
        super().__init__(machine)
        self.memory_bytes = machine.memory_bytes

    def spin(self, ns, nbytes=0):
        self.now["compute"] += max(ns, nbytes)

    def synchronize(self, event=None):
        self.now = dict.fromkeys(self.now, max(self.now.values()))


def measured(machine, max_bytes=2**22):
    return calibrate(Device(machine), machine, max_bytes, "found")


def test_the_figures_are_found_back(tmp_path):
    found = measured(MACHINE)
    assert [n for n, _ in found.transfers["h2d"]] == [2**12, 2**14, 2**16, 2**18, 2**20, 2**22]
    machine = found.machine
    assert machine.h2d_bytes_per_s == pytest.approx(MACHINE.h2d_bytes_per_s, rel=1e-5)
    assert machine.d2h_bytes_per_s == pytest.approx(MACHINE.d2h_bytes_per_s, rel=1e-5)
    assert machine.d2h_latency_ns == machine.h2d_latency_ns == pytest.approx(MACHINE.d2h_latency_ns, rel=1e-5)
    assert (machine.copy_engines, machine.memory_bytes) == (2, 2**28)
    assert (machine.launch_ns, machine.wait_ns) == (0, 0) and machine.issue_ns > 0
    assert found.duplex == {"h2d": 1.0, "d2h": 1.0} and found.contention == {"h2d": 0.0, "d2h": 0.0}

    path = tmp_path / "machine.yaml"
    found.save(path)
    assert Machine.load(path) == machine
    # What is not measured is given.
    assert (machine.name, machine.alignment, machine.efficiency) == ("found", 256, {"default": 0.75})
    text = path.read_text()
    assert "d2h_latency_ns: " in text and "worst error" in text and "4 MiB" in text and "not measured" in text
    data = read_json(tmp_path / "machine.json")
    assert data["format"] == "calibration/2" and data["duplex"] == found.duplex
    assert [tuple(x) for x in data["transfers"]["d2h"]] == found.transfers["d2h"]


def test_one_copy_engine_is_noticed():
    found = measured(replace(MACHINE, copy_engines=1), 2**20)
    assert found.machine.copy_engines == 1 and max(found.duplex.values()) > 1.3


@pytest.mark.parametrize(
    ("h2d", "d2h"),
    [(1.0, 1.0), (0.99, 0.99), (0.8, 0.8), (0.5, 1.0), (1.0, 0.7), (0.4, 0.9)],
)
def test_what_each_direction_carries_beside_the_other(h2d, d2h, monkeypatch):
    """1 ns a byte in, 2 ns a byte out, at these shares while both are busy; less than DUPLEX_ERROR below 1 is 1."""
    alone, share = {"h2d": 1, "d2h": 2}, {"h2d": h2d, "d2h": d2h}

    def copies(backend, directions, nbytes):
        if len(directions) == 1:
            return {d: nbytes * alone[d] for d in directions}
        first = min(alone[d] / share[d] for d in directions)
        return {d: round(nbytes * (first + alone[d] - first * share[d])) for d in directions}

    monkeypatch.setattr(calibrate_module, "_copies", copies)
    base = replace(MACHINE, duplex_h2d_bytes_per_s=7, duplex_d2h_bytes_per_s=7)
    found = calibrate(Device(MACHINE), base, 2**20)
    machine, text = found.machine, found.to_yaml()
    assert machine.copy_engines == 2
    for d, rate in (("h2d", 1_000_000_000), ("d2h", 500_000_000)):
        measured = machine.to_dict()[f"duplex_{d}_bytes_per_s"]
        assert measured == pytest.approx(share[d] * rate if share[d] < 0.98 else 0, rel=1e-3)
        assert f"duplex_{d}_bytes_per_s: {measured}  # measured: {share[d]:.1%} of alone" in text


def test_no_larger_copy_is_begun_when_the_time_is_over():
    found = calibrate(Device(MACHINE), MACHINE, 2**22, seconds=0.0)
    assert [n for n, _ in found.transfers["d2h"]] == [2**12, 2**14]  # the two smallest are always there


@pytest.mark.parametrize(("with_waits", "wait_ns"), [(7000.0, 2000), (4000.0, 0)])
def test_a_wait_is_what_it_adds_to_a_kernel(with_waits, wait_ns, monkeypatch):
    """5 us a kernel; where noise makes waits cheaper than none, they cost nothing."""

    def launch(backend, count=0, waits=False):
        return with_waits if waits else 5000.0

    monkeypatch.setattr(calibrate_module, "_launch", launch)
    found = measured(MACHINE, 2**14)
    assert found.machine.wait_ns == wait_ns and found.machine.launch_ns == 5000
    assert f"wait_ns: {wait_ns}  # measured: " in found.to_yaml()


def test_what_a_copy_takes_by_hand(monkeypatch):
    """A kernel of 1000 ns alone takes 1200 beside a copy in that is over after 800, 1100 beside one out that is not."""
    times = {None: (1000, 0), "h2d": (1200, 800), "d2h": (1100, 1100)}
    monkeypatch.setattr(calibrate_module, "_streaming", lambda backend, n, direction=None, copied=0: times[direction])
    found, error = _contention(None, {"h2d": 4000, "d2h": 2000}, 2**20)
    assert found == pytest.approx({"h2d": 0.25, "d2h": 1 / 11}) and error == 0
    assert _taken({"h2d": 0.25, "d2h": 0.05}, 0.1) == 0.15 and _taken({"h2d": 0.25, "d2h": 0.05}, 0.15) == 0.0
    assert _taken({"h2d": -0.02, "d2h": 0.01}, 0.0) == 0.0 and _taken({"h2d": 1.5, "d2h": 0.9}, 0.1) == 0.49


def test_fits_that_make_no_machine():
    """A latency below zero is none; copies of more bytes have to take longer."""
    latency, rates, _ = _fit({d: [(1000, 900), (2000, 2000)] for d in ("h2d", "d2h")})
    assert latency == 0 and rates["h2d"] == pytest.approx(10**9, rel=0.1)
    with pytest.raises(BackendError, match="do not take longer"):
        _fit({d: [(1000, 900), (2000, 100)] for d in ("h2d", "d2h")})


def test_there_must_be_two_sizes():
    with pytest.raises(ValueError, match="expected at least 16,384"):
        measured(replace(MACHINE, memory_bytes=50_000))


def test_the_command(tmp_path, capsys):
    given, out = tmp_path / "given.yaml", tmp_path / "out.yaml"
    given.write_text("name: given\nmemory_bytes: 1000000\nh2d_bytes_per_s: 20000000\nd2h_bytes_per_s: 10000000\n")
    assert main([str(out), "--backend", "host", "--machine", str(given), "--max-bytes", "65536"]) == 0
    assert capsys.readouterr().out == out.read_text()
    assert Machine.load(out).name == "out" and (tmp_path / "out.json").exists()


def test_the_command_says_in_one_sentence_what_is_wrong(tmp_path, capsys):
    assert main([str(tmp_path / "out.yaml"), "--machine", "abacus"]) == 2
    assert "there is no preset 'abacus'" in capsys.readouterr().err
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "cupy", None)
        patch.delitem(__import__("sys").modules, "executor.replay.cupy_backend", raising=False)
        assert main([str(tmp_path / "out.yaml")]) == 2
    err = capsys.readouterr().err
    assert "needs CuPy" in err and err.count("\n") == 1
    assert not list(tmp_path.iterdir())
