"""The largest batch that fits, without a plan and with one.

A step whose kernels do not depend on its batch has tensors whose sizes are affine in it: two captures, of another batch
each, say how large every tensor is at any (``Batches``). So a peak without a plan is known to the byte, and planners
have a program to plan, without a capture for each batch that is tried. Durations are taken to be affine, too, which
rooflines are only piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experiments.common.bisection import largest
from simulator.program import Program

MOST = 1024  # times the own batch: nothing above is looked at
PART = 32  # the largest batch with a plan is exact to this part of it


class BatchError(ValueError):
    """The batch of a step cannot be changed; the message is the reason, one sentence."""


@dataclass(frozen=True)
class Batches:
    """One step at any batch, from captures at two.

    Raises:
        BatchError: the kernels at the two differ in more than sizes and durations.
    """

    own: int  # examples
    program: Program  # with so many
    other: int
    larger: Program  # with ``other`` of them
    beside: tuple[int, int] = (0, 0)  # bytes of the card besides the tensors' at the two batches

    def __post_init__(self) -> None:
        if _structure(self.program) != _structure(self.larger):
            raise BatchError(f"at a batch of {self.other} its kernels are not those at {self.own}")

    def at(self, batch: int) -> Program:
        """The step with so many examples."""

        size = partial(self._size, batch)
        tensors = tuple(
            replace(t, nbytes=size(t.nbytes, u.nbytes))
            for t, u in zip(self.program.tensors, self.larger.tensors, strict=True)
        )
        kernels = tuple(
            replace(k, duration_ns=size(k.duration_ns, u.duration_ns), workspace=size(k.workspace, u.workspace),
                    flops=size(k.flops, u.flops), bytes=size(k.bytes, u.bytes), variants=())
            for k, u in zip(self.program.kernels, self.larger.kernels, strict=True)
        )  # fmt: skip
        return Program(self.program.name, tensors, kernels)

    def peak_bytes(self, batch: int) -> int:
        """The peak with so many examples, without a plan."""
        small, large = self._live
        return int(np.ceil(small + (large - small) * ((batch - self.own) / (self.other - self.own))).max())

    def tensors(self, limit: int, batch: int) -> int:
        """What is left of ``limit`` bytes for the tensors of so many examples."""
        return max(limit - self._size(batch, *self.beside), 0)

    def _size(self, batch: int, small: int, large: int) -> int:
        """Of what is ``small`` at the own batch and ``large`` at the other."""
        return max(small + round((large - small) * (batch - self.own) / (self.other - self.own)), 0)

    def largest(self, limit: int) -> int:
        """The largest batch with a peak of at most ``limit`` bytes, up to MOST times the own; 0 where none has it."""
        return largest(lambda batch: self.peak_bytes(batch) <= self.tensors(limit, batch), self.own, MOST * self.own)

    def largest_planned(
        self, costs: Callable[[Program, int], float | None], limit: int, least: int, most_overhead: float
    ) -> int:
        """The largest batch at which a plan costs at most so much, to 1 / PART of it.

        Args:
            costs: overhead of a plan for a program within so many bytes; None where there is none.
            least: a batch that needs no plan; 0: there is none.
        """

        def fits(batch: int) -> bool:
            if batch <= least:
                return True
            room = self.tensors(limit, batch)
            found = costs(self.at(batch), room) if room else None
            return found is not None and found <= most_overhead

        return largest(fits, max(least, 1), MOST * self.own, PART)

    def accumulated(self, limit: int) -> tuple[int, int, float] | None:
        """The fewest micro-batches that make up the own batch and fit without a plan, while the gradients of all
        parameters are held.

        Returns:
            The size of each, their number, and what they cost, of the ideal time; None: there are none, or the step
            changes no parameters.
        """
        phases = {k.phase for k in self.program.kernels}
        held = sum(t.nbytes for t in self.program.tensors if t.kind == "parameter")
        if "optimizer" not in phases or self.own == 1:
            return None
        most = largest(
            lambda batch: self.peak_bytes(batch) + held <= self.tensors(limit, batch), self.own - 1, self.own - 1
        )
        if not most:
            return None
        count = -(-self.own // most)
        each = -(-self.own // count)
        small = sum(k.duration_ns for k in self.at(each).kernels if k.phase != "optimizer")
        update = sum(k.duration_ns for k in self.program.kernels if k.phase == "optimizer")
        return each, count, (small * self.own / each + update) / max(self.program.ideal_ns, 1) - 1

    @cached_property
    def _live(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        return tuple(np.array(p.live_bytes, float) for p in (self.program, self.larger))  # type: ignore[return-value]


def _structure(program: Program) -> tuple[Any, ...]:
    return (
        [(t.kind, t.persistent) for t in program.tensors],
        [(k.name, k.inputs, k.outputs, k.recomputable) for k in program.kernels],
    )


def on_its_scale(larger: Program, program: Program) -> Program:
    """The step at twice the batch, its roofline on the scale of the other's durations, which may be measured ones:
    kernels that are equal in both (an update of the parameters) say how much longer these are, or, where there are
    none, that it takes twice as long."""
    if _structure(larger) != _structure(program) or not larger.ideal_ns:
        return larger
    pairs = [(k.duration_ns, u.duration_ns) for k, u in zip(program.kernels, larger.kernels, strict=True)
             if (k.flops, k.bytes) == (u.flops, u.bytes)]  # fmt: skip
    ours, theirs = (sum(times) for times in zip(*pairs, strict=True)) if pairs else (0, 0)
    if not ours or not theirs:
        ours, theirs = 2 * program.ideal_ns, larger.ideal_ns
    return larger.with_durations([round(k.duration_ns * ours / theirs) for k in larger.kernels])
