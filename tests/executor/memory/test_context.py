"""Tests of the device memory that NVML reports for a process."""

import sys
from types import SimpleNamespace

import pytest
import torch

from executor.memory.context import ContextError, measure_context, nvml_bytes


class NVMLError(Exception):
    pass


def nvml(uuid, used):
    def handle(requested):
        if requested != uuid:
            raise NVMLError("not found")
        return "gpu"

    processes = [SimpleNamespace(pid=pid, usedGpuMemory=nbytes) for pid, nbytes in used.items()]
    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetComputeRunningProcesses=lambda gpu: processes,
    )


@pytest.mark.parametrize(
    ("uuid", "pid", "nbytes"), [("a-b", 7, 700), ("GPU-a-b", 7, 700), ("a-b", 8, None), ("c", 7, None)]
)
def test_only_the_bytes_of_the_process_count(monkeypatch, uuid, pid, nbytes):
    """Returns the process's own bytes, or None for an unlisted process or an unknown GPU."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml("GPU-a-b", {7: 700, 9: 10**9}))
    assert nvml_bytes(uuid, pid) == nbytes


def test_without_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml_bytes("a-b", 7) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu():
    with pytest.raises(ContextError, match="no CUDA GPU"):
        measure_context()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_the_context_of_a_gpu():
    """Only NVML's count is checked: free device memory changes with other processes."""
    context = measure_context()
    assert context.source
    if context.source.startswith("NVML"):
        assert 50 * 2**20 < context.nbytes < 2 * 2**30
