"""Tests that a step notices which objects its names refer to: equal ones are followed, others are refused by name."""

from __future__ import annotations

import functools
import gc
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from executor import StepError
from tests.executor.networks import sgd
from tests.executor.training.programs import Loop, Twins, custom, moving

Read = Callable[[Tensor], Tensor]
Changes = dict[str, Callable[[], object]]


class Options:
    def __init__(self, scale: float) -> None:
        self.scale = scale


@dataclass(frozen=True)
class Frozen:
    scale: float


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    scale: float


class Slotted:
    __slots__ = ("__hidden", "options")

    def __init__(self, scale: float) -> None:
        self.options = Options(scale)
        self.__hidden = 1.0

    def scaled(self, x: Tensor) -> Tensor:
        return x * self.options.scale * self.__hidden

    def hide(self, value: float) -> None:
        self.__hidden = value


def scaling(scale: float) -> Read:
    return lambda loss: loss * scale


def held(make: Callable[[float], Any]) -> tuple[Read, Changes]:
    """An attribute that holds an object with a ``scale``."""
    holder = SimpleNamespace(options=make(2.0))
    return lambda loss: loss * holder.options.scale, {
        "equal": lambda: setattr(holder, "options", make(2.0)),
        "in place": lambda: object.__setattr__(holder.options, "scale", 3.0),
        "other": lambda: setattr(holder, "options", make(4.0)),
    }


def slots() -> tuple[Read, Changes]:
    holder = SimpleNamespace(slotted=Slotted(2.0))
    return lambda loss: holder.slotted.scaled(loss), {
        "equal": lambda: setattr(holder, "slotted", Slotted(2.0)),
        "equal slot": lambda: setattr(holder.slotted, "options", Options(2.0)),
        "in place": lambda: setattr(holder.slotted, "options", Options(3.0)),
        "private": lambda: holder.slotted.hide(0.5),
        "other": lambda: setattr(holder, "slotted", Slotted(4.0)),
    }


def numbers() -> tuple[Read, Changes]:
    holder = SimpleNamespace(scales=[2.0, 3.0])
    return lambda loss: sum(loss * scale for scale in holder.scales), {
        "equal": lambda: setattr(holder, "scales", [2.0, 3.0]),
        "in place": lambda: holder.scales.append(1.0),
        "other": lambda: setattr(holder, "scales", [2.0, 5.0]),
    }


def long_list() -> tuple[Read, Changes]:
    holder = SimpleNamespace(scales=[1.0] * 100)
    return lambda loss: sum(loss * scale for scale in holder.scales), {
        "equal": lambda: setattr(holder, "scales", [1.0] * 100),
        "other": lambda: setattr(holder, "scales", [2.0] * 100),
    }


def table() -> tuple[Read, Changes]:
    holder = SimpleNamespace(weights={"cross entropy": 2.0})
    return lambda loss: sum(loss * weight for weight in holder.weights.values()), {
        "equal": lambda: setattr(holder, "weights", {"cross entropy": 2.0}),
        "in place": lambda: holder.weights.update(l2=0.5),
        "entry": lambda: holder.weights.update({"cross entropy": 1.0}),
        "order": lambda: setattr(holder, "weights", {"l2": 0.5, "cross entropy": 1.0}),
        "other": lambda: setattr(holder, "weights", {"cross entropy": 4.0}),
    }


def sets() -> tuple[Read, Changes]:
    holder = SimpleNamespace(terms={"doubled"})
    return lambda loss: loss * (2 if "doubled" in holder.terms else 1) * len(holder.terms), {
        "equal": lambda: setattr(holder, "terms", {"doubled"}),
        "in place": lambda: holder.terms.add("squared"),
        "other": lambda: setattr(holder, "terms", {"halved"}),
    }


def table_of_tensors() -> tuple[Read, Changes]:
    holder = SimpleNamespace(weights={"a": torch.tensor(0.3), "b": torch.tensor(0.7)})
    return lambda loss: sum(loss * weight for weight in holder.weights.values()), {
        "equal": lambda: setattr(holder, "weights", {"a": torch.tensor(0.1), "b": torch.tensor(0.2)}),
        "in place": lambda: holder.weights.update(c=torch.tensor(0.5)),
        "other": lambda: setattr(holder, "weights", dict(reversed(holder.weights.items()))),
    }


def functions() -> tuple[Read, Changes]:
    holder = SimpleNamespace(terms=[scaling(2.0)])
    return lambda loss: sum(term(loss) for term in holder.terms), {
        "equal": lambda: setattr(holder, "terms", [scaling(2.0)]),
        "in place": lambda: holder.terms.append(scaling(1.0)),
        "other": lambda: setattr(holder, "terms", [torch.square]),
    }


