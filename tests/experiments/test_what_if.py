"""Tests the table *What if* of ``experiments.plan`` against steps that are captured with the change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import agents
from agents.floor import floor
from executor import capture as captured_step
from executor.capture.captured import Captured
from executor.capture.optimizers import BUCKET_BYTES
from experiments.plan import __main__ as command, capture, planning, what_if, words
from experiments.plan.answer import Answer, Change, Largest
from experiments.plan.page import render_html
from simulator import Machine
from simulator.compiled.engine import simulate
from simulator.program import Program

pytestmark = pytest.mark.usefixtures("counted")
MACHINE = Machine.load("rtx4090")
LENGTH = 256


def llama(vocabulary: int = 2000, layers: int = 2) -> nn.Module:
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).train()


def loss_fn(out: Any, y: Tensor) -> Tensor:
    return out if isinstance(out, Tensor) else F.cross_entropy(out.logits.flatten(0, 1), y.flatten())


def step_of(model: nn.Module, batch: int = 4, length: int = LENGTH, **options: Any) -> Captured:
    x = torch.zeros(batch, length, dtype=torch.long, device="meta")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    options = {"machine": MACHINE, "as_cuda": True, "bucket_bytes": BUCKET_BYTES, "check": False, **options}
    return captured_step(model, loss_fn, optimizer, (x, x), **options)


class FusedLoss(torch.autograd.Function):
    """Linear layer and cross-entropy by chunks, which computes the gradients in the forward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, y: Tensor) -> Tensor:
        grad = torch.empty_like(x)
        weight_grad = torch.zeros_like(weight)
        loss = x.new_zeros(())
        for rows, targets, out in zip(*(t.chunk(what_if.CHUNKS) for t in (x, y, grad)), strict=True):
            logits = F.log_softmax(rows @ weight.t(), 1)
            loss -= logits.gather(1, targets[:, None]).sum() / len(x)
            logits = logits.exp().scatter_add_(1, targets[:, None], -torch.ones_like(targets[:, None], dtype=x.dtype))
            logits /= len(x)
            out.copy_(logits @ weight)
            weight_grad.addmm_(logits.t(), rows)
        ctx.save_for_backward(grad, weight_grad)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return x * grads[0], weight.mul_(grads[0]), None


