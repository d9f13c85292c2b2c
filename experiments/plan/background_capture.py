"""Captures of a workload, at its own batch and at others, in processes of their own.

A process imports PyTorch once, and is forked: two captures run side by side, while the command imports what plans
(which is not PyTorch). Where processes cannot be forked safely, each imports for itself.

This module imports little, so that a command can begin with it.
"""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # the simulator is compiled by Numba, which takes long to import
    from executor.capture.captured import Captured
    from experiments.plan.max_batch import Batches
    from simulator.machine import Machine
    from simulator.pool.card import CardPeak
    from simulator.program import Program
    from simulator.report import Origins

FORKS = sys.platform == "linux"  # elsewhere system libraries may not stand it


class Step(NamedTuple):
    """What planning needs of a capture.

    Attributes:
        card: of the memory that was asked about, if any was; None where it is not known.
        arithmetic: a sentence on the types; ``types`` has that of each kernel.
        modules: paths of those that can be called.
    """

    program: Program
    origins: Origins | None  # None of a program file
    card: CardPeak | None
    arithmetic: str
    types: tuple[str, ...]
    modules: tuple[str, ...]


class Captures:
    """The captures of one workload. The processes begin with the object, and end with the context."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        (self._own, own), (self._other, other) = context.Pipe(), context.Pipe()
        groups = [[own, other]] if FORKS else [[own], [other]]
        self._processes = [context.Process(target=_serve, args=(group,)) for group in groups]
        with _aside():
            for process in self._processes:
                process.start()
        own.close()
        other.close()
        atexit.register(self.close)
        self._thread = threading.Thread()
        self._batches: Batches | None = None
        self._failed: Exception | None = None
        self._without = 0

    def __enter__(self) -> Captures:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the processes; what they capture now is not waited for."""
        atexit.unregister(self.close)
        for process in self._processes:
            with suppress(ProcessLookupError, AttributeError):  # it has forked nothing yet; there are no groups
                os.killpg(process.pid or 0, signal.SIGTERM)
            process.terminate()
            process.join()

    def begin(
        self, workload: Mapping[str, Any], machine: Machine, others: bool, memory_bytes: int | None = None
    ) -> None:
        """Begins to capture a workload at its own batch and, with ``others``, at twice that.

        Args:
            workload: a configuration (experiments/workloads).
            memory_bytes: of the card; None: only tensors count.
        """
        self.workload, self.machine, self.memory_bytes = dict(workload), machine, memory_bytes
        self._own.send((_step, (self.workload, machine, memory_bytes)))
        if others:
            self._other.send((_doubled, (self.workload, machine, memory_bytes)))

    def step(self) -> Step:
        """The capture at the own batch, waited for.

        Raises:
            UsageError: the workload is wrong, it cannot be captured, or the process was killed.
        """
        from experiments.common.cli import UsageError

        return _received(self._own, UsageError)  # type: ignore[no-any-return]

    def look(self, program: Program, limit: int, beside: int = 0) -> None:
        """Once there is a capture at twice the own batch, with which the step is ``program``, finds the largest that
        fits, and captures it.

        Args:
            limit: of tensors and of what stands beside them.
            beside: bytes of that at the own batch.
        """
        self._thread = threading.Thread(target=self._look, args=(program, limit, beside), daemon=True)
        self._thread.start()

    def _look(self, program: Program, limit: int, beside: int) -> None:
        from experiments.plan.max_batch import BatchError, Batches, on_its_scale

        try:
            own, larger, more = _received(self._other, BatchError)
            self._batches = Batches(own, program, 2 * own, on_its_scale(larger, program), (beside, more))
            if without := self._batches.largest(limit):
                self._other.send((_captured, (self.workload, self.machine, without)))
                self._without = without
        except Exception as error:  # for who asks
            self._failed = error

    def batches(self, seconds: float) -> Batches:
        """The step at any batch, waited for so long.

        Raises:
            BatchError: it was not enough, or the batch cannot be changed.
        """
        from experiments.plan.max_batch import BatchError

        self._thread.join(seconds)
        if self._failed is not None:
            raise self._failed
        if self._batches is None:
            raise BatchError("there was no time for a capture at another batch")
        return self._batches

    def checked(self, peak_bytes: int, seconds: float) -> bool:
        """Whether the largest batch was captured within so long, and its peak is as foretold.

        Raises:
            BatchError: it is another, or the batch cannot be captured.
        """
        from experiments.plan.max_batch import BatchError

        self._thread.join(seconds)
        if not self._without or not self._other.poll(seconds):
            return False
        found = _received(self._other, BatchError).peak_bytes
        if found != peak_bytes:
            raise BatchError(f"the peak at it is {found:,} bytes, not {peak_bytes:,} as those at others foretell")
        return True


_started: list[Captures] = []


