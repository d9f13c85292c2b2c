"""State of the process that training may depend on, which captures and plans must leave as it was."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def process_state() -> list[Any]:
    """Returns everything of the process that training could depend on."""
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        str(np.random.get_state()),  # noqa: NPY002 (the global state is meant)
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_num_threads(),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cpu"),
    ]
