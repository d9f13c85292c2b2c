"""What a simulator call costs: the engine beside its peers, inside HOME's search, and under the environment."""

from __future__ import annotations

import contextlib
import gc
import time
import timeit
from functools import partial
from statistics import median
from typing import Any

import numpy as np

import agents
from agents import Infeasible
from agents.heuristics.home import HOME
from agents.planner import MIB
from agents.search.local_search import anneal
from experiments.benchmark import simpy_model
from simulator import Plan, Swap, rules
from simulator.compiled.engine import Engine, rows_of
from simulator.compiled.jit import jit
from simulator.machine import Machine
from simulator.moves.moves import Moves
from simulator.program import Gap, Program
from simulator.schedule import lower


def swap_all(program: Program, gaps: list[Gap]) -> Plan:
    """The plan that swaps a tensor out in each of the gaps."""
    return Plan(tuple(Swap(*gap) for gap in gaps), program.fingerprint)


def simulation(
    program: Program, plan: Plan, machine: Machine, calls: int, limit: int | None = None
) -> dict[str, float]:
    """One plan in the engine, in SimPy and in the reference: the median call, and the ratios.

    The engine and the reference lower the plan in every call; SimPy is given its schedule.

    Args:
        limit: bytes; None: 65 % of the peak, or what the plan needs.

    Raises:
        AssertionError: the three disagree.
    """
    if limit is None:
        needed = Engine(program, machine, program.peak_bytes).score(rows_of(plan.decisions)).required_bytes
        limit = max(needed, int(0.65 * program.peak_bytes))
    engine, rows = Engine(program, machine, limit), rows_of(plan.decisions)
    schedule = lower(program, plan)
    results = {
        "engine": engine.score(rows).iteration_ns,
        "SimPy": simpy_model.simulate(schedule, machine, limit),
        "reference": rules.simulate(program, plan, machine, limit, iterations=1).iteration_ns,
    }
    if len(set(results.values())) > 1:
        raise AssertionError(f"{program.name}: the simulators disagree on the iteration (ns): {results}")
    fast, simpy, slow = (median(timeit.repeat(call, number=1, repeat=repeats)) for call, repeats in (
        (lambda: engine.score(rows), calls),
        (lambda: simpy_model.simulate(schedule, machine, limit), 5),
        (lambda: rules.simulate(program, plan, machine, limit, iterations=1), 3),
    ))  # fmt: skip
    return {
        "simulate_us": round(fast * 1e6, 2),
        "speedup_vs_simpy": round(simpy / fast, 1),
        "speedup_vs_reference": round(slow / fast, 1),
    }


def planned(program: Program, machine: Machine, limit: int, mode: str, calls: int, seed: int) -> Plan:
    """The plan of ``calls`` steps of annealing."""
    return agents.make("annealing", mode=mode, calls=calls, seed=seed).plan(program, machine, limit)


def searching(program: Program, plan: Plan, machine: Machine, limit: int, mode: str, calls: int, seed: int) -> float:
    """Simulator calls a second of annealing from a plan, all of its work included; the best of three."""
    engine, rows = Engine(program, machine, limit), rows_of(plan.decisions)
    start_ns = engine.score(rows).iteration_ns
    rates = []
    for _ in range(3):
        moves, before = Moves(program, limit, mode, MIB, seed), engine.calls
        start = time.perf_counter()
        anneal(moves, engine, rows, start_ns, calls, 1e-3, 1e-5, seed)
        rates.append((engine.calls - before) / (time.perf_counter() - start))
    return max(rates)


def batches(program: Program, plan: Plan, machine: Machine, limit: int, plans: int, seed: int) -> float:
    """How many times as fast ``Engine.scores`` is on all cores as on one, for plans with most of the decisions of one;
    the best of five."""
    engine, rows = Engine(program, machine, limit), rows_of(plan.decisions)
    kept = np.random.default_rng(seed).random((plans, len(rows))) < 0.97
    every, lengths = np.concatenate([rows[k] for k in kept]), kept.sum(axis=1)

    one, all_cores = (timeit.Timer(partial(engine.score_batch, every, lengths, threads)) for threads in (1, None))
    all_cores.timeit(1)
    times = [(one.timeit(1), all_cores.timeit(1)) for _ in range(5)]
    return min(alone for alone, _ in times) / min(together for _, together in times)


