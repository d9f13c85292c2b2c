"""Tests SuperNeurons' rules on programs that are small enough to compute by hand."""

from __future__ import annotations

from itertools import product
from math import inf

import agents
from agents.heuristics.superneurons import evictable_gaps, layer_bytes, prefetch, segment_bytes, segments, tensor_cache
from experiments import figures
from simulator import Gap, Kernel, Program, Recompute, Swap, Tensor, simulate
from simulator.modes import MODES, Choice
from tests.agents.planned import planned
from tests.programs import BYTE_PER_NS as MACHINE


def network(layers: list[tuple[str, int]], large_gradients: bool = False) -> Program:
    """Builds a chain of layers (kind, output bytes); the backward kernel of a layer reads its input and output.

    Tensor i is the output of layer i - 1 (tensor 0 the input), kernel i is layer i's forward; kernel
    2 * len(layers) - 1 - i is its backward. Gradients have one byte, or the size of their tensors.
    """
    n = len(layers)
    tensors = [Tensor("x", 1, "input", True)] + [Tensor(kind, size) for kind, size in layers]
    kernels = [Kernel(kind, kind, "forward", (i,), (i + 1,), 10) for i, (kind, _) in enumerate(layers)]
    for i in reversed(range(n)):
        gradient = (len(tensors) - 1,) if i < n - 1 else ()
        tensors.append(Tensor(f"gradient{i}", tensors[i].nbytes if large_gradients else 1, "gradient"))
        kind = layers[i][0]
        reads = (i, i + 1, *gradient)
        kernels.append(Kernel(f"{kind}_backward", kind, "backward", reads, (len(tensors) - 1,), 10))
    return Program("network", tuple(tensors), tuple(kernels))


# Tensors: 1 conv, 2 norm, 3 activation, 4 conv, 5 activation, 6 matmul.
NET = network([("conv", 10), ("norm", 10), ("activation", 10), ("conv", 10), ("activation", 10), ("matmul", 10)])


def test_conv_outputs_are_swapped_and_cheap_ones_recomputed() -> None:
    # 5 is used by neighboring kernels (matmul and its backward), 6 is an FC layer's.
    conv = dict.fromkeys([Gap(1, 1, 10), Gap(4, 4, 7)], Choice.SWAPPED)
    cheap = dict.fromkeys([Gap(2, 2, 9), Gap(3, 3, 8)], Choice.RECOMPUTED)
    assert evictable_gaps(NET, "joint", 1) == conv | cheap
    assert evictable_gaps(NET, "swap", 1) == conv
    assert evictable_gaps(NET, "recompute", 1) == cheap
    assert evictable_gaps(NET, "joint", 11) == {}


def test_least_recently_used_first_and_only_under_pressure() -> None:
    kinds = evictable_gaps(NET, min_bytes=1)
    conv1 = Gap(1, 1, 10)
    norm = Gap(2, 2, 9)
    act = Gap(3, 3, 8)
    conv2 = Gap(4, 4, 7)
    assert NET.live_bytes[:8] == (11, 21, 31, 41, 51, 61, 62, 53)
    assert tensor_cache(NET, kinds, 62) == []
    assert tensor_cache(NET, kinds, 52) == [conv1]  # at kernel 5
    assert tensor_cache(NET, kinds, 51) == [conv1, norm]  # 52 at kernel 6
    # Kernel 3 evicts 1, 4 evicts 2, 5 evicts 3 (4 and 5 are younger or locked), 6 evicts 4.
    assert tensor_cache(NET, kinds, 31) == [conv1, norm, act, conv2]
    assert tensor_cache(NET, kinds, 52, forced=[act]) == [act]


def test_speed_centric_where_the_segment_fits_in_a_layer() -> None:
    assert segments(NET)[1:7] == [1, 1, 1, 2, 2, 3]
    assert max(layer_bytes(NET, k) for k in range(12)) == 22  # l_peak
    # Outputs of 10 each; kernels 8 and 9 touch 22 bytes, 10 and 20 of which are among them.
    assert segment_bytes(NET, [Gap(2, 2, 9)]) == 22
    assert segment_bytes(NET, [Gap(2, 2, 9), Gap(3, 3, 8)]) == 32
    assert prefetch(NET, Gap(1, 1, 10)) == 7  # the start of conv_backward, kernel 8
    assert prefetch(NET, Gap(4, 4, 7)) == -1  # no backward conv before it
    planner = agents.make("superneurons", min_bytes=1, recompute="cost")
    assert planner.plan(NET, MACHINE, 51).decisions == (Swap(1, 1, 10, 7), Recompute(2, 2, 9, keep=True))
    rows = planned("superneurons", NET, MACHINE, 51, mode="recompute", recompute="cost").decisions
    assert rows == (Recompute(2, 2, 9, keep=False), Recompute(3, 3, 8, keep=False))


