"""Tests of the probe on tiny networks: each section alone, and a command whose sections fail."""

import signal
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import pytest

from executor.replay.host_backend import HostBackend
from experiments.measure import runner
from experiments.measure.gpu.sections import (
    COMMITTED,
    COSTS,
    SECTIONS,
    Probe,
    replay_tasks,
    round_trip_ns,
    time_planned,
)
from experiments.measure.gpu.stages import HOST
from experiments.measure.record import Record
from experiments.measure.settings import Settings
from experiments.validate_gpu.probe import gather, main
from simulator import Machine
from simulator.files import read_json
from simulator.schedule import lower


def probe_of(section, tmp_path, backend="host"):
    return Probe(Settings(backend), Record(tmp_path, 600.0, name="probe"), section)


def run(tmp_path, section):
    """Runs a section in this process and returns its rows."""
    probe = probe_of(section, tmp_path)
    SECTIONS[section].run(probe)
    gather(probe.record, "host")
    found = read_json(tmp_path / "probe.json")
    assert found["format"] == "probe/1" and found["device"] == "host"
    assert all(row["section"] == section for row in found["rows"])
    return {row["what"]: row for row in found["rows"]}


def test_a_round_trip_by_hand():
    """The pause between two kernels of a graph includes the event, the copy, the wait and the second launch."""
    machine = replace(HOST, graph_launch_ns=600, event_ns=30, wait_ns=110)
    with HostBackend(machine) as backend:
        assert round_trip_ns(backend, machine, "d2h") == round_trip_ns(backend, machine, "h2d") == 740


def test_costs_are_printed_beside_their_predictions_and_kept(tmp_path, capsys):
    rows = run(tmp_path, "costs")
    assert list(rows)[: len(COSTS)] == list(COSTS)
    assert {what: row["predicted"] for what, row in rows.items() if what in COSTS} == COSTS
    machine = Machine.load(tmp_path / "machine.yaml")
    for what in ("launch_ns", "graph_launch_ns", "queue_depth"):
        assert rows[what]["measured"] == getattr(machine, what) == getattr(HOST, what)
    assert "launch_ns: predicted 1,400, measured 1,400\n" in capsys.readouterr().out
    assert run(tmp_path, "costs") == rows  # a later command measures only what is missing


def test_the_committed_plans_are_for_the_committed_programs(tmp_path):
    machine = Machine.load(COMMITTED / "machine.yaml")
    found = list(islice(replay_tasks(probe_of("replays", tmp_path, "cuda"), machine), 4))
    assert [name for name, *_ in found] == [
        "plan-gpt2_medium_bf16-0.7",
        "plan-llama_bf16-0.7",
        "plan-resnet50_imagenet_bf16-0.5",
        "plan-resnet50_imagenet_bf16-0.7",
    ]
    for _, program, limit, make_plan in found:
        plan = make_plan()
        assert plan.decisions and lower(program, plan).required_bytes <= limit < program.peak_bytes


@pytest.mark.nightly
def test_replays_in_small(tmp_path):
    rows = run(tmp_path, "replays")
    replayed = [row for row in rows.values() if "failed" not in row]
    assert len(replayed) >= 4 and replayed[0]["checks"] > 0
    assert all(row["error"] == 0 and row["measured"] == row["predicted"] for row in replayed)


@pytest.mark.nightly
def test_a_planned_step_is_measured_beside_eager(tmp_path, capsys):
    probe = probe_of("resnet", tmp_path)
    time_planned(probe, "tiny_resnet", 0.7, False, {})
    (row,) = probe.record.rows
    assert row["what"] == "tiny_resnet 0.7 kernel by kernel" and row["peak"] <= row["limit"]
    assert row["to_eager"] == row["measured"] / row["eager_ns"]
    assert min(row["predicted"], row["measured"], row["host_ns"]) > 0


def test_where_no_plan_fits_a_row_says_so(tmp_path):
    probe = probe_of("resnet", tmp_path)
    time_planned(probe, "tiny_resnet", 0.0, False, {})
    (row,) = probe.record.rows
    assert row["failed"].startswith("Infeasible: ") and "measured" not in row


def test_a_section_that_fails_or_takes_too_long_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    """The first dies, the second times out, the third succeeds; unused time goes to the next section."""
    answers = iter([-11, None, 0])
    given = []
    killed = []

    def wait(seconds):
        given.append(seconds)
        answer = next(answers)
        if answer is None:
            raise subprocess.TimeoutExpired("probe", seconds)
        return answer

    def start(command, start_new_session):
        assert start_new_session and command[1:3] == ["-m", "experiments.validate_gpu.probe"]
        return nullcontext(SimpleNamespace(pid=7, wait=wait))

    monkeypatch.setattr(runner.subprocess, "Popen", start)
    monkeypatch.setattr(runner.os, "killpg", lambda pid, signal: killed.append(pid))
    assert main([f"out={tmp_path}", "backend=host", "costs", "pools", "replays"]) == 1
    rows = read_json(tmp_path / "probe.json")["rows"]
    failed = {row["section"]: row["failed"] for row in rows if "failed" in row}
    assert failed["costs"] == "its process ended with status -11" and failed["pools"].startswith("stopped after")
    assert set(failed) == {"costs", "pools"} and killed == [7]
    assert [row["section"] for row in rows if "seconds" in row] == ["costs", "pools", "replays"]
    seconds = [SECTIONS[name].limit_s("host") for name in ("costs", "pools", "replays")]
    assert given == pytest.approx([seconds[0], sum(seconds[:2]), sum(seconds)], abs=30)
    out = capsys.readouterr().out
    assert "pools       15 s" in out and "costs      failed: its process ended" in out


def test_ctrl_c_reaches_a_process_in_a_session_of_its_own(monkeypatch):
    waits = iter([KeyboardInterrupt, None])

    def wait(seconds=None):
        if error := next(waits):
            raise error

    signals = []
    monkeypatch.setattr(runner.subprocess, "Popen", lambda *_, **__: nullcontext(SimpleNamespace(pid=7, wait=wait)))
    monkeypatch.setattr(runner.os, "killpg", lambda *arguments: signals.append(arguments))
    assert runner.run_process("module", [], 60.0) == runner.Status.STOPPED and signals == [(7, signal.SIGINT)]


def test_each_of_the_two_commands_takes_less_than_seven_minutes():
    for step in (1, 2):
        assert 0 < sum(section.seconds for section in SECTIONS.values() if section.step == step) <= 405


@pytest.mark.parametrize("word", ["step=3", "backend=tpu", "where=here", "rival"])
def test_bad_words(word, capsys):
    assert main([word]) == 2
    error, usage, *rest = capsys.readouterr().err.splitlines()
    assert word.partition("=")[2] in error and usage.startswith("usage: python -m ") and not rest
