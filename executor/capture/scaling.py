"""GradScaler in a capture: its step is captured as taken; the number that would skip it is asked when the graph runs.

Eager PyTorch reads on the host whether a gradient was not finite, and leaves out ``optimizer.step()``; fused updates
ask on the device, and need nothing here. The program is that of the normal step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from executor.capture.recorder import Recorder


@contextmanager
def traced_scalers(recorder: Recorder) -> Iterator[None]:
    """While a step is traced."""
    maybe, update = GradScaler._maybe_opt_step, GradScaler.update

    def taken(self: GradScaler, optimizer: Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        found = list(state["found_inf_per_device"].values())
        if len(found) != 1:
            raise NotImplementedError("a GradScaler of gradients on several devices")
        with recorder.optional(found[0]):
            return optimizer.step(*args, **kwargs)

    def updated(self: GradScaler, *args: Any, **kwargs: Any) -> None:
        with torch.no_grad():  # as all that an optimizer does
            update(self, *args, **kwargs)

    GradScaler._maybe_opt_step, GradScaler.update = taken, updated  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        GradScaler._maybe_opt_step, GradScaler.update = maybe, update  # type: ignore[method-assign]