def recomputed(program: Program, strategy: str) -> tuple[int, int]:
    """Returns the number of recomputed kernels per iteration if every cheap output is dropped, and the peak."""
    planner = agents.make("superneurons", mode="recompute", recompute=strategy, always=True, min_bytes=1)
    timeline = simulate(program, planner.plan(program, MACHINE, program.peak_bytes), MACHINE, program.peak_bytes)
    extra = [s for s in timeline.spans if s.kind == "recompute" and s.start_ns >= timeline.last_start_ns]
    return len(extra), timeline.peak_bytes


# Tensors 2 to 5 are a segment of four; they are asked for by kernels 11, 10, 9 and 8.
SEGMENT = network([(kind, 10) for kind in ("conv", "norm", "activation", "pool", "activation", "conv", "matmul")])


def test_speed_and_memory_centric_recomputation_by_hand() -> None:
    # Speed: layers 1 to 4 for kernel 8, and all are there: 40 bytes, beside the input (1), the CONV outputs
    # 1 and 6 (20) and two gradients (2).
    assert recomputed(SEGMENT, "speed") == (4, 63)
    # Memory: layers 1 to 4 for kernel 8, 1 to 3 for kernel 9, 1 and 2, 1. Two outputs at a time (20) beside 1 and 6
    # for kernel 8, or 1 and 5 for kernel 9 (20), the input (1) and a gradient (1).
    assert recomputed(SEGMENT, "memory") == (4 + 3 + 2 + 1, 42)
    # 52 bytes, the four and kernel 8's 12 others, are more than the 22 that a layer takes.
    assert recomputed(SEGMENT, "cost") == recomputed(SEGMENT, "memory")


def test_table_1_alexnet() -> None:
    """AlexNet needs 14 (speed-centric), 23 (memory-centric) and 17 (cost-aware) extra recomputations, as in Table 1."""
    blocks = [  # layers, and C * H * W of each one's output (section 4.1.1)
        ("conv activation lrn", 96 * 55 * 55),
        ("pool", 96 * 27 * 27),
        ("conv activation lrn", 256 * 27 * 27),
        ("pool", 256 * 13 * 13),
        ("conv activation conv activation", 384 * 13 * 13),
        ("conv activation", 256 * 13 * 13),
        ("pool", 256 * 6 * 6),
        ("matmul activation dropout matmul activation dropout", 4096),
        ("matmul other", 1000),
    ]
    layers = [(kind, size * 200 * 4) for kinds, size in blocks for kind in kinds.split()]  # a batch of 200, float32
    alexnet = network(layers, large_gradients=True)
    assert len(layers) == 23
    # "l_peak at the backward LRN1", 886 MB: four tensors of CONV1's size, 221.56 MB.
    assert max(layer_bytes(alexnet, k) for k in range(46)) == layer_bytes(alexnet, 45 - 2) == 4 * layers[0][1]
    assert round(4 * layers[0][1] / 2**20, 2) == 886.23
    extra = {strategy: recomputed(alexnet, strategy)[0] for strategy in ("speed", "memory", "cost")}
    assert extra == {"speed": 14, "memory": 23, "cost": 17}  # the first segment alone is too large to keep


def test_the_default_is_the_fastest_of_all_settings() -> None:
    def iteration(limit: int, **options: object) -> float:
        plan = figures.attempt(agents.make("superneurons", min_bytes=1, **options), SEGMENT, MACHINE, limit)
        return inf if plan is None else simulate(SEGMENT, plan, MACHINE, limit).iteration_ns

    settings = list(product(MODES, ("cost", "speed", "memory"), (False, True), (False, True)))
    for limit in range(40, SEGMENT.peak_bytes + 1):
        explicit = [iteration(limit, mode=m, recompute=r, always=a, early=e) for m, r, a, e in settings]
        assert iteration(limit) == min(explicit)
