"""Tests of CPU captures with CUDA operators: equal to programs captured on an H200, and each dispatch rule alone."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from executor.capture.capture import capture
from executor.capture.captured import Captured
from executor.capture.cuda_semantics import Attention, select_backend
from executor.capture.optimizers import BUCKET_BYTES
from executor.capture.reach import CaptureError
from executor.capture.recurrent import MODES, reserve_bytes
from experiments.measure.networks import build
from simulator.machine import Machine
from simulator.program import Program

ROOT = Path(__file__).parents[3]
H200 = Machine.load("h200")
NETWORKS = ["llama_bf16", "resnet50_imagenet_bf16", "gpt2_medium_bf16"]


def quick_network(network: str) -> pytest.MarkDecorator:
    """Returns the parameters: the first network runs in every test run, all others in nightly runs only."""
    marks = [pytest.param(n, marks=() if n == network else pytest.mark.nightly) for n in NETWORKS]
    return pytest.mark.parametrize("network", marks)


def untimed(program: Program) -> dict[str, Any]:
    """Returns a program without modules, and without durations and workspaces, which are measured on the GPU."""
    data = program.to_dict()
    for kernel in data["kernels"]:
        del kernel["duration_ns"], kernel["workspace"]
        kernel.pop("module", None)
    return data


@quick_network("llama_bf16")
def test_the_program_is_the_one_that_the_gpu_captured(network: str) -> None:
    """Compares kernels, their inputs and outputs, and bytes, traffic and FLOPs (PyTorch 2.11 on the GPU).

    Programs were captured there with gradients that live to the end of the step.
    """
    path = ROOT / "experiments" / "results" / "gpu_h200" / "graphs" / f"program-{network}.json.gz"
    measured = Program.from_dict(json.loads(gzip.decompress(path.read_bytes())))
    n = build(network, "meta")
    optimizer = (
        torch.optim.AdamW(n.model.parameters(), capturable=True) if network != "resnet50_imagenet_bf16" else n.optimizer
    )
    program = capture(
        n.model,
        n.loss_fn,
        optimizer,
        n.batch,
        machine=H200,
        name=network,
        bucket_bytes=BUCKET_BYTES,
        as_cuda=True,
        keep_grads=True,
    ).program
    assert [k.name for k in program.kernels] == [k.name for k in measured.kernels]
    assert program.peak_bytes == measured.peak_bytes
    assert untimed(program) == untimed(measured)


@quick_network("resnet50_imagenet_bf16")
def test_the_operators_are_those_of_the_profiled_step(network: str) -> None:
    """Captures one update per parameter, as in the oldest profiles."""
    profile = json.loads((ROOT / "tests" / "data" / "measured" / f"nvidia_h200-{network}.json").read_text())
    measured = [profile["operators"][k[0]]["name"] for k in profile["kernels"]]
    n = build(network, "meta")
    for group in n.optimizer.param_groups:
        group["foreach"] = group["fused"] = False
    program = capture(n.model, n.loss_fn, n.optimizer, n.batch, machine=H200, as_cuda=True).program
    assert [k.name for k in program.kernels if k.name != "marker"] == measured


# ------------------------------------------------------------------------------------------- attention

BF16 = torch.bfloat16
HALF = torch.float16
FLOAT = torch.float32
CUDNN = SDPBackend.CUDNN_ATTENTION
FLASH = SDPBackend.FLASH_ATTENTION
EFFICIENT = SDPBackend.EFFICIENT_ATTENTION
MATH = SDPBackend.MATH


def training_attention(capability: tuple[int, int], dtype: torch.dtype, width: int = 64, **changes: Any) -> Attention:
    """Returns training attention of two sequences of 32 tokens with eight heads."""
    q, k, v = (torch.empty(2, 8, 32, width, dtype=dtype, device="meta", requires_grad=True) for _ in range(3))
    return Attention(q, k, v, None, 0.0, True, False, capability)._replace(**changes)


MASK = torch.empty(2, 1, 32, 32, dtype=torch.bool, device="meta")
FEW_HEADS = {name: torch.empty(2, 2, 32, 64, dtype=BF16, device="meta") for name in ("key", "value")}
FEW_HEADS_FLOAT = {name: t.float() for name, t in FEW_HEADS.items()}
LONGER_KEYS = {name: torch.empty(2, 8, 48, 64, dtype=BF16, device="meta") for name in ("key", "value")}


@pytest.mark.parametrize(
    ("attention", "expected"),
    [
        (training_attention((9, 0), BF16), CUDNN),  # what the H200 ran
        (training_attention((10, 0), HALF), CUDNN),
        (training_attention((8, 0), BF16), FLASH),
        (training_attention((12, 0), BF16), FLASH),
        (training_attention((7, 5), HALF), EFFICIENT),
        (training_attention((7, 0), BF16), MATH),
        (training_attention((9, 0), FLOAT), EFFICIENT),
        (training_attention((6, 1), FLOAT, 20), EFFICIENT),
        (training_attention((3, 5), FLOAT), MATH),
        (training_attention((9, 0), torch.float64), MATH),
        (training_attention((9, 0), BF16, mask=MASK, is_causal=False), CUDNN),
        (training_attention((8, 6), BF16, mask=MASK, is_causal=False), EFFICIENT),
        (training_attention((9, 0), BF16, mask=MASK.float().requires_grad_(), is_causal=False), EFFICIENT),
        (training_attention((9, 0), BF16, dropout=0.125), CUDNN),
        (training_attention((9, 0), BF16, dropout=0.1), FLASH),  # cuDNN's has sixteenths
        (training_attention((9, 0), BF16, 20), FLASH),
        (training_attention((9, 0), FLOAT, 20), EFFICIENT),
        (training_attention((9, 0), FLOAT, 18), MATH),
        (training_attention((9, 0), BF16, 256), CUDNN),
        (training_attention((10, 0), BF16, 256), FLASH),
        (training_attention((8, 9), BF16, 256, dropout=0.1), EFFICIENT),
        (training_attention((9, 0), BF16, 264), EFFICIENT),
        (training_attention((9, 0), BF16, is_grouped=True, **FEW_HEADS), CUDNN),
        (training_attention((8, 0), BF16, is_grouped=True, **FEW_HEADS), FLASH),
        (training_attention((8, 0), FLOAT, is_grouped=True, **FEW_HEADS_FLOAT), MATH),
        (training_attention((8, 0), BF16, **LONGER_KEYS), EFFICIENT),  # causal, of other lengths
        (training_attention((8, 0), BF16, **LONGER_KEYS, is_causal=False), FLASH),
        (training_attention((9, 0), BF16, query=torch.empty(8, 32, 64, dtype=BF16)), MATH),
    ],
)
def test_the_kernel_of_attention(attention: Attention, expected: SDPBackend) -> None:
    assert select_backend(attention) == expected


def test_the_users_choice_of_a_kernel_counts() -> None:
    with sdpa_kernel([MATH, FLASH]):
        assert select_backend(training_attention((9, 0), BF16)) == FLASH
    with sdpa_kernel([MATH, FLASH], set_priority=True):
        assert select_backend(training_attention((9, 0), BF16)) == MATH
    with sdpa_kernel(CUDNN):
        assert select_backend(training_attention((8, 0), BF16)) == CUDNN
    with sdpa_kernel([CUDNN, FLASH, EFFICIENT, MATH], set_priority=True):  # as a GPU that is here may have set it
        assert select_backend(training_attention((8, 0), BF16)) == FLASH
    with sdpa_kernel(FLASH), pytest.raises(RuntimeError, match="No available kernel"):
        select_backend(training_attention((9, 0), FLOAT))


# ------------------------------------------------------------------------------------------- captures


def captured(model: nn.Module, x: Tensor, machine: Machine = H200, as_cuda: bool = True) -> Captured:
    """Captures an SGD step that minimizes the model's result."""
    model = model.to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return capture(model, lambda out, _: out.float().sum(), optimizer, (x, x), machine=machine, as_cuda=as_cuda)


