"""The figures of the SmartPool paper: what they compute, on cases small enough to do by hand, and what they say."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from experiments import figures
from experiments.figures import (
    smartpool,
    smartpool_fig2 as fig2,
    smartpool_fig8 as fig8,
    smartpool_fig9 as fig9,
    smartpool_fig11 as fig11,
    smartpool_optimality as optimality,
    smartpool_table2 as table2,
)
from simulator import Kernel, Machine, Plan, Program, Swap, Tensor, simulate

MB = 2**20
# A megabyte takes 1,000,000 ns each way.
MACHINE = replace(Machine.load("gtx1080ti"), h2d_bytes_per_s=1000 * MB, d2h_bytes_per_s=1000 * MB, copy_latency_ns=0)


def chain(durations: tuple[int, ...], last_ms: int = 10) -> Program:
    """Layers of 10 MB, forward and back, durations in ms. Of n layers, forward i makes activation i of activation
    i - 1, backward i reads activation i; the load is i + 1 activations at forward i."""
    n = len(durations)
    tensors = tuple(Tensor(f"a{i}", 10 * MB) for i in range(n))
    forward = [
        Kernel(f"f{i}", "conv", "forward", (i - 1,) if i else (), (i,), ms * 1_000_000)
        for i, ms in enumerate(durations)
    ]
    backward = [Kernel(f"b{i}", "conv", "backward", (i,), (), last_ms * 1_000_000) for i in reversed(range(n))]
    return Program("chain", tensors, (*forward, *backward))


def test_as_much_leaves_as_in_the_paper() -> None:
    program = chain((10,) * 30)  # of 300 MB; VGG16's 647 MB less 500 MB are 147 MB
    assert program.peak_bytes == 300 * MB
    assert smartpool.our_limit(program, "vgg16", 500) == 153 * MB
    assert smartpool.our_limit(program, "vgg16", 647) == program.peak_bytes
    with pytest.raises(ValueError, match="the paper's load is 647 MB, below a limit of 648 MB"):
        smartpool.our_limit(program, "vgg16", 648)


def test_waits() -> None:
    # Under 20 MB f2 waits while a0 leaves, from 20 ms, when f1 has read it, to 30 ms; f3 while a1 leaves, from 40 to 50
    # ms. On the way back a1 comes into the room of a3 while b2 runs, a0 into that of a2 while b1 does: no wait.
    program = chain((10, 10, 10, 10))
    swaps = Plan((Swap(0, 1, 7), Swap(1, 2, 6)))
    timeline = simulate(program, swaps, MACHINE, 20 * MB)
    found = smartpool.waits(timeline, program)
    assert found == [0, 0, 10_000_000, 10_000_000, 0, 0, 0, 0]
    assert sum(found) == timeline.iteration_ns - program.ideal_ns
    assert [s.index for s in smartpool.last_kernels(timeline, program)] == list(range(8))


# ------------------------------------------------------------------------------------------------ Fig. 2


def test_a_recorded_iteration() -> None:
    # A layer without bias, y = w x of 4 to 4 numbers for a batch of 4, its loss the sum: 64 bytes each, 4 the loss.
    with torch.device("meta"):
        model = nn.Linear(4, 4, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        batch = torch.empty(4, 4), torch.empty(4)
    before, lines, starts = fig2.record((model, lambda y, _: y.sum(), optimizer, batch), 4)
    assert before == 64 and len(starts) == 4 and starts[0] == 0
    parts = [lines[a:b] for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]
    first, second, third, fourth = (fig2.signature(part) for part in parts)
    assert second == third == fourth != first
    change = [sum({"malloc": b, "free": -b}.get(kind, 0) for kind, b, _ in part) for part in (first, second)]
    assert change == [64, 0]  # the momentum stays
    # The batch (0) and labels (1), the product (2) of batch and weight (3), the loss (4), for which the product dies.
    assert second[:10] == [
        ("malloc", 64, 0), ("malloc", 16, 1), ("malloc", 64, 2), ("read", 64, 0), ("read", 64, 3), ("write", 64, 2),
        ("malloc", 4, 4), ("read", 64, 2), ("write", 4, 4), ("free", 64, 2),
    ]  # fmt: skip
    # The optimizer: momentum (7) times 0.9, plus the gradient (6); then the weight. All but these two die.
    assert second[19:] == [
        ("read", 64, 7), ("write", 64, 7), ("read", 64, 7), ("read", 64, 6), ("write", 64, 7), ("read", 64, 3),
        ("read", 64, 7), ("write", 64, 3), ("free", 64, 6), ("free", 64, 0), ("free", 16, 1),
    ]  # fmt: skip


def test_signatures_do_not_depend_on_numbers() -> None:
    lines = [fig2.Operation("malloc", 7, 3), fig2.Operation("read", 5, 2), fig2.Operation("free", 7, 3)]
    assert fig2.signature(lines) == [("malloc", 3, 0), ("read", 2, 1), ("free", 3, 0)]
    other = [line._replace(tensor=line.tensor + 10) for line in lines]
    assert fig2.signature(other) == fig2.signature(lines)
    assert fig2.signature(lines[1:]) != fig2.signature(lines[:2])


# ------------------------------------------------------------------------------------------------ Fig. 8


def test_load_min() -> None:
    # Peak 40 MB at f3, which uses a2 and a3: a0 and a1 are away, from the end of f1 and f2 to b0 and b1. So f1, f2 and
    # f3 have two activations, as has b3: a2 is not a candidate, so that it waits there for b2.
    program = chain((10, 10, 10, 10))
    load, timeline = fig8.load_min(program, MACHINE)
    assert load.tolist() == [n * 10 * MB for n in (1, 2, 2, 2, 2, 1, 1, 1)]
    # Both leave and come back, 10 ms each way, while nothing runs.
    assert timeline.iteration_ns - program.ideal_ns == 40_000_000


def test_gradients_alive() -> None:
    tensors = (Tensor("a", 3), Tensor("g", 5, "gradient"), Tensor("h", 7, "gradient"), Tensor("unused", 9, "gradient"))
    kernels = (
        Kernel("x", "other", "forward", (), (0,), 1),
        Kernel("y", "other", "backward", (0,), (1,), 1),
        Kernel("z", "other", "backward", (1,), (2,), 1),
    )
    program = Program("p", tensors, kernels)
    assert [fig8.gradient_bytes(program, k) for k in range(3)] == [0, 5, 12]


# ------------------------------------------------------------------------------------------------ Fig. 9


def scored(scores: dict[str, list[float]], floor: list[float], seeds: list[list[float]]) -> list[dict[str, Any]]:
    shared = {"network": "vgg16", "limits": [647, 447, 400, 280], "ours": [500 * MB, 300 * MB, 253 * MB, 133 * MB]}
    shared |= {"load": 500 * MB}
    found = {f"autoswap_{name}": line for name, line in scores.items()}
    forward = {name: line[-1] / 2 for name, line in found.items()}
    first = {**shared, "seed": None, "overheads": {**found, "floor": floor}, "forward": forward}
    return [first, *({**shared, "seed": i, "overheads": {"bo": line}} for i, line in enumerate(seeds))]


def test_free_of_overhead_from_the_top() -> None:
    lines = fig9.Lines(scored(dict.fromkeys(("aoa", "doa", "wdoa", "swdoa"), [0.0] * 4), [0.0] * 4, [[0.0] * 4]))
    assert lines.free(np.zeros(4)) == 280
    assert lines.free(np.array([0, 0.1, 0, 0])) == 647
    assert np.isnan(lines.free(np.array([0.1, 0, 0, 0])))


def test_fig9_runs_the_planners(monkeypatch: pytest.MonkeyPatch) -> None:
    program = chain((10,) * 12)
    monkeypatch.setattr(figures, "program", lambda name, machine: program)
    task = {"network": "vgg16", "limits": [647, 607]}
    found = fig9.run({**task, "seed": None}, MACHINE)
    assert found["ours"] == [120 * MB, 80 * MB]
    assert set(found["overheads"]) == {*fig9.SCORES, "floor"} and found["overheads"]["floor"][0] == 0
    bo = fig9.run({**task, "seed": 1}, MACHINE)["overheads"]["bo"]
    for i, best in enumerate(bo):
        assert found["overheads"]["floor"][i] <= best <= min(found["overheads"][name][i] for name in fig9.SCORES)


# ---------------------------------------------------------------------------------------------- Table II


@pytest.fixture
def quick_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """One score: here it is as good as Bayesian optimisation, and makes no process to fit."""
    monkeypatch.setattr(table2, "PLANNER", "autoswap_wdoa")


def test_lowest_loads_without_overhead(quick_planner: None) -> None:
    # An activation of 10 MB leaves in 10 ms, as long as a layer takes: while f(i) runs, a(i - 2) leaves. So 30 MB are
    # enough for the forward pass; backward the same: while b(i) runs, a(i - 1) comes back into the room of a(i + 1).
    program = chain((10,) * 8)
    least = table2.lowest_floor(program, MACHINE)
    lowest = table2.lowest_free(program, MACHINE, 3, least)  # of 80, 60, 40 and 20 MB
    assert least <= lowest
    assert table2.is_free(program, MACHINE, lowest) and not table2.is_free(program, MACHINE, 20 * MB)
    slow = replace(MACHINE, h2d_bytes_per_s=500 * MB, d2h_bytes_per_s=500 * MB)
    assert table2.lowest_free(program, slow, 3, 0) > lowest
    assert table2.lowest_floor(program, slow) > least


def test_the_slowest_link(quick_planner: None) -> None:
    program = chain((10,) * 8)
    limit = table2.lowest_free(program, MACHINE, 3, 0)
    factor = table2.slowest_link(program, MACHINE, limit)
    assert factor is not None and 0.4 < factor < 1.03  # 1, to a bisection's step of 20 ** (1 / 2 ** 7)
    assert table2.slowest_link(program, MACHINE, 20 * MB) is None


# ----------------------------------------------------------------------------------------------- Fig. 11


def test_points_of_four_methods(program: Program) -> None:
    machine = Machine.load("gtx1080ti")
    found = list(fig11.autoswap(program, machine, [0.0, 1.0, 10.0], 4))
    assert found[0] == (Plan(), program.peak_bytes)
    points = [fig11.point("smartpool", plan, limit, program, machine) for plan, limit in found]
    assert points[0][0] == 0 and points[-1][1] < points[0][1]
    assert len(list(fig11.memonger(program, machine))) == len(list(fig11.superneurons(program, machine))) == 3
    limits = [limit for _, limit in fig11.geeps(program, machine, [1.0, 0.5, 0.01])]
    assert limits == [program.peak_bytes, program.peak_bytes // 2]  # and none at 1 %
    swap, recompute, both = fig11.superneurons(program, machine)
    assert all(isinstance(d, Swap) for d in swap[0].decisions)
    assert not any(isinstance(d, Swap) for d in recompute[0].decisions)
    sizes = [fig11.point("cudamalloc", plan, limit, program, machine)[1] for plan, limit in (swap, recompute, both)]
    assert sizes[2] <= min(sizes[:2])


# -------------------------------------------------------------------------------------------- optimality


def test_idle_times() -> None:
    program = chain((10, 10, 10, 10))
    timeline = simulate(program, Plan((Swap(0, 1, 7),)), MACHINE, 40 * MB)  # a0 leaves from 20 to 30 ms
    begin = timeline.last_start_ns
    assert optimality.idle(timeline, begin, begin + 40_000_000) == [
        (begin, begin + 20_000_000), (begin + 30_000_000, begin + 40_000_000)
    ]  # fmt: skip
    assert optimality.idle(timeline, begin, begin + 25_000_000) == [(begin, begin + 20_000_000)]


def test_what_is_avoidable_the_papers_way() -> None:
    # Layers of 10, 10, 10, 30 and 10 ms. Under 40 MB f4 waits for memory. Only a2 is chosen, which f3 reads last, at 60
    # ms, so that it leaves from 60 to 70 ms and f4 waits for 10 ms. The stream is idle before, where a0, from 20 ms,
    # and a1, from 30 ms, could have left: 20 ms of transfers, but no more than 10 ms are waited.
    program = chain((10, 10, 10, 30, 10))
    plan = Plan((Swap(2, 3, 7),))
    timeline = simulate(program, plan, MACHINE, 40 * MB)
    assert timeline.iteration_ns - program.ideal_ns == 10_000_000
    assert optimality.avoidable(timeline, program, plan, MACHINE) == (10_000_000, 10_000_000)
    # With a0 in its place nothing waits.
    plan = Plan((Swap(0, 1, 9),))
    assert optimality.avoidable(simulate(program, plan, MACHINE, 40 * MB), program, plan, MACHINE) == (0, 0)


def test_a_transfer_that_does_not_fit_is_not_avoidable() -> None:
    # Of 5 ms, f0 to f2 leave no time for a transfer of 10 ms before f2 waits, from 10 ms: a0 is free at 10 ms.
    program = chain((5, 5, 5))
    plan = Plan((Swap(0, 1, 5),))
    timeline = simulate(program, plan, MACHINE, 20 * MB)
    assert optimality.avoidable(timeline, program, plan, MACHINE) == (10_000_000, 0)


def test_one_limit() -> None:
    program = chain((10,) * 8)
    found = optimality.at_limit(program, MACHINE, 30 * MB, 200, 0.5)
    assert found is not None
    assert program.ideal_ns <= found["floor_ns"] <= found["annealing_ns"] <= found["iteration_ns"]
    assert found["out_ns"] % 10_000_000 == 0 and found["avoidable_ns"] <= found["forward_wait_ns"]
    assert optimality.at_limit(program, MACHINE, 10 * MB, 200, 0.5) is None
