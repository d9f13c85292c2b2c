"""Tests checkpoints of every block by hand, and against captures of models that checkpoint their blocks."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import agents
from agents.heuristics.checkpoint_blocks import blocks
from executor import capture
from simulator import Kernel, Machine, Program, Rerun, Tensor as Storage, simulate
from tests.agents.planned import planned
from tests.programs import BYTE_PER_NS as MACHINE

A100 = Machine.load("a100_80gb")
STREAM = 64  # tokens


def chain(n: int = 3) -> Program:
    """Builds n blocks; block i reads x_i, writes h_i and g_i, and then x_(i+1), all of 10 bytes and 10 ns.

    forward    stem: → x_0    a_i: x_i → h_i    b_i: h_i → g_i    c_i: g_i, x_i → x_(i+1)
    backward   loss: x_n → ·    c'_i: g_i → ·    b'_i: h_i → ·    a'_i: x_i → ·
    """
    names = [f"x{i}" for i in range(n + 1)] + [f"h{i}" for i in range(n)] + [f"g{i}" for i in range(n)]
    index = {name: i for i, name in enumerate(names)}
    forward = [Kernel("stem", "matmul", "forward", (), (0,), 10, module="stem")]
    backward = [Kernel("loss", "reduce", "backward", (n,), (), 20)]
    for i in range(n):
        x, h, g, y = (index[name] for name in (f"x{i}", f"h{i}", f"g{i}", f"x{i + 1}"))
        own = f"body.layers.{i}"
        forward += [
            Kernel("a", "matmul", "forward", (x,), (h,), 10, module=f"{own}.first"),
            Kernel("b", "activation", "forward", (h,), (g,), 10, module=f"{own}.second.0"),
            Kernel("c", "elementwise", "forward", (g, x), (y,), 10, module=own),
        ]
        reads = (("a", x, ".first"), ("b", h, ".second.0"), ("c", g, ""))
        out = len(names)
        backward[1:1] = [
            Kernel(f"{name}'", "matmul", "backward", (t,), (out,), 20, module=own + module)
            for name, t, module in reversed(reads)
        ]
    tensors = (*(Storage(name, 10) for name in names), Storage("d", 0, "gradient"))
    return Program("blocks", tensors, (*forward, *backward))


def test_blocks_are_recomputed_at_once_by_hand() -> None:
    program = chain()
    assert {name: [program.kernels[k].name for k in ks] for name, ks in blocks(program).items()} == {
        f"body.layers.{i}": ["a", "b", "c"] for i in range(3)
    }
    # At c of the last block there are x_0 to x_3 and g, and at its c', which recomputes a and b, x_0 to x_2, h and g.
    plan = planned("checkpoint_blocks", program, MACHINE, 50)
    starts = [k for k, kernel in enumerate(program.kernels) if kernel.name == "c'"][::-1]
    expected = {Rerun(3 * i + step, start) for i, start in enumerate(starts) for step in (1, 2)}
    assert set(plan.decisions) == expected
    timeline = simulate(program, plan, MACHINE, 50)
    assert (program.peak_bytes, timeline.peak_bytes, timeline.iteration_ns - program.ideal_ns) == (100, 50, 60)


def test_programs_without_blocks_say_why() -> None:
    program = chain()
    nameless = replace(program, kernels=tuple(replace(k, module="") for k in program.kernels))
    layers = replace(program, kernels=tuple(replace(k, module="features.0") for k in program.kernels))
    for other, reason in ((nameless, "capture it again"), (layers, "no module list")):
        with pytest.raises(agents.Infeasible, match=f"no known blocks: {reason}"):
            planned("checkpoint_blocks", other, MACHINE, 100)
    assert nameless.fingerprint == program.fingerprint  # modules change no simulation


SMALL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 192,
        },
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 64, "n_layer": 3, "n_head": 4}),
    "bert": (
        "BertForMaskedLM",
        "BertConfig",
        {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 256},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 64, "d_kv": 16, "d_ff": 256, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0},
    ),
}


@cache
def language_model(name: str, checkpointed: bool, as_cuda: bool) -> Program:
    """Returns the step of a small model of transformers, with or without its own gradient checkpointing."""
    network, config, options = SMALL[name]
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    with torch.device("meta"):
        made = getattr(transformers, config)(vocab_size=1000, **options, **special)
        model = getattr(transformers, network)(made).train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    ids = torch.ones(8, STREAM, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    return capture(model, None, torch.optim.SGD(model.parameters()), batch, machine=A100, as_cuda=as_cuda).program


def assert_like(program: Program, checkpointed: Program) -> None:
    """Compares the plan of ``program`` with the captured step whose blocks are checkpointed: within 2 %."""
    plan = agents.make("checkpoint_blocks").plan(program, A100, program.peak_bytes)
    timeline = simulate(program, plan, A100, program.peak_bytes)
    assert checkpointed.peak_bytes < 0.7 * program.peak_bytes
    assert timeline.peak_bytes == pytest.approx(checkpointed.peak_bytes, rel=0.02)
    assert timeline.iteration_ns == pytest.approx(checkpointed.ideal_ns, rel=0.02)


@pytest.mark.parametrize("as_cuda", [True, pytest.param(False, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", SMALL)
def test_equals_gradient_checkpointing_enable(name: str, as_cuda: bool) -> None:
    assert_like(*(language_model(name, checkpointed, as_cuda) for checkpointed in (False, True)))


class ResNet(nn.Module):
    """Residual block of a U-Net; a 1 x 1 convolution changes the number of channels."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({"first": nn.GroupNorm(8, before), "second": nn.GroupNorm(8, after)})
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.shortcut = nn.Conv2d(before, after, 1) if before != after else nn.Identity()
        self.time = nn.Linear(64, after)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        hidden = self.conv1(nn.functional.silu(self.norms["first"](x)))
        hidden = hidden + self.time(nn.functional.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(nn.functional.silu(self.norms["second"](hidden)))


class Block(nn.Module):
    """Transformer block with attention to the image and to a text."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleDict({name: nn.LayerNorm(width) for name in ("image", "text", "feed")})
        self.image = nn.ModuleDict({name: nn.Linear(width, width) for name in ("q", "k", "v", "out")})
        self.text = nn.ModuleDict(
            {name: nn.Linear(width if name in ("q", "out") else 64, width) for name in self.image}
        )
        self.net = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attend(self, parts: nn.ModuleDict, x: Tensor, source: Tensor) -> Tensor:
        q, k, v = (
            parts[name](y).unflatten(2, (4, -1)).transpose(1, 2)
            for name, y in zip("qkv", (x, source, source), strict=True)
        )
        return parts["out"](nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        image = self.norms["image"](x)
        x = x + self.attend(self.image, image, image)
        x = x + self.attend(self.text, self.norms["text"](x), text)
        return x + self.net(self.norms["feed"](x))


class Spatial(nn.Module):
    """A transformer between projections, as in the latent diffusion model."""

    def __init__(self, width: int, run: Any) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.proj_in = nn.Conv2d(width, width, 1)
        self.transformer_blocks = nn.ModuleList([Block(width)])
        self.proj_out = nn.Conv2d(width, width, 1)
        self.run = run

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        hidden = self.proj_in(self.norm(x)).flatten(2).transpose(1, 2)
        for block in self.transformer_blocks:
            hidden = self.run(block, hidden, text)
        return x + self.proj_out(hidden.transpose(1, 2).unflatten(2, x.shape[2:]))


class Stage(nn.Module):
    """Residual blocks and transformers at one resolution, then a convolution that changes it."""

    def __init__(self, widths: list[tuple[int, int]], attends: bool, resample: nn.Module | None, run: Any) -> None:
        super().__init__()
        self.resnets = nn.ModuleList(ResNet(*pair) for pair in widths)
        self.attentions = nn.ModuleList(Spatial(after, run) for _, after in widths) if attends else None
        self.samplers = None if resample is None else nn.ModuleList([nn.Sequential(resample)])
        self.run = run

    def forward(self, x: Tensor, time: Tensor, text: Tensor, skips: list[Tensor], down: bool) -> Tensor:
        for i, resnet in enumerate(self.resnets):
            x = self.run(resnet, x if down else torch.cat([x, skips.pop()], 1), time)
            if self.attentions is not None:
                x = self.attentions[i](x, text)
            if down:
                skips.append(x)
        if self.samplers is not None:
            x = self.samplers[0](x)
            if down:
                skips.append(x)
        return x


class UNet(nn.Module):
    """U-Net of the structure of Stable Diffusion 1.5 with fewer and narrower stages."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        widths = (32, 64)
        self.conv_in = nn.Conv2d(4, widths[0], 3, padding=1)
        last = len(widths) - 1
        self.down_blocks = nn.ModuleList(
            Stage(
                [(before, after), (after, after)],
                i < last,
                nn.Conv2d(after, after, 3, stride=2, padding=1) if i < last else None,
                run,
            )
            for i, (before, after) in enumerate(pairwise((widths[0], *widths)))
        )
        kept = [widths[0]]  # channels of the skip connections
        for i, width in enumerate(widths):
            kept += [width] * (3 if i < last else 2)
        x = widths[-1]
        ups = []
        for i, width in reversed(list(enumerate(widths))):
            pairs = []
            for _ in range(3):
                pairs.append((x + kept.pop(), width))
                x = width
            grow = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(width, width, 3, padding=1)) if i else None
            ups.append(Stage(pairs, i < last, grow, run))
        self.up_blocks = nn.ModuleList(ups)
        self.conv_out = nn.Conv2d(widths[0], 4, 3, padding=1)

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        x = self.conv_in(x)
        skips = [x]
        for stage in self.down_blocks:
            x = stage(x, time, text, skips, True)
        for stage in self.up_blocks:
            x = stage(x, time, text, skips, False)
        return self.conv_out(x)


def unet(checkpointed: bool) -> Program:
    def run(module: nn.Module, *args: Tensor) -> Tensor:
        return checkpoint(module, *args, use_reentrant=False) if checkpointed else module(*args)

    with torch.device("meta"):
        model = UNet(run)
        batch = (torch.ones(4, 4, 32, 32), torch.ones(4, 64), torch.ones(4, 16, 64), torch.ones(4, 4, 32, 32))
    return capture(model, nn.MSELoss(), torch.optim.SGD(model.parameters()), batch, machine=A100, as_cuda=True).program


@pytest.mark.nightly
def test_blocks_of_a_unet_are_those_within_its_stages() -> None:
    program = unet(False)
    names = {name.split(".", 2)[2].rstrip("0123456789") for name in blocks(program)}
    assert {"resnets.", "attentions.0.transformer_blocks."} <= names
    assert_like(program, unet(True))