def cell() -> tuple[Read, Changes]:
    options = Options(2.0)

    def assign(value: float) -> None:
        nonlocal options
        options = Options(value)

    return lambda loss: loss * options.scale, {
        "equal": lambda: assign(2.0),
        "in place": lambda: setattr(options, "scale", 3.0),
        "other": lambda: assign(4.0),
    }


def defaults() -> tuple[Read, Changes]:
    def read(loss: Tensor, options: Options = Options(2.0)) -> Tensor:  # noqa: B008
        return loss * options.scale

    return read, {
        "equal": lambda: setattr(read, "__defaults__", (Options(2.0),)),
        "in place": lambda: setattr(read.__defaults__[0], "scale", 3.0),
        "other": lambda: setattr(read, "__defaults__", (Options(4.0),)),
    }


def keyword_defaults() -> tuple[Read, Changes]:
    def read(loss: Tensor, *, options: Options = Options(2.0)) -> Tensor:  # noqa: B008
        return loss * options.scale

    return read, {
        "equal": lambda: setattr(read, "__kwdefaults__", {"options": Options(2.0)}),
        "in place": lambda: read.__kwdefaults__.update(options=Options(3.0)),
        "other": lambda: setattr(read, "__kwdefaults__", {"options": Options(4.0)}),
    }


def attributes_of_a_function() -> tuple[Read, Changes]:
    def read(loss: Tensor) -> Tensor:
        return loss * read.options.scale  # type: ignore[attr-defined]

    read.options = Options(2.0)  # type: ignore[attr-defined]
    return read, {
        "equal": lambda: setattr(read, "options", Options(2.0)),
        "in place": lambda: setattr(read.options, "scale", 3.0),  # type: ignore[attr-defined]
        "other": lambda: setattr(read, "options", Options(4.0)),
    }


def code() -> tuple[Read, Changes]:
    inner = scaling(2.0)
    read = lambda loss: inner(loss)  # noqa: E731
    scale = 3.0
    return read, {"in place": lambda: setattr(inner, "__code__", (lambda loss: loss + scale).__code__)}


def partials() -> tuple[Read, Changes]:
    def scaled(loss: Tensor, by: Options, *, scale: float) -> Tensor:
        return loss * by.scale * scale

    holder = SimpleNamespace(f=functools.partial(scaled, by=Options(2.0), scale=1.0))
    return lambda loss: holder.f(loss), {
        "equal": lambda: setattr(holder, "f", functools.partial(scaled, by=Options(2.0), scale=1.0)),
        "in place": lambda: holder.f.keywords.update(scale=3.0),
        "deeper": lambda: setattr(holder.f.keywords["by"], "scale", 1.0),
        "other": lambda: setattr(holder, "f", functools.partial(F.relu)),
    }


def class_attribute() -> tuple[Read, Changes]:
    class Holder:
        options = Options(2.0)
        scale = 2.0

        def read(self, loss: Tensor) -> Tensor:
            return loss * self.options.scale * self.scale

    holder = Holder()
    return lambda loss: holder.read(loss), {
        "equal": lambda: setattr(Holder, "options", Options(2.0)),
        "in place": lambda: setattr(Holder.options, "scale", 3.0),
        "other": lambda: setattr(Holder, "options", Options(4.0)),
        "number": lambda: setattr(Holder, "scale", 1.0),
        "hidden": lambda: setattr(holder, "scale", 5.0),
        "method": lambda: setattr(Holder, "read", lambda self, loss: loss + self.scale),
    }


def other_class() -> tuple[Read, Changes]:
    class Holder:
        def read(self, loss: Tensor) -> Tensor:
            return 2 * loss

    class Other(Holder):
        def read(self, loss: Tensor) -> Tensor:
            return 3 * loss

    holder = Holder()
    return lambda loss: holder.read(loss), {"in place": lambda: setattr(holder, "__class__", Other)}


def global_name() -> tuple[Read, Changes]:
    read = FunctionType((lambda loss: loss * HELD.scale).__code__, {"HELD": Options(2.0)})  # type: ignore[name-defined]  # noqa: F821
    return read, {
        "equal": lambda: read.__globals__.update(HELD=Options(2.0)),
        "in place": lambda: setattr(read.__globals__["HELD"], "scale", 3.0),
        "other": lambda: read.__globals__.update(HELD=Options(4.0)),
    }


