"""A planned step as one graph (``graph=True``): captured once, then replayed, so that issuing it costs nothing.

The first step runs as without a graph (PyTorch warms up); the second captures. What a graph reads and writes stays
where it is: the batch is copied into slots, what is returned is copied out, and **between replays all that the plan
swaps of persistent tensors is on the host**, because memory from a graph's pool is at other addresses outside of it.
Where look() finds a change (a tensor elsewhere, another learning rate that is a Python number), the step is captured
again; a learning rate that is a tensor is read by every replay.

Two ways to capture, of the same work, the same moves and the same checks:

1. CUDA: ``torch.cuda.graph``. Copies stay on their streams, forked and joined by the events they have in any case.
   The memory is one arena; where in it a result lies, PyTorch's allocator says (executor/memory/graph_pool.py).
2. Host: everything lies in an arena at packed addresses and is recorded; a recording that CUDA would not capture is
   refused (recording.py).
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from executor.memory.engines import line
from executor.memory.graph_pool import GraphPool, need_of
from executor.training.issue_order import stays
from executor.training.memory_source import Place, StepError, Storages
from executor.training.node_calls import NUMBER, Call
from executor.training.progress import Interrupt
from executor.training.recording import Arena, illegal
from executor.training.work import StepState
from simulator.schedule import Step


class Graph(Protocol):
    """A step that has been captured.

    Attributes:
        outputs: what it returns, overwritten by each replay.
        pool_bytes: memory that all that is born in the step, or swapped, lies in.
        packed_bytes: the footprint of the packing of what the program says lies there.
        idle_bytes: of the pool, what PyTorch's allocator does not count as in use between two replays.
        done: the capture was a step, too.
    """

    outputs: list[Tensor]
    pool_bytes: int
    packed_bytes: int
    idle_bytes: int
    done: bool

    def replay(self) -> None:
        """Runs what was captured once more."""

    def close(self) -> None:
        """It is not replayed any more; its memory goes back."""


class GraphStep:
    """Steps by replays; warns where a capture is over the limit in bytes.

    Attributes:
        captures: how often the step was captured.
        graph: the present one.
        peak_bytes: by the ledger: what the program has on the device between replays, and the pool.
    """

    def __init__(self, step: StepState, limit: int) -> None:
        self._limit = limit
        if reason := refused(step):
            raise StepError(f"the step cannot be a graph: {reason}")
        self.captures = self.peak_bytes = 0
        self.graph: Graph | None = None
        self.warm = False
        self._slots: dict[fx.Node, Tensor] = {}
        self._seen: tuple[Any, Any] | None = None  # StepState.seen at the capture

    def __call__(self, step: StepState, batch: dict[fx.Node, Tensor]) -> list[Tensor]:
        """One step, the user's tensors have been looked at; copies of its outputs."""
        if not self._slots:
            self._slots = {node: tensor.detach().clone() for node, tensor in batch.items()}
        blocks = step.blocks
        with Interrupt(), torch.no_grad(), torch.autocast(step.device.type, enabled=False):
            put_away(step)
            for node, tensor in batch.items():
                self._slots[node].copy_(tensor, non_blocking=True)
            try:
                if self._seen is None or any(a is not b for a, b in zip(self._seen, step.seen, strict=True)):
                    self.close()
                    self._capture(step)
                    self._seen = step.seen
                assert self.graph is not None
                if not self.graph.done:
                    self.graph.replay()
                self.graph.done = False
            except StepError:
                raise
            except Exception as error:
                raise StepError(f"the graph failed: {line(error)}; the model is somewhere in this step") from error
            if step.device.type == "cuda" and any(b.persistent for b in blocks.blocks.values()):
                torch.cuda.current_stream(step.device).synchronize()  # the user may look at what is on the host
            return [output.clone() for output in self.graph.outputs]

    def _capture(self, step: StepState) -> None:
        table = step.table.copy()
        for node, slot in self._slots.items():
            table[step.calls.slots[node]] = slot
        for out, function, get, options in step.whole.first:
            table[out] = function(*get(table), **options)
        try:
            self.graph = (CudaGraph if step.device.type == "cuda" else HostGraph)(step, table)
        finally:
            table.clear()
            forget(step)
        self.captures += 1
        self.peak_bytes = step.blocks.used + self.graph.pool_bytes
        if self.peak_bytes > self._limit:
            warnings.warn(
                f"the graph's arena and what stays beside it have {self.peak_bytes:,} bytes, the limit is "
                f"{self._limit:,}: tensors that lie somewhere take more than their sum",
                stacklevel=5,
            )

    def close(self) -> None:
        """The graph's memory goes back; the next step captures."""
        graph, self.graph, self._seen = self.graph, None, None
        if graph is not None:
            graph.close()


def refused(step: StepState) -> str | None:
    """Why the step cannot be a graph; None where it can."""
    captured, calls, program = step.captured, step.calls, step.order.program
    if captured.returned.gradients:
        return "what it returns is copied, and so would be the gradients that are kept"
    if calls.asks:
        return "a GradScaler decides on the host whether the update is left out"
    for node in captured.graph.graph.nodes:
        if node.target is NUMBER:
            name = program.tensors[captured.values[node.args[0]]].name if node.args[0] in captured.values else node.name
            return f"the host reads the number {name}; an optimizer that is capturable reads none"
    for i, node in enumerate(captured.placeholders):
        if node in captured.values and captured.devices[i].type != step.device.type:
            return f"{captured.names[i]} is on the host, which a replay does not read: move it to the device"
    for item in step.order.items:
        if item.step.again and calls.random(item.step.kernel):
            return f"the plan recomputes {program.kernels[item.step.kernel].name}, which draws random numbers"
    if captured.draws:
        return "the model's checkpoints put random states back"
    for block in step.swapped_inputs():
        return f"the plan swaps {block.name}, a tensor of the batch, for which a graph has a slot"
    for t in step.written_inputs:
        return f"the step writes {program.tensors[t].name}, a tensor of the batch, for which a graph has a slot"
    return "a replay cannot be undone" if step.undoes_all else None


