"""What a card counts beside tensors: the limit that is left, and PyTorch's allocator over a plan's blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from simulator import Plan, simulate
from simulator.pool.card import CardPeak, of_program, under_plan
from simulator.program import Program
from tests.programs import activations, straight
from tests.tiny import MACHINE

MIB = 2**20


def test_what_is_left_for_tensors() -> None:
    found = CardPeak(80, 10, 10, 20, 30, 110, False)
    assert (found.reserved, found.nbytes, found.beside) == (120, 150, 70)
    assert found.limit == (110 - 30) * 100 // 120 - 20  # the allocator has a sixth of what it reserves
    assert CardPeak(80, 10, 10, 20, 30, 150, False).limit == 80  # the sum is the memory: all tensors
    assert CardPeak(80, 10, 10, 20, 30, 140, True).limit == 80  # it fits without what is cached
    assert CardPeak(80, 10, 10, 20, 30, 10, False).limit == 1
    with pytest.raises(ValueError, match="no memory was asked about"):
        _ = CardPeak(80, 10, 10, 20, 30).limit


def chain(nbytes: int) -> Program:
    """Three tensors, of which two are in use at once."""
    return straight(activations(nbytes, nbytes, nbytes), ((), (0,), 10), ((0,), (1,), 10), ((1,), (2,), 10))


def test_a_program_file_has_allocator_and_context() -> None:
    program = chain(11 * MIB)  # each in a segment of its own of 12 MiB
    found = of_program(program, 5 * MIB, 29 * MIB)
    assert (found.tensors, found.allocator, found.context) == (22 * MIB, 2 * MIB, 5 * MIB)
    assert found.fits and found.limit == 22 * MIB
    assert not of_program(program, 5 * MIB, 28 * MIB).fits


def test_under_a_plan() -> None:
    program = chain(11 * MIB)
    timeline = simulate(program, Plan(), MACHINE, program.peak_bytes)
    card = CardPeak(22 * MIB, 1 * MIB, 2 * MIB, 2 * MIB, 5 * MIB, 64 * MIB, True)
    assert under_plan(card, timeline) == (32 * MIB, True)  # two segments, and what stands beside them
    assert under_plan(replace(card, memory_bytes=32 * MIB), timeline) == (32 * MIB, True)
    assert under_plan(replace(card, memory_bytes=31 * MIB), timeline) == (32 * MIB, False)
    assert under_plan(replace(card, memory_bytes=None), timeline) == (32 * MIB, True)
