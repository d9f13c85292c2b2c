"""State of a step in progress: micro-batches, random states and Ctrl-C.

The program treats batch tensors as persistent, present from the beginning of the step. Micro-batches passed one by one
arrive later. Until one arrives, the plan's moves of its tensors only count bytes (the device may hold fewer); on
arrival, its tensors move to the location that the plan has reached.
"""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from executor.capture.captured import Captured
from executor.training.issue_order import Order
from executor.training.memory_source import Block, Blocks, Place
from executor.training.node_calls import Call, Calls


class RandomKey(IntEnum):
    """Keys of random states besides the numbers of kernels."""

    UNDO = -3  # restored by an undo
    BEGIN = -2  # before the step or the current micro-batch
    NOW = -1  # before a kernel is recomputed


@dataclass
class Part:
    """A micro-batch of a step, or the whole step.

    Attributes:
        begin, end: half-open range of its work items.
        leaves: its batch's range among the step's flattened arguments.
        tensors: program tensors of its batch.
        slots: table slots of these tensors and their views, cleared at its end.
        read_later: tensors that later parts read, because they recompute its kernels.
        first: calls at its beginning.
        random: key of the random state at its beginning (``Random``).
        restores_random: whether the next part begins with another random state than its last kernel leaves.
    """

    begin: int
    end: int
    leaves: range
    tensors: set[int]
    slots: list[int]
    read_later: set[int]
    first: list[Call]
    random: int = RandomKey.BEGIN
    restores_random: bool = False


def parts(captured: Captured, order: Order, calls: Calls, random_keys: dict[int, int]) -> tuple[Part, list[Part]]:
    """Returns the whole step and its micro-batches as parts.

    Args:
        captured: the captured step.
        order: its issue order.
        calls: its calls.
        random_keys: kernel -> key under which the random state after the kernel is saved.

    Returns:
        the whole step, and one part per micro-batch.
    """

    def part(begin: int, end: int, leaves: range, first: list[Call]) -> Part:
        tensors = {t for leaf in leaves if (t := captured.values.get(captured.leaves[leaf])) is not None}
        read_later = tensors & set[int]().union(*(item.step.uses.keys() for item in order.items[end:]))
        slots = [slot for node, slot in calls.slots.items() if captured.values.get(node) in tensors - read_later]
        return Part(begin, end, leaves, tensors, slots, read_later, first)

    n = len(order.items)
    count = len(captured.leaves)
    whole = part(0, n, range(count), [call for first in calls.first for call in first])
    ends = [order.schedule.first[micro.end] for micro in captured.micro[:-1]]
    count_per_part = count // (len(ends) + 1)
    micro_parts = [
        part(begin, end, range(i * count_per_part, (i + 1) * count_per_part), calls.first[i])
        for i, (begin, end) in enumerate(pairwise([0, *ends, n]))
    ]
    for micro, (before, after) in zip(captured.micro, pairwise(micro_parts), strict=False):
        after.random = random_keys.get(micro.draw_kernel, RandomKey.BEGIN)
        before.restores_random = micro.is_reset
    return whole, micro_parts


class Random:
    """Saved states of all generators that a step may draw from, each under the key of the kernel that follows.

    A separate class, because methods of the step in its work list would create a reference cycle.
    """

    def __init__(self, captured: Captured, device: torch.device):
        self.states = dict[int, list[Tensor]]()
        self.generators = [torch.default_generator]
        if device.type == "cuda":
            index = torch.empty(0, device=device).get_device()  # the first tensor initializes the generators
            self.generators.append(torch.cuda.default_generators[index])
        self._defaults = len(self.generators)
        for node in captured.graph.graph.nodes:
            values = [getattr(captured.graph, node.target)] if node.op == "get_attr" else node.kwargs.values()
            self.generators += [v for v in values if isinstance(v, torch.Generator) and v not in self.generators]

    def save(self, kernel: int) -> None:
        """Saves the generators' states under the key ``kernel``."""
        self.states[kernel] = [g.get_state() for g in self.generators]

    def restore(self, kernel: int) -> None:
        """Restores the states of all generators from the key ``kernel``."""
        for generator, state in zip(self.generators, self.states[kernel], strict=True):
            generator.set_state(state)

    def restore_defaults(self, kernel: int) -> None:
        """Restores the states of PyTorch's own generators only, as a checkpoint does."""
        for generator, state in zip(self.generators[: self._defaults], self.states[kernel], strict=False):
            generator.set_state(state)

    def replay(self, kernel: int) -> None:
        """Restores a kernel's random states for its recomputation, after saving the current states under ``NOW``."""
        self.save(RandomKey.NOW)
        self.restore(kernel)


