"""Mutable Python objects that a step can reach: their content, their changes, and the constants of the graph.

A number, string, type or tuple of these becomes a constant of the graph if code that the step may execute names it:
attributes of modules, losses and the objects they hold, closures, defaults and globals of functions. Values read in
other ways (files, environment variables, attribute names computed at run time) are not tracked.
"""

from __future__ import annotations

import dis
import functools
import inspect
import random
import types
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch

from executor.capture.operators import is_user_file

SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def is_scalar(value: Any) -> bool:
    """Returns whether a value is immutable and can be compared at each step."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(is_scalar, value))
    return isinstance(value, SCALARS)


def are_equal(a: Any, b: Any) -> bool:
    """Returns whether two Python values are equal; False if they cannot be compared."""
    try:
        return a is b or bool(a == b)
    except Exception:  # tensors, for example
        return False


class Slots(MutableMapping[str, Any]):
    """Mapping view of the attributes in an object's ``__slots__``, or of the one attribute ``name``."""

    def __init__(self, owner: Any, name: str = "") -> None:
        self.owner = owner
        slots = (vars(cls).get("__slots__", ()) for cls in type(owner).__mro__)
        slot_names = (name for names in slots for name in ((names,) if isinstance(names, str) else names))
        self.names = [name] if name else [name for name in slot_names if name[:2] != "__"]

    def __getitem__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self.owner, name)
        except (AttributeError, ValueError):  # ValueError: an empty closure cell
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self.owner, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self.owner, name)

    def __iter__(self) -> Iterator[str]:
        return filter(self.__contains__, self.names)

    def __len__(self) -> int:
        return sum(1 for _ in self)


CELL = "cell_contents"  # the only attribute of a closure cell