def start(words: list[str]) -> None:
    """Starts the processes of what is ``opened`` next, if the words of a command line ask for a capture here: jobs of a
    sweep may run elsewhere."""
    if any(word.startswith(("target=", "workload=")) for word in words) and not {"-m", "--multirun"} & {*words}:
        _started.append(Captures())


def opened() -> Captures:
    """What was started, or else starts now."""
    return _started.pop() if _started else Captures()


def _received(connection: Connection, refused: type[ValueError]) -> Any:
    """The next answer; raises ``refused`` where the workload was, or the process ended."""
    try:
        how, answer = connection.recv()
    except (EOFError, ConnectionError):
        raise refused("the process that captured the step was killed; was there memory enough?") from None
    if how == "refused":
        raise refused(answer)
    if how == "failed":
        raise RuntimeError(f"in the process that captures:\n{answer}")
    return answer


@contextmanager
def _aside() -> Iterator[None]:
    """Processes that are spawned within do not hear Ctrl-C, and do not import the command, which takes long:
    multiprocessing imports nothing that is called __main__. Nor are they told of a launcher's way to start processes,
    which they could not know."""
    main = sys.modules["__main__"]
    spec, method = main.__spec__, multiprocessing.get_start_method(allow_none=True)
    main.__spec__ = find_spec("experiments.__main__")
    multiprocessing.set_start_method("spawn", force=True)
    may_set = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if may_set else None
    try:
        yield
    finally:
        main.__spec__ = spec
        multiprocessing.set_start_method(method, force=True)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)


# ------------------------------------------------------------------------------------ in the other processes


def _serve(connections: list[Connection]) -> None:
    """Imports what captures, and works on each connection, the first in this process, each other in a fork of it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends this process
    if hasattr(os, "setpgrp"):
        os.setpgrp()  # to be ended with its forks
    gc.disable()  # an import makes very many objects, and nearly all of them stay
    import experiments.workloads  # noqa: F401

    gc.freeze()
    gc.enable()
    for connection in connections[1:]:
        if os.fork() == 0:
            connections[0].close()  # that its end is seen
            _work(connection)
            os._exit(0)
        connection.close()
    _work(connections[0])


def _work(connection: Connection) -> None:
    """Answers calls until the command has ended.

    An answer is "done" and what was returned, "refused" and the reason, or "failed" and the traceback.
    """
    from executor.capture.state import CaptureError
    from experiments.workloads import WorkloadError
    from simulator.files import FormatError

    answer: tuple[str, Any]
    with suppress(EOFError, ConnectionError):
        while True:
            function, args = connection.recv()
            try:
                answer = "done", function(*args)
            except (CaptureError, WorkloadError, FormatError) as error:
                answer = "refused", str(error)
            except Exception:
                answer = "failed", traceback.format_exc()
            sys.stdout.flush()  # what the user's code said
            connection.send(answer)


def _step(workload: Mapping[str, Any], machine: Machine, memory_bytes: int | None) -> Step:
    from torch import nn

    from experiments import workloads

    captured = workloads.load(workload, machine)
    model = captured.modules[0][0] if captured.modules else nn.Module()
    modules = tuple(name for name, m in model.named_modules() if name and type(m).forward is not nn.Module.forward)
    card = _card(captured, workload, machine, memory_bytes)
    said = captured.arithmetic(machine)
    return Step(captured.program, captured.origins, card, said, captured.types(machine), modules)


def _doubled(workload: Mapping[str, Any], machine: Machine, memory_bytes: int | None) -> tuple[int, Program, int]:
    from experiments import workloads

    own = workloads.batch_of(workload, workloads.build(workload))
    captured = workloads.load(workload, machine, 2 * own)
    card = None if memory_bytes is None else _card(captured, workload, machine, memory_bytes, 2 * own)
    return own, captured.program, card.beside if card is not None else 0


def _captured(workload: Mapping[str, Any], machine: Machine, batch: int) -> Program:
    from experiments import workloads

    return workloads.load(workload, machine, batch).program


def _card(
    captured: Captured, workload: Mapping[str, Any], machine: Machine, memory_bytes: int | None,
    batch: int | None = None,
) -> CardPeak | None:  # fmt: skip
    """The card's peak; where the CPU's operators are not CUDA's, what CUDA's take more or less is in ``loop``. None
    where it cannot be followed, and no memory was asked about; else that is a WorkloadError."""
    from dataclasses import replace

    from executor.capture.as_cuda import differs
    from executor.card import card_peak
    from experiments import workloads

    on_cuda = captured
    if any(differs(kernel.name) for kernel in captured.program.kernels):
        on_cuda = workloads.load(workload, machine, batch, as_cuda=True)
    try:
        card = card_peak(on_cuda, machine, memory_bytes=memory_bytes)
    except ValueError as error:
        if memory_bytes is None:
            return None
        raise workloads.WorkloadError(f"memory: what the card counts is not known: {error}") from error
    more = card.tensors - captured.program.peak_bytes
    return replace(card, tensors=captured.program.peak_bytes, loop=card.loop + more)
