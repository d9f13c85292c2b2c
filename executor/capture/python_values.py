"""Python values that a step reads, constants of its graph: attributes of modules, of a loss and of what these hold,
closures, defaults and globals of functions.

Looked at are numbers, strings, types and tuples of them, whose names stand in the code that the step may run: forward
methods, the loss, and the methods that these name. What is reached otherwise (a file, an environment variable, an
attribute whose name is made at run time) is not seen.
"""

from __future__ import annotations

import dis
import functools
import inspect
import random
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from executor.capture.source_locations import users

SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
MOST = 64  # entries of a list that is looked at

Container = dict[Any, Any] | list[Any]


def is_scalar(value: Any) -> bool:
    """A value that can be compared at each step, and does not change in its place."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_scalar, value))
    return isinstance(value, SCALARS)


class Change(NamedTuple):
    """A value that is not what it was at the capture."""

    name: str
    was: Any
    now: Any


class Watched(NamedTuple):
    """Values of one owner: a table, a list, a cell or a function."""

    owner: Any
    get: Callable[[Any], Any]  # of the owner: its values
    values: tuple[Any, ...] | Any  # a tuple, if not of one name
    names: tuple[str, ...]
    keys: tuple[Any, ...] = ()  # of a table

    def now(self) -> Any:
        """The values as they are; None where there are none any more."""
        try:
            return self.get(self.owner)
        except (LookupError, ValueError):  # a key is gone, a cell is empty
            return None

    def restore(self) -> None:
        """Makes the values what they were."""
        if isinstance(self.owner, types.CellType):
            self.owner.cell_contents = self.values
        elif isinstance(self.owner, list):
            self.owner[:] = self.values
        elif isinstance(self.owner, dict):
            values = self.values if len(self.keys) > 1 else (self.values,)
            self.owner.update(zip(self.keys, values, strict=True))

    def changes(self, now: Any) -> Iterator[Change]:
        """What differs, where something does."""
        if len(self.names) == 1 or now is None or len(now) != len(self.values):
            yield Change(self.names[0], self.values, now)
            return
        for name, a, b in zip(self.names, self.values, now, strict=True):
            if not same(a, b):
                yield Change(name, a, b)


def same(a: Any, b: Any) -> bool:
    """Are two of Python's values equal? False where they cannot be compared."""
    try:
        return a is b or bool(a == b)
    except Exception:  # of a tensor, for example
        return False


@dataclass(frozen=True, eq=False)
class PythonValues:
    """What a capture took for constant.

    Attributes:
        watched: values that are compared at each step.
        undone: a sentence naming what the step's Python did at the capture that no run of the graph does; "": nothing.
        once: values that the step's first run sets, and no later one (``config.problem_type`` of transformers).
    """

    watched: tuple[Watched, ...] = ()
    undone: str = ""
    once: tuple[Watched, ...] = ()

    def change(self) -> Change | None:
        """The first value that has changed; None where all are as they were."""
        for one in self.watched:
            try:  # at each step: without a call
                if one.get(one.owner) == one.values:
                    continue
            except Exception:  # as below
                pass
            now = one.now()
            if not same(now, one.values):
                return next(one.changes(now))
        return None


@dataclass
class Seen:
    """Collects the owners of such values while a step's objects are walked (reach.py)."""

    containers: list[tuple[Container, str]] = field(default_factory=list)
    cells: list[tuple[types.CellType, str]] = field(default_factory=list)
    functions: list[tuple[types.FunctionType, str]] = field(default_factory=list)
    globals: dict[int, tuple[dict[str, Any], set[str]]] = field(default_factory=dict)  # and the names in use
    names: set[str] = field(default_factory=set)  # of attributes and keys in the code that the step may run
    _codes: set[types.CodeType] = field(default_factory=set)
    _classes: dict[type, set[str]] = field(default_factory=dict)  # and the methods that are known
    _new: list[types.FunctionType] = field(default_factory=list)

    def runs(self, function: Any) -> None:
        """Records a function that the step may run."""
        for one in (function, inspect.unwrap(function) if callable(function) else function):
            code = getattr(one, "__code__", None)
            if isinstance(code, types.CodeType) and code not in self._codes:
                self._codes.add(code)
                self.names |= names_of(code) | _strings(code)
                if isinstance(one, types.FunctionType):
                    self._new.append(one)

    def methods_of(self, cls: type) -> None:
        """Records a class whose methods the step may run, if its code names them."""
        self._classes.setdefault(cls, set())

    def new_functions(self) -> list[types.FunctionType]:
        """Returns the functions that the step may run and that were not returned before."""
        for cls, known in self._classes.items():
            for name in (self.names & set(dir(cls))) - known:
                known.add(name)
                method = inspect.getattr_static(cls, name, None)
                method = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
                if isinstance(method, types.FunctionType) and users(method.__code__.co_filename):
                    self.runs(method)
        found, self._new = self._new, []
        return found

    def watched(self) -> tuple[Watched, ...]:
        """All of them, with their present values."""
        out = []
        for container, label in self.containers:
            if isinstance(container, dict):
                named = (k for k in container if not isinstance(k, str) or k in self.names)
                out += _watch(container, named, label)
            elif len(container) <= MOST and all(map(is_scalar, container)):
                out.append(Watched(container, tuple, tuple(container), (label,)))
        for table, used in self.globals.values():
            out += _watch(table, sorted(used), "")
        for cell, label in self.cells:
            out.append(Watched(cell, attrgetter("cell_contents"), cell.cell_contents, (label,)))
        for function, label in self.functions:
            out += _watch(function.__kwdefaults__ or {}, function.__kwdefaults__ or (), label)
            if function.__defaults__ and is_scalar(function.__defaults__):
                get, names = attrgetter("__defaults__"), (f"{label}.__defaults__",)
                out.append(Watched(function, get, function.__defaults__, names))
        return tuple(out)


