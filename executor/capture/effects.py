"""Side effects of a step on the user's objects besides in-place writes, and how a planned step repeats them.

A step may bind a new tensor to a name that held one (a carried hidden state) or none (``self.aux = …``), or append
tensors to a list. ``Effects`` compares every reachable object before and after the step's Python code runs. A new
tensor that replaces one of equal shape and dtype is copied into it at the end of the step. Other values that consist of
tensors become an ``Effect``, applied after each planned step. Any other effect is refused when the step is trained.
"""

from __future__ import annotations

import gc
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import TreeSpec, tree_unflatten

from executor.capture.batches import flatten, tensors_in
from executor.capture.python_values import Owner, Watched, have_same_objects, is_scalar, watch_constants


class Constant(NamedTuple):
    """A Python value that a first step leaves, as a leaf of an effect."""

    value: Any


@dataclass(eq=False)
class Effect:
    """Tensors that a step leaves in one of the user's objects.

    Attributes:
        owner: The object, or the one that has replaced it since.
        key: Its entry; unused for a list or deque.
        action: "set" an entry, "append" to a list, or "replace" the whole content.
        spec: Structure of the value; for a list or deque, of the list of values.
        leaves: Leaves of the value: None, a string, a Constant, or an index into the step's extra outputs.
    """

    owner: Owner
    key: Any
    action: str
    spec: TreeSpec
    leaves: tuple[Any, ...]

    def apply(self, outputs: Sequence[Tensor]) -> None:
        """Stores this step's tensors in the object."""
        values = (outputs[x] if isinstance(x, int) else x for x in self.leaves)
        value = tree_unflatten([x.value if isinstance(x, Constant) else x for x in values], self.spec)
        container = self.owner.container
        if self.action == "set":
            container[self.key] = value
            return
        if self.action == "replace":
            container.clear()
        container.extend(value)


class Effects:
    """Collects the effects of a step.

    Attributes:
        repeatable: Effects to apply after each step.
        tensors: Tensors of these effects, in order.
        rebound: (name, persistent tensor, tensor that the step binds in its place).
        refusals: Sentences about effects that a planned step cannot repeat.
    """

    def __init__(
        self, persistent: Mapping[int, Tensor | None], is_used: Callable[[Tensor], bool], is_first: bool = False
    ) -> None:
        self._is_first = is_first  # the step runs once, so it may leave Python values
        self._persistent = persistent  # id of a fake -> the user's tensor
        self._is_used = is_used  # whether an operator of the step has read or written a tensor
        self.repeatable: list[Effect] = []
        self.tensors: list[Tensor] = []
        self.rebound: list[tuple[str, Tensor, Tensor]] = []
        self.refusals: list[str] = []  # sentences
        self.new_constants: list[Watched] = []  # numbers and flags that the step created
        self._slots: list[tuple[Owner, Any, Any]] = []  # slots whose persistent tensors were rebound

    def compare(self, owner: Owner, before: dict[Any, Any]) -> None:
        """Collects the step's effects on an object whose content was ``before``."""
        after = owner.content()
        if have_same_objects(before, after):
            return
        if isinstance(owner.container, (list, deque)):
            self._compare_sequence(owner, list(before.values()), list(after.values()))
        elif isinstance(owner.container, set):
            if before.keys() - after.keys() or any(next(tensors_in(v), None) is not None for v in {*before, *after}):
                self.refusals.append(f"the step changes the set {owner.path}, which has no order: make it a list")
        else:
            for key in dict.fromkeys((*before, *after)):
                old = before.get(key, _MISSING)
                new = after.get(key, _MISSING)
                if old is not new:
                    self._compare_entry(owner, key, old, new)

    def is_persistent(self, effect: Effect) -> bool:
        """Returns whether the effect leaves only persistent tensors."""
        return all(id(self.tensors[i]) in self._persistent for i in effect.leaves if isinstance(i, int))

    def restore_rebound(self) -> None:
        """Restores rebound tensors to their slots before another trace."""
        for owner, key, old in self._slots:
            owner.container[key] = old

    def clear(self) -> None:
        """Drops the traced tensors."""
        self.tensors = []
        self.rebound = []
        self._slots = []

    def _compare_entry(self, owner: Owner, key: Any, old: Any, new: Any) -> None:
        name = owner.name(key)
        old_ids = [id(t) for t in tensors_in(old)]
        olds, news = (x if isinstance(x, tuple) else (x,) for x in (old, new))
        pairs = [(a, b) for a, b in zip(olds, news, strict=False) if a is not b]
        if len(olds) == len(news) and all(id(a) in self._persistent and isinstance(b, Tensor) for a, b in pairs):
            self._slots.append((owner, key, old))
            for a, b in pairs:
                self._rebind(name, a, b)
        elif old_ids and old_ids == [id(t) for t in tensors_in(new)]:
            return  # a new list of the same tensors, as in an RNN
        elif next(tensors_in(new), None) is None and not (self._is_first and isinstance(new, (dict, list))):
            if old is _MISSING and is_scalar(new) and isinstance(owner.container, dict):
                self.new_constants += watch_constants(owner._replace(keys=(key,)))
            if old_ids:
                self.refusals.append(
                    f"the step removes the tensor {name} ({_kind(old)} before, {_kind(new)} after), which the graph "
                    "cannot repeat: keep a tensor of the same shape there"
                )
        elif self._uses_replaced(old, new):
            self.refusals.append(
                f"the step makes a new {_kind(new)} of {name}, whose tensors it had: change it in place, entry by entry"
            )
        else:
            self._add_effect(owner, key, "set", new)

    def _uses_replaced(self, old: Any, new: Any) -> bool:
        """Returns whether the step uses tensors of a value that it replaces."""
        new_ids = {id(t) for t in tensors_in(new)}
        return any(id(t) in self._persistent and (id(t) in new_ids or self._is_used(t)) for t in tensors_in(old))

    def _rebind(self, name: str, old: Tensor, new: Tensor) -> None:
        if isinstance(old, nn.Parameter) or isinstance(new, nn.Parameter):
            self.refusals.append(f"the step replaces the parameter {name}: write into it (p.data.copy_(…))")
            return
        forms = [(tuple(t.shape), t.dtype, t.device) for t in (old, new)]
        if forms[0] != forms[1]:
            shapes = " to ".join(f"{shape} of {str(dtype).removeprefix('torch.')}" for shape, dtype, _ in forms)
            self.refusals.append(
                f"the step changes {name} from {shapes}, and the next form is unknown to a plan: keep one shape, or "
                "carry it as an argument and a result of the step"
            )
        else:
            self.rebound.append((name, old, new))

    def _compare_sequence(self, owner: Owner, before: list[Any], after: list[Any]) -> None:
        is_deque = isinstance(owner.container, deque)
        has_persistent = any(id(t) in self._persistent for t in tensors_in(before))
        if len(before) == len(after) and has_persistent and not is_deque:
            for i, (old, new) in enumerate(zip(before, after, strict=True)):
                if old is not new:
                    self._compare_entry(owner, i, old, new)
            return
        # Number of old trailing entries that now come first; all of them if the step only appended.
        kept_count = next(
            (
                n
                for n in range(min(len(before), len(after)), 0, -1)
                if all(a is b for a, b in zip(before[-n:], after, strict=False))
            ),
            0,
        )
        if kept_count == len(before) or (is_deque and kept_count):
            self._add_effect(owner, None, "append", after[kept_count:])
        elif not any(a is b for a in after for b in before):
            self._add_effect(owner, None, "replace", after)
        else:
            self.refusals.append(f"the step removes some entries of {owner.path}: append to it, or clear it first")

    def _add_effect(self, owner: Owner, key: Any, action: str, value: Any) -> None:
        name = owner.name(key)
        leaves, spec = flatten(value)
        indices: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                indices.append(len(self.tensors))
                self.tensors.append(leaf)
            elif leaf is None or isinstance(leaf, str):
                indices.append(leaf)
            elif self._is_first and is_scalar(leaf):
                indices.append(Constant(leaf))
            else:
                reason = "the graph cannot recompute" if is_scalar(leaf) else "may hold tensors out of the plan's reach"
                self.refusals.append(
                    f"the step leaves a {_kind(leaf)} in {name}, which {reason}: keep tensors there, or do it after "
                    "the step"
                )
                return
        key = self._persistent.get(id(key), key) if isinstance(key, Tensor) else key
        self.repeatable.append(Effect(owner, key, action, spec, tuple(indices)))


