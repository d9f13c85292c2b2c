"""Tests PyTorch's own methods on chains computed by hand.

A layer of ``chain`` is a matrix product, which writes h_i, and an activation, which writes a_i:

    forward    m1 r1 m2 r2 … mn rn        m_i: a_(i-1) → h_i     r_i: h_i → a_i
    backward   loss, sn tn … s1 t1        s_i: h_i → ·           t_i: a_(i-1) → ·        (gradients have no bytes)

All h_i and a_i are retained for the backward pass except a_n, which the loss reads immediately.
"""

from __future__ import annotations

from dataclasses import replace

import agents
from agents.heuristics.layers import feature_maps
from agents.heuristics.memonger import splits
from agents.heuristics.pytorch import Checkpoint, Partitioner, layer_ends
from simulator import Kernel, Plan, Program, Recompute, Swap, Tensor, simulate
from tests import tiny
from tests.agents.planned import layers, planned
from tests.programs import BYTE_PER_NS as MACHINE


def chain(
    n: int, h: list[int] | int = 10, a: int = 10, flops: list[int] | None = None, times: list[int] | None = None
) -> Program:
    """Builds the chain: h_i is tensor 2 i, a_i is tensor 2 i + 1; a_0 (tensor 1) is the persistent, empty input."""
    sizes = h if isinstance(h, list) else [h] * n
    tensors = [Tensor("g", 0, "gradient"), Tensor("a0", 0, "input", True)]
    forward = []
    backward = [Kernel("loss", "reduce", "backward", (2 * n + 1,), (0,), 20)]
    for i in range(1, n + 1):
        tensors += [Tensor(f"h{i}", sizes[i - 1]), Tensor(f"a{i}", a)]
        forward.append(
            Kernel(
                f"m{i}",
                "matmul",
                "forward",
                (2 * i - 1,),
                (2 * i,),
                times[i - 1] if times else 10,
                flops=flops[i - 1] if flops else 0,
            )
        )
        forward.append(Kernel(f"r{i}", "activation", "forward", (2 * i,), (2 * i + 1,), 10))
    for i in range(n, 0, -1):
        backward.append(Kernel(f"s{i}", "activation", "backward", (2 * i, 0), (0,), 20))
        backward.append(Kernel(f"t{i}", "matmul", "backward", (2 * i - 1, 0), (0,), 20))
    return Program("chain", tuple(tensors), tuple(forward + backward))


def names(program: Program, plan: Plan) -> list[str]:
    return sorted(program.tensors[d.tensor].name for d in plan.decisions)


def test_nine_layers_by_hand() -> None:
    program = chain(9)
    assert program.peak_bytes == 180  # 18 tensors at r9
    # all: the cuts are a1 … a8. h1 … h8 are dropped; at r9 there are a1 … a8, h9, a9. m1 … m8 are recomputed.
    blocks = planned("checkpoint_all", program, MACHINE, 100)
    assert names(program, blocks) == [f"h{i}" for i in range(1, 9)]
    assert all(isinstance(d, Recompute) and d.keep for d in blocks.decisions)
    timeline = simulate(program, blocks, MACHINE, 100)
    assert (timeline.peak_bytes, timeline.iteration_ns - program.ideal_ns) == (100, 80)
    # sqrt: 3 segments, the cuts are a3 and a6, the last one is plain. At r9 there are a3, a6, and six of layers 7 to
    # 9. In the way back s6 makes m4 r4 m5 r5 m6 run, s3 makes m1 r1 m2 r2 m3 run: 100 ns; 5 tensors + a3 at s6.
    root = planned("checkpoint_sqrt", program, MACHINE, 80)
    assert names(program, root) == ["a1", "a2", "a4", "a5", "h1", "h2", "h3", "h4", "h5", "h6"]
    timeline = simulate(program, root, MACHINE, 80)
    assert (timeline.peak_bytes, timeline.iteration_ns - program.ideal_ns) == (80, 100)
    recomputed = [program.kernels[s.index].name for s in timeline.spans if s.kind == "recompute"]
    # Each segment is recomputed at once, in both simulated iterations.
    assert recomputed == 2 * ["m4", "r4", "m5", "r5", "m6", "m1", "r1", "m2", "r2", "m3"]


