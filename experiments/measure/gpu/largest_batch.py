"""Finds the largest batch that each method of pytorch_baselines.py trains under a memory cap.

The cap is the memory that eager training needs for the network's own batch. Each method uses its strongest setting
(all blocks, or an activation budget of 0). A batch fits if two steps run; the first creates the optimizer state. The
search doubles the batch and then bisects (common/bisection.py).
"""

# Choices (reasons in experiments/README.md):
# (a) On CUDA, torch.cuda.set_per_process_memory_fraction caps what PyTorch reserves and libraries hold.
# (b) Ours plans for the cap divided by each of CAPS, smallest divisor first, with a profile measured at that batch.
# (c) On the CPU, the storages that a dispatch mode sees are compared with the cap; for ours, its ledger enforces it.
# (d) All memory is freed between two tries. If the time ends, the row has a note and the best batch so far.

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import agents
from executor import CaptureError, PlannedStep, StepError
from executor.capture.profile import ProfileError
from executor.memory.engines import line
from experiments.common.bisection import largest
from experiments.measure.gpu.pytorch_baselines import OURS, Counter, Levels, Step, with_measured_durations
from experiments.measure.gpu.training import CAPS
from experiments.measure.networks import (
    Network,
    build,
    cap_memory,
    free_cache,
    get_planner,
    host_bytes,
    own_batch,
    synchronize,
)
from experiments.measure.record import LATE
from simulator import Machine, OutOfMemory
from simulator.deadline import TimeUp, within
from simulator.plan import PlanError


@dataclass
class Tries:
    """Batches of one method that were tried.

    Attributes:
        name: network.
        method: method of pytorch_baselines.py.
        device: "cuda" or "cpu".
        machine: machine to plan for.
        cap: memory cap in bytes, until ``row`` sets it.
        most: largest batch of the search, in multiples of the network's own batch.
        part: relative resolution of the answer: 1 / part.
        tried: the reason why a batch did not fit ("" if it did), by batch.
    """

    name: str
    method: str
    device: str
    machine: Machine
    cap: int = 0
    most: int = 64
    part: int = 32
    tried: dict[int, str] = field(default_factory=dict)

    def row(self, seconds: float, caps: dict[str, int]) -> dict[str, Any]:
        """Searches for at most ``seconds`` and returns the row; adds the network's cap in bytes to ``caps``."""
        default = own_batch(self.name)
        is_late = False
        try:
            with within(seconds):
                if self.name not in caps:
                    caps[self.name] = _eager_bytes(self.name, self.device)
                self.cap = caps[self.name]
                best = largest(self.fits, default, self.most * default, self.part)
        except TimeUp:
            best = max((n for n, reason in self.tried.items() if not reason), default=0)
            is_late = True
        finally:
            _uncap(self.device)
        row: dict[str, Any] = {"cap": self.cap, "tries": len(self.tried), "time_over": is_late}
        too_large = min((n for n, reason in self.tried.items() if reason), default=None)
        if too_large is not None:
            row |= {"too_large": too_large, "reason": self.tried[too_large]}
        return row | ({"batch": best} if best else {"failed": LATE if is_late else self.tried[min(self.tried)]})

    def fits(self, batch: int) -> bool:
        """Returns whether the method trains at this batch within the cap."""
        free_cache()
        if self.method in ("offload", "save_on_cpu") and self.device == "cuda":  # running out of host memory is fatal
            pinned = 2 * self.cap * batch // own_batch(self.name)  # PyTorch rounds pinned sizes up to powers of two
            if pinned > host_bytes():
                self.tried[batch] = f"it may pin {pinned:,} bytes, but the host has {host_bytes():,}"
                return False
        if self.device == "cuda":
            cap_memory(self.cap + torch.cuda.memory_reserved(), self.device)
        self.tried[batch] = lack_of_memory(lambda: self._train(batch))
        _uncap(self.device)
        return not self.tried[batch]

    def _train(self, batch: int) -> str:
        network = build(self.name, self.device, batch=batch)
        if self.method == "ours":
            return self._ours(network)
        step: Step = network.step
        if self.method != "eager":
            levels = Levels(self.name, self.device, self.method)
            step = levels.prepare(network, levels.count - 1)
        peak = _train(step, self.device)
        return f"its peak is {peak:,} bytes" if peak > self.cap else ""

    def _ours(self, network: Network) -> str:
        """Trains under the first plan of OURS that fits; returns the reasons if none does."""
        captured = network.captured(self.machine)
        captured = with_measured_durations(captured, self.device, self.machine, repeats=1)

        def train(planner: str, limit: int) -> str:
            plan = get_planner(planner, captured.program, **OURS[planner]).plan(captured.program, self.machine, limit)
            with PlannedStep(captured, plan, self.machine, limit, graph=False) as step:
                for _ in range(2):
                    step(*network.batch)
            synchronize(self.device)
            return ""

        reasons = []
        for planner in OURS:
            for divisor in CAPS if self.device == "cuda" else (1.0,):
                reasons.append(lack_of_memory(partial(train, planner, int(self.cap / divisor))))
                if not reasons[-1]:
                    return ""
                free_cache()
        return "; ".join(dict.fromkeys(reasons))


def lack_of_memory(function: Callable[[], str]) -> str:
    """Returns the function's result, or the message of its out-of-memory error; re-raises other exceptions."""
    try:
        return function()
    except Exception as error:
        if not lacks_memory(error):
            raise
        return line(error)


def lacks_memory(error: BaseException | None) -> bool:
    """Returns whether the error, or a cause of it, is a lack of device or host memory."""
    while error:
        words = str(error)
        if isinstance(error, (torch.OutOfMemoryError, agents.Infeasible, OutOfMemory)):
            return True
        if isinstance(error, PlanError) and "host" in words:
            return True
        if isinstance(error, (RuntimeError, CaptureError, ProfileError, StepError)) and (
            "unable to find an engine" in words or "out of memory" in words or "cannot be pinned" in words
        ):
            return True
        error = error.__cause__
    return False


def _train(step: Step, device: str) -> int:
    """Runs two steps and returns their peak in bytes (CPU; 0 on CUDA)."""
    counter = Counter()
    with counter if device != "cuda" else nullcontext():
        for _ in range(2):  # the first creates the optimizer state
            step()
    synchronize(device)
    return counter.peak


def _eager_bytes(name: str, device: str) -> int:
    """Returns the bytes that eager training reserves (CUDA) or uses (CPU) at the network's own batch."""
    peak = _train(build(name, device).step, device)
    if device != "cuda":
        return peak
    free_cache()
    reserved_before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    _train(build(name, device).step, device)
    return int(torch.cuda.max_memory_reserved() - reserved_before)


def _uncap(device: str) -> None:
    cap_memory(None, device)
    free_cache()
