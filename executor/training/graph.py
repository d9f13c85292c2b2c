"""A planned step as one CUDA graph: captured once at addresses that are packed beforehand, then replayed.

The first step runs kernel by kernel (libraries warm up). The second is captured twice:

1. At addresses that are valid but never used, to learn what every operator asks for, and until when (graph_memory.py).
   These requests are packed on a circle: a tensor that stays over the iteration's boundary has one address.
2. At the packed addresses. All that the graph takes is known before, and a graph over the limit is refused.

Between replays what the plan swaps of persistent tensors is where the plan has it: on the device, in the graph's
memory, or on the host. The batch is copied into slots before a replay, what is returned is copied after it; replays are
ordered by their stream. Where look() finds a change (a tensor elsewhere, a learning rate that is a Python number), the
step is captured again; a learning rate that is a tensor is read by every replay.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from executor.memory import ALIGNMENT, cuda_index
from executor.memory.addresses import Arena
from executor.memory.engines import line
from executor.memory.graph_memory import Event, GraphMemory, RecordError, Requests, libraries_bytes, requests_of
from executor.training.memory_source import Block, Place, StepError, as_tensor
from executor.training.node_calls import Call
from executor.training.progress import Interrupt
from executor.training.work import StepState
from simulator.compiled.encoding import Ints
from simulator.pool.intervals import Intervals, Packing
from simulator.pool.packed import pack_within

CAPTURES, SELDOM = 3, 100  # that are made in any case; replays for which there may be one more
SEGMENT = 20 << 20  # bytes by which PyTorch may round a request up
ADDRESSES = 1 << 32  # of a dry capture, beside those that the program says


class NoGraph(StepError):
    """The step cannot be captured; nothing of it has been done."""


class OverLimit(NoGraph):
    """The graph would take more than the limit.

    Attributes:
        excess: by how many bytes.
    """

    def __init__(self, peak_bytes: int, limit: int) -> None:
        super().__init__(
            f"as a graph the step takes {peak_bytes:,} bytes, the limit is {limit:,}: plan it for "
            f"{peak_bytes - limit:,} bytes less; the model is as before the step"
        )
        self.excess = peak_bytes - limit


@dataclass
class Graph:
    """A captured step.

    Attributes:
        replay: runs it once more.
        close: gives its memory back.
        outputs: what it returns, overwritten by each replay.
        footprint: bytes of its memory: of all that is born in the step, or swapped.
        counted_bytes: of which PyTorch's allocator counts these as in use between replays; it rounds them up.
    """

    replay: Callable[[], None]
    close: Callable[[], object]
    outputs: list[Tensor]
    footprint: int
    counted_bytes: int


class GraphStep:
    """Steps by replays.

    Args:
        limit: bytes.
        always: capture again as often as something changes.

    Attributes:
        captures: how often the step was captured.
        graph: the present one.
        peak_bytes: the most that the graph takes: its memory, persistent tensors that stay on the device, the slots of
            the batch, the batch itself, and the libraries' workspaces.
    """

    def __init__(self, step: StepState, limit: int, always: bool = True) -> None:
        self._limit, self.always, self._replays = limit, always, 0
        self.captures = self.peak_bytes = 0
        self.graph: Graph | None = None
        self.warm = False
        self._slots: dict[fx.Node, Tensor] = {}
        self._seen: tuple[Any, Any] | None = None  # StepState.seen at the capture
        # The user's tensors that the plan has on the host at the iteration's boundary.
        self._away = [step.blocks.blocks[t] for t in on_host(step) if t not in step.inputs]

    def __call__(self, step: StepState, batch: dict[fx.Node, Tensor], wait: bool) -> list[Tensor]:
        """One step; the user's tensors have been looked at.

        Args:
            wait: until tensors that the plan leaves on the host can be read.

        Returns:
            Copies of its outputs, ordered by the current stream.
        """
        with Interrupt(), torch.no_grad(), torch.autocast(step.device.type, enabled=False):
            try:
                if self._seen is None or any(a is not b for a, b in zip(self._seen, step.seen, strict=True)):
                    self._ask_for_another()
                    self.close()
                    self._capture(step, batch)
                    self._seen = step.seen
                assert self.graph is not None
                self._replays += 1
                for node, tensor in batch.items():
                    self._slots[node].copy_(tensor, non_blocking=True)
                put_away(step, self._away)
                self.graph.replay()
            except StepError:
                raise
            except Exception as error:
                raise StepError(f"the graph failed: {line(error)}; the model is somewhere in this step") from error
            if wait and self._away:
                torch.cuda.current_stream(step.device).synchronize()
            return [output.clone() for output in self.graph.outputs]

    def _capture(self, step: StepState, batch: dict[fx.Node, Tensor]) -> None:
        blocks, values = step.blocks.blocks, step.captured.values
        self._slots = {node: tensor.detach().clone() for node, tensor in batch.items()}
        swapped = {node: blocks[values[node]] for node in batch if values.get(node) in blocks}
        for node, block in swapped.items():
            block.on(self._slots[node])
        persistent = [block for block in blocks.values() if block.persistent]
        step.blocks.settle()
        put_away(step, persistent)
        step.blocks.settle()
        try:
            dry = dry_capture(step, self._table(step))
            beside = self._beside(step)
            packing = dry.packing(self._limit - beside)
            self.peak_bytes = beside + packing.footprint
            if self.peak_bytes > self._limit:
                raise OverLimit(self.peak_bytes, self._limit)
            self.graph = capture(step, self._table(step), dry, packing)
        except (MemoryError, RecordError) as error:
            raise NoGraph(f"the step cannot be captured: {error}; the model is as before the step") from error
        finally:  # a step that runs kernel by kernel has the caller's batch
            for block in swapped.values():
                step.blocks.used += block.nbytes * (block.place is Place.HOST)
                block.place, block.storage, block.bytes = Place.DEVICE, None, None
                block.valid = block.shown = False
        for node in batch.keys() & swapped.keys():
            if values[node] in on_host(step):  # where the replay fetches it
                self._slots[node] = as_tensor(swapped[node].host, self._slots[node])
        self.captures += 1

    def _beside(self, step: StepState) -> int:
        """Bytes on the device during a replay that are not in the graph's memory; the caller's batch is there, too."""
        blocks = step.blocks.blocks
        swapped = sum(block.nbytes for t, block in blocks.items() if block.persistent and t not in step.inputs)
        slots = sum(slot.untyped_storage().nbytes() for slot in self._slots.values())  # none if the plan swaps it
        return step.blocks.total - swapped + slots + libraries_bytes(cuda_index(step.device))

    def _ask_for_another(self) -> None:
        """Raises NoGraph if captures are too many for the replays that they are for."""
        if not self.always and self.captures >= CAPTURES + self._replays // SELDOM:
            raise NoGraph(
                f"it was captured {self.captures} times for {self._replays} replays, because the optimizer's numbers, "
                "the user's tensors or the batch's shape change (a learning rate that is a tensor on the device is "
                "read by replays): ask for graph=True to capture every time; the model is as before the step"
            )

    def _table(self, step: StepState) -> list[Any]:
        """Values that are there before the first kernel."""
        table = step.table.copy()
        for node, slot in self._slots.items():
            table[step.calls.slots[node]] = slot
        for out, function, get, options in step.whole.first:
            table[out] = function(*get(table), **options)
        return table

    def close(self) -> None:
        """Gives the graph's memory back; the next step captures."""
        graph, self.graph, self._seen = self.graph, None, None
        if graph is not None:
            graph.close()


