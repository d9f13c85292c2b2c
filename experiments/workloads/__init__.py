"""Workloads: the papers' networks, and anybody's own model.

A workload is a configuration (``configs/workload/*.yaml``): ``name``, ``family`` (vgg, resnet, module) and

- vgg, resnet: ``depth``, ``batch_size``;
- module: ``target``, ``"pkg.mod:factory"``;
- ``iteration_ms``: measured iteration time by machine name; on those machines the kernels' durations are
  scaled to it, elsewhere they are the roofline's;
- ``algorithms``: true gives convolutions the workspace of their fastest algorithm, and the others as variants
  (executor/algorithms.py); the durations stay. Without it no kernel has a workspace;
- ``paper_peak_mb``: the paper's peak load, for comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from executor.capture import Captured, capture
from experiments.workloads import module, resnet, vgg
from experiments.workloads.module import Parts, WorkloadError
from simulator.machine import Machine

__all__ = ["WorkloadError", "build", "load"]

_NETWORKS: dict[str, tuple[type[nn.Module], Mapping[int, object]]] = {
    "vgg": (vgg.VGG, vgg.BLOCKS),
    "resnet": (resnet.ResNet, resnet.STAGES),
}
_KEYS = {"name", "family", "depth", "batch_size", "iteration_ms", "target", "paper_peak_mb", "algorithms"}


def load(workload: Mapping[str, Any], machine: Machine) -> Captured:
    """Captures a workload's training step, with durations for ``machine``.

    Raises:
        WorkloadError: the configuration is wrong.
        CaptureError: the model cannot be traced.
    """
    parts = build(workload)
    iteration_ms = workload.get("iteration_ms") or {}
    measured = iteration_ms.get(machine.name) if isinstance(iteration_ms, Mapping) else iteration_ms
    if measured is not None and (isinstance(measured, bool) or not isinstance(measured, (int, float)) or measured <= 0):
        raise WorkloadError(f"workload.iteration_ms: expected positive numbers by machine, got {iteration_ms!r}")
    algorithms = workload.get("algorithms", False)
    if not isinstance(algorithms, bool):
        raise WorkloadError(f"workload.algorithms: expected true or false, got {algorithms!r}")
    captured = capture(*parts, machine=machine, name=str(workload.get("name") or type(parts[0]).__name__))
    iteration_ns = None if measured is None else round(measured * 1e6)
    return captured.on(machine, iteration_ns=iteration_ns, algorithms=algorithms)


def build(workload: Mapping[str, Any]) -> Parts:
    """Model, loss function, optimizer and example batch of a workload; ours are on the meta device.

    Raises:
        WorkloadError: the configuration is wrong.
    """
    for key in workload:
        if key not in _KEYS:
            raise WorkloadError(f"workload: unknown key {key!r}")
    family = workload.get("family")
    if family == "module":
        return module.build(workload.get("target"))
    if family not in _NETWORKS:
        raise WorkloadError(f"workload.family: expected vgg, resnet or module, got {family!r}")
    network, depths = _NETWORKS[family]
    depth, batch = workload.get("depth"), workload.get("batch_size", 100)
    if depth not in depths:
        raise WorkloadError(f"workload.depth: {family} has {', '.join(map(str, depths))}, not {depth!r}")
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 2:  # batch-norm of one row is an error
        raise WorkloadError(f"workload.batch_size: expected an integer of at least 2, got {batch!r}")
    with torch.device("meta"):
        model = network(depth)
        batch_tensors = torch.empty(batch, 3, 32, 32), torch.empty(batch, dtype=torch.int64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, nn.CrossEntropyLoss(), optimizer, batch_tensors
