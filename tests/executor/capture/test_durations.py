"""Tests of the model of kernel times: its rules by hand on a machine with round numbers, and published traces."""

from dataclasses import replace
from functools import partial
from math import exp

import numpy as np
import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

from executor.capture.capture import capture
from executor.capture.durations import Precision
from experiments.measure.published import steps
from experiments.workloads import resnet
from simulator import Machine
from simulator.files import FormatError
from simulator.kernel_times import KernelTimes

BW = 10**12
TIMES = KernelTimes(
    source="made up",
    error=0.1,
    step_error=0.1,
    launch_ns=0,
    multiprocessors=100,
    elementwise=1.0,
    multi_tensor=0.5,
    norm=0.5,
    norm_channels=1.0,
    pool=0.5,
    pool_backward=0.25,
    conv=0.5,
    conv_backward=0.25,
    conv_1x1=0.2,
    conv_1x1_backward=0.1,
    conv_bandwidth=1.0,
    conv_channels=1e-9,
    conv_float32=0.8,
    conv_float32_backward=0.4,
    winograd=1.6,
    matmul=0.5,
    matmul_float32=0.25,
    attention=0.2,
)
GPU = Machine(
    "round",
    2**40,
    1,
    1,
    flops_per_s={"float32": 10**13, "tf32": 10**14, "bfloat16": 2 * 10**14},
    memory_bytes_per_s=BW,
    kernel_times=TIMES,
)


MEASURED = replace(
    GPU,
    kernel_times=replace(
        TIMES, attention_backward=0.1, unaligned=0.25, columns=0.125, row_ns=10**5, element_flops=200.0
    ),
)
LAUNCHING = replace(GPU, kernel_times=replace(TIMES, launch_ns=1000))
HALF = torch.bfloat16
LAST = torch.channels_last
FIRST = torch.contiguous_format


class Calls(nn.Module):
    """Calls ``function`` on the scaled input, so that a gradient flows back through it."""

    def __init__(self, function, dtype=torch.float32):
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones((), dtype=dtype, device="meta"))

    def forward(self, x):
        return self.function(x * self.scale)


def meta(*shape, dtype=torch.float32, layout=FIRST):
    return torch.empty(shape, dtype=dtype, device="meta").to(memory_format=layout)


def durations(make_module, x, machine=GPU, backward=False, foreach=None, **options):
    """Returns the seconds of each operator in a step of the module or function that ``make_module`` returns."""
    with torch.device("meta"):
        model = make_module()
        model = model if isinstance(model, nn.Module) else Calls(model, x.dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach) if backward else None
        captured = capture(model, lambda y, _: y.sum(), optimizer, (x, torch.empty(())), machine=machine, **options)
    seconds = {}
    for k in captured.program.kernels:
        seconds.setdefault(k.name.partition(".")[2].partition(".")[0], []).append(k.duration_ns / 1e9)
    return seconds


