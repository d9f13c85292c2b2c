"""Tests that calibration recovers the host backend's figures and writes a file for Machine.load."""

from dataclasses import replace

import pytest

from executor import calibrate as calibrate_module
from executor.calibrate import calibrate, main, with_process_figures
from executor.replay.host_backend import HostBackend
from simulator import Machine
from simulator.files import read_json

# The largest copy of these tests, 4 MiB, takes 9.4 ms in and 17.8 ms out, of which 1 and 2 ms are latency.
MACHINE = Machine(
    "given",
    2**28,
    500_000_000,
    250_000_000,
    d2h_latency_ns=2_000_000,
    h2d_latency_ns=1_000_000,
    alignment=256,
    flops_per_s={"float32": 10**13},
    efficiency={"default": 0.75},
    launch_ns=1400,
    graph_launch_ns=600,
    event_ns=30,
    wait_ns=110,
    queue_depth=700,
    issue_ns=5000,
)


def measured(machine, max_bytes=2**22):
    base = replace(machine, launch_ns=0, graph_launch_ns=0, event_ns=0, wait_ns=0, queue_depth=1024)
    return calibrate(HostBackend(machine), base, max_bytes, "found")


def test_the_figures_are_recovered(tmp_path):
    calibration = measured(MACHINE)
    assert [n for n, _ in calibration.transfers["h2d"]] == [2**12, 2**14, 2**16, 2**18, 2**20, 2**22]
    machine = calibration.machine
    for d in ("h2d", "d2h"):
        for figure in (f"{d}_bytes_per_s", f"{d}_latency_ns"):
            assert getattr(machine, figure) == pytest.approx(getattr(MACHINE, figure), rel=1e-4)
    assert (machine.copy_engines, machine.memory_bytes) == (2, 2**28)
    for figure in ("launch_ns", "graph_launch_ns", "event_ns", "wait_ns", "queue_depth"):
        assert getattr(machine, figure) == getattr(MACHINE, figure), figure
    assert calibration.duplex == pytest.approx({"h2d": 1.0, "d2h": 1.0}, rel=1e-3) and calibration.fit_error < 1e-3
    assert calibration.depth

    path = tmp_path / "machine.yaml"
    calibration.save(path)
    assert Machine.load(path) == machine
    # Figures that are not measured are copied from the base machine.
    assert (machine.name, machine.alignment, machine.efficiency) == ("found", 256, {"default": 0.75})
    text = path.read_text()
    sources = {line.split(":")[0]: line.partition("# ")[2] for line in text.splitlines() if not line.startswith("#")}
    for figure in (
        "h2d_latency_ns",
        "d2h_latency_ns",
        "h2d_bytes_per_s",
        "launch_ns",
        "graph_launch_ns",
        "event_ns",
        "wait_ns",
        "queue_depth",
    ):
        assert sources[figure].startswith("measured: "), figure
    assert (
        sources["issue_ns"]
        == sources["context_bytes"]
        == sources["alignment"]
        == sources["copy_contention"]
        == "not measured"
    )
    assert "largest error" in text and "to 4.00 MiB" in text
    data = read_json(tmp_path / "machine.json")
    assert data["format"] == "calibration/3" and data["duplex"] == calibration.duplex
    assert [tuple(x) for x in data["transfers"]["d2h"]] == calibration.transfers["d2h"]


def test_events_are_pending_when_waits_for_them_are_issued(monkeypatch):
    """A wait takes time only for pending events, as on a GPU."""

    class Gpu(HostBackend):
        def wait(self, stream, event):
            self.machine = replace(MACHINE, wait_ns=110 if event.ns > self.host_ns() else 0)
            super().wait(stream, event)

    assert calibrate(Gpu(MACHINE), MACHINE, 2**14).machine.wait_ns == 110


def test_a_launch_queue_that_is_never_full_is_not_measured():
    calibration = measured(replace(MACHINE, queue_depth=10**6), 2**14)
    assert not calibration.depth and calibration.machine.queue_depth == 1024
    assert "queue_depth: 1024  # not measured" in calibration.to_yaml()


def test_the_host_time_of_a_planned_step_is_added():
    calibration = with_process_figures(measured(MACHINE, 2**14), "cpu")
    assert calibration.issue and not calibration.context and calibration.machine.issue_ns > 0
    assert (
        f"issue_ns: {calibration.machine.issue_ns}  # measured: the host's time per kernel of a planned step"
        in calibration.to_yaml()
    )


def test_one_copy_engine_is_noticed():
    calibration = measured(replace(MACHINE, copy_engines=1), 2**20)
    assert calibration.machine.copy_engines == 1 and max(calibration.duplex.values()) > 1.3


@pytest.mark.parametrize(("h2d", "d2h"), [(1.0, 1.0), (0.99, 0.99), (0.8, 0.8), (0.5, 1.0), (1.0, 0.7), (0.4, 0.9)])
def test_what_each_direction_carries_beside_the_other(h2d, d2h, monkeypatch):
    """Copies take 1 ns per byte in and 2 ns out, slowed to these shares; shares within DUPLEX_ERROR of 1 count as 1."""
    alone = {"h2d": 1, "d2h": 2}
    share = {"h2d": h2d, "d2h": d2h}

    def copies(backend, directions, nbytes):
        if len(directions) == 1:
            return {d: nbytes * alone[d] for d in directions}
        first = min(alone[d] / share[d] for d in directions)
        return {d: round(nbytes * (first + alone[d] - first * share[d])) for d in directions}

    monkeypatch.setattr(calibrate_module, "_copies", copies)
    base = replace(MACHINE, duplex_h2d_bytes_per_s=7, duplex_d2h_bytes_per_s=7)
    calibration = calibrate(HostBackend(MACHINE), base, 2**20)
    machine = calibration.machine
    text = calibration.to_yaml()
    assert machine.copy_engines == 2
    for d, rate in (("h2d", 1_000_000_000), ("d2h", 500_000_000)):
        measured = machine.to_dict()[f"duplex_{d}_bytes_per_s"]
        assert measured == pytest.approx(share[d] * rate if share[d] < 0.98 else 0, rel=1e-3)
        assert f"duplex_{d}_bytes_per_s: {measured}  # measured: {share[d]:.1%} of alone" in text


def test_no_larger_copy_is_begun_when_the_time_is_over():
    calibration = calibrate(HostBackend(MACHINE), MACHINE, 2**22, seconds=0.0)
    assert [n for n, _ in calibration.transfers["d2h"]] == [2**12, 2**14]  # the two smallest sizes are always measured


def test_the_command(tmp_path, capsys):
    given = tmp_path / "given.yaml"
    out = tmp_path / "out.yaml"
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