def names(step: Captured) -> set[str]:
    return {kernel.name.removeprefix("aten.").partition(".")[0] for kernel in step.program.kernels}


class SelfAttention(nn.Module):
    def __init__(self, width: int, masked: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.masked = masked

    def forward(self, x: Tensor) -> Tensor:
        mask = x.new_ones(x.shape[2], x.shape[2]).tril().bool() if self.masked else None
        q = self.linear(x)
        return F.scaled_dot_product_attention(q, q, q, mask, is_causal=not self.masked)


@pytest.mark.parametrize(
    ("machine", "width", "masked", "expected"),
    [
        ("h200", 64, False, {"_scaled_dot_product_cudnn_attention"}),
        ("h200", 24, True, {"_scaled_dot_product_cudnn_attention", "where"}),
        ("a100_40gb", 64, False, {"_scaled_dot_product_flash_attention"}),
        ("a100_40gb", 20, False, {"_scaled_dot_product_flash_attention", "constant_pad_nd"}),  # to a width of 24
        ("a100_40gb", 24, True, {"_scaled_dot_product_efficient_attention", "where", "constant_pad_nd"}),
        ("rtx2080ti", 64, False, {"_scaled_dot_product_efficient_attention"}),
    ],
)
def test_every_kernel_of_attention_can_be_captured(machine: str, width: int, masked: bool, expected: set[str]) -> None:
    step = captured(SelfAttention(width, masked).half(), torch.empty(2, 4, 30, width).half(), Machine.load(machine))
    assert expected <= names(step) and ("constant_pad_nd" in names(step)) == ("constant_pad_nd" in expected)
    forward, backward = (k for k in step.program.kernels if "attention" in k.name)
    assert backward.name == forward.name.replace(".default", "_backward.default")
    rows = 2 * 4 * 30
    padded_width = width + -width % 8
    nbytes = [step.program.tensors[t].nbytes for t in forward.outputs]
    # Of each row of the result the logarithm of its sum is kept, in float32; efficient attention's in lots of 32 rows.
    assert nbytes[:2] == [rows * padded_width * 2, (2 * 4 * 32 if "efficient" in forward.name else rows) * 4]


def test_attention_depends_on_the_capability_of_the_gpu() -> None:
    used = names(captured(SelfAttention(64).half(), torch.empty(2, 4, 30, 64).half(), Machine.load("k40c")))
    assert {"bmm", "_safe_softmax"} <= used and not any("attention" in name for name in used)
    with pytest.raises(CaptureError, match=r"machine\.capability"):
        captured(SelfAttention(64), torch.empty(2, 4, 30, 64), replace(H200, capability=""))
    captured(nn.Linear(8, 8), torch.empty(2, 8), replace(H200, capability=""))  # nothing else depends on it


IMAGES = torch.empty(2, 8, 4, 4, device="meta")
ROWS = torch.empty(2, 8, device="meta")


@pytest.mark.parametrize(
    ("model", "x", "expected", "cudnn"),
    [
        (nn.BatchNorm2d(8), IMAGES, "cudnn_batch_norm", True),
        (nn.BatchNorm2d(8), IMAGES.half(), "cudnn_batch_norm", True),
        (nn.BatchNorm2d(8), IMAGES.bfloat16(), "native_batch_norm", True),
        (nn.BatchNorm1d(8), ROWS, "native_batch_norm", True),
        (nn.BatchNorm2d(8), IMAGES, "native_batch_norm", False),
        (nn.RMSNorm(8), ROWS, "_fused_rms_norm", True),
        (nn.RMSNorm(8).bfloat16(), ROWS, "rsqrt", True),
        (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.Dropout(0.5).eval()), ROWS, "addmm", True),
        (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)), ROWS, "native_dropout", True),
    ],
)
def test_operators_have_the_choice_of_cuda(model: nn.Module, x: Tensor, expected: str, cudnn: bool) -> None:
    with torch.backends.cudnn.flags(enabled=cudnn):
        ops = names(captured(model, x))
    assert expected in ops
    assert not ops & {"bernoulli_", "_scaled_dot_product_flash_attention_for_cpu"}
    assert ("native_dropout" in ops) == (expected == "native_dropout") and not (expected == "addmm" and "clone" in ops)
    assert (expected == "cudnn_batch_norm") == ("cudnn_batch_norm_backward" in ops)