def conv(size=3, stride=1, channels=64, filters=128, dtype=None, layout=FIRST):
    module = nn.Conv2d(channels, filters, size, stride, padding=size // 2, bias=False, dtype=dtype)
    return module.to(memory_format=layout)


def conv_costs(channels, filters, size, image=32, out=32, batch=16):
    """Returns the bytes of a convolution's images and outputs, the bytes of all its tensors, and its FLOPs."""
    x = batch * channels * image**2
    y = batch * filters * out**2
    return 4 * (x + y), 4 * (x + y + channels * filters * size**2), 2 * y * channels * size**2


def linear(rows, columns, **options):
    return lambda: nn.Linear(rows, columns, bias=False, **options)


def self_attention():
    return lambda x: nn.functional.scaled_dot_product_attention(x, x, x)


def calls(function, dim):
    return lambda: lambda x: function(x, dim)


def in_sequence(first, second):
    return nn.Sequential(first(), second())


def normed_rows(length):
    norm = nn.LayerNorm(length)
    return lambda x: norm(x).log_softmax(-1)


def case(name, make_module, x, expected, **options):
    """Returns a test case.

    Args:
        make_module: As in ``durations``.
        expected: Seconds by operator.
    """
    return pytest.param(make_module, x, options, expected, id=name)


def cases():
    images, everything, flops = conv_costs(64, 128, 3)
    x = meta(16, 64, 32, 32)
    last = meta(16, 64, 32, 32, layout=LAST)
    # In TF32 convolutions are converted to NHWC and back, but for 1x1 of stride 1; Winograd's in float32 is not.
    for size, stride, share, converted in ((3, 1, 0.5, 1), (1, 1, 0.2, 0), (1, 2, 0.5, 1)):
        a, b, c = conv_costs(64, 128, size, out=32 // stride)
        expected = max(c / (share * 1e14), b / BW) + converted * 2 * a / BW
        yield case(f"conv_{size}x{size}_{stride}", partial(conv, size, stride), x, {"convolution": expected})
    expected = max(flops / 5e13, everything / BW)
    yield case("channels_last", partial(conv, layout=LAST), last, {"convolution": expected})
    expected = max(flops / 1e14, everything / 2 / BW) + images / BW
    yield case("conv_autocast", conv, x, {"convolution": expected}, autocast=HALF)
    for channels, filters, converted in ((64, 128, 0), (128, 64, 1)):  # more channels in than out
        a, b, c = conv_costs(channels, filters, 1)
        _, e, f = conv_costs(8, channels, 1)  # the first one has no gradient of images
        expected = 2 * max(c / 1e13, b / BW) + converted * 2 * a / BW + max(f / 1e13, e / BW)
        make = partial(in_sequence, partial(conv, 1, 1, 8, channels), partial(conv, 1, 1, channels, filters))
        seconds = {"convolution_backward": expected}
        yield case(f"gradients_of_1x1_{channels}", make, meta(16, 8, 32, 32), seconds, backward=True)
    # Channels that are no multiple of 16 bytes, unless a conversion pads them.
    for channels, layout, share in ((8, LAST, 0.5), (3, LAST, 0.125), (3, FIRST, 0.5)):
        inputs = meta(16, channels, 32, 32, dtype=HALF, layout=layout)
        outputs = 16 * 512 * 32**2
        expected = 2 * outputs * channels * 49 / (share * 2e14)
        expected += 4 * (inputs.numel() + outputs) / BW if layout == FIRST else 0
        make = partial(conv, 7, 1, channels, 512, HALF, layout)
        expected = {"convolution": expected}
        yield case(f"conv_of_{channels}_{share}", make, inputs, expected, machine=MEASURED)
    # Products: float32, autocast, few tiles, a type without a rate (as float32), rows of 1,001 bfloat16.
    square = meta(4096, 4096)
    cube = 2 * 4096**3
    yield case("product", linear(4096, 4096), square, {"mm": cube / 0.25e13})
    yield case("product_autocast", linear(4096, 4096), square, {"mm": cube / 1e14}, autocast=HALF)
    yield case("few_tiles", linear(4096, 640), meta(64, 4096), {"mm": 2 * 64 * 640 * 4096 / (0.25 * 0.1 * 1e13)})
    yield case("emulated", linear(4096, 4096, dtype=torch.float16), square.half(), {"mm": cube / 0.25e13})
    for columns, share in ((1000, 0.5), (1001, 0.125)):
        make = linear(4096, columns, dtype=HALF)
        expected = {"mm": 2 * 4096 * 4096 * columns / (share * 2e14)}
        yield case(f"rows_of_{columns}", make, square.to(HALF), expected, machine=MEASURED)
    tokens = meta(2, 8, 1024, 64, dtype=HALF)
    forward = 4 * 16 * 1024**2 * 64
    name = "_scaled_dot_product_flash_attention_for_cpu"
    for machine, share in ((MEASURED, 0.1), (GPU, 0.2)):
        expected = {name: forward / 0.4e14, f"{name}_backward": 2.5 * forward / (share * 2e14)}
        yield case(f"attention_{share}", self_attention, tokens, expected, machine=machine, backward=True)
    # Batch norm passes three and five times; in bfloat16 and channels-last it sums columns, Welford's three values.
    norm = meta(16, 100, 32, 32)
    cudnn = 0.5 * (1 - exp(-1))
    for dtype, passes in ((torch.float32, (3 / cudnn, 5 / cudnn)), (HALF, (3 / 0.125 + 2, 2 / 0.125 + 3))):
        x = norm.to(dtype).to(memory_format=LAST)
        named_passes = zip(("native_batch_norm", "native_batch_norm_backward"), passes, strict=True)
        expected = {name: p * x.nbytes / BW for name, p in named_passes}
        make = partial(nn.BatchNorm2d, 100)
        yield case(f"batch_norm_{dtype}", make, x, expected, machine=MEASURED, backward=True)
    expected = {"native_batch_norm": 3 * norm.nbytes / (cudnn * BW), "relu": 2 * norm.nbytes / BW}
    yield case("batch_norm_relu", partial(in_sequence, partial(nn.BatchNorm2d, 100), nn.ReLU), norm, expected)
    # Rows take 1 us a pass (100 us on each of 100 multiprocessors) or the bytes of a pass; not short ones, or columns.
    for length in (2048, 200_000):
        pass_seconds = max(1000 * 1e-6, 4 * 1000 * length / (0.5 * BW))
        passes = {
            "native_layer_norm": 2,
            "native_layer_norm_backward": 5,
            "_log_softmax": 3,
            "_log_softmax_backward_data": 4,
        }
        expected = {name: n * pass_seconds for name, n in passes.items()}
        x = meta(1000, length)
        yield case(f"rows_{length}", partial(normed_rows, length), x, expected, machine=MEASURED, backward=True)
    for dim, shape in ((-1, (1000, 1024)), (0, (4096, 1000))):
        x = meta(*shape)
        yield case(f"softmax_{dim}", calls(torch.softmax, dim), x, {"_softmax": 2 * x.nbytes / BW}, machine=MEASURED)
    for dim, share in ((0, 0.125), (1, 1.0), ((0, 1), 1.0)):  # a sum that keeps the contiguous dimension is slower
        x = meta(1000, 1000)
        expected = {"mean": 4e6 / (share * BW)}
        yield case(f"mean_{dim}", calls(torch.mean, dim), x, expected, machine=MEASURED)
    ids = torch.zeros(8, dtype=torch.int64, device="meta")
    yield case("lookup", partial(nn.Embedding, 100_000, 64), ids, {"embedding": 4e-9})  # 2 * 8 * 64 * 4 bytes
    for foreach, launch, share in ((None, 0, 0.5), (False, 1000, 1.0)):  # an update is a part of a multi-tensor kernel
        options = {"backward": True, "foreach": foreach}
        expected = {"add_": launch / 1e9 + 3 * 4e6 / (share * BW)}
        yield case(f"update_{foreach}", linear(1000, 1000), meta(2, 1000), expected, machine=LAUNCHING, **options)


@pytest.mark.parametrize(("make_module", "x", "options", "expected"), cases())
def test_a_kernel_takes_what_the_rules_say(make_module, x, options, expected):
    seconds = durations(make_module, x, **options)
    assert {name: sum(seconds[name]) for name in expected} == pytest.approx(expected, rel=2e-3)


def test_the_flags_of_pytorch_choose_the_rate(monkeypatch):
    _, everything, flops = conv_costs(64, 128, 3)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    (winograd,) = durations(conv, meta(16, 64, 32, 32))["convolution"]
    assert winograd == pytest.approx(max(flops / (1.6 * 1e13), everything / BW), rel=1e-4)
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert Precision.from_flags() == Precision(False, True)
        assert durations(linear(4096, 4096), meta(4096, 4096))["mm"] == pytest.approx([2 * 4096**3 / 0.5e14], rel=1e-4)
    finally:
        torch.set_float32_matmul_precision(precision)


@pytest.mark.parametrize("foreach", [True, False])
def test_updates_in_place_count_what_they_write(foreach):
    with torch.device("meta"):
        model = nn.Linear(100, 100, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
        batch = torch.empty(2, 100), torch.empty(())
    captured = capture(model, lambda y, _: y.sum(), optimizer, batch, machine=GPU)
    assert [k.bytes for k in captured.program.kernels if k.phase == "optimizer" and k.bytes] == [120_000]


def test_group_norm_takes_no_time_per_row():
    seconds = durations(lambda: nn.GroupNorm(2, 4), meta(1000, 4, 8, 2), MEASURED)["native_group_norm"]
    assert seconds == pytest.approx([2 * 4 * 64_000 / (0.5 * BW)], rel=0.05)  # besides its means


@pytest.mark.parametrize(
    ("function", "name", "is_vectorized"),
    [
        (lambda x: x + x, "add", True),
        (lambda x: x.t().contiguous(), "clone", False),
        (lambda x: x + x[0], "add", False),
        (lambda x: x.to(HALF), "_to_copy", True),
        (lambda x: x.to(HALF).float(), "_to_copy", False),
        (lambda x: x.new_empty(x.shape, dtype=HALF).copy_(x), "copy_", True),
        (lambda x: x.double(), "_to_copy", False),
        (lambda x: torch.cat([x, x]), "cat", True),
        (lambda x: torch.cat([x.t(), x.t()]), "cat", False),
        (lambda x: x[:, ::2].neg(), "neg", False),
        (lambda x: x.t() + x.t(), "add", True),
    ],
)
def test_kernels_that_are_not_vectorized_take_a_time_per_element(function, name, is_vectorized):
    """200 FLOPs at 1e13 per second are 20 ns per 1,000 elements: more than their bytes take."""
    x = meta(1000, 1000)
    with torch.device("meta"):
        elements = function(x).numel()
    seconds, base = (durations(lambda: function, x, machine)[name][-1] for machine in (MEASURED, GPU))
    per_element = max(base, elements * 2e-11)
    assert seconds == pytest.approx(base if is_vectorized else per_element, rel=1e-4)
    assert is_vectorized or seconds > base


# ------------------------------------------------------------------------- against measurements


@pytest.fixture(scope="module")
def resnet50():
    with torch.device("meta"):
        model, loss_fn, _, batch = resnet.resnet_imagenet(stages="3-4-6-3", batch_size=128, halve=3)
        optimizer = torch.optim.Adam(model.parameters())
    return capture(model, loss_fn, optimizer, batch, machine=Machine.load("h100"))


@pytest.mark.nightly
def test_beside_a_published_trace_of_an_h100(resnet50):
    trace = steps.read_operators(steps.DATA / "h100_resnet50.csv")
    pairs = steps.paired(resnet50, trace)
    ours = np.array([sum(resnet50.program.kernels[k].duration_ns for k in ks) / 1e3 for _, ks in pairs])
    theirs = np.array([row.us for row, _ in pairs])
    large = theirs >= 20
    assert large.sum() > 250 and np.median(np.abs(ours / theirs - 1)[large]) < 0.15
    assert ours.sum() == pytest.approx(theirs.sum(), rel=0.1)
    measured = steps.with_trace_times(resnet50, trace)
    recorded = sorted({k for _, ks in pairs for k in ks})
    assert sum(measured.kernels[k].duration_ns for k in recorded) == pytest.approx(theirs.sum() * 1e3, rel=1e-6)


@pytest.mark.nightly
def test_a_trace_of_another_network_is_refused(resnet50):
    trace = steps.read_operators(steps.DATA / "h100_resnet50.csv")
    with pytest.raises(ValueError, match="the trace has more of aten::conv2d than the capture"):
        steps.paired(resnet50, [*trace, trace[0]])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "line 2: 'stage'"),
        ("stage,operator,us\nforward,aten::mm,fast\n", "line 2: .* 'fast'"),
        ("stage,operator,us\nforward,aten::mm,1\nsideways,aten::mm,1\n", "line 3: expected a stage of forward"),
    ],
)
def test_files_without_a_trace_are_refused(tmp_path, text, message):
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(FormatError, match=message):
        steps.read_operators(tmp_path / "trace.csv")