def on_host(step: StepState) -> set[int]:
    """Persistent tensors that the plan has on the host at the iteration's boundary."""
    return {t for t, place in step.order.start.items() if place == "host"}


def put_away(step: StepState, which: Iterable[Block]) -> None:
    """Moves tensors to the host, and shows the user what is there; their copies may be under way."""
    blocks, moved = step.blocks, [block for block in which if block.place is Place.DEVICE]
    if not moved:
        return
    assert blocks.engines
    blocks.engines.begin()
    for block in moved:
        blocks.out(block)
    for block in moved:
        blocks.reclaim(block)
        block.show()


# --------------------------------------------------------------------------------------------------------- a capture


def address_of(block: Block) -> int:
    """Where it is on the device."""
    assert block.storage is not None
    return block.storage.data_ptr()


class _Pass:
    """One capture of a step.

    Args:
        table: values that are there before the first kernel; filled in, and emptied if it fails.
        requests: those of the dry capture with their packed addresses; None: this is the dry one.

    Attributes:
        home: blocks on the device at the iteration's boundary.
        places: of each of them, the address before the first kernel and that after the last.

    Raises:
        NoGraph: the step cannot be captured.
    """

    def __init__(self, step: StepState, table: list[Any], arena: Arena, requests: Ints | None) -> None:
        blocks, engines = step.blocks, step.blocks.engines
        self.memory = GraphMemory(step.device, arena)
        self.graph = torch.cuda.CUDAGraph(keep_graph=requests is None)  # which is not instantiated, and so not replayed
        self.outputs: list[Tensor] = []
        for generator in step.random.generators:
            if generator.device.type == "cuda":
                self.graph.register_generator_state(generator)
        self.home = [b for t, b in blocks.blocks.items() if b.persistent and t not in on_host(step)]

        def run(calls: Sequence[Call]) -> None:
            with self.memory.pool():
                for out, function, get, options in calls:
                    table[out] = function(*get(table), **options)

        blocks.take = self._take
        try:
            with arena.serving(requests), self.memory.recorded() as events:
                with torch.cuda.stream(self.memory.stream):
                    for block in self.home:
                        self._take(block)
                        block.place = Place.DEVICE
                        if requests is not None:
                            block.bytes.copy_(block.host)  # type: ignore[union-attr]
                first = [address_of(block) for block in self.home]
                with self.memory.capturing(self.graph, engines.streams if engines else ()):
                    issue(step, table, run)
                    self.outputs += [table[slot] for slot in step.calls.outputs]
            self.events: list[Event] = events
            self.places = list(zip(first, map(address_of, self.home), strict=True))
        except Exception as error:
            reason = line(error)
            if arena.refused_bytes:
                reason = f"an operator asks for {arena.refused_bytes:,} bytes, which it did not in the dry capture"
                if requests is None:
                    reason = f"a dry capture needs addresses for more than {arena.nbytes:,} bytes"
            table.clear()
            self.abandon(step)
            raise NoGraph(f"the step cannot be captured: {reason}; the model is as before the step") from error
        blocks.take, blocks.values = Block.take, []

    def _take(self, block: Block) -> None:
        """Each time a swapped block gets memory, from a pool of its own."""
        with self.memory.pool():
            block.take()

    def abandon(self, step: StepState) -> None:
        """Gives all memory back; what the plan swaps of persistent tensors is on the host."""
        forget(step)
        self.outputs.clear()
        self.graph.reset()
        self.memory.close()


