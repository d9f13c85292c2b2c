"""Compares the operators of an eager step with those of its capture, and gives the capture the sizes of that step.

The eager step runs on a part of the captured batch. Each of its operators must be the captured one, with the same
constants and on the same tensors; sizes may differ as those of the batch do. The captured graph with the sizes of the
eager step is then the capture of that step, and needs no second trace.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from executor.capture.batches import constant_key, flatten
from executor.capture.captured import Captured
from executor.capture.operators import NUMBER

aten = torch.ops.aten
# Captured operators whose eager form has another name: an addition in place (which a dispatch mode prevents), and a
# constant, which is copied.
_SAME = {aten.add_.Tensor: aten.add.Tensor, aten.lift_fresh_copy.default: aten.lift_fresh.default}
_NOT_CAPTURED = (NUMBER, aten.detach.default)  # host reads of numbers of the batch, and further names of a tensor


class Form(NamedTuple):
    """Form of a tensor in its storage."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int  # elements, as ``stride``
    dtype: torch.dtype

    @staticmethod
    def from_tensor(tensor: Tensor) -> Form:
        """Returns the form of a tensor."""
        return Form(tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype)


class OperatorMatch(TorchDispatchMode):
    """Dispatch mode that compares an eager step with its capture.

    Attributes:
        difference: the first operator that differs, or "".
    """

    def __init__(self, captured: Captured) -> None:
        super().__init__()
        self._captured = captured
        self._nodes = [n for n in captured.graph.graph.nodes if isinstance(n.target, OpOverload)]
        self._position = 0
        self._forms: dict[fx.Node, Form] = {}
        self._calls: dict[fx.Node, tuple[tuple[Any, ...], dict[str, Any]]] = {}  # arguments of nodes with other sizes
        self._tensors: dict[int, int] = {}  # storage of the eager step -> the program's tensor
        self._nbytes: dict[int, int] = {}
        self._batch: dict[fx.Node, Tensor] = {}
        self._ratios: set[float] = set()
        self._offsets: set[int] = set()
        self.difference = ""

    def begin(self, args: Any) -> None:
        """Records the tensors that the step finds, before it runs on ``args``."""
        captured = self._captured
        leaves, _ = flatten(args)
        self._batch = {k: v for k, v in zip(captured.leaves, leaves, strict=True) if isinstance(k, fx.Node)}
        self._ratios, self._offsets = _size_relations(self._batch)
        if captured.numbers_of(args) != tuple(constant_key(read.value) for read in captured.reads):
            self.difference = "a number of the batch"
        for node, home, real in zip(captured.placeholders, captured.homes, captured.sources, strict=True):
            tensor = self._batch[node] if node in self._batch else home.get() if home else real
            if isinstance(tensor, Tensor) and node in captured.values:
                self._bind(node, tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_compared = not self.difference and func is not torch.ops.prim.device.default
        node = self._match(func, args, dict(kwargs)) if is_compared else None
        out = func(*args, **kwargs)
        if node is not None:
            self._record(node, out)
        return out

    def end(self, result: Any) -> None:
        """Compares the end of the step, which has returned ``result``."""
        if not self.difference and self._position < len(self._nodes):
            self.difference = str(self._nodes[self._position].target)
        results = [leaf for leaf in flatten(result)[0] if isinstance(leaf, Tensor)]
        for node, tensor in zip(self._captured.outputs, results, strict=False):
            if not self.difference and not self._is_value(node, tensor):
                self.difference = "a result"

    def _match(self, func: OpOverload, args: Any, kwargs: dict[str, Any]) -> fx.Node | None:
        """Returns the captured node of an eager operator, or None if it has none."""
        node = self._nodes[self._position] if self._position < len(self._nodes) else None
        if func in _NOT_CAPTURED and (node is None or node.target is not func):
            return None
        if node is None or (node.target is not func and _SAME.get(node.target) is not func):
            self.difference = str(func)
            return None
        self._position += 1
        numbers = _numbers_of(func)
        scales = self._scales(node, args) if numbers else set[float]()
        try:
            values = [
                self._argument(expected, value, scales if i in numbers else None)
                for i, (expected, value) in enumerate(zip(node.args, args, strict=True))
            ]
            options = {
                key: self._argument(expected, kwargs.pop(key), scales if key in numbers else None)
                for key, expected in node.kwargs.items()
            }
        except (KeyError, ValueError):  # other arguments
            self.difference = str(func)
            return None
        if any(value is not None for value in kwargs.values()):  # a trace leaves out None
            self.difference = str(func)
        if not all(same for _, same in (*values, *options.values())):
            self._calls[node] = tuple(v for v, _ in values), {key: v for key, (v, _) in options.items()}
        return node

    def _scales(self, node: fx.Node, args: Any) -> set[float]:
        """Returns how many times more elements some dimensions of the first tensor argument have in the capture."""
        for a, b in zip(node.args, args, strict=False):
            if isinstance(a, fx.Node) and isinstance(b, Tensor) and "tensor_meta" in a.meta:
                sizes = zip(a.meta["tensor_meta"].shape, b.shape, strict=False)
                return _products(x / y for x, y in sizes if x != y and y)
        return set()

    def _argument(self, expected: Any, value: Any, scales: set[float] | None) -> tuple[Any, bool]:
        """Returns an argument of a node in the eager step's sizes, and whether it is the captured one.

        Args:
            scales: factors by which a number that scales a tensor may differ; None: the argument is a size.

        Raises:
            ValueError: the argument differs.
        """
        if isinstance(value, Tensor):
            if not isinstance(expected, fx.Node) or not self._is_value(expected, value):
                raise ValueError
            return expected, True
        if isinstance(expected, fx.Node):  # a number that the graph computes
            return expected, True
        if isinstance(value, (list, tuple)) and isinstance(expected, (list, tuple)):
            parts = [self._argument(a, b, scales) for a, b in zip(expected, value, strict=True)]
            return [v for v, _ in parts], all(same for _, same in parts)
        if constant_key(expected) == constant_key(value):
            return expected, True
        if type(value) is type(expected) in (int, float):
            is_size = scales is None and type(value) is int and self._may_be(expected, value)
            if is_size or any(expected in (value * scale, value / scale) for scale in scales or ()):
                return value, False
        raise ValueError

    def _may_be(self, expected: int, value: int) -> bool:
        """Returns whether a size of the capture may be another one in the eager step."""
        return expected == value or (
            value > 0 and (expected / value in self._ratios or expected - value in self._offsets)
        )

    def _is_value(self, node: fx.Node, tensor: Tensor) -> bool:
        """Returns whether a tensor of the eager step is the value of a node."""
        if node.op == "get_attr":  # a constant
            constant = getattr(self._captured.graph, str(node.target))
            return isinstance(constant, Tensor) and constant.shape == tensor.shape and torch.equal(constant, tensor)
        t = self._captured.values.get(node)
        return self._forms.get(node) == Form.from_tensor(tensor) and (
            t is None or self._tensors.get(tensor.untyped_storage()._cdata) == t
        )

    def _record(self, node: fx.Node, out: Any) -> None:
        if isinstance(out, Tensor):
            self._bind(node, out)
        elif isinstance(out, (list, tuple)):
            for user in node.users:
                if user.target is operator.getitem and isinstance(part := out[user.args[1]], Tensor):  # type: ignore[index]
                    self._bind(user, part)

    def _bind(self, node: fx.Node, tensor: Tensor) -> None:
        """Records the form of a node's value, whose sizes may differ only as those of the batch do."""
        meta = node.meta["tensor_meta"]
        form = Form.from_tensor(tensor)
        sizes = zip(meta.shape, form.shape, strict=False)
        has_form = form.dtype == meta.dtype and len(meta.shape) == len(form.shape)
        if not (has_form and all(itertools.starmap(self._may_be, sizes))):
            self.difference = f"the form of {node}"
        self._forms[node] = form
        storage = tensor.untyped_storage()
        t = self._captured.values.get(node)
        if t is None:
            self._tensors.pop(storage._cdata, None)
        else:
            self._tensors[storage._cdata] = t
            self._nbytes[t] = storage.nbytes()

    @contextmanager
    def resized(self) -> Iterator[Captured]:
        """Yields the capture with the sizes of the eager step; until the end, the nodes of its graph have them."""
        captured = self._captured
        before = [(node, node.args, node.kwargs) for node in self._calls]
        metas = [(node, node.meta["tensor_meta"]) for node in self._forms]
        tensors = [
            replace(tensor, nbytes=self._nbytes.get(t, tensor.nbytes))
            for t, tensor in enumerate(captured.program.tensors)
        ]
        sources = [
            self._batch.get(node, real) for node, real in zip(captured.placeholders, captured.sources, strict=True)
        ]
        try:
            for node, (args, kwargs) in self._calls.items():
                node.args = args
                node.kwargs = kwargs
            for node, form in self._forms.items():
                node.meta["tensor_meta"] = node.meta["tensor_meta"]._replace(
                    shape=torch.Size(form.shape), stride=form.stride
                )
            yield replace(captured, program=replace(captured.program, tensors=tuple(tensors)), sources=tuple(sources))
        finally:
            for node, args, kwargs in before:
                node.args = args
                node.kwargs = kwargs
            for node, meta in metas:
                node.meta["tensor_meta"] = meta


def _size_relations(batch: dict[fx.Node, Tensor]) -> tuple[set[float], set[int]]:
    """Returns the ratios, and the differences, of captured sizes to those of a smaller batch."""
    ratios = {1.0}
    offsets = set[int]()
    for node, tensor in batch.items():
        pairs = [(a, b) for a, b in zip(node.meta["tensor_meta"].shape, tensor.shape, strict=False) if a != b and b]
        ratios |= _products(a / b for a, b in pairs)
        offsets.update(a - b for a, b in pairs)
    return ratios, offsets


def _products(factors: Iterable[float]) -> set[float]:
    """Returns the products of all subsets of some factors."""
    products = {1.0}
    for factor in factors:
        products |= {factor * product for product in products}
    return products


@cache
def _numbers_of(func: OpOverload) -> frozenset[int | str]:
    """Returns the positions and names of numbers by which an operator changes a tensor."""
    arguments = func._schema.arguments
    has_tensors = any("Tensor" in str(a.type) for a in arguments)
    positions = {i: a.name for i, a in enumerate(arguments) if has_tensors and str(a.type) in ("number", "float")}
    return frozenset((*positions, *positions.values()))
