"""Programs, machines and kernel times for pretraining: captured networks of random sizes on random machines."""

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

Network = dict[str, list[Any]]  # the values of each setting of a workload

LIMITS = 0.3, 0.8  # range of limits, as fractions of the peak
SHARES_OF_PEAK = (
    "elementwise",
    "norm",
    "pool",
    "pool_backward",
    "conv",
    "conv_backward",
    "conv_1x1",
    "conv_1x1_backward",
    "conv_bandwidth",
    "conv_float32",
    "conv_float32_backward",
    "matmul",
    "matmul_float32",
    "attention",
)


def program_path(out: Path, i: int) -> Path:
    """Returns the file of program ``i``."""
    return out / "programs" / f"{i:04d}.json.gz"


def times_path(out: Path, i: int) -> Path:
    """Returns the file of the kernel times of program ``i``'s tasks."""
    return out / "times" / f"{i:04d}.json"


def count_timed(out: Path, i: int) -> int:
    """Returns the number of a program's tasks with known kernel times; raises FormatError."""
    return len(read_times(times_path(out, i))) if times_path(out, i).exists() else 0


def capture_one(task: tuple[Path, list[Network], int, int, int]) -> None:
    """Captures a random network of acceptable size; writes its program and its kernel times on each task's machine."""
    from experiments import workloads

    out, networks, seed, i, tasks_each = task
    rng = random.Random(f"{seed}:{i}")
    machine = Machine.load("v100")  # each task sets the durations
    while True:
        settings = {key: rng.choice(values) for key, values in rng.choice(networks).items()}
        captured = workloads.load({"name": settings["family"], **settings}, machine)
        program = captured.program
        gaps = len(program.gaps(2**20))
        if len(program.kernels) <= 2600 and 8 <= gaps <= 1500:
            machines = [draw_machine(task_rng(seed, i, j)) for j in range(tasks_each)]
            write_json(
                times_path(out, i),
                [[k.duration_ns for k in captured.on(machine).program.kernels] for machine in machines],
            )
            program.save(program_path(out, i))
            return


def task_rng(seed: int, i: int, j: int) -> random.Random:
    """Returns the random generator of a task, which draws its machine first."""
    return random.Random(f"{seed}:{i}:{j}")


def draw_machine(rng: random.Random) -> Machine:
    """Returns a random machine, whose kernel times come from a GPU's time model (60 %) or a roofline."""
    return modeled_machine(rng) if rng.random() < 0.6 else random_machine(rng)


def modeled_machine(rng: random.Random) -> Machine:
    """Returns a GPU with a kernel-time model, its rates and shares perturbed log-normally, and a random link."""
    link = random_machine(rng)
    gpu = rng.choice([m for m in map(Machine.load, sorted(p.stem for p in PRESETS.glob("*.yaml"))) if m.kernel_times])
    times = gpu.kernel_times
    assert times is not None

    def perturb(rate: float, maximum: float = math.inf) -> float:
        return min(maximum, rate * math.exp(rng.gauss(0, 0.2)))

    shares: dict[str, Any] = {
        name: perturb(value, 1.0) for name, value in vars(times).items() if name in SHARES_OF_PEAK
    }
    return replace(
        link,
        memory_bytes_per_s=int(perturb(gpu.memory_bytes_per_s)),
        kernel_times=replace(times, **shares),
        flops_per_s={dtype: int(perturb(rate)) for dtype, rate in gpu.flops_per_s.items()},
    )


def random_machine(rng: random.Random) -> Machine:
    """Returns a random machine: 4 to 200 TFLOP/s, links of 4 to 60 GB/s, one or two copy engines."""

    def log_uniform(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    flops = log_uniform(4e12, 2e14)
    link = log_uniform(4e9, 6e10)
    kinds = ("conv", "matmul", "default", "norm", "elementwise", "reduce")
    h2d = link * rng.uniform(0.85, 1.1)
    # Fractions of the bandwidths available while both directions are busy; nvbandwidth measures about 0.5 and 0.95 on
    # A100s, 0.95 and 0.62 on H800s.
    shares = [*[(1.0, 1.0)] * 3, (0.5, 0.95), (0.95, 0.62), (0.75, 0.75), (0.85, 0.85)]
    h2d_share, d2h_share = rng.choice(shares)
    latency_ns = rng.choice([5_000, 10_000, 20_000])
    return Machine(
        name="random",
        memory_bytes=2**50,
        d2h_bytes_per_s=int(link),
        h2d_bytes_per_s=int(h2d),
        d2h_latency_ns=latency_ns,
        h2d_latency_ns=latency_ns,
        copy_engines=1 if rng.random() < 0.1 else 2,
        duplex_h2d_bytes_per_s=int(h2d_share * h2d),
        duplex_d2h_bytes_per_s=int(d2h_share * link),
        host_bytes=2**50,
        flops_per_s={"float32": int(flops), "bfloat16": int(flops)},
        memory_bytes_per_s=int(flops * log_uniform(0.03, 0.12)),
        launch_ns=int(log_uniform(1_500, 8_000)),
        efficiency={kind: rng.uniform(0.35, 0.95) for kind in kinds},
    )


@cache
def load_program(out: Path, i: int) -> Program:
    """Returns program ``i`` (cached)."""
    return Program.load(program_path(out, i))


def read_times(path: Path) -> list[list[int]]:
    """Returns the kernel times in ns of each task of a program."""

    def read(data: object) -> list[list[int]]:
        if not isinstance(data, list) or any(not isinstance(row, list) for row in data):
            raise FormatError("expected a list per task with the time of each kernel in ns")
        return data

    return load_json(path, read)


@cache
def kernel_times(out: Path, i: int) -> list[list[int]]:
    """Returns ``read_times`` of program ``i`` (cached)."""
    return read_times(times_path(out, i))


def task_program(out: Path, i: int, j: int) -> Program:
    """Returns program ``i`` with the kernel times of its task ``j``."""
    return load_program(out, i).with_durations(kernel_times(out, i)[j])
