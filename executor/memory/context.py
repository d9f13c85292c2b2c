"""What a process takes of a GPU besides tensors, which PyTorch's allocator does not count: the CUDA context, kernels
that were loaded, and the handles of libraries (``Machine.context_bytes``)."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import torch

from executor.memory import cuda_index


class ContextError(RuntimeError):
    """It cannot be measured; the message is one sentence."""


def context_bytes(device: str | torch.device = "cuda") -> int:
    """Bytes that one process takes of a GPU besides tensors: by how much less is free once a second process has trained
    a layer there, less what its allocator has reserved. Nothing else may take or give memory there meanwhile.

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
        return int(before - torch.cuda.mem_get_info(index)[0] - reserved)
    except EOFError:
        raise ContextError("the process that was to make a CUDA context failed") from None
    finally:
        here.close()
        process.join()


def _hold(connection: Connection, index: int) -> None:
    """Has cuDNN, cuBLAS and a context, says what is reserved besides, and waits until that was seen."""
    device = torch.device("cuda", index)
    layers = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 8)).to(device)
    layers(torch.ones(2, 3, 8, 8, device=device)).sum().backward()
    torch.cuda.synchronize(index)
    connection.send(torch.cuda.memory_reserved(index))
    try:
        connection.recv()
    except EOFError:
        pass
