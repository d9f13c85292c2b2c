"""Captures a planned step as one CUDA graph at precomputed addresses, and replays it.

The first step runs kernel by kernel to warm up libraries. The second is captured twice:

1. A dry capture at valid but unused addresses records the size and lifetime of every request (graph_memory.py). The
   requests are packed on a circle: a tensor that is live across the iteration boundary keeps its address.
2. The final capture uses the packed addresses. A graph over the limit is refused before it.

Each replay copies the batch into slots and copies its outputs; stream order separates replays.
"""

# Between replays, swapped persistent tensors stay where the plan has them: in the graph's memory or on the host. If
# look() finds a change (a moved tensor, a learning rate that is a Python number), the step is captured again. A
# learning rate that is a tensor is read by every replay.

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from executor.capture.captured import Captured
from executor.capture.operators import NUMBER, is_random
from executor.memory import ALIGNMENT, cuda_index
from executor.memory.addresses import Arena
from executor.memory.engines import line
from executor.memory.graph_memory import (
    Event,
    GraphMemory,
    RecordError,
    Requests,
    instantiate,
    libraries_bytes,
    requests_of,
)
from executor.memory.graph_memsets import replace_memsets
from executor.training.bindings import device_of, inputs_of
from executor.training.memory_source import Block, Place, StepError, as_tensor
from executor.training.node_calls import Call, Calls, run_calls
from executor.training.progress import Interrupt
from executor.training.work import StepState, before_the_update
from simulator.compiled.encoding import Ints
from simulator.pool.intervals import Intervals, Packing
from simulator.pool.packed import pack_within

COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default, torch.ops.aten.copy.default)
CAPTURES = 3  # always allowed
REPLAYS_PER_CAPTURE = 100  # that allow one more capture


class NoGraph(StepError):
    """Raised if the step cannot be captured; none of its work has been done."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; the model is as before the step")


class OverLimit(NoGraph):
    """Raised if the graph would exceed the memory limit.

    Attributes:
        excess: bytes above the limit.
    """

    def __init__(self, peak_bytes: int, limit: int) -> None:
        super().__init__(
            f"as a graph the step takes {peak_bytes:,} bytes, the limit is {limit:,}: plan it for "
            f"{peak_bytes - limit:,} bytes less"
        )
        self.excess = peak_bytes - limit


def beside_bytes(captured: Captured) -> int:
    """Returns a graph's memory beyond the program's, in bytes: slots of the batch and library workspaces."""
    device = device_of(captured)
    libraries = libraries_bytes(cuda_index(device)) if device.type == "cuda" else 0
    return sum(captured.program.tensors[t].nbytes for t in inputs_of(captured)) + libraries


def not_by_default(captured: Captured, undo: bool) -> str | None:
    """Returns the reason against capturing a step as a graph by default, or None (see also ``graph_refusal``)."""
    if (device := device_of(captured)).type != "cuda":
        return f"its tensors are on the device {device.type!r}, a graph needs CUDA"
    if captured.micro:
        return "its micro-batches may arrive one by one, a graph needs all in one call (PlannedStep(graph=True))"
    return "a replay cannot be undone" if undo else None


def obstacle(captured: Captured, numbers_of_optimizers: bool = True) -> str | None:
    """Returns why the step cannot be a graph under any plan, or None.

    Args:
        numbers_of_optimizers: whether numbers count that the host reads from an optimizer's state; a fused or
            capturable optimizer reads none.
        captured: the captured step.

    Returns:
        the reason in words, which completes a sentence.
    """
    program = captured.program
    if captured.returned.gradients:
        return "a graph copies its outputs, and so would copy the kept gradients"
    if captured.skip_flags:
        return "a GradScaler decides on the host whether to skip the update"
    for node in captured.graph.graph.nodes:
        if node.target is not NUMBER:
            continue
        tensor = program.tensors[captured.values[node.args[0]]] if node.args[0] in captured.values else None
        if numbers_of_optimizers or tensor is None or tensor.kind != "optimizer_state":
            name = node.name if tensor is None else tensor.name
            return f"the host reads the number {name}; a capturable optimizer reads none"
    if captured.draws:
        return "the model's checkpoints restore random states"
    return None


def graph_refusal(captured: Captured, calls: Calls, undo: bool) -> str | None:
    """Returns why the step cannot be captured as a graph, or None if it can.

    Args:
        captured: The captured step.
        calls: Its operator calls.
        undo: Whether steps can be undone.
    """
    schedule = calls.schedule
    device = device_of(captured)
    inputs = inputs_of(captured)
    program = schedule.program
    if reason := obstacle(captured):
        return reason
    for i, node in enumerate(captured.placeholders):
        if node in captured.values and not on_device(captured.devices[i], device):
            return f"{captured.names[i]} is on the host, where a replay cannot read it: move it to the device"
    if reason := host_work(captured, calls, device):
        return reason
    for step in schedule.steps:
        if step.is_recomputation and calls.is_random(step.kernel):
            return f"the plan recomputes {program.kernels[step.kernel].name}, which draws random numbers"
    for t in inputs & before_the_update(schedule)[1]:
        return f"the step writes {program.tensors[t].name}, a tensor of the batch, for which a graph has a slot"
    if undo:
        return "a replay cannot be undone"
    if device.type != "cuda":
        return f"its tensors are on the device {device.type!r}, a graph needs CUDA"
    if "no_split" not in inspect.signature(torch.cuda.MemPool).parameters:
        return f"PyTorch {torch.__version__} has no memory pools with unsplit segments: use 2.11 or later"
    return None


def host_work(captured: Captured, calls: Calls, device: torch.device) -> str | None:
    """Returns the first operator whose work on the host a replay would not repeat, or None.

    Copies between host and device read or write host memory that is no longer the step's at the replay. Tensors on the
    host whose values never change are constants of the graph.
    """
    devices = captured.node_devices()
    constants = {node for node in devices if node.op == "get_attr"}
    for node in (node for body in calls.bodies for node in body):
        if not isinstance(node.target, OpOverload):
            continue
        inputs = node.all_input_nodes
        copies = node.target in COPIES and any(not on_device(devices[a], devices[node]) for a in inputs)
        if not copies and on_device(devices[node], device):
            continue
        if not copies and constants.issuperset(inputs) and not is_random(node):
            constants.add(node)
            continue
        work = "copies between host and device" if copies else "runs on the host"
        return f"{node.target} {work}, which a replay does not repeat: create its tensors on the device of the model"
    return None


def on_device(tensor_device: torch.device, device: torch.device) -> bool:
    """Returns True if a tensor is on the step's type of device."""
    return tensor_device.type == device.type


