"""Tests of ``fit``: its step trains as in eager PyTorch and reports its plan; all refusals."""

from __future__ import annotations

import contextlib
import copy
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import agents
from agents.learned import edit_net, policy_net
from executor import Captured, FitError, capture, fit
from executor.capture.early_update import InBackward, with_early_update
from executor.capture.profile import ProfileError
from executor.capture.profiler import measure
from simulator import FormatError, Machine, Plan, Program, simulate
from simulator.modes import least_residency
from simulator.pool.device_memory import DevicePeak
from simulator.pool.packed import SHARES
from tests.executor.conftest import GPU, Tiny
from tests.executor.networks import CLASSES, Batch, ResNet, adamw, images, sgd
from tests.executor.training.programs import Loop, Twins, standard
from tests.process_state import process_state

MODULE = sys.modules["executor.fit"]  # executor.fit is the function
CAPTURE = "executor.training.planned_steps.capture"
Parts = tuple[nn.Module, Any, torch.optim.Optimizer, Batch]


def gpt2() -> nn.Module:
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def bert() -> nn.Module:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForMaskedLM(BertConfig(**sizes, vocab_size=50, max_position_embeddings=8))


def tokens(count: int = 2) -> Batch:
    return torch.randint(50, (count, 8)), torch.randint(50, (count, 8))


def of_logits(out: Any, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.logits.flatten(0, 1), y.flatten())


def rows(count: int) -> Batch:
    return torch.randn(count, 16), torch.randint(CLASSES, (count,))


def decaying(parts: Callable[[], Parts], batch: Callable[[int], Batch]) -> Loop:
    """Returns a loop with a decreasing learning rate and gradient clipping."""
    model, loss_fn, optimizer, _ = parts()
    rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    loop = standard(model, loss_fn, optimizer, batch, clip_norm=0.05)
    loop.after = lambda _: rate.step()
    return loop


class Fitted(Twins):
    """A fitted step and its eager twin."""

    def __init__(self, parts: Callable[[], Parts], memory: Any, batch: Callable[[int], Batch], **options: Any) -> None:
        super().__init__(decaying, parts, batch)
        self.step = fit(*self.ours.capture_args, parts()[3], memory, clip_norm=0.05, **options)

    def train_on(self, *counts: int) -> None:
        """Trains both for a step of micro-batches of ``counts`` samples and checks that they are bit-identical."""
        self.eager.options["accumulate"] = len(counts)
        batches = [self.ours.batch(count) for count in counts]
        self.step.begin(*batches)
        for i, batch in enumerate(batches):
            self.micro(self.step, i, batch, copy.deepcopy(batch))
        assert self.eager.norm > 0.05
        self.finish_step(self.step)


@pytest.mark.parametrize(
    ("make", "loss_fn", "batch"),
    [
        (lambda: ResNet(4, 1), nn.CrossEntropyLoss(), lambda count: images(16, count)()),
        pytest.param(gpt2, of_logits, tokens, marks=pytest.mark.nightly),
        pytest.param(bert, of_logits, tokens, marks=pytest.mark.nightly),
    ],
    ids=["resnet", "gpt2", "bert"],
)
def test_three_steps_are_eager_pytorchs_to_the_bit(make: Any, loss_fn: Any, batch: Any) -> None:
    def parts() -> Parts:
        return (model := make()), loss_fn, adamw(model), batch(2)

    twins = Fitted(parts, 0.7, batch)
    step = twins.step
    assert step.plan.planner == "best" and step.limit == int(0.7 * step.program.peak_bytes)
    for _ in range(3):
        twins.train_on(2)
    assert step.peak_bytes <= step.limit
    page = step.report()
    assert page.under.nbytes <= page.limit < page.without.nbytes
    assert page.floor_ns is not None and page.ideal_ns <= page.floor_ns <= page.iteration_ns
    assert sum(page.under.modules.values()) == page.under.nbytes and page.without.place


