"""Tests that kernel nodes take the place of a graph's memset nodes."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from executor.memory import graph_memsets
from executor.memory.graph_memsets import THREADS, replace_memsets

KERNEL = 0
MEMSET = 2
GPU = torch.device("cuda", 0)


@dataclass
class Node:
    """A node of the double: its parents and, for a memset or its kernel, the arguments."""

    kind: int
    parents: list[int] = field(default_factory=list)
    memset: tuple[int, int, int, int, int] = (0, 0, 4, 0, 1)  # target, value, size, width, height
    launch: Any = None


class Double:
    """Double of the CUDA driver's functions on graphs."""

    index = 0

    def __init__(self, nodes: dict[int, Node]) -> None:
        self.nodes = nodes

    def __call__(self, function: str, *args: Any) -> None:
        if status := getattr(self, function)(*args):
            raise MemoryError(f"{function} failed with CUDA error {status}")

    def _list_handles(self, handles: list[int], target: Any, count: Any) -> int:
        if target is None:
            count._obj.value = len(handles)
        for i, handle in enumerate(handles if target else ()):
            target[i] = handle
        return 0

    def cuGraphGetNodes(self, graph: Any, target: Any, count: Any) -> int:
        return self._list_handles(list(self.nodes), target, count)

    def cuGraphNodeGetDependencies(self, node: Any, target: Any, count: Any) -> int:
        return self._list_handles(self.nodes[node.value].parents, target, count)

    def cuGraphNodeGetDependentNodes(self, node: Any, target: Any, count: Any) -> int:
        return self._list_handles([h for h, other in self.nodes.items() if node.value in other.parents], target, count)

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = self.nodes[node.value].kind
        return 0

    def cuGraphMemsetNodeGetParams(self, node: Any, target: Any) -> int:
        params = target._obj
        memset = self.nodes[node.value].memset
        params.target, params.value, params.size, params.width, params.height = memset
        return 0

    def cuGraphAddKernelNode_v2(self, node: Any, graph: Any, parents: Any, count: Any, launch: Any) -> int:
        node._obj.value = handle = 1 + max(self.nodes)
        params = launch._obj
        types = ctypes.c_uint64, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint64
        values = tuple(kind.from_address(params.arguments[i]).value for i, kind in enumerate(types))
        self.nodes[handle] = Node(KERNEL, list(parents), launch=(values, list(params.grid), list(params.block)))
        return int(count.value != len(parents))

    def cuGraphAddDependencies(self, graph: Any, parents: Any, children: Any, count: Any) -> int:
        for parent, child in zip(parents, children, strict=True):
            self.nodes[child].parents.append(parent)
        return 0

    def cuGraphDestroyNode(self, node: Any) -> int:
        del self.nodes[node.value]
        for other in self.nodes.values():
            other.parents = [parent for parent in other.parents if parent != node.value]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Double:
    """A graph 1 -> 2 (memset) -> {3, 4 (two rows)} -> 5 (memset)."""
    double = Double(
        {
            1: Node(KERNEL),
            2: Node(MEMSET, [1], (4096, 7, 4, 1, 1)),
            3: Node(KERNEL, [2]),
            4: Node(MEMSET, [2], (512, 0, 1, 8, 2)),
            5: Node(MEMSET, [3, 4], (8192, 0, 1, 1000, 1)),
        }
    )
    monkeypatch.setattr(graph_memsets, "Driver", lambda device: double)
    monkeypatch.setattr(graph_memsets, "_fill", lambda index: SimpleNamespace(func=ctypes.c_void_p(99)))
    return double


def test_kernels_take_the_place_of_memsets(driver: Double) -> None:
    assert replace_memsets(GPU, 1) == 2
    assert {h: (node.kind, node.parents) for h, node in driver.nodes.items()} == {
        1: (KERNEL, []),
        3: (KERNEL, [6]),
        4: (MEMSET, [6]),
        6: (KERNEL, [1]),
        7: (KERNEL, [3, 4]),
    }
    assert driver.nodes[6].launch == ((4096, 7, 4, 1), [1, 1, 1], [THREADS, 1, 1])
    assert driver.nodes[7].launch == ((8192, 0, 1, 1000), [4, 1, 1], [THREADS, 1, 1])


def test_an_error_of_the_driver_is_raised(driver: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuGraphDestroyNode", lambda node: 1)
    with pytest.raises(MemoryError, match="cuGraphDestroyNode failed with CUDA error 1"):
        replace_memsets(GPU, 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_sort_on_a_gpu() -> None:
    """A sort clears its counters with memsets."""
    x = torch.randn(1 << 20, device="cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        out = x.sort().values
    assert replace_memsets(GPU, graph.raw_cuda_graph()) > 0
    assert replace_memsets(GPU, graph.raw_cuda_graph()) == 0
    graph.instantiate()
    for _ in range(2):
        x.normal_()
        graph.replay()
        torch.testing.assert_close(out, x.sort().values)
