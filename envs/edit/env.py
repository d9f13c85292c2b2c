"""``GpuMemoryEdit-v1``: an episode edits a complete plan, one simulated neighbor at a time.

The state is a feasible plan with its simulated timeline. A step simulates one of M neighbors of the plan and accepts
or rejects it. The episode ends after ``budget`` simulator calls, or when the plan has no overhead. Every edit can be
undone by another edit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gymnasium.vector import AutoresetMode

from envs.batch_env import BatchEnv, BatchVectorEnv
from envs.compilation import announce
from envs.edit.observation import ObservedEdits
from envs.edit.start_cache import cached
from envs.edit.starts import STARTS, floor_of
from envs.edit.task import EditTask
from envs.memory_env import Limit, MachineLike, OneOrMore, ProgramLike, each_task
from envs.options import flat_options, one_of
from simulator.plan import Plan

__all__ = ["MemoryEditEnv", "MemoryEditVectorEnv", "make_edit_tasks"]


def make_edit_tasks(
    program: OneOrMore[ProgramLike] | None,
    machine: OneOrMore[MachineLike] | None,
    limit: OneOrMore[Limit],
    min_bytes: int,
    mode: str,
    start: str | Plan,
    by_class: bool = False,
) -> list[EditTask]:
    """Returns one task per program, machine and limit.

    Args:
        program, machine, limit: as in ``MemoryEditEnv``; a limit may be a fraction of the peak, bytes, or a size.
        min_bytes, mode, start, by_class: as in ``EditTask``, for all tasks.

    Raises:
        ValueError: see ``EditTask``; also if a limit is invalid or a program has no machine.
    """
    maker = start if isinstance(start, Plan) else cached(start, STARTS[one_of("start", start, STARTS)])
    return [EditTask(*task_args, mode, min_bytes, maker, by_class) for task_args in each_task(program, machine, limit)]


@dataclass(frozen=True)
class EditOptions:
    """Options of ``MemoryEditEnv`` and its vector form; ``MemoryEditEnv`` documents them."""

    program: OneOrMore[ProgramLike] | None = None
    machine: OneOrMore[MachineLike] | None = None
    limit: OneOrMore[Limit] = 0.7
    min_bytes: int = 2**20
    mode: str = "joint"
    start: str | Plan = "heuristic"
    edits: str = "neighbors"
    neighbors: int = 64
    by_class: bool = False
    budget: int | None = None
    accept: str = "metropolis"
    hot: float = 1e-3
    cold: float = 3e-5
    reward: str = "best"
    shaping: float = 0.0
    reference: str = "floor"
    copy: bool = True

    def batch(self, count: int, only_copies: bool = False) -> ObservedEdits:
        """Returns a batch of ``count`` walkers (observation.py); raises ValueError if an option is invalid."""
        announce(ObservedEdits.KIND)  # start plans are simulated
        tasks = make_edit_tasks(
            self.program, self.machine, self.limit, self.min_bytes, self.mode, self.start, self.by_class
        )
        references = None
        if self.reward == "log" and one_of("reference", self.reference, ("floor", "ideal")) == "floor":
            references = [floor_of(task) for task in tasks]
        return ObservedEdits(
            tasks,
            count,
            self.neighbors,
            self.edits,
            self.budget,
            self.accept,
            self.hot,
            self.cold,
            self.reward,
            self.shaping,
            references,
            only_copies=only_copies,
        )


class MemoryEditEnv(BatchEnv):
    """Edits one plan at a time.

    Observation (G gaps of the largest task, M neighbors). The float columns that edits change are listed in columns.py.

    - ``static`` (G, F) float32: columns of a gap that no edit changes (gap_graph.py), and the log prior of its choices.
    - ``gaps`` (G, columns) float32: the choice in each gap, stalls and free memory within it, copies and recomputation,
      and results of the last trials of its changes.
    - ``bins`` (64, 12 + columns) float32: static columns of each bin of time; then slack, stalls, load of the link and
      recomputation.
    - ``plan`` (columns,) float32: overhead, distance to the best plan, and the state of the search.
    - ``edits`` (M, MAX_CHANGES) int32: the changes of each neighbor as gap * N_CHANGES + ``Change``, padded with -1.
    - ``action_mask`` (M,) int8. ``task`` int64: index into ``env.unwrapped.tasks``, which hold the static graph.

    Args:
        program: one or several programs, names (tasks.py) or paths; None: a small built-in task.
        machine: one or several machines, presets or paths; None: the named program's machine.
        limit: fraction of the peak, bytes, or a size such as "24GiB"; or several. Tasks are all combinations.
        min_bytes: size in bytes below which tensors stay resident.
        mode: "swap", "recompute" or "joint".
        start: "policy" (plans decoded from the planner ``policy``, whose probabilities also weight the drawn neighbors,
            and the best published heuristic's plan), "heuristic" (that plan only), "empty" (every gap emptied in its
            first mode) or a Plan. ``reset(options={"start": i})`` selects the i-th fastest instead of the fastest.
        edits: "neighbors": the action is one of ``neighbors`` edits, including their repair; "gap": the action is a
            change (gap * N_CHANGES + ``Change``), and the repair is not observed in advance.
        neighbors: M.
        by_class: whether neighbors of repetitive programs may change a run of alike gaps (simulator/moves/classes.py),
            as far as one edit holds its changes. The shipped weights were trained without.
        budget: simulator calls of an episode; None: twice the task's gaps.
        accept: "metropolis" (the temperature falls from ``hot`` to ``cold``, as fractions of the ideal time), "better"
            (no slower than the current plan) or "always".
        reward: "best": decrease of the best plan's overhead, so that the rewards sum to the overhead of the start minus
            that of the best plan, in fractions of the ideal time as in ``GpuMemory-v1``; "log": log((best + 0.3) /
            (new best + 0.3)) of percentage points above ``reference``, without unit.
        shaping: weight of an additional reward for the current plan.
        reference: reference of reward="log": "floor" (certified lower bound) or "ideal" (ideal time).
        copy: if False, observations and masks are views of buffers that the next call overwrites.
        render_mode: "ansi" (text), "rgb_array" (uint8 (450, 800, 3)) or None (render.py).

    Raises:
        ValueError: if an argument is invalid.
    """

    _batch: ObservedEdits
    _options: ClassVar[tuple[str, ...]] = ("task", "start")

    @flat_options
    def __init__(self, options: EditOptions, render_mode: str | None = None) -> None:
        super().__init__(options.batch(1), options.copy, render_mode)

    @property
    def best_plan(self) -> Plan:
        """Best plan of the episode."""
        return self._batch.best_plan(0)


class MemoryEditVectorEnv(BatchVectorEnv):
    """Vector form of MemoryEditEnv; the walkers of each task are stepped in one compiled call.

    The arguments are those of MemoryEditEnv, with ``num_envs``, Gymnasium's ``autoreset_mode`` and
    ``max_episode_steps``. With a ``seed``, environment i draws as a MemoryEditEnv with ``seed + i``.
    """

    _batch: ObservedEdits

    @flat_options
    def __init__(
        self,
        num_envs: int,
        options: EditOptions,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_episode_steps: int | None = None,
    ) -> None:
        batch = options.batch(num_envs, only_copies=options.copy)
        super().__init__(num_envs, batch, options.copy, autoreset_mode, max_episode_steps)

    def best_plan(self, i: int) -> Plan:
        """Returns the best plan of environment i's episode."""
        return self._batch.best_plan(i)
