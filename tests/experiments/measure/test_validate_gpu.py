"""Tests of the whole validation on the host backend with tiny networks, and of its error messages."""

import json
import multiprocessing
import os
import signal
import sys
import tarfile
import threading
import time
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from executor import CaptureError
from executor.capture.profile import ProfileError
from experiments.measure import runner
from experiments.measure.gpu import pytorch_baselines, stages
from experiments.measure.gpu.offload import Offload
from experiments.measure.gpu.pytorch_baselines import Counter, Levels, Unreachable
from experiments.measure.gpu.results import summary
from experiments.measure.gpu.stages import Run, make_plans
from experiments.measure.gpu.training import Case, Training, eager_bits, without_batch_swaps
from experiments.measure.measured_step import MeasuredStep
from experiments.measure.networks import BLOCKS, NETWORKS, build, time_in_turns
from experiments.measure.published import steps
from experiments.measure.record import LATE, STOPPED, Broken, Record
from experiments.measure.runner import Status
from experiments.measure.settings import ON_HOST, STAGES, Settings, UsageError, parse
from experiments.validate_gpu import probe
from experiments.validate_gpu.__main__ import main
from simulator import Machine, Plan, Program
from simulator.deadline import TimeUp, within
from simulator.files import load_json, read_json
from tests.experiments.conftest import chain

LINK = Machine(
    "link", 2**33, 10**10, 10**10, host_bytes=2**34, flops_per_s={"float32": 10**12}, memory_bytes_per_s=10**11
)


def record(tmp_path, seconds=600.0, device="cpu"):
    return Record(tmp_path / "out", seconds, device)


def run_in_turn(out, *words, chosen=("calibrate", "profile", "plan", "replay", "train")):
    """Runs stages in this process."""
    for stage in chosen:
        assert main(["backend=host", f"out={out}", f"stages={stage}", *words]) == 0


@pytest.mark.nightly
def test_on_the_host_in_small(tmp_path, capsys):
    out = tmp_path / "out"
    words = ["workloads=tiny_resnet", "limits=0.8", "planners=none,capuchin,autoswap_swdoa", "train=capuchin"]
    words += ["workers=1", "steps=1", "seconds=3000", "methods=eager,ours,checkpoint"]
    run_in_turn(out, *words)
    results = read_json(out / "results.json")
    rows = results["rows"]
    assert [json.loads(line) for line in (out / "measurements.jsonl").read_text().splitlines()] == rows
    kinds = [(r["kind"], r.get("planner"), "failed" in r) for r in rows]
    assert kinds == [
        ("calibration", None, False),
        ("profile", None, False),
        ("plan", "capuchin", False),
        ("plan", "none", True),
        ("plan", "autoswap_swdoa", False),
        *[("plan", "ours", False)] * 3,
        ("replay", "capuchin", False),
        ("replay", "autoswap_swdoa", False),
        ("clocks", None, False),
        ("train", "capuchin", False),
        ("graph", "capuchin", False),
    ]
    first, second, clocks, trained, graph = rows[-5:]
    assert clocks["clocks"] == trained["clocks"] == {"absent": "no GPU is used"}
    for row in (first, second):
        assert row["measured_peak"] == row["predicted_peak"] <= row["limit"]
        assert row["device_bytes"] == row["footprint"]
    assert first["checks"] > 100 and "checks" not in second  # contents are checked once per workload and limit
    assert trained["eager_equal"] and trained["not_deterministic"] == [] and "equal_failed" not in trained
    assert results["flags"]["CUBLAS_WORKSPACE_CONFIG"] and not results["flags"]["deterministic_algorithms"]
    assert trained["equal"] and trained["measured_peak"] <= trained["limit"] and trained["predicted_ns"] is None
    assert graph["equal"] and graph["eager_equal"] and "captures" not in graph  # the CPU has no graphs
    assert graph["limit"] >= trained["limit"]
    assert {key: results["summary"][key]["count"] for key in ("graph", "replay")} == {"graph": 1, "replay": 2}
    assert "| replay | tiny_resnet | 80% | capuchin |" in (out / "table.md").read_text()
    profile = next(r for r in rows if r["kind"] == "profile")
    assert 0 < profile["eager_between"] < profile["eager_peak"]
    for name in ("predicted_vs_measured.png", "timeline.png"):
        assert (out / name).read_bytes().startswith(b"\x89PNG")
    # Nothing is measured twice: a second command continues and compares with the plans of the first.
    run_in_turn(out, *words)
    assert read_json(out / "results.json")["rows"] == rows
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr(pytorch_baselines, "best_plan", None)
        patch.setattr(pytorch_baselines, "measure", None)
        run_in_turn(out, *words, chosen=["compare"])
    compared = [r for r in read_json(out / "results.json")["rows"] if r["kind"] == "compare"]
    assert [r["method"] for r in compared] == ["eager", "ours", "checkpoint"]
    assert compared[0]["measured_peak"] == profile["eager_peak"]
    with tarfile.open(tmp_path / "out.tar.gz") as tar:
        names = {name.removeprefix("out/") for name in tar.getnames()}
    assert {
        "machine.yaml",
        "profiles/tiny_resnet.program.json.gz",
        "measured/tiny_resnet.json",
        "results.json",
        "plans/tiny_resnet-0.8-capuchin.json",
    } <= names


