"""Tests of the environments."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def random_actions(rng: np.random.Generator, masks: NDArray[Any]) -> NDArray[np.int64]:
    """Returns a random valid action per row of ``masks``."""
    return np.array([rng.choice(np.flatnonzero(mask)) for mask in masks])