class Progress:
    """Progress of a step whose micro-batches are passed one by one.

    Attributes:
        done: number of finished micro-batches of the current step.
        by_micro_batch: whether micro-batches are passed one by one.
        loss: copy of the last micro-batch's loss.
        absent: batch tensors that have not arrived.
        needed_batches: arrived tensors that later parts need, each with its version.
    """

    def __init__(self, blocks: Blocks, random: Random) -> None:
        self._blocks = blocks
        self._random = random
        self.done = 0
        self.by_micro_batch = False
        self.absent = set[int]()
        self.loss: Tensor | None = None
        self.needed_batches: list[tuple[Tensor, int]] = []
        self._grad_mode = False
        self._shown_blocks: list[Block] = []

    def keep_loss(self, loss: Tensor) -> Tensor:
        """Keeps a copy of a micro-batch's loss and returns the loss."""
        if self.by_micro_batch:
            self.loss = loss.clone()
        return loss

    def pause(self, part: Part, following: Part) -> None:
        """Suspends the step after a micro-batch."""
        self._grad_mode = torch.is_grad_enabled()
        if part.restores_random:
            self._random.restore_defaults(following.random)
        for slot in part.slots:  # releases the caller's memory
            self._blocks.values[slot] = None
        self._shown_blocks = self._blocks.show()
        self.done += 1

    def resume(self, part: Part) -> None:
        """Resumes the step with the next micro-batch and the current random state."""
        self._random.save(part.random)
        engines = self._blocks.engines
        if engines.begin():  # the caller's stream has changed
            for value in self._blocks.values:  # their memory belongs to the previous stream
                if isinstance(value, Tensor):
                    engines.borrow(value)
        for block in self._shown_blocks:
            block.hide()
        torch._C._set_grad_enabled(self._grad_mode)

    def end(self) -> None:
        """Resets the progress after a finished or abandoned step."""
        self.done = 0
        self.by_micro_batch = False
        self.loss = None
        self._shown_blocks = []
        self.needed_batches = []
        for block in map(self._blocks.blocks.__getitem__, self.absent):
            block.place = Place.DEVICE
            block.absent = False
        self.absent.clear()

    # ---------------------------------------------------------------------------- absent batch tensors

    def expect(self, absent: set[int]) -> None:
        """Marks batch tensors as not arrived."""
        self.absent = absent
        for t in absent:
            self._blocks.blocks[t].absent = True

    def arrive(self, t: int) -> None:
        """Moves a tensor that has arrived on the device to the location that the plan has reached."""
        self.absent.discard(t)
        block = self._blocks.blocks[t]
        planned = block.place
        valid = block.valid
        block.place = Place.DEVICE
        block.valid = False
        block.absent = False
        if planned is Place.HOST:
            self._blocks.used += block.nbytes
        if valid or planned is Place.OUT:
            self._blocks.swap_out(block)
        if valid:
            self._blocks.reclaim(block)
        if planned is Place.DEVICE:
            self._blocks.swap_in_all([t])


class Interrupt:
    """Defers Ctrl-C during a step until the step is finished or undone.

    Attributes:
        stop: whether the step should be undone if possible. A user's signal handler is called only at the end.
    """

    def __enter__(self) -> Interrupt:
        self.stop = False
        self.caught: tuple[Any, ...] | None = None
        handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
        self.handler = handler if callable(handler) else None
        if self.handler:
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def _on_signal(self, *caught: Any) -> None:
        self.caught = caught
        self.stop = self.handler is signal.default_int_handler

    def __exit__(self, error_type: Any, *_: object) -> None:
        if self.handler:
            signal.signal(signal.SIGINT, self.handler)
            if self.caught and error_type is not KeyboardInterrupt:
                self.handler(*self.caught)
