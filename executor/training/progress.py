"""A step under way: its micro-batches, the process's random states, and Ctrl-C.

The tensors of the batch are persistent in the program: all there from the begin of the step. Where micro-batches come
one by one they come later. Until one has come, the plan's moves of its tensors only count bytes, as the program does
(there may be less); when it comes, its tensors go where the plan has them by then.
"""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from executor.capture.captured import Captured
from executor.training.issue_order import Order
from executor.training.memory_source import Block, Blocks, Place
from executor.training.node_calls import Call, Calls

# Random states that are no kernel's: that an undone step goes back to; before the step or this micro-batch of it;
# before a kernel runs again.
UNDO, BEGIN, NOW = -3, -2, -1


@dataclass
class Part:
    """A micro-batch of a step, or all of it.

    Attributes:
        begin, end: its items.
        leaves: its batch's among the step's arguments, flat.
        tensors: of the program, that are its batch's.
        slots: of these and their views, cleared when it is over.
        reads_on: tensors that steps after it need, because kernels of its run again.
        first: calls that begin it.
        random: the random state at its begin, as Random counts.
        put_back: its last kernel does not leave the random state in which the next part begins.
    """

    begin: int
    end: int
    leaves: range
    tensors: set[int]
    slots: list[int]
    reads_on: set[int]
    first: list[Call]
    random: int = BEGIN
    put_back: bool = False


def parts(captured: Captured, order: Order, calls: Calls, kept: dict[int, int]) -> tuple[Part, list[Part]]:
    """All of a step, and its micro-batches.

    Args:
        kept: kernel -> the number under which the random state after it is kept.
    """

    def part(begin: int, end: int, leaves: range, first: list[Call]) -> Part:
        tensors = {t for leaf in leaves if (t := captured.values.get(captured.leaves[leaf])) is not None}
        reads_on = tensors & set[int]().union(*(item.step.uses.keys() for item in order.items[end:]))
        slots = [slot for node, slot in calls.slots.items() if captured.values.get(node) in tensors - reads_on]
        return Part(begin, end, leaves, tensors, slots, reads_on, first)

    n, count = len(order.items), len(captured.leaves)
    whole = part(0, n, range(count), [call for first in calls.first for call in first])
    ends = [order.schedule.first[micro.end] for micro in captured.micro[:-1]]
    per = count // (len(ends) + 1)
    found = [part(begin, end, range(i * per, (i + 1) * per), calls.first[i])
             for i, (begin, end) in enumerate(pairwise([0, *ends, n]))]  # fmt: skip
    for micro, (before, after) in zip(captured.micro, pairwise(found), strict=False):
        after.random, before.put_back = kept.get(micro.drawn, BEGIN), micro.put_back
    return whole, found


class Random:
    """States of all random generators, by what comes after them. (A class of its own: were these methods of the step,
    its list of work would hold the step, and its memory would wait for the garbage collector.)"""

    def __init__(self, generators: list[torch.Generator], own: int):
        self.own = own  # how many of the first are PyTorch's
        self.generators, self.states = generators, dict[int, list[Tensor]]()

    def save(self, kernel: int) -> None:
        """Keeps the generators' states before ``kernel``."""
        self.states[kernel] = [g.get_state() for g in self.generators]

    def restore(self, kernel: int) -> None:
        """Sets the generators to what they were before ``kernel``."""
        for generator, state in zip(self.generators, self.states[kernel], strict=True):
            generator.set_state(state)

    def put_back(self, kernel: int) -> None:
        """Sets PyTorch's own generators to what they were before ``kernel``, as a checkpoint does."""
        for generator, state in list(zip(self.generators, self.states[kernel], strict=True))[: self.own]:
            generator.set_state(state)

    def replay(self, kernel: int) -> None:
        """A kernel runs again: it draws what it drew, and afterwards the generators go on from where they are."""
        self.save(NOW)
        self.restore(kernel)