class Chunked(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.model.model(ids).last_hidden_state.flatten(0, 1)
        return FusedLoss.apply(hidden, self.model.lm_head.weight, ids.flatten())


@pytest.fixture(scope="module")
def captured() -> Captured:
    return step_of(llama())


def test_checkpoints_of_every_block_are_as_captured(captured: Captured) -> None:
    model = llama()
    model.gradient_checkpointing_enable()
    real = step_of(model).program
    program = captured.program
    plan = what_if.planned("checkpoint_blocks", program, MACHINE)
    assert plan is not None
    timeline = simulate(program, plan, MACHINE, program.peak_bytes)
    assert timeline.peak_bytes == pytest.approx(real.peak_bytes, rel=0.02)
    assert timeline.iteration_ns == pytest.approx(real.ideal_ns, rel=0.02)


@pytest.mark.nightly
def test_half_the_batch_twice_is_as_captured() -> None:
    model = llama()
    real = step_of(model, batch=2, accumulate=2).program
    half = what_if.accumulating(step_of(llama(), batch=2).program)
    assert half.peak_bytes == pytest.approx(real.peak_bytes, rel=0.02)
    update_ns = sum(kernel.duration_ns for kernel in half.kernels if kernel.phase == "optimizer")
    assert 2 * half.ideal_ns - update_ns == pytest.approx(real.ideal_ns, rel=0.1)  # without the additions


@pytest.mark.nightly
def test_a_loss_in_chunks_is_as_captured() -> None:
    program = step_of(llama(32000)).program
    real = step_of(Chunked(llama(32000))).program
    assert what_if.with_chunked_loss(program).peak_bytes == pytest.approx(real.peak_bytes, rel=0.02)
    assert real.peak_bytes < 0.6 * program.peak_bytes


def test_a_step_without_logits_has_no_chunks() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    x = torch.zeros(8, 64, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    program = captured_step(model, F.mse_loss, optimizer, (x, x[:, :1]), as_cuda=True, check=False).program
    assert what_if.with_chunked_loss(program) == program


def test_8_bit_states_have_a_byte_and_a_share_of_a_scale(captured: Captured) -> None:
    step = step_for(captured)
    small = what_if.with_8_bit_states(captured.program, step.item_bytes)
    parameters = [p.numel() for p in llama().parameters() if p.numel() >= what_if.LEAST_STATES]
    scales = sum(4 * -(-n // what_if.BLOCK) for n in parameters)
    saved = sum(t.nbytes - u.nbytes for t, u in zip(captured.program.tensors, small.tensors, strict=True))
    assert saved == 2 * (sum(parameters) * 3 - scales)
    assert captured.program.peak_bytes - small.peak_bytes == saved
    assert 0.8 * captured.program.ideal_ns < small.ideal_ns < captured.program.ideal_ns
    half = what_if.with_8_bit_states(captured.program, tuple(min(n, 2) for n in step.item_bytes))
    assert half.peak_bytes > small.peak_bytes  # of states in bfloat16 less is saved


def test_the_optimizer_in_the_backward_pass_is_as_captured() -> None:
    """With few tokens, gradients of all weights are most of the peak."""
    captured = step_of(llama(), batch=1, length=8, bucket_bytes=2**18)
    real = step_of(llama(), batch=1, length=8, bucket_bytes=2**18, optimizer_in_backward=True).program
    rows = {row.name: row for row in what_if.changes(answer(captured, 1.0), step_for(captured), None, 1.0, 0)}
    assert rows[what_if.EARLY].nbytes == real.peak_bytes < 0.98 * captured.program.peak_bytes
    assert rows[what_if.EARLY].overhead == pytest.approx(0, abs=1e-3)
    moved = what_if.changes(answer(captured, 1.0), step_for(captured)._replace(in_backward=True), None, 1.0, 0)
    assert moved[0].name == what_if.EARLY and "clipping" in moved[0].exactness


def test_batch_norm_is_named_where_it_exists(captured: Captured) -> None:
    kernel = replace(captured.program.kernels[0], name="aten.native_batch_norm.default")
    program = replace(captured.program, kernels=(kernel, *captured.program.kernels[1:]))
    a = replace(answer(captured, 1.0), program=program)
    rows = {row.name: row.exactness for row in what_if.changes(a, step_for(captured), None, 1.0, 0)}
    assert rows[what_if.CHECKPOINT] == "same bits; batch norm: its statistics move twice"
    rows = {row.name: row.exactness for row in what_if.changes(answer(captured, 1.0), step_for(captured), None, 1.0, 0)}
    assert rows[what_if.CHECKPOINT] == "same bits"


def test_offloading_moves_every_activation_and_nothing_else(captured: Captured) -> None:
    program = captured.program
    moved = {d.tensor for d in what_if.offload_activations(program).decisions}
    kept = [t for t, tensor in enumerate(program.tensors) if tensor.kind == "activation" and t not in moved]
    assert moved and all(program.tensors[t].kind == "activation" for t in moved)
    for t in kept:
        phases = {program.kernels[k].phase for k in program.accesses[t] if program.kernels[k].name != "marker"}
        assert phases != {"forward", "backward"} or _adjacent(program, t)


def _adjacent(program: Program, t: int) -> bool:
    """Returns whether the backward pass uses a tensor directly after the forward pass does."""
    phases = {k: program.kernels[k].phase for k in program.accesses[t]}
    return any(phases.get(k + 1, phase) != phase for k, phase in phases.items())


# ------------------------------------------------------------------------------------ the table


def step_for(captured: Captured) -> capture.Step:
    """Returns the step as ``experiments.plan`` captures it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("experiments.workloads.load", lambda *_, **__: captured)
        return capture.step({}, MACHINE, None, "auto")


def answer(captured: Captured, share: float) -> Answer:
    """Returns the answer at a share of the peak, with one quick plan."""
    program = captured.program
    task = (program, MACHINE, int(share * program.peak_bytes))
    bound = floor(*task, "joint", detail=0.0)
    families = [planning.best_of("search", ["tensile"], task, "joint", 0)] if bound.feasible and share < 1 else []
    return command.make_answer(task, None, "joint", families, bound, Largest(), 0.0)


@pytest.fixture
def many(captured: Captured, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], tuple[Answer, list[Change]]]:
    """Returns the answer and the table at a share of the peak, by a quick planner."""
    monkeypatch.setattr(what_if.report, "make", lambda name, **_: agents.make("tensile"))

    half = step_of(llama(), batch=2).program

    def table(share: float) -> tuple[Answer, list[Change]]:
        a = answer(captured, share)
        return a, what_if.changes(a, step_for(captured), half, 1.0, 0)

    return table


def test_the_table_lists_what_saves_memory_and_the_plan_with_it(many: Any, captured: Captured) -> None:
    a, rows = many(0.6)
    names = [row.name for row in rows]
    assert names[0] == "as it is" and rows[0].nbytes == captured.program.peak_bytes and rows[0].overhead == 0
    assert {what_if.CHECKPOINT, what_if.EIGHT_BIT, what_if.HALF, what_if.OFFLOAD} <= {*names}
    assert len(names) == len({*names})
    for row in rows:
        assert row.fits == (row.nbytes <= a.limit)
        assert row is rows[0] or row.nbytes < rows[0].nbytes
    assert a.best is not None
    (plan,) = (row for row in rows if row.name == "this plan")
    assert plan.overhead == a.best.overhead and plan.nbytes == a.best.timeline.peak_bytes
    combined = [row for row in rows if row.name.startswith("a plan and ")]
    assert combined and all(row.fits for row in combined)
    heads, cells = words.what_if(replace(a, what_if=tuple(rows)))
    assert all(len(line) == len(heads) for line in cells)
    text = render_html(replace(a, what_if=tuple(rows)), "typed")
    assert "What if" in text and f"{what_if.HALF}: fit(…, accumulate=2)" in text


def test_adapters_are_named_where_all_weights_train_and_nothing_fits(many: Any, captured: Captured) -> None:
    a, rows = many(0.02)
    assert a.best is None and not any(row.fits for row in rows)
    a = replace(a, what_if=tuple(rows))
    (sentence,) = words.adapters(a)
    assert "LoRA" in sentence
    trained = what_if.trained_bytes(captured.program)
    assert a.size(trained) in sentence and trained > 3 * sum(p.numel() for p in llama().parameters()) * 4 * 0.99
    assert words.adapters(replace(a, what_if=(replace(rows[0], fits=True),))) == []
    frozen = llama()
    frozen.model.embed_tokens.requires_grad_(False)
    program = step_of(frozen).program
    assert what_if.trained_bytes(program) == 0
