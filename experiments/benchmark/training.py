"""What a planned step costs the host beyond its kernels and copies: steps whose kernels and copies do nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from executor import PlannedStep, capture
from executor.memory.pinned import HOST, Bytes
from experiments.benchmark.simulation import seconds_of, swap_all
from experiments.workloads.resnet import ResNet
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.schedule import lower


def step_overhead(machine: Machine, depth: int, min_bytes: int, repeats: int) -> dict[str, float]:
    """Of a ResNet for CIFAR at batch 1, SGD with momentum, on CPU tensors; µs, each the least of ``repeats``.

    ``step_kernel_us``: of a step without a plan, per kernel, with what it does for calls, the ledger and Ctrl-C.
    ``step_move_us``: what a plan that swaps every gap of tensors of ``min_bytes`` takes in addition, per move.
    ``step_binding_us``: per parameter, buffer and optimizer's tensor, to see whether the user has changed anything.
    ``step_fixed_us``: a step without kernels and moves.
    """
    torch.manual_seed(0)
    model = ResNet(depth)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(1, 3, 32, 32), torch.zeros(1, dtype=torch.long)
    captured = capture(model, nn.CrossEntropyLoss(), optimizer, batch, machine=machine, check=False)
    program = captured.program
    plan = swap_all(program, program.gaps(min_bytes))
    plain = idle(PlannedStep(captured, Plan(), machine), batch)
    bound = least_s(plain.look, repeats)
    whole = least_s(lambda: plain(*batch), repeats)
    work, plain.state.work, plain.state.whole = plain.state.work, [], replace(plain.state.whole, end=0)
    fixed = least_s(lambda: plain(*batch), repeats)
    moving = idle(PlannedStep(captured, plan, machine, lower(program, plan).required_bytes), batch)
    swapped = least_s(lambda: moving(*batch), repeats)
    moves = sum(len(item.before) + len(item.after) for item in moving.order.items)
    return {
        "step_kernel_us": round(1e6 * (whole - fixed) / len(work), 3),
        "step_move_us": round(1e6 * (swapped - whole) / moves, 3),
        "step_binding_us": round(1e6 * bound / len(plain.state.bindings), 4),
        "step_fixed_us": round(1e6 * fixed, 1),
    }


class NoCopies:
    """Copy engines that do nothing."""

    def pinned(self, nbytes: int) -> Bytes:
        return HOST.take(nbytes)

    def nothing(self, *_: object) -> Any:
        pass

    borrow = event = begin = copy_out = copy_in = wait = join = synchronize = nothing


def idle(step: PlannedStep, batch: tuple[Tensor, ...]) -> PlannedStep:
    """After one real step, the kernels return what they returned in it, and copies are not made."""
    results: list[Any] = []

    def kept(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            results.append(function(*args, **options))
            return results[-1]

        return call

    work = list(step.state.work)

    def exchange(made: Callable[[Any], Any]) -> None:
        step.state.work[:] = [
            item._replace(calls=tuple((out, made(f), get, options) for out, f, get, options in item.calls))
            for item in work
        ]

    exchange(kept)
    step(*batch)
    found = iter(results)
    exchange(lambda _: returning(next(found)))
    if step.state.blocks.engines:
        step.state.blocks.engines.synchronize()
        step.state.blocks.engines = NoCopies()
    step(*batch)
    return step


def returning(result: Any) -> Callable[..., Any]:
    """A function that returns ``result`` whatever it is given."""
    return lambda *args, **options: result


def least_s(call: Callable[[], object], repeats: int) -> float:
    """Shortest duration of a call, in seconds: others may use this computer, too."""
    return min(seconds_of(call, repeats))
