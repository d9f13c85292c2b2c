"""Tests figures of the SmartPool paper, on cases small enough to compute by hand."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from experiments import figures
from experiments.figures import smartpool, smartpool_footprints as footprints, smartpool_loads as loads
from simulator import Kernel, Machine, Plan, Program, Swap, Tensor, simulate
from simulator.pool import program_lifetimes, smartpool as pool

MB = 2**20
# A megabyte takes 1,000,000 ns in each direction.
GPU = Machine.load("gtx1080ti")
MACHINE = replace(GPU, h2d_bytes_per_s=1000 * MB, d2h_bytes_per_s=1000 * MB, d2h_latency_ns=0, h2d_latency_ns=0)


def chain(durations: tuple[int, ...], last_ms: int = 10) -> Program:
    """Returns a chain of layers of 10 MB, forward and backward, with durations in ms.

    Forward i makes activation i from activation i - 1, backward i reads activation i; the load at forward i is i + 1
    activations.
    """
    n = len(durations)
    tensors = tuple(Tensor(f"a{i}", 10 * MB) for i in range(n))
    forward = [
        Kernel(f"f{i}", "conv", "forward", (i - 1,) if i else (), (i,), ms * 1_000_000)
        for i, ms in enumerate(durations)
    ]
    backward = [Kernel(f"b{i}", "conv", "backward", (i,), (), last_ms * 1_000_000) for i in reversed(range(n))]
    return Program("chain", tensors, (*forward, *backward))


def test_as_many_bytes_are_swapped_as_in_the_paper() -> None:
    program = chain((10,) * 30)  # of 300 MB; VGG16's 647 MB less 500 MB are 147 MB
    assert program.peak_bytes == 300 * MB
    assert smartpool.our_limit(program, "vgg16", 500) == 153 * MB
    assert smartpool.our_limit(program, "vgg16", 647) == program.peak_bytes
    with pytest.raises(ValueError, match="the paper's load of 647 MB is below the limit of 648 MB"):
        smartpool.our_limit(program, "vgg16", 648)


def test_a_recorded_iteration() -> None:
    # A 4x4 layer without bias, y = w x, batch 4, with the sum as loss: 64 bytes per tensor, 4 for the loss.
    with torch.device("meta"):
        model = nn.Linear(4, 4, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batch = torch.empty(4, 4), torch.empty(4)
    before, lines, starts = loads.record((model, lambda y, _: y.sum(), optimizer, batch), 4)
    assert before == 64 and len(starts) == 4 and starts[0] == 0
    parts = [lines[a:b] for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]
    first, second, third, fourth = (loads.signature(part) for part in parts)
    assert second == third == fourth != first
    change = [sum({"malloc": b, "free": -b}.get(kind, 0) for kind, b, _ in part) for part in (first, second)]
    assert change == [64, 0]  # the momentum persists
    # The batch (0) and labels (1), the product (2) of batch and weight (3), the loss (4), which frees the product.
    assert second[:10] == [
        ("malloc", 64, 0),
        ("malloc", 16, 1),
        ("malloc", 64, 2),
        ("read", 64, 0),
        ("read", 64, 3),
        ("write", 64, 2),
        ("malloc", 4, 4),
        ("read", 64, 2),
        ("write", 4, 4),
        ("free", 64, 2),
    ]
    # The optimizer: momentum (7) times 0.9, plus the gradient (6); then the weight. All others are freed.
    assert second[19:] == [
        ("read", 64, 7),
        ("write", 64, 7),
        ("read", 64, 7),
        ("read", 64, 6),
        ("write", 64, 7),
        ("read", 64, 3),
        ("read", 64, 7),
        ("write", 64, 3),
        ("free", 64, 6),
        ("free", 64, 0),
        ("free", 16, 1),
    ]


def test_load_min() -> None:
    # Peak 40 MB at f3, which uses a2 and a3: a0 and a1 are swapped out from the end of f1 and f2 to b0 and b1. So f1,
    # f2, f3 and b3 have two activations each: a2 is not a candidate and stays until b2.
    program = chain((10, 10, 10, 10))
    load, timeline = smartpool.load_min(program, MACHINE)
    assert load.tolist() == [n * 10 * MB for n in (1, 2, 2, 2, 2, 1, 1, 1)]
    # Both are swapped out and in, 10 ms per direction, without overlap.
    assert timeline.iteration_ns - program.ideal_ns == 40_000_000


def test_the_lowest_load_and_the_slowest_link_without_overhead() -> None:
    # Swapping out 10 MB takes 10 ms, as long as a layer: a(i - 2) is swapped out during f(i). So 30 MB are enough for
    # the forward pass. In the backward pass, a(i - 1) is swapped in during b(i), in place of a(i + 1).
    program = chain((10,) * 8)
    least = smartpool.floor_limit(program, MACHINE)
    lowest = smartpool.lowest_free_limit(program, MACHINE, 3, least)  # among 80, 60, 40 and 20 MB
    assert least <= lowest
    assert smartpool.is_free(program, MACHINE, lowest) and not smartpool.is_free(program, MACHINE, 20 * MB)
    slow = replace(MACHINE, h2d_bytes_per_s=500 * MB, d2h_bytes_per_s=500 * MB)
    assert smartpool.lowest_free_limit(program, slow, 3, 0) > lowest and smartpool.floor_limit(program, slow) > least
    factor = smartpool.slowest_link(program, MACHINE, lowest)
    assert factor is not None and 0.4 < factor < 1.03  # 1, to a bisection's step of 20 ** (1 / 2 ** 7)
    assert smartpool.slowest_link(program, MACHINE, 20 * MB) is None


@pytest.mark.parametrize(
    ("durations", "swap", "limit", "expected"),
    [
        # Layers of 10, 10, 10, 30 and 10 ms. Under 40 MB f4 waits for memory. Only a2 is chosen, last read by f3 at 60
        # ms: its swap-out from 60 to 70 ms delays f4 by 10 ms. The stream was idle before and could have swapped out a0
        # and a1: 20 ms of transfers, but the wait is only 10 ms.
        ((10, 10, 10, 30, 10), Swap(2, 3, 7), 40, (10_000_000, 10_000_000)),
        ((10, 10, 10, 30, 10), Swap(0, 1, 9), 40, (0, 0)),  # with a0 instead, no kernel waits
        # With 5 ms per layer, no transfer of 10 ms fits before f2 waits at 10 ms, when a0 becomes a candidate.
        ((5, 5, 5), Swap(0, 1, 5), 20, (10_000_000, 0)),
    ],
)
def test_what_is_avoidable_the_papers_way(
    durations: tuple[int, ...], swap: Swap, limit: int, expected: tuple[int, int]
) -> None:
    program = chain(durations)
    plan = Plan((swap,))
    timeline = simulate(program, plan, MACHINE, limit * MB)
    assert timeline.iteration_ns - program.ideal_ns == expected[0]
    assert smartpool.avoidable_wait(timeline, program, plan, MACHINE) == expected


@pytest.mark.parametrize("name", loads.PAPER)
def test_workloads_are_those_of_the_table(name: str) -> None:
    config = figures.workload(name)
    paper = loads.PAPER[name]
    assert config["paper_peak_mb"] == paper["load"] and config["batch_size"] == 100
    measured = figures.measured_ms(config, GPU)
    speedups = paper["smartpool_speedup"], paper["cnmem_speedup"]
    assert measured == pytest.approx(paper["ms"] / max(speedups), rel=0.025)
    assert figures.measured_ms(config, Machine.load("k40c")) is None


def test_what_singa_keeps() -> None:
    # Weights of 8 x 3 x 3 x 3 floats, 864 bytes, and 16/9 of that transformed. The others are 1x1 or have stride 2.
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 3, stride=2), nn.Linear(8, 2))
    gradients, filters = loads.kept_by_singa(model)
    assert [t.nbytes for t in filters] == [1536]
    assert sum(t.nbytes for t in gradients) == 4 * sum(p.numel() for p in model.parameters())
    assert all(t.persistent for t in gradients + filters)


def test_smallest_footprints(program: Program) -> None:
    pool_bytes = pool.pack(program_lifetimes(program).intervals, 512).footprint
    search = {"overheads": [0.0, 0.1, 10.0], "pool": "smartpool", "seconds": 1.0, "steps": 4, "evaluations": 5}
    rows = footprints.smallest_footprints(program, GPU, search)
    assert [row["at_most"] for row in rows] == search["overheads"]
    for row in rows:
        assert row["overhead"] <= max(row["at_most"], footprints.ZERO) and row["load"] <= row["footprint"] <= pool_bytes
    at_0, at_10, at_1000 = (row["footprint"] for row in rows)
    assert at_1000 < at_10 <= at_0 < pool_bytes
    assert at_1000 <= pool_bytes / 2  # only the activations that a kernel uses must stay
    config = {**figures.workload("vgg11"), "iteration_ms": {"gtx1080ti": 80}}
    assert 40_000_000 < footprints.with_batch(config, 50, GPU).ideal_ns < 60_000_000  # proportional except for launches
