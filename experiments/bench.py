"""The speed of simulator, capture, environment and allocators, on one core. Prints one JSON object and nothing else.

    python -m experiments.bench

Its keys (experiments/README.md says how each is measured): ``simulate_us``, ``simulate_all_us``, ``speedup_vs_simpy``,
``speedup_vs_reference``, ``capture_s``, ``home_search_s``, ``home_call_us``, ``env_steps_per_s``, ``smartpool_s``,
``smartpool_ratio``, ``portfolio_ratio``, ``optimal_s``, ``optimal_ratio``; ``home_paper_…`` is Table 3 of HOME. The
engine, the SimPy model and the reference must agree on the iteration to the nanosecond, or there is no number.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from agents import Infeasible
from agents.heuristics.autoswap import peak_gaps
from agents.heuristics.home import HOME
from experiments import cli
from experiments.benchmarks import simpy_model
from simulator import Plan, Swap, reference
from simulator.compiled.engine import Engine, rows_of
from simulator.machine import Machine
from simulator.pool import Intervals, optimal, portfolio, smartpool
from simulator.program import Gap, Program

# HOME, Table 3. Its ResNet does not say how deep it is.
HOME_PAPER = {
    "home_paper_search_s": {"vgg16": 25, "resnet50": 10},
    "home_paper_call_us": {"vgg16": 1400, "resnet50": 600, "average": 4700},
}


@cli.entry("bench")
def main(cfg: DictConfig) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    machine = cli.machine(cfg)
    calls, steps = cli.integer(cfg, "calls", 1), cli.integer(cfg, "env_steps", 1)
    min_bytes = cli.integer(cfg, "min_bytes")
    blocks = [int(n) for n in cli.values(cfg, "blocks")]
    perfect_blocks, pack_seconds = cli.integer(cfg, "perfect_blocks", 1), float(cfg.pack_seconds)
    particles, iterations = cli.integer(cfg, "home.particles", 1), cli.integer(cfg, "home.iterations", 1)
    seed = cli.integer(cfg, "seed")
    keys = ("simulate_us", "simulate_all_us", "speedup_vs_simpy", "speedup_vs_reference", "capture_s")
    found: dict[str, Any] = {key: {} for key in (*keys, "home_search_s", "home_call_us")}
    programs = []
    for name in cli.values(cfg, "workloads"):
        seconds, program = capture(str(name), machine)
        programs.append(program)
        found["capture_s"][name] = round(seconds, 3)
        speed = simulation(program, swap_all(program, peak_gaps(program, min_bytes)), machine, calls)
        for key, value in speed.items():
            found[key][name] = value
        every = swap_all(program, program.gaps(min_bytes))
        found["simulate_all_us"][name] = simulation(program, every, machine, calls)["simulate_us"]
        for key, value in home_search(program, machine, particles, iterations, seed).items():
            found[key][name] = value
    found |= HOME_PAPER
    found["env_steps_per_s"] = round(environment(programs[0], machine, steps, seed))
    found |= packing(blocks, perfect_blocks, pack_seconds, seed)
    print(json.dumps(found, indent=1))


def swap_all(program: Program, gaps: list[Gap]) -> Plan:
    """The plan that swaps a tensor out in each of the gaps."""
    return Plan(tuple(Swap(*gap) for gap in gaps), program.fingerprint)


def simulation(program: Program, plan: Plan, machine: Machine, calls: int) -> dict[str, float]:
    """One plan in the engine, in SimPy and in the reference: the median call, and the ratios.

    Raises:
        AssertionError: the three disagree.
    """
    needed = Engine(program, machine, program.peak_bytes).score(rows_of(plan.decisions)).required_bytes
    limit = max(needed, int(0.65 * program.peak_bytes))
    engine, rows = Engine(program, machine, limit), rows_of(plan.decisions)
    results = {
        "engine": engine.score(rows).iteration_ns,
        "SimPy": simpy_model.simulate(program, plan, machine, limit),
        "reference": reference.simulate(program, plan, machine, limit, iterations=1).iteration_ns,
    }
    if len(set(results.values())) > 1:
        raise AssertionError(f"{program.name}: the simulators disagree on the iteration (ns): {results}")
    fast = median_s(lambda: engine.score(rows), calls)
    simpy = median_s(lambda: simpy_model.simulate(program, plan, machine, limit), 5)
    slow = median_s(lambda: reference.simulate(program, plan, machine, limit, iterations=1), 3)
    return {
        "simulate_us": round(fast * 1e6, 2),
        "speedup_vs_simpy": round(simpy / fast, 1),
        "speedup_vs_reference": round(slow / fast, 1),
    }


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
    start = time.perf_counter()
    planner.plan(program, machine, limit_bytes)
    seconds = time.perf_counter() - start
    return {"home_search_s": round(seconds, 3), "home_call_us": round(seconds / planner.simulator_calls * 1e6, 2)}


def median_s(call: Callable[[], object], repeats: int) -> float:
    """Median duration of a call, in seconds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def capture(name: str, machine: Machine) -> tuple[float, Program]:
    """The best of three captures of a workload in seconds, and its program.

    Raises:
        UsageError: there is no such workload.
    """
    from experiments import workloads

    file = cli.CONFIGS / "workload" / f"{name}.yaml"
    if not file.is_file():
        known = {path.stem for path in file.parent.glob("*.yaml")}
        raise cli.UsageError(f"workloads: there is no workload {name!r}{cli.nearest(name, known)}")
    config = cli.plain(OmegaConf.load(file))  # type: ignore[arg-type]
    times = []
    for _ in range(3):
        start = time.perf_counter()
        program = workloads.load(config, machine).program
        times.append(time.perf_counter() - start)
    return min(times), program


