"""Times simulator calls of the engine, SimPy and the reference implementation.

Also times the engine inside HOME's search and inside the environment.
"""

from __future__ import annotations

import contextlib
import gc
import time
import timeit
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from agents import Infeasible
from agents.heuristics.home import HOME
from agents.planner import MIB
from agents.search.local_search import anneal
from experiments.measure.speed import simpy_model
from simulator import Plan, Swap, rules
from simulator.compiled.engine import Engine, rows_of
from simulator.compiled.jit import jit
from simulator.machine import Machine
from simulator.moves.moves import Moves
from simulator.program import Gap, Program
from simulator.schedule import lower


def swap_all(program: Program, gaps: list[Gap]) -> Plan:
    """Returns the plan that swaps each gap's tensor out during the gap."""
    return Plan(tuple(Swap(*gap) for gap in gaps), program.fingerprint)


def simulation(
    program: Program, plan: Plan, machine: Machine, calls: int, limit: int | None = None
) -> dict[str, float]:
    """Times one plan in the engine, in SimPy and in the reference simulator.

    The engine and the reference lower the plan in every call; SimPy receives the lowered schedule.

    Args:
        program: program of the plan.
        plan: plan to simulate.
        machine: machine to simulate.
        calls: timed engine calls.
        limit: memory limit in bytes; None: 65 % of the peak, or more if the plan needs more.

    Returns:
        Median engine call in µs and its speedup over the two others.

    Raises:
        AssertionError: if the three simulators disagree on the iteration time.
    """
    if limit is None:
        needed = Engine(program, machine, program.peak_bytes).score(rows_of(plan.decisions)).required_bytes
        limit = max(needed, int(0.65 * program.peak_bytes))
    engine = Engine(program, machine, limit)
    rows = rows_of(plan.decisions)
    schedule = lower(program, plan)
    results = {
        "engine": engine.score(rows).iteration_ns,
        "SimPy": simpy_model.simulate(schedule, machine, limit),
        "reference": rules.simulate(program, plan, machine, limit, iterations=1).iteration_ns,
    }
    if len(set(results.values())) > 1:
        raise AssertionError(f"{program.name}: the simulators disagree on the iteration (ns): {results}; report it")
    engine_s, simpy_s, reference_s = (
        median(timeit.repeat(call, number=1, repeat=repeats))
        for call, repeats in (
            (lambda: engine.score(rows), calls),
            (lambda: simpy_model.simulate(schedule, machine, limit), 5),
            (lambda: rules.simulate(program, plan, machine, limit, iterations=1), 3),
        )
    )
    return {
        "simulate_us": round(engine_s * 1e6, 2),
        "speedup_vs_simpy": round(simpy_s / engine_s, 1),
        "speedup_vs_reference": round(reference_s / engine_s, 1),
    }


def search_rate(program: Program, plan: Plan, machine: Machine, limit: int, mode: str, calls: int, seed: int) -> float:
    """Returns annealing's simulator calls per second, including all other work of the search (best of three)."""
    engine = Engine(program, machine, limit)
    rows = rows_of(plan.decisions)
    start_ns = engine.score(rows).iteration_ns
    rates = []
    for _ in range(3):
        moves = Moves(program, limit, mode, MIB, seed)
        before = engine.calls
        start = time.perf_counter()
        anneal(moves, engine, rows, start_ns, calls, 1e-3, 1e-5, seed)
        rates.append((engine.calls - before) / (time.perf_counter() - start))
    return max(rates)


def batch_speedup(program: Program, plan: Plan, machine: Machine, limit: int, plans: int, seed: int) -> float:
    """Returns the speedup of ``Engine.score_batch`` on all cores over one core (best of five).

    The batch has ``plans`` random subsets of the plan's decisions.
    """
    engine = Engine(program, machine, limit)
    rows = rows_of(plan.decisions)
    selected = np.random.default_rng(seed).random((plans, len(rows))) < 0.97
    stacked = np.concatenate([rows[k] for k in selected])
    lengths = selected.sum(axis=1)

    serial, all_cores = (timeit.Timer(partial(engine.score_batch, stacked, lengths, threads)) for threads in (1, None))
    all_cores.timeit(1)
    times = [(serial.timeit(1), all_cores.timeit(1)) for _ in range(5)]
    return min(single for single, _ in times) / min(parallel for _, parallel in times)


