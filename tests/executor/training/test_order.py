"""The order of issue: sound move by move, and as fast as the simulator says."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings, strategies as st

import agents
from executor.training import order as order_module
from executor.training.order import Order, order
from simulator import Machine, simulate
from tests import strategies
from tests.executor.networks import adamw
from tests.executor.training.programs import GPU, Twins, random_plan, required, tight


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_an_order_is_sound(data):
    """Followed move by move: everything is where it must be, within the limit, and the iteration ends as it began."""
    program = data.draw(strategies.programs())
    plan, machine = data.draw(strategies.plans(program)), data.draw(strategies.machines())
    limit = required(program, plan) + data.draw(st.sampled_from([0, 5, 40]))
    follow(order(program, plan, machine, limit))


def test_an_order_that_waits_at_the_boundary_is_sound(monkeypatch):
    monkeypatch.setattr(order_module, "MAX_ITERATIONS", 0)
    twins = Twins("small", adamw)
    captured = twins.captured()
    step = tight(captured, random_plan(captured.program, 0))
    follow(step.order)
    assert set(step.order.start.values()) == {"host"}
    twins.train(step, 2)


def follow(out: Order) -> None:
    program, size = out.program, [t.nbytes for t in out.program.tensors]
    place = {t: out.start.get(t, "device") for t, tensor in enumerate(program.tensors) if tensor.persistent}
    begin = dict(place)
    used = peak = sum(size[t] for t in place if place[t] != "host")
    steps = {"in": ("host", "in"), "reclaim": ("out", "host"), "wait": ("in", "device"), "out": ("device", "out"),
             "release": ("device", "host"), "drop": ("device", "dropped")}  # fmt: skip

    def move(kind: str, t: int) -> int:
        assert place[t] == steps[kind][0]
        place[t] = steps[kind][1]
        return {"in": size[t], "reclaim": -size[t], "release": -size[t], "drop": -size[t]}.get(kind, 0)

    assert used == out.used
    for item in out.items:
        for kind, t in item.before:
            used += move(kind, t)
            peak = max(peak, used)
        used += item.charged
        peak = max(peak, used)
        chain = out.schedule.remats.get(item.before_kernel)
        if item.rerun:
            assert all(place[t] == "device" for t in chain.fetched)
        else:
            recovered = chain.recovered if chain else frozenset()
            assert all(place[t] == "dropped" for t in recovered)
            place |= dict.fromkeys(recovered, "device")
            mine = [t for t in program.kernels[item.kernel].accesses if not program.tensors[t].persistent]
            place |= {t: "device" for t in mine if program.accesses[t][0] == item.kernel}
            assert all(place[t] == "device" for t in program.kernels[item.kernel].accesses)
            for t in mine:
                if program.accesses[t][-1] == item.kernel:
                    del place[t]
        used -= item.freed
        for kind, t in item.after:
            used += move(kind, t)
    assert place == begin and used == out.used
    assert peak == out.peak <= out.limit


@pytest.mark.parametrize("part", [0.9, 0.75, 0.65])
def test_an_order_takes_no_longer_than_simulated(part):
    """On streams that are as fast as the simulated ones, an iteration takes as long, within one percent."""
    program = Twins("vgg16").captured().program
    plan = agents.make("autoswap_swdoa", min_bytes=256).plan(program, GPU, int(part * program.peak_bytes))
    predicted = simulate(program, plan, GPU, plan.limit)
    assert [*itertools.islice(clock(order(program, plan, GPU, plan.limit), GPU), 8)][-1] == pytest.approx(
        predicted.iteration_ns, rel=0.01
    )


def clock(out: Order, machine: Machine) -> Iterator[int]:
    """Durations of iterations, every stream in order and events between them."""
    compute = d2h = h2d = last = 0
    over: dict[tuple[str, int], int] = {}
    while True:
        for item in out.items:
            for kind, t in (*item.before, ("run", item.kernel), *item.after):
                if kind == "run":
                    compute += out.program.kernels[t].duration_ns
                elif kind in ("reclaim", "wait"):
                    compute = max(compute, over.get((kind, t), 0))
                elif kind == "out":
                    d2h = over["reclaim", t] = max(d2h, compute) + machine.d2h_ns(out.program.tensors[t].nbytes)
                elif kind == "in":
                    h2d = over["wait", t] = max(h2d, compute) + machine.h2d_ns(out.program.tensors[t].nbytes)
        yield compute - last
        last = compute
