"""Tests transformers: arithmetic against references, programs against hand counts."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from executor import PlannedStep, capture
from experiments import workloads
from experiments.workloads import llama, transformers
from experiments.workloads.llama import RMSNorm, rms_norm
from simulator import Machine, Plan, Program
from simulator.files import FormatError
from tests.experiments.workloads.conftest import SMALL, config

GPU = Machine.load("h100")


@cache
def program(name: str, layers: int, dtype: str = "bfloat16") -> Program:
    return workloads.load({**config(name), "layers": layers, "dtype": dtype}, GPU).program


def flops(found: Program) -> int:
    return sum(kernel.flops for kernel in found.kernels)


@pytest.mark.nightly
def test_a_block_of_llama_3_by_hand():
    """Counts a second block at full size: 8192 tokens, width 4096, 32 heads of 128 (8 shared), hidden 14336."""
    one = program("llama3_8b", 1)
    two = program("llama3_8b", 2)
    tokens = 8192
    width = 4096
    shared = 1024
    hidden = 14336
    weights = 2 * width * width + 2 * width * shared + 3 * width * hidden
    attention = 4 * 32 * 128 * tokens**2 // 2  # causal: half of the pairs
    assert flops(two) - flops(one) == 3 * 2 * tokens * weights + attention + 5 * attention // 2
    numbers = weights + 2 * width  # plus two norms
    for kind, nbytes in (("parameter", 2 * numbers), ("optimizer_state", 2 * 2 * numbers + 9 * 4)):
        sizes = [sum(t.nbytes for t in p.tensors if t.kind == kind) for p in (one, two)]
        assert sizes[1] - sizes[0] == nbytes
    pairs = 2 * 32 * tokens**2  # no tensor is as large as all pairs of tokens
    assert max(t.nbytes for t in one.tensors if not t.persistent and t.nbytes != 4 * tokens * 128_256) < pairs


@pytest.mark.nightly
def test_a_block_of_mixtral_by_hand():
    """Every expert processes a quarter of the tokens: 2 of 8 experts."""
    found = program("mixtral", 1)
    tokens = 8192
    width = 4096
    hidden = 14336
    attention = 4 * 32 * 128 * tokens**2 // 2
    dense = 2 * width * width + 2 * width * 1024 + width * 8 + width * 32000  # with the router and the head
    experts = 8 * (tokens * 2 // 8) * 3 * width * hidden
    assert flops(found) == 6 * (tokens * dense + experts) + attention + 5 * attention // 2
    sizes = [t.nbytes for t in found.tensors if t.kind == "parameter" and ".feed.experts." in t.name]
    assert sizes == [2 * width * hidden] * 24


def test_dtype_is_that_of_tensors_and_of_the_roofline():
    entry = {**config("llama"), **SMALL}
    wide, narrow = (workloads.load({**entry, "dtype": d}, GPU).program for d in ("float32", "bfloat16"))
    assert workloads.load(entry, GPU).program == wide
    sizes = [{t.name: t.nbytes for t in p.tensors if t.kind == "parameter"} for p in (wide, narrow)]
    assert sizes[0] == {name: 2 * nbytes for name, nbytes in sizes[1].items()}
    product = next(k for k in program("llama3_8b", 1).kernels if k.flops)
    times = GPU.kernel_times
    seconds = product.flops / (GPU.flops_per_s["bfloat16"] * times.matmul)
    assert product.duration_ns == times.launch_ns + round(seconds * 1e9)
    with pytest.raises(FormatError, match="gtx1080ti has no figure for bfloat16"):
        workloads.load({**entry, "dtype": "bfloat16"}, Machine.load("gtx1080ti"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_torchs(dtype):
    torch.manual_seed(0)
    ours = RMSNorm(8, 1e-5).to(dtype)
    theirs = nn.RMSNorm(8, 1e-5).to(dtype)
    with torch.no_grad():
        for module in (ours, theirs):
            module.weight.copy_(torch.linspace(0.5, 2, 8))
    x = torch.randn(2, 3, 8, dtype=dtype)
    grad = torch.randn(2, 3, 8, dtype=dtype)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for module, given in zip((ours, theirs), inputs, strict=True):
        module(given).backward(grad)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_rms_norm_is_an_operator_like_torchs_own():
    torch.library.opcheck(
        rms_norm, (torch.randn(2, 3, 8, requires_grad=True), torch.randn(8, requires_grad=True), 1e-5)
    )
    norm = RMSNorm(8, 1e-5)
    captured = capture(norm, lambda y, _: y.sum(), torch.optim.SGD(norm.parameters()), (torch.randn(5, 8), None))
    kinds = [(k.phase, len(k.inputs), len(k.outputs)) for k in captured.program.kernels if k.kind == "norm"]
    assert kinds == [("forward", 2, 2), ("backward", 4, 2)]


def test_llama_is_that_of_transformers():
    """With the library's weights the logits agree: norms, rotary positions, grouped heads, SwiGLU."""
    torch.manual_seed(0)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=24,
            rms_norm_eps=1e-5,
        )
    )
    names = {"tokens": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    inside = {
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "attention.project": "self_attn.o_proj",
        **{f"attention.{part}": f"self_attn.{part}_proj" for part in "qkv"},
        **{f"feed.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
    }
    names |= {f"blocks.0.{ours}": f"model.layers.0.{name}" for ours, name in inside.items()}
    ours = llama.Llama(1, 16, 4, 2, 32, 5, lambda: llama.SwiGLU(16, 24))
    weights = theirs.state_dict()
    missing, unexpected = ours.load_state_dict({f"{a}.weight": weights[f"{b}.weight"] for a, b in names.items()}, False)
    assert set(missing) == {"cos", "sin"} and not unexpected
    words = torch.randint(32, (2, 5))
    torch.testing.assert_close(ours(words), theirs(words).logits.flatten(0, 1))


def test_experts_are_added_by_the_softmax_of_the_largest_logits():
    torch.manual_seed(0)
    layer = llama.Experts(8, 12, 4, 2, places=14)  # enough places for all tokens
    x = torch.randn(2, 7, 8)
    expected = torch.zeros(14, 8)
    for i, token in enumerate(x.flatten(0, 1)):
        logits = layer.router(token)
        order = logits.argsort(descending=True)[:2]
        for weight, e in zip(logits[order].softmax(0), order, strict=True):
            expected[i] += weight * layer.experts[int(e)](token)
    torch.testing.assert_close(layer(x).flatten(0, 1), expected)


def test_a_full_expert_takes_the_first_tokens():
    layer = llama.Experts(8, 12, 3, 2, places=2)
    places, held = layer.assign(torch.tensor([[0, 1], [0, 2], [1, 0], [1, 2]]))
    assert places.tolist() == [[0, 2], [1, 4], [3, 6], [6, 5]]  # 6: no place; expert 0 has 0 and 1, 1 has 2 and 3
    assert held.tolist() == [[True, True], [True, True], [True, False], [False, True]]
    layer = llama.Experts(8, 12, 1, 1, places=2)  # one expert for five tokens: three are dropped
    x = torch.randn(1, 5, 8)
    out = layer(x)
    torch.testing.assert_close(out[0, :2], layer.experts[0](x[0, :2]))
    assert not out[0, 2:].any()


@pytest.mark.parametrize("family", [llama.llama, llama.mixtral])
def test_a_captured_step_trains_as_eager_does(family):
    torch.manual_seed(0)
    own = {**SMALL, "length": 6} | ({"qk_norm": True} if family is llama.llama else {"experts": 3, "capacity": 0.7})
    model, loss_fn, optimizer, _ = family(**own)
    twin, _, other, _ = family(**own)
    twin.load_state_dict(model.state_dict())
    x = torch.randint(32, (1, 6))
    y = torch.randint(32, (6,))
    step = PlannedStep(capture(model, loss_fn, optimizer, (x, y)), Plan(()))
    for _ in range(2):
        expected = loss_fn(twin(x), y)
        expected.backward()
        other.step()
        other.zero_grad()
        torch.testing.assert_close(step(x, y), expected)
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_attention_of_vit_is_torchs():
    torch.manual_seed(0)
    block = transformers.Block(8, 2, 0.0, 1e-6)
    theirs = nn.MultiheadAttention(8, 2, batch_first=True)
    with torch.no_grad():
        theirs.in_proj_weight.copy_(block.qkv.weight)
        theirs.in_proj_bias.copy_(block.qkv.bias)
        theirs.out_proj.weight.copy_(block.project.weight)
        theirs.out_proj.bias.copy_(block.project.bias)
    x = torch.randn(2, 5, 8)
    y = block.norm1(x)
    middle = x + theirs(y, y, y)[0]
    expected = middle + block.down(F.gelu(block.up(block.norm2(middle))))
    torch.testing.assert_close(block(x), expected)
