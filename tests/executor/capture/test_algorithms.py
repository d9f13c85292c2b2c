"""Tests of the model of cuDNN's algorithms: workspaces by hand, and variants of captured programs."""

from __future__ import annotations

from math import log2

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor, nn

from executor import capture
from executor.capture.algorithms import INDEXING, Convolution, algorithms, convolution_of, pareto_front
from simulator import Machine

# One FLOP or one byte a nanosecond; launches cost nothing.
UNIT = Machine("unit", 1, 1, 1, flops_per_s={"float32": 10**9}, memory_bytes_per_s=10**9, launch_ns=0)
GPU = Machine.load("gtx1080ti")

# 2 images of 8 x 8 in 3 channels, 5 filters of 3 x 3, padded: as large outputs.
SAME = Convolution(2, 3, (8, 8), 5, (3, 3), (1, 1))


def by_name(conv: Convolution, conv_pass: str = "forward") -> dict[str, int]:
    return {a.name: a.workspace for a in algorithms(conv, conv_pass)}


def test_workspaces_by_hand() -> None:
    assert by_name(SAME) == {
        "implicit GEMM": 0,
        "GEMM": 4 * (2 * 8 * 8) * (3 * 3 * 3),  # a row for each output pixel, a column for each tap
        "FFT": 8 * (16 * 9) * (2 * 3 + 3 * 5 + 2 * 5),  # 8 + 2 of padding fit 16; 16 / 2 + 1 = 9 columns are kept
        "Winograd": 4 * 36 * (8 * 3 + 3 * 5 + 8 * 5),  # 2 x 2 tiles in each of 2 images: 8
    }
    assert {conv_pass: by_name(SAME, conv_pass) == by_name(SAME) for conv_pass in ("images", "filters")} == {
        "images": True,
        "filters": True,
    }


def test_winograd_tiles_what_a_pass_cuts() -> None:
    valid = Convolution(1, 1, (9, 9), 1, (3, 3))  # outputs of 7 x 7: 2 x 2 tiles; images of 9 x 9: 3 x 3 tiles
    assert by_name(valid)["Winograd"] == by_name(valid, "filters")["Winograd"] == 4 * 36 * (4 + 1 + 4)
    assert by_name(valid, "images")["Winograd"] == 4 * 36 * (9 + 1 + 9)


@pytest.mark.parametrize(
    ("conv", "names"),
    [
        (Convolution(2, 3, (8, 8), 5, (3, 3), (1, 1), (2, 2)), {"implicit GEMM", "GEMM"}),  # strided
        (Convolution(2, 3, (27, 27), 5, (5, 5), (2, 2)), {"implicit GEMM", "GEMM", "FFT"}),  # not 3 x 3
        (Convolution(2, 3, (255, 255), 5, (3, 3), (1, 1)), {"implicit GEMM", "GEMM", "Winograd"}),  # 257 pixels
        (Convolution(2, 3, (8, 8), 5, (3, 3), (3, 3)), {"implicit GEMM", "GEMM", "Winograd"}),  # padded too far
    ],
)
def test_where_algorithms_apply(conv: Convolution, names: set[str]) -> None:
    assert set(by_name(conv)) == names


def test_a_product_of_pixels_needs_no_matrix() -> None:
    assert by_name(Convolution(2, 3, (8, 8), 5, (1, 1)))["GEMM"] == 0
    assert by_name(Convolution(2, 3, (8, 8), 5, (1, 1), (0, 0), (2, 2)))["GEMM"] == 4 * (2 * 4 * 4) * 3


def test_times_by_hand() -> None:
    candidates = {a.name: a for a in algorithms(SAME, "forward")}
    images = 4 * 2 * 3 * 64
    filters = 4 * 3 * 5 * 9
    outputs = 4 * 2 * 5 * 64
    flops = 2 * (2 * 5 * 64) * (3 * 9)
    # 5 filters are one tile of outputs; arithmetic bounds it.
    assert candidates["implicit GEMM"].time_ns(UNIT) == flops + 2 * INDEXING * (2 * 64) * (3 * 9) > images + outputs
    matrix = 4 * 2 * 64 * 27
    assert candidates["GEMM"].time_ns(UNIT) == images + matrix + max(flops, matrix + filters + outputs)
    # Winograd: 8 tiles. 36 x 2 x 3 x 5 x 8 = 8640 FLOPs of product under 4 x 36 x 79 = 11376 bytes.
    transforms = [(144 * 24, images + 144 * 24), (72 * 15, filters + 144 * 15), (100 * 40, outputs + 144 * 40)]
    assert candidates["Winograd"].time_ns(UNIT) == sum(map(max, transforms)) + 11376
    # FFT of 16 x 16: 2.5 x 256 x 8 = 5120 FLOPs a plane; 8 x 144 x 2 x 3 x 5 = 34560 under 8 x 144 x 31 = 35712 bytes.
    assert 2.5 * 256 * log2(256) == 5120
    planes = [(5120 * 6, images + 1152 * 6), (5120 * 15, filters + 1152 * 15), (5120 * 10, outputs + 1152 * 10)]
    assert candidates["FFT"].time_ns(UNIT) == sum(map(max, planes)) + 35712


