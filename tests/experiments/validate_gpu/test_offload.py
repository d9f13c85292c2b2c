"""Offloading computes the same, copies each storage once, and holds what two blocks saved."""

import pytest
import torch
from torch import nn

from experiments.validate_gpu import offload
from experiments.validate_gpu.networks import build
from experiments.validate_gpu.offload import Offload


def wrapped(network, device="cpu", blocks=99):
    around = Offload(network.model, device)
    for block in network.blocks[:blocks]:
        block.forward = around.wrap(block.forward)
    return around


@pytest.mark.parametrize(("name", "blocks"), [("tiny_resnet", 1), ("tiny_gpt2", 99), ("tiny_llama_bf16", 99)])
def test_the_same_bits(name, blocks, monkeypatch):
    monkeypatch.setattr(offload, "MIN_BYTES", 1)

    def losses(around):
        network = build(name, "cpu")
        copied = wrapped(network, blocks=blocks) if around else None
        torch.manual_seed(1)
        return [float(network.step()) for _ in range(3)], copied

    plain, _ = losses(False)
    same, around = losses(True)
    assert same == plain and around.copied > 0
    assert not [i for b in around.blocks for i in b.items.values() if i.device is not None or i.host is not None]


def test_parameters_and_small_tensors_stay(monkeypatch):
    layer = nn.Linear(8, 8)
    around = Offload(layer, "cpu")
    forward = around.wrap(layer.forward)
    monkeypatch.setattr(offload, "MIN_BYTES", 10**6)
    forward(torch.ones(4, 8, requires_grad=True)).sum().backward()
    assert around.copied == 0
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    forward(torch.ones(4, 8, requires_grad=True)).sum().backward()
    assert around.copied == 4 * 8 * 4  # the input, not the weight


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_it_takes_less_memory_and_the_losses_are_the_same():
    def run(around):
        network = build("resnet50", "cuda")
        if around:
            wrapped(network, "cuda")
        torch.manual_seed(1)
        losses = [float(network.step())]
        torch.cuda.reset_peak_memory_stats()
        losses += [float(network.step()) for _ in range(2)]
        return losses, torch.cuda.max_memory_allocated()

    plain, much = run(False)
    same, less = run(True)
    assert same == pytest.approx(plain, rel=1e-4) and less < 0.6 * much
