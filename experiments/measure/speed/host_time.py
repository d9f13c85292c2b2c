"""Measures the host time of planned and eager steps with kernels that compute nothing.

``host_times`` uses networks with all layers of the real ones and as few elements as possible. A step runs once to
record the results of each operator; then CPU kernels that only allocate such results (no_kernels.cpp) replace
PyTorch's. Views and reads of numbers are kept. Planned and eager steps use the same ``foreach`` optimizer and
alternate. ``step_overhead`` splits a planned step's cost into parts and issues no operators.
"""

from __future__ import annotations

import copy
import shutil
import subprocess
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor import PlannedStep, capture
from executor.memory.pinned import HOST, Bytes
from experiments.measure.networks import _llama
from experiments.measure.speed.simulation import swap_all
from experiments.workloads import resnet, transformers
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.schedule import lower

Parts = tuple[nn.Module, Tensor, Tensor]  # model, input, label


class Result(IntEnum):
    """Kinds of an operator's results; the same values as in no_kernels.cpp."""

    UNDEFINED = 0
    NEW = 1
    FIRST_ARGUMENT = 2
    LIST = 3


def _resnet50() -> Parts:
    blocks = []
    width = 4
    for count, stride in zip((3, 4, 6, 3), (1, 2, 2, 2), strict=True):
        out = 12 - width  # every stage changes the width, so that its first block has a projection
        blocks += [resnet.Bottleneck(out if i else width, out, 1 if i else stride) for i in range(count)]
        width = out
    stem = (nn.Conv2d(1, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(True), nn.MaxPool2d(3, 2, 1))
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 2))
    return model, torch.randn(2, 1, 1, 1), torch.zeros(2, dtype=torch.long)


def _text(model: nn.Module) -> Parts:
    return model, torch.zeros(1, 2, dtype=torch.long), torch.zeros(2, dtype=torch.long)


NETWORKS: dict[str, Callable[[], Parts]] = {
    "resnet50": _resnet50,
    "gpt2": lambda: _text(transformers.GPT2(12, 4, 1, vocabulary=4, context=2)),
    "llama": lambda: _text(_llama(12, 4, 2, 4, 4, 2)),
}


def host_times(machine: Machine, networks: Sequence[str], repeats: int) -> dict[str, dict[str, float]]:
    """Returns the host time of planned and eager steps by network, in µs (minimum CPU time of ``repeats``).

    The result is empty without a C++ compiler, which no_kernels.cpp needs.
    """
    planned: dict[str, float] = {}
    eager: dict[str, float] = {}
    for name in networks if shutil.which("c++") else ():
        steps = steps_of(machine, *NETWORKS[name]())
        with without_kernels(steps) as quick:
            planned[name], eager[name] = (round(1e6 * s, 1) for s in least_s(quick, repeats))
    return {"host_planned_us": planned, "host_eager_us": eager}


def steps_of(machine: Machine, model: nn.Module, x: Tensor, y: Tensor) -> list[Callable[[], Tensor]]:
    """Returns a planned step without transfers and an eager step; each has run once."""
    twin = copy.deepcopy(model)
    loss_fn = nn.CrossEntropyLoss()

    def optimizer(module: nn.Module) -> torch.optim.Optimizer:
        if x.is_floating_point():
            return torch.optim.SGD(module.parameters(), 1e-3, momentum=0.9, foreach=True)
        return torch.optim.AdamW(module.parameters(), 1e-4, foreach=True)

    captured = capture(model, loss_fn, optimizer(model), (x, y), machine=machine, check=False)
    planned = PlannedStep(captured, Plan(), machine)
    eager_optimizer = optimizer(twin)

    def eager() -> Tensor:
        loss: Tensor = loss_fn(twin(x), y)
        loss.backward()
        eager_optimizer.step()
        eager_optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    steps: list[Callable[[], Tensor]] = [lambda: planned(x, y), eager]
    for step in steps:
        step()
    return steps