def rebind(effects: Effects, results: list[Any]) -> None:
    """Copies rebound tensors into the persistent ones they replace; traced as the end of the step.

    Old values that the step returns (``results``, modified in place) or leaves elsewhere are cloned first.
    """
    overwritten = {old.untyped_storage()._cdata for _, old, _ in effects.rebound}

    def clone_alias(value: Any) -> Any:
        aliases = isinstance(value, Tensor) and value.untyped_storage()._cdata in overwritten
        return value.clone() if aliases else value

    with torch.no_grad():
        results[:] = map(clone_alias, results)
        effects.tensors = list(map(clone_alias, effects.tensors))
        values = [clone_alias(new).detach() for _, _, new in effects.rebound]
        for (_, old, _), value in zip(effects.rebound, values, strict=True):
            old.copy_(value)


def remove_fakes(storages: set[int]) -> str:
    """Removes fake tensors from lists and dictionaries that are not reachable from the step.

    Args:
        storages: Addresses of storages (``StorageWeakRef.cdata``) that outlive the trace.

    Returns:
        A sentence that names a container from which fakes were removed; "" if none.
    """
    fakes = [x for x in gc.get_objects() if issubclass(type(x), FakeTensor)]
    leaked = [x for x in fakes if StorageWeakRef(x.untyped_storage()).cdata in storages]
    if not leaked:
        return ""
    tables = [vars(module) for module in list(sys.modules.values())]
    variables = [(name, value) for table in tables for name, value in list(table.items())]
    own_lists = {id(fakes), id(leaked)}
    # get_referrers does not see objects frozen by gc.freeze().
    holders = [(name, value) for name, value in variables if type(value) in (list, dict, deque)]
    holders += [(f"a {type(x).__name__}", x) for t in leaked for x in gc.get_referrers(t) if type(x) in (list, dict)]
    names = [name for name, holder in holders if id(holder) not in own_lists and _remove_tensors(holder, leaked)]
    where = names[0] if names else "an object"
    advice = "pass it as an argument, or make it an attribute of the model"
    return f"the step leaves a tensor in {where}, which nothing of the step names: {advice}"


def _remove_tensors(holder: Any, tensors: list[Tensor]) -> bool:
    """Removes tensors from a container and returns whether it held any."""
    ids = {id(t) for t in tensors}
    if isinstance(holder, dict):
        keys = [key for key, value in holder.items() if id(value) in ids]
        for key in keys:
            del holder[key]
        return bool(keys)
    remaining = [x for x in holder if id(x) not in ids]
    is_changed = len(remaining) < len(holder)
    if is_changed:
        holder.clear()
        holder.extend(remaining)
    return is_changed


def _kind(value: Any) -> str:
    return "nothing" if value is _MISSING else type(value).__name__


_MISSING = object()
