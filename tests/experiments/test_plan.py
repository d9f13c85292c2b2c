"""Tests ``experiments.plan``: largest batch, recommended plan, and the self-contained page."""

import json
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from html import unescape
from pathlib import Path

import pytest
import torch
from torch import nn

from agents.host import host_needed
from agents.search.retimed import TimesError
from experiments import workloads
from experiments.common import report
from experiments.plan import __main__ as command, capture, planning, words
from experiments.plan.answer import Answer, Best, Largest
from experiments.plan.capture import BatchError, Batches
from experiments.plan.page import render_html as page
from experiments.workloads.module import WorkloadError, batch_size_of, with_batch
from simulator import Kernel, Machine, Plan, Program, Swap, Tensor, simulate
from simulator.deadline import TimeUp, within
from simulator.pool.device_memory import DevicePeak, under_plan
from tests.experiments.conftest import MB, Run, chain

pytestmark = pytest.mark.usefixtures("counted")
MACHINE = Machine.load("h100")
MLP = {"name": "mlp", "family": "mlp", "batch_size": 2048, "width": 256, "layers": 2}
ATTENTION = """
import torch
from torch import nn, optim

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(100, 32)
        self.positions = nn.Embedding(512, 32)
        self.head = nn.Linear(32, 100)

    def forward(self, ids):
        x = self.words(ids) + self.positions(torch.arange(ids.shape[1]))
        scores = (x @ x.transpose(1, 2)).softmax(-1)
        return self.head(scores @ x).transpose(1, 2)

def factory():
    model = Model()
    ids = torch.zeros(2, 128, dtype=torch.long)
    return model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), 0.1), (ids, ids)
"""
FACTORY = """
from torch import nn, optim, zeros

def factory():
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(256, 256), nn.Tanh())), nn.Linear(256, 10))
    return model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), 0.1), (zeros(512, 256), zeros(512).long())

def shapeless():
    model = nn.Linear(4, 4)
    return model, nn.MSELoss(), optim.SGD(model.parameters(), 0.1), (zeros(8, 4), zeros(4))
"""


def read(text: str) -> str:
    """Returns the text of a page after checking that it loads nothing."""
    assert not re.search(r"url\(|@import|http|<(script|link|iframe|object|b)\b|\s(src|href|srcset|action)=", text)
    body = text.partition("<body>")[2]
    assert not re.search(r"<[^a-z/!]", body)  # "<0.01 GiB" is not a tag
    return unescape(re.sub(r"<[^>]+>", "\n", body))


def answered(program: Program, limit: int, mode: str = "joint", machine: Machine = MACHINE) -> Answer:
    task = (program, machine, limit)
    command.warm_up(MACHINE, mode, 1.0)
    families, bound = planning.make_plans(task, mode, 1.0, 0)
    return command.make_answer(task, None, mode, families, bound, Largest(), 0.0)


def pages(a: Answer) -> str:
    return read(page(a, "typed"))


def slow(program: Program) -> Program:
    """Lengthens kernels, so that they can hide copies."""
    return replace(program, kernels=tuple(replace(k, duration_ns=10 * k.duration_ns) for k in program.kernels))


# ---------------------------------------------------------------------------------------- batches


def sized(batch: int) -> Program:
    return replace(
        chain(4, MB * batch), kernels=tuple(replace(k, duration_ns=1000 + 100 * batch) for k in chain(4).kernels)
    )


@pytest.fixture(autouse=True)
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "attention_model.py").write_text(ATTENTION)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture(scope="module")
def mlp() -> Batches:
    """Returns the captured step at any batch size."""
    return capture.batches(MLP, MACHINE, None, capture.step(MLP, MACHINE, None).program, 0)


