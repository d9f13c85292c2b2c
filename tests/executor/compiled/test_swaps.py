"""Tests of swaps in compiled models: on the CPU with a second memory pool, on the double of torch.cuda, on a GPU."""

import gc
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from executor import compiled
from executor.compiled import Partitioner, backend, copies
from executor.compiled.copies import PENDING
from executor.compiled.joint import Joint
from executor.fit import FitError
from executor.memory import ALIGNMENT
from executor.memory.engines import CudaEngines
from simulator.machine import Machine
from simulator.plan import Plan, Swap
from simulator.program import Program
from tests.executor.compiled.test_compiled import Block, Net, blocks, graphs, peak, step
from tests.fake_device.graphs import GraphDouble

SWAPS = "autoswap_swdoa"


@pytest.mark.nightly
def test_a_compiled_model_swaps_as_planned_in_the_memory_that_was_predicted() -> None:
    net = blocks()
    x = torch.randn(4, 64, 32)
    expected = step(torch.compile(net, dynamic=False), net, x)
    torch._dynamo.reset()
    model = compiled.compile(net, memory=0.8, planner=SWAPS, mode="swap")
    results = step(model, net, x)
    (graph,) = compiled.report(model).graphs
    assert all(map(torch.equal, results, expected))
    assert graph.plan is not None and graph.program is not None
    swaps = [d for d in graph.plan.decisions if isinstance(d, Swap)]
    nbytes = sum(graph.program.tensors[d.tensor].nbytes for d in swaps)
    (slab,) = (s for s in backend._PARTITIONERS[model].slabs if s.copies)
    before = slab.copies
    real = peak(model, net, x)
    assert real == pytest.approx(graph.peak_bytes, rel=0.005) and real <= graph.limit
    assert slab.copies - before == len(swaps) > 0 and len(slab.live) == 1  # one memory for all steps
    assert 0 < slab.nbytes == graph.host_bytes <= nbytes + ALIGNMENT * len(swaps)
    assert f"{len(swaps)} swaps" in str(compiled.report(model))


def test_swaps_and_recomputations_combine() -> None:
    net = blocks(3)
    x = torch.randn(4, 64, 32)
    expected = step(net, net, x)

    def plan_both(program: Program, machine: Machine, limit: int) -> Plan:
        import agents

        assert machine.copy_engines == 2
        recomputing = agents.make("capuchin", mode="recompute", min_bytes=1).plan(
            program, machine, int(0.85 * program.peak_bytes)
        )
        empty = {d.tensor for d in recomputing.decisions}
        gaps = [g for g in program.gaps(60_000) if g.tensor not in empty][:2]
        return Plan.of(program, (*recomputing.decisions, *(Swap(*gap) for gap in gaps)), "both", limit, machine.name)

    partitioner = Partitioner(0.97, planner=plan_both, mode="joint")
    torch.testing.assert_close(step(graphs(net, partitioner), net, x), expected)
    (graph,) = partitioner.graphs
    assert graph.plan is not None and len({type(d) for d in graph.plan.decisions}) == 2
    assert graph.peak_bytes <= graph.limit


@pytest.mark.parametrize("way", ["offload", pytest.param("reload", marks=pytest.mark.nightly)])
def test_a_wait_that_is_missing_shows_in_the_gradients(way: str) -> None:
    class Wrong(Partitioner):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            parts = super().__call__(*args, **kwargs)
            for gm in parts:
                for node in list(gm.graph.nodes):
                    if node.target == copies.WAIT and way in node.args[0].name:
                        node.replace_all_uses_with(node.args[0])
                        gm.graph.erase_node(node)
                gm.recompile()
            return parts

    net = blocks()
    x = torch.randn(4, 64, 32)
    gradients = step(graphs(net, Wrong(0.8, planner=SWAPS, mode="swap")), net, x)
    assert any(g.isnan().any() for g in gradients)


class Rotated(nn.Module):
    """Concatenates two halves that each depend on both, as in Llama's rotary embedding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.last = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.first(x).chunk(2, -1)
        return x + self.last(torch.cat((2 * a - b, 2 * b + a), -1))


def test_a_concatenated_tensor_is_swapped_as_one() -> None:
    torch.manual_seed(0)
    net = Net(*(Rotated(32) for _ in range(3)))
    x = torch.randn(4, 64, 32)

    def all_of_them(program: Program, machine: Machine, limit: int) -> Plan:
        swaps = (Swap(*gap) for gap in program.gaps(16_384))
        return Plan.of(program, tuple(swaps), "all", limit, machine.name)

    partitioner = Partitioner(0.99, planner=all_of_them, mode="swap")
    torch.testing.assert_close(step(graphs(net, partitioner), net, x), step(net, net, x))
    (graph,) = partitioner.graphs
    assert graph.program is not None and graph.plan is not None
    concatenations = (kernel for kernel in graph.program.kernels if kernel.phase == "forward" and "cat" in kernel.name)
    together = {t for kernel in concatenations for t in kernel.outputs}
    assert len(together) == 3
    assert len([d for d in graph.plan.decisions if isinstance(d, Swap) and d.tensor in together]) >= 2


def test_a_forward_without_its_backward_leaves_nothing_behind() -> None:
    net = blocks()
    x = torch.randn(4, 64, 32)
    partitioner = Partitioner(0.8, planner=SWAPS, mode="swap")
    model = graphs(net, partitioner)
    losses = [model(x), model(x)]
    (slab,) = (s for s in partitioner.slabs if s.copies)
    assert slab.bytes_in_use > 0 and len(slab.live) == 2  # two steps in flight
    expected = step(net, net, x)[1:]
    net.zero_grad()
    losses.pop().backward()
    torch.testing.assert_close([p.grad for p in net.parameters()], expected)
    losses.clear()
    gc.collect()
    assert not PENDING and slab.bytes_in_use == 0


def test_tensors_of_the_caller_are_not_swapped() -> None:
    """Covers the model's outputs, their gradients, and gradients of parameters."""
    net = blocks()
    x = torch.randn(4, 64, 32)
    seen: list[set[str]] = []

    def planner(program: Program, machine: Machine, limit: int) -> Plan:
        between = next(k for k, kernel in enumerate(program.kernels) if kernel.name == "marker")
        seen.append({program.tensors[g.tensor].kind for g in program.gaps() if g.after >= between})
        seen.append({program.tensors[g.tensor].kind for g in program.gaps() if g.after < between})
        raise FitError("seen")

    with pytest.raises(compiled.CompileError, match="seen"):
        graphs(net, Partitioner(0.7, planner=planner, mode="swap"))(x)
    assert "gradient" not in seen[0] and "activation" in seen[1]


