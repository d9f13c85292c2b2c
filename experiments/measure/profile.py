"""Measures a network's training step on your GPU (format ``measured/1``, experiments/measure/measured_step.py).

The order matters: first the CUDA context, then eager steps with an empty allocator for their peaks and times, then
every kernel (executor/capture/profile.py). On the CPU, context and peaks are omitted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from executor.capture.profile import Cache, ProfileError
from executor.capture.profiler import measure
from executor.memory.context import measure_context
from experiments.measure.measured_step import MeasuredStep, measured_step
from experiments.measure.networks import NETWORKS, Network, build, free_cache, timed
from experiments.workloads import WorkloadError
from experiments.workloads.module import build as build_module
from simulator.machine import Machine


def profiled(
    network: str,
    machine: str,
    device: str = "cuda",
    *,
    source: str,
    license: str,
    rates: Path | None = None,
    name: str = "",
    cache: Cache = "cold",
    repeats: int = 7,
    steps: int = 10,
    log: Callable[[str], None] = lambda text: None,
) -> MeasuredStep:
    """Measures a network's training step.

    Args:
        network: key of experiments/measure/networks.py, or "pkg.mod:factory" that returns (model, loss_fn,
            optimizer, (x, y)) on the device.
        machine: preset to compare with.
        source: author or publication of the measurement.
        license: license of the measurement.
        rates: YAML file written by ``executor.calibrate``.
        name: display name of the workload; default: the network's name.
        cache, repeats: see ``executor.capture.profile.measure``.
        steps: number of timed eager steps.
        log: called with the next activity.

    Returns:
        The profile.

    Raises:
        FormatError, WorkloadError, ProfileError, CaptureError, ContextError: if a file or the network is invalid, or
            the step cannot be measured.
    """
    preset = Machine.load(machine)
    measured_rates = None if rates is None else Machine.load(rates)
    if device == "cuda" and not torch.cuda.is_available():
        raise ProfileError("no CUDA GPU found; --device cpu profiles on the CPU")
    cuda = device == "cuda"
    context = None
    if cuda:
        log("the CUDA context")
        context = measure_context(device).nbytes
    net = build_network(network, device)
    free_cache()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    warm_steps = 3  # untimed, but included in the peaks
    log(f"{warm_steps + steps} eager steps")
    timed(net.step, warm_steps, device)
    times = timed(net.step, steps, device)
    peaks = (torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()) if cuda else (None, None)
    log("every kernel")
    captured = net.captured(preset)
    profile = measure(captured, device, machine, repeats, cache=cache)
    return measured_step(
        captured,
        profile,
        measured_rates,
        source=source,
        license=license,
        workload=name or net.name,
        step_ns=round(median(times)),
        context_bytes=context,
        reserved_bytes=peaks[0],
        allocated_bytes=peaks[1],
    )


def build_network(network: str, device: str) -> Network:
    """Builds the network on the device with PyTorch's default optimizer settings; see ``profiled``.

    Raises:
        WorkloadError: the name is unknown, or the factory returns no optimizer or no parameters on the device.
    """
    if network in NETWORKS:
        return build(network, device)
    if ":" not in network:
        raise WorkloadError(f"network: expected one of {', '.join(NETWORKS)}, or 'pkg.mod:factory', got {network!r}")
    model, loss_fn, optimizer, batch = build_module(target=network)
    if optimizer is None:
        raise WorkloadError(f"target: {network} returns no optimizer, which the measurement of a training step needs")
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type != device:
        location = "no parameters" if parameter is None else f"its parameters on {parameter.device.type}"
        raise WorkloadError(f"target: {network} has {location}; expected parameters on {device}")
    return Network(network.rpartition(":")[2], model, loss_fn, optimizer, batch, ())
