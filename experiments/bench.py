"""The speed of simulator, capture, environment and allocators, on one core. Prints one JSON object and nothing else.

    python -m experiments.bench

Its keys (experiments/README.md says how each is measured): ``simulate_us``, ``simulate_all_us``, ``speedup_vs_simpy``,
``speedup_vs_reference``, ``capture_s``, ``home_search_s``, ``home_call_us``, ``env_steps_per_s``, ``smartpool_s``,
``smartpool_ratio``, ``portfolio_ratio``, ``optimal_s``, ``optimal_ratio``; ``home_paper_…`` is Table 3 of HOME. The
engine, the SimPy model and the reference must agree on the iteration to the nanosecond, or there is no number.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from omegaconf import DictConfig

from agents.heuristics.autoswap import peak_gaps
from experiments import cli
from experiments.benchmarks.packing import packing
from experiments.benchmarks.simulation import environment, home_search, simulation, swap_all
from simulator.machine import Machine
from simulator.program import Program

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


def capture(name: str, machine: Machine) -> tuple[float, Program]:
    """The best of three captures of a workload in seconds, and its program; raises as ``cli.workload``."""
    from experiments import workloads

    config = cli.workload(name)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        program = workloads.load(config, machine).program
        times.append(time.perf_counter() - start)
    return min(times), program


if __name__ == "__main__":
    main()
