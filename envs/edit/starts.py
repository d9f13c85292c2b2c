"""Start plans of ``GpuMemoryEdit-v1`` from planners, which are imported on first use."""

from __future__ import annotations

import numpy as np

from envs.edit.task import EditTask
from simulator.compiled.encoding import Ints
from simulator.modes import Choice


def empty(task: EditTask) -> list[Ints]:
    """Returns the rows of the plan that evicts the tensor of every gap in the gap's first mode."""
    from agents.search.annealing import everything

    return [everything(task.program, task.mode, task.min_bytes)]


def heuristic(task: EditTask) -> list[Ints]:
    """Returns the rows of the best published heuristic's plan, or no rows if none is feasible."""
    from agents.search import annealing

    best, _, _ = annealing.start(task.program, task.machine, task.limit, task.engine, task.mode, task.min_bytes)
    return [] if best is None else [best]


def policy(task: EditTask) -> list[Ints]:
    """Returns the rows of ``policy_plans`` and of the best published heuristic's plan."""
    return [*policy_plans(task), *heuristic(task)]


STARTS = {"policy": policy, "heuristic": heuristic, "empty": empty}


def policy_plans(task: EditTask, samples: int | None = None, seed: int = 0, until: float | None = None) -> list[Ints]:
    """Returns the rows of plans decoded from the policy; sets its probabilities as the task's priors and move weights.

    Args:
        task: the task, whose ``priors`` and ``moves.weights`` are overwritten.
        samples: sampled plans in addition to the most likely one; None: the policy's default.
        seed: seed of the samples.
        until: time.monotonic() after which sampling stops.

    Returns:
        one int64 (decisions, 6) per plan.
    """
    from agents.learned.policy import OPTIONS, SAMPLES, WEIGHTS, GuidedSearch, decode_plans
    from agents.learned.policy_net import trained

    search = GuidedSearch(task.engine, task.moves)
    samples = SAMPLES if samples is None else samples
    decode_plans(trained(WEIGHTS), search, task.mode, samples, seed=seed, until=until, graph=task.graph)
    task.priors = np.maximum(task.moves.weights - OPTIONS.min_smoothing, 0.0)  # without what lets the moves be unlikely
    task.priors[:, Choice.RESIDENT] = 1.0 - task.priors.sum(1)
    return [rows for _, rows in search.plans]


def floor_of(task: EditTask) -> float:
    """Returns the certified lower bound on a task's overhead, in percentage points."""
    from agents.floor import floor

    return 100.0 * floor(task.program, task.machine, task.limit, mode=task.mode).overhead
