"""Measures what a process takes of a GPU besides tensors, which PyTorch's allocator does not count: the CUDA context,
loaded kernels, and the handles of libraries (``Machine.context_bytes``)."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from executor.memory import cuda_index


class ContextError(RuntimeError):
    """It cannot be measured; the message is one sentence."""


class Context(NamedTuple):
    """Bytes that one process takes of a GPU besides tensors, and how they were measured."""

    nbytes: int
    source: str


def measure_context(device: str | torch.device = "cuda") -> Context:
    """Trains a layer in a second process and asks NVML for the bytes of that process, less what its allocator reserved.

    Without pynvml, or if NVML does not list the process (a container with process ids of its own), the bytes are by how
    much less memory is free: then no other process may allocate or free memory there meanwhile, and ``source`` says so.

    Raises:
        ContextError: there is no CUDA GPU, or the second process failed.
    """
    if not torch.cuda.is_available():
        raise ContextError("there is no CUDA GPU whose context could be measured")
    index = cuda_index(torch.device(device))
    torch.cuda.synchronize(index)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_hold, args=(there, index), daemon=True)
    before = torch.cuda.mem_get_info(index)[0]
    process.start()
    there.close()  # so that its end is seen here
    try:
        reserved = here.recv()
        listed = nvml_bytes(str(torch.cuda.get_device_properties(index).uuid), process.pid)
        if listed is not None:
            return Context(listed - reserved, "NVML's bytes of a second process, besides tensors")
        free = torch.cuda.mem_get_info(index)[0]
        return Context(
            before - free - reserved,
            "by how much less is free with a second process, besides tensors; NVML was not to be had for that process, "
            "so what others allocated meanwhile is in it",
        )
    except EOFError:
        raise ContextError("the process that was to make a CUDA context failed") from None
    finally:
        here.close()
        process.join()


def nvml_bytes(uuid: str, pid: int | None) -> int | None:
    """Bytes of a GPU that a process takes by NVML's count; None without pynvml or if NVML does not list the process."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")
        used = {p.pid: p.usedGpuMemory for p in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)}
    except pynvml.NVMLError:
        return None
    return used.get(pid)


def _hold(connection: Connection, index: int) -> None:
    """Creates cuDNN, cuBLAS and a context, sends what is reserved besides, and waits until that was read."""
    device = torch.device("cuda", index)
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 8)).to(device)
    layers(torch.ones(2, 3, 8, 8, device=device)).sum().backward()
    torch.cuda.synchronize(index)
    connection.send(torch.cuda.memory_reserved(index))
    try:
        connection.recv()
    except EOFError:
        pass