@dataclass
class Graph:
    """A captured step.

    Attributes:
        replay: function that replays the graph.
        close: function that frees its memory.
        outputs: output tensors, overwritten by each replay.
        footprint: bytes of its memory, for all tensors created in the step or swapped.
        counted_bytes: bytes of this memory in use between replays by PyTorch's allocator, which rounds up.
        executable_bytes: bytes that the driver has taken for the executable graph.
    """

    replay: Callable[[], None]
    close: Callable[[], object]
    outputs: list[Tensor]
    footprint: int
    counted_bytes: int
    executable_bytes: int


class GraphStep:
    """Runs steps by graph replay.

    Args:
        step: the compiled step.
        limit: memory limit in bytes.
        always_recapture: whether to capture again after every change, without a bound on captures.

    Attributes:
        captures: number of captures.
        graph: current graph, or None.
        peak_bytes: peak bytes of the graph: its memory, persistent tensors that stay on the device, the slots of the
            batch, the batch itself, library workspaces, and the executable graph.
    """

    def __init__(self, step: StepState, limit: int, always_recapture: bool = True) -> None:
        self._step = step
        self._limit = limit
        self.always_recapture = always_recapture
        self._replays = 0
        self.captures = self.peak_bytes = 0
        self.graph: Graph | None = None
        self.is_warm = False
        self._slots: dict[fx.Node, Tensor] = {}
        self._checked: tuple[Any, Any] | None = None  # StepState.checked at the capture
        # The user's tensors that are on the host at the iteration boundary.
        self._on_host = [step.blocks.blocks[t] for t in on_host(step) if t not in step.inputs]

    def __call__(self, batch: dict[fx.Node, Tensor], wait: bool) -> list[Tensor]:
        """Runs one step after the user's tensors have been checked.

        Args:
            batch: tensors of the batch by placeholder.
            wait: whether to wait until tensors that the plan leaves on the host can be read.

        Returns:
            Copies of the outputs, ordered by the current stream.

        Raises:
            NoGraph: the step cannot be captured.
            StepError: the replay failed.
        """
        step = self._step
        with Interrupt(), torch.no_grad(), torch.autocast(step.device.type, enabled=False):
            try:
                if self._checked is None or any(a is not b for a, b in zip(self._checked, step.checked, strict=True)):
                    self._check_capture_count()
                    self.close()
                    self._capture(batch)
                    self._checked = step.checked
                assert self.graph is not None
                self._replays += 1
                for node, tensor in batch.items():
                    self._slots[node].copy_(tensor, non_blocking=True)
                swap_out(step, self._on_host)
                self.graph.replay()
            except StepError:
                raise
            except Exception as error:
                raise StepError(
                    f"the graph failed: {line(error)}; the model is in an undefined state within this step: "
                    "load a checkpoint"
                ) from error
            if wait and self._on_host:
                torch.cuda.current_stream(step.device).synchronize()
            return [output.clone() for output in self.graph.outputs]

    def _capture(self, batch: dict[fx.Node, Tensor]) -> None:
        step = self._step
        blocks = self._step.blocks.blocks
        values = self._step.captured.values
        self._slots = {node: tensor.detach().as_subclass(Tensor).clone() for node, tensor in batch.items()}
        swapped = {node: blocks[values[node]] for node in batch if values.get(node) in blocks}
        for node, block in swapped.items():
            block.attach(self._slots[node])
        persistent = [block for block in blocks.values() if block.persistent]
        step.blocks.settle()
        swap_out(step, persistent)
        step.blocks.settle()
        try:
            dry = dry_capture(step, self._table())
            outside = self._outside_bytes()
            packing = pack_within(dry.intervals, self._limit - outside, ALIGNMENT)
            self.peak_bytes = outside + packing.footprint
            if self.peak_bytes > self._limit:
                raise OverLimit(self.peak_bytes, self._limit)
            self.graph = capture(step, self._table(), dry, packing)
            self.peak_bytes += self.graph.executable_bytes
            if self.peak_bytes > self._limit:
                self.close()
                raise OverLimit(self.peak_bytes, self._limit)
        except (MemoryError, RecordError) as error:
            raise NoGraph(f"the step cannot be captured: {error}") from error
        finally:  # kernel-by-kernel steps use the caller's batch
            for block in swapped.values():
                step.blocks.used += block.nbytes * (block.place is Place.HOST)
                block.place = Place.DEVICE
                block.storage = None
                block.bytes = None
                block.valid = block.is_shown = False
        for node in batch.keys() & swapped.keys():
            if values[node] in on_host(step):  # the replay swaps it in from there
                self._slots[node] = as_tensor(swapped[node].host, self._slots[node])
        self.captures += 1

    def _outside_bytes(self) -> int:
        """Returns the device bytes of a replay outside the graph's memory, including the caller's batch."""
        step = self._step
        swapped = sum(b.nbytes for t, b in step.blocks.blocks.items() if b.persistent and t not in step.inputs)
        slots = sum(slot.untyped_storage().nbytes() for slot in self._slots.values())  # none for swapped batch tensors
        return step.blocks.total - swapped + slots + libraries_bytes(cuda_index(step.device))

    def _check_capture_count(self) -> None:
        """Raises NoGraph if the step was captured too often for its number of replays."""
        if not self.always_recapture and self.captures >= CAPTURES + self._replays // REPLAYS_PER_CAPTURE:
            raise NoGraph(
                f"it was captured {self.captures} times for {self._replays} replays, because the optimizer's numbers, "
                "the user's tensors or the batch's shape change: fit(tensor_lr=True) makes learning rates tensors, "
                "which replays read; PlannedStep(graph=True) captures every time"
            )

    def _table(self) -> list[Any]:
        """Returns the table of values before the first kernel."""
        step = self._step
        table = self._step.table.copy()
        for node, slot in self._slots.items():
            table[step.calls.slots[node]] = slot
        run_calls(step.whole.first, table)
        return table

    def close(self) -> None:
        """Frees the graph's memory; the next step is captured again."""
        graph = self.graph
        self.graph = None
        self._checked = None
        if graph is not None:
            graph.close()


