"""Tests of measuring a network's step on this host: the written file and the model's prediction of it."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from executor import capture
from executor.capture.durations import Precision
from executor.capture.profile import Profile
from experiments.measure.measured_step import MeasuredStep, measured_step, modeled
from experiments.measure.published import steps
from experiments.measured.__main__ import main
from simulator import FormatError, Machine
from simulator.files import load_json

H100 = Machine.load("h100")
WORDS = "--machine h100 --source test --license CC0-1.0 --device cpu --repeats 1 --steps 2".split()
WORDS_OF = {"source": "a test", "license": "CC0-1.0", "workload": "net"}


def captured_step(foreach: bool = False):
    """Captures a step with convolution, batch norm, pooling and masking with -inf."""

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.private_stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(True), nn.MaxPool2d(3, 2))
            self.head = nn.Linear(8, 4)

        def forward(self, x):
            x = self.private_stem(x).mean((2, 3))
            return self.head(x.masked_fill(x > 9, -float("inf")).softmax(1))

    model = Network()
    if foreach:  # one kernel updates many parameters
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, foreach=True)
    else:
        optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    batch = torch.randn(2, 3, 16, 16), torch.randint(4, (2,))
    return capture(model, nn.CrossEntropyLoss(), optimizer, batch, machine=H100, name="secret")


def profile_of(captured, times: int = 2) -> Profile:
    """Returns a profile whose kernels take ``times`` as long as modeled."""
    durations = tuple(times * kernel.duration_ns for kernel in captured.program.kernels)
    return Profile("secret", "0", "h100", "NVIDIA H100 80GB HBM3", "2.9.0", durations)


@pytest.mark.parametrize("foreach", [False, True])
def test_predictions_of_a_step_equal_those_of_its_capture(foreach):
    captured = captured_step(foreach)
    step = measured_step(captured, profile_of(captured), rates=H100, **WORDS_OF)
    slower = replace(H100, memory_bytes_per_s=10**9)
    for machine in (H100, slower):
        kernels = zip(captured.on(machine).program.kernels, captured.nodes, strict=True)
        assert modeled(step, machine) == [kernel.duration_ns for kernel, nodes in kernels if nodes]
    assert foreach or len(step.operators) < len(step.kernels)
    full = replace(step, precision=Precision(conv_tf32=False, matmul_tf32=False))
    slow = replace(H100, flops_per_s={"float32": 10**9, "tf32": 10**15})
    assert sum(x or 0 for x in modeled(full, slow)) > 1.5 * sum(x or 0 for x in modeled(step, slow))
    compared = steps.of_profile(step)
    assert len(compared) == len(step.kernels)
    assert all(row.modeled == pytest.approx(row.measured / 2) for row in compared)


def test_a_step_is_written_without_names_and_read_again(tmp_path):
    captured = captured_step()
    step = measured_step(captured, profile_of(captured), step_ns=5, **WORDS_OF)
    (tmp_path / "step.json").write_text(step.to_json())
    assert load_json(tmp_path / "step.json", MeasuredStep.from_dict) == step
    text = step.to_json().lower()
    assert not any(word in text for word in ("secret", "private", "head", ".py", "weight", "infinity"))
    conv = next(i for i, o in enumerate(step.operators) if o.name == "aten.convolution.default")
    step.operators[conv] = replace(
        step.operators[conv], name="nolib.convolution.default"
    )  # an operator that PyTorch lacks
    assert [ns is None for ns in modeled(step, H100)] == [operator == conv for operator, *_ in step.kernels]


def test_the_wrong_file_or_profile_is_refused():
    for data in ([], {"format": "profile/1"}, {"format": "measured/1", "who": "me"}):
        with pytest.raises(FormatError, match="measured/1"):
            MeasuredStep.from_dict(data)
    captured = captured_step()
    with pytest.raises(FormatError, match="another program"):
        measured_step(captured, replace(profile_of(captured), durations_ns=(1,)), **WORDS_OF)


FACTORY = """
import torch
def factory():
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters())
    return model, torch.nn.CrossEntropyLoss(), optimizer, (torch.randn(3, 4), torch.zeros(3).long())
"""


@pytest.mark.parametrize(("network", "cache"), [("tiny_gpt2", "hot"), ("own_net_a:factory", "step")])
def test_the_command_measures_a_step(tmp_path, monkeypatch, network, cache):
    (tmp_path / "own_net_a.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    assert main(["profile", network, "step.json", *WORDS, "--cache", cache]) == 0
    step = load_json(tmp_path / "step.json", MeasuredStep.from_dict)
    assert (step.torch, step.cache, step.cuda) == (torch.__version__, cache, "") and "own_net" not in step.to_json()
    assert step.step_ns > 0 and sum(ns for _, _, ns, _ in step.kernels) > 0
    assert step.reserved_bytes is None and step.context_bytes is None  # measured on GPUs only


@pytest.mark.parametrize(
    ("network", "more", "named"),
    [
        ("tiny_gpt3", (), "network: expected"),
        ("own:net", (), "'own'"),
        ("tiny_gpt2", ("--machine", "h101"), "'h101'"),
        ("tiny_gpt2", ("--cache", "warm"), "--cache: expected"),
        ("tiny_gpt2", ("--repeats", "0"), "--repeats: expected"),
        ("tiny_gpt2", ("--rates", "none.yaml"), "none.yaml"),
        pytest.param(
            "tiny_gpt2",
            ("--device", "cuda"),
            "--device cpu",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="needs a computer without a GPU"),
        ),
    ],
)
def test_what_the_command_refuses(tmp_path, capsys, network, more, named):
    assert main(["profile", network, str(tmp_path / "step.json"), *WORDS, *more]) == 2
    assert named in capsys.readouterr().err and not (tmp_path / "step.json").exists()
