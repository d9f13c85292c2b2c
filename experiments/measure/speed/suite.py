"""Suite ``speed``: timings of the simulator, capture, environment and allocators.

All timings use one core, except ``scores_speedup`` and batches of environments. Results and methods:
experiments/README.md. The engine, the SimPy model and the reference must agree on the iteration time in ns, else the
suite fails.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

from omegaconf import DictConfig

import agents
from agents.heuristics.autoswap import peak_gaps
from experiments.common import cli, report
from experiments.measure.speed.host_time import NETWORKS, host_times, step_overhead
from experiments.measure.speed.packing import packing
from experiments.measure.speed.simulation import (
    batch_speedup,
    environment,
    home_search,
    search_rate,
    simulation,
    swap_all,
)
from simulator.limits import limit_bytes
from simulator.machine import Machine
from simulator.program import Program

# Source: HOME, Table 3. The paper does not state the depth of its ResNet.
HOME_PAPER = {
    "home_paper_search_s": {"vgg16": 25, "resnet50": 10},
    "home_paper_call_us": {"vgg16": 1400, "resnet50": 600, "average": 4700},
}


def run_suite(cfg: DictConfig) -> dict[str, Any]:
    """Runs the suite with the settings ``speed``; raises UsageError, FormatError or WorkloadError if one is invalid."""
    os.environ["OMP_NUM_THREADS"] = "1"
    machine = Machine.load(str(cfg.machine))
    calls = cli.integer(cfg, "calls", 1)
    min_bytes = cli.size(cfg, "min_bytes")
    blocks = [int(n) for n in cli.values(cfg, "blocks")]
    perfect_blocks = cli.integer(cfg, "perfect_blocks", 1)
    pack_seconds = float(cfg.pack_seconds)
    particles = cli.integer(cfg, "home.particles", 1)
    iterations = cli.integer(cfg, "home.iterations", 1)
    seed = cli.integer(cfg, "seed")
    keys = ("simulate_us", "simulate_all_us", "speedup_vs_simpy", "speedup_vs_reference", "capture_s")
    results: dict[str, Any] = {key: {} for key in (*keys, "home_search_s", "home_call_us")}
    programs: dict[str, Program] = {}
    networks = [str(name) for name in cli.values(cfg, "workloads")]
    tasks = cli.to_dict(cfg)["plans"]
    with report.track_stages(stages(networks, list(tasks), len(blocks), pack_seconds), manual_refresh=True) as begin:
        for name in networks:
            begin(f"simulating {name}")
            seconds, program = capture(name, machine)
            programs[name] = program
            results["capture_s"][name] = round(seconds, 3)
            speed = simulation(program, swap_all(program, peak_gaps(program, min_bytes)), machine, calls)
            for key, value in speed.items():
                results[key][name] = value
            all_swaps = swap_all(program, program.gaps(min_bytes))
            results["simulate_all_us"][name] = simulation(program, all_swaps, machine, calls)["simulate_us"]
            for key, value in home_search(program, machine, particles, iterations, seed).items():
                results[key][name] = value
        results |= HOME_PAPER
        results |= plans(tasks, programs, machine, calls, cli.integer(cfg, "plan_calls", 20), seed, begin)
        begin("steps of the environment")
        env = str(cfg.env.workload)
        if env not in programs:
            programs[env] = capture(env, machine, 1)[1]
        num_envs = cli.integer(cfg, "env.num_envs", 1)
        steps = cli.integer(cfg, "env.steps", 1)
        results |= environment(programs[env], machine, float(cfg.env.limit), num_envs, steps, seed)
        begin("packing")
        results |= packing(blocks, perfect_blocks, pack_seconds, seed)
        begin("planned steps")
        results |= step_overhead(machine, int(cfg.step.depth), int(cfg.step.min_bytes), int(cfg.step.repeats))
        begin("host time of steps")
        results |= host_times(machine, list(NETWORKS), int(cfg.step.repeats))
        begin("a first command")
        results["first_command_s"] = first_command(str(cfg.first_command))
    return results


def stages(networks: list[str], tasks: list[str], blocks: int, pack_seconds: float) -> dict[str, float]:
    """Returns the timed stages in order, with their approximate seconds under default settings."""
    return {
        **{f"simulating {name}": 12.0 for name in networks},
        **{f"timing plans of {name}": 10.0 for name in tasks},
        "steps of the environment": 40.0,
        "packing": pack_seconds * (blocks + 1),
        "planned steps": 20.0,
        "host time of steps": 60.0,
        "a first command": 20.0,
    }


def first_command(workload: str) -> dict[str, float]:
    """Times ``evaluate`` with one planner in s: without a compilation cache (``cold``) and with it (``warm``)."""
    durations = {}
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("cold", "warm"):
            command = [
                sys.executable,
                "-m",
                "experiments.evaluate",
                f"workload={workload}",
                "planners=[autoswap_swdoa]",
                f"out={folder}/{cache}",
            ]
            run = partial(
                subprocess.run, command, env=os.environ | {"NUMBA_CACHE_DIR": folder}, check=True, capture_output=True
            )
            durations[cache] = round(timeit.timeit(run, number=1), 1)
    return durations


def plans(
    tasks: dict[str, dict[str, Any]],
    programs: dict[str, Program],
    machine: Machine,
    calls: int,
    plan_calls: int,
    seed: int,
    begin: Callable[[str], None],
) -> dict[str, dict[str, float]]:
    """Times simulator calls and searches for plans of annealing.

    Args:
        tasks: program (a file in the repository or a workload), limit and mode, by task name.
        programs: programs captured so far, by workload; missing ones are added.
        machine: machine to plan for.
        calls: simulator calls of each timing.
        plan_calls: simulator calls for making a plan.
        seed: seed of the searches.
        begin: called with each stage's name.

    Returns:
        Timing -> task name -> value.
    """
    keys = ("plan_us", "plan_speedup_vs_simpy", "plan_speedup_vs_reference", "search_calls_per_s", "scores_speedup")
    results: dict[str, dict[str, float]] = {key: {} for key in keys}
    for name, task in tasks.items():
        begin(f"timing plans of {name}")
        source = str(task["program"])
        mode = str(task["mode"])
        if source not in programs:
            file = cli.CONFIGS.parent / source
            programs[source] = Program.load(file) if file.is_file() else capture(source, machine, 1)[1]
        program = programs[source]
        limit = limit_bytes(task["limit"], program)
        plan = agents.make("annealing", mode=mode, calls=plan_calls, seed=seed).plan(program, machine, limit)
        speed = simulation(program, plan, machine, calls, limit)
        results["plan_us"][name] = speed["simulate_us"]
        for peer in ("simpy", "reference"):
            results[f"plan_speedup_vs_{peer}"][name] = speed[f"speedup_vs_{peer}"]
        rate = search_rate(program, plan, machine, limit, mode, calls, seed)
        results["search_calls_per_s"][name] = round(rate)
        results["scores_speedup"][name] = round(batch_speedup(program, plan, machine, limit, calls, seed), 2)
    return results


def capture(name: str, machine: Machine, times: int = 3) -> tuple[float, Program]:
    """Returns the shortest capture time of a workload in seconds, and its program; raises as in ``cli.workload``."""
    from experiments import workloads

    config = cli.workload(name)
    programs = list[Program]()
    load = partial(workloads.load, config, machine)
    spent = timeit.repeat(lambda: programs.append(load().program), gc.enable, number=1, repeat=times)
    return min(spent), programs[-1]