def builtin_name() -> tuple[Read, Changes]:
    read = FunctionType((lambda loss: sum([loss, loss])).__code__, {"__builtins__": __builtins__})
    return read, {"other": lambda: read.__globals__.update(sum=lambda parts: parts[0])}


def bound_method() -> tuple[Read, Changes]:
    class Holder:
        def __init__(self) -> None:
            self.options = Options(2.0)
            self.f = self.scaled

        def scaled(self, loss: Tensor) -> Tensor:
            return loss * self.options.scale

        def shifted(self, loss: Tensor) -> Tensor:
            return loss + 1

    holder = Holder()
    return lambda loss: holder.f(loss), {
        "equal": lambda: setattr(holder, "f", holder.scaled),
        "in place": lambda: setattr(holder.options, "scale", 3.0),
        "other": lambda: setattr(holder, "f", holder.shifted),
    }


def patched_forward() -> tuple[Read, Changes]:
    module = nn.Softplus()
    return lambda loss: module(loss), {"other": lambda: setattr(module, "forward", lambda loss: 2 * loss)}


def hidden_method() -> tuple[Read, Changes]:
    class Net(nn.Module):
        def forward(self, loss: Tensor) -> Tensor:
            return self.scaled(loss)

        def scaled(self, loss: Tensor) -> Tensor:
            return 2 * loss

    module = Net()
    return lambda loss: module(loss), {"other": lambda: setattr(module, "scaled", lambda loss: 3 * loss)}


def module(equal: bool) -> tuple[Read, Changes]:
    holder = SimpleNamespace(loss_fn=nn.SmoothL1Loss(beta=2.0))
    zero = torch.zeros(())
    return lambda loss: holder.loss_fn(loss, zero), {
        "in place": lambda: setattr(holder.loss_fn, "beta", 1.0),
        "other": lambda: setattr(holder, "loss_fn", nn.SmoothL1Loss(beta=2.0 if equal else 0.5)),
    }


def generator() -> tuple[Read, Changes]:
    holder = SimpleNamespace(generator=torch.Generator().manual_seed(1))
    return lambda loss: loss * torch.rand((), generator=holder.generator), {
        "other": lambda: setattr(holder, "generator", torch.Generator().manual_seed(2)),
    }


def tensors() -> tuple[Read, Changes]:
    holder = SimpleNamespace(tables=[torch.tensor(2.0)])
    return lambda loss: loss * sum(holder.tables), {
        "equal": lambda: setattr(holder, "tables", [torch.tensor(3.0)]),
        "equal entry": lambda: holder.tables.__setitem__(0, torch.tensor(0.5)),
        "in place": lambda: holder.tables.append(torch.tensor(1.0)),
        "other": lambda: setattr(holder, "tables", []),
    }


def carried() -> tuple[Read, Changes]:
    holder = SimpleNamespace(state=SimpleNamespace(mean=torch.tensor(1.0)))

    def read(loss: Tensor) -> Tensor:
        holder.state.mean = 0.5 * holder.state.mean + loss.detach()
        return loss * holder.state.mean

    return read, {
        "equal": lambda: setattr(holder, "state", SimpleNamespace(mean=torch.tensor(3.0))),
        "equal again": lambda: setattr(holder, "state", SimpleNamespace(mean=torch.tensor(2.0))),
        "other": lambda: setattr(holder, "state", SimpleNamespace(mean=torch.tensor([1.0, 2.0]).sum().double())),
    }


def nested() -> tuple[Read, Changes]:
    holder = SimpleNamespace(stages=(Options(1.0), [Options(2.0)]))
    return lambda loss: loss * holder.stages[0].scale * holder.stages[1][0].scale, {
        "equal": lambda: setattr(holder, "stages", (Options(1.0), [Options(2.0)])),
        "in place": lambda: setattr(holder.stages[1][0], "scale", 3.0),
        "other": lambda: setattr(holder, "stages", (Options(1.0), [Options(4.0)])),
    }


def zero() -> tuple[Read, Changes]:
    options = Options(0.0)
    return lambda loss: loss + loss.detach() * options.scale, {"other": lambda: setattr(options, "scale", -0.0)}