def on_host(step: StepState) -> set[int]:
    """Returns the persistent tensors that are on the host at the iteration boundary."""
    return {t for t, place in step.order.start.items() if place == "host"}


def swap_out(step: StepState, candidates: Iterable[Block]) -> None:
    """Moves tensors to the host and shows the host copies to the user; the copies may be in flight."""
    blocks = step.blocks
    moved = [block for block in candidates if block.place is Place.DEVICE]
    if moved:
        blocks.engines.begin()
    for block in moved:
        blocks.swap_out(block)
    for block in moved:
        blocks.reclaim(block)
        block.show()


# --------------------------------------------------------------------------------------------------------- a capture


def address_of(block: Block) -> int:
    """Returns the device address of a block."""
    assert block.storage is not None
    return block.storage.data_ptr()


class _Capture:
    """One capture of a step; raises NoGraph, with the table emptied, if the step cannot be captured.

    ``requests`` are those of the dry capture at their packed addresses, or None for the dry capture itself.
    ``resident`` are the blocks on the device at the iteration boundary, ``addresses`` their addresses before the first
    and after the last kernel.
    """

    def __init__(self, step: StepState, table: list[Any], arena: Arena, requests: Ints | None) -> None:
        blocks = step.blocks
        self.memory = GraphMemory(step.device, arena)
        self.graph = torch.cuda.CUDAGraph(keep_graph=True)  # a dry graph is never instantiated
        self.outputs: list[Tensor] = []
        self.executable_bytes = 0
        for generator in step.random.generators:
            if generator.device.type == "cuda":
                self.graph.register_generator_state(generator)
        self.resident = [b for t, b in blocks.blocks.items() if b.persistent and t not in on_host(step)]

        def run(calls: Sequence[Call]) -> None:
            with self.memory.pool():
                run_calls(calls, table)

        blocks.allocate = self._take
        try:
            with arena.serving(requests), self.memory.recording() as events:
                with torch.cuda.stream(self.memory.stream):
                    for block in self.resident:
                        self._take(block)
                        block.place = Place.DEVICE
                        if requests is not None:
                            block.bytes.copy_(block.host)  # type: ignore[union-attr]
                first = [address_of(block) for block in self.resident]
                with self.memory.capturing(self.graph, blocks.engines.streams):
                    _issue(step, table, run)
                    self.outputs += [table[slot] for slot in step.calls.outputs]
            if requests is not None:
                replace_memsets(step.device, self.graph.raw_cuda_graph())
                self.executable_bytes = instantiate(step.device, self.graph)
            self.events: list[Event] = events
            self.addresses = list(zip(first, map(address_of, self.resident), strict=True))
        except Exception as error:
            reason = line(error)
            if arena.refused_bytes:
                reason = f"an operator asks for {arena.refused_bytes:,} bytes, which it did not in the dry capture"
                if requests is None:
                    reason = f"a dry capture needs addresses for more than {arena.nbytes:,} bytes"
            table.clear()
            self.abandon(step)
            raise NoGraph(f"the step cannot be captured: {reason}") from error
        blocks.allocate = Block.allocate
        blocks.values = []

    def _take(self, block: Block) -> None:
        """Allocates the memory of a swapped block from a new pool."""
        with self.memory.pool():
            block.allocate()

    def abandon(self, step: StepState) -> None:
        """Frees all memory and leaves swapped persistent tensors on the host."""
        blocks = step.blocks
        blocks.allocate = Block.allocate
        blocks.values = []
        blocks.used = blocks.total
        for block in blocks.blocks.values():
            block.place = Place.DEVICE
            if not block.persistent:
                block.storage = block.bytes = None
                continue
            if block.storage is not None and block.storage.nbytes():
                block.storage.resize_(0)
            block.place = Place.HOST
            block.valid = True
            blocks.used -= block.nbytes
            block.show()
        self.outputs.clear()
        self.graph.reset()
        self.memory.close()


