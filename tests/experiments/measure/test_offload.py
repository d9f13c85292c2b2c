"""Tests that offloading copies each storage once and keeps two blocks on the device (losses: test_validate_gpu.py)."""

import pytest
import torch
from torch import nn

from experiments.measure.gpu.offload import Offload
from experiments.measure.networks import build


def wrapped(network, device="cpu", **options):
    around = Offload(network.model, device, **options)
    for block in network.blocks:
        block.forward = around.wrap(block.forward)
    return around


def test_nothing_is_left_after_a_step():
    network = build("tiny_gpt2", "cpu")
    around = wrapped(network, min_bytes=1)
    network.step()
    assert around.copied > 0
    assert not [i for b in around.blocks for i in b.items.values() if i.device is not None or i.host is not None]


def test_parameters_and_small_tensors_stay():
    layer = nn.Linear(8, 8)
    for min_bytes, copied in ((10**6, 0), (1, 4 * 8 * 4)):  # the input, not the weight
        around = Offload(layer, "cpu", min_bytes=min_bytes)
        around.wrap(layer.forward)(torch.ones(4, 8, requires_grad=True)).sum().backward()
        assert around.copied == copied


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