def test_layers_end_where_one_tensor_crosses() -> None:
    # A residual block: y = x + conv2(relu(conv1(x))), then a convolution. Within the block x crosses as well.
    kernels = (
        *layers(
            "forward",
            1,
            ("stem", "conv", (0,), (1,)),
            ("conv1", "conv", (1,), (2,)),
            ("relu", "activation", (2,), (3,)),
            ("conv2", "conv", (3,), (4,)),
            ("add", "elementwise", (4, 1), (5,)),
            ("pool", "pool", (5,), (6,)),
            ("head", "conv", (6,), (7,)),
        ),
        *layers(
            "backward",
            1,
            ("back", "conv", (1, 2, 3, 5, 6, 7), ()),
        ),
    )
    sizes = (0, 8, 8, 8, 8, 8, 2, 8)
    tensors = tuple(Tensor(f"t{i}", b, "activation", i == 0) for i, b in enumerate(sizes))
    program = Program("residual", tensors, kernels)
    assert [(s.kernel, set(s.crossing)) for s in splits(program, 1)] == [(0, {1}), (4, {5}), (5, {6}), (6, set())]
    assert [s.kernel for s in layer_ends(program, 1)] == [0, 5]  # the pooled tensor is smaller than the sum
    # Three layers, the last is plain: t2 and t3 are dropped, and t5 within its layer; t1 and t6 are kept.
    assert [m.tensor for m in Checkpoint("all", min_bytes=1).dropped(program)] == [2, 3, 5]
    # An output that dies in the forward pass ends no layer: it cannot be kept.
    unsaved = (*kernels[:7], Kernel("back", "conv", "backward", (1, 2, 3, 5, 7), (), 1))
    assert [s.kernel for s in layer_ends(replace(program, kernels=unsaved), 1)] == [0, 4]


def test_offload_all_by_hand() -> None:
    # a1 leaves after f2, a2 after f3 (a3 does not wait); compute waits for all four transfers of 40 ns:
    # f1 f2 | 20: a1 out | f3 60 | 70: a2 out | f4 110, b4 120 | 140: a2 in | b3 180 | 200: a1 in | b2 240, b1 280
    plan = agents.make("offload_all", min_bytes=20).plan(tiny.PROGRAM, tiny.MACHINE, tiny.LIMIT)
    assert plan.decisions == (Swap(tiny.A1, 1, 6, 5, sync=True), Swap(tiny.A2, 2, 5, 4, sync=True))
    timeline = simulate(tiny.PROGRAM, plan, tiny.MACHINE, tiny.LIMIT)
    assert timeline.iteration_ns == 280 == tiny.PROGRAM.ideal_ns + 4 * 40
    spans = {(s.kind, s.index): s.start_ns - 280 for s in timeline.spans if s.stream != "compute"}
    assert spans == {("swap_out", 1): 20, ("swap_out", 2): 70, ("swap_in", 2): 140, ("swap_in", 1): 200}


def test_each_backward_kernel_unpacks_its_own_copy() -> None:
    kernels = (
        *layers(
            "forward",
            10,
            ("f1", "matmul", (), (0,)),
            ("f2", "matmul", (0,), (1,)),
        ),
        *layers(
            "backward",
            10,
            ("b3", "reduce", (1,), (2,)),
            ("b2", "matmul", (0, 2), (2,)),
            ("other", "matmul", (2,), (2,)),
            ("b1", "matmul", (0, 2), (2,)),
            ("other", "matmul", (2,), (2,)),
        ),
        *layers(
            "backward",
            0,
            ("marker", "other", (0,), ()),
        ),
    )
    program = Program("twice", (Tensor("a", 40), Tensor("b", 4), Tensor("g", 4)), kernels)
    plan = agents.make("offload_all", min_bytes=20).plan(program, MACHINE, program.peak_bytes)
    assert plan.decisions == (Swap(0, 1, 3, 2, sync=True), Swap(0, 3, 5, 4, sync=True))  # none for the marker
    timeline = simulate(program, plan, MACHINE, program.peak_bytes)
    assert [s.kind for s in timeline.spans if s.stream != "compute"] == 2 * ["swap_out", "swap_in", "swap_in"]
    assert timeline.iteration_ns == program.ideal_ns + 3 * 40


