"""Tests iteration detection: hand-made streams, and programs whose iterations are recovered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from random import Random

import numpy as np
import pytest
from hypothesis import assume, given, strategies as st

from simulator import Program
from simulator.pool import program_lifetimes, smartpool
from simulator.pool.trace import Iteration, NoIteration, OperationKind, Stream, detect
from tests.strategies import programs


def stream(text: str) -> Stream:
    """Builds a stream from words: "+a8" mallocs a with 8 bytes, "-a" frees it, "<a" reads it, ">a" writes it."""
    kinds = {"+": "malloc", "-": "free", "<": "read", ">": "write"}
    return Stream.from_operations((kinds[w[0]], w[1:2], int(w[2:] or 0)) for w in text.split())


def blocks(found: Iteration) -> list[tuple[int, int, int]]:
    """Returns (lower, upper, bytes) of each block."""
    table = found.intervals
    return list(zip(table.lower.tolist(), table.upper.tolist(), table.nbytes.tolist(), strict=True))


def replay(recorded: Stream, found: Iteration) -> None:
    """Replays every repetition with SmartPool's addresses; asserts that no two live blocks share a byte."""
    offsets = smartpool.pack(found.intervals).offsets
    always = np.flatnonzero(found.intervals.upper - found.intervals.lower == found.length)
    at = {int(found.source[b]): int(b) for b in always}  # block of the circle, by malloc
    for i in range(found.begin, found.begin + found.repetitions * found.length):
        malloc = int(recorded.mallocs[i])
        block = int(found.block[(i - found.begin) % found.length])
        assert at.setdefault(malloc, block) == block
        assert recorded.nbytes[malloc] == found.intervals.nbytes[block]
        if recorded.kind[i] == OperationKind.FREE:
            del at[malloc]
        elif recorded.kind[i] == OperationKind.MALLOC:
            held = sorted((offsets[b], offsets[b] + recorded.nbytes[m]) for m, b in at.items() if recorded.nbytes[m])
            assert all(end <= begin for (_, end), (begin, _) in zip(held, held[1:], strict=False))


@pytest.mark.parametrize(
    ("text", "where", "held", "block"),
    [
        # The set-up is operations 0 and 1. An iteration is 6 operations; its blocks lie at other ids each time. w and v
        # stay; a is held from operation 0 to 4, b from 3 to 5.
        (
            "+w9 +v7  +a4 <w >a +b8 -a -b  +c4 <w >c +a8 -c -a  +b4 <w >b +c8 -b -c",
            (2, 6, 3),
            [(0, 6, 9), (0, 6, 7), (0, 4, 4), (3, 5, 8)],
            [2, 0, 2, 3, 2, 3],
        ),
        # Of 4 operations, a and c are held from 0 to 3, b and d from 2 to operation 1 of the next iteration. Of the
        # begins that leave two repetitions, operation 6, before "+d8", is where c alone is held.
        (
            "+w9  +a4 +b8 -a  +c4 -b +d8 -c  +a4 -d +b8 -a  +c4 -b +d8 -c",
            (6, 4, 2),
            [(0, 4, 9), (0, 3, 8), (2, 5, 4)],
            None,
        ),
        # Operations 0 to 11 equal the 6 before or after them but for ids, yet x, operation 5, is freed by none of them.
        # Operations 6 to 15 repeat every 5.
        ("+a2 -a +b2 >b -b +x2 +c2 -c +d2 >d -d +e2 -e +f2 >f -f", (6, 5, 2), [(0, 5, 2), (0, 1, 2), (2, 4, 2)], None),
    ],
)
def test_what_is_found(text: str, where: tuple, held: list, block: list[int] | None) -> None:
    recorded = stream(text)
    found = detect(recorded)
    assert (found.begin, found.length, found.repetitions) == where and blocks(found) == held
    assert found.source.tolist() == sorted(found.source.tolist())
    assert block is None or found.block.tolist() == block
    replay(recorded, found)


# micro-batches of 6 operations, an optimizer step of 4
MICRO = "+a4 <w >a >g <a -a "
STEP = "<g <w >w >g "
EPOCH = 6 * "+a4 >a +b2 -a -b " + 2 * "+c7 <c -c "
TRAIN = "+a4 >a +b2 -a -b "
TWICE = 2 * "+a4 >a -a +b2 -b "
OTHER = "+c1 +d3 <c +e5 >d -c -d <e "
HELD = "+a4 +b8 -a  +c4 -b +d8 -c  +a4 -d +b8 -a  +c4 -b +d8 -c -d "  # blocks outlive the iteration of 4 operations
DIGEST = "cb39f182f829d2e1"


def test_results_equal_the_recorded_digest() -> None:
    """Streams of loops in loops, and of iterations that differ at their ends."""
    rng = Random(0)
    results = []
    for _ in range(400):
        loops = [rng.randint(1, 4) * rng.choice([MICRO, STEP, EPOCH, TRAIN, TWICE, HELD, "+z3 -z "]) for _ in range(3)]
        text = "+w4 +g4 " + rng.choice(["", TRAIN]) + rng.randint(1, 3) * "".join(loops) + rng.choice(["", STEP])
        try:
            found = detect(stream(text))
            replay(stream(text), found)
            results.append((found.begin, found.length, found.repetitions, blocks(found), found.block.tolist()))
        except NoIteration as error:
            results.append(str(error))
    assert sha256(repr(results).encode()).hexdigest()[:16] == DIGEST