def test_a_step_at_any_batch_is_as_captured(mlp: Batches) -> None:
    assert (mlp.batch, mlp.larger_batch) == (2048, 4096)
    other = workloads.load({**MLP, "iteration_ms": {"h100": 8}}, MACHINE, 9633, as_cuda=True).program
    assert mlp.interpolated(9633).tensors == other.tensors
    assert mlp.peak_bytes(9633) == other.peak_bytes == mlp.interpolated(9633).peak_bytes
    assert mlp.largest(other.peak_bytes) == 9633 == mlp.largest(mlp.peak_bytes(9634) - 1)
    assert mlp.largest(mlp.program.peak_bytes // 8) == 0 and mlp.largest(2**62) == 1024 * 2048
    capture.check(MLP, MACHINE, 9633, other.peak_bytes)
    with pytest.raises(BatchError, match=f"{other.peak_bytes:,}"):
        capture.check(MLP, MACHINE, 9633, 1)


def test_durations_at_two_batches_are_on_one_scale(mlp: Batches) -> None:
    measured = mlp.program.with_durations([3 * k.duration_ns for k in mlp.program.kernels])
    assert capture.rescaled(mlp.larger, measured).ideal_ns == pytest.approx(3 * mlp.larger.ideal_ns, rel=0.01)
    # No equal kernels: proportional to the batch.
    other = replace(mlp.larger, kernels=tuple(replace(k, flops=k.flops + 1) for k in mlp.larger.kernels))
    assert capture.rescaled(other, measured).ideal_ns == pytest.approx(2 * measured.ideal_ns, rel=0.01)


def test_a_batch_that_cannot_be_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorter = replace(sized(8), kernels=sized(8).kernels[:-1])
    with pytest.raises(BatchError, match=r"between batch 4 and 8; plan each alone$"):
        Batches(4, sized(4), 8, shorter)
    with pytest.raises(BatchError, match="between batch 1 and 2; plan a batch of 2"):
        Batches(1, sized(1), 2, shorter)
    (tmp_path / "factories.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))
    shapeless = {"name": "m", "target": "factories:shapeless"}
    program = capture.step(shapeless, MACHINE, None).program  # its own batch can be captured
    with pytest.raises(WorkloadError, match="first dimension"):
        capture.batches(shapeless, MACHINE, None, program, 0)


def test_the_largest_batch_with_a_plan() -> None:
    steps = Batches(8, sized(8), 16, sized(16))
    peaks = []

    def plan_overhead(step: Program, available: int) -> float | None:
        peaks.append(step.peak_bytes)
        assert available == 2**40
        batch = (step.kernels[0].duration_ns - 1000) // 100
        return None if batch > 90 else batch / 1000

    assert steps.largest_planned(plan_overhead, 2**40, 10, 0.05) in (49, 50)  # within 1 / 32
    assert steps.largest_planned(plan_overhead, 2**40, 10, 1.0) in (88, 89, 90)
    assert min(peaks) > steps.peak_bytes(10)  # batches that fit as is are not planned
    assert steps.largest_planned(lambda *_: None, 2**40, 10, 0.05) == 10


def test_what_stands_beside_tensors_grows_with_the_batch() -> None:
    """The memory is 10 MiB at 8 examples and 18 at 16: 2 plus 1 per example."""
    steps = Batches(8, sized(8), 16, sized(16), (10 * MB, 18 * MB))
    limit = 100 * MB
    assert [steps.room(limit, batch) for batch in (8, 12, 16)] == [90 * MB, 86 * MB, 82 * MB]
    most = steps.largest(limit)
    assert steps.peak_bytes(most) + 2 * MB + most * MB <= limit < steps.peak_bytes(most + 1) + 3 * MB + most * MB


def test_what_grows_with_the_square_of_a_size_is_as_captured() -> None:
    """Scores of attention grow with the square of the sequence length, everything else with the length."""
    attention = {"name": "a", "target": "attention_model:factory"}
    program = capture.step(attention, MACHINE, None).program
    steps, longest = capture.sequences(attention, MACHINE, None, program, 0)
    assert (steps.batch, steps.larger_batch, steps.unit, longest) == (128, 64, 64, 512)
    other = workloads.load(attention, MACHINE, as_cuda=True, length=448).program
    assert steps.interpolated(448).tensors == other.tensors and steps.peak_bytes(448) == other.peak_bytes
    assert steps.largest(other.peak_bytes) == 448 == steps.largest(other.peak_bytes + MB // 8)
    affine = replace(steps, larger=steps.interpolated(64))
    assert affine.peak_bytes(448) == other.peak_bytes
    capture.check(attention, MACHINE, 448, other.peak_bytes, what="sequence length")
    with pytest.raises(BatchError, match="at sequence length 448 is"):
        capture.check(attention, MACHINE, 448, 1, what="sequence length")


def test_the_longest_sequence_ends_at_the_positions_of_the_model() -> None:
    attention = {"name": "a", "target": "attention_model:factory"}
    program = capture.step(attention, MACHINE, None).program
    task = program, MACHINE, 2**40
    search = partial(planning.largest_batch, attention, task, "joint", 0.1, 1.0)
    longest = planning.longest_sequence(attention, search)
    assert (longest.batch, longest.without, longest.most, longest.least) == (128, 512, 512, 64)
    (sentence, *_) = words.sequences(replace(answered(program, program.peak_bytes), sequence=longest))
    assert "longest sequence without a plan is at least 512" in sentence and "the given sequence is 128" in sentence
    assert planning.longest_sequence(MLP, search) == Largest()


def test_the_given_batch_counts_if_it_is_planned() -> None:
    """The search for the largest batch may end before it reaches the batch whose plan is recommended."""
    program = slow(chain())
    best = answered(program, program.peak_bytes * 7 // 10).best
    found = Largest(8, 4, 4, "", max(best.overhead, 0.1), True, most=8192)
    assert found.including(best).planned == 8 and found.including(None) == found
    assert found.including(replace(best, timeline=None)) == found  # without a plan
    assert replace(found, most_overhead=best.overhead - 0.01).including(best).planned == 4
    assert replace(found, planned=16).including(best).planned == 16


def test_micro_batches_fit_and_make_up_the_batch(mlp: Batches) -> None:
    limit = mlp.program.peak_bytes * 6 // 10
    held = sum(t.nbytes for t in mlp.program.tensors if t.kind == "parameter")
    each, count, overhead = mlp.accumulated(limit)
    assert each * count >= 2048 > each * (count - 1)
    assert mlp.peak_bytes(each) + held <= limit < mlp.peak_bytes(-(-2048 // (count - 1))) + held
    assert -0.2 < overhead < 3
    assert mlp.accumulated(held) is None
    assert Batches(8, sized(8), 16, sized(16)).accumulated(2**40) is None  # without an optimizer


def test_an_example_batch_of_another_size() -> None:
    images = torch.empty(4, 3, 8, 8).to(memory_format=torch.channels_last)
    across = torch.empty(7, 4).t()
    parts = (nn.Identity(), nn.MSELoss(), None, (images, {"y": across, "scale": torch.tensor(2.0), "n": 3}))
    assert batch_size_of(parts) == 4
    x, y = with_batch(parts, 9)[3]
    assert x.shape == (9, 3, 8, 8) and x.is_contiguous(memory_format=torch.channels_last)
    assert y["y"].shape == (9, 7) and y["scale"].item() == 2.0 and y["n"] == 3
    with pytest.raises(WorkloadError, match="first dimension"):
        with_batch((*parts[:3], (torch.tensor(1.0), 1)), 9)


# ---------------------------------------------------------------------------------------- the answer


def test_the_cheapest_plan_is_recommended() -> None:
    program = replace(slow(chain()), name="<b>&amp;\"'")
    limit = program.peak_bytes * 7 // 10
    a = answered(program, limit)
    assert [best.family for best in a.families][:3] == ["swap, published", "recompute, published", "both, published"]
    found = [best for best in a.families if best.plan is not None]
    assert a.best in found and all(a.best.overhead <= best.overhead + 1e-4 for best in found)
    equal = [len(b.plan.decisions) for b in found if b.overhead < a.best.overhead + 5e-5]
    assert len(a.best.plan.decisions) == min(equal)
    for best in found:
        assert best.timeline.peak_bytes <= limit and best.row["gap"] >= -1e-9
        assert a.floor <= best.overhead + 1e-9
    heads, cells = words.methods(a)
    assert all(len(line) == len(heads) for line in cells)
    assert [line[-1] for line in cells].count("recommended") == 1
    text = pages(a)
    for title in ("The peak", "Overhead by method", "The recommended plan", "plan.json"):
        assert title in text
    assert words.plan_summary(a) in text and "Will <b>&amp;\"' fit?" in text  # escaped


def test_parts_of_device_memory_share_a_unit_and_add_up() -> None:
    program = slow(chain(10))
    third = program.peak_bytes // 3 + 5_000
    card = DevicePeak(program.peak_bytes, third, third, third, third, program.peak_bytes * 3 // 4, False)
    a = replace(answered(program, card.limit), card=card, memory=card.memory_bytes)
    _, parts = words.card(a)[0].rsplit(": ", 1)
    figures = [round(100 * float(n)) for n in re.findall(r"([\d.]+) MiB", parts)]
    assert sum(figures) == round(100 * float(a.size(card.nbytes).split()[0])) and len(figures) == 5
    assert f"takes {a.size(card.nbytes)} of {a.size(card.memory_bytes)} of device memory" in words.verdict(a)
    assert set(re.findall(r"[KMG]iB", pages(a))) == {"MiB"}
    card = DevicePeak(program.peak_bytes, 3 * MB, 2 * MB, 4 * MB, 5 * MB, program.peak_bytes * 3 // 4, False)
    a = replace(answered(program, card.limit), card=card, memory=card.memory_bytes)
    assert a.best is not None and a.best.timeline.peak_bytes <= card.limit < card.memory_bytes
    a = replace(a, best=planning.with_memory([a.best], card, 1, True)[0])
    assert f"With the plan it takes {a.size(a.card_planned)} and +" in words.verdict(a)
    assert a.card_planned is not None and a.card_planned >= a.best.timeline.peak_bytes + 10 * MB
    holes = replace(a, best=None, families=(replace(a.best, card=(card.nbytes + MB, False)),), budget=2.0)
    assert a.size(card.nbytes + MB) in words.verdict(holes) and "seconds=10" in words.verdict(holes)


def test_sizes_are_in_the_unit_of_the_step() -> None:
    program = slow(chain())
    card = DevicePeak(program.peak_bytes, 0, 0, 0, 0, 80 * 2**30, True)
    a = replace(answered(program, program.peak_bytes), card=card, memory=80 * 2**30)
    assert f"fits without a plan: {program.peak_bytes / MB:,.2f} MiB of 81,920.00 MiB" in words.verdict(a)
    assert "GiB" not in pages(a)


def test_the_peak_of_recurrent_layers_is_a_lower_bound() -> None:
    program = slow(chain(10))
    card = DevicePeak(program.peak_bytes, 0, 0, 0, 0, program.peak_bytes, False)
    a = replace(answered(program, program.peak_bytes // 2), card=card)
    assert "is exact. Estimated" in words.card(a)[0]
    recurrent = replace(a.program.kernels[0], name="aten._cudnn_rnn.default")
    a = replace(a, program=replace(a.program, kernels=(recurrent, *a.program.kernels[1:])))
    assert "is at least this, as cuDNN may reserve more for recurrent layers. Estimated" in words.card(a)[0]


def test_a_stopped_search_reports_how_to_continue() -> None:
    program = slow(chain())
    a = replace(answered(program, program.peak_bytes * 8 // 10), budget=3.0)
    stopped = Largest(8, 4, 16, "tensile", 0.1, True, most=8192, sufficient_s=20.0)
    assert "seconds=20" in words.batches(replace(a, largest=stopped))[1]
    assert "stopped" not in " ".join(words.batches(replace(a, largest=replace(stopped, sufficient_s=None))))
    (sentence,) = words.gap_hints(replace(a, floor=a.best.overhead - 0.031, mode="swap"))
    assert "3.1 points" in sentence and "seconds=20" in sentence and "mode=joint" in sentence
    assert words.gap_hints(replace(a, floor=a.best.overhead - 0.029)) == []
    left = replace(a, families=(replace(a.families[0], skipped=("capuchin",)),))
    assert "Capuchin" in words.methods(left)[1][0][-1]


def test_each_family_has_a_fair_plan_whatever_the_time() -> None:
    """Quick methods run even if the time is up, until one has a plan; others are skipped."""
    program = slow(chain())
    task = (program, MACHINE, program.peak_bytes * 8 // 10)
    for kind, names in (
        ("swap", ("capuchin", "autoswap_swdoa", "tflms", "geeps")),
        ("recompute", ("checkpoint_all", "memonger", "capuchin")),
    ):
        best = planning.best_of(kind, names, task, kind, 0, 60.0, -1.0, required=planning.EFFORT.first)
        assert best.plan is not None and best.row["planner"] == names[1]
        assert best.skipped == (names[0], *names[2:])


def test_a_family_keeps_its_time_even_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []

    @contextmanager
    def stopped(seconds: float | None) -> Iterator[None]:
        limits.append(seconds)
        raise TimeUp
        yield

    monkeypatch.setattr(planning, "within", stopped)
    task = chain(), MACHINE, chain().peak_bytes * 8 // 10
    names = ["autoswap_swdoa", "geeps", "tflms", "capuchin"]
    best = planning.best_of("swap", names, task, "swap", 0, 5.0, 40.0, required=("autoswap_swdoa", "tflms"))
    assert best.plan is None and best.skipped == tuple(names)
    assert all(limit is not None and 0 < limit <= 45.0 for limit in limits) and len(limits) == 4
    effort = planning.EFFORT
    shares = (effort.order_share, effort.search_share, effort.faster_share, effort.tighter_share, effort.floor_share)
    assert sum(shares) + 3 * effort.kind_share + effort.batch_share == pytest.approx(1.0)


def test_the_host_is_named_where_it_is_what_a_plan_lacks() -> None:
    program = slow(chain())
    limit = program.peak_bytes * 7 // 10
    small = replace(MACHINE, host_bytes=MB)
    needed = host_needed(program, small, limit, "swap")
    assert needed is not None and needed > MB and host_needed(program, MACHINE, limit, "swap") is None
    assert host_needed(program, replace(small, host_bytes=needed), limit, "swap") is None
    a = answered(program, limit, "swap", small)
    assert [best.family for best in a.families] == ["swap, published", "search"]
    assert a.best is None and a.host == needed
    assert a.size(MB) in words.verdict(a) and a.size(needed) in words.verdict(a)
    row, _ = report.score("autoswap_swdoa", program, small, limit, 0, "swap")
    assert "host memory" in report.reason({**row, "bound_overhead": 0.0})


def test_a_fitting_step_needs_no_plan_and_an_infeasible_one_lists_smaller_batches() -> None:
    a = answered(chain(), chain().peak_bytes)
    assert a.fits and a.best is None and a.families == () and words.verdict(a).startswith("It fits")
    assert "Overhead by method" not in pages(a)
    a = answered(chain(), 40 * MB)
    assert not a.fits and a.best is None and a.families == () and words.verdict(a).startswith("It does not fit")
    assert a.limit < a.least_bytes <= a.reached_bytes and a.size(a.least_bytes) in words.verdict(a)
    micro = Largest(batch=8, without=5, micro=(4, 2), micro_overhead=0.03)
    assert "2 batches of 4" in words.verdict(replace(a, largest=micro)) and "no plan to run" in pages(a)


def test_a_planner_that_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        name = "autoswap_doa"
        simulator_calls = 0

        def plan(self, *task: object) -> Plan:
            for _ in range(600):
                time.sleep(0.1)
            raise AssertionError("not aborted")

    program = chain()
    monkeypatch.setattr(planning.report, "make", lambda *_, **__: Slow())
    monkeypatch.setattr(planning, "within", within)
    best = planning.best_of("swap", ["autoswap_doa"], (program, MACHINE, 2**30), "swap", 0, 0.05)
    assert best.plan is None and best.row is None and best.skipped == ("autoswap_doa",)


def test_unserved_plans_are_replanned_with_less_memory() -> None:
    """An activation lives from the first to the last kernel, while others are freed."""
    tensors = tuple(Tensor(f"t{i}", 12 * MB, "activation", False) for i in range(5))
    kernels = (
        Kernel("first", "other", "forward", (), (0,), 10**6),
        *(Kernel(f"k{i}", "other", "forward", (i - 1,) if i > 1 else (), (i,), 10**6) for i in range(1, 5)),
        Kernel("last", "other", "backward", (0, 4), (), 10**6),
    )
    step = Program("waits", tensors, kernels)
    gpu = Machine("g", 2**34, 10**12, 10**12, d2h_latency_ns=0, h2d_latency_ns=0)
    plan = Plan((Swap(0, 0, 5),))
    timeline = simulate(step, plan, gpu, step.peak_bytes)

    def card(memory: int) -> DevicePeak:
        return DevicePeak(step.peak_bytes, 0, 0, 0, 0, memory, False)

    counted, _ = under_plan(card(step.peak_bytes), timeline)
    served, small = (
        planning.with_memory([Best("", {}, plan, timeline, 0.0)], card(memory), 1, False)
        for memory in (counted, counted - 1)
    )
    assert served[0].card == (counted, True) and not small[0].served
    peak = timeline.peak_bytes
    packed = [planning.with_memory([Best("", {}, plan, timeline, 0.0)], card(n), 1, True)[0] for n in (peak, peak - 1)]
    assert [b.card for b in packed] == [(peak, True), (peak, False)]
    assert planning.needs_less_memory(small) and not planning.needs_less_memory(served)
    task = step, gpu, 36 * MB  # the step fits it as is; so does its allocator
    found = planning.plan_tighter(task, card(26 * MB), "joint", 0, 2.0, False)
    assert found is not None and found.served and found.card[0] <= 26 * MB
    assert planning.plan_tighter(task, card(10 * MB), "joint", 0, 2.0, False) is None


# ---------------------------------------------------------------------------------------- as a user


def trains_as_eager(code: str, folder: Path) -> None:
    """Asserts that the page's code snippet yields the losses of the eager step."""
    sys.path.insert(0, str(folder))
    try:
        exec(code, parts := {"loader": []})
        model, loss_fn, optimizer, _ = parts["factory"]()
    finally:
        sys.path.remove(str(folder))
        del sys.modules["mymodel"]
    model.load_state_dict(parts["parts"][0].state_dict())
    for _ in range(3):
        x = torch.randn(512, 256)
        y = torch.randint(10, (512,))
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        assert parts["step"](x, y).item() == loss.item()
    assert parts["step"].plan.decisions


def test_a_factory_is_planned(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Capture the largest batch even on a busy computer.
    monkeypatch.setattr(planning, "EFFORT", replace(planning.EFFORT, timeout_factor=1000))
    (tmp_path / "work" / "mymodel.py").write_text(FACTORY)
    out = tmp_path / "out"
    done = run("plan", "target=mymodel:factory", "memory=0.6", "seconds=2", "step_ms=20", f"out={out}").ok()
    assert len(done.stdout.splitlines()) <= 70
    assert {file.name for file in out.iterdir()} == {
        "report.html",
        "plan.json",
        "memory.png",
        "timeline.json",
        "results.jsonl",
        "program.json",
        "summary.json",
        ".hydra",
    }
    summary = json.loads((out / "summary.json").read_text())
    found = summary["largest"]
    assert found["own"] == 512 and found["checked"] and not found["why"]
    assert 100 < found["without"] < 512 and found["planned"] >= found["without"]
    assert Program.load(out / "program.json").ideal_ns == 20_000_000
    text = read((out / "report.html").read_text())
    assert summary["verdict"] in text and "The largest batch without a plan" in text
    assert Plan.load(out / "plan.json").planner == summary["recommended"]
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert rows[0]["planner"] == "none" and not rows[0]["feasible"]
    (code,) = re.findall(r"from agents\.saved import.*?eager step", text, re.DOTALL)
    trains_as_eager(code, tmp_path / "work")
    assert "\r" not in done.stderr  # a line per finished stage
    stages = planning.stages("joint", TimesError(0.1, 0.1))
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == list(stages)


def test_the_exit_status_is_nonzero_if_nothing_fits(run: Run, program_file: Path, tmp_path: Path) -> None:
    words = (f"program={program_file}", "machine=gtx1080ti", "memory=40MiB")
    assert "The largest batch is unknown" in run("plan", *words, f"out={tmp_path / 'first'}").stdout
    done = run("plan", *words, "largest=false", f"out={tmp_path / 'no'}")
    assert "largest batch" not in done.stdout + (tmp_path / "no" / "report.html").read_text()
    assert done.returncode == 1 and not (tmp_path / "no" / "plan.json").exists(), done.stderr
    assert (tmp_path / "no" / "report.html").exists()
