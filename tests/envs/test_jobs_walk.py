"""The walk over several jobs: a past that stays as it was, rewards that add up, a mask that never lies."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, strategies as st

import envs
from envs.graph import OFFLOAD, REMOVE
from envs.jobs_task import LEFT, TIME_LEFT, Scenario, total_slowdown
from simulator import (
    Job,
    JobsTimeline,
    Kernel,
    Machine,
    OutOfMemory,
    Plan,
    Program,
    Recompute,
    Swap,
    Tensor,
    simulate_jobs,
)
from tests.oracle.jobs_walk import JobsWalk
from tests.random_cases import least_limit
from tests.strategies import jobs, jobs_machines

# x is written, not used for 20 ns, and read.
THREE = Program("three", (Tensor("x", 40), Tensor("y", 60)), (
    Kernel("k0", "other", "forward", (), (0,), 10), Kernel("k1", "other", "forward", (), (1,), 20),
    Kernel("k2", "other", "forward", (0,), (), 10),
))  # fmt: skip
MACHINE = Machine("machine", 10**6, 4 * 10**9, 4 * 10**9, copy_latency_ns=0)
# Alone in the machine, then two, then the second alone; each would need 100 bytes at its peak.
TWO = Scenario((Job("a", THREE, Plan(), iterations=5), Job("b", THREE, Plan(), 100, iterations=4)), MACHINE, 170)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """From one job to three that come and leave, with more or less memory than they need, and a host that is small."""
    several = []
    for i in range(draw(st.integers(1, 3))):
        job = replace(draw(jobs(f"j{i}")), plan=Plan(), switches=(), steps=())
        several.append(job if job.leaves_ns is None else replace(job, leaves_ns=job.arrives_ns + 1 + job.leaves_ns))
    limit = max(1, least_limit(tuple(several)) + draw(st.integers(0, 20) | st.integers(0, 150)))
    until = draw(st.none() | st.integers(1, 500))
    latest = max(job.arrives_ns for job in several)
    machine = replace(draw(jobs_machines()), host_bytes=draw(st.integers(0, 50)))
    sharing = draw(st.sampled_from(["fifo", "shared"]))
    return Scenario(tuple(several), machine, limit, until if until is None else latest + until, sharing)


@pytest.mark.parametrize("wrong, said", [
    (replace(TWO, jobs=()), "at least one job"),
    (replace(TWO, jobs=(Job("endless", THREE, Plan()),)), "'endless' has no end"),
    (replace(TWO, until_ns=100), "'b': expected one that begins"),
    (replace(TWO, jobs=(Job("c", THREE, Plan(), 5, leaves_ns=5),)), "'c': expected one that begins"),
    (replace(TWO, jobs=(Job("d", THREE.with_durations([0, 0, 0]), Plan(), 5, 1),)), "'d': expected one .* takes time"),
])  # fmt: skip
def test_scenarios_that_cannot_be(wrong, said):
    with pytest.raises(ValueError, match=said):
        envs.JobsTask(wrong)


def test_a_job_that_does_not_fit_alone_is_refused():
    with pytest.raises(OutOfMemory, match="'a'"):
        envs.JobsTask(replace(TWO, limit=59))
    envs.JobsTask(replace(TWO, limit=60))  # without x
    with pytest.raises(ValueError, match="mode"):
        envs.JobsTask(TWO, mode="all")


def test_a_job_may_come_as_another_ends_an_iteration():
    """It does not leave then: the phase is of both, and from its boundary on a has a plan."""
    walk = JobsWalk(envs.JobsTask(replace(TWO, jobs=(TWO.jobs[0], replace(TWO.jobs[1], arrives_ns=80))), 1))
    walk.step(0)
    assert (walk.now_ns, walk.there) == (80, [0, 1])
    walk.step(2)
    walk.step(0)
    assert walk.timeline.jobs[0].switches[0] == (80, 1) and walk.planned[0].plans[1].decisions == (Swap(0, 0, 2),)


@pytest.mark.parametrize("at, used", [(40, 40), (69, 100), (70, 40), (201, 0)])
def test_the_memory_in_use_as_a_phase_begins(at, used):
    """Where another kernel has begun at that time, it counts; and what the one before has freed does not."""
    walk = JobsWalk(envs.JobsTask(replace(TWO, jobs=(TWO.jobs[0], replace(TWO.jobs[1], arrives_ns=at))), 1))
    walk.step(0)
    assert (walk.now_ns, walk.used) == (at, used)


def test_the_time_alone_is_of_whole_iterations():
    """A job leaves when an iteration ends, at ``leaves_ns`` or later."""
    job = Job("a", THREE, Plan(), 7)
    for leaves, iterations, alone in ((86, None, 80), (87, None, 80), (88, None, 120), (88, 2, 80), (None, 5, 200)):
        one = replace(job, leaves_ns=leaves, iterations=iterations)
        scenario = Scenario((one,), MACHINE, 100)
        assert scenario.alone_ns(0) == alone
        ran = simulate_jobs((one,), MACHINE, 100)
        assert ran.end_ns == 7 + alone and total_slowdown(scenario, ran) == 0
    assert Scenario((replace(job, iterations=9),), MACHINE, 100, until_ns=88).alone_ns(0) == 120


def test_jobs_of_several_programs_are_refused():
    steps = ((THREE, Plan()), (THREE, Plan()))
    with pytest.raises(ValueError, match="'a': a scenario's jobs run one program"):
        Scenario((Job("a", THREE, Plan(), iterations=2, steps=steps),), MACHINE, 100)


def test_what_a_recomputation_fetches_has_to_fit():
    """t is made of c and x2, c of x1. To make it again with x1 and x2 on the host takes 100 bytes: c, t, x1 and x2. So
    after its removal no offload may be taken, and after theirs it may not be removed."""
    tensors = tuple(Tensor(name, nbytes) for name, nbytes in (("x1", 40), ("x2", 40), ("c", 10), ("t", 10), ("y", 60)))
    uses = [((), (0,)), ((), (1,)), ((0,), (2,)), ((1, 2), (3,)), ((), (4,)), ((3,), ()), ((0,), ()), ((1,), ())]
    kernels = tuple(Kernel(f"k{k}", "other", "forward", *each, 10) for k, each in enumerate(uses))
    job = Job("job", Program("chain", tensors, kernels), Plan(), iterations=2)
    task = envs.JobsTask(Scenario((job,), MACHINE, 99), min_bytes=10)
    node = {
        (int(kind), task.graph.gaps[gap]): i
        for i, (kind, gap) in enumerate(zip(task.graph.action_kind, task.graph.action_gap, strict=True))
        if gap >= 0
    }
    first, second = node[OFFLOAD, (0, 2, 6)], node[OFFLOAD, (1, 3, 7)]
    removal = node[REMOVE, (3, 3, 5)]
    walk = JobsWalk(task)
    assert walk.mask()[[first, second, removal]].all()
    walk.step(removal)
    assert walk.mask()[[first, second]].tolist() == [False, False]
    walk.reset()
    walk.step(first)
    assert walk.mask()[[second, removal]].tolist() == [True, False]
    # So it is: the limit is the least that does not do.
    plan = Plan((Swap(0, 2, 6), Swap(1, 3, 7), Recompute(3, 3, 5)))
    with pytest.raises(OutOfMemory):
        simulate_jobs([replace(job, plan=plan)], MACHINE, 99)
    simulate_jobs([replace(job, plan=plan)], MACHINE, 100)


@given(scenarios(), st.sampled_from(["swap", "recompute", "joint"]), st.integers(0, 99))
def test_rewards_add_up_and_the_mask_never_lies(scenario, mode, seed):
    """A valid action is taken without error and gives plans that fit; an invalid one is refused. In the end the rewards
    are the slowdown of the jobs under the plans that they got, simulated anew."""
    walk, rng = JobsWalk(envs.JobsTask(scenario, min_bytes=1, mode=mode)), np.random.default_rng(seed)
    rewards, stop = [], rng.choice([0.0, 0.1, 0.5])
    while not walk.done:
        mask = walk.mask()
        invalid = np.flatnonzero(~mask)
        for node in [-1, len(mask), *(rng.choice(invalid, 1) if len(invalid) else [])]:
            with pytest.raises(ValueError, match="not a valid action"):
                walk.step(int(node))
        assert mask[0] and walk.there
        node = 0 if rng.random() < stop else int(rng.choice(np.flatnonzero(mask)))
        rewards.append(walk.step(node))
        assert node == 0 or rewards[-1] == 0
    planned = [walk.planned[j] for j in range(len(scenario.jobs))]
    timeline = simulate_jobs(planned, walk.task.machine, scenario.limit, scenario.until_ns, scenario.sharing)
    assert timeline == walk.timeline and timeline.peak_bytes <= scenario.limit
    assert walk.slowdown == total_slowdown(scenario, timeline)
    assert sum(rewards) == pytest.approx(-walk.slowdown, abs=1e-9)
    for job, ran in zip(planned, timeline.jobs, strict=True):
        if len(ran.boundaries) == job.iterations and scenario.until_ns is None and job.leaves_ns is None:
            scenario = replace(scenario, jobs=(job,))
            alone = job.iterations * job.program.ideal_ns
            one = replace(timeline, jobs=(ran,))
            assert total_slowdown(scenario, one) == pytest.approx((ran.left_ns - job.arrives_ns) / alone - 1)


@given(scenarios(), st.sampled_from(["swap", "recompute", "joint"]), st.integers(0, 99))
def test_the_compiled_walk_is_the_same(scenario, mode, seed):
    """Step by step: what is observed, rewards, the end, and the plans that the jobs got."""
    env, rng = envs.JobsEnv(scenario, 1, mode), np.random.default_rng(seed)
    walk, stop = JobsWalk(env.tasks[0]), rng.choice([0.0, 0.1, 0.5])
    (observation, info), reward, ours = env.reset(), 0.0, 0.0
    while True:
        nodes, moment = np.zeros((len(walk.task.graph), LEFT + 1), np.float32), np.zeros(TIME_LEFT + 1, np.float32)
        walk.show(nodes, moment)
        job = np.where(np.isin(walk.task.job, walk.there), walk.task.job, -1)
        assert (observation["nodes"] == nodes).all() and (observation["moment"] == moment).all()
        assert (observation["action_mask"] == walk.mask()).all() and (observation["job"] == job).all()
        assert (ours, info["slowdown"], info["time_ns"]) == (reward, walk.slowdown, walk.now_ns)
        if walk.done:
            break
        node = 0 if rng.random() < stop else int(rng.choice(np.flatnonzero(walk.mask())))
        reward = walk.step(node)
        observation, ours, terminated, _, info = env.step(np.int64(node))
        assert terminated == walk.done
    assert env.jobs == tuple(walk.planned[j] for j in sorted(walk.planned))


def past(timeline: JobsTimeline, now: int) -> list[object]:
    """What is known of a timeline at a time: what has ended before, or begun."""
    known: list[object] = [tuple(one for one in timeline.evictions if one.time_ns < now)]
    for job in timeline.jobs:
        known += [job.name, job.admitted_ns if job.admitted_ns is not None and job.admitted_ns < now else None]
        known += [tuple(s if s.end_ns <= now else s._replace(end_ns=now) for s in job.spans if s.start_ns < now)]
        known += [tuple(e for e in job.events if e.time_ns < now), tuple(b for b in job.boundaries if b < now)]
        known += [tuple(s for s in job.stalls if s.end_ns < now), tuple(s for s in job.switches if s[0] < now)]
    return known


@given(scenarios(), st.sampled_from(["swap", "joint"]), st.integers(0, 99))
def test_the_past_stays_as_it_was(scenario, mode, seed):
    """The timeline before a phase is the same with the plans of that phase, and in the end."""
    walk, rng = JobsWalk(envs.JobsTask(scenario, min_bytes=1, mode=mode)), np.random.default_rng(seed)
    before: list[tuple[int, set[int], JobsTimeline]] = []
    while not walk.done:
        phase = walk.now_ns
        walk.step(int(rng.choice(np.flatnonzero(walk.mask()))))
        if walk.now_ns != phase and not walk.done:
            before.append((walk.now_ns, set(walk.planned), walk.timeline))
    for now, known, timeline in before:
        jobs = tuple(ran for j, ran in enumerate(walk.timeline.jobs) if j in known)
        names = {job.name for job in scenario.jobs if job.arrives_ns >= now}
        assert not names & {job.name for job in jobs}
        final = replace(walk.timeline, jobs=jobs)
        index = sorted(known)
        evictions = tuple(
            one._replace(job=index.index(one.job), wanted_by=index.index(one.wanted_by))
            for one in final.evictions if one.time_ns < now
        )  # fmt: skip
        assert past(replace(final, evictions=evictions), now) == past(timeline, now)