def test_two_buffers_in_turn_make_an_iteration_of_two() -> None:
    # Each batch is loaded in one iteration of 5 operations and freed at the end of the next: held for 9.
    turns = "+a8 <b +x1 -x -b " + "+b8 <a +x1 -x -a "
    recorded = stream("+b8 " + 4 * turns)
    found = detect(recorded)
    assert (found.length, found.intervals.peak_bytes) == (10, 17)
    replay(recorded, found)
    with pytest.raises(NoIteration, match=r"bytes of operation 1 are held for 9 operations at least: .*, or more it"):
        detect(stream("+b8 " + 2 * turns))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no two consecutive subsequences in the middle of 0 operations are equal"),
        ("+a4 +b4 +c4", "after the set-up, no two .* of 0 operations"),
        ("+w4 +a4 <w >a -a", "in the middle of 3 operations"),  # a counts as set-up
        ("+a1 -a +a2 -a +a3 -a +a4 -a +a5 -a +a6 -a", "no two consecutive subsequences"),  # sizes grow
        # A list of losses that is never emptied: 5 iterations of 4.
        (
            "".join(f"+a4 >a -a +{x}1 " for x in "vwxyz"),
            "5 times 4 operations repeat from operation 0 on, "
            "but the 1 bytes of operation 11 are held for 9 operations",
        ),
        # Of one epoch and as many iterations of the next, 30 of the 66 operations are training iterations in a row.
        (EPOCH + 6 * TRAIN, r"2 times 3 operations, is 9% of 66 operations and must be half of them"),
        ("+w1 " + OTHER + TWICE + "+f6 >f -f <w", "2 times 5 operations, is 45% of 22 operations and must be half"),
        # An optimizer that repeats after a network that does not: 6 of 16 operations.
        ("+w4 +a1 <a +b2 <b +c3 <c +d5 <d -d -c -b -a +t9 -t +t9 -t +t9 -t", "no iteration"),
    ],
)
def test_nothing_repeats(text: str, reason: str) -> None:
    with pytest.raises(NoIteration, match=reason):
        detect(stream(text))


def own_bytes(program: Program) -> Program:
    """Gives each tensor a size of its own, so that nothing repeats inside the iteration; removes the workspaces."""
    tensors = tuple(replace(x, nbytes=1000 + t) for t, x in enumerate(program.tensors))
    return Program("own bytes", tensors, tuple(replace(k, workspace=0) for k in program.kernels))


def unrolled(program: Program, iterations: int, rng: np.random.Generator, changed: bool) -> Iterator[tuple]:
    """Returns a program's raw stream: persistent tensors first, random ids, reused after their free.

    If ``changed``, the second half of the persistent tensors is malloc'ed at its first use in the first iteration, and
    the last iteration has extra mallocs and frees.
    """
    free = []
    used = 0
    ids = {}

    def fresh() -> int:
        nonlocal used
        if free and rng.random() < 0.5:
            return free.pop(rng.integers(len(free)))
        used += 1
        return 512 * used

    persistent = [t for t, x in enumerate(program.tensors) if x.persistent]
    for t in persistent[: len(persistent) // 2] if changed else persistent:
        ids[t] = fresh()
        yield "malloc", ids[t], program.tensors[t].nbytes
    operations = program.operations()
    for iteration in range(iterations):
        for i, (kind, t, *_) in enumerate(operations):
            if changed and iteration == iterations - 1 and i == len(operations) // 2:
                yield from (("malloc", -1, 77), ("free", -1, 0))
            if kind == "malloc" or t not in ids:
                ids[t] = fresh()
                yield "malloc", ids[t], program.tensors[t].nbytes
            if kind != "malloc":
                yield kind, ids[t], 0
            if kind == "free":
                free.append(ids.pop(t))


@given(programs(), st.integers(0, 2**32 - 1), st.booleans())
def test_the_iteration_of_a_program_is_found_again(program: Program, seed: int, changed: bool) -> None:
    program = own_bytes(program)
    operations = program.operations()
    assume(any(x.kind == "malloc" for x in operations))
    recorded = Stream.from_operations(unrolled(program, 6, np.random.default_rng(seed), changed))
    found = detect(recorded)
    assert found.length == len(operations)
    assert found.repetitions >= (4 if changed else 6)
    lives = program_lifetimes(program).intervals
    unused = sum(
        x.nbytes for x, uses in zip(program.tensors, program.accesses, strict=True) if x.persistent and not uses
    )
    # Of the changed stream, tensors that nothing uses may be missing.
    assert lives.peak_bytes - (unused if changed else 0) <= found.intervals.peak_bytes <= lives.peak_bytes
    replay(recorded, found)