# Feature maps: h1 h2 h3 a1 a2, 10 bytes each. The a_i follow from the h_i without a matrix product.
THREE = chain(3, flops=[100, 300, 200], times=[30, 10, 20])


def test_the_knapsack_saves_the_most_expensive_results() -> None:
    def dropped(budget: float, runtime: str = "flops") -> list[str]:
        return sorted(THREE.tensors[m.tensor].name for m in Partitioner(THREE, runtime, 1).dropped(budget))

    assert dropped(1) == []  # nothing is free to recompute
    assert dropped(0.99) == dropped(0.61) == ["a1", "a2"]  # the allowlist saves 30 of 50 bytes, whatever the budget
    assert dropped(0.6) == ["a1", "a2"]  # knapsack: three products of 0.2
    assert dropped(0.59) == dropped(0.4) == ["a1", "a2", "h1"]  # two: 300 + 200 flops
    assert dropped(0.39) == ["a1", "a2", "h1", "h3"]
    assert dropped(0.39, "profile") == ["a1", "a2", "h2", "h3"]  # 30 ns
    assert dropped(0.19) == dropped(0) == ["a1", "a2", "h1", "h2", "h3"]


def test_the_budget_is_tuned_to_the_limit() -> None:
    # 60: nothing. Without a1 and a2, r3 sees h1 h2 h3 a3: 40. Without h1 too: 30.
    for limit, dropped, extra in (
        (60, [], 0),
        (59, ["a1", "a2"], 20),
        (40, ["a1", "a2"], 20),
        (39, ["a1", "a2", "h1"], 50),
        (30, ["a1", "a2", "h1"], 50),
    ):
        plan = planned("activation_budget", THREE, MACHINE, limit)
        assert names(THREE, plan) == dropped
        assert simulate(THREE, plan, MACHINE, limit).iteration_ns == THREE.ideal_ns + extra  # m1 takes 30


def test_small_results_and_draws_are_banned() -> None:
    # A draw, a reduction to less than a quarter, and a norm behind an unsaved product are not free to recompute.
    kernels = (
        *layers(
            "forward",
            1,
            ("product", "matmul", (0,), (1,)),  # its output dies at "norm"
            ("norm", "norm", (1,), (2,)),
            ("relu", "activation", (2,), (3,)),
            ("drop", "dropout", (3,), (4,)),
            ("mean", "reduce", (4,), (5,)),
            ("double", "elementwise", (5,), (6,)),
            ("pool", "pool", (3,), (7,)),
        ),
        *layers(
            "backward",
            1,
            ("loss", "reduce", (6,), ()),
            ("back", "matmul", (2, 3, 4, 5, 6, 7), ()),
        ),
    )
    sizes = (0, 40, 40, 40, 40, 8, 32, 40)
    tensors = tuple(Tensor(f"t{i}", b, "activation", i == 0) for i, b in enumerate(sizes))
    program = Program("banned", tensors, kernels)
    assert [m.tensor for m in feature_maps(program, 1)] == [2, 3, 4, 5, 6, 7] and sum(sizes[2:]) == 200
    partitioner = Partitioner(program, "flops", 1)
    # Allowlist: relu and double may be recomputed; 128 of 200 bytes (0.64) are saved. Then pool as well: 88 (0.44).
    assert [m.tensor for m in partitioner.dropped(0.65)] == [3, 6]
    assert [m.tensor for m in partitioner.dropped(0.64)] == [3, 6, 7]
    # Items product (t1, 40 bytes, without which t2 cannot be made), drop (40) and mean (8), worth 1 each: all fit.
    assert [m.tensor for m in partitioner.dropped(0.44)] == [3, 6, 7]
    # 48 bytes hold mean and one of the equals, the first: drop may be recomputed.
    assert [m.tensor for m in partitioner.dropped(0.24)] == [3, 4, 6, 7]
