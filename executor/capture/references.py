"""Compares the constants and references that a step reads with those at capture time.

A graph is made for the objects to which the step's names, attributes, cells, defaults, class attributes and slots
referred. An object that was replaced by an equal one, such as a new list in each epoch, is followed: its content is
compared from then on, its tensors are those of the step, and effects go to it. Any other change is reported.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, compress, starmap
from operator import attrgetter, is_, is_not, itemgetter, ne
from typing import Any

from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from executor.capture.effects import Effect
from executor.capture.hooks import hook_name
from executor.capture.python_values import (
    CELL,
    Change,
    ClassAttributes,
    Everything,
    Slots,
    Watched,
    are_equal,
    identity,
    is_scalar,
    parts_of,
    with_article,
)
from executor.capture.reach import FUNCTION, is_table

# Objects whose state is compared elsewhere, and only for the one that was captured.
_NOT_FOLLOWED = nn.Module, Optimizer, GradScaler


class PythonValues:
    """Python values and references for which a capture holds.

    Attributes:
        unrepeatable: Sentence about a Python side effect of the step that the graph cannot repeat, or "".
        first_run_values: Values that only the step's first run sets (``config.problem_type`` of transformers).
        moves: Number of times that objects were replaced by equal ones, which changes homes and owners of effects.
    """

    def __init__(self, watched: Iterable[Watched], unrepeatable: str, first_run_values: Sequence[Watched]) -> None:
        self.unrepeatable = unrepeatable
        self.first_run_values = first_run_values
        self.moves = 0
        self._watched = list(watched)
        for values in self._watched:
            values.update()
        self._homes: list[Any] = []
        self._effects: Sequence[Effect] = ()
        self._prepare()

    def bind(self, homes: list[Any], effects: Sequence[Effect]) -> None:
        """Sets the homes of the step's tensors and its effects, which follow the objects that hold them."""
        self._homes = homes
        self._effects = effects

    def restore(self) -> None:
        """Restores the values recorded last."""
        for watched in self._watched:
            watched.restore()

    def change(self) -> Change | None:
        """Returns the first value that has changed, or None; follows objects that equal ones have replaced."""
        changed: Iterable[Watched]
        try:  # loops in C, since it is executed at each step
            values = self._read()
            sizes = list(map(len, self._containers))
            if len(values) == len(self._values) and all(map(is_, values, self._values)) and sizes == self._sizes:
                return None
            resized = compress(self._sized, map(ne, sizes, self._sizes))
            changed = dict.fromkeys(chain(compress(self._owners, map(is_not, values, self._values)), resized))
        except Exception:  # a key is gone, or a cell is empty
            values = []
            sizes = []
            changed = self._watched
        replacement = _Replacement(self._by_identity, self._places())
        present = zip(self._owners, values, strict=False)
        if (change := replacement.find_change(changed, present)) is not None:
            return change
        replaced = self._follow(replacement) if replacement.objects else []
        for watched in (*changed, *replaced):
            watched.update()
        if replaced or not values:
            self._prepare()
        else:
            self._values = values
            self._sizes = sizes
        return None

    def _places(self) -> dict[int, str]:
        """Returns the paths of containers that hold tensors or receive effects, by identity."""
        places = {identity(home.container): "an object of the step" for home in self._homes if home is not None}
        return places | {identity(effect.owner.container): effect.owner.path for effect in self._effects}

    def _follow(self, replacement: _Replacement) -> list[Watched]:
        """Exchanges replaced objects and returns the values in them."""
        replaced = replacement.replaced
        for i, home in enumerate(self._homes):
            if home is not None:
                self._homes[i] = home._replace(container=replacement.current(home.container))
        if replacement.is_shared:  # the replaced objects are read by other names still
            self._watched += map(replace, replaced)
        for holder in (*replaced, *self.first_run_values, *self._effects):
            holder.owner = holder.owner._replace(container=replacement.current(holder.owner.container))
        self.moves += 1
        return replaced

    def _prepare(self) -> None:
        """Records what the watched objects refer to now, in groups that are read by one loop in C."""
        groups: dict[tuple[Any, ...], list[Watched]] = {}
        self._by_identity: dict[int, list[Watched]] = {}
        for watched in self._watched:
            self._by_identity.setdefault(identity(watched.owner.container), []).append(watched)
            keys = None if watched.is_whole else tuple(watched.before)
            groups.setdefault((isinstance(watched.owner.container, Slots), keys), []).append(watched)
        self._single: list[tuple[Callable[[Any], Any], list[Any]]] = []  # functions that read one value each
        self._several: list[tuple[Callable[[Any], Any], list[Any]]] = []  # functions that read a tuple of values
        self._whole: list[Iterable[Any]] = []
        self._owners: list[Watched] = []  # of each value
        owners_of_several: list[Watched] = []
        owners_of_whole: list[Watched] = []
        for (is_slots, keys), group in groups.items():
            containers = [_table_of(watched) for watched in group]
            for watched in group:
                if keys is None or isinstance(watched.names, Everything):  # reads the keys of a dictionary
                    self._whole.append(watched.owner.container)
                    owners_of_whole += [watched] * watched.size
            if keys is None:
                continue
            if is_slots:
                self._single += [(attrgetter(key), [slots.owner for slots in containers]) for key in keys]
                self._owners += group * len(keys)
            elif len(keys) == 1:
                self._single.append((itemgetter(*keys), containers))
                self._owners += group
            elif keys:
                self._several.append((itemgetter(*keys), containers))
                owners_of_several += [watched for watched in group for _ in keys]
        self._owners += owners_of_several + owners_of_whole
        self._sized = [watched for watched in self._watched if watched.size >= 0]
        self._containers = list(map(_table_of, self._sized))
        self._values = self._read()
        self._sizes = list(map(len, self._containers))

    def _read(self) -> list[Any]:
        """Returns all values."""
        several = chain.from_iterable(starmap(map, self._several))
        return list(chain.from_iterable(chain(starmap(map, self._single), several, self._whole)))


