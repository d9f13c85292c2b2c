"""Tests tensor Cache at run time: Algorithm 2 and a run with waits, both computed by hand."""

import pytest

import agents
from agents.heuristics.tensor_cache import CacheRun, run
from simulator import Kernel, Program, Tensor
from tests.programs import BYTE_PER_NS


def conv(name, inputs, outputs, phase="forward", kind="conv"):
    return Kernel(name, kind, phase, inputs, outputs, 100)


# Two convolutions keep their outputs a and b for the backward pass; c is large and lives between.
PROGRAM = Program(
    "two convolutions",
    (Tensor("x", 10, persistent=True), Tensor("a", 40), Tensor("b", 30), Tensor("c", 50)),
    (
        conv("forward a", (0,), (1,)),
        conv("forward b", (1,), (2,)),
        conv("loss", (2,), (3,), kind="reduce"),
        conv("backward b", (2, 3), (3,), "backward"),
        conv("backward a", (1, 3), (3,), "backward"),
    ),
)


def test_a_kernel_waits_for_the_eviction_and_for_the_miss():
    """Tensor c does not fit beside a and b: a is offloaded, and fetched when b is dead (40 ns each)."""
    assert run(PROGRAM, BYTE_PER_NS, 129, 1) == CacheRun(500 + 40 + 40, 3, 1, 40, 40, 100)
    with pytest.raises(agents.Infeasible, match="kernel 2 needs 90 bytes"):
        run(PROGRAM, BYTE_PER_NS, 89, 1)