@given(st.integers(1, 64), st.integers(1, 300), st.integers(3, 64), st.integers(1, 300), st.sampled_from([1, 3, 5]))
def test_a_front_gives_time_for_bytes(batch: int, channels: int, size: int, filters: int, taps: int) -> None:
    conv = Convolution(batch, channels, (size, size), filters, (taps, taps), (taps // 2, taps // 2))
    images, filters_front = (pareto_front(conv, (conv_pass,), GPU) for conv_pass in ("images", "filters"))
    joint = pareto_front(conv, ("images", "filters"), GPU)
    assert joint[0][1] == 0  # something runs without any workspace
    for slow, fast in zip(joint, joint[1:], strict=False):
        assert slow[0] > fast[0] and slow[1] < fast[1]
    assert joint[-1] == (images[-1][0] + filters_front[-1][0], max(images[-1][1], filters_front[-1][1]))


# -------------------------------------------------------------------------------------------- capture


class Net(nn.Module):
    """Two convolutions with algorithms, and a strided, a grouped, a transposed and a 1-D convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(64, 128, 3, padding=1)
        self.second = nn.Conv2d(128, 32, 5, padding=2, bias=False)
        self.strided = nn.Conv2d(32, 32, 3, stride=2)
        self.grouped = nn.Conv2d(32, 32, 3, groups=4)
        self.transposed = nn.ConvTranspose2d(32, 8, 3)
        self.line = nn.Conv1d(8, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.transposed(self.grouped(self.strided(self.second(self.first(x)).relu()).relu()).relu())
        return self.line(x.flatten(2)).flatten(1)


def net() -> tuple:
    """Returns the arguments of a capture; nothing computes with tensors of the device meta."""
    with torch.device("meta"):
        model = Net()
        batch = (torch.empty(64, 64, 32, 32), torch.empty(64, dtype=torch.int64))
    return model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1), batch


def test_only_when_asked_for() -> None:
    plain = capture(*net(), machine=GPU)
    assert not any(k.variants or k.workspace for k in plain.program.kernels)
    timed = capture(*net(), machine=GPU, algorithms=True)
    assert any(k.variants for k in timed.program.kernels)
    assert timed.on(GPU).program == plain.program
    assert plain.on(GPU, algorithms=True).program == timed.program


def test_variants_of_a_captured_step() -> None:
    plain = capture(*net(), machine=GPU).on(GPU, iteration_ns=10**8)
    captured = plain.on(GPU, iteration_ns=10**8, algorithms=True)
    program = captured.program
    assert program.ideal_ns == plain.program.ideal_ns == 10**8  # the iteration stays
    assert program.tensors == plain.program.tensors
    shapes = {k: conv for k, n in enumerate(captured.nodes) if n and (conv := convolution_of(n[0]))}
    first = Convolution(64, 64, (32, 32), 128, (3, 3), (1, 1))
    second = Convolution(64, 128, (32, 32), 32, (5, 5), (2, 2))
    strided = Convolution(64, 32, (32, 32), 32, (3, 3), (0, 0), (2, 2))
    # The step's input needs no gradient. The backward pass has the reverse order.
    assert list(shapes.values()) == [
        (first, ("forward",)),
        (second, ("forward",)),
        (strided, ("forward",)),
        (strided, ("images", "filters")),
        (second, ("images", "filters")),
        (first, ("filters",)),
    ]
    convs = [k for k, kernel in enumerate(program.kernels) if kernel.kind == "conv"]
    assert len(convs) == 12
    for k in convs:
        kernel = program.kernels[k]
        if k not in shapes:
            assert kernel == plain.program.kernels[k]
            continue
        expected = pareto_front(*shapes[k], GPU)
        assert kernel.workspace == expected[-1][1]
        if len(expected) == 1:
            assert kernel.variants == ()
            continue
        assert kernel.variants[-1] == (kernel.duration_ns, kernel.workspace)
        assert [w for _, w in kernel.variants] == [w for _, w in expected]
        for (duration, _), (time, _) in zip(kernel.variants, expected, strict=True):
            assert duration / kernel.duration_ns == pytest.approx(time / expected[-1][0], rel=1e-4)
    assert len(program.kernels[convs[1]].variants) > 1