class _Phrase(str):
    """Description of a value in a ``Change``."""

    def __repr__(self) -> str:
        return str(self)


class _Replacement:
    """Objects that equal ones have replaced since the last comparison.

    Args:
        watched: Watched values by the identity of their container.
        places: Paths of containers of tensors and effects, by identity. Their aliases must be the same as before.

    Attributes:
        objects: Replaced object, the new one and a name that refers to it, by the replaced object's id.
        is_shared: Whether other names still refer to replaced objects.
    """

    def __init__(self, watched: dict[int, list[Watched]], places: dict[int, str]) -> None:
        self.objects: dict[int, tuple[Any, Any, str]] = {}
        self.is_shared = False
        self._by_identity = watched
        self._places = places

    @property
    def replaced(self) -> list[Watched]:
        """Values in replaced objects."""
        return [watched for key in self.objects for watched in self._by_identity.get(key, ())]

    def current(self, container: Any) -> Any:
        """Returns the container that has replaced this one, or itself."""
        if identity(container) not in self.objects:
            return container
        new = self.objects[identity(container)][1]
        return Slots(new, *container.names) if isinstance(container, Slots) else new

    def find_change(self, changed: Iterable[Watched], values: Iterable[tuple[Watched, Any]]) -> Change | None:
        """Returns the first change that cannot be followed.

        Args:
            changed: Objects that may have changed.
            values: All values now, each with the object that holds it.
        """
        changes = [(watched, self._change_in(watched, watched.owner.container)) for watched in changed]
        kept = [change for w, change in changes if identity(w.owner.container) not in self.objects]
        if (first := next(filter(None, kept), None)) or not self.objects:
            return first
        for watched, value in values:
            if id(value) in self.objects and identity(watched.owner.container) not in self.objects:
                self.is_shared = True
                if not self._places.keys().isdisjoint(self.objects):
                    content = watched.content_of(watched.owner.container)
                    name = next(watched.owner.name(key) for key, current in content.items() if current is value)
                    other = self.objects[id(value)][2]
                    return Change(name, _Phrase(f"one object with {other}"), _Phrase("another"))
        names = {key: path for key, path in self._places.items() if key not in self.objects}
        for key, (_, new, name) in self.objects.items():
            if key in self._places and (other := names.setdefault(id(new), name)) is not name:
                return Change(name, _Phrase(f"another object than {other}"), _Phrase("the same"))
        return next((change for _, change in changes if change is not None), None) if self.is_shared else None

    def _change_in(self, watched: Watched, container: Any) -> Change | None:
        """Returns the first difference of a container's content from values watched in it, or in its predecessor."""
        before = watched.before
        content = watched.content_of(container)
        if list(before) != list(content) and watched.is_whole:
            kind = with_article(type(container).__name__)
            values = [tuple(c) if isinstance(container, set) else tuple(c.values()) for c in (before, content)]
            return Change(watched.owner.path, *(v if is_scalar(v) else _Phrase(f"{kind} of {len(v)}") for v in values))
        if isinstance(watched.names, Everything):
            keys = [tuple(key for key in table if key in content) for table in (before, container)]
            if keys[0] != keys[1] and set(keys[0]) == set(keys[1]):
                return Change(watched.owner.path, *(_Phrase(f"in the order {', '.join(map(str, k))}") for k in keys))
        for key in dict.fromkeys((*before, *content)):
            name = watched.owner.name(key)
            if key not in before or key not in content:
                return _change_of(name, *(values.get(key, _MISSING) for values in (before, content)))
            if (change := self._change(name, before[key], content[key])) is not None:
                return change
        return None

    def _change(self, name: str, old: Any, new: Any) -> Change | None:
        """Returns the first change of what the step reads of a value, or None if nothing has changed."""
        if old is new or any(isinstance(old, kind) and isinstance(new, kind) for kind in (Tensor, Iterator)):
            return None  # tensors are compared where they are bound
        change = _change_of(name, old, new)
        if is_scalar(old) or is_scalar(new):
            return None if are_equal(old, new) else change
        if type(old) is not type(new) or isinstance(old, _NOT_FOLLOWED):
            return change
        if id(old) in self.objects:
            return None if self.objects[id(old)][1] is new else change
        parts = [parts_of(value) for value in (old, new)]
        contents = [_contents_of(value) for value in (old, new)]
        is_unwatched = id(old) not in self._by_identity and id(old) not in self._places
        if not (parts[0] or contents[0]) or (is_unwatched and isinstance(old, (list, deque, set))):  # too long a list
            return None if are_equal(old, new) else change
        if any(len(a or ()) != len(b or ()) for a, b in (parts, contents)) or _kind_of(old) != _kind_of(new):
            return change
        self.objects[id(old)] = old, new, name
        for old_part, new_part in zip(parts[0] or (), parts[1] or (), strict=True):
            if (deeper := self._change(name, old_part, new_part)) is not None:
                return deeper
        for old_content, new_content in zip(*contents, strict=True):
            owner = new_content.owner if isinstance(new_content, Slots) else new_content
            self.objects.setdefault(identity(old_content), (old_content, owner, name))
            for watched in self._by_identity.get(identity(old_content), ()):
                if (deeper := self._change_in(watched, _view_like(watched.owner.container, new_content))) is not None:
                    return deeper
        return None


