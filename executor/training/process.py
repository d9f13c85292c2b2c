"""What a step uses of the process that it runs in: its random states, and Ctrl-C."""

from __future__ import annotations

import signal
import threading
from typing import Any

import torch
from torch import Tensor

from executor.capture.captured import Captured

# Random states that are no kernel's: that an undone step goes back to; before the step or this micro-batch of it;
# before a kernel runs again.
UNDO, BEGIN, NOW = -3, -2, -1


class Random:
    """States of all random generators, by what comes after them. (A class of its own: were these methods of the step,
    its list of work would hold the step, and its memory would wait for the garbage collector.)"""

    def __init__(self, generators: list[torch.Generator]):
        self.generators, self.states = generators, dict[int, list[Tensor]]()

    def save(self, kernel: int) -> None:
        self.states[kernel] = [g.get_state() for g in self.generators]

    def restore(self, kernel: int) -> None:
        for generator, state in zip(self.generators, self.states[kernel], strict=True):
            generator.set_state(state)

    def replay(self, kernel: int) -> None:
        self.save(NOW)
        self.restore(kernel)


def generators(captured: Captured, device: torch.device) -> list[torch.Generator]:
    """Every generator that the step may draw from."""
    found = [torch.default_generator]
    if device.type == "cuda":
        index = torch.empty(0, device=device).get_device()  # before there is a tensor there may be no generators
        found.append(torch.cuda.default_generators[index])
    for node in captured.graph.graph.nodes:
        found += [v for v in node.kwargs.values() if isinstance(v, torch.Generator) and v not in found]
    return found


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