def home_search(
    program: Program, machine: Machine, particles: int, iterations: int, seed: int, limit: float = 0.6
) -> dict[str, float]:
    """Times one search of HOME in this process: seconds in total and µs per simulator call.

    Args:
        program: program to plan.
        machine: machine to plan for.
        particles, iterations: size of the swarm, and its iterations.
        seed: seed of the swarm.
        limit: memory limit as a fraction of the peak.

    Raises:
        Infeasible: if HOME finds no plan within the limit.
    """
    limit_bytes = int(limit * program.peak_bytes)
    with contextlib.suppress(Infeasible):  # warm-up that compiles the code; it may find no plan
        HOME(particles=2, iterations=1, jobs=1).plan(program, machine, limit_bytes)
    planner = HOME(particles, iterations, jobs=1, seed=seed)
    seconds = timeit.timeit(lambda: planner.plan(program, machine, limit_bytes), gc.enable, number=1)
    return {"home_search_s": round(seconds, 3), "home_call_us": round(seconds / planner.simulator_calls * 1e6, 2)}


@jit
def pick_valid(masks, draws, chosen):
    """Chooses a random valid action per mask, from one draw in [0, 1) each; writes into ``chosen``."""
    for i in range(masks.shape[0]):
        remaining = int(draws[i] * masks[i].sum())
        for node in range(masks.shape[1]):
            if masks[i, node]:
                if remaining == 0:
                    chosen[i] = node
                remaining -= 1


def environment(
    program: Program, machine: Machine, limit: float, num_envs: int, steps: int, seed: int
) -> dict[str, dict[str, int]]:
    """Returns the steps per second of GpuMemory-v1 under random valid actions (best of five).

    Resets count, drawing actions does not. For comparison, Gymnasium's CartPole is timed as a single environment, in a
    SyncVectorEnv and as its NumPy vector environment.

    Args:
        program: program of the task.
        machine: machine of the task.
        limit: memory limit as a fraction of the peak.
        num_envs: environments in a batch.
        steps: total steps of each timing.
        seed: seed of the environments and the actions.
    """
    import gymnasium

    import envs  # registers GpuMemory-v1

    assert envs
    task: dict[str, Any] = {"program": program, "machine": machine, "limit": limit}
    rates: dict[str, int] = {}
    for name, reward, copy in (
        ("paper", "paper", False),
        ("paper_copied", "paper", True),
        ("causal", "causal", False),
        ("causal_copied", "causal", True),
    ):
        env = gymnasium.make("GpuMemory-v1", **task, reward=reward, copy=copy)
        rates[f"single_{name}"] = steps_per_s(env.unwrapped, 1, max(1, steps // 20), seed)
        vector = gymnasium.make_vec("GpuMemory-v1", num_envs, "vector_entry_point", **task, reward=reward, copy=copy)
        rates[f"batch_{name}"] = steps_per_s(vector, num_envs, steps, seed)
    pole = {
        "single": steps_per_s(gymnasium.make("CartPole-v1").unwrapped, 1, max(1, steps // 20), seed),
        "sync": steps_per_s(gymnasium.make_vec("CartPole-v1", num_envs, "sync"), num_envs, steps, seed),
        "numpy": steps_per_s(gymnasium.make_vec("CartPole-v1", num_envs, "vector_entry_point"), num_envs, steps, seed),
    }
    return {"env_steps_per_s": rates, "cartpole_steps_per_s": pole}


def steps_per_s(env: Any, num_envs: int, steps: int, seed: int) -> int:
    """Returns the steps per second of an environment or of a vector environment with autoreset."""
    vector = hasattr(env, "num_envs")
    generator = np.random.default_rng(seed)
    _, info = env.reset(seed=seed)
    chosen = np.zeros(num_envs, np.int64)
    best = 0.0
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
