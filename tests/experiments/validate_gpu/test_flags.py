"""Determinism is set for a while and put back; what has no deterministic form is named."""

import pytest
import torch

from experiments.validate_gpu.flags import deterministic, report


def state():
    return (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic, torch.utils.deterministic.fill_uninitialized_memory,
            torch.is_warn_always_enabled())  # fmt: skip


def test_it_is_set_and_put_back():
    before = state()
    with deterministic() as loose:
        assert state() == (True, True, True, False, True)
        assert report()["deterministic_algorithms"] and report()["cudnn_deterministic"]
    assert state() == before and loose == []
    with pytest.raises(ZeroDivisionError), deterministic():
        raise ZeroDivisionError
    assert state() == before


def test_what_has_no_deterministic_form_is_named_each_time():
    x = torch.zeros(4, dtype=torch.float64)
    for _ in range(2):
        with deterministic() as loose:
            for _ in range(3):
                x.put_(torch.tensor([0, 0]), torch.ones(2, dtype=torch.float64))  # in any order, on the CPU, too
        assert loose == ["put_"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_bits_repeat_on_a_gpu():
    x = torch.randn(8, 64, 56, 56, device="cuda", requires_grad=True)
    conv = torch.nn.Conv2d(64, 64, 3, padding=1, device="cuda")
    with deterministic():
        grads = []
        for _ in range(3):
            conv.zero_grad()
            conv(x).square().sum().backward()
            grads.append(conv.weight.grad.clone())
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])
    assert report()["expandable_segments"] + report()["other_segments"] > 0
