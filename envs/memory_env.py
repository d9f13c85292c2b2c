"""``GpuMemory-v1`` as a Gymnasium environment and a vector environment, over batches of compiled walks (batch.py).

Observation (N nodes; programs are padded to the largest):

- ``nodes`` (N, 11) float32: the paper's six features (section 4.4.1) and five dynamic ones (gpu_memory.md).
- ``action_mask`` (N,) int8: valid actions. ``current`` int64: the current node.
- ``program`` int64: index into ``env.unwrapped.tasks``, which hold the static graph (edges, weights).

An action is a node number; node 0 is "do nothing". With ``actions="full"`` an action is node + N * form, and the mask
has N * F entries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from gymnasium.vector import AutoresetMode

from envs.batch import Batch
from envs.batch_env import BatchEnv, BatchVectorEnv
from envs.options import flat_options
from envs.task import Task
from envs.tasks import program_and_machine
from simulator import Kernel, Machine, Plan, Program, Tensor
from simulator.limits import limit_bytes
from simulator.modes import check_mode, least_residency

__all__ = ["MemoryEnv", "MemoryVectorEnv", "make_tasks", "small_task"]

T = TypeVar("T")
Limit = float | str  # argument of simulator.limits.limit_bytes
ProgramLike = Program | str  # or a name (tasks.py), or the path of a .json or .json.gz
MachineLike = Machine | str  # or a preset, or the path of a YAML
OneOrMore: TypeAlias = T | Sequence[T]


def small_task() -> tuple[Program, Machine]:
    """Returns a forward and backward pass over eight layers and its machine, for tests and first runs."""
    sizes = [6, 12, 4, 10, 3, 8, 5, 7]  # MiB
    layers = len(sizes)
    mib = 2**20
    tensors = [Tensor("batch", mib, "input", True)]
    tensors += [Tensor(f"activation{i}", sizes[i] * mib) for i in range(layers)]
    tensors += [Tensor(f"gradient{i}", sizes[i] * mib, "gradient") for i in range(layers)]
    kernels = [
        Kernel(f"forward{i}", "conv", "forward", (i,), (i + 1,), 200_000 + 50_000 * sizes[i]) for i in range(layers)
    ]
    for i in reversed(range(layers)):
        inputs = (i + 1, i) if i == layers - 1 else (i + 1, i, layers + 2 + i)
        duration_ns = 400_000 + 100_000 * sizes[i]
        kernels.append(Kernel(f"backward{i}", "conv", "backward", inputs, (layers + 1 + i,), duration_ns))
    return Program("small", tuple(tensors), tuple(kernels)), Machine("small", 2**30, 12 * 10**9, 12 * 10**9)


def make_tasks(
    program: OneOrMore[ProgramLike] | None,
    machine: OneOrMore[MachineLike] | None,
    limit: OneOrMore[Limit],
    min_bytes: int,
    mode: str,
) -> list[Task]:
    """Returns one task per program, machine and limit.

    Args:
        program: one or several programs, as in ``MemoryEnv``.
        machine: one or several machines, as in ``MemoryEnv``.
        limit: one or several limits, as in ``MemoryEnv``.
        min_bytes: size in bytes below which tensors are left out.
        mode: "swap", "recompute" or "joint".

    Raises:
        ValueError: if a limit is invalid or unreachable, or a program has no machine.
    """
    tasks: list[Task] = []
    for task_program, task_machine, nbytes in each_task(program, machine, limit):
        min_limit = least_residency(task_program, min_bytes, check_mode(mode))
        if nbytes < min_limit:
            raise ValueError(
                f"limit: no plan of mode {mode!r} brings {task_program.name!r} below {min_limit:,} bytes while tensors "
                f"smaller than {min_bytes:,} bytes stay resident; got {nbytes:,}"
            )
        tasks.append(Task(task_program, task_machine, nbytes, min_bytes, mode))
    return tasks


def each_task(
    program: OneOrMore[ProgramLike] | None, machine: OneOrMore[MachineLike] | None, limit: OneOrMore[Limit]
) -> Iterator[tuple[Program, Machine, int]]:
    """Yields each combination of program, machine and limit (bytes); raises ValueError if one is invalid."""
    if program is None:
        program, small_machine = small_task()
        machine = machine or small_machine
    for program_like in _as_sequence(program):
        for machine_like in _as_sequence(machine):
            task_program, task_machine = program_and_machine(program_like, machine_like)
            for task_limit in _as_sequence(limit):
                yield task_program, task_machine, limit_bytes(task_limit, task_program)


def _as_sequence(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


@dataclass(frozen=True)
class MemoryOptions:
    """Arguments that both environments share (MemoryEnv)."""

    program: OneOrMore[ProgramLike] | None = None
    machine: OneOrMore[MachineLike] | None = None
    limit: OneOrMore[Limit] = 0.7
    min_bytes: int = 2**20
    mode: str = "joint"
    reward: str = "paper"
    invalid: str = "end"
    actions: str = "paper"
    copy: bool = True

    def batch(self, count: int, autoreset: bool = False) -> Batch:
        """Returns a batch of ``count`` walks."""
        tasks = make_tasks(self.program, self.machine, self.limit, self.min_bytes, self.mode)
        return Batch(tasks, count, self.reward, self.invalid, self.actions, autoreset)


class MemoryEnv(BatchEnv):
    """Walks through one training iteration per episode; the task is drawn with the environment's seed.

    Args:
        program: one or several programs, names (tasks.py) or paths; None: a small built-in task.
        machine: one or several machines, presets or paths; None: the named program's machine.
        limit: fraction of the peak (up to 1), bytes, or a size such as "24GiB"; or several. Tasks are all combinations
            of program, machine and limit.
        min_bytes: size in bytes below which tensors are left out.
        mode: "swap", "recompute" or "joint".
        reward: "paper": change in the simulated time of the partial plan; "causal": stall time as the clock advances.
            Both sum to −overhead.
        invalid: effect of an invalid action: "end" ends the episode as a dead end, "ignore" leaves the state unchanged.
        actions: "paper"; "full": each in several forms (task.py); "copy", "keep" or "at": with that form only.
        copy: if False, observations and masks are views of buffers that the next call overwrites.
        render_mode: "ansi" (text), "rgb_array" (uint8 (450, 800, 3)) or None (render.py).

    Raises:
        ValueError: if an argument is invalid.
    """

    _batch: Batch

    @flat_options
    def __init__(self, options: MemoryOptions, render_mode: str | None = None):
        super().__init__(options.batch(1), options.copy, render_mode)

    def plan(self, planner: str = "") -> Plan:
        """Returns the partial plan."""
        return self._batch.plan(0, planner)

    @property
    def best_plans(self) -> tuple[Plan | None, ...]:
        """Fastest plan with which an episode of each task has ended, or None."""
        return self._batch.best_plans

    @property
    def best_plan(self) -> Plan | None:
        """Fastest plan of the first task, or None."""
        return self.best_plans[0]


class MemoryVectorEnv(BatchVectorEnv):
    """Vector form of MemoryEnv: all walks are stepped in one compiled call on several threads, without subprocesses.

    The arguments are those of MemoryEnv, and in addition ``num_envs``, Gymnasium's ``autoreset_mode`` (batch_env.py)
    and ``max_episode_steps``, after which episodes are truncated. With a ``seed``, environment i draws the same tasks
    as a MemoryEnv with ``seed + i``.
    """

    _batch: Batch

    @flat_options
    def __init__(
        self,
        num_envs: int,
        options: MemoryOptions,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        max_episode_steps: int | None = None,
    ):
        batch = options.batch(num_envs, AutoresetMode(autoreset_mode) == AutoresetMode.NEXT_STEP)
        super().__init__(num_envs, batch, options.copy, autoreset_mode, max_episode_steps)

    best_plans = MemoryEnv.best_plans
    best_plan = MemoryEnv.best_plan

    def plan(self, i: int, planner: str = "") -> Plan:
        """Returns the partial plan of environment i."""
        return self._batch.plan(i, planner)
