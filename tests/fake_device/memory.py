"""Model of PyTorch's caching allocator on the fake device, with fake addresses."""

from __future__ import annotations

import ctypes
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tests.fake_device.order import Clock, Clocks, Span

if TYPE_CHECKING:
    from tests.fake_device.cuda import Event, Stream
    from tests.fake_device.graphs import GraphDouble

BASE = 1 << 60  # device addresses are above, host addresses below
POISON = 0xFF
# simulator/pool/online/caching.py
SEGMENT = 2 << 20
SMALL = 1 << 20
ROUND = 512


@dataclass(eq=False)
class Block:
    """Memory of a storage.

    Attributes:
        stream: the stream that allocated it; None for pinned host memory.
        users: streams passed to record_stream.
        after: clock at which its previous owner had finished.
    """

    at: int
    nbytes: int
    stream: Stream | None
    storage: weakref.ref[torch.UntypedStorage]
    pool: Any = None
    users: set[Stream] = field(default_factory=set)
    after: Clock = field(default_factory=dict)


class Free(NamedTuple):
    """Free segment of a pool."""

    nbytes: int
    begin: int
    after: Clock


class Memory:
    """Model of PyTorch's caching allocator with fake addresses.

    Freed memory is reusable at once on the stream that allocated it; after record_stream, when all recorded streams
    have reached that point. Only pools reuse addresses: they request a whole segment from their allocator for each
    block, and reuse free segments by best fit.
    """

    def __init__(self, double: GraphDouble) -> None:
        self.double = double
        self.blocks: dict[int, Block] = {}  # keyed by the storage's _cdata
        self.live: dict[int, Block] = {}
        self.order: list[int] = []  # addresses of live blocks
        self.free: dict[Any, list[Free]] = {}
        self.limbo: list[tuple[Block, list[Event]]] = []  # freed segments with pending events
        self.end = BASE
        self.bytes = 0
        self.peak = 0
        self.recent_peak = 0  # since reset_peak_memory_stats
        self.segments: dict[tuple[Any, int], int] = {}  # (pool, address) -> bytes
        self.trace: list[tuple[str, int, int]] = []  # allocation history: action, address, requested bytes
        self.pinned: dict[int, int] = {}  # ranges passed to cudaHostRegister
        self._resize = torch.UntypedStorage.resize_

    # ---------------------------------------------------------------------------------------- ownership

    def is_pinned(self, address: int) -> bool:
        return any(a <= address < a + n for a, n in self.pinned.items())

    def of(self, tensor: Tensor) -> Block:
        """Returns the block of a tensor; an unknown tensor counts as allocated on the current stream."""
        storage = tensor.untyped_storage()
        block = self.blocks.get(storage._cdata)
        if block is None or block.nbytes != storage.nbytes() or block.storage() is not storage:
            if block is not None:
                self.give(block)
            block = self.take(storage)
        return block

    def span(self, tensor: Tensor) -> Span:
        begin = self.of(tensor).at + tensor.storage_offset() * tensor.element_size()
        last = sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True))
        return begin, begin + (last + 1) * tensor.element_size()

    def take(self, storage: torch.UntypedStorage) -> Block:
        key = storage._cdata
        nbytes = storage.nbytes()
        reference = weakref.ref(storage, lambda ref: self._dead(key, ref))
        if self.is_pinned(storage.data_ptr()):
            block = self.blocks[key] = Block(storage.data_ptr(), nbytes, None, reference)
            return block
        stream = self.double.current_stream()
        if not nbytes:  # no allocation
            block = self.blocks[key] = Block(self.end, 0, stream, reference)
            return block
        pool = self.double.pool_of(stream)
        address, after = self._malloc(nbytes, pool)
        block = self.blocks[key] = self.live[address] = Block(address, nbytes, stream, reference, pool, after=after)
        i = bisect_left(self.order, address)
        for other in self.order[max(0, i - 1) : i + 1]:
            if other < address + nbytes and address < other + self.live[other].nbytes:
                self.double.found.append(f"{nbytes} bytes at {address:#x} are given to two owners")
        self.order.insert(i, address)
        self.trace.append(("alloc", address, nbytes))
        if self.double.capture:  # a capture writes nothing
            self.double.exchange(block, False)
        self.bytes += nbytes
        self.peak = max(self.peak, self.bytes)
        self.recent_peak = max(self.recent_peak, self.bytes)
        return block

    def _dead(self, key: int, ref: weakref.ref[torch.UntypedStorage]) -> None:
        if (block := self.blocks.get(key)) and block.storage is ref:
            self.give(self.blocks.pop(key))

    def give(self, block: Block) -> None:
        if block.stream is None or self.live.pop(block.at, None) is None:
            return
        del self.order[bisect_left(self.order, block.at)]
        self.trace.append(("free_requested", block.at, block.nbytes))
        self.bytes -= block.nbytes
        events = [stream.record_event() for stream in block.users]
        after = dict(block.after)
        for event in events:
            Clocks.join(after, event.clock)
        span = (block.at, block.at + block.nbytes)
        self.double.use(block.stream, f"the next owner, on {block.stream.name}, of freed memory", (), (span,), after)
        block.after = after
        if isinstance(block.pool, tuple):
            self.limbo.append((block, events))
            if not events:
                self.process()

    def resize(self, storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        """Models UntypedStorage.resize_."""
        if block := self.blocks.pop(storage._cdata, None):
            self.double.exchange(block, True)
            self.give(block)
        self._resize(storage, nbytes)
        if nbytes:
            ctypes.memset(storage.data_ptr(), POISON, nbytes)
            self.double.exchange(self.take(storage), False)
        return storage

    # ---------------------------------------------------------------------------------------- addresses

    def process(self) -> None:
        """Models process_events of the allocator."""
        waiting = self.limbo
        self.limbo = []
        for block, events in waiting:
            if all(event.query() for event in events) and not (events and self.double.routes):
                nbytes = self.segments[block.pool, block.at]
                spans = self.free.setdefault((block.pool, nbytes == SEGMENT), [])
                spans.append(Free(nbytes, block.at, block.after))
            else:
                self.limbo.append((block, events))

    def _malloc(self, nbytes: int, pool: Any) -> tuple[int, Clock]:
        """Returns the address for a block, and the clock at which its previous owner had finished."""
        self.process()
        size = -(-nbytes // ROUND) * ROUND
        if not isinstance(pool, tuple):
            self.end += ROUND + size  # blocks have no neighbors
            return self.end - size, {}
        spans = self.free.setdefault((pool, nbytes <= SMALL), [])
        if fitting := [free for free in spans if free.nbytes >= size]:
            fit = min(fitting)
            spans.remove(fit)
            return fit.begin, dict(fit.after)
        segment = SEGMENT if size <= SMALL else 10 * SEGMENT if size < 10 * SMALL else -(-size // SEGMENT) * SEGMENT
        address = self.double.segment(pool, segment)
        self.segments[pool, address] = segment
        return address, {}

    # ---------------------------------------------------------------------------------------- content

    def _parts(self, span: Span) -> Iterator[tuple[int, int, int]]:
        """Yields real locations of bytes (offset in the span, address, count); on the device, owned bytes only."""
        if span[0] < BASE:
            if self.is_pinned(span[0]):
                yield 0, span[0], span[1] - span[0]
            return
        for address in self.order[max(0, bisect_right(self.order, span[0]) - 1) :]:
            if address >= span[1]:
                return
            block = self.live[address]
            storage = self.live[address].storage()
            begin = max(address, span[0])
            end = min(address + block.nbytes, span[1])
            if begin < end and storage is not None:
                yield begin - span[0], storage.data_ptr() + begin - address, end - begin

    def move(self, target: Span, source: Span) -> None:
        """Copies bytes between addresses, whoever owns them now; bytes without an owner are poison."""
        content = (ctypes.c_ubyte * (source[1] - source[0]))()
        ctypes.memset(content, POISON, len(content))
        for offset, address, n in self._parts(source):
            ctypes.memmove(ctypes.addressof(content) + offset, address, n)
        for offset, address, n in self._parts(target):
            ctypes.memmove(address, ctypes.addressof(content) + offset, n)