def put_away(step: StepState) -> None:
    """What the plan swaps of persistent tensors goes to the host, where the user sees it."""
    blocks = step.blocks
    blocks.start({t: "host" for t, block in blocks.blocks.items() if block.persistent})
    blocks.settle()


def forget(step: StepState) -> None:
    """After a capture: blocks are as between two replays, whatever has happened."""
    blocks = step.blocks
    blocks.memory, blocks.values, blocks.used = Storages(), [], blocks.total
    for block in blocks.blocks.values():
        block.place = Place.DEVICE
        if not block.persistent:
            block.storage = block.bytes = None
            continue
        if block.storage is not None and block.storage.nbytes():  # a capture that failed half way
            block.storage.resize_(0)
        block.place, block.valid = Place.HOST, True
        blocks.used -= block.nbytes
        block.show()


def issue(
    step: StepState, table: list[Any], run: Callable[[Step, Sequence[Call]], None],
    end: Callable[[Step], None] = lambda step: None,
) -> None:  # fmt: skip
    """Issues one iteration that begins and ends with what is swapped of persistent tensors on the host.

    Args:
        run: does the calls of a step of the schedule; ``end`` what is to be done when it is over.
    """
    blocks = step.blocks
    blocks.values = table
    blocks.start(step.order.start)
    for item, (before, _, calls, clear, _, after) in zip(step.order.items, step.work, strict=True):
        for act, what in before:
            act(what)
        run(item.step, calls)
        end(item.step)
        for slot in clear:
            table[slot] = None
        for act, what in after:
            act(what)
    persistent = [block for block in blocks.blocks.values() if block.persistent]
    for block in persistent:
        blocks.wait(block)
        if block.place is Place.DEVICE:
            blocks.out(block)
    for block in persistent:
        blocks.reclaim(block)


class HostGraph:
    """A recording in an arena, on this computer's memory."""

    def __init__(self, step: StepState, table: list[Any]) -> None:
        blocks, outputs = step.blocks, step.calls.outputs
        engines, before = blocks.engines, [(b, b.storage, b.bytes) for b in blocks.blocks.values()]
        arena = Arena(step.order, step.calls, blocks.blocks, table)
        blocks.memory = arena
        if engines:
            blocks.engines = arena.recording
        try:
            issue(step, table, arena.run, lambda done: arena.end(done, outputs))
            for slot in set(outputs):
                arena.keep(slot)
        finally:
            blocks.engines = engines
            for block, storage, memory in before:
                block.storage, block.bytes = storage, memory
        self.recording, self.done = arena.recording, True
        self.pool_bytes = self.packed_bytes = arena.memory.nbytes
        self.idle_bytes = 0  # it is a tensor
        self.outputs = [table[slot] for slot in outputs]
        if reason := illegal(self.recording.operations, self.recording.pool, self.recording.there):
            raise StepError(f"the step is no legal graph: {reason}; the model is as after it")

    def replay(self) -> None:
        self.recording.replay()

    def close(self) -> None:
        """Its arena is a tensor and goes with it."""


class CudaGraph:
    """A CUDA graph in an arena of its own.

    Raises:
        StepError: it cannot be captured. Nothing of the step has been done then.
    """

    def __init__(self, step: StepState, table: list[Any]) -> None:
        engines = step.blocks.engines
        _, intervals = stays(step.order, step.blocks.blocks)
        need = need_of(intervals)
        self.outputs: list[Tensor] = []
        try:
            pool = GraphPool(step.device, need)
        except MemoryError as error:
            raise StepError(f"the graph has no memory: {error}; the model is as before the step") from None
        self._graph = torch.cuda.CUDAGraph()
        self.close = weakref.finalize(self, _give_back, self._graph, pool, self.outputs)
        for generator in step.random.generators:
            if generator.device.type == "cuda":
                self._graph.register_generator_state(generator)

        def run(_: Step, calls: Sequence[Call]) -> None:
            for out, function, get, options in calls:
                table[out] = function(*get(table), **options)

        try:
            with pool.capturing(self._graph, engines.streams if engines else ()):
                issue(step, table, run)
                self.outputs += [table[slot] for slot in step.calls.outputs]
        except Exception as error:
            reason = line(error)
            if refused := pool.arena.refused_bytes:
                reason = (
                    f"its arena has {need.arena:,} bytes ({need.reserved:,} by the program), of which "
                    f"{refused:,} in one piece were not left: an operator takes more than its profile says"
                )
            table.clear()
            forget(step)
            self.close()
            raise StepError(f"the step cannot be captured: {reason}; the model is as before the step") from error
        self.pool_bytes, self.packed_bytes, self.done = need.arena, need.packed, False
        self.idle_bytes = need.arena - pool.allocated()

    def replay(self) -> None:
        self._graph.replay()


def _give_back(graph: torch.cuda.CUDAGraph, pool: GraphPool, outputs: list[Tensor]) -> None:
    """In this order: who uses the memory, who hands it out, the memory."""
    with contextlib.suppress(RuntimeError):  # an earlier failure is reported where it happened
        torch.cuda.synchronize(pool.device)  # a replay may be under way
    outputs.clear()
    graph.reset()
    pool.close()
