"""Agents of the tracks (tracks.py) that are no planners: what their rows are compared with.

Each is called with a task, a budget ("calls", "seconds" or neither) and a seed, and returns a plan (None: it has none;
of ``jobs`` the actions of an episode), the simulator calls that it made, and what it was trained with.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np

import agents
from agents.search.joint_annealing import JointAnnealing
from envs import Scenario
from envs.jobs_env import small_scenario
from envs.task import Task
from envs.tasks import TASKS, load
from envs.walk import Walk
from experiments.common.report import Row, heuristics
from experiments.examples import behaviour_cloning
from experiments.examples.ppo_single_file import Args, train
from experiments.figures import attempt, robustness
from simulator import Job, Machine, Plan, Program, simulate
from simulator.jobs import Noise

Found = tuple[Any, int, Row | None]
NOISE = Noise(jitter=0.2, tenant=0.5)
SAMPLES = 4  # of noise, of each plan that is made for it
SCENARIOS = ("small", "three-resnet50-30")
RELIEF = 6  # the column of ``nodes`` in GpuMemoryJobs-v0


def program_of(task: str) -> tuple[Program, Machine, int]:
    """Program, machine and limit of a task of envs/tasks.py."""
    program, machine = load(TASKS[task].program)
    return program, machine, int(TASKS[task].limit * program.peak_bytes)


def scenario_of(task: str) -> Scenario:
    """Of the track ``jobs``."""
    if task == "small":
        return small_scenario()
    program, machine = load("resnet50")
    times: list[dict[str, int]] = [{"iterations": 6}, {"arrives_ns": 10**9, "iterations": 6},
                                   {"arrives_ns": 25 * 10**8, "leaves_ns": 6 * 10**9}]  # fmt: skip
    jobs = tuple(Job(name, program, Plan(), **at) for name, at in zip("abc", times, strict=True))
    return Scenario(jobs, machine, int(0.3 * 3 * program.peak_bytes))


def random_walk(task: str, budget: Row, seed: int) -> Found:
    """One episode of valid actions, each as likely."""
    program, machine, limit = program_of(task)
    case, rng = Task(program, machine, limit, mode="joint"), np.random.default_rng(seed)
    walk = Walk(case)
    while not walk.done:
        walk.step(int(rng.choice(np.flatnonzero(walk.mask()))))
    return None if walk.dead_end else walk.plan("random"), case.engine.calls, None


def published(task: str, budget: Row, seed: int) -> Found:
    """The best heuristic's."""
    program, machine, limit = program_of(task)
    planners = [agents.make(name) for name in heuristics()]
    plans = [plan for one in planners if (plan := attempt(one, program, machine, limit)) is not None]
    best = min(plans, key=lambda plan: simulate(program, plan, machine, limit).iteration_ns, default=None)
    return best, sum(one.simulator_calls for one in planners), None


def ppo(task: str, budget: Row, seed: int) -> Found:
    """The best plan of examples/ppo_single_file.py within as many calls."""
    args = Args(task=f"GpuMemory/{task}-v0", steps=budget["calls"], seed=seed, num_envs=32, hidden=128,
                greedy_every=10**9)  # fmt: skip
    found = train(args)
    return found.best_plan, found.calls, None


def for_noise(task: str, budget: Row, seed: int) -> Found:
    """The plan of ``policy_search``, annealed under other noise than it is measured with."""
    program, machine, limit = program_of(task)
    start = agents.make("policy_search", calls=budget["calls"] // 2, seed=seed, jobs=1)
    plan = attempt(start, program, machine, limit)
    if plan is None:
        return None, start.simulator_calls, None
    calls = (budget["calls"] - start.simulator_calls) // SAMPLES
    search = JointAnnealing([robustness.Given(plan)], calls, noise=NOISE, seed=seed + 1000)
    return search.plan_jobs([program], machine, limit)[0], start.simulator_calls + SAMPLES * calls, None


def job_actions(how: str, task: str, budget: Row, seed: int) -> Found:
    """Actions of an episode of GpuMemoryJobs-v0: "no plans" always says that they are enough; "greedy" takes the
    largest relief, TENSILE's rule, as long as anything may be taken; "random actions" any valid one; "best of …" is of
    so many such episodes."""
    env = gymnasium.make("GpuMemoryJobs-v0", scenario=scenario_of(task))
    rng, best = np.random.default_rng(seed), (np.inf, list[int]())
    for _ in range(budget.get("calls", 1)):
        observation, _ = env.reset(options={"task": 0})
        over, taken, info = False, list[int](), {}
        while not over:
            mask, action = observation["action_mask"] > 0, 0
            if how == "greedy" and mask[1:].any():
                action = int(np.where(mask, observation["nodes"][:, RELIEF], -np.inf)[1:].argmax()) + 1
            elif how.endswith("random actions"):
                action = int(rng.choice(np.flatnonzero(mask)))
            taken.append(action)
            observation, _, over, _, info = env.step(action)
        best = min(best, (float(info["slowdown"]), taken))
    return best[1], budget.get("calls", 1), None


def cloned(source: str, task: str, budget: Row, seed: int) -> Found:
    """Behaviour cloning on walks of ``source`` (examples/behaviour_cloning.py)."""
    args = behaviour_cloning.Args(task=f"GpuMemory/{task}-v0", source=source, seed=seed)
    episodes = behaviour_cloning.dataset(args)
    seen = {"walks": len(episodes), "mean_return": round(float(np.mean([one.rewards.sum() for one in episodes])), 6)}
    _, plan = behaviour_cloning.clone(args, episodes)
    return plan, 1, seen


def first_walk(task: str, budget: Row, seed: int) -> Found:
    """The DQN's walk by what was learned on other programs alone."""
    one = agents.make("dqn", episodes=1, seed=seed)
    return attempt(one, *program_of(task)), 1, None


OWN: dict[str, tuple[Callable[[str, Row, int], Found], set[str]]] = {  # and which budgets they take
    "random": (random_walk, {"seed"}),
    "best published": (published, set()),
    "ppo": (ppo, {"calls", "seed"}),
    "planned for noise": (for_noise, {"calls", "seed"}),
    "dqn, first walk": (first_walk, {"seed"}),
    "no plans": (partial(job_actions, "no plans"), set()),
    "greedy": (partial(job_actions, "greedy"), set()),
    "random actions": (partial(job_actions, "random actions"), {"seed"}),
    "best of random actions": (partial(job_actions, "best of random actions"), {"calls", "seed"}),
    **{f"cloned from {source}": (partial(cloned, source), {"seed"}) for source in (*behaviour_cloning.SOURCES, "all")},
}