def grouped(experts: int, hidden: int) -> nn.Module:
    """Returns square layers of experts that share the rows of their input, as in a mixture of experts."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(experts, hidden, hidden, dtype=torch.bfloat16))
            self.register_buffer("ends", torch.empty(experts, dtype=torch.int32))

        def forward(self, x):
            return torch._grouped_mm(x, self.weight, offs=self.ends).pow(2)

    return Experts()


def test_a_product_without_a_formula_is_estimated_from_its_shapes():
    """The products of the result and of the weights' gradient use each row with the weights of one expert."""
    x = meta(4096, 2048, dtype=torch.bfloat16)
    times = durations(partial(grouped, 4, 2048), x, backward=True)["_grouped_mm"]
    assert times == pytest.approx([2 * 4096 * 2048**2 / (0.5 * 2e14)] * 2, rel=1e-3)


def test_the_report_says_what_is_estimated():
    with torch.device("meta"):
        model = grouped(4, 64)
        batch = torch.empty(128, 64, dtype=torch.bfloat16), torch.empty(())
    captured = capture(model, lambda y, _: y.sum(), None, batch, machine=GPU)
    assert captured.arithmetic(GPU) == "FLOPs of aten._grouped_mm.default are estimated from shapes."
    assert not any(kernel.flops for kernel in captured.program.kernels)


