"""Tests of the 15 minutes on a GPU: order, limits, bars, plan files, and sections on tiny networks."""

import signal
import subprocess
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest

import agents
from executor import CaptureError
from experiments.measure import runner
from experiments.measure.gpu import reserved
from experiments.measure.gpu.bars import BARS, verdicts
from experiments.measure.gpu.plan_files import AIMS, load_plans, plan_file, prepare, program_file, write_plans
from experiments.measure.gpu.sections import (
    COMMITTED,
    FRACTION,
    MACHINE,
    NETWORKS,
    SECTIONS,
    SHORT,
    Probe,
    committed_program,
)
from experiments.measure.gpu.stages import HOST
from experiments.measure.networks import build, limit_of
from experiments.measure.record import Record
from experiments.measure.settings import Settings
from experiments.validate_gpu import probe as probe_command
from experiments.validate_gpu.probe import gather, main, make_plans
from simulator import Machine, Plan, simulate
from simulator.files import read_json


def run(tmp_path, section):
    """Runs a section in this process and returns its rows."""
    probe = Probe(Settings("host"), Record(tmp_path, 600.0, name="probe"), section)
    SECTIONS[section].run(probe)
    gather(probe.record, "host")
    found = read_json(tmp_path / "probe.json")
    assert found["format"] == "probe/1" and found["device"] == "host"
    assert all(row["section"] == section for row in found["rows"])
    return {row["what"]: row for row in found["rows"]}


def test_order_and_limits():
    """The sections that decide most come first, and each command fits into the ten minutes of a device machine."""
    assert list(SECTIONS)[:4] == ["compile", "gpt2", "tight", "llama"] and list(SECTIONS)[-1] == "largest"
    seconds = {step: sum(s.seconds for s in SECTIONS.values() if s.step == step) for step in (1, 2)}
    assert seconds[1] + seconds[2] <= 14 * 60 and max(seconds.values()) <= 8 * 60
    assert sum(SECTIONS[name].seconds for name in SHORT) <= 5 * 60
    assert {bar.section for bar in BARS} == set(SECTIONS)


@pytest.mark.parametrize(
    ("row", "missed"),
    [
        ({"what": "x kernel by kernel", "measured": 101, "predicted": 100, "eager_ns": 100}, ""),
        (
            {"what": "x kernel by kernel", "measured": 103, "predicted": 100, "eager_ns": 100},
            "measured <= 1.02 x predicted: 1.03",
        ),
        ({"what": "x as a graph", "measured": 103, "predicted": 100}, "measured <= 1.02 x predicted: 1.03"),
    ],
)
def test_a_missed_bar_is_named(row, missed):
    assert verdicts({"section": "gpt2", **row})["missed"] == missed


def test_a_bar_is_not_about_a_failed_row_or_another_section():
    assert verdicts({"section": "gpt2", "what": "x as a graph", "failed": "no"}) == {}
    assert verdicts({"section": "llama", "what": "x as a graph", "measured": 103, "predicted": 100}) == {}


def test_plans_lose_no_time_down_to_their_share_of_the_link():
    """Of each committed network, every plan fits its limit, and its step is as long at 85 % of the link."""
    machine = Machine.load(MACHINE)
    for name, _, _ in NETWORKS.values():
        program, plans = load_plans(COMMITTED / "plans", name, FRACTION, AIMS)
        limit = limit_of(program, FRACTION)
        assert [plan.limit for plan in plans] == [int(aim * limit) for aims in AIMS.values() for aim in aims]
        for plan in plans:
            full, slow = (
                simulate(program, plan, machine.with_link(share), plan.limit).iteration_ns for share in (1.0, 0.85)
            )
            assert full <= slow <= 1.01 * full


