"""The model of kernel times: its rules by hand, on a machine of round numbers, and beside published traces."""

from dataclasses import replace
from math import exp

import numpy as np
import pytest
import torch
from torch import nn

from executor.capture.capture import capture
from executor.capture.kernel_times import Precision
from experiments.measured import traces
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


@pytest.mark.parametrize(("key", "value"), [("conv", 0), ("elementwise", 1.5), ("source", 3), ("launch_ns", 1.5)])
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
    trace = traces.load(traces.DATA / "h100_resnet50.csv")
    pairs = traces.paired(resnet50, trace)
    ours = np.array([sum(resnet50.program.kernels[k].duration_ns for k in ks) / 1e3 for _, ks in pairs])
    theirs = np.array([row.us for row, _ in pairs])
    large = theirs >= 20
    assert large.sum() > 250 and np.median(np.abs(ours / theirs - 1)[large]) < 0.15
    assert ours.sum() == pytest.approx(theirs.sum(), rel=0.1)
    measured = traces.measured(resnet50, trace)
    recorded = sorted({k for _, ks in pairs for k in ks})
    assert sum(measured.kernels[k].duration_ns for k in recorded) == pytest.approx(theirs.sum() * 1e3, rel=1e-6)


@pytest.mark.nightly
def test_a_trace_of_another_network_is_refused(resnet50):
    trace = traces.load(traces.DATA / "h100_resnet50.csv")
    with pytest.raises(ValueError, match="the trace has more of aten::conv2d than the capture"):
        traces.paired(resnet50, [*trace, trace[0]])


@pytest.mark.parametrize(
    ("text", "message"),
    [("a,b\n1,2\n", "line 1: .* 'stage'"), ("stage,operator,us\nforward,aten::mm,fast\n", "line 2: .* 'fast'"),
     ("stage,operator,us\nforward,aten::mm,1\nsideways,aten::mm,1\n", "line 3: expected a stage of forward")],
)  # fmt: skip
def test_what_is_no_trace_is_refused(tmp_path, text, message):
    (tmp_path / "trace.csv").write_text(text)
    with pytest.raises(FormatError, match=message):
        traces.load(tmp_path / "trace.csv")
