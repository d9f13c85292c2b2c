"""Measures a network's step on one's own GPU (``measured/1``, experiments/common/measured_step.py).

In this order, so that each finds what it has to: the context; eager steps from a cold allocator, for their peaks and
their time; every kernel (executor/capture/profile.py). On the CPU the same without context and peaks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from executor.capture.profile import Cache, ProfileError, measure
from executor.memory.context import measure_context
from experiments.common.measured_step import MeasuredStep, measured_step
from experiments.validate_gpu.networks import NETWORKS, Network, build, give_back, timed
from experiments.workloads import WorkloadError
from experiments.workloads.module import build as own
from simulator.machine import Machine

WARM = 3  # steps before those that are timed; the peaks are of these, too


def profiled(
    network: str, machine: str, device: str = "cuda", *, source: str, licence: str, rates: Path | None = None,
    name: str = "", cache: Cache = "cold", repeats: int = 7, steps: int = 10,
    log: Callable[[str], None] = lambda text: None,
) -> MeasuredStep:  # fmt: skip
    """A measured step.

    Args:
        network: of experiments/validate_gpu/networks.py, or "pkg.mod:factory", which returns (model, loss_fn,
            optimizer, (x, y)) on the device.
        machine: the preset that it is compared with.
        rates: the YAML file that ``executor.calibrate`` wrote.
        name: of the workload, for people; "" for the network's.
        cache, repeats: as of ``measure``.
        steps: eager ones that are timed.
        log: is called with what is done next.

    Raises:
        FormatError, WorkloadError, ProfileError, CaptureError, ContextError: a file or the network is wrong, or
            it cannot be measured; one sentence.
    """
    preset = Machine.load(machine)
    measured_rates = None if rates is None else Machine.load(rates)
    if device == "cuda" and not torch.cuda.is_available():
        raise ProfileError("there is no CUDA GPU to profile on; --device cpu does the same without one")
    cuda, context = device == "cuda", None
    if cuda:
        log("the CUDA context")
        context = measure_context(device).nbytes
    made = built(network, device)
    give_back()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    log(f"{WARM + steps} eager steps")
    timed(made.step, WARM, device)
    _, times = timed(made.step, steps, device)
    peaks = (torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()) if cuda else (None, None)
    log("every kernel")
    captured = made.captured(preset)
    profile = measure(captured, device, machine, repeats, cache=cache)
    return measured_step(
        captured, profile, measured_rates, source=source, licence=licence, workload=name or made.name,
        step_ns=round(median(times)), context_bytes=context, reserved_bytes=peaks[0], allocated_bytes=peaks[1],
    )  # fmt: skip


def built(network: str, device: str) -> Network:
    """A network that is really trained, its optimizer as PyTorch chooses; see ``profiled``."""
    if network in NETWORKS:
        return build(network, device)
    if ":" not in network:
        raise WorkloadError(f"network: expected one of {', '.join(NETWORKS)}, or 'pkg.mod:factory', got {network!r}")
    model, loss_fn, optimizer, batch = own(target=network)
    if optimizer is None:
        raise WorkloadError(f"target: {network} has no optimizer; a whole training step is measured")
    parameter = next(model.parameters(), None)
    if parameter is None or parameter.device.type != device:
        where = "nowhere" if parameter is None else f"on {parameter.device.type}"
        raise WorkloadError(f"target: {network} has its parameters {where}, not on {device}")
    return Network(network.rpartition(":")[2], model, loss_fn, optimizer, batch, ())
