"""Mutable Python objects that a step can reach: their content, their changes, and the constants of the graph.

A number, string, type or tuple of these becomes a constant of the graph if code that the step may execute names it:
attributes of modules, losses, classes and the objects they hold, closures, defaults and globals of functions. So does
the choice of the object that such a name refers to (references.py). Values read in other ways (files, environment
variables, attribute names computed at run time) are not tracked.
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
from dataclasses import dataclass, replace
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
    """Returns whether two values have one type and are equal; False if they cannot be compared.

    Numbers are equal if a graph computes the same with them: 0.0 and -0.0 are not, and NaN is.
    """
    if a is b or type(a) is not type(b):
        return a is b
    if isinstance(a, (float, complex)):
        return repr(a) == repr(b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(are_equal, a, b))
    try:
        return bool(a == b)
    except Exception:  # arrays, for example
        return False


class Slots(MutableMapping[str, Any]):
    """Mapping view of the attributes in an object's ``__slots__``, or of those given."""

    def __init__(self, owner: Any, *names: str) -> None:
        self.owner = owner
        self.names = names or tuple(_slot_names(type(owner)))

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


def _slot_names(kind: type) -> Iterator[str]:
    for cls in kind.__mro__:
        names = vars(cls).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__"):
                is_private = name.startswith("__") and not name.endswith("__")
                yield f"_{cls.__name__.lstrip('_')}{name}" if is_private else name


class ClassAttributes(MutableMapping[str, Any]):
    """Mapping view of the attributes of a class, without those of its bases."""

    def __init__(self, owner: type) -> None:
        self.owner = owner
        self.table = vars(owner)

    def __getitem__(self, name: str) -> Any:
        return self.table[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.owner, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self.owner, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.table)

    def __len__(self) -> int:
        return len(self.table)


CELL = "cell_contents"  # the only attribute of a closure cell


def identity(container: Any) -> int:
    """Returns the id of a container, which is the same for all views of one object."""
    return id(container.owner if isinstance(container, (Slots, ClassAttributes)) else container)


def parts_of(value: Any) -> tuple[Any, ...] | None:
    """Returns the objects that a tuple, partial or method refers to and cannot rebind; None for other values."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    return (value.__self__,) if isinstance(value, types.BuiltinFunctionType) else None  # ``losses.append``


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
            is_ordered = self.keys is None and not isinstance(container, (Slots, ClassAttributes))
            for key in items if is_ordered else items.keys() - before.keys():
                del container[key]
            for key, value in before.items():
                if is_ordered or key not in items or items[key] is not value:
                    container[key] = value


class Change(NamedTuple):
    """A value that differs from its value at capture time; None stands for a missing value."""

    name: str
    old: Any
    new: Any


class Everything(Container[Any]):
    """Contains every key."""

    def __contains__(self, _: object) -> bool:
        return True


@dataclass(eq=False)
class Watched:
    """Constants and references in one object.

    Attributes:
        owner: The object, with the keys that are compared (None for a list, deque or set, which are compared whole).
        before: Values when last compared, by key; by position in a list.
        names: Keys that the step would read if they were added; ``Everything`` if it also reads their order.
        ignored: Keys of ``names`` that are not compared, such as those that the step itself sets.
        size: Length of the owner's container when last compared, or -1.
    """

    owner: Owner
    before: dict[Any, Any]
    names: Container[Any] = ()
    ignored: frozenset[Any] = frozenset()
    size: int = -1

    def restore(self) -> None:
        """Restores the recorded values; a set gets back what is missing."""
        if isinstance(self.owner.container, set):
            self.owner.container.update(self.before)
        else:
            self.owner.restore(self.before)

    @property
    def is_whole(self) -> bool:
        """Whether all entries are compared, in their order."""
        return isinstance(self.owner.container, (list, deque, set))

    def content_of(self, container: Any) -> dict[Any, Any]:
        """Returns the content of an object like the owner that is compared with ``before``."""
        if self.is_whole:
            return Owner(container, "").content()
        is_same_size = container is self.owner.container and (
            isinstance(container, Slots) or len(container) == self.size
        )
        added = () if is_same_size else [key for key in container if self._would_read(key)]
        return {key: container[key] for key in (*self.before, *added) if key in container}

    def _would_read(self, key: Any) -> bool:
        return key in self.names and key not in self.before and key not in self.ignored

    def update(self) -> None:
        """Records the present values."""
        container = self.owner.container
        self.before = self.content_of(container)
        self.size = -1 if isinstance(container, Slots) else len(container)

    def changes(self) -> dict[Any, Change]:
        """Returns the changed values by key; a list, deque or set counts as one value."""
        current = self.content_of(self.owner.container)
        captured = self.before
        if isinstance(self.owner.container, set):
            current, captured = dict(enumerate(current)), dict(enumerate(captured))
        changed = [
            key
            for key in dict.fromkeys((*captured, *current))
            if not (key in captured and key in current and _is_kept(captured[key], current[key]))
        ]
        if changed and self.is_whole:
            return {None: Change(self.owner.path, tuple(captured.values()), tuple(current.values()))}
        return {key: Change(self.owner.name(key), captured.get(key), current.get(key)) for key in changed}

    def without(self, keys: Iterable[Any]) -> Watched:
        """Returns the same without keys that the step sets."""
        before = {key: value for key, value in self.before.items() if key not in keys}
        owner = self.owner._replace(keys=tuple(before))
        return replace(self, owner=owner, before=before, ignored=self.ignored.union(keys))


def _is_kept(old: Any, new: Any) -> bool:
    """Returns whether a step leaves a value as it is; its tensors are compared elsewhere."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
        return True
    if isinstance(old, tuple) and type(old) is type(new):
        return len(old) == len(new) and all(map(_is_kept, old, new))
    return are_equal(old, new)