def _issue(step: StepState, table: list[Any], run: Callable[[Sequence[Call]], None]) -> None:
    """Issues one iteration, which ends with tensors in their initial locations and no copy in flight.

    A swap-out that the plan has in flight at the boundary starts at the beginning instead, because the user may write
    the tensor between steps.
    """
    blocks = step.blocks
    swapping_out = [blocks.blocks[t] for t, place in step.order.start.items() if place == "out"]
    last_swap_outs = {
        argument[0]: (i, k)
        for i, item in enumerate(step.work)
        for k, (_, argument, kind) in enumerate(item.after)
        if kind == "out" and argument[0] in swapping_out
    }
    deferred = set(last_swap_outs.values())
    blocks.values = table
    blocks.start(step.order.start)
    for i, item in enumerate(step.work):
        for act, argument, _ in item.before:
            act(argument)
        run(item.calls)
        for slot in item.clear:
            table[slot] = None
        for k, (act, argument, _) in enumerate(item.after):
            if (i, k) not in deferred:
                act(argument)
    for block in blocks.blocks.values():
        if block.persistent:
            blocks.wait(block)


@dataclass(frozen=True)
class Dry:
    """Result of a dry capture.

    Attributes:
        requests: requests of all operators and swaps.
        twins: for each tensor on the device at the iteration boundary, its requests before the first kernel and after
            the last.
        record: for each entry of PyTorch's allocation history: whether it allocates, the request, and the bytes.
    """

    requests: Requests
    twins: list[tuple[int, int]]
    record: list[tuple[bool, int, int]]

    @property
    def intervals(self) -> Intervals:
        """Lifetimes of the requests on a circle; the second of two twins has zero bytes."""
        requests = self.requests
        period = max(requests.length, 1)
        lower = requests.begin.copy()
        upper = requests.end.copy()
        nbytes = requests.nbytes.copy()
        for first, last in self.twins:
            if first == last:
                lower[first] = 0
                upper[first] = period
            else:  # from its last swap-in across the boundary to its first swap-out
                lower[first] = lower[last]
                upper[first] = period + upper[first]
                nbytes[last] = 0
        return Intervals(lower, upper, nbytes, period)

    def answers(self, packing: Packing, base: int) -> Ints:
        """Returns int64[n, 2]: requested bytes and assigned address of each request, with the arena at ``base``."""
        offsets = packing.offsets.copy()
        for first, last in self.twins:
            offsets[last] = offsets[first]
        return np.stack((self.requests.served[:, 0], base + offsets), axis=1)