KINDS: dict[str, tuple[Callable[[], tuple[Read, Changes]], str]] = {
    "object": (lambda: held(Options), "options.scale was"),
    "frozen dataclass": (lambda: held(Frozen), "options.scale was"),
    "frozen dataclass with slots": (lambda: held(FrozenSlots), "options.scale was"),
    "slots": (slots, "slotted.(options.scale was|_Slotted__hidden was)"),
    "list": (numbers, r"scales(.1)? was"),
    "long list": (long_list, "scales was a list .* is another list now"),
    "dictionary": (table, "weights(.l2|.cross entropy)? was"),
    "dictionary of tensors": (table_of_tensors, r"weights(\.c)? was (missing|in the order a, b, c)"),
    "set": (sets, r"terms(.doubled)? was"),
    "list of functions": (functions, "terms(.0)? was (a list|.*scaling)"),
    "nonlocal variable": (cell, "options.scale was"),
    "default": (defaults, "scale was"),
    "keyword default": (keyword_defaults, "scale was"),
    "attribute of a function": (attributes_of_a_function, "options.scale was"),
    "code of a function": (code, "inner.__code__ was"),
    "partial": (partials, "f(.scale|.by.scale)? was"),
    "class attribute": (class_attribute, "(Holder|holder).(options.scale|scale|read) was"),
    "class of an object": (other_class, "holder.__class__ was .*Holder .* is .*Other now"),
    "global": (global_name, "HELD.scale was"),
    "name of a builtin function": (builtin_name, "sum was missing"),
    "bound method": (bound_method, r"f was .*scaled .* is .*shifted \(test_references.py|options.scale was"),
    "patched forward": (patched_forward, "module.forward was missing .* patched_forward"),
    "patched method": (hidden_method, "module.scaled was missing .* hidden_method"),
    "loss function": (lambda: module(False), "loss_fn was a SmoothL1Loss .* is another SmoothL1Loss|beta was 2.0"),
    "equal loss function": (lambda: module(True), "loss_fn was a SmoothL1Loss .* another SmoothL1Loss|beta was 2.0"),
    "generator": (generator, "generator was a Generator .* is another Generator"),
    "tensors": (tensors, "tables(.0)? (was|is)"),
    "carried state": (carried, "state.mean"),
    "tuple of objects": (nested, "scale was"),
    "signed zero": (zero, "scale was 0.0 .* is -0.0"),
}


def loop_of(kind: str) -> Loop:
    model = nn.Linear(6, 4)
    optimizer = sgd(model)
    read, changes = KINDS[kind][0]()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = read(F.cross_entropy(model(x), y))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    loop = custom(step, [model], [optimizer], lambda _: (torch.randn(5, 6), torch.randint(4, (5,))))
    loop.options["changes"] = changes
    return loop


@pytest.mark.parametrize("kind", KINDS)
def test_a_reference_that_the_step_reads_has_changed(kind: str) -> None:
    twins = Twins(loop_of, kind)
    changes, expected = (loop.options.pop("changes") for loop in (twins.ours, twins.eager))
    steps = twins.steps_under(moving)
    twins.train(steps)
    for how in changes:
        changes[how]()
        if not how.startswith("equal"):
            with pytest.raises(StepError, match=KINDS[kind][1]):
                steps(*twins.next_batch())
            twins.compare()
            steps.recapture()
        expected[how]()
        twins.train(steps, 2)
        assert len(steps.steps) == 1


# ------------------------------------------------------------------------------------------------------------- effects

EMPTY: dict[str, Callable[[], Any]] = {"list": list, "deque": deque, "dictionary": dict, "object": SimpleNamespace}


def log(container: Any, value: Tensor) -> None:
    if isinstance(container, (list, deque)):
        container.append(value)
    elif isinstance(container, dict):
        container["loss"] = value
    else:
        container.loss = value


def logging(kind: str, shapes: int = 1) -> Loop:
    """A loop that logs its losses in a global container, which the end of an epoch of three steps replaces."""
    model = nn.Linear(6, 4)
    optimizer = sgd(model)
    names: dict[str, Any] = {"F": F, "log": log, "logged": EMPTY[kind]()}
    epochs: list[Any] = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log(logged, loss.detach())  # type: ignore[name-defined]  # noqa: F821
        return loss.detach()

    def batch(i: int) -> tuple[Tensor, Tensor]:
        rows = 4 + i // 2 % shapes
        return torch.randn(rows, 6), torch.randint(4, (rows,))

    def end_epoch(i: int) -> None:
        if i % 3 == 2:
            epochs.append(names["logged"])
            names["logged"] = EMPTY[kind]()

    def contents() -> list[Any]:
        return [vars(c) if kind == "object" else c for c in (*epochs, names["logged"])]

    step = FunctionType(step.__code__, names, closure=step.__closure__)
    return custom(step, [model], [optimizer], batch, after=end_epoch, others=contents)


@pytest.mark.parametrize(("kind", "shapes"), [("list", 2), ("deque", 2), ("dictionary", 1), ("object", 1)])
def test_effects_go_to_the_object_that_the_name_refers_to_now(kind: str, shapes: int) -> None:
    twins = Twins(logging, kind, shapes)
    steps = twins.steps_under(moving)
    twins.train(steps, 8)
    assert len(steps.steps) == shapes


