"""Tests bundled workloads, their configurations, and user-defined models."""

import signal
import sys
import textwrap

import pytest
import torch
from torch import nn

from executor import CaptureError
from experiments import workloads
from experiments.plan.capture import Batches
from experiments.workloads import WorkloadError, load, with_batch
from simulator import Machine
from tests.experiments.workloads.conftest import config


def test_times_are_scaled_only_where_measured():
    entry = config("vgg11", batch_size=4)
    k40c = load(entry, Machine.load("k40c")).program
    assert k40c.ideal_ns == load({**entry, "iteration_ms": {}}, Machine.load("k40c")).program.ideal_ns
    assert k40c.ideal_ns != 43 * 10**6
    for key, wrong in (("iteration_ms", {"gtx1080ti": -1}), ("algorithms", "fft")):
        with pytest.raises(WorkloadError, match=f"workload.{key}"):
            load({**entry, key: wrong}, Machine.load("gtx1080ti"))


def test_algorithms_are_an_option():
    entry = config("vgg11")
    machine = Machine.load("gtx1080ti")
    assert entry["algorithms"] is False
    plain = load(entry, machine).program
    asked = load({**entry, "algorithms": True}, machine).program
    assert not any(k.variants for k in plain.kernels) and plain.tensors == asked.tensors
    assert load({k: v for k, v in entry.items() if k != "algorithms"}, machine).program == plain
    assert asked.ideal_ns == plain.ideal_ns and asked.peak_bytes > plain.peak_bytes
    assert {k.kind for k in asked.kernels if k.variants} == {"conv"}


FACTORY = textwrap.dedent("""
    import torch
    from torch import nn

    def language():
        words = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.words = words
            def forward(self, input_ids, labels):
                return {"loss": nn.functional.cross_entropy(self.words(input_ids).transpose(1, 2), labels)}
        ids = torch.zeros(3, 6).long()
        return Model(), None, torch.optim.SGD(words.parameters(), 0.1), {"input_ids": ids, "labels": ids}

    def slices():
        model, _, optimizer, batch = language()
        text = torch.zeros(3, 7).long()
        return model, None, optimizer, {"input_ids": text[:, :-1], "labels": text[:, 1:]}

    def two_models():
        nets = [nn.Linear(4, 8), nn.Linear(8, 4)]
        optimizers = [torch.optim.Adam(net.parameters()) for net in nets]
        def step(x, y):
            loss = nn.functional.mse_loss(nets[1](nets[0](x)), y)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach(), {"largest": x.amax(1)}
        return step, (torch.randn(3, 4), torch.randn(3, 4))

    def short():
        return nn.Linear(1, 1), None

    def pairs():
        model = nn.Linear(4, 4)
        return model, nn.MSELoss(), torch.optim.SGD(model.parameters()), ({"x": torch.zeros(3, 4)}, torch.zeros(3, 4))

    def broken():
        raise RuntimeError("no data here")

    number = 3
""")


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_model.py").write_text(FACTORY)
    (tmp_path / "own_failing.py").write_text("settings = {}\nsettings['weights']\n")
    (tmp_path / "own_broken.py").write_text("import not_installed_anywhere\n")
    monkeypatch.chdir(tmp_path)
    yield
    sys.modules.pop("own_model", None)


@pytest.mark.parametrize("factory", ["language", "slices", "two_models"])
def test_own_models_of_other_forms_at_any_batch(own, factory):
    """Covers labels that are the inputs or share their storage, and a user-defined step with two optimizers."""
    workload = {"name": "own", "family": "module", "target": f"own_model:{factory}"}
    program, *larger = (load(workload, Machine.load("v100"), batch).program for batch in (None, 6, 5))
    assert {k.phase for k in program.kernels} == {"forward", "backward", "optimizer"}
    batches = Batches(3, program, 6, larger[0])
    assert batches.interpolated(5).tensors == larger[1].tensors and batches.peak_bytes(5) == larger[1].peak_bytes
    assert sum(t.kind == "input" for t in program.tensors) == (2 if factory == "two_models" else 1)


@pytest.mark.parametrize("kept", [3, 5])
def test_a_tensor_that_stands_twice_in_a_batch_does_so_at_another_size(kept):
    """Includes views of a larger storage."""
    ids = torch.zeros(kept, 6)[:3]
    (batch,) = with_batch((nn.Linear(6, 2), None, None, {"x": ids, "y": [ids, ids[:, 1:]]}), 4)[3:]
    assert batch["x"] is batch["y"][0] and batch["x"].shape == (4, 6) and batch["y"][1].shape == (4, 5)
    assert (batch["y"][1].untyped_storage().data_ptr() == batch["x"].untyped_storage().data_ptr()) == (kept == 3)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("own_model", "'pkg.mod:factory'"),
        (None, "'pkg.mod:factory'"),
        ("own_missing:tiny", "'own_missing'"),
        ("own_broken:tiny", "'not_installed_anywhere'"),
        ("own_model:absent", "'absent'"),
        ("own_modle:language", "'own_model'"),
        ("own_model:langauge", "the nearest is 'language'"),
        ("own_model.py:language", "the module is 'own_model'"),
        ("folder/own_model.py:language", "the module is 'folder.own_model'"),
        ("own_failing:tiny", r"KeyError: 'weights' \(own_failing.py:2\)"),
        ("own_model:pairs", "not dict; the model gets this mapping as its input: .*pass the mapping alone"),
        ("own_model:number", "'number'"),
        ("own_model:short", "Linear, NoneType"),
        ("own_model:broken", r"no data here \(own_model.py:41\)"),
    ],
)
def test_bad_target_is_one_sentence(own, target, message):
    with pytest.raises((WorkloadError, CaptureError), match=message) as error:
        load({"name": "module", "family": "module", "target": target}, Machine.load("v100"))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_waits_for_the_end_of_a_capture_unless_pressed_twice(presses, monkeypatch):
    done = []

    def capture(*_, **__):
        for _ in range(presses):
            signal.raise_signal(signal.SIGINT)
        done.append(True)

    monkeypatch.setattr(workloads, "capture", capture)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            load(config("mlp"), Machine.load("h100"))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert done == [True] * (presses == 1)