def generators(captured: Captured, device: torch.device) -> tuple[list[torch.Generator], int]:
    """Every generator that the step may draw from, and how many of the first are PyTorch's."""
    found = [torch.default_generator]
    if device.type == "cuda":
        index = torch.empty(0, device=device).get_device()  # before there is a tensor there may be no generators
        found.append(torch.cuda.default_generators[index])
    defaults = len(found)
    for node in captured.graph.graph.nodes:
        own = [getattr(captured.graph, node.target)] if node.op == "get_attr" else node.kwargs.values()
        found += [v for v in own if isinstance(v, torch.Generator) and v not in found]
    return found, defaults


class Progress:
    """How far a step is whose micro-batches come one by one.

    Attributes:
        done: micro-batches of the present step.
        alone: they come one by one.
        loss: the last one's; its own memory.
        absent: tensors of the batch that have not come.
        needed: of those that have come, which later parts need; each with its version.
    """

    def __init__(self, blocks: Blocks, random: Random) -> None:
        self._blocks, self._random = blocks, random
        self.done, self.alone, self.absent = 0, False, set[int]()
        self.loss: Tensor | None = None
        self.needed: list[tuple[Tensor, int]] = []
        self._grad_mode = False
        self._shown: list[Block] = []

    def keep(self, loss: Tensor) -> Tensor:
        """A micro-batch's loss is there: passed on."""
        if self.alone:
            self.loss = loss.clone()
        return loss

    def pause(self, part: Part, following: Part) -> None:
        """A micro-batch is over and the step is not."""
        self._grad_mode = torch.is_grad_enabled()
        if part.put_back:
            self._random.put_back(following.random)
        for slot in part.slots:  # the caller may have the memory back
            self._blocks.values[slot] = None
        self._shown = self._blocks.show()
        self.done += 1

    def resume(self, part: Part) -> None:
        """The next one begins, with the random state as it is now."""
        self._random.save(part.random)
        if (engines := self._blocks.engines) and engines.begin():  # the caller's stream is another one
            for value in self._blocks.values:  # and their memory that of the one before
                if isinstance(value, Tensor):
                    engines.borrow(value)
        for block in self._shown:
            block.hide()
        torch._C._set_grad_enabled(self._grad_mode)

    def end(self) -> None:
        """The step is over or given up."""
        self.done, self.alone, self.loss, self._shown, self.needed = 0, False, None, [], []
        for block in map(self._blocks.blocks.__getitem__, self.absent):
            block.place, block.absent = Place.DEVICE, False
        self.absent.clear()

    # ---------------------------------------------------------------------------- what has not come

    def expect(self, absent: set[int]) -> None:
        """These tensors of the batch have not come."""
        self.absent = absent
        for t in absent:
            self._blocks.blocks[t].absent = True

    def arrive(self, t: int) -> None:
        """A tensor has come, on the device: it goes where it would be if it had been there from the begin."""
        self.absent.discard(t)
        block = self._blocks.blocks[t]
        meant, valid = block.place, block.valid
        block.place, block.valid, block.absent = Place.DEVICE, False, False
        if meant is Place.HOST:
            self._blocks.used += block.nbytes
        if valid or meant is Place.OUT:
            self._blocks.out(block)
        if valid:
            self._blocks.reclaim(block)
        if meant is Place.DEVICE:
            self._blocks.back([t])


class Interrupt:
    """Ctrl-C while a step runs: noted, and handled when the step is over, done or undone.

    Attributes:
        stop: it should be undone, if it still can. A handler other than Python's own is called only at the end.
    """

    def __enter__(self) -> Interrupt:
        self.stop, self.caught = False, None
        handler = signal.getsignal(signal.SIGINT) if threading.current_thread() is threading.main_thread() else None
        self.handler = handler if callable(handler) else None
        if self.handler:
            signal.signal(signal.SIGINT, self._note)
        return self

    def _note(self, *caught: Any) -> None:
        self.caught = caught
        self.stop = self.handler is signal.default_int_handler

    def __exit__(self, kind: Any, *_: object) -> None:
        if self.handler:
            signal.signal(signal.SIGINT, self.handler)
            if self.caught and kind is not KeyboardInterrupt:
                self.handler(*self.caught)