def watch_constants(owner: Owner) -> list[Watched]:
    """Returns the constants among an owner's keys, if any, or all entries of a list if they are constants."""
    content = owner.content()
    if isinstance(owner.container, (list, set)):
        values = content if isinstance(owner.container, set) else content.values()
        return [Watched(owner, content)] if all(map(is_scalar, values)) else []
    constants = {key: value for key, value in content.items() if is_scalar(value)}
    return [Watched(owner._replace(keys=tuple(constants)), constants)] if constants else []


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
    """Compares watched values with their current values.

    Returns:
        What changed, what is left to watch, and the current values of changed constants.
    """
    remaining: list[Watched] = []
    updated: list[Watched] = []
    first: Change | None = None
    for values in watched:
        changes = values.changes()
        is_listed = isinstance(values.owner.container, (list, set))
        constants = {
            key: change
            for key, change in changes.items()
            if is_scalar(change.new) and is_scalar(change.old) and (is_listed or key in values.before)
        }
        first = first or next(iter(constants.values()), None)
        if not changes:
            remaining.append(values)
        elif not values.is_whole:
            remaining.append(values.without(changes))
            updated += watch_constants(values.owner._replace(keys=tuple(constants)))
        elif constants:
            updated += watch_constants(values.owner)
    return Changes(tuple(remaining), first, tuple(updated))


class Code:
    """Code that a step may execute, and the names of attributes and keys in it.

    Attributes:
        names: Names of attributes and keys.
        iterated: Names whose values the code reads whole, as in ``for key in table.items()``.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.iterated: set[str] = set()
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
                if is_user_file(code.co_filename):
                    self.iterated |= iterated_in(code)
                if isinstance(candidate, types.FunctionType):
                    self._new.append(candidate)

    def add_class(self, cls: type) -> None:
        """Records a class whose methods the step may execute if its code names them."""
        self._classes.setdefault(cls, set())

    @property
    def classes(self) -> list[type]:
        """Recorded classes and their bases."""
        return list(dict.fromkeys(base for cls in self._classes for base in cls.__mro__ if base is not object))

    @property
    def class_tensors(self) -> dict[str, str]:
        """Names of tensors that are attributes of these classes, with their class, by attribute."""
        return {
            key: f"{base.__name__}.{key}"
            for base in self.classes
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


def with_article(noun: str) -> str:
    """Returns a noun after "a" or "an"."""
    return f"an {noun}" if noun[0].lower() in "aeiou" else f"a {noun}"


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


_READ_WHOLE = {"GET_ITER", "CONTAINS_OP", "DICT_MERGE", "DICT_UPDATE", "LIST_EXTEND"}
_VIEWS = {"items", "keys", "values", "copy"}
_READERS = {"dict", "enumerate", "len", "list", "max", "min", "set", "sorted", "sum", "tuple"}


@functools.cache
def iterated_in(code: types.CodeType) -> frozenset[str]:
    """Returns the names of variables and attributes whose values ``code`` reads whole."""
    found: set[str] = set()
    for part in nested(code):
        before: list[str | None] = [None, None]  # names that the last two instructions load
        for instruction in dis.get_instructions(part):
            name = instruction.argval if instruction.opname.startswith("LOAD_") else None
            is_call = instruction.opname in ("PRECALL", "CALL") and before[0] in _READERS
            is_view = name in _VIEWS if isinstance(name, str) else False
            if before[1] is not None and (instruction.opname in _READ_WHOLE or is_call or is_view):
                found.add(before[1])
            before = [before[1], name if isinstance(name, str) else None]
    return frozenset(found)


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