def have_same_objects(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    """Returns whether two dictionaries hold the same objects as keys and values, in the same order."""
    return list(map(id, a)) == list(map(id, b)) and list(map(id, a.values())) == list(map(id, b.values()))


class Owner(NamedTuple):
    """A mutable object: a dictionary, list, deque, set, or view of slots or of a closure cell.

    Attributes:
        keys: Relevant entries; None for all.
        constant: Whether numbers, strings and types in it are constants of the graph.
    """

    container: Any
    path: str
    keys: tuple[Any, ...] | None = None
    constant: bool = False

    def content(self) -> dict[Any, Any]:
        """Returns the current content by key or position."""
        container = self.container
        if isinstance(container, (list, deque)):
            return dict(enumerate(container))
        if isinstance(container, set):
            return dict.fromkeys(container)
        return {k: container[k] for k in (container if self.keys is None else self.keys) if k in container}

    def name(self, key: Any) -> str:
        """Returns the path of an entry."""
        if key is None or key == CELL:
            return self.path
        return f"{self.path}.{key if isinstance(key, (str, int)) else type(key).__name__}".lstrip(".")

    def restore(self, before: dict[Any, Any]) -> None:
        """Restores the content to ``before``."""
        items = self.content()
        container = self.container
        if have_same_objects(items, before):
            return
        if isinstance(container, (list, deque)):
            container.clear()
            container.extend(before.values())
        elif isinstance(container, set):
            container.clear()
            container.update(before)
        else:
            for key in items.keys() - before.keys() if self.keys is not None or isinstance(container, Slots) else items:
                del container[key]
            container.update(before)


class Change(NamedTuple):
    """A value that differs from its value at capture time; None stands for a missing value."""

    name: str
    old: Any
    new: Any


class Watched(NamedTuple):
    """Constants in one object.

    Attributes:
        before: Values at capture time, by key.
        get, target, values: Function that reads all values at once, its argument, and its result at capture time.
    """

    owner: Owner
    before: dict[Any, Any]
    get: Callable[[Any], Any]
    target: Any
    values: Any

    def restore(self) -> None:
        """Restores the values recorded at capture time."""
        self.owner.restore(self.before)

    def changes(self) -> dict[Any, Change]:
        """Returns the changed values by key; a list counts as one value."""
        current = self.owner.content()
        captured = self.before
        if isinstance(self.owner.container, list):
            current = {None: tuple(current.values())}
            captured = {None: tuple(captured.values())}
        return {
            key: Change(self.owner.name(key), captured.get(key), current.get(key))
            for key in dict.fromkeys((*captured, *current))
            if not (key in captured and key in current and are_equal(captured[key], current[key]))
        }


def watch(owner: Owner, names: Container[Any] | None = None) -> list[Watched]:
    """Returns the constants in an object, if any; for a list, either all entries or none.

    Args:
        names: Names of attributes and keys in the step's code; None if the code names all of the owner's ``keys``.
    """
    content = owner.content()
    if isinstance(owner.container, list):
        is_watched = len(content) <= 64 and all(map(is_scalar, content.values()))
        return [Watched(owner, content, tuple, owner.container, tuple(content.values()))] if is_watched else []
    watches_all = names is None or owner.keys is not None
    constants = {
        key: value
        for key, value in content.items()
        if (watches_all or not isinstance(key, str) or key in names) and is_scalar(value)
    }
    if not constants:
        return []
    # ``get`` runs in C, because it is called at each step.
    is_slots = isinstance(owner.container, Slots)
    get, target = (attrgetter, owner.container.owner) if is_slots else (itemgetter, owner.container)
    return [Watched(owner._replace(keys=tuple(constants)), constants, get(*constants), target, get(*constants)(target))]


@dataclass(frozen=True, eq=False)
class PythonValues:
    """Python values that a capture treats as constants.

    Attributes:
        watched: Values that are compared at each step.
        unrepeatable: Sentence about a Python side effect of the step that the graph cannot repeat, or "".
        first_run_values: Values that only the step's first run sets (``config.problem_type`` of transformers).
    """

    watched: tuple[Watched, ...]
    unrepeatable: str
    first_run_values: tuple[Watched, ...]

    def change(self) -> Change | None:
        """Returns the first value that has changed, or None."""
        for watched in self.watched:
            try:  # inlined, since it is executed at each step
                if watched.get(watched.target) == watched.values:
                    continue
            except Exception:  # a key is gone, a cell is empty, or values cannot be compared
                pass
            if changes := watched.changes():
                return next(iter(changes.values()))
        return None


class Changes(NamedTuple):
    """Changes of watched values by the step's Python code.

    Attributes:
        remaining: Values to watch from now on, without those that the step replaces by non-constants (such as tensors).
        first: First value that is now a different constant, or None.
        updated: All values that are now different constants, with their current values.
    """

    remaining: tuple[Watched, ...]
    first: Change | None
    updated: tuple[Watched, ...]


def compare_constants(watched: Iterable[Watched]) -> Changes:
    """Compares watched values with their current values."""
    remaining: list[Watched] = []
    updated: list[Watched] = []
    first: Change | None = None
    for values in watched:
        changes = values.changes()
        constants = {key: change for key, change in changes.items() if is_scalar(change.new)}
        first = first or next(iter(constants.values()), None)
        if not changes:
            remaining.append(values)
        elif values.owner.keys is not None:
            remaining += watch(values.owner._replace(keys=tuple(key for key in values.before if key not in changes)))
            updated += watch(values.owner._replace(keys=tuple(constants)))
        elif constants:
            updated += watch(values.owner)
    return Changes(tuple(remaining), first, tuple(updated))


class Code:
    """Code that a step may execute, and the names of attributes and keys in it.

    Attributes:
        names: Names of attributes and keys.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self._codes: set[types.CodeType] = set()
        self._classes: dict[type, set[str]] = {}  # with their known methods
        self._new: list[types.FunctionType] = []

    def add_function(self, function: Any) -> None:
        """Records a function that the step may execute."""
        for candidate in (function, inspect.unwrap(function) if callable(function) else function):
            code = getattr(candidate, "__code__", None)
            if isinstance(code, types.CodeType) and code not in self._codes:
                self._codes.add(code)
                self.names |= names_of(code) | {
                    const for part in nested(code) for const in part.co_consts if isinstance(const, str)
                }
                if isinstance(candidate, types.FunctionType):
                    self._new.append(candidate)

    def add_class(self, cls: type) -> None:
        """Records a class whose methods the step may execute if its code names them."""
        self._classes.setdefault(cls, set())

    @property
    def class_tensors(self) -> dict[str, str]:
        """Names of tensors that are attributes of these classes, with their class, by attribute."""
        bases = (base for cls in self._classes for base in cls.__mro__)
        return {
            key: f"{base.__name__}.{key}"
            for base in bases
            for key, value in vars(base).items()
            if isinstance(value, torch.Tensor)
        }

    def new_functions(self) -> list[types.FunctionType]:
        """Returns functions that the step may execute and that no earlier call returned."""
        for cls, known_methods in self._classes.items():
            for name in (self.names & set(dir(cls))) - known_methods:
                known_methods.add(name)
                method = inspect.getattr_static(cls, name, None)
                method = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
                if isinstance(method, types.FunctionType) and is_user_file(method.__code__.co_filename):
                    self.add_function(method)
        functions = self._new
        self._new = []
        return functions


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields ``code`` and the code of the functions nested in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from nested(const)


@functools.cache
def globals_of(code: types.CodeType) -> frozenset[str]:
    """Returns the names of globals that ``code`` and the functions nested in it load or store."""
    names = ("LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME")
    return frozenset(i.argval for part in nested(code) for i in dis.get_instructions(part) if i.opname in names)


def names_of(code: types.CodeType) -> set[str]:
    """Returns every global or attribute name in ``code`` and the functions nested in it."""
    return {name for part in nested(code) for name in part.co_names}


@contextmanager
def preserve_random_states() -> Iterator[Callable[[], str]]:
    """Restores the host's random states on exit, since the step may draw on the host (stochastic depth).

    Yields a function that names the generator (Python's or NumPy's) from which the step has drawn, or "".
    """
    saved = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002 (the global state is meant)

    def drawn_from() -> str:
        words, *rest = zip(np.random.get_state(), saved[2], strict=True)  # noqa: NPY002
        has_numpy_drawn = any(new != old for new, old in (*rest[1:], words)) or not np.array_equal(*rest[0])
        has_drawn = {"Python's random": random.getstate() != saved[1], "numpy.random": has_numpy_drawn}
        return " and ".join(name for name, is_drawn in has_drawn.items() if is_drawn)

    try:
        yield drawn_from
    finally:
        torch.set_rng_state(saved[0])
        random.setstate(saved[1])
        np.random.set_state(saved[2])  # noqa: NPY002
