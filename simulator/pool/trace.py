"""Iteration detection: "Efficient Memory Management for GPU-based Deep Learning Systems" (2020), section V.

The device records every malloc, free, read and write; "once two consecutive subsequences are detected to be
repeating, the subsequence is fed into PoolOpt", here packed as a circle. The paper does not describe the detection;
the numbered choices are in simulator/pool/README.md.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from simulator.compiled.encoding import Ints
from simulator.compiled.jit import jit
from simulator.pool.intervals import Intervals


class OperationKind(IntEnum):
    """Kinds of simulator.program.Operation, which have these names in lower case."""

    MALLOC = 0
    WRITE = 1
    READ = 2
    FREE = 3


KINDS = tuple(kind.name.lower() for kind in OperationKind)


class StreamError(ValueError):
    """Raised for an operation (index ``operation``) on a block that is not live, or a malloc of a live block."""

    def __init__(self, operation: int, reason: str):
        super().__init__(f"operation {operation}: {reason}")
        self.operation = operation
        self.reason = reason


class NoIteration(ValueError):
    """Raised if the stream has no repeating iteration; the message names what was found instead."""


@dataclass(frozen=True)
class Stream:
    """n operations in execution order.

    Raises:
        StreamError: a live block is malloc'ed, or a block that is not live is used or freed.
    """

    kind: NDArray[np.int8]  # [n], an OperationKind
    block: Ints  # [n], identifier of the block: its address, or a number. It may be reused after the free.
    nbytes: Ints  # [n], size of each malloc; ignored elsewhere

    def __post_init__(self) -> None:
        _ = self.mallocs  # checks

    def __len__(self) -> int:
        return len(self.kind)

    @classmethod
    def from_operations(cls, operations: Iterable[tuple[str, Hashable, int]]) -> Stream:
        """Builds a stream from (one of KINDS, block, bytes) per operation; bytes matter for mallocs only."""
        rows = list(operations)
        names: dict[Hashable, int] = {}
        block = [names.setdefault(name, len(names)) for _, name, _ in rows]
        kind = [KINDS.index(kind) for kind, _, _ in rows]
        return cls(np.array(kind, np.int8), np.array(block, np.int64), np.array([n for *_, n in rows], np.int64))

    @cached_property
    def mallocs(self) -> Ints:
        """int64[n], index of the malloc of each operation's block.

        Raises:
            StreamError: A block is allocated while it is held, or used while it is not.
        """
        order = np.argsort(self.block, kind="stable")  # groups operations by block, in time order
        block = self.block[order]
        kind = self.kind[order]
        is_free = np.ones(len(self), bool)  # the block is not live
        is_free[1:] = (block[1:] != block[:-1]) | (kind[:-1] == OperationKind.FREE)
        malloc = kind == OperationKind.MALLOC
        invalid = order[malloc != is_free]
        if len(invalid):
            i = int(invalid.min())
            reason = "is held already" if self.kind[i] == OperationKind.MALLOC else "is not held"
            raise StreamError(i, f"{KINDS[self.kind[i]]} of a block that {reason}")
        out = np.empty(len(self), np.int64)
        out[order] = order[np.maximum.accumulate(np.where(malloc, np.arange(len(self)), 0))]
        return out

    @cached_property
    def frees(self) -> Ints:
        """int64[n], index of the free of each operation's block; n if it is never freed."""
        free = np.flatnonzero(self.kind == OperationKind.FREE)
        ends = np.full(len(self), len(self))
        ends[self.mallocs[free]] = free
        return ends[self.mallocs]

    def intervals(self) -> tuple[Intervals, Ints]:
        """Returns the whole stream on a line, by operation index, and int64[m], the malloc of each block."""
        source = np.flatnonzero(self.kind == OperationKind.MALLOC)
        return Intervals(source, self.frees[source], self.nbytes[source]), source


@dataclass(frozen=True)
class Iteration:
    """Repeating part of a stream. Operation k, 0 <= k < length, is first operation begin + k of the stream.

    An executor finds the address of malloc k as ``packing.offsets[iteration.block[k]]``.
    """

    begin: int  # index of the first repetition in the stream
    length: int  # number of operations
    repetitions: int  # number of complete repetitions from ``begin`` on
    intervals: Intervals  # m blocks, those that persist across iterations first; a circle of ``length`` operations
    source: Ints  # [m], the malloc of each block in the stream, ascending
    block: Ints  # [length], the block of each operation


