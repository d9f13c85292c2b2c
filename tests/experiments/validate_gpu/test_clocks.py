"""Clocks by hand, with a stand-in for nvidia-smi, and without one."""

import time

import pytest
import torch

from experiments.validate_gpu.clocks import summary, watched

# Knows the older field only, as old drivers do; with -lms it goes on until it is ended.
STAND_IN = """#!/bin/sh
case "$*" in *clocks_event*) echo 'Field "clocks_event_reasons.active" is not a valid field to query.'; exit 2;; esac
echo "1980, 2619, 310.50, 41, 0x0000000000000004"
line="1500, 2619, 689.50, 60, 0x0000000000000000"
case "$*" in *-lms*) echo "$line"; echo "$line"; : > "$(dirname "$0")/said"; while true; do sleep 0.02; done;; esac
"""


def test_a_summary_by_hand():
    lines = ["1980, 2619, 300.0, 41, 0x0", "1200, 2619, 700.0, 83, 0x24", "1500, [N/A], [N/A], 60, 0x4", "1980, 26"]
    assert summary(lines) == {
        "samples": 3, "sm_mhz": 1560, "least_sm_mhz": 1200, "least_memory_mhz": 2619, "watt": 500, "celsius": 83,
        "slowed": {"power cap": 2 / 3, "software thermal": 1 / 3},
    }  # fmt: skip
    assert summary([]) == {"samples": 0, "slowed": {}}


def test_it_is_watched_while_the_block_runs(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(STAND_IN)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with watched("cuda") as seen:
        while not (tmp_path / "said").exists():
            time.sleep(0.01)
    assert seen["samples"] == 3 and seen["least_sm_mhz"] == 1500 and seen["celsius"] == 60
    assert seen["slowed"]["power cap"] == 1 / 3
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    for device in ("cuda", "cpu"):
        with watched(device) as seen:
            pass
        assert set(seen) == {"absent"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_is_watched():
    with watched("cuda") as seen:
        x = torch.randn(4096, 4096, device="cuda")
        until = time.monotonic() + 2
        while time.monotonic() < until:
            (x @ x).sum().item()
    assert seen["samples"] >= 3 and seen["sm_mhz"] > 500 and seen["watt"] > 50
