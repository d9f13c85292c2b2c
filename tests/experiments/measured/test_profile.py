"""A network's step, measured on this computer: the file that is written, and what is refused."""

import json

import pytest
import torch

from executor.memory.context import ContextError, context_bytes
from experiments.measured import add
from experiments.measured.__main__ import main
from experiments.measured.profile import profiled
from simulator.files import FormatError

WORDS = "--machine h100 --source".split() + ["a test"] + "--licence CC0-1.0 --device cpu --repeats 1 --steps 2".split()


def test_a_step_is_measured_and_can_be_read(tmp_path, capsys):
    out = tmp_path / "step.json"
    assert main(["profile", "tiny_gpt2", str(out), *WORDS, "--cache", "hot"]) == 0
    data = json.loads(out.read_text())
    assert capsys.readouterr().out == f"{out}\n"
    assert data["format"] == "measured/1" and data["workload"] == "tiny_gpt2" and data["torch"] == torch.__version__
    assert data["step_ns"] > 0 and sum(ns for _, _, ns, _ in data["kernels"]) > 0
    assert data["reserved_bytes"] is None and data["context_bytes"] is None  # of a GPU
    with pytest.raises(FormatError, match="is no GPU"):
        add.check(out)


FACTORY = """
import torch
def factory():
    model = torch.nn.Linear(4, 2)
    return model, torch.nn.CrossEntropyLoss(), OPTIMIZER, (torch.randn(3, 4), torch.zeros(3).long())
"""


def test_anybodys_own_network(tmp_path, monkeypatch):
    (tmp_path / "own_net_a.py").write_text(FACTORY.replace("OPTIMIZER", "torch.optim.SGD(model.parameters())"))
    monkeypatch.chdir(tmp_path)
    found = profiled(
        "own_net_a:factory", "h100", "cpu", source="a test", licence="MIT", cache="step", repeats=1, steps=1
    )
    assert found.workload == "factory" and found.cache == "step"
    assert "own_net_a" not in json.dumps(found.to_dict())


@pytest.mark.parametrize(
    ("network", "more", "message"),
    [
        ("tiny_gpt3", (), "network: expected one of vgg16, "),
        ("own:net", (), "target: there is no module 'own'"),
        ("tiny_gpt2", ("--machine", "h101"), "machine: there is no preset 'h101'"),
        ("tiny_gpt2", ("--cache", "warm"), "--cache: expected one of cold, hot, step, got 'warm'"),
        ("tiny_gpt2", ("--repeats", "0"), "--repeats: expected at least 1, got 0"),
        ("tiny_gpt2", ("--rates", "none.yaml"), "none.yaml"),
    ],
)
def test_what_is_refused(tmp_path, capsys, network, more, message):
    assert main(["profile", network, str(tmp_path / "step.json"), *WORDS, *more]) == 2
    error = capsys.readouterr().err
    assert message in error and not (tmp_path / "step.json").exists()


def test_a_source_with_a_path_is_refused_before_anything_is_measured(tmp_path, capsys):
    words = [word if word != "a test" else "/home/jo" for word in WORDS]
    assert main(["profile", "tiny_gpt2", str(tmp_path / "step.json"), *words]) == 2
    assert capsys.readouterr().err.startswith("profile.source: has a path in it")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a computer without a GPU")
def test_without_a_gpu(tmp_path, capsys):
    words = [word if word != "cpu" else "cuda" for word in WORDS]
    assert main(["profile", "tiny_gpt2", str(tmp_path / "step.json"), *words]) == 2
    assert capsys.readouterr().err == "there is no CUDA GPU to profile on; --device cpu does the same without one\n"
    with pytest.raises(ContextError, match="there is no CUDA GPU whose context could be measured"):
        context_bytes()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_the_context_of_a_gpu():
    assert 50 * 2**20 < context_bytes() < 2 * 2**30