def test_committed_plans_are_for_the_programs_of_the_traces():
    for section, (name, _, _) in NETWORKS.items():
        program, _ = load_plans(COMMITTED / "plans", name, FRACTION, ())
        assert program.fingerprint == committed_program(section).fingerprint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Plans of the tiny ResNet."""
    folder = tmp_path_factory.mktemp("plans")
    write_plans(folder, "tiny_resnet", FRACTION, build("tiny_resnet", "cpu").captured(HOST).program, HOST)
    return folder


def test_plans_from_files(folder):
    captured = build("tiny_resnet", "cpu").captured(HOST)
    prepared = prepare(captured, folder, "tiny_resnet", FRACTION, "graph", "cpu", HOST)
    assert prepared.planned_here == "" and len(prepared.plans) == len(AIMS["graph"])
    assert all(plan.fingerprint == prepared.captured.program.fingerprint for plan in prepared.plans)


def test_another_step_is_planned_here_and_the_row_says_so(folder):
    captured = build("tiny_resnet", "cpu", batch=4).captured(HOST)
    prepared = prepare(captured, folder, "tiny_resnet", FRACTION, "kernels", "cpu", HOST)
    assert prepared.planned_here == (
        "tiny_resnet: the step captured here differs from tiny_resnet-program.json.gz; write it again with "
        "`make gpu ARGS=plans`"
    )
    (plan,) = prepared.plans
    assert plan.fingerprint == prepared.captured.program.fingerprint


def test_a_plan_for_another_program_is_refused(folder, tmp_path):
    program, _ = load_plans(folder, "tiny_resnet", FRACTION, ())
    program.save(program_file(tmp_path, "tiny_resnet"))
    with pytest.raises(CaptureError, match=r"tiny_resnet-0.7-kernels-0.json: no such plan; write it with `make gpu"):
        load_plans(tmp_path, "tiny_resnet", FRACTION, ("kernels",))
    path = plan_file(tmp_path, "tiny_resnet", FRACTION, "kernels", 0)
    replace(Plan(), fingerprint="0" * 64).save(path)
    with pytest.raises(CaptureError, match=r"the plan is for program 000000000000, tiny_resnet-program.json.gz is"):
        load_plans(tmp_path, "tiny_resnet", FRACTION, ("kernels",))


def test_copies_are_measured_with_each_number_of_waiting_branches(tmp_path):
    rows = run(tmp_path, "branches")
    assert [what for what in rows if what.startswith("d2h")] == [f"d2h, {n} waiting: streams" for n in (0, 1, 4, 12)]
    assert all(row["measured"] > 0 and "bars" in row for row in rows.values())


@pytest.mark.nightly
@pytest.mark.parametrize("section", ["gpt2", "tight", "resnet", "compile", "rivals", "largest"])
def test_rehearsal(section, tmp_path):
    """Each section measures its rows on tiny networks, with plans from files; offloading gains nothing on a CPU."""
    make_plans(tmp_path / "plans", "host")
    rows = run(tmp_path, section)
    failed = {what: row["failed"] for what, row in rows.items() if "failed" in row}
    assert not [what for what in failed if not what.endswith(("offload", "compile", "fastest other"))], failed
    assert not any(row.get("planned_here") for row in rows.values())
    assert all(row["peak"] <= row["limit"] for row in rows.values() if "peak" in row)
    if section == "tight":
        (steps,) = (row for what, row in rows.items() if what.endswith(": steps"))
        assert steps["steps"] == 5 and steps["retries"] == 0 and len(rows) == 3


def test_a_section_that_fails_or_takes_too_long_does_not_end_the_others(tmp_path, monkeypatch, capsys):
    """The first dies, the second times out, the third succeeds; each has its own time and environment."""
    answers = iter([-11, None, 0])
    given = []
    environments = []
    killed = []

    def wait(seconds):
        given.append(seconds)
        answer = next(answers)
        if answer is None:
            raise subprocess.TimeoutExpired("probe", seconds)
        return answer

    def start(command, start_new_session, env):
        assert start_new_session and command[1:3] == ["-m", "experiments.validate_gpu.probe"]
        environments.append(env.get("CUDA_DEVICE_MAX_COPY_CONNECTIONS"))
        return nullcontext(SimpleNamespace(pid=7, wait=wait))

    monkeypatch.setattr(probe_command, "make_plans", lambda *_: None)
    monkeypatch.setattr(runner.subprocess, "Popen", start)
    monkeypatch.setattr(runner.os, "killpg", lambda pid, signal: killed.append(pid))
    assert main([f"out={tmp_path}", "backend=host", "branches", "tight", "one_connection"]) == 1
    rows = read_json(tmp_path / "probe.json")["rows"]
    failed = {row["section"]: row["failed"] for row in rows if "failed" in row}
    assert failed["branches"] == "its process ended with status -11" and failed["tight"].startswith("stopped after")
    assert set(failed) == {"branches", "tight"} and killed == [7]
    assert [row["section"] for row in rows if "seconds" in row] == ["branches", "tight", "one_connection"]
    seconds = [SECTIONS[name].limit_s("host") for name in ("branches", "tight", "one_connection")]
    assert given == seconds and environments == [None, None, "1"]
    out = capsys.readouterr().out
    assert "tight            60 s" in out and "branches   failed: its process ended" in out


def test_ctrl_c_reaches_a_process_in_a_session_of_its_own(monkeypatch):
    waits = iter([KeyboardInterrupt, None])

    def wait(seconds=None):
        if error := next(waits):
            raise error

    signals = []
    monkeypatch.setattr(runner.subprocess, "Popen", lambda *_, **__: nullcontext(SimpleNamespace(pid=7, wait=wait)))
    monkeypatch.setattr(runner.os, "killpg", lambda *arguments: signals.append(arguments))
    assert runner.run_process("module", [], 60.0) == runner.Status.STOPPED and signals == [(7, signal.SIGINT)]


@pytest.mark.parametrize("word", ["step=3", "backend=tpu", "where=here", "rival"])
def test_bad_words(word, capsys):
    assert main([word]) == 2
    error, usage, *rest = capsys.readouterr().err.splitlines()
    assert word.partition("=")[2] in error and usage.startswith("usage: python -m ") and not rest


def test_the_row_of_a_plan():
    """Slower copies gain no time, and holes of the allocator come on top of the packed bytes."""
    program = build("tiny_resnet", "cpu").captured(HOST).program
    limit = limit_of(program, FRACTION)
    plan = agents.make("capuchin", min_bytes=1).plan(program, HOST, limit)
    found = reserved.row(program, plan, HOST, limit)
    assert all(found[f"ms at {link:.0%}"] >= 0.99 * found["ms at 100%"] > 0 for link in reserved.LINKS)
    assert simulate(program, plan, HOST, limit).peak_bytes / limit - 1e-3 <= found["packed"]
    assert min(found["default"], found["expandable"]) >= found["packed"] - 1e-3


def test_the_page_states_the_committed_reserved_bytes():
    page = (COMMITTED / "README.md").read_text()
    for found in read_json(COMMITTED / "reserved.json")["rows"]:
        times = " | ".join(f"{found[f'ms at {link:.0%}']:.2f}" for link in reserved.LINKS)
        shares = " | ".join(f"{found[kind]:.2f}" for kind in ("packed", "default", "expandable"))
        assert f"| {found['workload']} | {found['plan']} | {times} | {shares} |" in page
