"""Tests Memonger on chains of equal layers computed by hand.

    forward    m1 m2 … mn        m_i: a_(i-1) → a_i, 10 bytes, 10 ns
    backward   loss, tn … t1     t_i: a_(i-1) → ·, gradients have no bytes

a_1 … a_(n-1) are retained for the backward pass; each is a candidate. Tensor i is a_i; a_0 is the persistent input.
"""

from __future__ import annotations

import math

import pytest

from agents.heuristics.memonger import Stages
from simulator import Kernel, Program, Recompute, Tensor, simulate
from tests.agents.planned import planned
from tests.programs import BYTE_PER_NS as MACHINE


def chain(n: int) -> Program:
    g = n + 1
    tensors = [Tensor("a0", 0, "input", True), *(Tensor(f"a{i}", 10) for i in range(1, n + 1)), Tensor("g", 0)]
    forward = [Kernel(f"m{i}", "matmul", "forward", (i - 1,), (i,), 10) for i in range(1, n + 1)]
    backward = [Kernel(f"t{i}", "matmul", "backward", (i - 1, g), (g,), 20) for i in range(n, 0, -1)]
    return Program("chain", tuple(tensors), (*forward, Kernel("loss", "reduce", "backward", (n,), (g,), 20), *backward))


def test_algorithm_3_by_hand() -> None:
    stages = Stages(chain(17), 1)  # a1 … a16
    dropped = {b: [m.tensor for m in stages.divide(b)[2]] for b in (0, 40, 38)}
    # B = 0: every layer exceeds it: x = 160, y = 10; sqrt(1600) = 40.
    assert (stages.divide(0)[:2], dropped[0]) == ((160, 10), [])
    # B = 40: the fifth, tenth, fifteenth; a16 is the last stage. x = 30, y = 50; isqrt(1500) = 38.
    assert (stages.divide(40)[:2], dropped[40]) == ((30, 50), [i for i in range(1, 17) if i % 5])
    # B = 38: every fourth. x = y = 40, where it stays.
    assert (stages.divide(38)[:2], dropped[38]) == ((40, 40), [i for i in range(1, 17) if i % 4])
    # B above all: one stage.
    assert stages.divide(160)[:2] == (0, 160)


def test_plans_by_hand() -> None:
    # limit: which a_i are kept, and why. m17 reads a16 and writes a17; the chain of a stage is made at its end.
    #   170  all of them
    #    90  every 2nd: 8 and a17 at m17; 8 recomputations
    #    70  every 3rd: a3 a6 a9 a12 a15 a16 a17 at m17; 11 recomputations (a16 is in the last stage, and dropped)
    #    60  every 4th: a4 a8 a12 and a13 a14 a15 at t16; 12 recomputations. Every 5th or 6th needs 60 too, 13 or 14.
    program = chain(17)
    assert program.peak_bytes == 170
    for limit, stride in ((170, 1), (169, 2), (90, 2), (89, 3), (70, 3), (69, 4), (60, 4)):
        plan = planned("memonger", program, MACHINE, limit)
        dropped = [i for i in range(1, 17) if i % stride]
        assert plan.decisions == tuple(Recompute(i, i, 17 + (17 - i), keep=True) for i in dropped)
        timeline = simulate(program, plan, MACHINE, limit)
        assert timeline.iteration_ns == program.ideal_ns + 10 * len(dropped)  # every one of them once


@pytest.mark.parametrize("n", [26, 65, 145])
def test_memory_grows_with_the_square_root(n: int) -> None:
    program = chain(n)
    root = math.isqrt(n - 1)
    plan = planned("memonger", program, MACHINE, 2 * root * 10)  # of n * 10
    kept = n - 1 - len(plan.decisions)
    assert root - 2 <= kept <= 2 * root
    assert simulate(program, plan, MACHINE, 2 * root * 10).overhead <= 1 / 3  # one forward pass at most
