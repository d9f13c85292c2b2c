"""Measured steps beside ours: that rows are of what they say, on the data there is."""

import pytest
import torch
from torch import nn

from executor import capture
from experiments.measured import steps, traces
from experiments.measured.traces import Operator
from simulator import FormatError, Machine
from tests.experiments.measured.conftest import ORIGINAL


@pytest.fixture(scope="module")
def trace():
    return steps.Trace.load(traces.DATA / "h100_resnet50.csv")


def test_the_published_trace(trace):
    rows = steps.of_trace(trace)
    measured, ours, control = steps.total(rows)
    assert measured == pytest.approx(70.723, abs=0.001)  # ms, as the file's lines add up to
    assert ours == pytest.approx(measured, rel=0.1) and control > 1.3 * measured
    large = steps.large(rows)
    assert len(large) == 313 and {row.kind for row in large} >= {"conv", "norm", "activation", "pool", "optimizer"}
    off = [abs(r - 1) for r in steps.ratios(large)]
    old = [abs(r - 1) for r in steps.ratios(large, control=True)]
    assert sorted(off)[len(off) // 2] < 0.15 < 0.35 < sorted(old)[len(old) // 2]


def test_the_control_has_one_roofline(trace):
    captured, machine = trace.captured(), Machine.load("h100")
    kernel = next(k for k in captured.program.kernels if k.kind == "conv")
    k = captured.program.kernels.index(kernel)
    by_hand = max(kernel.flops / (0.7 * machine.flops_per_s["float32"]),
                  kernel.bytes / (0.7 * machine.memory_bytes_per_s))  # fmt: skip
    assert steps.before(captured, machine)[k] == pytest.approx(5000 + 1e9 * by_hand, rel=0.01)


def test_a_contributed_step(contributed):
    rows = steps.of_contributed(contributed)
    assert len(rows) == len(contributed.kernels)
    assert all(r == pytest.approx(0.5) for r in steps.ratios([row for row in rows if row.measured]))


def test_sums_by_kind():
    rows = {row.name: row for row in steps.by_kind()}
    assert sum(row.measured for row in rows.values()) / 1e3 == pytest.approx(99.1447)
    assert rows["conv fwd"].ours == pytest.approx(rows["conv fwd"].measured, rel=0.1)
    assert rows["accumulate"].ours == 0  # autograd's, which a capture does not make


def test_whole_steps(data):
    head, *lines = (ORIGINAL / "steps.csv").read_text().splitlines()
    assert len(lines) == 8
    (data / "steps.csv").write_text("\n".join([head, *(line for line in lines if ",128," in line)]))
    found = {(s.machine, s.name): s for s in steps.published()}
    vgg = found["h100", "vgg13, 128, tf32, NCHW"]
    assert vgg.measured == 94.0 and vgg.ours == pytest.approx(94.0, rel=0.1) and vgg.control > 2 * 94.0
    half, full = (found["v100", f"resnet50, 128, {p}, NCHW"] for p in ("float16", "float32"))
    assert half.ours < 0.5 * full.ours and half.control == pytest.approx(full.control, rel=0.2)
    assert found["v100", "resnet50, 128, float16, NHWC"].ours < half.ours


def pairs(network, rows, **options):
    with torch.device("meta"):
        model = network()
        batch = torch.empty(4, 3, 16, 16), torch.empty(4, dtype=torch.long)
        captured = capture(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters()), batch,
                           machine=Machine.load("h100"), **options)  # fmt: skip
    found = traces.paired(captured, [Operator(stage, name, 1.0, 10**6) for stage, name in rows])
    kernels = captured.program.kernels
    return [[kernels[k].name.split(".")[1] for k in mine] for _, mine in found]


def vgg_like():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(196, 8), nn.ReLU(True),
                         nn.Dropout(), nn.Linear(8, 4))  # fmt: skip


def test_dropout_and_pools_of_a_trace():
    rows = [("forward", "aten::adaptive_avg_pool2d"), ("forward", "aten::linear"), ("forward", "aten::dropout"),
            ("backward", "AdaptiveAvgPool2DBackward0"), ("backward", "NativeDropoutBackward0")]  # fmt: skip
    assert pairs(vgg_like, rows) == [["_adaptive_avg_pool2d"], ["addmm"], ["bernoulli_", "div_", "mul"],
                                     ["_adaptive_avg_pool2d_backward"], ["mul"]]  # fmt: skip


def test_the_first_layers_gradient_is_of_its_weights_alone():
    def network():
        return nn.Sequential(nn.Flatten(), nn.Linear(768, 8), nn.Linear(8, 4))

    rows = [("backward", "AddmmBackward0"), ("backward", "AddmmBackward0")]
    assert pairs(network, rows) == [["mm", "mm", "sum"], ["mm", "sum"]]


def test_views_take_no_time_and_others_are_refused():
    view = [Operator("forward", "aten::flatten", 0.0, 8), Operator("forward", "aten::flatten", 2.0, 8)]
    with torch.device("meta"):
        model = vgg_like()
        batch = torch.empty(4, 3, 16, 16), torch.empty(4, dtype=torch.long)
        captured = capture(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters()), batch)
    assert traces.paired(captured, view[:1]) == [(view[0], [])]
    with pytest.raises(ValueError, match="line 3: operator 'aten::flatten' is not known"):
        traces.paired(captured, view)


def test_a_trace_of_another_step_is_refused(data):
    text = (data / "h100_resnet50.yaml").read_text()
    (data / "h100_resnet50.yaml").write_text(text.replace("3-4-6-3", "1-1-1-1"))
    with pytest.raises(FormatError, match=r"h100_resnet50.csv: line \d+: the trace has more of aten::"):
        steps.of_trace(steps.Trace.load(data / "h100_resnet50.csv"))
