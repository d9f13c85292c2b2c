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


@pytest.mark.parametrize("name", ["tiny_resnet", "tiny_gpt2", "tiny_llama_bf16", "tiny_resnet_bf16"])
@pytest.mark.parametrize("blocks", [1, 99])
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


class Square(nn.Module):
    """Saves its input, twice, and nothing else."""

    def forward(self, x):
        return x * x


def test_by_hand(monkeypatch):
    """Four blocks save 80 bytes each; while the third begins, what the first saved is gone, and so on back."""
    monkeypatch.setattr(offload, "MIN_BYTES", 80)
    blocks = [Square() for _ in range(4)]
    around = Offload(nn.Sequential(*blocks), "cpu")
    held = []

    def watch(inner):
        def forward(x):
            out = inner(x)
            held.append([sum(i.device is not None for i in b.items.values()) for b in around.blocks])
            return out

        return forward

    run = [watch(around.wrap(block.forward)) for block in blocks]
    x = torch.full((20,), 1.01, requires_grad=True)
    y = x
    for forward in run:
        y = forward(y)
    assert held == [[1], [1, 1], [0, 1, 1], [0, 0, 1, 1]] and around.copied == 4 * 80
    seen = []
    monkeypatch.setattr(around, "_fetch", lambda n, fetch=around._fetch: (seen.append(n), fetch(n)))
    y.sum().backward()
    # Each is asked for twice (x times x), and each time the one before is fetched, too.
    assert seen == [3, 2] * 2 + [2, 1] * 2 + [1, 0] * 2 + [0, -1] * 2
    plain = torch.full((20,), 1.01, requires_grad=True)
    (((plain**2) ** 2) ** 2 * (((plain**2) ** 2) ** 2)).sum().backward()
    assert torch.allclose(x.grad, plain.grad)


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