@pytest.mark.nightly
def test_measurements_are_readable_in_other_folders(tmp_path):
    """Profiles, plans and the machine of one folder work in other folders."""
    first = tmp_path / "first"
    second = tmp_path / "second"
    words = ["workloads=tiny_gpt2", "limits=0.8", "planners=capuchin", "train=", "workers=1"]
    run_in_turn(first, *words, chosen=["calibrate", "profile"])
    shared = [f"machine={first / 'machine.yaml'}", f"profiles={first / 'profiles'}"]
    run_in_turn(second, *words, *shared, chosen=["plan"])
    assert [p.name for p in (second / "plans").iterdir()] == ["tiny_gpt2-0.8-capuchin.json"]
    run_in_turn(tmp_path / "third", *words, *shared, f"plans={second / 'plans'}", chosen=["replay"])
    (row,) = [r for r in read_json(tmp_path / "third" / "results.json")["rows"] if r["kind"] == "replay"]
    assert row["planner"] == "capuchin" and row["measured_ns"] > 0
    assert not (tmp_path / "third" / "machine.yaml").exists()
    step = load_json(first / "measured" / "tiny_gpt2.json", MeasuredStep.from_dict)
    assert len(steps.of_profile(replace(step, machine="h100"))) == len(step.kernels)


def test_stages_are_processes_of_their_own(tmp_path, monkeypatch):
    """Each stage gets its share of the time; one that dies or loses CUDA is restarted, then the next ones run."""
    calls = []
    statuses = iter([0, -11, Status.BROKEN, 0, 0])

    @contextmanager
    def process(words, start_new_session, env):
        calls.append(dict(word.split("=", 1) for word in words[3:]))
        assert words[:3] == [sys.executable, "-m", "experiments.validate_gpu"] and not start_new_session
        yield SimpleNamespace(wait=lambda seconds: next(statuses))

    monkeypatch.setattr(runner.subprocess, "Popen", process)
    words = ["backend=host", "workloads=tiny_resnet", f"out={tmp_path / 'out'}"]
    words += ["stages=train,calibrate,replay", "seconds=100"]
    assert main(words) == 0
    assert [c["stages"] for c in calls] == ["calibrate", "replay", "replay", "replay", "train"]
    assert [int(c["seconds"]) for c in calls] == pytest.approx([30, 33, 33, 33, 100], abs=20)
    assert all(c["workloads"] == "tiny_resnet" and c["out"] == str(tmp_path / "out") for c in calls)
    statuses = iter([Status.FAILED])
    assert main(words) == Status.FAILED and len(calls) == 6


def test_crashing_items_are_retried_once_then_skipped(tmp_path):
    for deaths in (1, 2):
        rows = record(tmp_path)
        assert not rows.rows
        rows.start(kind="replay", workload="a", planner="b")  # the process dies here
        assert read_json(tmp_path / "out" / "under_way.json")["deaths"] == deaths
    (row,) = record(tmp_path).rows
    assert row["failed"] == "the process died in this measurement 2 times"
    assert record(tmp_path).has(kind="replay", workload="a")


