"""The numbers among an optimizer's options (learning rate, betas, …): symbols in the graph, read when it runs.

While an optimizer's step is traced each of them is a ``SymFloat``, so that what Python computes from it (``1 - lr *
weight_decay``, ``lr / bias_correction``) is part of the graph, in Python's own arithmetic, equal to eager to the bit.
Where the step's Python asks something of a number (``momentum != 0``), the answer is kept as a condition: a number for
which it does not hold would give another graph. Fused updates take numbers by name (``_fused_adamw_(lr=…)``) and no
symbols; there the names are connected with the options, and a 0 has to stay one, but for the learning rate.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import sympy
from torch import SymFloat, fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.proxy_tensor import get_proxy_mode, track_tensor_tree
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.optim import Optimizer


class Option:
    """A number where an optimizer has it; calling it reads the present one.

    Attributes:
        key, part: of a parameter group: its option, and which entry where that is a tuple.
        was: the number at the capture.
    """

    def __init__(self, optimizer: Optimizer, group: int, key: str, part: int | None, was: float):
        self.optimizer, self.group, self.key, self.part, self.was = optimizer, group, key, part, was
        self.__name__ = self.__qualname__ = key if part is None else f"{key}_{part}"  # what code made from a graph says
        self.__module__ = "option"

    def __call__(self) -> Any:
        value = self.optimizer.param_groups[self.group][self.key]
        return value if self.part is None else value[self.part]


class Numbers:
    """All options of a step that are numbers, and what their present values must fulfil.

    Attributes:
        options: those that the graph reads or that a condition names.
    """

    def __init__(self, shapes: ShapeEnv):
        self._shapes = shapes
        self._known: dict[tuple[int, int, str, int | None], tuple[Option, sympy.Symbol, SymFloat, fx.Proxy]] = {}
        self._fused: dict[int, dict[str, fx.Node]] = {}  # id of a parameter -> the nodes of its group's options
        self._zeros: list[sympy.Basic] = []
        self.options: tuple[Option, ...] = ()
        self._conditions: list[tuple[sympy.Basic, list[Option]]] = []
        self._symbols: dict[Option, sympy.Symbol] = {}

    @contextmanager
    def symbolic(self, optimizer: Optimizer, groups: tuple[dict[str, Any], ...]) -> Iterator[None]:
        """While an optimizer's step is traced: symbols in the place of its numbers.

        Args:
            groups: its options at the capture; one that the step itself has changed since stays a constant.
        """
        tables = list(zip(optimizer.param_groups, groups, strict=True))
        before = [dict(table) for table, _ in tables]
        for g, (table, was) in enumerate(tables):
            if table.get("fused"):
                names = self._names(optimizer, g, table, was)
                self._fused.update((id(p), names) for p in table["params"])
                continue
            for key in was.keys() & table.keys():
                if isinstance(table[key], SymFloat):  # the step of an optimizer around this one runs
                    continue
                if is_number(key, was[key]) and table[key] == was[key]:
                    table[key] = self._symbol(optimizer, g, key, None, was[key])
                elif isinstance(was[key], tuple) and not any(isinstance(v, SymFloat) for v in table[key]) and (
                    table[key] == was[key]
                ):  # fmt: skip
                    parts = enumerate(was[key])
                    table[key] = tuple(self._symbol(optimizer, g, key, i, v) if is_number(key, v) else v
                                       for i, v in parts)  # fmt: skip
        try:
            yield
        finally:
            for (table, _), values in zip(tables, before, strict=True):
                table.update({key: values[key] for key in values if key != "params"})

    def _names(self, optimizer: Optimizer, g: int, table: dict[str, Any], was: dict[str, Any]) -> dict[str, fx.Node]:
        """What fused updates call the numbers of a group."""
        found: dict[str, fx.Node] = {}
        for key in was.keys() & table.keys():
            parts = enumerate(was[key]) if isinstance(was[key], tuple) else [(None, was[key])]
            for i, value in parts:
                if is_number(key, value) and table[key] == was[key]:
                    self._symbol(optimizer, g, key, i, value)
                    _, symbol, _, proxy = self._known[id(optimizer), g, key, i]
                    found[key if i is None else f"{key.removesuffix('s')}{i + 1}"] = proxy.node
                    if key != "lr":  # which changes no update's form, and is 0 where a schedule begins
                        self._zeros.append(sympy.Eq(symbol, 0) if value == 0 else sympy.Ne(symbol, 0))
        return found

    def connect(self, node: fx.Node, first: Any) -> None:
        """A fused update, whose first parameter is ``first``, reads its numbers when it runs."""
        names = self._fused[id(first)]
        node.kwargs = {key: names.get(key, value) for key, value in node.kwargs.items()}

    def _symbol(self, optimizer: Optimizer, group: int, key: str, part: int | None, value: float) -> SymFloat:
        where = id(optimizer), group, key, part
        if where not in self._known:
            option = Option(optimizer, group, key, part, value)
            source = ConstantSource(f"option{len(self._known)}")
            symbol = self._shapes.create_unspecified_symbol(float(value), source, DimDynamic.DYNAMIC)
            number = self._shapes.create_symfloatnode(symbol, hint=float(value), source=source)
            mode = get_proxy_mode()
            assert mode is not None
            proxy = mode.tracer.create_proxy("call_function", option, (), {})
            track_tensor_tree(number, proxy, constant=None, tracer=mode.tracer)
            self._known[where] = option, symbol, number, proxy  # type: ignore[assignment]
        return self._known[where][2]

    def close(self, read: set[Any]) -> None:
        """The trace is over; ``read``: targets of the graph's nodes."""
        by_symbol = {symbol: option for option, symbol, *_ in self._known.values()}
        for expression in [*(guard.expr for guard in self._shapes.guards), *self._zeros]:
            asked = [by_symbol[s] for s in expression.free_symbols if s in by_symbol]
            if asked:
                self._conditions.append((expression, asked))
        named = {option for _, asked in self._conditions for option in asked} | read
        self.options = tuple(option for option in by_symbol.values() if option in named)
        self._symbols = {option: symbol for symbol, option in by_symbol.items() if option in named}
        self._known.clear()
        self._fused.clear()

    def broken(self, values: dict[Option, Any]) -> Option | None:
        """The first option whose present value would give another graph; None where the graph is right."""
        for option, value in values.items():
            if type(value) not in (int, float):
                return option
        present = {self._symbols[option]: sympy.Float(value) for option, value in values.items()}
        for condition, asked in self._conditions:
            if condition.xreplace(present) != sympy.true:
                return next((o for o in asked if values[o] != o.was), asked[0])
        return None


def is_number(key: str, value: Any) -> bool:
    """Can this option change without a change of the graph? (A learning rate may be an integer at first.)"""
    return type(value) is float or (key == "lr" and type(value) is int)