def forget(step: StepState) -> None:
    """After a capture that is given up: what the plan swaps of persistent tensors is on the host, as before it."""
    blocks = step.blocks
    blocks.take, blocks.values, blocks.used = Block.take, [], blocks.total
    for block in blocks.blocks.values():
        block.place = Place.DEVICE
        if not block.persistent:
            block.storage = block.bytes = None
            continue
        if block.storage is not None and block.storage.nbytes():
            block.storage.resize_(0)
        block.place, block.valid = Place.HOST, True
        blocks.used -= block.nbytes
        block.show()


def issue(step: StepState, table: list[Any], run: Callable[[Sequence[Call]], None]) -> None:
    """Issues one iteration, which ends with tensors where it begins, and no copy under way.

    A copy to the host that the plan has under way at the boundary is made at the begin: the user may have written the
    tensor in between.
    """
    blocks = step.blocks
    leaving = [blocks.blocks[t] for t, place in step.order.start.items() if place == "out"]
    last = {what[0]: (i, k) for i, item in enumerate(step.work) for k, (act, what) in enumerate(item.after)
            if act == blocks.leave and what[0] in leaving}  # fmt: skip
    late = set(last.values())
    blocks.values = table
    blocks.start(step.order.start)
    for i, (before, _, calls, clear, _, after) in enumerate(step.work):
        for act, what in before:
            act(what)
        run(calls)
        for slot in clear:
            table[slot] = None
        for k, (act, what) in enumerate(after):
            if (i, k) not in late:
                act(what)
    for block in blocks.blocks.values():
        if block.persistent:
            blocks.wait(block)


