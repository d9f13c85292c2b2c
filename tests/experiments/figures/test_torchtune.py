"""Tests captures of torchtune's steps on a small Llama, and that compiled functions compute what eager ones do."""

from dataclasses import replace

import pytest
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.nn import functional as F

from experiments.figures.torchtune import Torchtune
from experiments.figures.torchtune_compile import Compiled
from experiments.figures.torchtune_steps import (
    PAGED,
    TORCHAO,
    NF4Linear,
    Options,
    Recipe,
    RMSNorm,
    Sizes,
    cross_entropy,
    offloaded,
    rotate,
)
from simulator import Machine, Program, simulate
from tests.experiments.conftest import ROOT

SIZES = Sizes(
    layers=2, width=128, heads=4, kv_heads=2, hidden=256, vocabulary=2048, tied=True, batch_size=2, length=128
)
ALL = Options(compile=True, chunked_loss=True, checkpoint=True)
MACHINE = Machine.load("a100_80gb")


def program(options: Options, sizes: Sizes = SIZES) -> Program:
    return Recipe(sizes, options).capture(MACHINE, "small")


def nbytes(captured: Program, kind: str) -> int:
    return sum(tensor.nbytes for tensor in captured.tensors if tensor.kind == kind and tensor.persistent)


@pytest.mark.nightly
def test_each_option_saves_memory() -> None:
    steps = [Options(), Options(compile=True), ALL]
    peaks = [program(options).peak_bytes for options in steps]
    assert peaks == sorted(set(peaks), reverse=True)


def test_a_layer_saves_what_its_modules_do() -> None:
    one, two = (program(Options(), replace(SIZES, layers=n)) for n in (1, 2))
    added = nbytes(two, "parameter") - nbytes(one, "parameter")
    assert nbytes(two, "optimizer_state") - nbytes(one, "optimizer_state") == pytest.approx(2 * added, rel=0.01)
    tokens = SIZES.batch_size * SIZES.length
    norms = 2 * (4 + 2 + 2) * SIZES.width + 2 * 4  # input in float32, unit, result; the scale of each token
    attention = 4 * 2 * SIZES.width + 4 * SIZES.heads  # queries, repeated keys and values, result; log-sum-exp
    positions = 2 * 4 * SIZES.width // SIZES.heads  # sines and cosines in float32, for queries and for keys
    feed_forward = 4 * 2 * SIZES.hidden  # both products, the activation, the result
    saved = two.peak_bytes - one.peak_bytes - 3 * added  # weights and states; the peak is before their gradients
    assert saved == pytest.approx(tokens * (norms + attention + positions + feed_forward), abs=256)


def test_early_update_offloading_and_8_bits_save_memory() -> None:
    early = program(replace(ALL, early_update=True))
    assert len([k for k in early.kernels if "fused_adamw" in k.name]) == 9 * SIZES.layers + 2  # a kernel per weight
    plan = offloaded(early, SIZES)
    assert len(plan.decisions) == SIZES.layers - 1
    hidden = 2 * SIZES.batch_size * SIZES.length * SIZES.width
    assert {early.tensors[d.tensor].nbytes for d in plan.decisions if hasattr(d, "tensor")} == {hidden}
    assert simulate(early, plan, MACHINE, early.peak_bytes).peak_bytes <= early.peak_bytes
    states = nbytes(early, "optimizer_state")
    assert nbytes(TORCHAO.applied(early, MACHINE), "optimizer_state") == pytest.approx(states / 2, rel=0.05)
    assert nbytes(PAGED.applied(early, MACHINE), "optimizer_state") < 0.02 * states
    one_way = states / 2 / MACHINE.h2d_bytes_per_s
    assert PAGED.paging_s(early, MACHINE) == pytest.approx(2 * one_way, rel=0.05)


@pytest.mark.nightly
def test_lora_trains_its_parts_only_and_nf4_packs_the_rest() -> None:
    lora = Options(lora_rank=4, lora=("q", "v", "down"))
    packed_lora = replace(lora, compile=True, chunked_loss=True, checkpoint=True, nf4=True)
    plain, packed = program(lora), program(packed_lora)
    weights = SIZES.layers * 4 * (2 * 128 + (128 + 64) + (256 + 128))  # rank x (inputs + outputs)
    assert nbytes(plain, "optimizer_state") == pytest.approx(2 * 2 * weights, rel=0.05)
    frozen = SIZES.layers * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 128 * 256)
    saved = nbytes(plain, "parameter") - nbytes(packed, "parameter")
    codes = nbytes(packed, "buffer") - nbytes(plain, "buffer")
    assert saved == 2 * frozen
    assert codes == pytest.approx(frozen * (0.5 + 1 / 64), rel=0.03)


def test_a_compiled_function_computes_values_and_gradients() -> None:
    torch.manual_seed(0)
    norm = RMSNorm(64)

    def function(x: Tensor, scale: Tensor, weight: Tensor, table: Tensor) -> Tensor:
        y = torch.func.functional_call(norm, {"scale": scale}, (x,)) @ weight
        return F.silu(rotate(y.unflatten(2, (2, 32)), table).flatten(2)) * x

    shapes = (2, 8, 64), (64,), (64, 64), (1, 8, 1, 16, 2)
    args = [torch.randn(shape, requires_grad=True) for shape in shapes]
    compiled = Compiled(function, args)
    kinds = [step.is_fused for step in compiled.forward.steps]
    assert kinds.count(True) < 5 and len(kinds) < 8
    results = []
    for call in (function, compiled):
        result = call(*args)
        results.append((result.detach(), *torch.autograd.grad(result.square().sum(), args)))
    for eager, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, eager, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scatter", [False, True])
def test_the_loss_writes_its_gradient_once_unless_it_is_scattered(scatter: bool) -> None:
    logits = torch.randn(32, 50, requires_grad=True)
    labels = torch.randint(0, 50, (32,))
    with torch._inductor.config.patch(optimize_scatter_upon_const_tensor=not scatter):
        compiled = Compiled(cross_entropy, [logits, labels])
    loss = compiled(logits, labels)
    (gradient,) = torch.autograd.grad(loss, logits)
    (expected,) = torch.autograd.grad(cross_entropy(logits, labels), logits)
    torch.testing.assert_close(gradient, expected)
    assert [len(step.results) for step in compiled.backward.steps if step.is_fused] == [1] * (1 + scatter)


def test_nf4_weights_are_levels_times_scales() -> None:
    layer = NF4Linear(64, 8)
    layer.levels.copy_(torch.linspace(-1, 1, 16))
    layer.codes.fill_(0xF0)  # levels 15 and 0 in turn
    layer.scales.fill_(3)
    layer.factors.fill_(0.5)
    weight = layer(torch.eye(64)).T
    torch.testing.assert_close(weight, torch.tensor([1.5, -1.5]).repeat(8, 32))


def test_steps_with_one_capture_share_a_task() -> None:
    settings = OmegaConf.load(ROOT / "configs" / "figure" / "torchtune.yaml")
    assert isinstance(settings, DictConfig)
    tasks = Torchtune().tasks(settings)
    assert [list(task["steps"]) for task in tasks if len(task["steps"]) > 1] == [["early", "offload", "states"]]
    assert {name for task in tasks for name in task["steps"]} == {
        *Torchtune().published["steps"],
        *Torchtune().published["experiments"],
    }
