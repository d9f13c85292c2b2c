"""The model of kernel times: its rules by hand, on a machine of round numbers, and beside published traces."""

from dataclasses import replace
from math import exp

import numpy as np
import pytest
import torch
from torch import nn

from executor.capture.capture import capture
from executor.capture.kernel_times import Precision
from experiments.measured import steps
from experiments.workloads import resnet
from simulator import Machine
from simulator.files import FormatError
from simulator.kernel_times import KernelTimes

BW = 10**12
TIMES = KernelTimes(
    source="made up", error=0.1, step_error=0.1, launch_ns=0, multiprocessors=100, elementwise=1.0, multi_tensor=0.5,
    norm=0.5, norm_channels=1.0, pool=0.5, pool_backward=0.25, conv=0.5, conv_backward=0.25, conv_1x1=0.2,
    conv_1x1_backward=0.1, conv_bandwidth=1.0, conv_channels=1e-9, conv_float32=0.8, conv_float32_backward=0.4,
    winograd=1.6, matmul=0.5, matmul_float32=0.25, attention=0.2,
)  # fmt: skip
GPU = Machine(
    "round", 2**40, 1, 1, flops_per_s={"float32": 10**13, "tf32": 10**14, "bfloat16": 2 * 10**14},
    memory_bytes_per_s=BW, kernel_times=TIMES,
)  # fmt: skip


def kernels(model, shape, machine=GPU, optimizer=None, **options):
    """Durations in seconds by operator, of a step on images of a shape; the same operator again is added."""
    with torch.device("meta"):
        batch = torch.empty(shape), torch.empty(())
    captured = capture(model, lambda y, _: y.sum(), optimizer, batch, machine=machine, **options)
    found = {}
    for k in captured.program.kernels:
        name = k.name.split(".")[1] if "." in k.name else k.name
        found[name] = found.get(name, 0) + k.duration_ns / 1e9
    return found