def test_a_cuda_failure_ends_the_measurements(tmp_path, monkeypatch):
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    rows = record(tmp_path, device="cuda")
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    rows.add(kind="clocks", workload="home", failed="no plan")  # CUDA is not initialized, so it is not checked
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    rows.add(kind="clocks", workload="a", failed="it does not fit")
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    rows.add(kind="clocks", workload="b")
    with pytest.raises(Broken, match="CUDA error: an illegal"):
        rows.add(kind="clocks", workload="c", failed="CUDA error")
    assert [r["workload"] for r in record(tmp_path).rows] == ["home", "a", "b", "c"]


def test_a_line_that_was_cut_off_and_what_had_no_time_are_measured_again(tmp_path):
    rows = record(tmp_path)
    rows.add(kind="replay", workload="a", measured_ns=5)
    rows.add(kind="replay", workload="b", failed=LATE)
    rows.add(kind="replay", workload="c", failed=STOPPED)
    rows.add(kind="replay", workload="d", failed="it does not fit")
    with (tmp_path / "out" / "measurements.jsonl").open("a") as file:
        file.write('{"kind": "replay", "workl')
    second = record(tmp_path)
    assert [r["workload"] for r in second.rows] == ["a", "b", "c", "d"]  # rows to be retried are kept until then
    assert [second.has(kind="replay", workload=w) for w in "abcd"] == [True, False, False, True]
    second.add(kind="replay", workload="b", measured_ns=6)
    assert [r["workload"] for r in record(tmp_path).rows] == ["a", "c", "d", "b"]
    assert second.has(kind="replay", workload="b")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [main, probe.main])
