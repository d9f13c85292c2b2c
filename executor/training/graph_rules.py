"""Decides whether a step can be, and by default is, a CUDA graph, and counts a graph's memory beyond the program."""

from __future__ import annotations

import inspect

import torch

from executor.capture.captured import Captured
from executor.memory import cuda_index
from executor.memory.graph_memory import libraries_bytes
from executor.training.bindings import device_of, inputs_of
from executor.training.node_calls import NUMBER, Calls
from executor.training.work import before_the_update

UNDONE = "a replay cannot be undone"


def beside_bytes(captured: Captured) -> int:
    """Returns a graph's memory beyond the program's, in bytes: slots of the batch and library workspaces."""
    device = device_of(captured)
    libraries = libraries_bytes(cuda_index(device)) if device.type == "cuda" else 0
    return sum(captured.program.tensors[t].nbytes for t in inputs_of(captured)) + libraries


def not_by_default(captured: Captured, undo: bool) -> str | None:
    """Returns the reason against capturing a step as a graph by default, or None; ``refused`` is checked separately."""
    if (device := device_of(captured)).type != "cuda":
        return f"its tensors are on the device {device.type!r}, a graph needs CUDA"
    if captured.micro:
        return "its micro-batches may arrive one by one, a graph needs all in one call (graph=True)"
    return UNDONE if undo else None


def refused(captured: Captured, calls: Calls, undo: bool) -> str | None:
    """Returns why the step cannot be captured as a graph, or None if it can."""
    schedule, device, inputs = calls.schedule, device_of(captured), inputs_of(captured)
    program = schedule.program
    if captured.returned.gradients:
        return "a graph copies its outputs, and so would copy the kept gradients"
    if calls.asks:
        return "a GradScaler decides on the host whether to skip the update"
    for node in captured.graph.graph.nodes:
        if node.target is NUMBER:
            name = program.tensors[captured.values[node.args[0]]].name if node.args[0] in captured.values else node.name
            return f"the host reads the number {name}; a capturable optimizer reads none"
    for i, node in enumerate(captured.placeholders):
        if node in captured.values and not on_device(captured.devices[i], device):
            return f"{captured.names[i]} is on the host, where a replay cannot read it: move it to the device"
    for step in schedule.steps:
        if step.again and calls.random(step.kernel):
            return f"the plan recomputes {program.kernels[step.kernel].name}, which draws random numbers"
    if captured.draws:
        return "the model's checkpoints restore random states"
    for t in inputs & before_the_update(schedule)[1]:
        return f"the step writes {program.tensors[t].name}, a tensor of the batch, for which a graph has a slot"
    if undo:
        return UNDONE
    if device.type != "cuda":
        return f"its tensors are on the device {device.type!r}, a graph needs CUDA"
    if "no_split" not in inspect.signature(torch.cuda.MemPool).parameters:
        return f"PyTorch {torch.__version__} has no memory pools with unsplit segments: use 2.11 or later"
    return None


def on_device(where: torch.device, device: torch.device) -> bool:
    """Returns True if a tensor is on the step's type of device."""
    return where.type == device.type
