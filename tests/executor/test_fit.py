"""``fit``: the step that comes out of one call trains as eager PyTorch does, and says what it does; every refusal."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import agents
from executor import Captured, FitError, capture, fit
from executor.capture.profile import measure
from simulator import FormatError, Machine, OutOfMemory, Plan, Program
from simulator.modes import least_residency
from tests.executor.networks import Batch, ResNet, adamw, images, sgd

MODULE = sys.modules["executor.fit"]  # executor.fit is the function
CAPTURE = "executor.training.planned_steps.capture"


def gpt2() -> nn.Module:
    sizes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 50, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def bert() -> nn.Module:
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForMaskedLM(BertConfig(**sizes, vocab_size=50, max_position_embeddings=8))


def tokens() -> Batch:
    return torch.randint(50, (2, 8)), torch.randint(50, (2, 8))


def of_logits(out: Any, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.logits.flatten(0, 1), y.flatten())


CASES = {"resnet": (ResNet, nn.CrossEntropyLoss(), images(16)), "gpt2": (gpt2, of_logits, tokens),
         "bert": (bert, of_logits, tokens)}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_three_steps_are_eager_pytorchs_to_the_bit(case: str) -> None:
    make, loss_fn, batch = CASES[case]
    torch.manual_seed(0)
    model = make()
    eager = copy.deepcopy(model)
    optimizer, other = adamw(model), adamw(eager)
    step = fit(model, loss_fn, optimizer, batch(), memory=0.7)
    assert step.plan.planner == "best" and step.limit == int(0.7 * step.program.peak_bytes)
    for _ in range(3):
        x, y = batch()
        state = torch.get_rng_state()
        planned = step(x, y)
        torch.set_rng_state(state)
        loss = loss_fn(eager(x), y)
        loss.backward()
        other.step()
        other.zero_grad()
        assert torch.equal(planned, loss.detach())
    for a, b in zip(model.state_dict().values(), eager.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        assert all(torch.equal(v, other.state[q][k]) for k, v in optimizer.state[p].items())
    assert step.peak_bytes <= step.limit
    found = step.report()
    assert found.under.nbytes <= found.limit < found.without.nbytes
    assert found.floor_ns is not None and found.ideal_ns <= found.floor_ns <= found.iteration_ns
    assert sum(found.under.modules.values()) == found.under.nbytes and found.without.place


def parts(width: int = 4) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer, Batch]:
    model = ResNet(width, 1)
    return model, nn.CrossEntropyLoss(), sgd(model), images(16)()


@cache
def captured() -> Captured:
    """Of ``parts``, as ``fit`` captures them."""
    return capture(*parts(), bucket_bytes=2**26)


@pytest.mark.parametrize("memory", [1, "1GiB"])
def test_what_fits_needs_no_plan(memory: int | str) -> None:
    def never(*_: Any) -> Plan:
        raise AssertionError("was asked")

    step = fit(*parts(), memory, planner=never)
    assert step.plan.decisions == () and step.floor_ns is None
    assert "the step fits without a plan: nothing is moved" in str(step.report())
    step(*images(16)())


def test_bytes_are_bytes() -> None:
    limit = int(0.8 * captured().program.peak_bytes)
    assert fit(*parts(), limit).limit == limit == fit(*parts(), f"{limit}B").limit


def test_any_planner() -> None:
    asked: list[tuple[str, int]] = []

    def planner(program: Program, machine: Machine, limit: int) -> Plan:
        asked.append((machine.name, limit))
        return agents.make("autoswap_swdoa", min_bytes=64).plan(program, machine, limit)

    step = fit(*parts(), 0.8, planner=planner, machine="h100")
    assert asked == [("h100", step.limit)] and step.plan.planner == "autoswap_swdoa" and step.floor_ns is None
    assert fit(*parts(), 0.8, planner="autoswap_swdoa").plan.decisions
    assert fit(*parts(), 0.8, seconds=0.5).plan.decisions


def test_durations_are_a_roofline_or_measured() -> None:
    machine = Machine.load("rtx2080ti")
    modelled = captured().program.ideal_ns  # gtx1080ti
    assert fit(*parts(), 1).report().ideal_ns == modelled
    there = capture(*parts(), bucket_bytes=2**26, machine=machine).program.ideal_ns
    assert fit(*parts(), 1, machine=machine).report().ideal_ns == there != modelled
    profile = measure(captured(), "cpu", "here")
    step = fit(*parts(), 1, profile=profile)
    assert tuple(k.duration_ns for k in step.captured.program.kernels) == profile.durations_ns
    measured = fit(*parts(), 1, profile="measure").report()
    assert measured.ideal_ns not in (modelled, sum(profile.durations_ns))


def test_a_bfloat16_step_has_the_roofline_of_bfloat16() -> None:
    model = nn.Linear(512, 512, dtype=torch.bfloat16)
    x = torch.empty(256, 512, dtype=torch.bfloat16)
    batch = x, x.clone()
    machine = Machine("fast", 2**34, 10**10, 10**10, flops_per_s={"float32": 10**9, "bfloat16": 10**12},
                      memory_bytes_per_s=10**12)  # fmt: skip
    fast = capture(model, nn.MSELoss(), sgd(model), batch, machine=machine).program.ideal_ns
    model, batch = nn.Linear(512, 512), tuple(t.float() for t in batch)
    slow = capture(model, nn.MSELoss(), sgd(model), batch, machine=machine).program.ideal_ns
    model, batch = model.bfloat16(), tuple(t.bfloat16() for t in batch)
    assert fit(model, nn.MSELoss(), sgd(model), batch, 1, machine=machine).report().ideal_ns == fast < slow / 2


def test_options_of_the_capture_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}

    def noted(*args: Any, **options: Any) -> Captured:
        given.update(options)
        return capture(*args, **options)

    monkeypatch.setattr(CAPTURE, noted)
    options: dict[str, Any] = {
        "accumulate": 2,
        "average": False,
        "clip_norm": 1.0,
        "autocast": torch.bfloat16,
        "bucket_bytes": 1000,
    }
    step = fit(*parts(), 0.8, **options)
    batch = images(16)
    step(batch(), batch())
    scaler = torch.amp.GradScaler("cpu")
    fit(*parts(), 1, scaler=scaler)
    assert given["scaler"] is scaler and given["bucket_bytes"] == 64 * 2**20
    given.clear()
    fit(*parts(), 1, **options)
    assert {key: given[key] for key in options} == options


def test_a_plan_is_found_at_the_smallest_memory_that_is_named() -> None:
    program = captured().program
    least = least_residency(program, program.peak_bytes // 1000)
    with pytest.raises(FitError, match=rf"the smallest memory that has a plan is {least:,} bytes"):
        fit(*parts(), least - 1)
    step = fit(*parts(), least, seconds=1.0)
    step(*images(16)())
    assert step.peak_bytes <= least


def refused(match: str, error: type[Exception] = FitError, memory: Any = 0.8, **options: Any) -> None:
    with pytest.raises(error, match=match) as found:
        fit(*parts(), memory, **options)
    assert "\n" not in str(found.value)


def test_refusals() -> None:
    refused(r"^ResNet does not fit into 2.00 KiB with a batch of \[2, 3, 16, 16\], \[2\]: the smallest memory that has "
            r"a plan is [\d,]+ bytes \([\d.]+ KiB\), [\d.]+ KiB of which aten\.convolution_backward\.default of "
            r"blocks\.0\.body\.3 uses at once; [\d.]+ KiB are there from step to step \(parameters .*, optimizer state "
            r".*\), and the step needs [\d.]+ KiB without a plan$", memory="2KiB")  # fmt: skip
    refused("memory: expected a positive fraction", FormatError, memory="24G")
    refused("there is no planner 'lp_rund'; the nearest is 'lp_round'", ValueError, planner="lp_rund")
    refused("'none' has no option 'seconds'", ValueError, planner="none", seconds=1.0)
    refused("seconds: is for a planner given by its name", ValueError, planner=lambda *_: Plan(), seconds=1.0)
    refused("profile: expected None, 'measure' or a Profile, got 'cold'", ValueError, profile="cold")
    refused("there is no preset 'h1000'", FormatError, machine="h1000")
    refused(r"^no plan was found, though there may be some from [\d,]+ bytes on: none: ", planner="none")
    refused("over the limit", OutOfMemory, planner=lambda *_: Plan())
    model = ResNet(4, 2)
    profile = measure(capture(model, nn.CrossEntropyLoss(), sgd(model), images(16)()), "cpu")
    refused("the profile is of another program", FormatError, profile=profile)


def test_what_is_wrong_with_the_call_is_said_before_the_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CAPTURE, lambda *_, **__: pytest.fail("captured"))
    refused("there is no planner", ValueError, planner="lp_rund")
    refused("profile", ValueError, profile="cold")
    refused("accumulate: expected at least 1, got 0", ValueError, accumulate=0)
    with pytest.raises(ValueError, match=r"example_batch: expected a pair \(x, y\) or an object .*, got Tensor"):
        fit(*parts()[:3], torch.zeros(2, 3, 16, 16), 0.8)  # type: ignore[arg-type]


class Both:
    """A step and its eager twin, whose learning rates go down; gradients are clipped."""

    def __init__(self, memory: Any, **options: Any) -> None:
        model, self.loss_fn, optimizer, batch = parts()
        eager = copy.deepcopy(model)
        self.models, self.optimizers = (model, eager), (optimizer, sgd(eager))
        self.rates = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in self.optimizers]
        self.step = fit(model, self.loss_fn, optimizer, batch, memory, clip_norm=0.05, **options)

    def train(self, *counts: int) -> None:
        """A step of so many micro-batches."""
        self.step.begin(*(images(16, count)() for count in counts))
        for count in counts:
            x, y = images(16, count)()
            state = torch.get_rng_state()
            ours, drawn = self.step(x.clone(), y.clone()), torch.get_rng_state()  # away while the step is under way
            torch.set_rng_state(state)
            loss = self.loss_fn(self.models[1](x), y)
            loss = loss / len(counts) if len(counts) > 1 else loss
            loss.backward()
            assert torch.equal(ours, loss.detach()) and torch.equal(drawn, torch.get_rng_state())
        assert nn.utils.clip_grad_norm_(self.models[1].parameters(), 0.05) > 0.05
        self.optimizers[1].step()
        self.optimizers[1].zero_grad()
        for rate in self.rates:
            rate.step()
        self.compare()

    def compare(self) -> None:
        ours, theirs = self.models
        for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
            assert torch.equal(a, b)
        for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
            found = (o.state.get(w, {}).items() for o, w in zip(self.optimizers, (p, q), strict=True))
            assert all(torch.equal(v, w) for (_, v), (_, w) in zip(*found, strict=True))


def test_batches_of_every_shape() -> None:
    """Each is planned once, for the bytes of the first, and nothing that is drawn is drawn for it."""
    both = Both(0.7)
    step = both.step
    limit, first = step.limit, step.plan
    for count in (2, 3, 2, 1, 3):
        state = torch.get_rng_state()
        step.step_for(*images(16, count)())
        torch.set_rng_state(state)
        both.train(count)
        assert step.limit == step.present.limit == limit and step.report().limit == limit
        assert step.report().without.nbytes == step.program.peak_bytes == step.captured.program.peak_bytes
    assert len(step.steps) == 3 and step.present.captured.leaves[0].meta["tensor_meta"].shape[0] == 3
    assert first.decisions and step.plan.decisions and step.plan != first and step.peak_bytes <= limit
    assert step.floor_ns is not None
    both.train(1)
    assert not step.plan.decisions and "the step fits without a plan" in str(step.report())


def test_micro_batches_of_every_shape() -> None:
    both = Both(0.7, accumulate=2, planner="capuchin")
    for counts in ((2, 2), (3, 2), (2,), (2, 2)):
        both.train(*counts)
    assert sum(bool(step.plan.decisions) for step in both.step.steps.values()) >= 2
    assert both.step.peak_bytes <= both.step.limit
    model, loss_fn, optimizer, _ = parts()
    step = fit(model, loss_fn, optimizer, (images(16, 3)(), images(16)()), 0.7, accumulate=2)  # a step's own
    step(images(16, 3)(), images(16)())
    assert len(step.steps) == 1


def test_a_shape_for_which_there_is_no_plan_changes_nothing() -> None:
    both = Both(0.7)
    both.train(2)
    state = torch.get_rng_state()
    said = r"^ResNet does not fit into .* with a batch of \[64, 3, 16, 16\], \[64\]: the smallest memory"
    with pytest.raises(FitError, match=said):
        both.step(*images(16, 64)())
    torch.set_rng_state(state)
    both.compare()
    assert len(both.step.steps) == 1 and both.step.report().limit == both.step.limit
    both.train(2)
    both.train(1)


def test_a_profile_is_of_one_shape() -> None:
    step = fit(*parts(), 1, profile=measure(captured(), "cpu", "here"))
    with pytest.raises(FitError, match=r"^the profile is of another program .*: a batch of another shape needs one of "
                                       "its own, or 'measure'$"):  # fmt: skip
        step(*images(16, 3)())
    step(*images(16)())


@pytest.mark.parametrize(
    ("device", "name"),
    [("NVIDIA GeForce GTX 1080 Ti", "gtx1080ti"), ("NVIDIA GeForce RTX 2080 Ti", "rtx2080ti"), ("Tesla K40c", "k40c"),
     ("Tesla V100-SXM2-16GB", "v100"), ("NVIDIA A100-SXM4-40GB", "a100_40gb"), ("NVIDIA A100-SXM4-80GB", "a100_80gb"),
     ("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 3060", "rtx3060"),
     ("NVIDIA GeForce RTX 4060", "rtx4060"), ("NVIDIA A40", "a40")],
)  # fmt: skip
def test_a_gpu_has_the_preset_of_its_name(device: str, name: str) -> None:
    found, preset = MODULE.machine_of(device), Machine.load(name)
    assert found.name == name and found.h2d_bytes_per_s == preset.h2d_bytes_per_s
    assert 0 < found.host_bytes <= preset.host_bytes


@pytest.mark.parametrize(
    "device",
    [
        "NVIDIA GH200 480GB",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA L4",
        "NVIDIA GeForce GTX 1080",
        "NVIDIA GeForce RTX 3060 Ti",
        "NVIDIA GeForce RTX 4060 Laptop GPU",
        "NVIDIA RTX A4000",
    ],
)
def test_a_gpu_without_one_asks_for_a_machine(device: str) -> None:
    with pytest.raises(FitError, match=f"no preset is of '{device}' .*: give machine=.*executor.calibrate"):
        MODULE.machine_of(device)


def test_on_a_card_what_the_loop_has_of_the_last_step_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory in bytes is the card's: what a step returns beside the loss is there until the next one returns."""
    monkeypatch.setattr(MODULE, "device_of", lambda captured: torch.device("cuda"))
    monkeypatch.setattr(MODULE, "measure", lambda c, device, name: measure(c, "cpu", name))
    model = nn.Sequential(nn.Linear(4, 512), nn.ReLU())
    x, y = torch.randn(2048, 4), torch.randn(2048, 512)

    def mean(out: Tensor, y: Tensor) -> Tensor:
        return (out - y).abs().mean()

    def with_output(out: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return mean(out, y), out

    peaks: list[Any] = []
    card_peak = MODULE.card_peak
    monkeypatch.setattr(MODULE, "card_peak", lambda *given: peaks.append(card_peak(*given)) or peaks[-1])
    for loss_fn, keep in ((mean, False), (with_output, False), (mean, True)):
        fit(model, loss_fn, sgd(model), (x, y), "4GiB", machine="h100", keep_grads=keep)
    without, returned, kept = (peak.loop for peak in peaks)
    assert returned == without + 2048 * 512 * 4 and kept == without


def test_a_gpu_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default; the rest is as on the CPU, on which this runs."""
    asked: list[Callable[..., Any]] = []
    monkeypatch.setattr(MODULE, "device_of", lambda captured: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(
        MODULE, "measure", lambda c, device, name: asked.append((device, name)) or measure(c, "cpu", name)
    )
    step = fit(*parts(), 0.8)
    assert asked == [(torch.device("cuda"), "h200")] and step.machine.name == "h200"
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    refused("no preset is of 'NVIDIA L4'")
    assert fit(*parts(), 0.8, machine="h100").machine.name == "h100"


def test_without_the_solver_another_planner_is_named_and_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(
        FitError, match=r"^planner 'best' needs highspy, which is not here: install it, or .*'capuchin'"
    ):
        fit(*parts(), memory=0.8)
    assert fit(*parts(), memory=0.8, planner="capuchin").plan.planner == "capuchin"
