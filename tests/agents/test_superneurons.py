"""SuperNeurons' rules on programs small enough to follow by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

import agents
from agents.planner import RECOMPUTE, SWAP
from agents.superneurons import layer_bytes, leaving, prefetch, segment_bytes, segments, tensor_cache
from simulator import Gap, Kernel, Machine, Program, Recompute, Swap, Tensor, simulate

MACHINE = Machine("byte per ns", 10**6, 10**9, 10**9, copy_latency_ns=0)


def network(layers: list[tuple[str, int]]) -> Program:
    """A chain of layers (kind, bytes of output); the backward kernel of a layer reads its input and output.

    Tensor i is the output of layer i - 1 (tensor 0 the input), kernel i is layer i's forward; kernel
    2 * len(layers) - 1 - i is its backward. Gradients are tensors of one byte.
    """
    n = len(layers)
    tensors = [Tensor("x", 1, "input", True)] + [Tensor(kind, size) for kind, size in layers]
    kernels = [Kernel(kind, kind, "forward", (i,), (i + 1,), 10) for i, (kind, _) in enumerate(layers)]  # type: ignore[arg-type]
    for i in reversed(range(n)):
        gradient = (len(tensors) - 1,) if i < n - 1 else ()
        tensors.append(Tensor(f"gradient{i}", 1, "gradient"))
        kind = layers[i][0]
        reads = (i, i + 1, *gradient)
        kernels.append(Kernel(f"{kind}_backward", kind, "backward", reads, (len(tensors) - 1,), 10))  # type: ignore[arg-type]
    return Program("network", tuple(tensors), tuple(kernels))


# Tensors: 1 conv, 2 norm, 3 activation, 4 conv, 5 activation, 6 matmul.
NET = network([("conv", 10), ("norm", 10), ("activation", 10), ("conv", 10), ("activation", 10), ("matmul", 10)])


def test_conv_outputs_are_swapped_and_cheap_ones_recomputed() -> None:
    # 5 is used by neighbouring kernels (matmul and its backward), 6 is an FC layer's.
    conv = dict.fromkeys([Gap(1, 1, 10), Gap(4, 4, 7)], SWAP)
    cheap = dict.fromkeys([Gap(2, 2, 9), Gap(3, 3, 8)], RECOMPUTE)
    assert leaving(NET, "joint", 1) == conv | cheap
    assert leaving(NET, "swap", 1) == conv
    assert leaving(NET, "recompute", 1) == cheap
    assert leaving(NET, "joint", 11) == {}


def test_a_layer_that_cannot_run_twice_is_not_dropped() -> None:
    once = replace(NET.kernels[2], kind="dropout", recomputable=False)
    ways = leaving(replace(NET, kernels=(*NET.kernels[:2], once, *NET.kernels[3:])), min_bytes=1)
    assert {g.tensor for g in ways} == {1, 2, 4}


def test_least_recently_used_first_and_only_under_pressure() -> None:
    ways = leaving(NET, min_bytes=1)
    one, two, three, four = Gap(1, 1, 10), Gap(2, 2, 9), Gap(3, 3, 8), Gap(4, 4, 7)
    assert NET.loads[:8] == (11, 21, 31, 41, 51, 61, 62, 53)
    assert tensor_cache(NET, ways, 62) == []
    assert tensor_cache(NET, ways, 52) == [one]  # at kernel 5
    assert tensor_cache(NET, ways, 51) == [one, two]  # 52 at kernel 6
    # Kernel 3 sends 1 away, 4 sends 2, 5 sends 3 (4 and 5 are younger or locked), 6 sends 4.
    assert tensor_cache(NET, ways, 31) == [one, two, three, four]
    assert tensor_cache(NET, ways, 52, first=[three]) == [three]


def test_recency_is_that_of_the_last_use() -> None:
    # 0 is born before 1 and used after it, so that 1 leaves.
    kernels = (
        Kernel("a", "conv", "forward", (), (0,), 1),
        Kernel("b", "conv", "forward", (), (1,), 1),
        Kernel("c", "pool", "forward", (0,), (), 1),
        Kernel("peak", "other", "forward", (), (), 1, workspace=5),
        Kernel("use", "other", "backward", (0, 1), (), 1),
    )
    program = Program("reuse", (Tensor("0", 10), Tensor("1", 10)), kernels)
    assert agents.make("superneurons", min_bytes=1).plan(program, MACHINE, 20).decisions == (Swap(1, 1, 4),)


def test_prefetch_is_issued_at_the_conv_layer_before() -> None:
    assert prefetch(NET, Gap(1, 1, 10)) == 7  # the start of conv_backward, kernel 8
    assert prefetch(NET, Gap(4, 4, 7)) == -1  # no backward conv before it


def test_speed_centric_where_the_segment_fits_in_a_layer() -> None:
    assert segments(NET)[1:7] == [1, 1, 1, 2, 2, 3]
    assert max(layer_bytes(NET, k) for k in range(12)) == 22  # l_peak
    # Outputs of 10 each; kernels 8 and 9 touch 22 bytes, 10 and 20 of which are among them.
    assert segment_bytes(NET, [Gap(2, 2, 9)]) == 22
    assert segment_bytes(NET, [Gap(2, 2, 9), Gap(3, 3, 8)]) == 32
    planner = agents.make("superneurons", min_bytes=1)
    assert planner.plan(NET, MACHINE, 51).decisions == (Swap(1, 1, 10, 7), Recompute(2, 2, 9, keep=True))
    both = agents.make("superneurons", min_bytes=1, mode="recompute").plan(NET, MACHINE, 51).decisions
    assert both == (Recompute(2, 2, 9, keep=False), Recompute(3, 3, 8, keep=False))


def test_every_cheap_output_is_dropped_on_request() -> None:
    plan = agents.make("superneurons", min_bytes=1, always=True).plan(NET, MACHINE, NET.peak_bytes)
    assert {(type(d), d.tensor) for d in plan.decisions} == {(Recompute, 2), (Recompute, 3)}


def test_infeasible_says_how_far_it_can_go() -> None:
    # Kernel 8 holds 1, 2 and 3 while it recovers 3, beside 4 and two gradients.
    with pytest.raises(agents.Infeasible, match="smallest limit it can reach is 42 bytes"):
        agents.make("superneurons", min_bytes=1).plan(NET, MACHINE, 41)
    assert simulate(NET, agents.make("superneurons", min_bytes=1).plan(NET, MACHINE, 42), MACHINE, 42)


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match="mode: expected"):
        agents.make("superneurons", mode="both")