def test_without_a_gpu(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command([]) == 2
    assert "backend=host" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_words():
    assert parse([]) == Settings() and parse(["backend=host"]) == ON_HOST
    got = parse(["limits=0.5,1", "workloads=vgg16", "stages=replay,profile", "seconds=9", "train="])
    assert got == Settings(limits=(0.5, 1.0), workloads=("vgg16",), stages=("profile", "replay"), seconds=9.0, train=())
    with pytest.warns(DeprecationWarning, match="license="):
        assert parse(["licence=MIT"]) == Settings(license="MIT")


@pytest.mark.parametrize(
    ("word", "named"),
    [
        ("limit=0.5", "'limits'"),
        ("backend=tpu", "backend: .*'tpu'"),
        ("limits=a", "limits: .*'a'"),
        ("limits=1.5", "limits"),
        ("cache=warm", "cache: .*'warm'"),
        ("steps=0", "steps"),
        ("stages=plans", "'plans'"),
        ("stages=", "stages"),
        ("methods=fsdp", "'fsdp'"),
        ("workloads=alexnet", "'alexnet'"),
        ("planners=nosuch", "'nosuch'"),
        ("graph=nosuch", "'nosuch'"),
        ("workers=-1", "workers"),
    ],
)
def test_bad_words(word, named, capsys):
    with pytest.raises(UsageError, match=named):
        parse([word])
    assert main(["backend=host", word] if "backend" not in word else [word]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_errors_are_summed_up():
    """Time errors of +2 and -4 %; peak errors of 0 and 10 %, the second over its limit.

    Arenas consist of 2 MiB pages: a limit of 3 MiB allows two pages, not three.
    """
    peaks = {"measured_peak": 100, "predicted_peak": 100, "limit": 100}
    totals = summary([{"error": 0.02, **peaks}, {"error": -0.04, **peaks, "measured_peak": 110}])
    assert totals.pop("time") == pytest.approx({"mean_absolute": 0.03, "worst": 0.04})
    assert totals.pop("peak") == pytest.approx({"mean_absolute": 0.05, "worst": 0.1})
    assert totals == {"count": 2, "over_limit": 1, "arenas_over_limit": 0}
    arenas = [{**peaks, "limit": 3 * 2**20, "device_bytes": pages * 2**21} for pages in (2, 3)]
    assert summary(arenas)["arenas_over_limit"] == 1
    assert summary([]) == {"count": 0, "over_limit": 0, "arenas_over_limit": 0}


def chain_to_plan(tmp_path, seconds=600.0):
    """Returns a run with a profiled chain, and the chain as a case with a limit."""
    run = Run(Settings(), record(tmp_path, seconds))
    chain().save(run.program("chain"))
    return run, Case("chain", chain(), 0.7, chain().peak_bytes * 7 // 10)


def test_a_planner_that_breaks_or_is_missing_is_named(tmp_path, monkeypatch):
    errors = {"broken": ZeroDivisionError("by nothing"), "missing": ImportError("no sklearn"), "autoswap_doa": None}
    real = stages.agents.make

    def make(name, **options):
        if errors[name]:
            raise errors[name]
        return real(name, **options)

    monkeypatch.setattr(stages.agents, "options", lambda name: ["min_bytes"])
    monkeypatch.setattr(stages.agents, "make", make)
    run, case = chain_to_plan(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        make_plans(run, [(planner, case, 0) for planner in errors], LINK, pool)
    (file,) = (tmp_path / "out" / "plans").iterdir()
    assert Plan.load(file).planner == "autoswap_doa"
    broken, missing, planned = (row.get("failed") for row in run.record.rows)
    assert "ZeroDivisionError" in broken and "no sklearn" in missing and planned is None
    reopened = record(tmp_path)  # retried, because the library may be installed now
    assert [reopened.has(kind="plan", planner=planner) for planner in errors] == [True, False, True]


@pytest.mark.parametrize(("seconds", "word"), [(1.0, LATE), (600.0, "BrokenProcessPool")])
def test_planners_in_processes_are_stopped(seconds, word, tmp_path):
    """If the time ends or a worker dies, no process and no thread is left."""
    run, case = chain_to_plan(tmp_path, seconds)
    threads = threading.active_count()
    with stages.planning(1) as pool:
        first = pool.submit(*((time.sleep, 60) if word == LATE else (os.abort,)))  # blocks or kills the only worker
        make_plans(run, [("autoswap_doa", case, 0)], LINK, pool)
    (row,) = run.record.rows
    assert word in row["failed"] and isinstance(first.exception(), BrokenExecutor)
    assert not (tmp_path / "out" / "plans").exists() and not record(tmp_path).has(kind="plan")
    assert not multiprocessing.active_children() and threading.active_count() == threads


@pytest.mark.nightly
def test_items_without_time_are_listed(tmp_path, monkeypatch):
    """Every workload, plan, replay and training has exactly one row, measured or with a reason."""
    out = tmp_path / "out"
    words = ["workloads=tiny_resnet,tiny_gpt2", "limits=0.8", "planners=capuchin", "train=capuchin", "workers=1"]
    run_in_turn(out, *words, "workloads=tiny_resnet", chosen=["calibrate", "profile", "plan"])
    earlier = read_json(out / "results.json")["rows"]
    monkeypatch.setattr(Record, "seconds_left", lambda self: 0.0)
    run_in_turn(out, *words, chosen=[stage for stage in STAGES if stage != "calibrate"])
    rows = read_json(out / "results.json")["rows"]
    assert rows[: len(earlier)] == earlier and {r["failed"] for r in rows[len(earlier) :]} == {LATE}
    late = [(r["kind"], r["workload"]) for r in rows[len(earlier) :]]
    assert late[:4] == [
        ("profile", "tiny_gpt2"),
        ("replay", "tiny_resnet"),
        ("train", "tiny_resnet"),
        ("graph", "tiny_resnet"),
    ]


def test_a_finalizer_does_not_swallow_the_end():
    class Slow:
        def __del__(self):
            signal.raise_signal(signal.SIGALRM)  # the time is over

    with pytest.raises(TimeUp), within(60):
        slow = Slow()
        del slow
        time.sleep(60)
        pytest.fail("the deadline did not interrupt it")
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)  # the alarm is off


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (KeyboardInterrupt(), 130, "stopped; completed measurements are kept"),
        (TimeUp(), 0, ""),
        (Broken("CUDA works no more"), Status.BROKEN, "CUDA works no more"),
        (CaptureError("another step"), Status.FAILED, "another step"),
    ],
)
def test_what_was_measured_is_kept_when_a_stage_ends_early(error, status, words, tmp_path, monkeypatch, capsys):
    def stop(run):
        run.record.add(kind="clocks", workload="a")
        raise error

    monkeypatch.setattr(stages, "replay", stop)
    out = tmp_path / "out"
    assert main(["backend=host", f"out={out}", "stages=replay", "machine=h100"]) == status
    assert capsys.readouterr().err.strip() == words
    (row,) = read_json(out / "results.json")["rows"]
    assert row["kind"] == "clocks" and json.loads((out / "measurements.jsonl").read_text()) == row


@pytest.mark.nightly
def test_methods_side_by_side(tmp_path, monkeypatch):
    monkeypatch.setattr(pytorch_baselines, "OURS", {"capuchin": {}})
    rows = record(tmp_path)
    methods = ("eager", "ours", "checkpoint", "save_on_cpu")
    settings = replace(ON_HOST, workloads=("tiny_resnet",), limits=(0.8,), methods=methods)
    stages.compare(Run(replace(settings, machine="h200"), rows))
    eager, ours, checkpoint, offload = rows.rows
    assert ours["measured_peak"] <= ours["limit"] < eager["measured_peak"]
    assert checkpoint["measured_peak"] <= checkpoint["limit"] and checkpoint["setting"] == "1 of 3 blocks"
    assert "at its strongest it needs" in offload["failed"]  # on the CPU, offloading saves no memory


def test_the_other_planners_run_without_the_solver(monkeypatch):
    monkeypatch.setitem(sys.modules, "highspy", None)
    plan = pytorch_baselines.best_plan(chain(), LINK, chain().peak_bytes * 7 // 10)
    assert plan.planner in pytorch_baselines.OURS and plan.planner != "lp_round"
    monkeypatch.setattr(pytorch_baselines, "OURS", {"lp_round": {}})
    with pytest.raises(Unreachable, match="highspy"):
        pytorch_baselines.best_plan(chain(), LINK, chain().peak_bytes * 7 // 10)


@pytest.mark.parametrize(
    ("name", "method", "level"),
    [("tiny_gpt2", method, 2) for method in ("checkpoint", "selective", "offload", "save_on_cpu")]
    + [("tiny_resnet", "offload", 1), ("tiny_llama_bf16", "offload", 2)],
)
def test_a_method_changes_no_result(name, method, level, monkeypatch):
    monkeypatch.setattr(pytorch_baselines, "Offload", partial(Offload, min_bytes=1))

    def losses(level):
        network = build(name, "cpu")
        Levels(name, "cpu", method).prepare(network, level)
        torch.manual_seed(1)
        return [float(network.step()) for _ in range(2)]

    assert losses(0) == losses(level)


def test_the_mildest_setting_within_the_limit(monkeypatch):
    # Peaks 100, 90, 80, 70 with 0 to 3 blocks.
    levels = Levels("tiny_resnet", "cpu", "checkpoint")
    monkeypatch.setattr(
        pytorch_baselines, "trial", lambda n, d, p, setting: pytorch_baselines.Trial(1, 100 - 10 * int(setting[0]))
    )
    assert [levels.within(limit).peak for limit in (100, 99, 85, 70)] == [100, 90, 80, 70]
    with pytest.raises(Unreachable, match="70 bytes"):
        levels.within(69)


def test_two_steps_take_turns():
    # Five steps in turns of 1, 1, 1, 2, each after one unmeasured step.
    log = []
    first, others, peak = time_in_turns(lambda: log.append("a"), lambda: log.append("b"), 5, "cpu", on_turn=log.append)
    assert log == [True, *"aa", False, *"bb"] * 3 + [True, *"aaa", False, *"bbb"]
    assert len(first) == len(others) == 5 and not peak and min(first + others) >= 0
    log.clear()
    assert len(time_in_turns(lambda: 0, lambda: 0, 1, "cpu", on_turn=log.append)[0]) == 1 and log == [True, False]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["tiny_resnet_bf16", "tiny_llama_bf16"])
def test_bfloat16_networks_train_bit_identically_under_a_plan(name):
    """Losses equal eager's for autocast, channels-last images and a bfloat16 decoder."""
    eager = eager_bits(name, "cpu")
    program = build(name, "cpu").captured(LINK).program
    persistent = sum(t.nbytes for t in program.tensors if t.persistent)
    limit = persistent + (program.peak_bytes - persistent) * 7 // 10
    plan = stages.agents.make("capuchin", min_bytes=1).plan(program, LINK, limit)
    case = Case(name, program, 0.7, limit)
    assert Training("cpu", case, plan, LINK).losses(1.0)["losses"] == eager["losses"] and eager["equal"]
    with pytest.raises(CaptureError, match=f"^{name}: the captured step differs from the profiled one"):
        Training("cpu", replace(case, program=chain()), plan, LINK).losses(1.0)
    if name == "tiny_resnet_bf16":
        assert Training("cpu", case, plan, LINK).beside_eager(1.0, 2)["ledger"] <= limit
    case, plan = without_batch_swaps(case, plan)
    assert plan.decisions
    assert Training("cpu", case, plan, LINK, graph=True).losses(1.0)["losses"] == eager["losses"]


def test_a_step_that_does_not_fit_is_profiled_kernel_by_kernel(tmp_path, monkeypatch):
    tried = []

    def measure(captured, device, machine, seconds, cache):
        tried.append(cache)
        if cache == "step":
            raise ProfileError("out of memory")
        return real(captured, device, machine, 1, cache="hot")

    real = stages.measure
    monkeypatch.setattr(stages, "measure", measure)
    run = Run(replace(ON_HOST, cache="step", machine="h100"), record(tmp_path))
    assert stages.profiled(run, "tiny_resnet")["cache"] == "hot" and tried == ["step", "cold"]
    assert Program.load(run.program("tiny_resnet")).name == "tiny_resnet"


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_can_be_made(name):
    batch, make = NETWORKS[name]
    with torch.device("meta"):
        model, (x, y), _ = make(batch)
    assert len(x) == batch and len(y) in (batch, x.numel())
    assert name == "vgg16" or any(isinstance(m, BLOCKS) for m in model.modules())
    assert "imagenet" not in name or x.is_contiguous(memory_format=torch.channels_last)
    assert not name.startswith("llama") or {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_bytes_are_counted():
    # 400 and 800 bytes at once, then 800 alone.
    with Counter() as counter:
        a = torch.zeros(100)
        b = torch.cat([a, a])
        del a
    assert counter.peak == 1200 and counter.count() == b.nbytes == 800


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu(tmp_path):
    """Checks contents, bytes and losses, which do not depend on a clock."""
    words = ["workloads=vgg16", "limits=0.7", "planners=autoswap_swdoa,capuchin", "train=capuchin", "seconds=100"]
    assert main([f"out={tmp_path}", *words, "graph=", "methods=eager"]) == 0
    results = read_json(tmp_path / "results.json")
    replays = [r for r in results["rows"] if r["kind"] == "replay" and "failed" not in r]
    assert len(replays) == 2 and replays[0]["checks"] > 0 and results["summary"]["replay"]["over_limit"] == 0
    (trained,) = (r for r in results["rows"] if r["kind"] == "train" and "failed" not in r)
    assert trained["equal"] or not trained["eager_equal"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_side_by_side_on_a_gpu(tmp_path):
    rows = record(tmp_path, 60)
    methods = ("ours", "checkpoint", "offload")
    settings = Settings(workloads=("resnet50",), limits=(0.7,), methods=methods)
    stages.compare(Run(replace(settings, machine="h200"), rows))
    by_method = {r["method"]: r for r in rows.rows if "failed" not in r}
    assert {"eager", *methods} == set(by_method)
    assert all(r["measured_peak"] <= r["limit"] for r in by_method.values())
