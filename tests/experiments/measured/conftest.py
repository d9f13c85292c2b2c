"""A directory of measurements in the place of tests/data/measured, and a measured step that can be added to it."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from executor import capture
from executor.capture.contributed import Contributed, contribution
from executor.capture.profile import Profile, shape_of
from experiments.measured import add, traces
from simulator import Machine

ORIGINAL = traces.DATA


@pytest.fixture
def data(tmp_path, monkeypatch) -> Path:
    """With the published trace in it."""
    folder = tmp_path / "measured"
    folder.mkdir()
    for ending in ("csv", "yaml"):
        shutil.copy(ORIGINAL / f"h100_resnet50.{ending}", folder)
    monkeypatch.setattr(traces, "DATA", folder)
    return folder


@pytest.fixture(scope="session")
def contributed() -> Contributed:
    """Of a small network, with times twice as long as the model's."""
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 4))
    batch = torch.randn(64, 3, 64, 64), torch.randint(4, (64,))
    optimizer = torch.optim.SGD(model.parameters(), foreach=False)
    captured = capture(model, nn.CrossEntropyLoss(), optimizer, batch, machine=Machine.load("h100"), name="mine")
    durations = tuple(2 * k.duration_ns for k in captured.program.kernels)
    shape = shape_of(captured.program).fingerprint
    profile = Profile("mine", shape, "h100", "NVIDIA H100 80GB HBM3", "2.9.0", durations, (0,) * len(durations))
    return contribution(captured, profile, source="a test", licence="CC0-1.0", workload="small", step_ns=10**7)


@pytest.fixture
def step_file(tmp_path, contributed) -> Path:
    path = tmp_path / "step.json"
    path.write_text(add.text_of(contributed))
    return path
