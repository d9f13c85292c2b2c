"""Repeats tests of steps, faults and micro-batches on a double of torch.cuda that checks all ordering.

Each test runs its first case, with copies as late as possible or at random. Tests that replace the engines are skipped.
"""

import inspect
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.executor.training import test_equal_to_eager, test_faults, test_micro_batches, test_planned_step
from tests.fake_device.graphs import GraphDouble

SAMPLE = {
    "small",
    "test_a_failed_kernel_undoes_the_step",
    "test_without_a_barrier_between_steps",
    "test_one_memory_for_two_swapped_micro_batches_is_refused",
}
ROWS = ("small", "resnet", "gpt2", "accumulated")  # of the table


def first_case(mark: Any) -> dict[str, Any]:
    names = mark.args[0]
    case = next(iter(mark.args[1]))
    case = getattr(case, "values", (case,) if isinstance(names, str) else case)
    return dict(zip([names] if isinstance(names, str) else names, case, strict=True))


def cases() -> list[Any]:
    found = [(test_equal_to_eager.test_equal_to_eager, {"name": row}, row) for row in ROWS]
    for module in (test_planned_step, test_faults, test_micro_batches):
        for name, function in vars(module).items():
            if not name.startswith("test_") or function.__module__ != module.__name__:
                continue
            marks = getattr(function, "pytestmark", [])
            if {"monkeypatch", "moves", "request"} & set(inspect.signature(function).parameters) or any(
                mark.name == "gpu" for mark in marks
            ):
                continue
            arguments: dict[str, Any] = {}
            for mark in marks:
                arguments |= first_case(mark) if mark.name == "parametrize" else {}
            found.append((function, arguments, name))
    return [pytest.param(*case, id=name, marks=() if name in SAMPLE else pytest.mark.nightly) for *case, name in found]


@pytest.fixture
def double(request, monkeypatch):
    seed = zlib.crc32(request.node.name.encode())
    instance = GraphDouble(seed if seed % 2 else None)
    instance.install(monkeypatch)
    with instance:
        yield instance
    instance.check()


@pytest.mark.parametrize(("function", "given"), cases())
def test_on_the_double(function: Callable[..., None], given, double):
    function(**given)


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["out", "in"])
@pytest.mark.parametrize(
    "function",
    [
        test_faults.test_a_failed_copy_undoes_the_step,
        test_faults.test_a_copy_that_fails_while_the_optimizer_runs_loses_nothing,
    ],
)
def test_a_copy_that_fails_when_it_is_issued(function, way, double):
    function(way, lambda fails: setattr(double, "fails", fails))