@pytest.mark.parametrize(("reentrant", "runs"), [(None, 1), (False, 2), (True, 2)])
def test_layers_of_pytorch_have_cudas_operators_too_and_when_recomputed(reentrant: bool | None, runs: int) -> None:
    """PyTorch's own layer calls dropout and attention inside ``torch.nn.functional``."""

    class Encoder(nn.TransformerEncoderLayer):
        def forward(self, x: Tensor) -> Tensor:
            forward = super().forward
            return forward(x) if reentrant is None else checkpoint(forward, x, use_reentrant=reentrant)

    model = nn.Sequential(nn.Linear(16, 16), Encoder(16, 2, 32, 0.1, batch_first=True))
    kernels = captured(model, torch.empty(2, 8, 16, device="meta")).program.kernels
    used = [k.name.split(".")[1] for k in kernels if k.name != "marker"]
    assert used.count("native_dropout") == runs * 3 and "bernoulli_" not in used
    assert "_scaled_dot_product_efficient_attention" in used


def test_statistics_of_layer_norm_are_float32() -> None:
    model = nn.LayerNorm(64).bfloat16()
    x = torch.empty(32, 64, device="meta").bfloat16()
    for as_cuda, itemsize in ((False, 2), (True, 4)):
        program = captured(model, x, as_cuda=as_cuda).program
        forward, backward = (
            next(k for k in program.kernels if f"layer_norm{part}." in k.name) for part in ("", "_backward")
        )
        assert [program.tensors[t].nbytes for t in forward.outputs[1:]] == [32 * itemsize, 32 * itemsize]
        assert forward.bytes == 2 * (2 * 32 * 64 + 2 * 64) + 2 * 32 * itemsize
        assert (backward.bytes - 2 * 32 * itemsize) % (2 * 64) == 0


