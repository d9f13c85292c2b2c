"""Random tasks for pretraining: captured networks of random size, random machines and kernel times."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from simulator.files import FormatError, load_json, write_json
from simulator.machine import PRESETS, Machine
from simulator.program import Program

Network = dict[str, list[Any]]  # candidate values of each workload setting

MOST_KERNELS, LEAST_GAPS, MOST_GAPS = 2600, 8, 1500  # bounds for a program
LIMITS = 0.3, 0.8  # range of limits, as fractions of the peak
# Bandwidth fraction of each direction (H2D, D2H) while both are busy: nvbandwidth measures about 0.5 and 0.95 on
# A100s, 0.95 and 0.62 on H800s.
SHARES = *[(1.0, 1.0)] * 3, (0.5, 0.95), (0.95, 0.62), (0.75, 0.75), (0.85, 0.85)
CAPTURED_ON = "v100"  # placeholder: durations depend on the machine of each task
MODELLED = 0.6  # fraction of tasks with the time model of a GPU; the others use a roofline
SCATTER = 0.2  # standard deviation of the log rates of a modelled GPU
SHARES_OF_PEAK = ("elementwise", "norm", "pool", "pool_backward", "conv", "conv_backward", "conv_1x1",
                  "conv_1x1_backward", "conv_bandwidth", "conv_float32", "conv_float32_backward", "matmul",
                  "matmul_float32", "attention")  # fmt: skip


def program_path(out: Path, i: int) -> Path:
    """Path of program ``i``."""
    return out / "programs" / f"{i:04d}.json.gz"


def times_path(out: Path, i: int) -> Path:
    """Path of the kernel times for the tasks of program ``i``."""
    return out / "times" / f"{i:04d}.json"


def timed(out: Path, i: int) -> int:
    """Returns the number of tasks of a program with known kernel times; raises FormatError."""
    return len(read_times(times_path(out, i))) if times_path(out, i).exists() else 0


def capture_one(task: tuple[Path, list[Network], int, int, int]) -> None:
    """Captures a random network of suitable size.

    Writes the program and its kernel durations on the machine of each task.
    """
    from experiments import workloads

    out, networks, seed, i, each = task
    rng = random.Random(f"{seed}:{i}")
    machine = Machine.load(CAPTURED_ON)
    while True:
        chosen = {key: rng.choice(values) for key, values in rng.choice(networks).items()}
        captured = workloads.load({"name": chosen["family"], **chosen}, machine)
        program = captured.program
        gaps = len(program.gaps(2**20))
        if len(program.kernels) <= MOST_KERNELS and LEAST_GAPS <= gaps <= MOST_GAPS:
            machines = [drawn_machine(task_rng(seed, i, j)) for j in range(each)]
            write_json(
                times_path(out, i),
                [[k.duration_ns for k in captured.on(machine).program.kernels] for machine in machines],
            )
            program.save(program_path(out, i))
            return


def task_rng(seed: int, i: int, j: int) -> random.Random:
    """Random generator of a task, which draws the machine first."""
    return random.Random(f"{seed}:{i}:{j}")


def drawn_machine(rng: random.Random) -> Machine:
    """Draws a machine: with the time model with probability MODELLED, else with a roofline."""
    return modelled_machine(rng) if rng.random() < MODELLED else random_machine(rng)


def modelled_machine(rng: random.Random) -> Machine:
    """Draws a GPU with a time model, its rates and shares perturbed by SCATTER, and a random link."""
    link = random_machine(rng)
    gpu = rng.choice([m for m in map(Machine.load, sorted(p.stem for p in PRESETS.glob("*.yaml"))) if m.kernel_times])
    times = gpu.kernel_times
    assert times is not None

    def off(rate: float, most: float = math.inf) -> float:
        return min(most, rate * math.exp(rng.gauss(0, SCATTER)))

    shares = {name: off(value, 1.0) for name, value in vars(times).items() if name in SHARES_OF_PEAK}
    return replace(
        link, memory_bytes_per_s=int(off(gpu.memory_bytes_per_s)), kernel_times=replace(times, **shares),
        flops_per_s={dtype: int(off(rate)) for dtype, rate in gpu.flops_per_s.items()},
    )  # fmt: skip


def random_machine(rng: random.Random) -> Machine:
    """Draws a roofline machine: FLOP rates of small to large GPUs, links of 4 to 60 GB/s, one or two copy engines."""

    def between(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    flops, link = between(4e12, 2e14), between(4e9, 6e10)
    kinds = ("conv", "matmul", "default", "norm", "elementwise", "reduce")
    h2d, (h2d_share, d2h_share) = link * rng.uniform(0.85, 1.1), rng.choice(SHARES)
    latency_ns = rng.choice([5_000, 10_000, 20_000])
    return Machine(
        name="random", memory_bytes=2**50, d2h_bytes_per_s=int(link), h2d_bytes_per_s=int(h2d),
        d2h_latency_ns=latency_ns, h2d_latency_ns=latency_ns, copy_engines=1 if rng.random() < 0.1 else 2,
        duplex_h2d_bytes_per_s=int(h2d_share * h2d), duplex_d2h_bytes_per_s=int(d2h_share * link),
        host_bytes=2**50, flops_per_s={"float32": int(flops), "bfloat16": int(flops)},
        memory_bytes_per_s=int(flops * between(0.03, 0.12)), launch_ns=int(between(1_500, 8_000)),
        efficiency={kind: rng.uniform(0.35, 0.95) for kind in kinds},
    )  # fmt: skip


@cache
def captured(out: Path, i: int) -> Program:
    """Loads program ``i`` (cached)."""
    return Program.load(program_path(out, i))


def read_times(path: Path) -> list[list[int]]:
    """Reads ns per kernel for each task of a program."""

    def read(data: object) -> list[list[int]]:
        if not isinstance(data, list) or any(not isinstance(row, list) for row in data):
            raise FormatError("expected a list of ns per kernel for each task")
        return data

    return load_json(path, read)


@cache
def kernel_times(out: Path, i: int) -> list[list[int]]:
    """Reads kernel times as ``read_times`` (cached)."""
    return read_times(times_path(out, i))


def on_task(out: Path, i: int, j: int) -> Program:
    """Returns a program with the kernel times of its task ``j``."""
    return captured(out, i).with_durations(kernel_times(out, i)[j])