def conv(size=3, stride=1, channels=64, filters=128, **options):
    with torch.device("meta"):
        return nn.Conv2d(channels, filters, size, stride, padding=size // 2, bias=False, **options)


def bytes_of(channels, filters, size, image=32, out=32, batch=16, item=4):
    x, y = batch * channels * image**2, batch * filters * out**2
    return item * x, item * y, item * channels * filters * size**2, 2 * y * channels * size**2


@pytest.mark.parametrize(
    ("size", "stride", "share", "converted"), [(3, 1, 0.5, True), (1, 1, 0.2, False), (1, 2, 0.5, True)]
)
def test_convolutions_in_tf32_are_converted_to_nhwc_and_back(size, stride, share, converted):
    """But 1x1 convolutions of stride 1 are not."""
    x, y, w, flops = bytes_of(64, 128, size, out=32 // stride)
    expected = max(flops / (share * 1e14), (x + y + w) / BW) + converted * 2 * (x + y) / BW
    assert kernels(conv(size, stride), (16, 64, 32, 32))["convolution"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("channels", "filters", "converted"), [(64, 128, 0), (128, 64, 1)])
def test_gradients_of_a_1x1_convolution(channels, filters, converted):
    model = nn.Sequential(conv(1, 1, 8, channels), conv(1, 1, channels, filters))
    with torch.device("meta"):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = kernels(model, (16, 8, 32, 32), optimizer=optimizer)["convolution_backward"]
    x, y, w, flops = bytes_of(channels, filters, 1)
    second = 2 * max(flops / (0.1 * 1e14), (x + y + w) / BW) + converted * 2 * (x + y) / BW
    x, y, w, flops = bytes_of(8, channels, 1)
    first = max(flops / (0.1 * 1e14), (x + y + w) / BW)  # no gradient of images
    assert found == pytest.approx(first + second, rel=1e-4)


def test_channels_last_needs_no_conversion():
    model = conv().to(memory_format=torch.channels_last)
    with torch.device("meta"):
        batch = torch.empty(16, 64, 32, 32).to(memory_format=torch.channels_last), torch.empty(())
    captured = capture(model, lambda y, _: y.sum(), None, batch, machine=GPU)
    x, y, w, flops = bytes_of(64, 128, 3)
    assert captured.program.kernels[0].duration_ns / 1e9 == pytest.approx(max(flops / 5e13, (x + y + w) / BW), rel=1e-4)


def test_the_rate_follows_types_and_flags(monkeypatch):
    x, y, w, flops = bytes_of(64, 128, 3)
    half = kernels(conv(), (16, 64, 32, 32), autocast=torch.bfloat16)["convolution"]
    assert half == pytest.approx(max(flops / 1e14, (x + y + w) / 2 / BW) + (x + y) / BW, rel=1e-4)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert kernels(conv(), (16, 64, 32, 32))["convolution"] == pytest.approx(
        max(flops / (1.6 * 1e13), (x + y + w) / BW), rel=1e-4
    )  # Winograd's; not converted


def test_products_are_in_float32_unless_asked_otherwise():
    with torch.device("meta"):
        model = nn.Linear(4096, 4096, bias=False)
    flops = 2 * 4096**3
    exact = kernels(model, (4096, 4096))["mm"]
    assert exact == pytest.approx(flops / (0.25 * 1e13), rel=1e-4)
    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert Precision.now() == Precision(True, True)
        assert kernels(model, (4096, 4096))["mm"] == pytest.approx(flops / (0.5 * 1e14), rel=1e-4)
    finally:
        torch.set_float32_matmul_precision(was)
    autocast = kernels(model, (4096, 4096), autocast=torch.bfloat16)
    assert autocast["mm"] == pytest.approx(flops / (0.5 * 2e14), rel=1e-4)


def test_few_tiles_leave_multiprocessors_idle():
    with torch.device("meta"):
        model = nn.Linear(4096, 640, bias=False)
    assert kernels(model, (64, 4096))["mm"] == pytest.approx(2 * 64 * 640 * 4096 / (0.25 * 0.1 * 1e13), rel=1e-4)


def test_batch_norm_passes_three_and_five_times():
    with torch.device("meta"):
        model = nn.Sequential(nn.BatchNorm2d(100), nn.ReLU())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, nbytes = kernels(model, (16, 100, 32, 32), optimizer=optimizer), 4 * 16 * 100 * 32**2
    share = 0.5 * (1 - exp(-1))
    assert found["native_batch_norm"] == pytest.approx(3 * nbytes / (share * BW), rel=1e-4)
    assert found["native_batch_norm_backward"] == pytest.approx(5 * nbytes / (share * BW), rel=1e-4)
    assert found["relu"] == pytest.approx(2 * nbytes / BW, rel=1e-4)


def test_a_lookup_touches_its_rows_alone():
    with torch.device("meta"):
        model, batch = nn.Embedding(100_000, 64), (torch.zeros(8, dtype=torch.int64), torch.empty(()))
    captured = capture(model, lambda y, _: y.sum(), None, batch, machine=GPU)
    assert captured.program.kernels[0].duration_ns == 4  # 2 * 8 * 64 * 4 bytes in ns at 1 TB/s


@pytest.mark.parametrize(("foreach", "launch", "share"), [(None, 0, 0.5), (False, 1000, 1.0)])
def test_updates_are_parts_of_multi_tensor_kernels(foreach, launch, share):
    machine = replace(GPU, kernel_times=replace(TIMES, launch_ns=1000))
    with torch.device("meta"):
        model = nn.Linear(1000, 1000, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
    found = kernels(model, (2, 1000), machine, optimizer)
    assert found["add_"] == pytest.approx(launch / 1e9 + 3 * 4e6 / (share * BW), rel=1e-4)


@pytest.mark.parametrize("foreach", [True, False])
def test_updates_in_place_count_what_they_write(foreach):
    with torch.device("meta"):
        model = nn.Linear(100, 100, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=foreach)
        batch = torch.empty(2, 100), torch.empty(())
    captured = capture(model, lambda y, _: y.sum(), optimizer, batch, machine=GPU)
    assert [k.bytes for k in captured.program.kernels if k.phase == "optimizer" and k.bytes] == [120_000]


def test_a_type_without_a_figure_is_emulated_in_float32():
    with torch.device("meta"):
        model = nn.Linear(4096, 4096, bias=False, dtype=torch.float16)
        batch = torch.empty(4096, 4096, dtype=torch.float16), torch.empty(())
    captured = capture(model, lambda y, _: y.sum(), None, batch, machine=GPU)
    assert captured.program.kernels[0].duration_ns / 1e9 == pytest.approx(2 * 4096**3 / (0.25 * 1e13), rel=1e-4)
    with pytest.raises(FormatError, match=r"machine\.flops_per_s: round has no figure for float32"):
        captured.on(replace(GPU, flops_per_s={}))


# --------------------------------------------------------------------- rules that need an optional coefficient

MEASURED = replace(GPU, kernel_times=replace(
    TIMES, attention_backward=0.1, unaligned=0.25, columns=0.125, row_ns=10**5, element_flops=200.0
))  # fmt: skip
HALF = torch.bfloat16


class Calls(nn.Module):
    """Calls ``function`` on the scaled input, so that a gradient flows back through it."""

    def __init__(self, function, dtype=torch.float32):
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.ones((), dtype=dtype, device="meta"))

    def forward(self, x):
        return self.function(x * self.scale)


def calls(function, x, *, machine=MEASURED, backward=False):
    """Durations in seconds by operator of a call on ``x``, with its backward pass if asked."""
    model = Calls(function, x.dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if backward else None
    with torch.device("meta"):
        batch = x, torch.empty(())
    captured = capture(model, lambda y, _: y.sum(), optimizer, batch, machine=machine)
    return {k.name.split(".")[1]: k.duration_ns / 1e9 for k in captured.program.kernels if "." in k.name}


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(("columns", "share"), [(1000, 0.5), (1001, 0.5 * 0.25)])
def test_products_with_unaligned_rows_are_slower(columns, share):
    """Rows of 1,000 bfloat16 are 125 times 16 bytes, rows of 1,001 are no multiple."""
    with torch.device("meta"):
        model = nn.Linear(4096, columns, bias=False, dtype=HALF)
    found = calls(model, meta(4096, 4096, dtype=HALF))["mm"]
    assert found == pytest.approx(2 * 4096 * 4096 * columns / (share * 2e14), rel=1e-4)


@pytest.mark.parametrize(
    ("channels", "layout", "share"),
    [(8, torch.channels_last, 0.5), (3, torch.channels_last, 0.5 * 0.25), (3, torch.contiguous_format, 0.5)],
)
def test_convolutions_with_unaligned_channels_are_slower(channels, layout, share):
    """Unless they are converted from NCHW, which pads the channels."""
    with torch.device("meta"):
        model = nn.Conv2d(channels, 512, 7, padding=3, bias=False, dtype=HALF).to(memory_format=layout)
    x = meta(16, channels, 32, 32, dtype=HALF).to(memory_format=layout)
    found, outputs = calls(model, x)["convolution"], 16 * 512 * 32**2
    converted = 2 * 2 * (x.numel() + outputs) / BW if layout == torch.contiguous_format else 0
    assert found == pytest.approx(2 * outputs * channels * 49 / (share * 2e14) + converted, rel=1e-3)


def test_attention_has_a_rate_per_direction():
    def attend(x):
        return nn.functional.scaled_dot_product_attention(x, x, x)

    x, forward = meta(2, 8, 1024, 64, dtype=HALF), 4 * 16 * 1024**2 * 64
    name = "_scaled_dot_product_flash_attention_for_cpu"
    for machine, share in ((MEASURED, 0.1), (GPU, 0.2)):
        found = calls(attend, x, machine=machine, backward=True)
        assert found[name] == pytest.approx(forward / (0.2 * 2e14), rel=1e-4)
        assert found[f"{name}_backward"] == pytest.approx(2.5 * forward / (share * 2e14), rel=1e-4)


@pytest.mark.parametrize(("dim", "share"), [(0, 0.125), (1, 1.0), ((0, 1), 1.0)])
def test_reductions_that_keep_the_contiguous_dimension_are_slower(dim, share):
    found = calls(lambda x: x.mean(dim), meta(1000, 1000))["mean"]
    assert found == pytest.approx(4e6 / (share * BW), rel=2e-3)


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_channels_last_batch_norm_sums_columns(dtype):
    """In bfloat16, which cuDNN's batch norm does not take: Welford's three values forward, two sums backward."""
    model = nn.BatchNorm2d(100, device="meta")
    x = meta(16, 100, 32, 32, dtype=dtype).to(memory_format=torch.channels_last)
    found, nbytes = calls(model, x, backward=True), x.numel() * x.itemsize
    forward, backward = 3 / 0.125 + 2, 2 / 0.125 + 3
    if dtype == torch.float32:
        forward, backward = (passes / (0.5 * (1 - exp(-1))) for passes in (3, 5))
    assert found["native_batch_norm"] == pytest.approx(forward * nbytes / BW, rel=1e-4)
    assert found["native_batch_norm_backward"] == pytest.approx(backward * nbytes / BW, rel=1e-4)


@pytest.mark.parametrize(("rows", "length"), [(1000, 2048), (1000, 200_000)])
def test_row_normalisations_take_a_time_per_row(rows, length):
    """The longer of 1 us per row and pass (100 us on each of 100 multiprocessors) and the bytes of a pass."""
    norm = nn.LayerNorm(length, device="meta")
    found = calls(lambda x: norm(x).log_softmax(-1), meta(rows, length), backward=True)
    each = max(rows * 1e-6, 4 * rows * length / (0.5 * BW))
    norms, softmaxes = (
        ("native_layer_norm", "native_layer_norm_backward"),
        ("_log_softmax", "_log_softmax_backward_data"),
    )
    for name, passes in zip(norms + softmaxes, (2, 5, 3, 4), strict=True):
        assert found[name] == pytest.approx(passes * each, rel=2e-3), name


@pytest.mark.parametrize(("dim", "shape"), [(-1, (1000, 1024)), (0, (4096, 1000))])
def test_softmax_of_short_rows_or_of_columns_takes_no_time_per_row(dim, shape):
    found = calls(lambda x: x.softmax(dim), meta(*shape))["_softmax"]
    assert found == pytest.approx(8 * shape[0] * shape[1] / BW, rel=1e-4)


def test_group_norm_takes_no_time_per_row():
    norm = nn.GroupNorm(2, 4, device="meta")
    found = calls(norm, meta(1000, 4, 8, 2))["native_group_norm"]
    assert found == pytest.approx(2 * 4 * 64_000 / (0.5 * BW), rel=0.05)  # besides its means


def test_a_machine_without_a_float32_rate_is_refused():
    machine = replace(MEASURED, flops_per_s={"bfloat16": 10**12})
    with pytest.raises(FormatError, match=r"machine\.flops_per_s: round has no figure for float32"):
        calls(lambda x: x.t().contiguous(), meta(10, 10), machine=machine)


@pytest.mark.parametrize(
    ("function", "name", "vectorised"),
    [(lambda x: x + x, "add", True), (lambda x: x.t().contiguous(), "clone", False), (lambda x: x + x[0], "add", False),
     (lambda x: x.to(HALF), "_to_copy", True), (lambda x: x.to(HALF).float(), "_to_copy", False),
     (lambda x: x.new_empty(x.shape, dtype=HALF).copy_(x), "copy_", True), (lambda x: x.double(), "_to_copy", False),
     (lambda x: torch.cat([x, x]), "cat", True), (lambda x: torch.cat([x.t(), x.t()]), "cat", False),
     (lambda x: x[:, ::2].neg(), "neg", False), (lambda x: x.t() + x.t(), "add", True)],
)  # fmt: skip
def test_kernels_that_are_not_vectorised_take_a_time_per_element(function, name, vectorised):
    """200 FLOPs at 1e13 per second are 20 ns per 1,000 elements: more than their bytes take."""
    x = meta(1000, 1000)
    with torch.device("meta"):
        elements = function(x).numel()
    found, without = (calls(function, x, machine=machine)[name] for machine in (MEASURED, GPU))
    longer = max(without, elements * 2e-11)
    assert found == pytest.approx(without if vectorised else longer, rel=1e-4)
    assert vectorised or found > without


@pytest.mark.parametrize(("key", "value"), [("conv", 0), ("elementwise", 1.5), ("source", 3), ("launch_ns", 1.5),
                                            ("unaligned", 2), ("row_ns", -1)])  # fmt: skip
def test_bad_coefficients_are_refused(key, value):
    data = GPU.to_dict()
    assert Machine.from_dict(data) == GPU
    data["kernel_times"] = {**data["kernel_times"], key: value}
    with pytest.raises(FormatError, match=rf"machine\.kernel_times\.{key}: expected .*, got {value}"):
        Machine.from_dict(data)


# ------------------------------------------------------------------------- beside measurements


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
    [("a,b\n1,2\n", "line 2: 'stage'"), ("stage,operator,us\nforward,aten::mm,fast\n", "line 2: .* 'fast'"),
     ("stage,operator,us\nforward,aten::mm,1\nsideways,aten::mm,1\n", "line 3: expected a stage of forward")],
)  # fmt: skip
def test_what_is_no_trace_is_refused(tmp_path, text, message):
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(FormatError, match=message):
        steps.read_operators(tmp_path / "trace.csv")