def _watch(table: dict[Any, Any], keys: Iterable[Any], label: str) -> list[Watched]:
    """Those of the entries that are scalars, if any."""
    return _entries(table, {key: f"{label}.{key}".lstrip(".") for key in keys if is_scalar(table[key])})


def _entries(table: dict[Any, Any], names: dict[Any, str]) -> list[Watched]:
    """Entries of a table, with how each is called."""
    if not names:
        return []
    get = itemgetter(*names)
    return [Watched(table, get, get(table), tuple(names.values()), tuple(names))]


class Changes(NamedTuple):
    """What the step's Python has made of watched values.

    Attributes:
        kept: those to watch from now on, without those that the step itself replaces (a tensor kept as an attribute).
        first: the first value that is another constant now, or None.
        now: all values that are other constants now, as they are.
    """

    kept: tuple[Watched, ...]
    first: Change | None
    now: tuple[Watched, ...]


def changed(watched: tuple[Watched, ...]) -> Changes:
    """Compares watched values with what they are now."""
    kept: list[Watched] = []
    others: list[Watched] = []
    first: Change | None = None
    for one in watched:
        now = one.now()
        if same(now, one.values):
            kept.append(one)
            continue
        constants = [change for change in one.changes(now) if is_scalar(change.now)]
        first = first or next(iter(constants), None)
        if isinstance(one.owner, dict):
            moved = {change.name for change in one.changes(now)}
            names = {k: name for k, name in zip(one.keys, one.names, strict=True) if k in one.owner}
            kept += _entries(one.owner, {k: name for k, name in names.items() if name not in moved})
            others += _entries(
                one.owner, {k: n for k, n in names.items() if n in {change.name for change in constants}}
            )
        elif constants:
            others.append(one._replace(values=now))
    return Changes(tuple(kept), first, tuple(others))


@functools.cache
def globals_of(code: types.CodeType) -> frozenset[str]:
    """Returns the names of globals that ``code`` and the functions nested in it load or store."""
    found = {i.argval for i in dis.get_instructions(code) if i.opname in _GLOBAL}
    return frozenset(found).union(*(globals_of(c) for c in code.co_consts if isinstance(c, types.CodeType)))


_GLOBAL = "LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME"


def names_of(code: types.CodeType) -> set[str]:
    """Every global or attribute name in ``code`` and the functions nested in it."""
    found = set(code.co_names)
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= names_of(const)
    return found


def _strings(code: types.CodeType) -> set[str]:
    """String constants: keys of dictionaries, names for getattr."""
    found = {const for const in code.co_consts if isinstance(const, str)}
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found |= _strings(const)
    return found


@contextmanager
def untouched() -> Iterator[Callable[[], str]]:
    """Random states as they were: the step may draw on the host (stochastic depth). Yields what says from which of
    Python's and NumPy's generators was drawn since, "": from neither."""
    saved = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 (the global state is meant)

    def drawn() -> str:
        words, *others = zip(np.random.get_state(), saved[2], strict=True)  # noqa: NPY002
        numpy = any(now != was for now, was in (*others[1:], words)) or not np.array_equal(*others[0])
        moved = {"Python's random": random.getstate() != saved[1], "numpy.random": numpy}
        return " and ".join(name for name, has in moved.items() if has)

    try:
        yield drawn
    finally:
        torch.set_rng_state(saved[0])
        random.setstate(saved[1])
        np.random.set_state(saved[2])  # noqa: NPY002