def detect(stream: Stream) -> Iteration:
    """Detects the iteration of a stream.

    Raises:
        NoIteration: nothing repeats twice in a row or over half of the stream, or memory grows.
    """
    n = len(stream)
    kind = stream.kind
    mallocs = stream.mallocs
    frees = stream.frees
    age = np.arange(n) - mallocs
    held_for = frees - mallocs
    remains = (kind == OperationKind.MALLOC) & ((frees == n) | (2 * held_for >= n))
    setup = n if remains.all() else int(remains.argmin())
    half = -(-(n - setup) // 2)
    stays = held_for >= half  # choice 2

    size = np.unique(stream.nbytes[mallocs], return_inverse=True)[1]
    identity = np.unique(np.where(stays & (kind != OperationKind.MALLOC), -1 - mallocs, age), return_inverse=True)[1]
    begins, ends = _repeating(((identity * n + size) * len(KINDS) + kind)[setup:])  # below 4 n², each a symbol
    begins = begins + setup
    ends = ends + setup
    length = np.where(ends - begins >= 2 * np.arange(1, len(begins) + 1), ends - begins, 0)  # if it repeats at all
    if length.max(initial=0) < max(half, 1):
        raise NoIteration(_no_repetition(n - setup, length))

    reason = ""
    while length.max() >= half:
        shortest = int(length.argmax()) + 1
        too_short = 0
        for p in range(shortest, len(length) + 1, shortest):
            if p <= too_short or not length[p - 1]:
                continue
            begin = int(begins[p - 1])
            end = int(ends[p - 1])
            index = np.arange(begin, end)
            young = np.where(
                kind[index] == OperationKind.MALLOC, held_for[index] >= p, ~stays[index] & (age[index] >= p)
            )
            young[-p:] &= kind[index[-p:]] != OperationKind.MALLOC  # their frees may lie beyond it
            young = index[young]
            first = int(young[-1]) + 1 if len(young) else begin
            if end - first >= max(2 * p, half):
                return _iteration(stream, first, end, p)
            # The first range that no later start excludes; it is too late for all shorter or equal periods.
            i = int(young[np.searchsorted(young, end - max(2 * p, half))])
            too_short = int(held_for[i])
            reason = reason or (
                f"no iteration: {(end - begin) // p} times {p} operations repeat from operation {begin} on, but the "
                f"{stream.nbytes[mallocs[i]]} bytes of operation {mallocs[i]} are held for {too_short} operations at "
                "least: memory grows, or more iterations are needed"
            )
        length[shortest - 1 :: shortest] = 0  # choice 6: the next longest, if any
    raise NoIteration(reason)


def _no_repetition(n: int, length: Ints) -> str:
    if not length.any():
        return (
            f"no iteration: after the set-up, no two consecutive subsequences in the middle of {n} operations are equal"
        )
    p = int(length.argmax()) + 1
    return (
        f"no iteration: after the set-up, the longest repetition in the middle, {length[p - 1] // p} times {p} "
        f"operations, is {length[p - 1] / n:.0%} of {n} operations and must be half of them"
    )


def _iteration(stream: Stream, begin: int, end: int, period: int) -> Iteration:
    """Builds the iteration from operations [begin, end), which repeat."""
    size = stream.nbytes[stream.mallocs]
    change = np.where(stream.kind == OperationKind.MALLOC, size, np.where(stream.kind == OperationKind.FREE, -size, 0))
    held = np.cumsum(change) - change  # before each operation
    begin += int(held[begin : begin + min(period, end - begin - 2 * period + 1)].argmin())  # choice 7
    malloc = np.flatnonzero(stream.kind == OperationKind.MALLOC)
    permanent = malloc[(malloc < begin) & (stream.frees[malloc] >= end)]
    inside = malloc[(malloc >= begin) & (malloc < begin + period)]
    source = np.concatenate((permanent, inside))
    lower = np.concatenate((np.zeros(len(permanent), np.int64), inside - begin))
    upper = np.concatenate((np.full(len(permanent), period), stream.frees[inside] - begin))
    index = np.full(len(stream), -1)
    index[source] = np.arange(len(source))
    starts = stream.mallocs[begin : begin + period]
    block = np.where(index[starts] < 0, index[starts + period], index[starts])  # malloc'ed before begin, so it recurs
    intervals = Intervals(lower, upper, stream.nbytes[source], period)
    return Iteration(begin, period, (end - begin) // period, intervals, source, block)


def _repeating(symbols: Ints) -> tuple[Ints, Ints]:
    """Returns, per period p from 1 to half, the range [begin, end) around the middle in which p repeats (choice 4)."""
    n = len(symbols)
    middle = n // 2
    begin, end = _repetition_at(symbols, middle)
    back_end, back_begin = (n - x for x in _repetition_at(symbols[::-1], n - middle))
    forward = end - begin >= back_end - back_begin
    return np.where(forward, begin, back_begin), np.where(forward, end, back_end)


def _repetition_at(symbols: Ints, position: int) -> tuple[Ints, Ints]:
    """Returns, per period p, the longest range [begin, end) that repeats with p and contains [at, at + p)."""
    n = len(symbols)
    p = np.arange(1, n // 2 + 1)
    reversed_symbols = symbols[::-1]
    right = np.append(_z_function(symbols[position:].copy()), 0)[p]
    left = _z_function(np.concatenate((reversed_symbols[n - position :], [-1], reversed_symbols)))[n + 1 - p]
    return position - left, position + right + p


@jit
def _z_function(text):
    """Returns int64[n], the length of the common prefix of the sequence and its suffix at i."""
    n = len(text)
    z = np.zeros(n, np.int64)
    # of the match that reaches furthest
    begin = 0
    end = 0
    for i in range(1, n):
        length = min(z[i - begin], end - i) if i < end else 0
        while i + length < n and text[length] == text[i + length]:
            length += 1
        z[i] = length
        if i + length > end:
            begin = i
            end = i + length
    return z
