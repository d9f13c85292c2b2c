"""`experiments.plan`: the largest batch, what is recommended, what is said, and the page that opens alone."""

import json
import math
import re
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

from agents.host import host_needed
from agents.search.other_times import TimesError
from experiments import workloads
from experiments.common import cli, report
from experiments.plan import __main__ as command, max_batch, on_card, summary as words
from experiments.plan.html import page
from experiments.plan.max_batch import BatchError, Batches
from experiments.workloads.module import WorkloadError, leading, with_batch
from simulator import Machine, Plan, Program, simulate
from simulator.pool.card import CardPeak
from simulator.report import Unit, size
from tests.experiments.conftest import MB, Run, chain

MACHINE = Machine.load("h100")
MLP = {"name": "mlp", "family": "mlp", "batch_size": 2048, "width": 256, "layers": 2}
FACTORY = """
from torch import nn, optim, zeros

def factory():
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(256, 256), nn.Tanh())), nn.Linear(256, 10))
    return model, nn.CrossEntropyLoss(), optim.SGD(model.parameters(), 0.1), (zeros(512, 256), zeros(512).long())
"""


class Reader(HTMLParser):
    """Well-formed: what is opened is closed. Collects text and what would be loaded."""

    VOID = ("meta", "br", "link", "img")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [f"{tag} {key}={value}" for key, value in attrs if key in ("src", "href", "srcset", "action")]
        assert tag not in ("script", "link", "iframe", "object", "b"), tag
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data + "\n"


def read(text: str) -> str:
    """The words of a page that loads nothing."""
    reader = Reader(text)
    assert not reader.loads and "url(" not in text and "@import" not in text and "http" not in text
    width, height = map(int, re.search(r'viewBox="0 0 (\d+) (\d+)"', text).groups())
    assert not re.search(r"<[^a-z/!]", text.partition("<body>")[2])  # "<0.01 GiB" is no tag
    for path in re.findall(r' d="([^"]+)"', text):
        assert re.fullmatch(r"M[-\d. ]+(H[-\d.]+V[-\d.]+)*(L[-\d. ]+L[-\d. ]+Z)?", path)
        assert all(-1 <= float(x) <= width + 1 for x in re.findall(r"H([-\d.]+)", path))
        assert all(-1 <= float(y) <= height + 1 for y in re.findall(r"V([-\d.]+)", path))
    return reader.text


def answered(program: Program, limit: int, mode: str = "joint", seconds: float = 1.0) -> words.Answer:
    task = (program, MACHINE, limit)
    command.get_ready(MACHINE, mode)
    families, bound = command.planned(task, mode, seconds, 0)
    return command.answered(task, None, mode, families, bound, words.Largest(), 0.0)


def pages(a: words.Answer) -> str:
    after = a.best.timeline if a.best else None
    return read(page(a, simulate(a.program, Plan(), a.machine, a.program.peak_bytes), after, "typed"))


def slow(program: Program) -> Program:
    """The same with kernels that take long enough for copies."""
    return replace(program, kernels=tuple(replace(k, duration_ns=10 * k.duration_ns) for k in program.kernels))


# ---------------------------------------------------------------------------------------- batches


def sized(batch: int) -> Program:
    return replace(chain(4, MB * batch), kernels=tuple(
        replace(k, duration_ns=1000 + 100 * batch) for k in chain(4).kernels
    ))  # fmt: skip


@pytest.fixture(scope="module")
def mlp() -> Batches:
    """A captured step."""
    small, large = (workloads.load(MLP, MACHINE, batch).program for batch in (2048, 4096))
    return Batches(2048, small, 4096, large)