def test_the_callers_batch_in_another_layout_is_not_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A convolution copies its input into another layout."""
    net = Net(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU())
    x = torch.randn(8, 3, 16, 16)
    seen: list[Joint] = []
    program = Joint.program
    monkeypatch.setattr(Joint, "program", lambda joint, *args: seen.append(joint) or program(joint, *args))
    with pytest.raises(compiled.CompileError):
        graphs(net, Partitioner(0.1, planner=SWAPS, mode="swap"))(x)
    (joint,) = seen
    batches = {name for name, nbytes in joint.storages.items() if nbytes == x.nbytes}
    assert batches and not batches & joint.movable and joint.movable


def test_unsupported_modes_and_waits_are_refused() -> None:
    with pytest.raises(RuntimeError, match="no target of a copy that is under way"):
        torch.ops.headroom.wait(torch.ones(2), torch.ones(2))
    with pytest.raises(ValueError, match=r"^mode: .* got 'offload'"):
        Partitioner(0.5, mode="offload")
    nothing = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    with pytest.raises(compiled.CompileError, match=r"^mode: 'joint' is for executor\.compiled\.compile"):
        Partitioner(0.5, mode="joint")(nothing, ())


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_both_directions_overlap_and_are_ordered_on_the_double_of_cuda(
    seed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A swap-out and a swap-in are in flight at once; nothing reads, or reuses, memory that a copy still needs."""
    double = GraphDouble(seed)
    double.install(monkeypatch)
    monkeypatch.setattr(copies, "copy_engines", cache(lambda device: CudaEngines(double.gpu)))
    slab = copies.HostSlab(2 * ALIGNMENT)
    device = torch.device("cpu")
    with double:
        a, b = torch.arange(64.0) + 1, torch.arange(64.0) + 2
        host = copies._offload(a, slab.key, 0)
        host = copies._wait(host, a)
        del a
        other = copies._offload(b, slab.key, ALIGNMENT)
        arriving = copies._reload(host, device)  # while b leaves
        streams = {event.stream for _, event in copies.PENDING.values()}
        other = copies._wait(other, b)
        restored = copies._wait(arriving, host)
        total = restored * 2
        del b, host, arriving
        back = copies._wait(copies._reload(other, device), other)
        total = total + back
        torch.cuda.synchronize()
    assert len(streams) == 2
    assert torch.equal(total, 2 * (torch.arange(64.0) + 1) + torch.arange(64.0) + 2)
    double.check()


def test_the_double_of_cuda_notices_a_missing_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    double = GraphDouble(0)
    double.install(monkeypatch)
    monkeypatch.setattr(copies, "copy_engines", cache(lambda device: CudaEngines(double.gpu)))
    slab = copies.HostSlab(ALIGNMENT)
    with double:
        a = torch.arange(64.0)
        host = copies._wait(copies._offload(a, slab.key, 0), a)
        arriving = copies._reload(host, torch.device("cpu"))
        arriving * 2
        copies._wait(arriving, host)
    assert double.found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_on_a_gpu(mode: str) -> None:
    """Results equal torch.compile's bit by bit; the allocator's peak is the predicted one and within the limit."""
    torch.manual_seed(0)
    net: nn.Module = Net(*(Block(512) for _ in range(4))).cuda()
    x = torch.randn(16, 256, 512, device="cuda")
    expected = step(torch.compile(net, dynamic=False), net, x)
    torch._dynamo.reset()
    model = compiled.compile(net, memory=0.7, planner="annealing", seconds=None, mode=mode)
    for _ in range(2):
        assert all(map(torch.equal, step(model, net, x), expected))
    (graph,) = compiled.report(model).graphs
    real = peak(model, net, x)
    page = str(compiled.report(model))
    print(page, f"real peak {real:,}, limit {graph.limit:,}, without {graph.without_bytes:,}")
    assert graph.plan is not None and graph.plan.decisions
    assert graph.peak_bytes == pytest.approx(real, rel=0.02) and real <= graph.limit
    assert (" swaps, " in page) == (mode == "swap")