@pytest.mark.parametrize("memory", ["24", "2G", "much", 0])
def test_a_malformed_memory_is_refused_before_the_capture(memory: int | str) -> None:
    """The model could not be captured."""
    with pytest.raises(FormatError, match=r"^memory: "):
        fit(nn.Linear(2, 2), nn.MSELoss(), None, (torch.zeros(3), torch.zeros(3)), memory)


def test_the_assumed_machine_is_named(tiny_mlp: Tiny) -> None:
    with pytest.warns(UserWarning, match="machine= is not given: times and copies are those of gtx1080ti"):
        fit(*tiny_mlp.parts(), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(*tiny_mlp.parts(), 1, machine="h100")


@pytest.mark.parametrize("memory", [1, 2**30, "1GiB"])
def test_what_fits_needs_no_plan(memory: int | str, tiny_mlp: Tiny) -> None:
    def never(*_: Any) -> Plan:
        raise AssertionError("was asked")

    step = fit(*tiny_mlp.parts(), memory, planner=never)
    assert step.plan.decisions == () and step.floor_ns is None and step.limit in (tiny_mlp.program.peak_bytes, 2**30)
    assert "the step fits without a plan" in str(step.report())
    step(*rows(256))


def test_a_fit_and_its_first_plan_leave_the_process_as_it_was(tiny_mlp: Tiny) -> None:
    for load in (edit_net.trained, policy_net.trained):  # the first use in a process constructs a network
        load.cache_clear()

    def drawing(program: Program, machine: Machine, limit: int) -> Plan:
        torch.rand(())
        return agents.make("best", seconds=0.5, min_bytes=0).plan(program, machine, limit)

    before = process_state()
    step = fit(*tiny_mlp.parts(), memory=0.9, planner=drawing)
    assert step.plan.decisions and process_state() == before


def test_any_planner(tiny_mlp: Tiny) -> None:
    calls: list[tuple[str, int]] = []

    def planner(program: Program, machine: Machine, limit: int) -> Plan:
        calls.append((machine.name, limit))
        return agents.make("autoswap_swdoa", min_bytes=64).plan(program, machine, limit)

    step = fit(*tiny_mlp.parts(), 0.8, planner=planner, machine="h100")
    assert calls == [("h100", step.limit)] and step.plan.planner == "autoswap_swdoa" and step.floor_ns is None
    assert fit(*tiny_mlp.parts(), 0.8, planner="autoswap_swdoa").plan.decisions
    assert fit(*tiny_mlp.parts(), 0.8, seconds=0.5).plan.decisions


def test_a_plan_for_a_part_of_the_link_loses_nothing_while_copies_reach_it(tiny_mlp: Tiny) -> None:
    """Copies at any speed between the margin and the link's cost no more than the margin's prediction."""
    machine = replace(GPU, h2d_bytes_per_s=10**8, d2h_bytes_per_s=10**8, duplex_h2d_bytes_per_s=8 * 10**7)

    def planner(program: Program, machine: Machine, limit: int) -> Plan:
        return agents.make("annealing", calls=300, min_bytes=64).plan(program, machine, limit)

    def times_of(**options: Any) -> tuple[Plan, list[int]]:
        step = fit(*tiny_mlp.parts(), 0.7, planner=planner, machine=machine, **options)
        links = [machine.with_link(share) for share in (1, 0.9, 0.8)]
        times = [simulate(step.program, step.plan, link, step.limit).iteration_ns for link in links]
        assert step.report().iteration_ns == times[0]
        return step.plan, times

    plan, times = times_of()
    assert plan.decisions == planner(tiny_mlp.program, machine.with_link(0.8), plan.limit).decisions
    assert times[0] == times[2] < times_of(link_margin=1)[1][2]
    with pytest.raises(ValueError, match=r"link_margin: expected a number in \(0, 1\], got 0"):
        fit(*tiny_mlp.parts(), 0.7, link_margin=0)


@pytest.mark.parametrize("served", [2, None])
def test_a_step_without_graph_is_planned_for_what_the_allocator_serves(
    served: int | None, tiny_mlp: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernel by kernel, PyTorch's allocator leaves holes: the plan is for the first limit at which it serves them."""
    limits: list[int] = []
    timelines: list[Any] = []

    def planner(program: Program, machine: Machine, limit: int) -> Plan:
        limits.append(limit)
        return agents.make("capuchin", min_bytes=64).plan(program, machine, limit)

    def under_plan(card: Any, timeline: Any) -> tuple[int, bool]:
        timelines.append(timeline)
        return card.memory_bytes, len(timelines) - 1 == served

    monkeypatch.setattr(MODULE, "device_of", lambda captured: torch.device("cuda"))
    monkeypatch.setattr(MODULE, "under_plan", under_plan)
    peak = tiny_mlp.program.peak_bytes
    monkeypatch.setattr(MODULE, "card_peak", lambda *args: DevicePeak(peak, 0, 0, 0, 0, args[-1], False))
    memory = 9 * peak // 10
    options = {"planner": planner, "machine": GPU, "profile": measure(tiny_mlp.captured, "cpu", "here")}
    with pytest.warns(UserWarning, match="expandable_segments") if served is None else contextlib.nullcontext():
        step = fit(*tiny_mlp.parts(), memory, **options)
    whole = step.limit
    expected = [int(whole * share) for share in SHARES]
    assert limits == expected[: len(limits)] and len(limits) == (len(SHARES) if served is None else 3)
    assert step.plan.limit == (whole if served is None else expected[2])


def test_durations_are_a_roofline_or_measured(tiny_mlp: Tiny) -> None:
    def fitted(**options: Any) -> Any:
        return fit(*tiny_mlp.parts(), 1, **options)

    modeled, other = (tiny_mlp.captured.on(Machine.load(m)).program.ideal_ns for m in ("gtx1080ti", "rtx2080ti"))
    assert fitted().report().ideal_ns == modeled != other == fitted(machine="rtx2080ti").report().ideal_ns
    profile = measure(tiny_mlp.captured, "cpu", "here")
    step = fitted(profile=profile)
    assert tuple(k.duration_ns for k in step.captured.program.kernels) == profile.durations_ns
    with pytest.raises(FitError, match=r"^the profile is of another program .*: a profile covers one batch shape"):
        step(*rows(3))
    step(*rows(256))
    with pytest.raises(FormatError, match="the profile is of another program"):
        fit(*tiny_mlp.parts()[:3], rows(3), 1, profile=profile)
    assert fitted(profile="measure").report().ideal_ns not in (modeled, sum(profile.durations_ns))


def test_options_of_the_capture_pass_through(monkeypatch: pytest.MonkeyPatch, tiny_mlp: Tiny) -> None:
    passed: dict[str, Any] = {}

    def record(*args: Any, **options: Any) -> Captured:
        passed.update(options)
        return capture(*args, **options)

    monkeypatch.setattr(CAPTURE, record)
    options: dict[str, Any] = {
        "accumulate": 2,
        "average": False,
        "clip_norm": 1.0,
        "autocast": torch.bfloat16,
        "bucket_bytes": 1000,
    }
    fit(*tiny_mlp.parts(), 1, **options)
    assert {key: passed[key] for key in options} == options
    scaler = torch.amp.GradScaler("cpu")
    fit(*tiny_mlp.parts(), 1, scaler=scaler)
    assert passed["scaler"] is scaler and passed["bucket_bytes"] == 64 * 2**20


@pytest.mark.parametrize("in_backward", [False, True, "auto"])
def test_a_plan_is_found_at_the_smallest_memory_that_is_named(in_backward: InBackward, tiny_mlp: Tiny) -> None:
    program = with_early_update(tiny_mlp.captured, in_backward).program
    least = least_residency(program, program.peak_bytes // 1000)
    with pytest.raises(FitError, match=rf"the smallest feasible memory is {least:,} bytes"):
        fit(*tiny_mlp.parts(), least - 1, optimizer_in_backward=in_backward)
    step = fit(*tiny_mlp.parts(), least, seconds=1.0, optimizer_in_backward=in_backward)
    step(*rows(256))
    assert step.peak_bytes <= least


@pytest.mark.parametrize(
    ("match", "options"),
    [
        ("there is no planner 'lp_rund'; the nearest is 'lp_round'", {"planner": "lp_rund"}),
        ("'none' has no option 'seconds'", {"planner": "none", "seconds": 1.0}),
        ("^seconds:", {"planner": lambda *_: Plan(), "seconds": 1.0}),
        ("^profile:.*'cold'", {"profile": "cold"}),
        ("^accumulate: .* got 0", {"accumulate": 0}),
        ("^example_batch: .*Tensor", {"example_batch": torch.zeros(2, 16)}),
    ],
)
def test_wrong_arguments_are_refused_before_the_capture(
    match: str, options: Any, tiny_mlp: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CAPTURE, lambda *_, **__: pytest.fail("captured"))
    model, loss_fn, optimizer, batch = tiny_mlp.parts()
    with pytest.raises(ValueError, match=match):
        fit(model, loss_fn, optimizer, options.pop("example_batch", batch), 0.8, **options)


def test_batches_of_every_shape(tiny_mlp: Tiny) -> None:
    """Each shape is planned once with the first shape's limit, and planning draws no random numbers."""
    twins = Fitted(tiny_mlp.parts, 0.7, rows, planner="capuchin")
    step = twins.step
    limit = step.limit
    first = step.plan
    for count in (256, 300, 256, 64, 300):
        batch = rows(count)
        state = torch.get_rng_state()
        step.step_for(*batch)
        assert torch.equal(state, torch.get_rng_state())
        twins.train_on(count)
        assert step.limit == step.current.limit == limit and step.report().limit == limit
        assert step.report().without.nbytes == step.program.peak_bytes == step.captured.program.peak_bytes
    assert len(step.steps) == 3 and step.current.captured.leaves[0].meta["tensor_meta"].shape[0] == 300
    assert first.decisions and step.plan.decisions and step.plan != first and step.peak_bytes <= limit
    twins.train_on(64)
    assert not step.plan.decisions and "the step fits without a plan" in str(step.report())
    with pytest.raises(FitError, match=r"^Sequential does not fit into .* with a batch of \[4096, 16\], \[4096\]"):
        step(*rows(4096))
    twins.compare()
    assert len(step.steps) == 3 and step.report().limit == limit
    twins.train_on(256)


def test_micro_batches_of_every_shape(tiny_mlp: Tiny) -> None:
    twins = Fitted(tiny_mlp.parts, 0.7, rows, accumulate=2, planner="capuchin")
    for counts in ((256, 256), (300, 256), (256,), (256, 256)):
        twins.train_on(*counts)
    assert sum(bool(step.plan.decisions) for step in twins.step.steps.values()) >= 2
    assert twins.step.peak_bytes <= twins.step.limit
    model, loss_fn, optimizer, _ = tiny_mlp.parts()
    step = fit(model, loss_fn, optimizer, (rows(300), rows(256)), 1, accumulate=2)  # examples of other shapes
    step(rows(300), rows(256))
    assert len(step.steps) == 1


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA GeForce GTX 1080 Ti", "gtx1080ti"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx2080ti"),
        ("Tesla K40c", "k40c"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("NVIDIA A100-SXM4-40GB", "a100_40gb"),
        ("NVIDIA A100-SXM4-80GB", "a100_80gb"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 3060", "rtx3060"),
        ("NVIDIA GeForce RTX 4060", "rtx4060"),
        ("NVIDIA A40", "a40"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx6000_ada"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GH200 480GB", ""),
        ("NVIDIA A100-SXM-64GB", ""),
        ("NVIDIA L40", ""),
        ("NVIDIA A10G", ""),
        ("NVIDIA GB200", ""),
        ("Quadro RTX 6000", ""),
        ("NVIDIA GeForce RTX 4090 D", ""),
        ("NVIDIA GeForce GTX 1080", ""),
        ("NVIDIA GeForce RTX 3060 Ti", ""),
        ("NVIDIA GeForce RTX 4060 Laptop GPU", ""),
        ("NVIDIA RTX A4000", ""),
    ],
)
def test_a_gpu_has_the_preset_of_its_name_or_asks_for_a_machine(device: str, name: str) -> None:
    if not name:
        with pytest.raises(FitError, match=f"no preset for '{device}' .*: pass machine=.*executor.calibrate"):
            MODULE.machine_of(device)
        return
    machine = MODULE.machine_of(device)
    preset = Machine.load(name)
    assert machine.name == name and machine.h2d_bytes_per_s == preset.h2d_bytes_per_s
    assert 0 < machine.host_bytes <= preset.host_bytes


def test_results_that_the_loop_holds_count_as_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory in bytes is device memory: an extra result is alive until the next step returns one."""
    monkeypatch.setattr(MODULE, "device_of", lambda captured: torch.device("cuda"))
    monkeypatch.setattr(MODULE, "measure", lambda c, device, name, cache: measure(c, "cpu", name))
    model = nn.Sequential(nn.Linear(4, 512), nn.ReLU())
    x = torch.randn(2048, 4)
    y = torch.randn(2048, 512)

    def mean(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).abs().mean()

    def with_output(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return mean(out, y), out

    peaks: list[Any] = []
    card_peak = MODULE.card_peak
    monkeypatch.setattr(MODULE, "card_peak", lambda *args: peaks.append(card_peak(*args)) or peaks[-1])
    for loss_fn, keep in ((mean, False), (with_output, False), (mean, True)):
        fit(model, loss_fn, sgd(model), (x, y), "4GiB", machine="h100", keep_grads=keep)
    without, returned, accumulated = (peak.loop for peak in peaks)
    assert returned == without + 2048 * 512 * 4 and accumulated == without


def test_a_gpu_is_measured(monkeypatch: pytest.MonkeyPatch, tiny_mlp: Tiny) -> None:
    """``fit`` profiles a GPU by default; everything else in this test runs on the CPU."""
    calls: list[Any] = []
    monkeypatch.setattr(MODULE, "device_of", lambda captured: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(
        MODULE, "measure", lambda c, device, name, cache: calls.append((device, name, cache)) or measure(c, "cpu", name)
    )
    step = fit(*tiny_mlp.parts(), 0.8, planner="capuchin")
    assert calls == [(torch.device("cuda"), "h200", "step")] and step.machine.name == "h200"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L40")
    with pytest.raises(FitError, match="no preset for 'NVIDIA L40'"):
        fit(*tiny_mlp.parts(), 0.8)
    assert fit(*tiny_mlp.parts(), 0.8, machine="h100", planner="capuchin").machine.name == "h100"


def test_a_step_that_the_device_cannot_hold_is_timed_by_kernel(monkeypatch: pytest.MonkeyPatch, tiny_mlp: Tiny) -> None:
    """Kernels last longer in a step than alone, so a step is timed where it fits."""
    caches: list[str] = []

    def measured(captured: Any, device: Any, name: str, cache: str) -> Any:
        caches.append(cache)
        if cache == "step":
            raise ProfileError("CUDA out of memory")
        return measure(captured, "cpu", name, repeats=1, cache=cache)

    monkeypatch.setattr(MODULE, "measure", measured)
    with pytest.warns(UserWarning, match="timed one by one, not in a step: CUDA out of memory"):
        fit(*tiny_mlp.parts(), 1.0, machine=GPU, profile="measure", planner="capuchin")
    assert caches == ["step", "cold"]


def test_a_missing_solver_suggests_another_planner(monkeypatch: pytest.MonkeyPatch, tiny_mlp: Tiny) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(FitError, match=r"^planner 'best' needs highspy, .*'capuchin'"):
        fit(*tiny_mlp.parts(), memory=0.8)
    assert fit(*tiny_mlp.parts(), memory=0.8, planner="capuchin").plan.planner == "capuchin"
