"""Tests of ``early_update``: what it says of a step whose update needs all gradients at once."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from executor.capture.capture import CaptureError, capture
from executor.capture.early_update import early_update
from simulator import Plan, simulate
from simulator.machine import Machine

WIDTH = 128
SAME_BUCKET = 1  # byte: every parameter is updated alone


def captured(**options: Any) -> Any:
    model = nn.Sequential(*(m for _ in range(6) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    batch = torch.zeros(4, WIDTH), torch.zeros(4, WIDTH)
    return capture(model, nn.MSELoss(), optimizer, batch, bucket_bytes=SAME_BUCKET, check=False, **options)


def test_a_step_is_early_or_says_what_a_change_would_give() -> None:
    early = early_update(captured())
    assert early.captured is not None and early.captured.early_update
    assert (early.cause, early.changed) == ("", None)
    for options, cause in (({"clip_norm": 1.0}, "clip_norm"), ({"scaler": GradScaler("cpu")}, "GradScaler")):
        step = captured(**options)
        found = early_update(step)
        assert found.captured is None and cause in found.cause and found.changed is not None
        # Without the norm or the scaler the gradients need not live at once.
        saved = step.program.peak_bytes - found.changed.peak_bytes
        assert saved == pytest.approx(captured().program.peak_bytes - early.captured.program.peak_bytes, rel=0.05)
        assert saved > 3 * 4 * WIDTH**2
        simulate(found.changed, Plan(), Machine.load("h100"), found.changed.peak_bytes)
        with pytest.raises(CaptureError, match=f"{cause}.*; the step's peak would then be .* GB"):
            captured(**options, optimizer_in_backward=True)


def test_gradients_that_stay_leave_nothing_to_gain() -> None:
    found = early_update(captured(keep_grads=True))
    assert found.captured is None and "keep_grads" in found.cause and found.changed is None