SQUARE = meta(8, 8)
IMAGE = meta(1, 2, 8, 8)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda x: x @ x[0], SQUARE),
        (lambda x: x[0] @ x[0], SQUARE),
        (lambda x: torch.addbmm(x, x[None], x[None]), SQUARE),
        (lambda x: torch.igamma(x, x), SQUARE),
        (lambda x: x.lgamma() + x.digamma(), SQUARE),
        (lambda x: x.cummax(0)[0], SQUARE),
        (lambda x: x.sum().logsumexp(0), SQUARE),
        (lambda x: nn.functional.linear(x[:0], x), SQUARE),
        (lambda x: nn.functional.interpolate(x, scale_factor=2, mode="bilinear"), IMAGE),
        (lambda x: nn.functional.conv3d(x[:0, :, None], x.new_empty(2, 2, 1, 1, 1)), IMAGE),
    ],
)
def test_operators_without_products_take_the_time_of_their_bytes(function, x):
    """Their names resemble those of matrix products, or they have no elements to divide by."""
    with torch.device("meta"):
        captured = capture(Calls(function, x.dtype), lambda y, _: y.sum(), None, (x, torch.empty(())), machine=MEASURED)
    for kernel in captured.program.kernels:
        assert kernel.flops or kernel.duration_ns <= 8 * kernel.bytes / BW * 1e9 + 1


@pytest.mark.parametrize("name", ["batched_mm", "grouped_mm"])
def test_experts_that_copy_their_weights_are_named(name: str) -> None:
    options = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = MixtralConfig(vocab_size=100, num_key_value_heads=2, num_local_experts=4, use_cache=False, **options)
    with torch.device("meta"):
        model = MixtralForCausalLM(config).to(torch.bfloat16)
        ids = torch.ones(1, 32, dtype=torch.int64)
    model.set_experts_implementation(name)
    captured = capture(model, None, torch.optim.SGD(model.parameters(), 0.1), {"input_ids": ids, "labels": ids})
    found = captured.arithmetic(GPU)
    # 64 tokens of experts each copy 3 matrices of 64 x 128 in each of 2 layers: 6.3 MB.
    remark = "model.layers.0.mlp.experts (experts_implementation='batched_mm') copies the weights of experts"
    assert (remark in found and "6.00 MiB in the step" in found) == ("copies" in found) == (name == "batched_mm")
