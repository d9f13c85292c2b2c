"""Numbers that a step's Python reads from tensors: ``if mask.all(): …``.

A number that depends on the batch alone, or on nothing (``torch.arange``), is computed from the example batch while the
step is traced. The graph is then right only for batches with the same number, which each step computes beforehand
(``HostRead.of``). Numbers that depend on parameters or random draws are refused (recorder.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload


@dataclass(frozen=True, eq=False)
class HostRead:
    """A number that the step reads from its batch.

    Attributes:
        nodes: of the graph, in order, that compute it; the last gives the tensor that is read.
        constants: tensors of the graph by node.
        value: at the capture.
        where: the user's line.
    """

    nodes: tuple[fx.Node, ...]
    constants: Mapping[fx.Node, Any]
    value: Any
    where: str

    @cached_property
    def inputs(self) -> set[fx.Node]:
        """Placeholders of the tensors that decide it."""
        return {n for node in self.nodes for n in node.all_input_nodes if n.op == "placeholder"}

    def of(self, batch: Mapping[fx.Node, Tensor]) -> Any:
        """Returns the number for a batch, by placeholder."""
        return number(self.nodes, {**self.constants, **batch})


def number(nodes: Sequence[fx.Node], values: Mapping[fx.Node, Any]) -> Any:
    """Runs nodes of a graph on values of those that they take; returns the number that the last one is.

    If an operator writes in place, the given tensors are copied before.
    """
    table = dict(values)
    if any(isinstance(node.target, OpOverload) and node.target._schema.is_mutable for node in nodes):
        for given in {n for node in nodes for n in node.all_input_nodes} & table.keys():
            table[given] = table[given].clone() if isinstance(table[given], Tensor) else table[given]
    last: Any = None
    with torch.no_grad():
        for node in nodes:
            assert isinstance(node.target, Callable)  # type: ignore[arg-type]
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), table.__getitem__)
            last = table[node] = node.target(*args, **kwargs)
    return last.item()
