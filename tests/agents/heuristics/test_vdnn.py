"""Tests vDNN on a small network computed by hand."""

from __future__ import annotations

import pytest

import agents
from agents.heuristics.vdnn import offloads, prefetches
from simulator import Gap, Program, Swap, Tensor, simulate
from simulator.program import KernelKind
from simulator.timeline import Breakdown
from tests.agents.planned import layers, planned
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
            *layers(
                "forward",
                10,
                ("conv1", "conv", (W,), (A1,)),
                ("pool", "pool", (A1,), (A2,)),
                ("conv2", second, (A2,), (A3,)),
                ("act", "activation", (A3,), (A4,)),
            ),
            *layers(
                "backward",
                10,
                ("act_back", "activation", (A3, A4), (G3,)),
                ("conv2_back", second, (A2, G3), (G2,)),
                ("pool_back", "pool", (A1, A2, G2), (G1,)),
                ("conv1_back", "conv", (W, G1), (W,)),
            ),
        ),
    )


NETWORK = network()
X1 = Gap(A1, 1, 6)
X2 = Gap(A2, 2, 5)
# k4 looks for layers before it and finds conv2 (k5); then k5 finds pool (k6).
ALL = (Swap(*X1, prefetch=4, sync=True, copy=0), Swap(*X2, prefetch=3, sync=True, copy=1))


def plan(policy: str, limit: int, program: Program = NETWORK, **options: object) -> agents.Planner:
    return planned(f"vdnn_{policy}", program, MACHINE, limit, **options)


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
        *layers(
            "forward",
            10,
            ("stem", "conv", (), (x,)),
            ("conv", "conv", (x,), (y,)),
            ("join", "elementwise", (x, y), (z,)),
            ("act", "activation", (y,), (y,)),
            ("loss", "reduce", (z,), ()),
        ),
        *layers(
            "backward",
            10,
            ("idle", "other", (), ()),
            ("back", "conv", (x, y), ()),
        ),
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