@dataclass(frozen=True)
class Dry:
    """What a dry capture has found.

    Attributes:
        requests: of every operator and swap.
        twins: of each tensor on the device at the iteration's boundary, the request before the first kernel, and that
            of the memory in which it is after the last.
        record: of each entry of PyTorch's record, whether it allocates, the request and the bytes.
        intervals: of the requests, on a circle; the second of two twins has no bytes.
    """

    requests: Requests
    twins: list[tuple[int, int]]
    record: list[tuple[bool, int, int]]

    @property
    def intervals(self) -> Intervals:
        found = self.requests
        period = max(found.length, 1)
        lower, upper, nbytes = found.begin.copy(), found.end.copy(), found.nbytes.copy()
        for first, last in self.twins:
            if first == last:
                lower[first], upper[first] = 0, period
            else:  # from its last arrival over the boundary until it first leaves
                lower[first], upper[first], nbytes[last] = lower[last], period + upper[first], 0
        return Intervals(lower, upper, nbytes, period)

    def packing(self, limit: int) -> Packing:
        """Addresses of the requests from 0 on; of twins, of the first one only."""
        return pack_within(self.intervals, limit, ALIGNMENT)

    def answers(self, packing: Packing, base: int) -> Ints:
        """int64[n, 2]: the bytes that PyTorch asks for, and the address that it gets."""
        offsets = packing.offsets.copy()
        for first, last in self.twins:
            offsets[last] = offsets[first]
        return np.stack((self.requests.served[:, 0], base + offsets), axis=1)


def dry_capture(step: StepState, table: list[Any]) -> Dry:
    """Captures a step at addresses that are valid and never used; raises NoGraph."""
    blocks = step.order.schedule.blocks
    born = [blocks[b].nbytes for s in step.order.schedule.steps for b in s.allocates]
    moved = [block.nbytes for block in step.blocks.blocks.values()]
    # Every request is rounded up; an operator may ask for a few things that its profile does not say.
    expected = sum(2 * nbytes + SEGMENT for nbytes in (*born, *moved, *moved)) + ADDRESSES
    made = _Pass(step, table, Arena.aliased(step.device, expected), None)
    try:
        found = requests_of(made.events, made.memory)
        index = {int(address): i for i, address in enumerate(found.served[:, 1])}
        record = [(event.allocates, index[event.address], event.nbytes) for event in made.events]
        return Dry(found, [(index[first], index[last]) for first, last in made.places], record)
    finally:
        table.clear()
        made.abandon(step)


def capture(step: StepState, table: list[Any], dry: Dry, packing: Packing) -> Graph:
    """Captures a step at packed addresses; raises NoGraph."""
    arena = Arena.resident(step.device, max(packing.footprint, ALIGNMENT))
    answers = dry.answers(packing, arena.base)
    made = _Pass(step, table, arena, answers)
    group = dry.requests.group
    if (
        len(made.memory.served) != len(answers)
        or len(made.events) != len(dry.record)
        or any(
            (event.allocates, event.nbytes) != (allocates, nbytes) or event.address not in answers[group == group[i], 1]
            for event, (allocates, i, nbytes) in zip(made.events, dry.record, strict=True)
        )
    ):
        table.clear()
        made.abandon(step)
        raise NoGraph(
            "the step cannot be captured: its operators have not asked for the memory of the dry capture; the model is "
            "as before the step"
        )
    blocks = step.blocks
    blocks.used = blocks.total
    for block in blocks.blocks.values():
        if not block.persistent:
            block.storage = block.bytes = None
        elif block.place is Place.HOST:
            blocks.used -= block.nbytes
            block.show()
    graph = Graph(made.graph.replay, int, made.outputs, packing.footprint, made.memory.counted_bytes())
    home = [block.bytes for block in made.home if block.bytes is not None]
    graph.close = weakref.finalize(graph, _give_back, made.graph, made.memory, made.outputs, home)
    return graph


def _give_back(graph: Any, memory: GraphMemory, outputs: list[Tensor], home: list[Tensor]) -> None:
    """Moves the user's tensors (``home``) to other memory, then releases the graph, its pools and the arena."""
    with contextlib.suppress(RuntimeError):  # an earlier failure is reported where it happened
        torch.cuda.synchronize(memory.device)  # a replay may be under way
    outputs.clear()
    with _disable_current_modes():  # the garbage collector may be who calls
        for own in home:
            storage, content = own.untyped_storage(), own.clone()
            storage.resize_(0)
            storage.resize_(content.nbytes)
            own.copy_(content)
    home.clear()
    graph.reset()
    memory.close()