def _table_of(watched: Watched) -> Any:
    """Returns the container of the values, in a form that C reads."""
    container = watched.owner.container
    return container.table if isinstance(container, ClassAttributes) else container


def _view_like(container: Any, content: Any) -> Any:
    if isinstance(container, Slots):
        return Slots(content.owner, *container.names)
    return content


def _contents_of(value: Any) -> list[Any]:
    """Returns the containers of all that an object's behavior depends on; none if they cannot be enumerated."""
    if isinstance(value, (list, deque, set)) or is_table(value):
        return [value]
    if isinstance(value, types.FunctionType):
        return [Slots(value, *FUNCTION), vars(value), *(Slots(cell, CELL) for cell in value.__closure__ or ())]
    bases = [base for base in type(value).__mro__ if base not in (object, types.SimpleNamespace)]
    constructors = (vars(base).get("__new__") for base in bases)
    if not all(isinstance(made, (types.FunctionType, staticmethod, type(None))) for made in constructors):
        return []  # has content in C
    return [*([vars(value)] if hasattr(value, "__dict__") else ()), *([s] if (s := Slots(value)).names else ())]


def _kind_of(value: Any) -> Any:
    """Returns what else distinguishes two objects of one type and equal content."""
    if isinstance(value, types.FunctionType):
        return value.__code__, id(value.__globals__)
    return value.__name__ if isinstance(value, types.BuiltinFunctionType) else None


def _change_of(name: str, old: Any, new: Any) -> Change:
    """Returns a change whose values can be shown in a message."""
    before, now = map(_shown, (old, new))
    return Change(name, before, _Phrase(f"another {type(new).__name__}") if repr(before) == repr(now) else now)


def _shown(value: Any) -> Any:
    if is_scalar(value) or isinstance(value, _Phrase):
        return value
    if isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
        return _Phrase(hook_name(value))
    return _Phrase(value.__qualname__ if isinstance(value, type) else with_article(type(value).__name__))


_MISSING = _Phrase("missing")