def test_a_step_at_any_batch_is_as_captured(mlp: Batches) -> None:
    other = workloads.load({**MLP, "iteration_ms": {"h100": 8}}, MACHINE, 9633).program
    assert mlp.at(9633).tensors == other.tensors
    assert mlp.peak_bytes(9633) == other.peak_bytes == mlp.at(9633).peak_bytes
    assert mlp.largest(other.peak_bytes) == 9633 == mlp.largest(mlp.peak_bytes(9634) - 1)
    assert mlp.largest(mlp.program.peak_bytes // 8) == 0 and mlp.largest(2**62) == 1024 * 2048
    assert other.ideal_ns == workloads.load(MLP, MACHINE, 9633).program.ideal_ns  # the measured time is of another


def test_durations_at_two_batches_are_on_one_scale(mlp: Batches) -> None:
    measured = mlp.program.with_durations([3 * k.duration_ns for k in mlp.program.kernels])
    scaled = max_batch.on_its_scale(mlp.larger, measured)
    assert scaled.ideal_ns == pytest.approx(3 * mlp.larger.ideal_ns, rel=0.01)
    # Micro-batches cannot be faster than the whole: all kernels of the roofline grow at most as the batch does.
    _, _, cost = Batches(2048, measured, 4096, scaled).accumulated(measured.peak_bytes * 3 // 4) or (0, 0, -1.0)
    assert cost >= 0
    # Nothing in common: in proportion to the batch.
    other = replace(mlp.larger, kernels=tuple(replace(k, flops=k.flops + 1) for k in mlp.larger.kernels))
    assert max_batch.on_its_scale(other, measured).ideal_ns == pytest.approx(2 * measured.ideal_ns, rel=0.01)


def test_batches_that_change_the_kernels_are_refused() -> None:
    with pytest.raises(BatchError, match="at a batch of 8 its kernels are not those at 4"):
        Batches(4, sized(4), 8, replace(sized(8), kernels=sized(8).kernels[:-1]))


def test_the_largest_batch_with_a_plan() -> None:
    steps, asked = Batches(8, sized(8), 16, sized(16)), []

    def costs(step: Program, room: int) -> float | None:
        asked.append(step.peak_bytes)
        assert room == 2**40
        batch = (step.kernels[0].duration_ns - 1000) // 100
        return None if batch > 90 else batch / 1000

    assert steps.largest_planned(costs, 2**40, 10, 0.05) in (49, 50)  # to 1 / 32 of it
    assert steps.largest_planned(costs, 2**40, 10, 1.0) in (88, 89, 90)
    assert min(asked) > steps.peak_bytes(10)  # what needs no plan is not planned
    assert steps.largest_planned(lambda *_: None, 2**40, 10, 0.05) == 10


def test_what_stands_beside_tensors_grows_with_the_batch() -> None:
    """10 MiB at 8 examples, 18 at 16: 2 and 1 for each."""
    steps = Batches(8, sized(8), 16, sized(16), (10 * MB, 18 * MB))
    assert [steps.tensors(100 * MB, batch) for batch in (8, 12, 16)] == [90 * MB, 86 * MB, 82 * MB]
    limit = 100 * MB
    most = steps.largest(limit)
    assert steps.peak_bytes(most) + 2 * MB + most * MB <= limit < steps.peak_bytes(most + 1) + 3 * MB + most * MB
    assert most < Batches(8, sized(8), 16, sized(16)).largest(limit)


def test_micro_batches_fit_and_make_up_the_batch(mlp: Batches) -> None:
    held = sum(t.nbytes for t in mlp.program.tensors if t.kind == "parameter")
    limit = mlp.program.peak_bytes * 6 // 10
    each, count, overhead = mlp.accumulated(limit)
    assert each * count >= 2048 > each * (count - 1)
    assert mlp.peak_bytes(each) + held <= limit < mlp.peak_bytes(-(-2048 // (count - 1))) + held
    assert -0.2 < overhead < 3
    assert mlp.accumulated(held) is None
    assert Batches(8, sized(8), 16, sized(16)).accumulated(2**40) is None  # no optimizer: no gradients to add up


def test_an_example_batch_of_another_size() -> None:
    images = torch.empty(4, 3, 8, 8).to(memory_format=torch.channels_last)
    across = torch.empty(7, 4).t()
    parts = (nn.Identity(), nn.MSELoss(), None, (images, {"y": across, "scale": torch.tensor(2.0), "n": 3}))
    assert leading(parts) == 4
    x, y = with_batch(parts, 9)[3]
    assert x.shape == (9, 3, 8, 8) and x.is_contiguous(memory_format=torch.channels_last)
    assert y["y"].shape == (9, 7) and y["scale"].item() == 2.0 and y["n"] == 3
    for batch in ((images, torch.empty(5)), (torch.tensor(1.0), 1), (torch.empty(0, 3), torch.empty(0))):
        with pytest.raises(WorkloadError, match="do not share a first dimension"):
            with_batch((*parts[:3], batch), 9)


# ---------------------------------------------------------------------------------------- the answer


def test_nothing_is_planned_where_it_fits() -> None:
    program = chain()
    a = answered(program, program.peak_bytes)
    assert a.fits and a.best is None and a.families == ()
    assert words.verdict(a).startswith("It fits without a plan") and "Nothing is worth doing" in words.verdict(a)
    text = pages(a)
    assert "Nothing is worth doing" in text and "What methods cost" not in text and "plan.json" not in text


def test_the_cheapest_plan_is_recommended() -> None:
    program = slow(chain())
    limit = program.peak_bytes * 7 // 10
    a = answered(program, limit)
    assert [best.family for best in a.families][:3] == ["swap, published", "recompute, published", "both, published"]
    found = [best for best in a.families if best.plan is not None]
    assert a.best in found and all(words.overhead(a.best) <= words.overhead(best) + 1e-4 for best in found)
    equal = [len(b.plan.decisions) for b in found if words.overhead(b) < words.overhead(a.best) + 5e-5]
    assert len(a.best.plan.decisions) == min(equal)
    for best in found:
        assert best.timeline.peak_bytes <= limit and best.row["gap"] >= -1e-9
        assert a.floor <= words.overhead(best) + 1e-9
    assert re.match(r"(Swap|Run) \d+ .*; \+", words.moves(a))
    heads, cells = words.methods(a)
    assert all(len(line) == len(heads) for line in cells)
    assert [line[-1] for line in cells].count("recommended") == 1 and cells[-1][-1] == "the floor"
    text = pages(a)
    assert all(
        title in text for title in ("The peak by kind", "What methods cost", "The recommended plan", "plan.json")
    )
    assert words.moves(a) in text


def test_the_card_is_told_in_parts() -> None:
    program = slow(chain(10))
    card = CardPeak(program.peak_bytes, 3 * MB, 2 * MB, 4 * MB, 5 * MB, program.peak_bytes * 3 // 4, False)
    a = replace(answered(program, card.limit), card=card, memory=card.memory_bytes)
    assert a.best is not None and a.best.timeline.peak_bytes <= card.limit < card.memory_bytes
    a = replace(a, best=on_card.judged([a.best], card)[0])
    assert a.card_planned is not None and a.card_planned >= a.best.timeline.peak_bytes + 10 * MB
    said = " ".join(words.card(a))
    assert "allocator rounds up and keeps 4.00 MiB" in said and "which a program file does not say" in said
    assert f"{a.size(card.nbytes)}, {a.size(card.nbytes - card.memory_bytes)} more" in words.verdict(a)
    assert said.split(".")[0] in pages(a)
    holes = replace(a, best=None, families=(replace(a.best, card=(card.nbytes + MB, False)),), budget=2.0)
    assert f"one needs {a.size(card.nbytes + MB)} of the card; seconds=10" in words.verdict(holes)
    assert words.methods(holes)[1][0][-1] == "too fragmented for the card" and "no plan was" not in words.verdict(holes)
    unasked = replace(a, card=replace(card, memory_bytes=None, fits=None), memory=None)
    assert "Likely real on the card" in words.card(unasked)[0] and "a fraction of" in words.card(unasked)[-1]
    fits = replace(card, memory_bytes=card.nbytes - 1, fits=True)
    a = replace(answered(program, fits.limit), card=fits, memory=fits.memory_bytes)
    assert a.fits and "gives back what it caches" in " ".join(words.card(a))
    (only,) = words.card(answered(program, program.peak_bytes))
    assert "a fraction of the tensors' peak" in only


def test_sizes_of_a_page_have_one_unit_and_add_up() -> None:
    say = Unit.of(24 * 2**30, 2**20)
    assert [say(n) for n in (24 * 2**30, 2**20, 5, 0)] == ["24.00 GiB", "<0.01 GiB", "<0.01 GiB", "0.00 GiB"]
    a, b = 24 * 2**30, 24 * 2**30 - 2 * 2**20
    apart = Unit.of(a, apart=[(a, b)])
    assert (apart(a), apart(b)) == ("24.000 GiB", "23.998 GiB")
    program = slow(chain(10))
    third = program.peak_bytes // 3 + 5_000
    card = CardPeak(program.peak_bytes, third, third, third, third, program.peak_bytes * 3 // 4, False)
    a = replace(answered(program, card.limit), card=card, memory=card.memory_bytes)
    _, parts = words.card(a)[0].rsplit(": ", 1)
    figures = [round(100 * float(n)) for n in re.findall(r"([\d.]+) MiB", parts)]
    assert sum(figures) == round(100 * float(a.size(card.nbytes).split()[0])) and len(figures) == 5
    need, more, there = (float(n) for n in re.findall(r"([\d.]+) MiB", words.verdict(a))[:3])
    assert round(need - there, 2) == more
    assert set(re.findall(r"[KMG]iB", pages(a))) == {"MiB"}


def test_a_search_that_stopped_says_so_and_how_it_goes_on() -> None:
    program = slow(chain())
    a = replace(answered(program, program.peak_bytes * 8 // 10), budget=3.0)
    stopped = words.Largest(8, 4, 16, "tensile", 0.1, True, most=8192, goes_on=20.0)
    said = words.batches(replace(a, largest=stopped))[1]
    assert said.endswith("The search stopped there for lack of time; it goes on with seconds=20.")
    assert "stopped" not in " ".join(words.batches(replace(a, largest=replace(stopped, goes_on=None))))
    far = replace(a, floor=words.overhead(a.best) - 0.031, mode="swap")
    (sentence,) = words.gap(far)
    assert "up to 3.1 points less: seconds=20 (it was 3)" in sentence and "mode=joint" in sentence
    assert words.gap(replace(far, floor=words.overhead(a.best) - 0.029)) == []
    left = replace(
        a, families=(replace(a.families[0], left_out=("capuchin",)), replace(a.families[1], left_out=("a", "b")))
    )
    assert [line[-1] for line in words.methods(left)[1][:2]] == [
        "Capuchin not tried, for lack of time", "2 not tried, for lack of time"]  # fmt: skip


def test_each_family_has_a_fair_plan_whatever_the_time() -> None:
    """Quick methods are asked even where the time is over; others are left out."""
    program = slow(chain())
    task = (program, MACHINE, program.peak_bytes * 8 // 10)
    for kind, names in (
        ("swap", ("capuchin", "tensile", "tflms", "geeps")),
        ("recompute", ("memonger", "superneurons", "checkpoint_all")),
    ):
        best = command.best_of(kind, names, task, kind, 0, 60.0, -1.0, sure=command.FIRST)
        tried = [name for name in names if name in command.FIRST]
        assert best.plan is not None and best.row["planner"] in (names[0], *tried)
        assert set(best.left_out) == {name for name in names[1:] if name not in command.FIRST}


def test_the_host_is_named_where_it_is_what_a_plan_lacks() -> None:
    program = slow(chain())
    limit, small = program.peak_bytes * 7 // 10, replace(MACHINE, host_bytes=MB)
    needed = host_needed(program, small, limit, "swap")
    assert needed is not None and needed > MB and host_needed(program, MACHINE, limit, "swap") is None
    assert host_needed(program, replace(small, host_bytes=needed), limit, "swap") is None
    task = (program, small, limit)
    families, bound = command.planned(task, "swap", 1.0, 0)
    a = command.answered(task, None, "swap", families, bound, words.Largest(), 0.0)
    assert a.best is None and a.host == needed
    assert f"the host that is too small for a plan: it has {a.size(MB)}" in words.verdict(a)
    assert f"{a.size(needed)} would do" in words.verdict(a)
    assert all(line[-1].startswith("the host is too small") for line in words.methods(a)[1][:2])
    row, _ = report.score("autoswap_swdoa", *task, 0, "swap")
    assert (
        report.reason({**row, "bound_overhead": 0.0})
        == f"the host has too little: {size(MB)} for what is swapped, and {size(needed)} would do"
    )


def test_one_mode_has_only_its_methods() -> None:
    program = slow(chain())
    a = answered(program, program.peak_bytes * 7 // 10, "swap")
    assert [best.family for best in a.families] == ["swap, published", "search"]
    assert a.best is not None and not a.page.rerun and "run" not in words.moves(a).lower().split()


def test_it_says_that_nothing_fits() -> None:
    program = chain()
    a = answered(program, 40 * MB)
    assert not a.fits and a.best is None and a.families == ()
    assert a.limit < a.least_bytes <= a.reached_bytes
    assert words.verdict(a).startswith("It does not fit") and a.size(a.least_bytes) in words.verdict(a)
    micro = words.Largest(own=8, without=2, micro=(2, 4), micro_overhead=0.012)
    assert "4 batches of 2" in words.verdict(replace(a, largest=micro))
    assert "There is none" in words.moves(a) and "there is no plan to run" in pages(a)


def test_a_dear_plan_is_said_to_be_one() -> None:
    program = replace(chain(), kernels=tuple(replace(k, duration_ns=1000) for k in chain().kernels))
    a = answered(program, program.peak_bytes * 7 // 10, "swap")
    assert words.overhead(a.best) > 1
    cheap = words.Largest(own=8, without=5, micro=(4, 2), micro_overhead=0.03)
    assert "2 batches of 4" in words.verdict(replace(a, largest=cheap))
    dear = replace(cheap, micro_overhead=math.inf)
    assert "likely" not in words.verdict(replace(a, largest=dear))


def test_names_are_escaped() -> None:
    program = replace(slow(chain()), name="<b>&amp;\"'")
    text = pages(answered(program, program.peak_bytes * 8 // 10, "swap", 0.5))
    assert "Will <b>&amp;\"' fit?" in text


def test_a_planner_that_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow:
        name, simulator_calls = "autoswap_doa", 0

        def plan(self, *task: object) -> Plan:
            for _ in range(600):
                time.sleep(0.1)
            raise AssertionError("nobody broke it off")

    program = chain()
    monkeypatch.setattr(command.report, "made", lambda *_, **__: Slow())
    best = command.best_of("swap", ["autoswap_doa"], (program, MACHINE, 2**30), "swap", 0, 0.05)
    assert best.plan is None and best.row is None and best.left_out == ("autoswap_doa",)


# ---------------------------------------------------------------------------------------- as a user


def trains_as_eager(code: str, folder: Path) -> None:
    """What a page prints to be pasted gives the losses of the eager step."""
    sys.path.insert(0, str(folder))
    try:
        exec(code, parts := {"loader": []})
        model, loss_fn, optimizer, _ = parts["factory"]()
    finally:
        sys.path.remove(str(folder))
        del sys.modules["mymodel"]
    model.load_state_dict(parts["parts"][0].state_dict())
    for _ in range(3):
        x, y = torch.randn(512, 256), torch.randint(10, (512,))
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        assert parts["step"](x, y).item() == loss.item()
    assert parts["step"].plan.decisions


def test_a_factory_is_planned(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "WAIT", 1000)  # the largest batch is captured, however busy the computer is
    (tmp_path / "work" / "mymodel.py").write_text(FACTORY)
    out = tmp_path / "out"
    done = run("plan", "target=mymodel:factory", "memory=0.6", "seconds=2", f"out={out}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(out) and len(done.stdout.splitlines()) <= 70
    assert {file.name for file in out.iterdir()} == {
        "report.html", "plan.json", "memory.png", "timeline.json", "results.jsonl", "program.json",
        "summary.json", ".hydra"}  # fmt: skip
    summary = json.loads((out / "summary.json").read_text())
    found = summary["largest"]
    assert found["own"] == 512 and found["checked"] and not found["why"]
    assert 100 < found["without"] < 512 <= found["planned"] or found["planned"] >= found["without"]
    text = read((out / "report.html").read_text())
    assert summary["verdict"] in text and "The largest batch without a plan" in text
    html = (out / "report.html").read_text()  # on a telephone a row is a block, each figure with its head
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", html[html.index('class="wide many"') :].partition("</table>")[0])
    heads = re.findall(r"<th[^>]*>(.*?)</th>", rows[0])
    assert all(re.findall(r'<td[^>]* data-head="(.*?)"', row) == heads for row in rows[1:]) and len(heads) == 8
    assert Plan.load(out / "plan.json").planner == summary["recommended"]
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert rows[0]["planner"] == "none" and not rows[0]["feasible"]
    assert (out / "memory.png").stat().st_size > 20_000
    (code,) = re.findall(r"from agents\.saved import.*?eager step", text, re.DOTALL)
    trains_as_eager(code, tmp_path / "work")
    assert "\r" not in done.stderr  # a line for each stage that is over
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == list(
        command.stages("joint", TimesError(0.1, 0.1))
    )


def test_exit_status_and_refusals(run: Run, program_file: Path, tmp_path: Path) -> None:
    done = run("plan", f"program={program_file}", "machine=gtx1080ti", "memory=40MiB", f"out={tmp_path / 'no'}")
    assert done.returncode == 1 and "It does not fit" in done.stdout, done.stderr
    assert not (tmp_path / "no" / "plan.json").exists() and (tmp_path / "no" / "report.html").exists()
    assert "has the batch" in done.stdout
    summary = json.loads((tmp_path / "no" / "summary.json").read_text())
    assert (
        summary["times"]["error"] is None is summary["overheads"] and "error is not known" in summary["times"]["said"]
    )


@pytest.mark.parametrize("words_", [{}, {"target": "a:b", "program": "x.json"}])
def test_one_thing_is_named(words_: dict[str, str]) -> None:
    from omegaconf import OmegaConf

    module = {"family": "module", "name": "module", "target": "${target}"}
    cfg = OmegaConf.create({"target": None, "program": None, "workload": module, **words_})
    with pytest.raises(cli.UsageError, match="named by one of target=, workload= and program="):
        command.workload_of(cfg)
