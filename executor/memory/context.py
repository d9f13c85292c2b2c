"""Measures the device memory that a process uses besides tensors (``Machine.context_bytes``).

It consists of the CUDA context, loaded kernels and library handles; PyTorch's allocator does not count it.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from executor.memory import cuda_index


class ContextError(RuntimeError):
    """Raised if the context cannot be measured."""


class Context(NamedTuple):
    """Device memory that one process uses besides tensors, in bytes, and the source of the measurement."""

    nbytes: int
    source: str


def measure_context(device: str | torch.device = "cuda") -> Context:
    """Trains a small model in a second process and returns its device memory by NVML, less its allocator's reservation.

    Without pynvml, or if NVML does not list the process (a container with its own process ids), the result is the
    decrease in free device memory. It is then valid only if no other process allocates or frees device memory
    meanwhile, and ``source`` records the method.

    Raises:
        ContextError: no CUDA GPU is available, or the second process failed.
    """
    if not torch.cuda.is_available():
        raise ContextError("no CUDA GPU is available, so its context cannot be measured; measure it on the GPU's host")
    index = cuda_index(torch.device(device))
    torch.cuda.synchronize(index)
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe()
    process = spawn.Process(target=_hold_context, args=(sender, index), daemon=True)
    free_before = torch.cuda.mem_get_info(index)[0]
    process.start()
    sender.close()  # or recv() would not see the second process exit
    try:
        reserved = receiver.recv()
        process_bytes = nvml_bytes(str(torch.cuda.get_device_properties(index).uuid), process.pid)
        if process_bytes is not None:
            return Context(process_bytes - reserved, "device memory of a second process by NVML, less its tensors")
        free_after = torch.cuda.mem_get_info(index)[0]
        return Context(
            free_before - free_after - reserved,
            "decrease in free device memory with a second process, less its tensors; NVML did not list that process, "
            "so allocations of other processes in the meantime are included",
        )
    except EOFError:
        raise ContextError(
            "the second process failed before it could create a CUDA context; free device memory and try again"
        ) from None
    finally:
        receiver.close()
        process.join()


def nvml_bytes(uuid: str, pid: int | None) -> int | None:
    """Returns the device memory of a process by NVML, or None without pynvml or if NVML does not list the process."""
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


def _hold_context(connection: Connection, index: int) -> None:
    """Initializes cuDNN, cuBLAS and a context, sends the bytes the allocator reserved, and waits for the reader."""
    device = torch.device("cuda", index)
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 8)).to(device)
    layers(torch.ones(2, 3, 8, 8, device=device)).sum().backward()
    torch.cuda.synchronize(index)
    connection.send(torch.cuda.memory_reserved(index))
    try:
        connection.recv()
    except EOFError:
        pass
