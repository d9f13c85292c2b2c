"""A plan for each iteration: the run, what a walk sees, and what a search may know."""

from functools import cache

import numpy as np
import pytest

import agents
from agents.planner import Infeasible
from envs.memory_env import small_task
from experiments.figures import robustness
from experiments.figures.closed_loop import Replanner, Run, Walker, in_time, later, trained
from simulator import Plan
from simulator.compiled.encoding import AFTER, RECOMPUTE, SWAP, WHEN, rows_of
from simulator.jobs import Noise

PROGRAM, MACHINE = small_task()
LIMIT = int(0.6 * PROGRAM.peak_bytes)
BOTH = Noise(jitter=0.3, tenant=0.8)


@cache
def plans() -> tuple[Plan, ...]:
    return tuple(agents.make(name).plan(PROGRAM, MACHINE, LIMIT) for name in ("autoswap_doa", "tensile", "vdnn_all"))


@cache
def walker() -> Walker:
    return Walker(trained(PROGRAM, MACHINE, LIMIT, 64), link=True)


def run_of(noise: Noise, iterations: int = 8) -> Run:
    return Run(PROGRAM, MACHINE, LIMIT, noise, iterations, 1)


@pytest.mark.parametrize("noise", [Noise(), Noise(0.4), Noise(drift=-0.3), Noise(tenant=0.9), BOTH])
def test_iterations_end_when_simulate_jobs_says(noise: Noise) -> None:
    run, one = run_of(noise), run_of(noise)
    for i in range(run.iterations):
        run.take(plans()[i % 3])
        one.take(plans()[1])
    assert tuple(np.diff(run.starts)) == run.simulated().iterations_ns
    assert len(run.simulated().switches) == run.iterations - 1  # each takes effect at its own boundary
    # One plan for all of them is no other run than that of a plan.
    rows = [sum(one.durations(i)) for i in range(one.iterations)]
    assert np.diff(one.starts) / rows - 1 == pytest.approx(
        robustness.overheads(PROGRAM, plans()[1], MACHINE, LIMIT, noise, 8, 1)
    )
    assert not one.simulated().switches


def test_two_iterations_ahead() -> None:
    run = run_of(BOTH)
    run.take(plans()[0])
    ahead = run.end_ns(plans()[1], plans()[1])
    run.take(plans()[1])
    run.take(plans()[1])
    assert run.starts[-1] == ahead


def test_a_tenant_from_a_time_on() -> None:
    tenant = ((0, 0.5), (100, 0.2), (200, 0.9))
    assert later(tenant, 0) == tenant
    assert later(tenant, 150) == ((0, 0.2), (50, 0.9))
    assert later(tenant, 200) == ((0, 0.9),)
    assert later((), 7) == ((0, 0.0),) and later(((50, 0.5),), 10) == ((0, 0.0), (40, 0.5))


def test_a_walk_does_not_see_what_is_to_come() -> None:
    """Whatever later kernels take, what was decided before them is the same; earlier ones make a difference."""
    random, n, differ = np.random.default_rng(0), len(PROGRAM.kernels), 0
    for _ in range(40):
        row, other = (random.integers(10_000, 4_000_000, n) for _ in range(2))
        k = int(random.integers(1, n))
        found = []
        for later_ones in (row, other):
            at, rows = walker().decided([*row[:k].tolist(), *later_ones[k:].tolist()], 0.3)
            found.append([(p, *decision) for p, decision in zip(at, rows.tolist(), strict=True) if p <= k])
        assert found[0] == found[1]
        at, rows = walker().decided(other.tolist(), 0.3)
        differ += [p for p, _ in zip(at, rows, strict=True) if p <= k] != [p for p, *_ in found[0]]
    assert differ > 10


def test_without_noise_the_closed_loop_is_the_blind_walk() -> None:
    run = run_of(Noise())
    for _ in range(run.iterations):
        run.take(walker().plan(run))
    assert {plan.decisions for plan in run.plans} == {walker().blind.decisions}
    run = run_of(BOTH)
    for _ in range(run.iterations):
        run.take(walker().plan(run))
    assert len({plan.decisions for plan in run.plans}) > 1 and walker().dead_ends == 0


def test_nothing_begins_before_it_is_decided() -> None:
    known = np.array([[SWAP, 1, 2, 9, -1, 0], [SWAP, 2, 3, 9, -1, 1], [SWAP, 3, 8, 1, -1, -1]])
    rows = np.array([
        [SWAP, 3, 8, 1, -1, -1],  # over the boundary: as before
        [SWAP, 1, 2, 9, -1, 0],  # as it was known
        [SWAP, 2, 4, 9, -1, 1],  # its copy was known, its leaving is late
        [SWAP, 4, 4, 9, -1, 2],  # new: no copy that is made early
        [RECOMPUTE, 5, 6, 9, 0, 8],
    ])  # fmt: skip
    out = in_time([0, 6, 6, 6, 7], rows, known)
    assert (out[[0, 1, 4]] == rows[[0, 1, 4]]).all()
    assert out[2, [AFTER, WHEN]].tolist() == [5, 1] and out[3, [AFTER, WHEN]].tolist() == [5, -1]
    assert rows[3, WHEN] == 2  # what was given is as it was


def test_only_the_clairvoyant_knows_what_is_to_come() -> None:
    chosen: dict[bool, list[Plan]] = {False: [], True: []}
    for knows, found in chosen.items():
        for seed in (1, 2, 3, 4):
            run, other = run_of(BOTH), Run(PROGRAM, MACHINE, LIMIT, BOTH, 8, seed)
            for plan in (plans()[1],) * 3:
                run.take(plan)
            now = run.starts[-1]
            run.rows = (*run.rows[:3], *other.rows[3:])
            run.tenant = (*((at, s) for at, s in run.tenant if at <= now), (now + 1, 0.1 * seed))
            found.append(Replanner(plans(), 60, knows).plan(run))
    assert len({plan.decisions for plan in chosen[False]}) == 1 < len({plan.decisions for plan in chosen[True]})


def test_what_cannot_be_walked_is_said() -> None:
    with pytest.raises(Infeasible, match="cannot run in"):
        trained(PROGRAM, MACHINE, LIMIT // 3, 8)


def test_values_near_a_plan_walk_to_it() -> None:
    trainer, plan = trained(PROGRAM, MACHINE, LIMIT, 64), plans()[1]
    near = Walker(trainer, link=False, near=plan).blind

    def emptied(one: Plan) -> set[tuple[int, ...]]:
        return {tuple(row) for row in rows_of(one.decisions)[:, [0, 1, 3]].tolist()}

    def far(one: Plan) -> int:
        return len(emptied(one) ^ emptied(plan))

    assert far(near) < far(walker().blind)