def least_s(steps: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Returns the minimum CPU time of each alternating step, in s, which is robust against other load."""
    timers = [timeit.Timer(step, timer=time.thread_time) for step in steps]
    spent = [[timer.timeit(1) for timer in timers] for _ in range(repeats)]
    return [min(times) for times in zip(*spent, strict=True)]


class _Recording(TorchDispatchMode):
    """Records the results of operators on a tape of no_kernels.cpp."""

    def __init__(self, tape: int) -> None:
        super().__init__()
        self.tape = tape
        self.replaced = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        schema = func._schema
        view = any(a.alias_info is not None and not a.alias_info.is_write for a in schema.arguments)
        computes = out is None or any(isinstance(leaf, Tensor) for leaf in tree_leaves(out))
        if func.namespace == "aten" and computes and not view and not schema.name.startswith("aten::empty"):
            values = out if isinstance(out, tuple) else (out,)
            kinds = [_kind(value, returned) for value, returned in zip(values, schema.returns, strict=False)]
            allocated = [v for v, kind in zip(values, kinds, strict=False) if kind in (Result.NEW, Result.LIST)]
            like = [tensor for value in allocated for tensor in tree_leaves(value)]
            torch.ops.headroom_speed.record(self.tape, schema.name, kinds, [torch.empty_like(t) for t in like])
            self.replaced.add(str(func).removeprefix("aten.").removesuffix(".default"))
        return out


def _kind(value: Any, returned: Any) -> Result:
    """Returns the kind of one result from its value and its entry in the operator's schema."""
    if value is None:
        return Result.UNDEFINED
    if isinstance(value, list):
        return Result.LIST
    return Result.NEW if returned.alias_info is None else Result.FIRST_ARGUMENT


@contextmanager
def without_kernels(steps: Sequence[Callable[[], object]]) -> Iterator[list[Callable[[], object]]]:
    """Yields the steps with operators that compute nothing; restores PyTorch's operators on exit."""
    if not hasattr(torch.ops.headroom_speed, "begin"):
        _compile()
    headroom = torch.ops.headroom_speed
    replaced = {"add_.Tensor"}
    for tape, step in enumerate(steps):
        with _Recording(tape) as recording:
            step()
        replaced |= recording.replaced

    def quick(tape: int, step: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            headroom.begin(tape)
            return step()

        return run

    try:
        for overload in sorted(replaced):
            headroom.replace(overload)
        yield [quick(tape, step) for tape, step in enumerate(steps)]
    finally:
        headroom.restore()


def _compile() -> None:
    source = Path(__file__).with_name("no_kernels.cpp")
    paths = [f"-I{path}" for path in cpp_extension.include_paths()] + [f"-L{p}" for p in cpp_extension.library_paths()]
    with tempfile.TemporaryDirectory() as folder:
        library = f"{folder}/no_kernels.so"
        command = ["c++", "-O1", "-std=c++20", "-shared", "-fPIC", str(source), "-o", library, *paths]
        subprocess.run([*command, "-ltorch_cpu", "-lc10"], check=True)
        torch.ops.load_library(library)


# ------------------------------------------------------------------------------------------- costs of a step


def step_overhead(machine: Machine, depth: int, min_bytes: int, repeats: int) -> dict[str, float]:
    """Splits the host cost of a planned step into parts, in µs (minimum of ``repeats`` each).

    The step is a CIFAR ResNet at batch size 1 with SGD and momentum, on CPU tensors.

    Returns:
        ``step_kernel_us``: cost per kernel of a step without a plan (calls, ledger, Ctrl-C handling).
        ``step_move_us``: additional cost per transfer of a plan that swaps every gap of tensors of ``min_bytes``.
        ``step_binding_us``: cost per parameter, buffer and optimizer tensor of checking for changes by the user.
        ``step_fixed_us``: cost of a step without kernels and transfers.
    """
    torch.manual_seed(0)
    model = resnet.ResNet(depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(1, 3, 32, 32), torch.zeros(1, dtype=torch.long)
    captured = capture(model, nn.CrossEntropyLoss(), optimizer, batch, machine=machine, check=False)
    program = captured.program
    plan = swap_all(program, program.gaps(min_bytes))
    unplanned = idle(PlannedStep(captured, Plan(), machine), batch)
    binding_s = shortest_s(unplanned.look, repeats)
    step_s = shortest_s(lambda: unplanned(*batch), repeats)
    work = unplanned.state.work
    unplanned.state.work = []
    unplanned.state.whole = replace(unplanned.state.whole, end=0)
    fixed_s = shortest_s(lambda: unplanned(*batch), repeats)
    planned = idle(PlannedStep(captured, plan, machine, lower(program, plan).required_bytes), batch)
    swapped_s = shortest_s(lambda: planned(*batch), repeats)
    moves = sum(len(item.before) + len(item.after) for item in planned.order.items)
    return {
        "step_kernel_us": round(1e6 * (step_s - fixed_s) / len(work), 3),
        "step_move_us": round(1e6 * (swapped_s - step_s) / moves, 3),
        "step_binding_us": round(1e6 * binding_s / len(unplanned.state.bindings), 4),
        "step_fixed_us": round(1e6 * fixed_s, 1),
    }


class NoCopies:
    """Stand-in for copy engines that copies nothing."""

    def pinned(self, cuts: Sequence[int]) -> list[tuple[int, Bytes]]:
        """Returns unpinned memory, as the method of ``Engines``."""
        return HOST.take_parts(cuts)

    def no_op(self, *_: object) -> Any:
        """Does nothing, for all other methods of ``Engines``."""
        pass

    borrow = event = begin = copy_out = copy_in = wait = join = synchronize = no_op


def idle(step: PlannedStep, batch: tuple[Tensor, ...]) -> PlannedStep:
    """Makes a planned step's kernels return their results of one real step and its copy engines copy nothing."""
    results: list[Any] = []

    def record(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            results.append(function(*args, **options))
            return results[-1]

        return call

    work = list(step.state.work)

    def exchange(wrap: Callable[[Any], Any]) -> None:
        step.state.work[:] = [
            item._replace(calls=tuple((out, wrap(f), get, options) for out, f, get, options in item.calls))
            for item in work
        ]

    exchange(record)
    step(*batch)
    found = iter(results)
    exchange(lambda _: returning(next(found)))
    step.state.blocks.engines.synchronize()
    step.state.blocks.engines = NoCopies()
    step(*batch)
    return step


def returning(result: Any) -> Callable[..., Any]:
    """Returns a function that ignores its arguments and returns ``result``."""
    return lambda *args, **options: result


def shortest_s(call: Callable[[], object], repeats: int) -> float:
    """Returns the shortest duration of a call in seconds, which is robust against other load."""
    return min(timeit.repeat(call, number=1, repeat=repeats))
