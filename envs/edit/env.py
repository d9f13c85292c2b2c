"""``GpuMemoryEdit-v0``: an episode edits a whole plan, one simulated neighbour at a time.

The state is a feasible plan with its simulated timeline. A step simulates one of M neighbours of the plan and takes it
or not; the episode ends after ``budget`` simulator calls, or when the plan costs no time. Every edit can be undone by
another one.
"""

from __future__ import annotations

from typing import Any, ClassVar

from gymnasium.vector import AutoresetMode

from envs.batch import one_of
from envs.batch_env import BatchEnv, BatchVectorEnv
from envs.edit.batch import EditBatch
from envs.edit.starts import STARTS, floor_of
from envs.edit.task import EditTask
from envs.memory_env import Limit, MachineLike, OneOrMore, ProgramLike, each_task
from simulator.plan import Plan

__all__ = ["MemoryEditEnv", "MemoryEditVectorEnv", "make_edit_tasks"]


def make_edit_tasks(
    program: OneOrMore[ProgramLike] | None, machine: OneOrMore[MachineLike] | None, limit: OneOrMore[Limit],
    min_bytes: int, mode: str, start: str | Plan,
) -> list[EditTask]:  # fmt: skip
    """Returns one task per program, machine and limit.

    Raises:
        ValueError: as ``EditTask``, or a limit is wrong, or a program has no machine.
    """
    maker = start if isinstance(start, Plan) else STARTS[one_of("start", start, STARTS)]
    return [EditTask(*one, mode, min_bytes, maker) for one in each_task(program, machine, limit)]


def _batch(tasks: list[EditTask], count: int, reward: str, reference: str, **options: Any) -> EditBatch:
    """Walkers whose reward is above each task's reference."""
    below = None
    if reward == "log" and one_of("reference", reference, ("floor", "ideal")) == "floor":
        below = [floor_of(task) for task in tasks]
    return EditBatch(tasks, count, reward=reward, reference=below, **options)


class MemoryEditEnv(BatchEnv):
    """Edits one plan at a time.

    Observation (G gaps of the largest task, M neighbours; all floats in [-10, 10], sizes relative to the excess over
    the limit and times to the ideal iteration, so that nothing depends on a program's size):

    - ``static`` (G, F) float32: what no edit changes of a gap (gap_graph.py), and the log prior of its modes.
    - ``gaps`` (G, 32) float32: mode (4, one-hot), shifted; stall at its return, stalls for memory and for data
      within, share of all stalls, least slack over its size, whether it could be filled, share of its time without
      slack; lateness of the copy out, earliness of the copy in at its end and start, recomputation; steps since it
      changed; and for each of its 5 actions the effect of the last trial, steps and accepted edits since.
    - ``bins`` (64, 19) float32: 12 static columns of each bin of time; least and mean slack, stalls for data and
      memory, load of both links, recomputation.
    - ``plan`` (6,) float32: overhead, distance to the best, part of the budget, temperature, tries since the best,
      accepted edits.
    - ``edits`` (M, 10) int32: the changes of each neighbour as gap * 5 + mode, -1 where it has fewer; modes: 0 fill,
      1 swap, 2 recompute, 3 recompute and keep, 4 shift.
    - ``action_mask`` (M,) int8. ``task`` int64: index into ``env.unwrapped.tasks``, which hold the static graph.

    Args:
        program: one or several programs, names (tasks.py) or paths; None: a small built-in task.
        machine: one or several machines, presets or paths; None: that of the named program.
        limit: fraction of the peak, bytes, or a size such as "24GiB"; or several. Tasks are all combinations.
        min_bytes: tensors below this size stay.
        mode: "swap", "recompute" or "joint".
        start: "policy" (plans decoded from the planner ``policy``, whose probabilities also weight the neighbours that
            are drawn, and the best published heuristic's), "heuristic" (that alone), "empty" (every gap emptied in its
            first mode) or a Plan. ``reset(options={"start": i})`` takes the i-th fastest instead of the fastest.
        edits: "neighbours": the action is one of ``neighbours`` edits with their repair; "gap": it is a gap and a mode
            (gap * 5 + mode), and the repair follows unseen.
        neighbours: M.
        budget: simulator calls of an episode; None: twice the task's gaps.
        accept: "metropolis" (by a temperature that falls from ``hot`` to ``cold``, fractions of the ideal time),
            "better" (no slower than the present plan) or "always".
        reward: "best": points of overhead by which the best plan improves, so that an episode's rewards sum to the
            start's overhead less the best one's; "log": log((best + 0.3) / (new best + 0.3)) of points above
            ``reference``.
        shaping: adds this times the same reward of the present plan.
        reference: of reward="log": the certified "floor" (of the LP bound) or the "ideal" time.
        copy: False: observations and masks are views of buffers that the next call changes.

    Raises:
        ValueError: of any of these.
    """

    _batch: EditBatch
    _options: ClassVar[tuple[str, ...]] = ("task", "start")
    metadata: ClassVar[dict[str, Any]] = {"render_modes": []}  # type: ignore[misc]

    def __init__(
        self, program: OneOrMore[ProgramLike] | None = None, machine: OneOrMore[MachineLike] | None = None,
        limit: OneOrMore[Limit] = 0.7, min_bytes: int = 2**20, mode: str = "joint", start: str | Plan = "heuristic",
        edits: str = "neighbours", neighbours: int = 64, budget: int | None = None, accept: str = "metropolis",
        hot: float = 1e-3, cold: float = 3e-5, reward: str = "best", shaping: float = 0.0, reference: str = "floor",
        copy: bool = True,
    ) -> None:  # fmt: skip
        tasks = make_edit_tasks(program, machine, limit, min_bytes, mode, start)
        super().__init__(
            _batch(tasks, 1, reward, reference, neighbours=neighbours, edits=edits, budget=budget, accept=accept,
                   hot=hot, cold=cold, shaping=shaping), copy,
        )  # fmt: skip

    @property
    def best_plan(self) -> Plan:
        """The best plan of the episode."""
        return self._batch.best_plan(0)


class MemoryEditVectorEnv(BatchVectorEnv):
    """Many walkers of one or several tasks, each task's stepped in one compiled call.

    The arguments are those of MemoryEditEnv, with ``num_envs`` and Gymnasium's ``autoreset_mode``. With a ``seed``,
    environment i draws as a MemoryEditEnv with ``seed + i``.
    """

    _batch: EditBatch

    def __init__(
        self, num_envs: int, program: OneOrMore[ProgramLike] | None = None,
        machine: OneOrMore[MachineLike] | None = None, limit: OneOrMore[Limit] = 0.7, min_bytes: int = 2**20,
        mode: str = "joint", start: str | Plan = "heuristic", edits: str = "neighbours", neighbours: int = 64,
        budget: int | None = None, accept: str = "metropolis", hot: float = 1e-3, cold: float = 3e-5,
        reward: str = "best", shaping: float = 0.0, reference: str = "floor", copy: bool = True,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP, max_episode_steps: int | None = None,
    ) -> None:  # fmt: skip
        tasks = make_edit_tasks(program, machine, limit, min_bytes, mode, start)
        super().__init__(
            num_envs,
            _batch(tasks, num_envs, reward, reference, neighbours=neighbours, edits=edits, budget=budget, accept=accept,
                   hot=hot, cold=cold, shaping=shaping), copy, autoreset_mode, max_episode_steps,
        )  # fmt: skip

    def best_plan(self, i: int) -> Plan:
        """The best plan of environment i's episode."""
        return self._batch.best_plan(i)