def dry_capture(step: StepState, table: list[Any]) -> Dry:
    """Captures a step at valid addresses that are never accessed; raises NoGraph."""
    blocks = step.order.schedule.blocks
    created = [blocks[b].nbytes for s in step.order.schedule.steps for b in s.allocates]
    swapped = [block.nbytes for block in step.blocks.blocks.values()]
    # PyTorch rounds requests up, by at most a segment of 20 MiB, and an operator may make a few requests that its
    # profile lacks. Addresses cost nothing, so 4 GiB are added.
    expected = sum(2 * nbytes + (20 << 20) for nbytes in (*created, *swapped, *swapped)) + (4 << 30)
    attempt = _Capture(step, table, Arena.aliased(step.device, expected), None)
    try:
        requests = requests_of(attempt.events, attempt.memory)
        index = {int(address): i for i, address in enumerate(requests.served[:, 1])}
        record = [(event.allocates, index[event.address], event.nbytes) for event in attempt.events]
        return Dry(requests, [(index[first], index[last]) for first, last in attempt.addresses], record)
    finally:
        table.clear()
        attempt.abandon(step)


def capture(step: StepState, table: list[Any], dry: Dry, packing: Packing) -> Graph:
    """Captures a step at packed addresses; raises NoGraph."""
    arena = Arena.resident(step.device, max(packing.footprint, ALIGNMENT))
    answers = dry.answers(packing, arena.base)
    attempt = _Capture(step, table, arena, answers)
    group = dry.requests.group
    if (
        len(attempt.memory.served) != len(answers)
        or len(attempt.events) != len(dry.record)
        or any(
            (event.allocates, event.nbytes) != (allocates, nbytes) or event.address not in answers[group == group[i], 1]
            for event, (allocates, i, nbytes) in zip(attempt.events, dry.record, strict=True)
        )
    ):
        table.clear()
        attempt.abandon(step)
        raise NoGraph(
            "the step cannot be captured: its operators have not asked for the memory of the dry capture; set "
            "graph=False"
        )
    blocks = step.blocks
    blocks.used = blocks.total
    for block in blocks.blocks.values():
        if not block.persistent:
            block.storage = block.bytes = None
        elif block.place is Place.HOST:
            blocks.used -= block.nbytes
            block.show()
    counted_bytes = attempt.memory.counted_bytes()
    graph = Graph(
        attempt.graph.replay, int, attempt.outputs, packing.footprint, counted_bytes, attempt.executable_bytes
    )
    resident = [(block.bytes, block.host) for block in attempt.resident if block.bytes is not None]
    graph.close = weakref.finalize(graph, _release_graph, attempt.graph, attempt.memory, attempt.outputs, resident)
    return graph


def _release_graph(
    graph: Any, memory: GraphMemory, outputs: list[Tensor], resident: list[tuple[Tensor, Tensor]]
) -> None:
    """Releases the graph, its pools and the arena, and moves the user's tensors out of it.

    They take the way over the host, because arena and copies may not fit into the device together.

    Args:
        resident: bytes of the user's tensors in the arena, each with its unused place in host memory.
    """
    with contextlib.suppress(RuntimeError):  # earlier failures are reported where they occur
        torch.cuda.synchronize(memory.device)  # a replay may be in flight
    outputs.clear()
    with _disable_current_modes():  # the garbage collector may call this
        nbytes = []
        for tensor, host in resident:
            nbytes.append(tensor.untyped_storage().nbytes())
            host.copy_(tensor)
            tensor.untyped_storage().resize_(0)
        graph.reset()
        memory.close()
        for (tensor, host), size in zip(resident, nbytes, strict=True):
            tensor.untyped_storage().resize_(size)
            tensor.copy_(host)
    resident.clear()
