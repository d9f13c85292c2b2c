"""Tests of clock summaries with a fake NVML and without NVML, and of restoring determinism settings."""

import sys
import time
from types import SimpleNamespace

import pytest
import torch

from experiments.measure.conditions import deterministic, report, sampled_conditions, summary


def test_a_summary_by_hand():
    samples = [(1980, 2619, 300.0, 41, 0x0), (1200, 2619, 700.0, 83, 0x24), (1500, None, None, 60, 0x4)]
    assert summary(samples) == {
        "samples": 3,
        "sm_mhz": 1560,
        "least_sm_mhz": 1200,
        "least_memory_mhz": 2619,
        "watt": 500,
        "celsius": 83,
        "slowed": {"power cap": 2 / 3, "software thermal": 1 / 3},
    }
    assert summary([(None,) * 5]) == {"samples": 1, "slowed": {}}


def test_the_gpu_is_watched_while_the_block_runs(monkeypatch):
    class NVMLError(Exception):
        pass

    def missing(*_):
        raise NVMLError("not supported")

    asked = []

    def clock(gpu, kind):
        asked.append(kind)
        return (1980 if len(asked) < 3 else 1500) if kind == 1 else 2619

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-a-b": 7}[uuid],
        nvmlDeviceGetClockInfo=clock,
        nvmlDeviceGetPowerUsage=lambda gpu: 310_500,
        nvmlDeviceGetTemperature=missing,
        nvmlDeviceGetCurrentClocksThrottleReasons=lambda gpu: 0x4,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="a-b"))
    with sampled_conditions("cuda", period_s=1e-4) as seen:
        while len(asked) < 4:  # two samples
            time.sleep(1e-3)
    assert seen["samples"] >= 2 and (seen["least_sm_mhz"], seen["least_memory_mhz"]) == (1500, 2619)
    assert seen["watt"] == 310.5 and seen["slowed"] == {"power cap": 1} and "celsius" not in seen
    nvml.nvmlInit = missing
    with sampled_conditions("cuda") as seen:
        pass
    assert seen == {"absent": "NVML cannot open the GPU: not supported"}
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for device, word in (("cuda", "nvidia-ml-py"), ("cpu", "no GPU")):
        with sampled_conditions(device) as seen:
            pass
        assert word in seen["absent"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_is_watched():
    with sampled_conditions("cuda") as seen:
        x = torch.randn(4096, 4096, device="cuda")
        until = time.monotonic() + 2
        while time.monotonic() < until:
            (x @ x).sum().item()
    assert seen["samples"] >= 3 and seen["sm_mhz"] > 500 and seen["watt"] > 50


def state():
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.deterministic,
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.is_warn_always_enabled(),
    )


def test_settings_are_applied_and_restored():
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
                x.put_(
                    torch.tensor([0, 0]), torch.ones(2, dtype=torch.float64)
                )  # has no deterministic form on the CPU either
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
