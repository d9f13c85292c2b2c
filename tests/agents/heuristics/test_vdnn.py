"""Tests vDNN on a small network computed by hand."""

from __future__ import annotations

import pytest

import agents
from agents.heuristics.vdnn import offloads, prefetches
from simulator import Gap, Kernel, Program, Swap, Tensor, simulate
from simulator.program import KernelKind
from simulator.timeline import Breakdown
from tests.programs import BYTE_PER_NS as MACHINE

PLENTY = 1000

# Every kernel takes 10 ns. A1 waits from k1 to k6, A2 from k2 to k5; A3 and A4 are used again at once.
#   kernel    k0    k1    k2    k3    k4    k5    k6    k7
#   layer     conv1 pool  conv2 act   act   conv2 pool  conv1
#   load      45    55    75    85    105   85    70    10
W, A1, A2, A3, A4, G3, G2, G1 = range(8)
SIZES = (5, 40, 10, 20, 10, 20, 10, 5)


def network(second: KernelKind = "conv") -> Program:
    """Builds the network above; ``second`` is the kind of conv2 and conv2_back."""
    return Program(
        "network",
        tuple(
            Tensor(f"t{i}", nbytes, "parameter" if i == W else "activation", i == W) for i, nbytes in enumerate(SIZES)
        ),
        (
            Kernel("conv1", "conv", "forward", (W,), (A1,), 10),
            Kernel("pool", "pool", "forward", (A1,), (A2,), 10),
            Kernel("conv2", second, "forward", (A2,), (A3,), 10),
            Kernel("act", "activation", "forward", (A3,), (A4,), 10),
            Kernel("act_back", "activation", "backward", (A3, A4), (G3,), 10),
            Kernel("conv2_back", second, "backward", (A2, G3), (G2,), 10),
            Kernel("pool_back", "pool", "backward", (A1, A2, G2), (G1,), 10),
            Kernel("conv1_back", "conv", "backward", (W, G1), (W,), 10),
        ),
    )


NETWORK = network()
X1 = Gap(A1, 1, 6)
X2 = Gap(A2, 2, 5)
# k4 looks for layers before it and finds conv2 (k5); then k5 finds pool (k6).
ALL = (Swap(*X1, prefetch=4, sync=True, copy=0), Swap(*X2, prefetch=3, sync=True, copy=1))


def plan(policy: str, limit: int, program: Program = NETWORK, **options: object) -> agents.Planner:
    return agents.make(f"vdnn_{policy}", min_bytes=1, **options).plan(program, MACHINE, limit)


def test_all_offloads_every_input_and_waits() -> None:
    assert NETWORK.live_bytes == (45, 55, 75, 85, 105, 85, 70, 10)
    planned = plan("all", PLENTY)
    assert planned.decisions == ALL and planned.planner == "vdnn_all"
    timeline = simulate(NETWORK, planned, MACHINE, PLENTY, iterations=1)
    work = [(s.kind, s.index, s.start_ns, s.end_ns) for s in timeline.spans]
    assert work == [
        ("kernel", 0, 0, 10),
        ("swap_out", A1, 10, 50),
        ("kernel", 1, 10, 20),  # beside pool, which reads it
        ("swap_out", A2, 50, 60),
        ("kernel", 2, 50, 60),  # conv2 waits for the input of pool
        ("kernel", 3, 60, 70),  # act need not wait: conv2 is no shorter than the copy of its input
        ("swap_in", A2, 70, 80),
        ("kernel", 4, 70, 80),
        ("swap_in", A1, 80, 120),
        ("kernel", 5, 80, 90),  # issued when conv2's backward pass starts
        ("kernel", 6, 120, 130),
        ("kernel", 7, 130, 140),
    ]
    assert timeline.breakdown == Breakdown(80, 0, 30, 30, 40)


def test_the_search_for_a_prefetch_ends_at_a_conv_layer() -> None:
    """X2 is too small to offload. k4's search for pool passes conv2 (k5) and stops there only if it is a CONV layer."""
    assert prefetches(NETWORK, [X1]) == {X1: 4}
    assert prefetches(network("norm"), [X1]) == {X1: 3}
    assert prefetches(network("norm"), [X1, X2]) == {X1: 4, X2: 3}  # one search, one layer


def test_the_last_consumer_offloads_and_in_place_layers_do_not() -> None:
    """Tensor x is read by a conv, then by a join; y is updated in place by its last layer."""
    x, y, z = range(3)
    kernels = (
        Kernel("stem", "conv", "forward", (), (x,), 10),
        Kernel("conv", "conv", "forward", (x,), (y,), 10),
        Kernel("join", "elementwise", "forward", (x, y), (z,), 10),
        Kernel("act", "activation", "forward", (y,), (y,), 10),
        Kernel("loss", "reduce", "forward", (z,), (), 10),
        Kernel("idle", "other", "backward", (), (), 10),
        Kernel("back", "conv", "backward", (x, y), (), 10),
    )
    program = Program("shared", tuple(Tensor(name, 10) for name in "xyz"), kernels)
    assert offloads(program, "all", 1) == [Gap(x, 2, 6)]
    assert offloads(program, "conv", 1) == []


@pytest.mark.parametrize(
    ("policy", "limit", "decisions", "iteration_ns"),
    [
        ("all", 94, ALL, 140),
        ("all", 105, ALL, 140),  # static policies ignore the limit
        ("conv", PLENTY, ALL[1:], 80),
        ("dyn", 105, (), 80),  # the peak: nothing need leave
        # conv: a2 leaves [20, 30); beside k4 (95) there is no room for it, so that k5 waits [50, 60). all: as above.
        ("dyn", 100, ALL[1:], 90),
        ("dyn", 94, ALL, 140),
    ],
)
def test_policies(policy: str, limit: int, decisions: tuple[Swap, ...], iteration_ns: int) -> None:
    planned = plan(policy, limit)
    assert planned.decisions == decisions
    assert simulate(NETWORK, planned, MACHINE, limit, iterations=1).iteration_ns == iteration_ns