class Normed(nn.Module):
    """Layer norm, softmax and power, which only CUDA's autocast runs in float32, and padding, which only the CPU's."""

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.norm = nn.LayerNorm(64)
        self.device = device

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16) if self.device else nullcontext():
            x = self.linear(x)
            x = F.pad(x[None], (1, 1), "reflect")[0, :, :64]
            out: Tensor = self.linear(self.norm(x)).softmax(-1).pow(2)
        return out


@pytest.mark.parametrize("device", [None, "cpu", "cuda"])
def test_autocast_has_cudas_lists(device: str | None) -> None:
    model = Normed(device).to("meta")
    x = torch.empty(32, 64, device="meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def itemsizes(as_cuda: bool) -> dict[str, int]:
        """Returns the itemsize of each operator's first result."""
        step = capture(
            model,
            lambda out, _: out.sum(),
            optimizer,
            (x, x),
            machine=H200,
            as_cuda=as_cuda,
            autocast=None if device else torch.bfloat16,
        ).program
        return {k.name.split(".")[1]: step.tensors[k.outputs[0]].nbytes // (32 * 64) for k in step.kernels if k.outputs}

    cuda_sizes = itemsizes(True)
    assert cuda_sizes["addmm"] == 2 and cuda_sizes["reflection_pad1d"] == 2
    assert cuda_sizes["native_layer_norm"] == cuda_sizes["_softmax"] == cuda_sizes["pow"] == 4
    if device != "cuda":  # PyTorch disables it on the CPU
        cpu_sizes = itemsizes(False)
        assert cpu_sizes["native_layer_norm"] == 4 and cpu_sizes["reflection_pad1d"] == 4  # the CPU's pads in float32


def test_cpu_captures_are_unaffected() -> None:
    """PyTorch's operators dispatch as before after a successful and after a failed capture."""
    model = nn.Sequential(nn.RMSNorm(16), nn.Dropout(0.1))
    x = torch.empty(2, 8, 16)
    before = names(captured(model, x, as_cuda=False))
    captured(model, x)
    with pytest.raises(CaptureError):
        captured(nn.Sequential(model, nn.Linear(5, 5)), x)
    assert names(captured(model, x, as_cuda=False)) == before
    real = nn.Sequential(nn.RMSNorm(16), nn.Dropout(0.1))
    out = real(torch.ones(2, 16, requires_grad=True))
    out.sum().backward()
    assert "NativeDropout" not in type(out.grad_fn).__name__


# ------------------------------------------------------------------------------------------- recurrent layers


class Recurrent(nn.Module):
    """Two recurrent layers of 32 units, or (with cells) the same layers unrolled."""

    def __init__(self, kind: Callable[..., nn.Module], **options: Any) -> None:
        super().__init__()
        self.layers = kind(32, 32, 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)[0]
        return out


class Cells(nn.Module):
    """Two layers of cells of 32 units, unrolled."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.cells = nn.ModuleList(kind(32, 32) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for cell in self.cells:
            state = None
            rows = []
            for row in x:
                state = cell(row, state)
                rows.append(state[0] if isinstance(state, tuple) else state)
            x = torch.stack(rows)
        return x


SEQUENCES = torch.empty(8, 25, 32, device="meta")  # 200 rows


def outputs(step: Captured, name: str) -> list[int]:
    """Returns the bytes of the results of the step's only kernel with this name."""
    (kernel,) = (k for k in step.program.kernels if k.name == f"aten.{name}.default")
    return [step.program.tensors[t].nbytes for t in kernel.outputs]


@pytest.mark.parametrize(("mode", "nbytes"), [("lstm", 736_000_000), ("gru", 864_000_000)])
def test_the_reserve_space_is_the_published_one(mode: str, nbytes: int) -> None:
    """Of four float32 layers of 320 units; one number of rows, 25,000, gives both sizes."""
    assert reserve_bytes(MODES.index(mode), 25_000, 320, 320, layers=4, directions=1, itemsize=4) == nbytes


@pytest.mark.parametrize(
    ("kind", "cell", "saved"),
    [(nn.LSTM, nn.LSTMCell, 5), (nn.GRU, nn.GRUCell, 3), (nn.RNN, nn.RNNCell, 1)],
)
def test_recurrent_layers_keep_what_their_backward_pass_needs(
    kind: Callable[..., nn.Module], cell: Callable[..., nn.Module], saved: int
) -> None:
    """The reserve space has room for ``saved`` gates and cell states per unit; the cells of PyTorch keep more."""
    step = captured(Recurrent(kind), SEQUENCES)
    reserve = max(outputs(step, "_cudnn_rnn"))
    assert reserve >= 2 * 200 * 32 * saved * 4
    assert step.program.peak_bytes > reserve
    cells = captured(Cells(cell), SEQUENCES)
    assert cells.program.peak_bytes > 2 * 200 * 32 * saved * 4
    assert sum(k.flops for k in step.program.kernels) == pytest.approx(sum(k.flops for k in cells.program.kernels), 0.2)


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({}, 2 * 5 * 32 + 32),
        ({"batch_first": True, "bias": False}, 2 * 5 * 32 + 32),
        ({"bidirectional": True}, 2 * (2 * 5 * 32 + 32)),
        ({"proj_size": 8}, 2 * 5 * 32 + 8),
        ({"dropout": 0.5}, 2 * 5 * 32 + 32),
    ],
)
def test_the_reserve_space_of_the_variants_of_an_lstm(options: dict[str, Any], values: int) -> None:
    """Compares the results and their gradients with PyTorch's shapes."""
    model = Recurrent(nn.LSTM, **options)
    step = captured(model, SEQUENCES)
    expected = model(SEQUENCES).nbytes
    output, *_, reserve, flat_weights = outputs(step, "_cudnn_rnn")
    assert (output, reserve, flat_weights) == (expected, 200 * values * 4, 0)
    *_, gradients = outputs(step, "_cudnn_rnn_backward")
    assert gradients == sum(p.nbytes for p in model.parameters())


