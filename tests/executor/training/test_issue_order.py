"""Tests that the issue order is valid move by move and as fast as simulated."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

import agents
from executor.training import issue_order as order_module
from executor.training.issue_order import Order, order
from simulator import Machine, Plan, Program, Recompute, Rerun, Swap, simulate
from simulator.schedule import lower
from tests import tiny
from tests.executor.networks import adamw
from tests.executor.training.programs import GPU, Twins, planned
from tests.random_cases import case


def ordered(program: Program, plan: Plan, machine: Machine, limit: int, graph: bool = False) -> Order:
    return order(lower(program, plan), simulate(program, plan, machine, limit), graph)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("seeds", [range(50), pytest.param(range(50, 200), marks=pytest.mark.nightly)])
def test_an_order_is_sound(seeds, graph):
    """Follows an order move by move: tensors are in place, the limit holds, and the iteration ends as it began."""
    kinds = set()
    for seed in seeds:
        program, plan, machine, limit, *_ = case(seed)
        limit = max(limit, lower(program, plan).required_bytes)
        follow(ordered(program, plan, replace(machine, host_bytes=10**6), limit, graph))
        kinds |= {(type(d), getattr(d, "copy", None) is None, getattr(d, "at", None) is None) for d in plan.decisions}
    assert kinds == {
        (Swap, True, True),
        (Swap, False, True),
        (Recompute, True, True),
        (Recompute, True, False),
        (Rerun, True, True),
    }


def test_a_graph_ends_with_no_copy_in_flight_that_is_over_in_the_simulation():
    """A copy in flight at a graph's boundary starts again and delays the first copies of the next iteration."""
    counts = [Counter(), Counter()]
    for seed in range(100):
        program, plan, machine, limit, *_ = case(seed)
        limit = max(limit, lower(program, plan).required_bytes)
        machine = replace(machine, host_bytes=10**6)
        for graph in (False, True):
            counts[graph].update(ordered(program, plan, machine, limit, graph).start.values())
    assert counts[True]["out"] < counts[False]["out"]
    assert counts[True].total() == counts[False].total()


def test_an_order_that_waits_at_the_boundary_is_sound(monkeypatch):
    monkeypatch.setattr(order_module, "MAX_ITERATIONS", 0)
    twins, step = planned(make_optimizer=adamw)
    follow(step.order)
    assert set(step.order.start.values()) == {"host"}
    twins.train(step, 2)


def follow(out: Order) -> None:
    """Replays moves and steps on a model of block locations and content versions."""
    program = out.program
    schedule = out.schedule
    blocks = schedule.blocks
    place = {b: out.start.get(x.owner, "device") for b, x in enumerate(blocks) if x.first < 0}
    content = dict.fromkeys(place, -1)  # block -> its last writer
    host = {blocks[b].owner: -1 for b in place if place[b] != "device"}
    begin = dict(place)
    used = peak = sum(blocks[b].nbytes for b in place if place[b] != "host")
    peaks = [0] * len(program.kernels)
    steps = {
        "in": ("host", "in"),
        "reclaim": ("out", "host"),
        "wait": ("in", "device"),
        "out": ("device", "out"),
        "release": ("device", "host"),
    }

    def move(kind: str, b: int) -> int:
        t = blocks[b].owner
        assert place[b] == steps[kind][0]
        place[b] = steps[kind][1]
        if kind == "out":
            host[t] = content[b]
        elif kind in ("in", "release"):
            assert host[t] == content[b]
        return {"in": blocks[b].nbytes, "reclaim": -blocks[b].nbytes, "release": -blocks[b].nbytes}.get(kind, 0)

    assert used == out.used and [item.step for item in out.items] == list(schedule.steps)
    for item in out.items:
        kernel = program.kernels[item.step.kernel]
        k = item.step.before
        for kind, b in item.before:
            used += move(kind, b)
            peak = max(peak, used)
        used += item.charged
        peak = max(peak, used)
        peaks[k] = max(peaks[k], used)
        assert item.charged == sum(blocks[b].nbytes for b in item.step.allocates)
        place |= dict.fromkeys(item.step.allocates, "device")
        for x in kernel.inputs:
            writers = [w for w in program.writes[x] if w < item.step.kernel]
            assert place[item.step.uses[x]] in ("device", "out")
            assert content[item.step.uses[x]] == (writers[-1] if writers else -1)
        for x in kernel.outputs:
            assert place[item.step.uses[x]] == "device"  # no copy is in flight
            content[item.step.uses[x]] = item.step.kernel
        for b in item.step.frees:
            assert place.pop(b) == "device"
        used -= item.freed
        for kind, b in item.after:
            used += move(kind, b)
    assert place == begin and used == out.used
    assert peak == out.peak <= out.limit
    for k, least in enumerate(schedule.residency):  # after one of several steps of a kernel, swap-ins that fit are made
        several = schedule.first[k + 1] - schedule.first[k] > 1
        assert peaks[k] == least or (schedule.moved and (peaks[k] > least or several))
    outs = [b for item in out.items for kind, b in item.before + item.after if kind == "out"]
    if len(outs) == len({blocks[b].owner for b in outs}):  # else a place is kept in between
        assert out.host_slots(1).intervals.peak_bytes <= max(schedule.on_host)


