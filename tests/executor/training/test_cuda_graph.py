"""The CUDA side of a graph with stand-ins for PyTorch's GPU calls: what it asks for, in which order, and what is said.

A stand-in's capture runs what is issued, on CPU tensors and with PyTorch's own allocator; it cannot be replayed. Its
pool asks the native allocator for segments as PyTorch's does.
"""

import contextlib
import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from executor import PlannedStep, StepError, capture
from executor.memory import graph_pool
from executor.memory.graph_pool import GraphPool, Need, need_of
from executor.memory.segments import Segments, functions
from executor.training import graph
from executor.training.progress import Random
from simulator import Plan
from simulator.pool import smartpool
from simulator.pool.intervals import Intervals
from simulator.pool.online import caching
from tests.executor.networks import sgd
from tests.executor.training.programs import GPU, Twins, tight
from tests.executor.training.test_graph import by_tensor, graphed, plan_for

MIB = 2**20
DEVICE = torch.device("cuda", 0)


class Out(RuntimeError):
    """torch.OutOfMemoryError."""


class Cuda:
    """torch.cuda, noting what is called."""

    def __init__(self):
        self.log, self.current, self.capturing = [], "user", set()
        self.Stream = lambda device: Stream(self, "capture")
        self.CUDAGraph = lambda: Graph(self)
        self.MemPool = lambda allocator: Pool(self)
        self.end_fails = False
        self.live, self.pools = 0, 0
        self.underway, self.uses = [], 0  # of the pool: captures that allocate from it; of the pool and of captures

    def current_device(self):
        return 0

    def current_stream(self, device=None):
        return self.current

    def set_stream(self, stream):
        self.current = stream

    def synchronize(self, device=None):
        self.log.append("synchronize")

    def is_available(self):
        return False

    def is_current_stream_capturing(self):
        return self.current in self.capturing

    def memory_snapshot(self, which):
        assert which == (0, 7)
        return [{"allocated_size": 512, "total_size": 2 * MIB}, {"allocated_size": 1024, "total_size": 2 * MIB}]

    @contextlib.contextmanager
    def device(self, device):
        yield

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextlib.contextmanager
    def use_mem_pool(self, pool):
        self.log.append("pool")
        self.filling = pool
        yield
        self.filling = None
        self.log.append("no pool")

    @contextlib.contextmanager
    def graph(self, made, stream, capture_error_mode, pool=(1, 0)):
        assert capture_error_mode == "thread_local"
        self.log.append("begin")
        before, self.current = self.current, stream
        self.capturing.add(stream)
        self.underway.append(pool)
        self.uses += pool == (0, 7)
        try:
            yield
        finally:
            self.log.append("end")
            if self.end_fails and pool == (0, 7):
                raise RuntimeError("the capture was invalidated")  # as PyTorch: all of it stays as it is
            self.underway.remove(pool)
            made.ended = pool == (0, 7)
            self.current = before

    def end(self, index, pool):
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, index, pool):
        assert pool == (0, 7)
        self.uses -= 1
        if not self.uses:
            for at in self.segments:
                functions()[1].ctypes(at, 0, 0, 0)
            self.segments = []


class Stream:
    def __init__(self, cuda, name):
        self.cuda, self.name = cuda, name

    def wait_stream(self, other):
        self.cuda.log.append(f"{self.name} waits for {other.name}")


class Graph:
    def __init__(self, cuda):
        self.cuda, self.ended = cuda, False

    def register_generator_state(self, generator):
        raise AssertionError("the generators here are the CPU's")

    def replay(self):
        self.cuda.log.append("replay")

    def reset(self):
        self.cuda.log.append("reset")
        if self.ended:
            self.ended = False
            self.cuda.release(0, (0, 7))