def attributes_of_a_class() -> Loop:
    class Logged:
        last: Tensor | None = None
        has_begun = False
        seen: set[str] = set()  # noqa: RUF012

    loop = logging("list")
    inner = loop.capture_args[0]

    def step(x: Tensor, y: Tensor) -> Tensor:
        Logged.has_begun = True
        Logged.last = inner(x, y)
        Logged.seen.add("loss")
        return Logged.last

    return custom(step, loop.models, loop.optimizers, loop.batch, others=lambda: (Logged.last, Logged.seen))


def test_a_step_sets_attributes_of_a_class() -> None:
    twins = Twins(attributes_of_a_class)
    steps = twins.steps_under(moving)
    steps.step_for(*twins.next_batch())
    twins.compare()  # the capture has changed nothing
    twins.train(steps, 3)


def test_a_new_container_without_the_tensor_that_the_step_replaces_is_refused() -> None:
    twins = Twins(logging, "dictionary")
    twins.go_on_eagerly(1)
    steps = twins.steps_under(moving)
    twins.train(steps, 3)
    with pytest.raises(StepError, match=r"logged\.loss is not where it was .* capture the step again"):
        steps(*twins.next_batch())
    steps.recapture()
    twins.train(steps, 2)


def test_nothing_keeps_the_results_of_earlier_epochs() -> None:
    loop = logging("list")
    names = loop.capture_args[0].__globals__
    steps = Twins(logging, "list").steps_under(moving)
    steps.parts = loop.capture_args
    steps(*loop.batch(0))
    first = weakref.ref(names["logged"][0])
    for _ in range(2):
        names["logged"] = []
        steps(*loop.batch(0))
    gc.collect()
    assert first() is None and len(names["logged"]) == 1


def test_one_object_of_two_names_is_replaced_under_both_or_refused() -> None:
    def build() -> Loop:
        loop = logging("list")
        holder = SimpleNamespace(a=[], b=[])
        holder.b = holder.a
        inner = loop.capture_args[0]

        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = inner(x, y)
            holder.a.append(loss)
            holder.b.append(2 * loss)
            return loss

        loop = custom(step, loop.models, loop.optimizers, loop.batch, others=lambda: (holder.a, holder.b))
        loop.options["holder"] = holder
        return loop

    twins = Twins(build)
    holders = [loop.options.pop("holder") for loop in (twins.ours, twins.eager)]
    steps = twins.steps_under(moving)
    twins.train(steps)
    for holder in holders:
        holder.a = holder.b = []
    twins.train(steps)
    for holder in holders:
        holder.a = []
    with pytest.raises(StepError, match=r"holder\.b was one object with holder\.a at the capture and is another now"):
        steps(*twins.next_batch())
    steps.recapture()
    twins.train(steps)
    for holder in holders:
        holder.a = holder.b
    with pytest.raises(StepError, match=r"holder\.a was another object than holder\.b at the .* and is the same now"):
        steps(*twins.next_batch())


def test_functions_of_libraries_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(logging, "list")
    steps = twins.steps_under(moving)
    twins.train(steps)
    original = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda *args, **options: 2 * original(*args, **options))
    with pytest.raises(StepError, match=r"cross_entropy was cross_entropy .* and is .*lambda.* now"):
        steps(*twins.next_batch())


def test_what_the_step_does_not_read_may_be_replaced() -> None:
    twins = Twins(trained_by_an_object)
    steps = twins.steps_under(moving)
    for i in range(4):
        twins.train(steps)
        for loop in (twins.ours, twins.eager):
            trainer = loop.capture_args[0].__self__
            trainer.history.append(float(i))
            trainer.report = Options(i)
            trainer.data = iter([i])
            trainer.unnamed = {"options": Options(i)}
    assert len(steps.steps) == 1


class Trainer:
    """Object with state that its step does not read, although its code has names of this state."""

    def __init__(self) -> None:
        self.model = nn.Linear(6, 4)
        self.optimizer = sgd(self.model)
        self.options = Options(2.0)
        self.history = [object(), 1.0]
        self.report = Options(0.0)
        self.data = iter([0])
        self.unnamed = {"options": Options(0.0)}

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(self.model(x), y) * self.options.scale
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def trained_by_an_object() -> Loop:
    trainer = Trainer()
    batch = lambda _: (torch.randn(5, 6), torch.randint(4, (5,)))  # noqa: E731
    return custom(trainer.step, [trainer.model], [trainer.optimizer], batch)
