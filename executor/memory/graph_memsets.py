"""Replaces the memset nodes of a captured CUDA graph by kernel nodes.

Libraries clear a few bytes before a kernel (a matrix product's counter of finished tiles). As a node of a graph, such a
memset delays the next kernel far more than a kernel node does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_size_t, c_uint, c_uint64, c_void_p, cast
from functools import cache
from typing import Any

import torch

from executor.memory.addresses import Driver

THREADS = 256  # per block
SOURCE = """
extern "C" __global__ void fill(unsigned char* target, unsigned value, unsigned size, unsigned long long count) {
    for (unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x; i < count;
         i += (unsigned long long)gridDim.x * blockDim.x) {
        if (size == 4) ((unsigned*)target)[i] = value;
        else if (size == 2) ((unsigned short*)target)[i] = (unsigned short)value;
        else target[i] = (unsigned char)value;
    }
}
"""


class _Memset(Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = (
        ("target", c_uint64),
        ("pitch", c_size_t),
        ("value", c_uint),
        ("size", c_uint),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class _Kernel(Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", c_void_p),
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("arguments", POINTER(c_void_p)),
        ("extra", c_void_p),
        ("kernel", c_void_p),
        ("context", c_void_p),
    )


def replace_memsets(device: torch.device, graph: int) -> int:
    """Replaces a graph's memset nodes by kernel nodes, before it is instantiated.

    Args:
        device: the graph's device.
        graph: ``torch.cuda.CUDAGraph(keep_graph=True).raw_cuda_graph()``.

    Returns:
        Number of replaced nodes; memsets of several rows stay.

    Raises:
        MemoryError: the CUDA driver reports an error.
    """
    driver = Driver(device)
    replaced = 0
    for node in _list_nodes(driver, "cuGraphGetNodes", graph):
        kind = ctypes.c_int()
        memset = _Memset()
        driver("cuGraphNodeGetType", c_void_p(node), byref(kind))
        if kind.value != 2:  # CU_GRAPH_NODE_TYPE_MEMSET
            continue
        driver("cuGraphMemsetNodeGetParams", c_void_p(node), byref(memset))
        if memset.height > 1:
            continue
        parents = _list_nodes(driver, "cuGraphNodeGetDependencies", node)
        children = _list_nodes(driver, "cuGraphNodeGetDependentNodes", node)
        kernel = c_void_p()
        params = _kernel_params(memset, _fill(driver.index).func)
        driver(
            "cuGraphAddKernelNode_v2",
            byref(kernel),
            c_void_p(graph),
            _nodes(parents),
            c_size_t(len(parents)),
            byref(params),
        )
        driver(
            "cuGraphAddDependencies",
            c_void_p(graph),
            _nodes([kernel.value] * len(children)),
            _nodes(children),
            c_size_t(len(children)),
        )
        driver("cuGraphDestroyNode", c_void_p(node))
        replaced += 1
    return replaced


def _kernel_params(memset: _Memset, function: c_void_p) -> _Kernel:
    """Returns the launch of ``fill`` that does the same as a memset; the driver copies its arguments at once."""
    arguments = c_uint64(memset.target), c_uint(memset.value), c_uint(memset.size), c_uint64(memset.width)
    addresses = (c_void_p * len(arguments))(*(ctypes.addressof(x) for x in arguments))
    blocks = min(max(-(-memset.width // THREADS), 1), 1024)
    params = _Kernel(
        function, (c_uint * 3)(blocks, 1, 1), (c_uint * 3)(THREADS, 1, 1), 0, cast(addresses, POINTER(c_void_p))
    )
    params.references = arguments, addresses
    return params


@cache
def _fill(index: int) -> Any:
    """Compiles ``fill`` for a device and returns it; the cache keeps its module loaded."""
    with torch.cuda.device(index):
        return torch.cuda._compile_kernel(SOURCE, "fill")


def _nodes(handles: Sequence[int | None]) -> Any:
    return (c_void_p * len(handles))(*handles)


def _list_nodes(driver: Driver, name: str, owner: int) -> list[int]:
    """Returns the nodes that a function of the driver lists for a graph or node."""
    count = c_size_t()
    driver(name, c_void_p(owner), None, byref(count))
    handles = (c_void_p * count.value)()
    if count.value:
        driver(name, c_void_p(owner), handles, byref(count))
    return [x or 0 for x in handles]