def test_an_early_copy_by_hand():
    """Copies a1 once f1 ends, in parallel with its reader f2; f4 takes its memory for a4 (130 bytes fit)."""
    out = ordered(tiny.PROGRAM, Plan((Swap(tiny.A1, 1, 6, copy=0),)), tiny.MACHINE, tiny.LIMIT)
    follow(out)
    moves = {
        item.step.kernel: ([kind for kind, _ in item.before], [kind for kind, _ in item.after])
        for item in out.items
        if item.before or item.after
    }
    assert moves == {0: ([], ["out"]), 3: (["reclaim"], []), 5: (["in"], []), 6: (["wait"], [])}


@cache
def vgg() -> Program:
    return Twins("vgg16").captured().program


@pytest.mark.parametrize(
    ("part", "early"),
    [
        (0.75, False),
        (0.65, True),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in ((0.9, False), (0.9, True), (0.75, True), (0.65, False))
        ),
    ],
)
def test_an_order_takes_no_longer_than_simulated(part, early):
    """On streams with the simulated speeds, an iteration takes the simulated time within one percent."""
    program = vgg()
    plan = agents.make("autoswap_swdoa", min_bytes=256).plan(program, GPU, int(part * program.peak_bytes))
    if early:  # copies start right after the write
        plan = replace(
            plan,
            decisions=tuple(
                replace(d, copy=max([w for w in program.writes[d.tensor] if w <= d.after], default=d.after))
                for d in plan.decisions
            ),
        )
    predicted = simulate(program, plan, GPU, plan.limit)
    assert [*itertools.islice(clock(ordered(program, plan, GPU, plan.limit), GPU), 8)][-1] == pytest.approx(
        predicted.iteration_ns, rel=0.01
    )


def clock(out: Order, machine: Machine) -> Iterator[int]:
    """Yields durations of iterations, with in-order streams and events between them."""
    compute = d2h = h2d = last = 0
    ends: dict[tuple[str, int], int] = {}
    blocks = out.schedule.blocks
    while True:
        for item in out.items:
            for kind, index in (*item.before, ("run", item.step.kernel), *item.after):
                if kind == "run":
                    compute += out.program.kernels[index].duration_ns
                elif kind in ("reclaim", "wait"):
                    compute = max(compute, ends.get((kind, index), 0))
                elif kind == "out":
                    d2h = ends["reclaim", index] = max(d2h, compute) + machine.d2h_ns(blocks[index].nbytes)
                elif kind == "in":
                    h2d = ends["wait", index] = max(h2d, compute) + machine.h2d_ns(blocks[index].nbytes)
        yield compute - last
        last = compute