def test_autocast_runs_recurrent_layers_in_half_precision() -> None:
    model = Recurrent(nn.GRU).to("meta")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = SEQUENCES, SEQUENCES
    step = capture(
        model,
        lambda out, _: out.float().sum(),
        optimizer,
        batch,
        machine=H200,
        as_cuda=True,
        autocast=torch.bfloat16,
    )
    assert max(outputs(step, "_cudnn_rnn")) == 200 * (2 * 6 + 1) * 32 * 2


def test_without_cudnn_recurrent_layers_are_cells() -> None:
    with torch.backends.cudnn.flags(enabled=False):
        step = captured(Recurrent(nn.LSTM), SEQUENCES)
    assert not any("rnn" in name for name in names(step))
    assert step.program.peak_bytes > 2 * 200 * 32 * 5 * 4


def test_cudnn_has_no_backward_pass_of_a_layer_in_eval_mode() -> None:
    with pytest.raises(CaptureError, match=r"lstm.*train\(\).*cudnn\.enabled = False"):
        captured(Recurrent(nn.LSTM).eval(), SEQUENCES)
    model = Recurrent(nn.LSTM).eval().to("meta")
    batch = SEQUENCES, SEQUENCES
    step = capture(model, lambda out, _: out.sum(), None, batch, machine=H200, as_cuda=True)
    assert outputs(step, "_cudnn_rnn")[-2:] == [0, 0]


