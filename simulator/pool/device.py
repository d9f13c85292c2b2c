"""SmartPool at run time: "Efficient Memory Management for GPU-based Deep Learning Systems" (2020), section V.

    class Device { Block* Malloc(size_t); void Free(Block*); void Exec(Function, vector<Block*>, vector<Block*>);
                   SmartPool PoolOpt(); SmartPool pool; }

- Early iterations: ``malloc`` and ``free`` call cudaMalloc and cudaFree, and requests are recorded. Under a limit,
  blocks are swapped out when a request is about to exceed it, and swapped in when they are accessed again.
- "Once two consecutive subsequences are detected to be repeating, the subsequence is fed into PoolOpt": the detection
  is trace.py's, PoolOpt is smartpool.py.
- From then on ``malloc`` looks the address up by the index of the request in the iteration, and ``free`` does nothing.

Choices that the paper leaves open, and the executor of AutoSwap's schedule: simulator/pool/README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from simulator.pool import smartpool
from simulator.pool.intervals import Intervals
from simulator.pool.trace import Iteration, NoIteration, OperationKind, Stream, detect
from simulator.program import Program


@dataclass(eq=False)
class Variable:
    """Memory of one variable."""

    nbytes: int
    request: int = -1  # index of its malloc in the record
    pool: SmartPool | None = None  # the pool that holds it; None: it has a cudaMalloc of its own
    offset: int = 0  # bytes, its address in the pool
    resident: bool = True  # False: swapped out


@dataclass(eq=False)
class SmartPool:
    """One cudaMalloc that serves the requests of an iteration."""

    begin: int  # index of a request at which an iteration begins
    steps: list[tuple[str, int]]  # requests: ("malloc", bytes), or ("free", requests since its malloc)
    offsets: dict[int, int]  # address by index of a malloc in ``steps``
    footprint: int  # bytes
    n_blocks: int = 0  # number of its blocks in use

    def index(self, request: int) -> int:
        """Returns the index in the iteration of a request."""
        return (request - self.begin) % len(self.steps)


class Device:
    """GPU whose memory is handed out by SmartPool once the iteration is known.

    Args:
        alignment: bytes, of addresses in the pool.
        limit: bytes; early iterations swap on demand to stay within it.
        first_test: number of requests before the first repeatability test; each further test takes twice as many.
        shortest: least number of requests of an iteration.
    """

    def __init__(
        self, alignment: int = 1, limit: int | None = None, first_test: int = 300, shortest: int = 100
    ) -> None:
        self.alignment = alignment
        self.limit = limit
        self.first_test = first_test
        self.shortest = shortest
        self.pool: SmartPool | None = None  # serves requests; None in early iterations and after a mismatch
        self.iteration: Iteration | None = None  # detected mallocs, frees, reads and writes: AutoSwap's input
        self._next_pool: SmartPool | None = None
        self.native_bytes = 0  # on the device outside pools
        self.peak_bytes = 0  # highest ``reserved_bytes``; callers may reset it
        self.mismatches = 0  # requests that differed from the detected iteration
        self.swapped_out: list[int] = []  # bytes of every swap on demand
        self.swapped_in: list[int] = []
        self._live: dict[Variable, None] = {}  # least recently used first
        self._pools: list[SmartPool] = []  # that hold memory
        self._restart_record()

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all cudaMallocs."""
        return self.native_bytes + sum(pool.footprint for pool in self._pools)

    def malloc(self, nbytes: int) -> Variable:
        """Returns memory for a variable.

        Raises:
            MemoryError: the limit is exceeded although every other block is swapped out.
        """
        block = Variable(nbytes)
        if self._is_served("malloc", nbytes):
            assert self.pool is not None
            block.pool = self.pool
            block.offset = self.pool.offsets[self.pool.index(self._count)]
            self.pool.n_blocks += 1
        else:
            self._place(block, ())
        block.request = self._count
        self._live[block] = None
        self._record("malloc", block)
        return block

    def free(self, block: Variable) -> None:
        """Frees a variable's memory."""
        self._is_served("free", self._count - block.request)
        del self._live[block]
        if block.pool is not None:
            block.pool.n_blocks -= 1
            self._release()
        elif block.resident:
            self.native_bytes -= block.nbytes
        self._record("free", block)

    def exec(self, function: Callable[[], None], read: Sequence[Variable], write: Sequence[Variable]) -> None:
        """Executes a function that reads and writes blocks, which are swapped in first.

        Raises:
            MemoryError: the limit is exceeded although every other block is swapped out.
        """
        used = dict.fromkeys((*read, *write))
        for block in used:
            self._live[block] = self._live.pop(block)
            if not block.resident:
                self._place(block, used)
                self.swapped_in.append(block.nbytes)
                block.resident = True
        function()
        for kind, blocks in (("read", read), ("write", write)):
            for block in blocks:
                self._record(kind, block)

    def _place(self, block: Variable, keep: Collection[Variable]) -> None:
        """Calls cudaMalloc for a block, after swapping out as many others as necessary, least recently used first."""
        for other in list(self._live) if self.limit is not None else ():
            if self.limit is None or self.reserved_bytes + block.nbytes <= self.limit:
                break
            if other.resident and other.pool is None and other not in keep:
                other.resident = False
                self.native_bytes -= other.nbytes
                self.swapped_out.append(other.nbytes)
        self.native_bytes += block.nbytes
        self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)
        if self.limit is not None and self.reserved_bytes > self.limit:
            raise MemoryError(f"limit: {self.limit:,} bytes are exceeded by the blocks of one call; raise it")

    def _is_served(self, kind: str, operand: int) -> bool:
        """Returns whether the pool serves a request: bytes of a malloc, or requests since the malloc of a free."""
        if self._next_pool is not None and self._next_pool.index(self._count) == 0:
            self.pool = self._next_pool
            self._next_pool = None
            self._pools.append(self.pool)
            self.peak_bytes = max(self.peak_bytes, self.reserved_bytes)
        if self.pool is None:
            return False
        if self.pool.steps[self.pool.index(self._count)] == (kind, operand):
            return True
        self.mismatches += 1
        self.pool = None
        self._release()
        self._restart_record()
        return False

    def _release(self) -> None:
        """Frees pools that neither serve nor hold a block."""
        self._pools = [pool for pool in self._pools if pool.n_blocks or pool is self.pool]

    def _restart_record(self) -> None:
        """Begins a record, of which the live blocks are the first requests."""
        self._count = 0
        self._requests: list[tuple[str, int, int]] = []
        self._operations: list[tuple[str, int, int]] = []
        self._next_pool = None
        self._next_test = len(self._live) + self.first_test
        for block in self._live:
            block.request = self._count
            self._record("malloc", block)

    def _record(self, kind: str, block: Variable) -> None:
        """Records an operation, and tests for repetition."""
        is_request = kind in ("malloc", "free")
        self._count += is_request
        if self.pool is not None:
            return
        self._operations.append((kind, id(block), block.nbytes))
        if not is_request:
            return
        self._requests.append(self._operations[-1])
        if self._count == self._next_test and self._next_pool is None:
            self._next_test *= 2
            try:
                iteration = detect(Stream.from_operations(self._requests))
                if iteration.length >= self.shortest:
                    self._next_pool = self._pool_opt(iteration)
                    self.iteration = detect(Stream.from_operations(self._operations))
            except NoIteration:
                pass

    def _pool_opt(self, iteration: Iteration) -> SmartPool:
        """Packs the blocks that the iteration mallocs; others keep their addresses."""
        stream = Stream.from_operations(self._requests)
        first = iteration.begin
        inner = iteration.source >= first
        lives = iteration.intervals
        packing = smartpool.pack(
            Intervals(lives.lower[inner], lives.upper[inner], lives.nbytes[inner], iteration.length), self.alignment
        )
        steps = []
        offsets = dict(zip(lives.lower[inner].tolist(), packing.offsets.tolist(), strict=True))
        for i in range(first, first + iteration.length):
            malloc = stream.kind[i] == OperationKind.MALLOC
            steps.append(("malloc", int(stream.nbytes[i])) if malloc else ("free", int(i - stream.mallocs[i])))
        return SmartPool(first, steps, offsets, packing.footprint)


def train(device: Device, program: Program, iterations: int) -> Iterator[int]:
    """Executes iterations of a program on a device; yields the peak of reserved bytes after each."""
    blocks = {t: device.malloc(tensor.nbytes) for t, tensor in enumerate(program.tensors) if tensor.persistent}
    for _ in range(iterations):
        device.peak_bytes = device.reserved_bytes
        for k, kernel in enumerate(program.kernels):
            workspace = [device.malloc(kernel.workspace)] if kernel.workspace else []
            for t in dict.fromkeys(kernel.outputs):
                if t not in blocks:
                    blocks[t] = device.malloc(program.tensors[t].nbytes)
            read, write = ([blocks[t] for t in dict.fromkeys(uses)] for uses in (kernel.inputs, kernel.outputs))
            device.exec(lambda: None, read, [*write, *workspace])
            for t in kernel.accesses:
                if not program.tensors[t].persistent and program.accesses[t][-1] == k:
                    device.free(blocks.pop(t))
            for block in workspace:
                device.free(block)
        yield device.peak_bytes