def home_search(
    program: Program, machine: Machine, particles: int, iterations: int, seed: int, limit: float = 0.6
) -> dict[str, float]:
    """One search of HOME in this process, in seconds, and that over its simulator calls.

    Raises:
        Infeasible: HOME has no plan within ``limit`` (a fraction of the peak).
    """
    limit_bytes = int(limit * program.peak_bytes)
    with contextlib.suppress(Infeasible):  # two particles compile, and need not find a plan
        HOME(particles=2, iterations=1, jobs=1).plan(program, machine, limit_bytes)
    planner = HOME(particles, iterations, jobs=1, seed=seed)
    seconds = timeit.timeit(lambda: planner.plan(program, machine, limit_bytes), gc.enable, number=1)
    return {"home_search_s": round(seconds, 3), "home_call_us": round(seconds / planner.simulator_calls * 1e6, 2)}


@jit
def pick_valid(masks, draws, chosen):  # type: ignore[no-untyped-def]
    """A random valid action of each mask, by a draw from [0, 1) each."""
    for i in range(masks.shape[0]):
        left = int(draws[i] * masks[i].sum())
        for node in range(masks.shape[1]):
            if masks[i, node]:
                if left == 0:
                    chosen[i] = node
                left -= 1


def environment(
    program: Program, machine: Machine, limit: float, num_envs: int, steps: int, seed: int
) -> dict[str, dict[str, int]]:
    """Steps a second of GpuMemory-v0 under random valid actions, resets included and drawing not; the best of five.

    Beside it Gymnasium's CartPole: one, as many in a SyncVectorEnv, and as many in its vector environment in NumPy.

    Args:
        num_envs: walks in a batch.
        steps: of each timing, in all.
    """
    import gymnasium

    import envs  # registers GpuMemory-v0

    assert envs
    task: dict[str, Any] = {"program": program, "machine": machine, "limit": limit}
    rates: dict[str, int] = {}
    for name, reward, copy in (
        ("paper", "paper", False), ("paper_copied", "paper", True), ("causal", "causal", False),
        ("causal_copied", "causal", True),
    ):  # fmt: skip
        env = gymnasium.make("GpuMemory-v0", **task, reward=reward, copy=copy)
        rates[f"single_{name}"] = steps_per_s(env.unwrapped, 1, max(1, steps // 20), seed)
        vector = gymnasium.make_vec("GpuMemory-v0", num_envs, "vector_entry_point", **task, reward=reward, copy=copy)
        rates[f"batch_{name}"] = steps_per_s(vector, num_envs, steps, seed)
    pole = {
        "single": steps_per_s(gymnasium.make("CartPole-v1").unwrapped, 1, max(1, steps // 20), seed),
        "sync": steps_per_s(gymnasium.make_vec("CartPole-v1", num_envs, "sync"), num_envs, steps, seed),
        "numpy": steps_per_s(gymnasium.make_vec("CartPole-v1", num_envs, "vector_entry_point"), num_envs, steps, seed),
    }
    return {"env_steps_per_s": rates, "cartpole_steps_per_s": pole}


def steps_per_s(env: Any, num_envs: int, steps: int, seed: int) -> int:
    """Of an environment, or a vector environment that begins episodes anew by itself."""
    vector, generator = hasattr(env, "num_envs"), np.random.default_rng(seed)
    _, info = env.reset(seed=seed)
    chosen, best = np.zeros(num_envs, np.int64), 0.0
    for _ in range(5):
        spent = 0.0
        for _ in range(max(1, steps // num_envs)):
            if "action_mask" in info:
                pick_valid(info["action_mask"].reshape(num_envs, -1), generator.random(num_envs), chosen)
            else:
                chosen = generator.integers(0, 2, num_envs)
            action = chosen if vector else int(chosen[0])
            start = time.perf_counter()
            _, _, terminated, truncated, info = env.step(action)
            if not vector and (terminated or truncated):
                _, info = env.reset()
            spent += time.perf_counter() - start
        best = max(best, max(1, steps // num_envs) * num_envs / spent)
    return round(best)
