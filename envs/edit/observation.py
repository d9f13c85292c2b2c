"""Observation of ``GpuMemoryEdit-v1``: the columns of edit walkers, scaled to [-1, 1].

``EditBatch`` computes the columns in the units of columns.py and of simulator/moves/gap_graph.py, which the shipped
networks read. The environments observe each divided by its entry in ``RANGES`` or ``static_ranges`` and clipped.
gpu_memory_edit.md has the resulting tables.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from envs.batch_env import Observation, SpareArrays
from envs.edit.batch import EditBatch
from envs.edit.columns import BIN, GAP, MAX_CHANGES, N_CHANGES, PLAN, n_columns
from envs.edit.task import Start
from envs.edit.walkers import scale_columns
from envs.render import Frame, edit_frame
from simulator.modes import Choice
from simulator.moves.gap_graph import BINS, BinColumns, BinState

LOG = 7.0  # ln(1 + 1000 x) of an iteration's time, x = 1, is 6.9
# Divisors of columns; the others are observed as they are.
RANGES = {
    GAP: {
        "stall_at_use": LOG,
        "memory_stall": LOG,
        "data_stall": LOG,
        "slack": 4.0,
        "out_delay": 5.0,
        "in_lead": 5.0,
        "in_start_lead": 5.0,
        "recomputation": LOG,
        "change_age": 3.0,
        "effect": 1.25,
        "trial_age": 3.0,
        "accepted_since": 3.0,
    },
    BIN: {
        "least_slack": 4.0,
        "mean_slack": 4.0,
        "data_stall": LOG / 3,
        "memory_stall": LOG / 3,
        "out_load": 3.0,
        "in_load": 3.0,
        "recomputation": LOG / 3,
    },
    PLAN: {"overhead": 3.0, "distance_to_best": 6.0, "temperature": 2.0, "since_best": 3.0, "accepted": 3.0},
}
DYNAMIC = ("gaps", "bins", "plan")  # observations that steps change
STATIC_RANGES = {"log_size_by_limit": 2.5, "log_gaps": 2.0, "lost_inputs": 8.0, "chained_gaps": 8.0, "load": 4.0}


def ranges_of(columns: np.dtype[np.void]) -> NDArray[np.float32]:
    """Returns the divisor of each float32 column of a dtype of columns.py."""
    divisors = np.ones(1, columns)
    for name, divisor in RANGES[columns].items():
        divisors[name] = divisor
    return divisors.view(np.float32)


def static_ranges(names: Iterable[str]) -> NDArray[np.float32]:
    """Returns the divisor of each static column; a logarithm's is LOG."""
    return np.array([STATIC_RANGES.get(name, LOG if name.startswith("log_") else 1.0) for name in names], np.float32)


class ObservedEdits(EditBatch):
    """Edit walkers of an environment; see ``EditBatch`` for attributes and further arguments.

    Args:
        only_copies: whether only ``copies`` of the observations are read, so that ``views`` need not be updated.
    """

    def __init__(self, *args: Any, only_copies: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._only_copies = only_copies
        bins = (*BinColumns._fields, *BinState._fields)
        priors = np.full(len(Choice), 3.0, np.float32)
        divisors = {
            "static": np.append(static_ranges(self.tasks[0].graph.columns), priors),
            "gaps": ranges_of(GAP),
            "bins": np.append(static_ranges(bins), ranges_of(BIN)),
            "plan": ranges_of(PLAN),
        }
        self._factors = {name: 1.0 / divisor for name, divisor in divisors.items()}
        self._scaled: Observation = {name: np.zeros_like(getattr(self, name)) for name in divisors}
        self._spare = {name: SpareArrays(self._scaled[name]) for name in DYNAMIC}
        if len(self.tasks) == 1:  # equal for all walkers and never changed
            static = (self.tasks[0].static * self._factors["static"]).clip(-1.0, 1.0)
            self._scaled["static"] = np.broadcast_to(static, self.static.shape)

    def _begin(self, i: int, t: int, start: Start) -> None:
        super()._begin(i, t, start)
        if len(self.tasks) > 1:
            self._scale("static", np.array([i]), self._scaled["static"])

    def _finish(self, mask: NDArray[np.bool_]) -> None:
        super()._finish(mask)
        if not self._only_copies:
            for name in DYNAMIC:
                self._scale(name, np.flatnonzero(mask), self._scaled[name])

    def _scale(self, name: str, members: NDArray[np.int64], out: NDArray[np.float32]) -> None:
        """Writes the scaled observations of ``members`` to ``out``."""
        raw = getattr(self, name)
        if raw.ndim == 2:
            raw = raw[:, None]
            out = out[:, None]
        scale_columns(raw, self._factors[name], members, out)

    def spaces(self) -> tuple[spaces.Discrete, spaces.Dict]:
        """Returns the action and observation spaces of one walker (gpu_memory_edit.md)."""
        gaps, static = self.static.shape[1:]
        shapes = {
            "static": (gaps, static),
            "gaps": (gaps, n_columns(GAP)),
            "bins": (BINS, self.bins.shape[2]),
            "plan": (n_columns(PLAN),),
        }
        return spaces.Discrete(self.actions), spaces.Dict(
            {
                **{name: spaces.Box(-1.0, 1.0, shape, np.float32) for name, shape in shapes.items()},
                "edits": spaces.Box(-1, N_CHANGES * gaps - 1, (self.edits.shape[1], MAX_CHANGES), np.int32),
                "action_mask": spaces.Box(0, 1, (self.actions,), np.int8),
                "task": spaces.Discrete(len(self.tasks)),
            }
        )

    def frame(self, i: int) -> Frame:
        """Returns what a rendering of walker i shows."""
        return edit_frame(self, i)

    def views(self) -> Observation:
        """Returns the observations of all walkers as views."""
        return {**self._scaled, "edits": self.edits, "action_mask": self.mask, "task": self.task}

    def copies(self, views: Observation) -> Observation:
        """Returns copies of ``views``; of static columns that never change, a read-only view."""
        copies = {
            key: view.copy() if view.flags.writeable else view for key, view in views.items() if key not in DYNAMIC
        }
        for name in DYNAMIC:
            copies[name] = self._spare[name].lend()
            self._scale(name, np.arange(self.count), copies[name])
        return {key: copies[key] for key in views}