# ------------------------------------------------------------------------------------------- types


class Call(nn.Module):
    """Calls a function on the input and a float32 weight of eight by eight."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8, 8))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


DOUBLE_ROWS = torch.rand(8, 8, dtype=torch.float64)
DOUBLE_IMAGES = torch.rand(2, 8, 4, 4, dtype=torch.float64)


@pytest.mark.parametrize("as_cuda", [False, True])
@pytest.mark.parametrize(
    ("model", "x", "is_accepted"),
    [
        (nn.Linear(8, 8), DOUBLE_ROWS, False),
        (nn.Linear(8, 8), DOUBLE_ROWS.bfloat16(), False),
        (nn.LSTM(8, 8), DOUBLE_ROWS, False),
        (nn.Conv2d(8, 8, 3), DOUBLE_IMAGES, False),
        (nn.BatchNorm2d(8), DOUBLE_IMAGES, False),
        (nn.LayerNorm(8), DOUBLE_ROWS, False),
        (nn.GroupNorm(2, 8), DOUBLE_IMAGES, False),
        (Call(torch.matmul), DOUBLE_ROWS, False),
        (Call(lambda x, w: w.index_add(0, torch.arange(8), x)), DOUBLE_ROWS, False),
        (Call(lambda x, w: F.huber_loss(w, x)), DOUBLE_ROWS, False),
        (Call(lambda x, w: F.binary_cross_entropy(w, x)), DOUBLE_ROWS, False),
        (Call(lambda x, w: F.mse_loss(w, x)), DOUBLE_ROWS, True),
        (Call(torch.mul), DOUBLE_ROWS, True),
        (nn.RMSNorm(8), DOUBLE_ROWS, True),
    ],
)
def test_types_that_do_not_mix_are_refused_as_in_eager_mode(
    model: nn.Module, x: Tensor, is_accepted: bool, as_cuda: bool
) -> None:
    def loss_fn(out: Any, _: Tensor) -> Tensor:
        loss: Tensor = (out[0] if isinstance(out, tuple) else out).sum()
        return loss

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with nullcontext() if is_accepted else pytest.raises((RuntimeError, ValueError)):
        loss_fn(model(x), x).backward()
    model.zero_grad()
    with nullcontext() if is_accepted else pytest.raises(CaptureError, match=r"float(32|64)|double"):
        capture(model, loss_fn, optimizer, (x, x), machine=H200, as_cuda=as_cuda, check=False)


def test_a_refused_mix_of_types_names_operator_place_and_way_out() -> None:
    message = r"aten\.addmm\.default does not take tensors of float32 and float64 together \(0\): .*x\.float\(\)"
    with pytest.raises(CaptureError, match=message):
        captured(nn.Sequential(nn.Linear(8, 8)), DOUBLE_ROWS)