class Pool:
    """A memory pool: asks for segments, and gives them back when nobody uses it, no capture either."""

    id = (0, 7)

    def __init__(self, cuda):
        self.cuda, cuda.segments = cuda, []
        cuda.pools += 1
        cuda.uses += 1

    def segment(self, nbytes):
        found = functions()[0].ctypes(nbytes, 0, 0)
        if found:
            self.cuda.segments.append(found)
        return found

    def __del__(self):
        self.cuda.pools -= 1
        self.cuda.release(0, (0, 7))


@pytest.fixture
def cuda(monkeypatch):
    fake = Cuda()

    def empty(nbytes, dtype, device):
        assert fake.filling and fake.current.name == "capture" and device == DEVICE
        fake.log.append(f"empty {nbytes}")
        if not fake.filling.segment(nbytes):
            raise Out("CUDA out of memory")

    stand_in = SimpleNamespace(
        cuda=fake, device=torch.device, uint8=torch.uint8, empty=empty, ones=lambda *size, device: torch.ones(*size),
        addmm=lambda *args: fake.log.append("addmm"),
        _C=SimpleNamespace(_cuda_endAllocateToPool=fake.end, _cuda_releasePool=fake.release),
    )  # fmt: skip
    monkeypatch.setattr(graph_pool, "torch", stand_in)
    monkeypatch.setattr(graph_pool, "cuda_index", lambda device: fake.current_device())
    monkeypatch.setattr(graph_pool, "allocator", lambda: None)
    monkeypatch.setattr(graph_pool, "capture_stream", lambda index: Stream(fake, "capture"))
    in_graph = SimpleNamespace(cuda=fake, no_grad=torch.no_grad, autocast=torch.autocast)
    monkeypatch.setattr(graph, "torch", in_graph)

    def on_device(device, nbytes):
        memory = np.zeros(nbytes + 512, np.uint8)
        fake.live += 1

        def release(memory=memory):
            fake.live -= 1
            fake.log.append("release")

        return Segments(-(-memory.ctypes.data // 512) * 512, nbytes, 0, release)

    monkeypatch.setattr(graph_pool.Segments, "on_device", on_device)
    return fake


# ------------------------------------------------------------------------------------------------------------ sizes


def test_the_arena_is_what_the_model_of_the_allocator_asks_for():
    rng = np.random.default_rng(3)
    times = rng.permutation(400)
    size = rng.integers(1, 8 * MIB, 200)
    size[:40] = rng.integers(1, MIB, 40)
    intervals = Intervals(np.minimum(times[:200], times[200:]), np.maximum(times[:200], times[200:]), size)
    need = need_of(intervals)
    assert need.packed == smartpool.pack(intervals, 512).footprint
    assert need.reserved == caching.pack(intervals, need.first).footprint <= caching.pack(intervals).footprint
    assert intervals.peak_bytes <= need.packed and need.first < need.reserved < need.arena
    assert need.arena - need.reserved == 32 * MIB and need.arena % (2 * MIB) == 0
    # Everything large is inside the first segment, and what is small has 2 MiB segments after it.
    packing = caching.pack(intervals, need.first)
    large = size > MIB
    assert (packing.offsets[large] + size[large] <= need.first).all() and (packing.offsets[~large] >= need.first).all()
    assert packing.driver_mallocs == 1 + (need.reserved - need.first) // (2 * MIB)


def test_without_large_tensors_there_is_no_first_segment():
    need = need_of(Intervals(np.array([0, 1]), np.array([2, 3]), np.array([512, 1000])))
    assert (need.first, need.reserved, need.packed) == (0, 2 * MIB, 512 + 1024)
    one = need_of(Intervals(np.array([0]), np.array([1]), np.array([3 * MIB])))
    assert (one.first, one.reserved) == (20 * MIB, 20 * MIB)  # PyTorch asks for no less


# ------------------------------------------------------------------------------------------------------------ the pool


def test_the_pool_is_filled_before_the_capture_on_its_stream(cuda):
    pool = GraphPool(DEVICE, Need(0, 4 * MIB, 6 * MIB, 8 * MIB))
    made = Graph(cuda)
    with pool.capturing(made, ()):
        assert cuda.current.name == "capture" and pool.arena.live == 1 and pool.arena.most_bytes == 4 * MIB
        assert pool._pool.segment(2 * MIB) and pool._pool.segment(2 * MIB)
        assert not pool._pool.segment(1) and pool.arena.refused_bytes == 1  # the arena's end
    assert not pool._pool.segment(1)  # no capture, no memory
    assert cuda.log == ["addmm", "pool", f"empty {4 * MIB}", "no pool", "begin", "end"] and cuda.current == "user"
    assert pool.allocated() == 1536
    made.reset()
    pool.close()
    assert cuda.log[-1] == "release" and (cuda.live, cuda.pools) == (0, 0)


def test_of_a_capture_that_fails_the_first_error_is_raised_and_the_stream_is_the_callers(cuda):
    pool = GraphPool(DEVICE, Need(0, 2 * MIB, 2 * MIB, 4 * MIB))
    forked, idle = Stream(cuda, "d2h"), Stream(cuda, "h2d")
    cuda.capturing.add(forked)
    cuda.end_fails = True
    with pytest.raises(ValueError, match=r"^first$") as caught, pool.capturing(Graph(cuda), (forked, idle)):
        raise ValueError("first")
    assert "invalidated" in str(caught.value.__cause__) and cuda.current == "user"
    # A stream that was not forked must not be joined. What did not end is ended, and a capture follows that does.
    assert cuda.log[-5:] == ["capture waits for d2h", "end", "reset", "begin", "end"] and not cuda.underway
    with pytest.raises(RuntimeError, match="invalidated"), pool.capturing(Graph(cuda), ()):
        pass
    assert cuda.current == "user" and not cuda.underway
    pool.close()
    assert (cuda.live, cuda.pools, cuda.uses) == (0, 0, 0)  # the arena's memory is the device's again


# ------------------------------------------------------------------------------------------------------------ the graph


class Executed(graph.CudaGraph):
    """Its capture has run the step."""

    def __init__(self, step, table):
        super().__init__(step, table)
        self.done = True


@pytest.mark.parametrize(("network", "optimizer"), [("small", by_tensor), ("vgg16", sgd)])
def test_what_is_captured_is_the_step(network, optimizer, cuda, monkeypatch):
    """Issued with the allocator's memory and not at packed addresses, it is eager's to the bit."""
    monkeypatch.setattr(graph, "HostGraph", Executed)
    twins, step = graphed(network, optimizer)
    with pytest.warns(UserWarning, match="the graph's arena and what stays beside it have [0-9,]+ bytes, the limit is"):
        twins.train(step, 2)
    assert step.graph.peak_bytes > step.limit
    made = step.graph.graph
    need = need_of(graph.stays(step.order, step.state.blocks.blocks)[1])
    assert (made.pool_bytes, made.packed_bytes) == (need.arena, need.packed) and need.packed <= need.reserved
    assert made.idle_bytes == need.arena - 1536
    assert step.graph.peak_bytes == step.state.blocks.used + need.arena
    made.done = False
    made.replay()
    assert cuda.log[-1] == "replay" and cuda.live == 1
    step.graph.close()
    assert cuda.log[-3:] == ["synchronize", "reset", "release"] and (cuda.live, cuda.pools) == (0, 0)


def test_the_memory_goes_with_the_step(cuda, monkeypatch):
    monkeypatch.setattr(graph, "HostGraph", Executed)
    twins, step = graphed("small", by_tensor)
    twins.train(step, 2)
    assert cuda.live == 1
    del step
    gc.collect()
    assert (cuda.live, cuda.pools) == (0, 0)


def test_a_new_capture_gives_the_old_memory_back_first(cuda, monkeypatch):
    monkeypatch.setattr(graph, "HostGraph", Executed)
    twins, step = graphed("small", sgd)
    twins.train(step, 2)
    for parts in (twins.ours, twins.eager):
        parts[2].param_groups[0]["lr"] = 0.07
    cuda.log.clear()
    twins.train(step)
    assert step.graph.captures == 2 and cuda.live == 1
    assert cuda.log.index("release") < cuda.log.index("begin")


@pytest.mark.parametrize(("arena", "end_fails"), [(True, False), (False, False), (False, True)])
def test_a_capture_that_fails_says_why_and_the_next_step_tries_again(arena, end_fails, cuda, monkeypatch):
    monkeypatch.setattr(graph, "HostGraph", Executed)
    cuda.end_fails = end_fails
    twins, step = graphed("small", by_tensor)
    twins.train(step)
    issue, pool = graph.issue, []

    def failing(step, table, run):
        made = next(o for o in gc.get_objects() if isinstance(o, Pool))
        pool.append(made.segment(2 * MIB))
        if arena:
            assert not made.segment(2**40)
        del made  # or the traceback has it, and the memory waits for that
        raise Out("CUDA out of memory")

    monkeypatch.setattr(graph, "issue", failing)
    words = r"1,099,511,627,776 in one piece were not left: an operator takes more" if arena else r"Out: CUDA out of me"
    with pytest.raises(StepError, match=rf"^the step cannot be captured: .*{words}.*the model is as before the step"):
        step(*twins.next_batch())
    assert pool[0] and step.graph.graph is None and (cuda.live, cuda.pools) == (0, 0)
    assert not any(block.storage and block.storage.nbytes() for block in step.state.blocks.blocks.values())
    step.finish()
    twins.compare()
    monkeypatch.setattr(graph, "issue", issue)
    cuda.end_fails = False
    twins.train(step)


def test_no_memory_for_an_arena_is_said(cuda, monkeypatch):
    monkeypatch.setattr(graph, "HostGraph", Executed)
    twins, step = graphed("small", by_tensor)
    twins.train(step)

    def none(device, nbytes):
        raise MemoryError("the device has no 7 bytes in one piece (cuMemAlloc: error 2)")

    monkeypatch.setattr(graph_pool.Segments, "on_device", none)
    with pytest.raises(StepError, match=r"^the graph has no memory: the device has no 7 bytes .*; the model is"):
        step(*twins.next_batch())
    step.finish()
    twins.compare()


def test_no_random_state_is_read_in_a_capture(monkeypatch):
    """A CUDA generator refuses that. Micro-batches that come one by one need it, a graph takes them in one call."""
    twins = Twins("small", sgd)
    captured = capture(*twins.ours, twins.next_batch(), machine=GPU, accumulate=2)
    assert any(micro.drawn >= 0 for micro in captured.micro)
    batches = [twins.next_batch(), twins.next_batch()]
    plain, step = PlannedStep(captured, Plan(), GPU), PlannedStep(captured, Plan(), GPU, graph=True)
    step(*batches)
    read = []
    for name in ("save", "restore", "replay"):
        does = getattr(Random, name)
        monkeypatch.setattr(Random, name, lambda *a, name=name, does=does: (read.append(name), does(*a)))
    step(*batches)
    assert step.graph.captures == 1 and not read
    plain(*batches)
    assert "save" in read


# -------------------------------------------------------------------------------------------------------------- a GPU


def without_numbers(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, capturable=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize(("network", "optimizer"), [("small", sgd), ("vgg16", sgd), ("gpt2", without_numbers)])
def test_a_graph_on_a_gpu(network, optimizer, monkeypatch):
    """Equal to eager to the bit where cuDNN is deterministic; its memory goes back to the device when it is closed."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    twins = Twins(network, optimizer, "cuda")
    captured = twins.captured()
    step = tight(captured, plan_for(captured), graph=True)
    twins.train(step, 5)
    made = step.graph.graph
    assert step.graph.captures == 1 and 0 < made.idle_bytes <= made.pool_bytes and made.packed_bytes <= made.pool_bytes
    before = torch.cuda.mem_get_info()[0]
    step.graph.close()
    assert torch.cuda.mem_get_info()[0] - before >= made.pool_bytes
    twins.train(step, 2)
    assert step.graph.captures == 2
    step.finish()
    twins.compare()
