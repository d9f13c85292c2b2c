"""SmartPool's Device: early iterations, the pool, mismatches, and swaps on demand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from simulator import Program
from simulator.pool import program_lifetimes
from simulator.pool.device import Device, Variable, train
from tests.simulator.pool.test_trace import own_bytes
from tests.strategies import networks, programs

SIZES = {"w": 9, "a": 4, "b": 8, "c": 2}
# The load is 9 + 4, + 8 = 21, - 4 + 2 = 19: a pool of 12 beside w, with b at 0, a at 8, and c in a's place.
ITERATION = "+a +b -a +c -b -c "


def run(device: Device, text: str, held: dict[str, Variable]) -> None:
    """Executes "+a": malloc a, "-a": free a, "<a": read a; then no two blocks share a byte."""
    for kind, name in text.split():
        if kind == "+":
            held[name] = device.malloc(SIZES[name])
        elif kind == "-":
            device.free(held.pop(name))
        else:
            device.exec(lambda: None, [held[name]], [])
        places = sorted((id(b.pool), b.offset, b.offset + b.nbytes) for b in held.values() if b.pool and b.nbytes)
        assert all(p != q or end <= begin for (p, _, end), (q, begin, _) in zip(places, places[1:], strict=False))


def test_the_pool_serves_once_an_iteration_has_repeated() -> None:
    device = Device(first_test=7, shortest=6)
    held = {}
    run(device, "+w " + 2 * ITERATION, held)  # tested at 7 and 14 requests, of which w is one
    assert device.pool is None and device.peak_bytes == 21
    run(device, ITERATION, held)
    assert device.pool is None  # found at 14 requests; the pool begins with the next iteration, at 19
    run(device, "+a", held)
    assert device.pool is not None and (device.pool.footprint, device.reserved_bytes) == (12, 9 + 12)
    run(device, "+b -a +c", held)
    assert [held[name].offset for name in "bc"] == [0, 8] and held["w"].pool is None
    run(device, "-b -c " + 3 * ITERATION, held)
    assert (device.peak_bytes, device.mismatches) == (21, 0)
    assert device.iteration is not None and device.iteration.length == 6


@pytest.mark.parametrize("other", ["+c -c ", "+b +a -b +c -a -c ", "-w ", "+a +b -b +c -a -c "])
def test_after_a_mismatch_cudamalloc_serves_until_the_iteration_is_found_again(other: str) -> None:
    device = Device(first_test=7, shortest=6)
    held = {}
    run(device, "+w " + 4 * ITERATION + other, held)
    assert device.pool is None and device.mismatches == 1
    assert device.reserved_bytes == sum(block.nbytes for block in held.values())  # the pool is empty and freed
    run(device, 8 * ITERATION, held)
    assert device.pool is not None and device.mismatches == 1


def test_a_pool_with_blocks_in_use_outlives_a_mismatch() -> None:
    device = Device(first_test=7, shortest=6)
    held = {}
    run(device, "+w " + 3 * ITERATION + "+a +b +c", held)  # c before a is freed
    assert device.reserved_bytes == 9 + 12 + 2
    run(device, "-a -b", held)
    assert device.reserved_bytes == 9 + 2


def test_swaps_on_demand() -> None:
    device = Device(limit=21)
    held = {}
    run(device, "+w +a +b", held)
    assert device.reserved_bytes == 21 and not device.swapped_out
    run(device, "<w +c", held)  # a has been used least recently
    assert (device.swapped_out, device.reserved_bytes, held["a"].resident) == ([4], 19, False)
    run(device, "<a", held)  # in place of b, then w
    assert (device.swapped_out, device.swapped_in) == ([4, 8], [4])
    run(device, "-b -a", held)
    assert device.reserved_bytes == 9 + 2 and device.peak_bytes == 21
    with pytest.raises(MemoryError, match="limit: 21 bytes are exceeded"):
        device.exec(lambda: None, [device.malloc(21), held["w"]], [])


@given(programs() | networks(), st.integers(1, 4))
def test_the_pool_serves_the_iteration_and_is_the_peak(program: Program, alignment: int) -> None:
    program = own_bytes(program)
    tensors = program.tensors
    lives = program_lifetimes(program)
    own = np.array([not tensors[t].persistent for t in lives.owner], bool)
    assume(own.any())
    device = Device(alignment, first_test=2, shortest=2 * int(own.sum()))
    peaks = list(train(device, program, 8))
    assert device.pool is not None and not device.mismatches
    assert len(device.pool.steps) == 2 * own.sum()
    persistent = sum(t.nbytes for t in tensors if t.persistent)
    assert peaks[0] == program.peak_bytes
    assert peaks[-1] - persistent == device.pool.footprint >= program.peak_bytes - persistent