def environment(program: Program, machine: Machine, steps: int, seed: int) -> float:
    """Steps a second of GpuMemory-v0 under random valid actions, resets included."""
    import gymnasium

    import envs  # registers GpuMemory-v0

    assert envs
    env = gymnasium.make("GpuMemory-v0", program=program, machine=machine, limit=0.65)
    generator = np.random.default_rng(seed)

    def play(n: int) -> None:
        _, info = env.reset(seed=seed)
        for _ in range(n):
            action = int(generator.choice(np.flatnonzero(info["action_mask"])))
            _, _, terminated, truncated, info = env.step(action)
            if terminated or truncated:
                _, info = env.reset()

    play(10)  # compiles
    start = time.perf_counter()
    play(steps)
    return steps / (time.perf_counter() - start)


def packing(sizes: list[int], perfect_blocks: int, seconds: float, seed: int) -> dict[str, Any]:
    """The allocators on instances of so many blocks: their seconds and ratios."""
    optimal.pack(scattered(10, seed))  # compiles it, and the heuristics that it starts with
    found: dict[str, Any] = {"smartpool_s": {}, "smartpool_ratio": {}, "portfolio_ratio": {}}
    for n in sizes:
        blocks = scattered(n, seed)
        start = time.perf_counter()
        greedy = smartpool.pack(blocks)
        found["smartpool_s"][n] = round(time.perf_counter() - start, 3)
        found["smartpool_ratio"][n] = round(greedy.ratio(blocks), 5)
        found["portfolio_ratio"][n] = round(portfolio.pack(blocks, seconds=seconds, seed=seed).ratio(blocks), 5)
    blocks = perfect(perfect_blocks, seed)
    start = time.perf_counter()
    exact = optimal.pack(blocks, seconds=seconds, seed=seed, workers=1)
    found["optimal_s"] = round(time.perf_counter() - start, 3)
    return found | {"optimal_ratio": round(exact.ratio(blocks), 5)}


def scattered(n: int, seed: int) -> Intervals:
    """n blocks that come at any time, stay for up to a tenth of it, and have any size up to 100 MB."""
    rng = np.random.default_rng(seed)
    lower = rng.integers(0, n, n)
    return Intervals(lower, lower + rng.integers(1, max(n // 10, 2), n), rng.integers(1, 10**8, n))


def perfect(n: int, seed: int, width: int = 2**20, height: int = 2**20) -> Intervals:
    """n blocks that fill ``height`` bytes over ``width`` instants: straight cuts of a rectangle, shuffled."""
    rng = np.random.default_rng(seed)
    heap = [(0.0, 0, width, height)]  # of rectangles, large ones first: rank, start, duration, bytes
    while len(heap) < n:
        _, start, duration, nbytes = heapq.heappop(heap)
        if max(duration, nbytes) < 2:
            raise ValueError(f"a rectangle of {width} x {height} cannot be cut into {n}")
        part = rng.uniform(0.2, 0.8)
        in_time = duration / width * rng.uniform(0.5, 1.5) > nbytes / height * rng.uniform(0.5, 1.5)
        if duration > 1 and (in_time or nbytes < 2):
            first = min(max(int(part * duration), 1), duration - 1)
            parts = [(start, first, nbytes), (start + first, duration - first, nbytes)]
        else:
            first = min(max(int(part * nbytes), 1), nbytes - 1)
            parts = [(start, duration, first), (start, duration, nbytes - first)]
        for piece in parts:
            heapq.heappush(heap, (-piece[1] * piece[2] * rng.uniform(0.3, 1), *piece))
    _, starts, durations, sizes = np.array(heap)[rng.permutation(n)].T.astype(np.int64)
    return Intervals(starts, starts + durations, sizes)


if __name__ == "__main__":
    main()
