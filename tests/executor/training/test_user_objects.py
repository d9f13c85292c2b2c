"""What a step leaves in the user's objects is left by a planned step, too, or refused by name."""

from __future__ import annotations

import copy
import sys
import traceback
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from executor import CaptureError, PlannedStep, StepError, capture_step, fit
from executor.capture.effects import Effects
from executor.capture.reach import Owner
from executor.training.check import CheckNotRun
from simulator import Plan
from tests.executor.training.programs import Loop, Twins, own, same, under_every_plan

CASES: dict[str, Callable[[], Loop]] = {}


def case(make: Callable[[], Loop]) -> Callable[[], Loop]:
    CASES[make.__name__] = make
    return make


def batch(_: int = 0) -> tuple[Tensor, Tensor]:
    return torch.randn(16, 8), torch.randint(5, (16,))


class Network(nn.Module):
    """An MLP, whose hidden layer ``observe`` sees."""

    def __init__(self, observe: Callable[[Network, Tensor], Tensor | None] = lambda model, h: None) -> None:
        super().__init__()
        self.first, self.dropout, self.last = nn.Linear(8, 32), nn.Dropout(0.2), nn.Linear(32, 5)
        self.observe = observe

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.first(x))
        seen = self.observe(self, h)
        return self.last(self.dropout(h if seen is None else seen))


def loop_of(model: nn.Module, optimizer: Optimizer, before: Callable[[], object] = int, **rest: Any) -> Loop:
    def step(x: Tensor, y: Tensor) -> Tensor:
        before()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    rest.setdefault("others", lambda: tree_map_only(Tensor, Tensor.tolist, model.kept) if hasattr(model, "kept") else 0)
    return own(step, [model], [getattr(optimizer, "inner", optimizer)], batch, **rest)


def observing(
    observe: Callable[[Any, Tensor], Tensor | None], before: Callable[[Any], object] = bool, **kept: Any
) -> Loop:
    model = Network(observe)
    for name, value in kept.items():
        setattr(model, name, value)
    return loop_of(model, torch.optim.AdamW(model.parameters(), 0.01), lambda: before(model))


# ------------------------------------------------------------------------------------------------------ what is carried


@case
def buffer_bound_anew() -> Loop:
    def observe(model: Any, h: Tensor) -> Tensor:
        model.mean = 0.9 * model.mean + 0.1 * h.detach().mean(0)
        return h - model.mean

    model = Network(observe)
    model.register_buffer("mean", torch.zeros(32))
    return loop_of(model, torch.optim.AdamW(model.parameters(), 0.01))


@case
def hidden_state() -> Loop:
    def observe(model: Any, h: Tensor) -> Tensor:
        h = torch.tanh(h + model.kept)
        model.kept = h.detach()
        return h

    return observing(observe, kept=torch.zeros(16, 32))


@case
def state_of_an_lstm() -> Loop:
    cell = nn.LSTMCell(32, 32)

    def observe(model: Any, h: Tensor) -> Tensor:
        state = cell(h, model.kept)
        model.kept = tuple(part.detach() for part in state)
        return state[0]

    return observing(observe, kept=(torch.zeros(16, 32), torch.zeros(16, 32)))


@case
def two_names_exchanged() -> Loop:
    def observe(model: Any, h: Tensor) -> Tensor:
        model.kept[0], model.kept[1] = model.kept[1], model.kept[0]
        return h + model.kept[0]

    return observing(observe, kept=[torch.zeros(32), torch.ones(32)])


@case
def running_loss_of_an_enclosing_function() -> Loop:
    running = torch.zeros(())

    def observe(_: Any, h: Tensor) -> Tensor:
        nonlocal running
        running = 0.9 * running + h.detach().mean()
        return h * (1 + running)

    loop = observing(observe)
    loop.others = lambda: running.item()
    return loop


# ------------------------------------------------------------------------------------------- what the step's loop reads


@case
def list_that_grows() -> Loop:
    return observing(lambda model, h: model.kept.append(h.detach().mean()), kept=[])


@case
def list_that_is_cleared() -> Loop:
    def observe(model: Any, h: Tensor) -> None:
        model.kept.append(h.detach().mean())

    return observing(observe, lambda model: model.kept.clear(), kept=[])


@case
def bounded_history() -> Loop:
    return observing(lambda model, h: model.kept.append(h.detach().mean()), kept=deque(maxlen=2))


@case
def table_of_features() -> Loop:
    return observing(lambda model, h: model.kept.update(first=h.detach(), pair=(h.detach().sum(), None)), kept={})


@case
def loss_kept_with_its_graph() -> Loop:
    """As mixture-of-experts models keep an auxiliary loss."""

    def observe(model: Any, h: Tensor) -> None:
        model.kept = h.square().mean()

    model = Network(observe)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y) + 0.1 * model.kept
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    model.kept = None
    return own(step, [model], [optimizer], batch, others=lambda: None if model.kept is None else model.kept.item())


@dataclass(slots=True)
class Tracker:
    last: Tensor | None = None

    def track(self, value: Tensor) -> None:
        self.last = value.detach()


@case
def object_with_slots() -> Loop:
    tracker = Tracker()
    loop = observing(lambda _, h: tracker.track(h.mean()))
    loop.others = lambda: None if tracker.last is None else tracker.last.item()
    return loop


# ----------------------------------------------------------------------------------------------------------- generators


@case
def generator_of_ones_own() -> Loop:
    generator = torch.Generator().manual_seed(7)
    loop = observing(lambda _, h: h + torch.randn(h.shape, generator=generator))
    loop.others = lambda: generator.get_state().sum().item()
    return loop


# ----------------------------------------------------------------------------------------------------------- optimizers


class Centred(Optimizer):
    """Takes the mean off each gradient and lets another optimizer step."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner, self.defaults, self.state, self.param_groups = (
            inner,
            inner.defaults,
            inner.state,
            inner.param_groups,
        )
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.sub_(p.grad.mean())
        self.inner.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


@case
def optimizer_around_another() -> Loop:
    model = Network()
    return loop_of(model, Centred(torch.optim.AdamW(model.parameters(), 0.01)))


class Preconditioned(Optimizer):
    """Keeps a matrix for each dimension in a list, slow weights in a table, and binds its average anew."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["matrices"] = [torch.eye(n) for n in p.shape]
                    state["slow"], state["average"] = {"weights": p.clone()}, torch.zeros_like(p)
                for i, matrix in enumerate(state["matrices"]):
                    rows = p.grad.transpose(0, i).reshape(p.shape[i], -1)
                    matrix.mul_(0.9).add_(rows @ rows.T)
                state["average"] = 0.9 * state["average"] + p.grad / state["matrices"][0].diagonal().mean()
                p.sub_(group["lr"] * state["average"])
                p.copy_(state["slow"]["weights"].lerp_(p, 0.5))


@case
def optimizer_with_lists_and_tables() -> Loop:
    model = Network()
    return loop_of(model, Preconditioned(model.parameters()))


@case
def table_by_parameter() -> Loop:
    model = Network()
    scale = {p: torch.full_like(p, 0.5) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * scale[p]))
    return loop_of(model, torch.optim.SGD(model.parameters(), 0.1))


@pytest.mark.parametrize("name", CASES)
def test_a_planned_step_leaves_what_the_step_leaves(name: str) -> None:
    torch.manual_seed(0)
    under_every_plan(Twins(CASES[name]), zlib.crc32(name.encode()))


def test_what_the_loop_keeps_of_a_carried_state_stays_as_it_was() -> None:
    for name in ("buffer_bound_anew", "hidden_state", "state_of_an_lstm"):
        twins = Twins(CASES[name])
        step = fit(twins.ours.given[0], example_batch=twins.next_batch(), memory=0.8, planner="capuchin")
        kept: list[list[Any]] = [[], []]
        for _ in range(3):
            twins.train(step, 1)
            for loop, values in zip((twins.ours, twins.eager), kept, strict=True):
                values.append(loop.model.kept if hasattr(loop.model, "kept") else loop.model.mean)
        assert all(map(same, *map(tree_leaves, kept))), name
        assert len({id(values) for values in kept[0]}) == 3
    kept.clear()
    twins.train(step, 1)
    addresses = set()
    for _ in range(3):  # nothing is copied where nothing is kept
        twins.train(step, 1)
        addresses.add(twins.ours.model.kept[0].data_ptr())
    assert len(addresses) == 1


# -------------------------------------------------------------------------------------------------------------- refused


def no_shape(model: Any, h: Tensor) -> None:
    model.kept = torch.cat([model.kept, h.detach().mean()[None]])


def other_list(model: Any, h: Tensor) -> Tensor:
    h = h + model.kept[0]
    model.kept = [h.detach().mean(0)]
    return h


def other_course(model: Any, h: Tensor) -> Tensor:
    h = h if model.kept is None else h + 2 * model.kept
    model.kept = h.detach().mean(0)
    return h


def other_memory(model: Any, h: Tensor) -> None:
    model.last.weight.data = model.last.weight.data * 0.99


LEFT: list[Tensor] = []


class Hidden:
    """An object that nothing finds: ``__getattr__`` makes its attributes."""

    def __getattr__(self, name: str) -> Any:
        return lambda value: globals()["LEFT"].append(value)


HIDDEN = Hidden()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: observing(no_shape, kept=torch.zeros(1)), "changes model.kept from .* keep one shape"),
        (lambda: observing(other_list, kept=[torch.zeros(32)]), "new list of model.kept.* change it in place"),
        (lambda: observing(other_course, kept=None), "something else once model.kept is set.* without a plan first"),
        (lambda: observing(other_memory), r"model.last.weight other memory .*write into it"),
        (lambda: observing(lambda model, h: model.kept.append(3.0), kept=[]), r"changes model.kept from \(\) to \(3.0"),
        (lambda: observing(lambda model, h: model.kept.add(h.detach()), kept=set()), "set model.kept.*make it a list"),
        (lambda: observing(lambda model, h: HIDDEN.log(h.detach())), "leaves a tensor in LEFT.*pass it as an argument"),
    ],
)
def test_what_cannot_be_done_again_is_refused(make: Callable[[], Loop], message: str) -> None:
    twins = Twins(make)
    with pytest.raises((CaptureError, StepError), match=message):
        fit(twins.ours.given[0], example_batch=twins.next_batch(), memory=0.9)
    assert not LEFT
    twins.go_on_eagerly(2)
    LEFT.clear()


# ------------------------------------------------------------------------------------------------------------ the check


def test_the_check_names_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the effects of the step lost, as if the capture knew nothing of them."""
    monkeypatch.setattr(Effects, "compare", lambda self, owner, before: None)
    twins = Twins(CASES["hidden_state"])
    with pytest.raises(CaptureError, match=r"leaves model\.kept otherwise than the step itself \(by up to"):
        fit(twins.ours.given[0], example_batch=twins.next_batch(), memory=1.0)
    twins.go_on_eagerly(2)
    fit(twins.ours.given[0], example_batch=twins.next_batch(), memory=1.0, check=False)


def test_a_check_that_cannot_run_says_so() -> None:
    table = nn.Embedding(4, 4)

    def step(i: Tensor) -> Tensor:
        return table(i).sum().detach()

    with pytest.warns(CheckNotRun, match="not compared with the step itself: .* IndexError"):
        capture_step(step, torch.tensor([9]))


def test_the_check_changes_nothing() -> None:
    twins = Twins(CASES["generator_of_ones_own"])
    fit(twins.ours.given[0], example_batch=twins.next_batch(), memory=1.0)
    twins.compare()
    assert twins.ours.others() == twins.eager.others()


class Injected(Exception):
    pass


def fails_at(point: int, fit_it: Callable[[], object]) -> bool:
    """Raises within the call number ``point`` of the executor's functions, or the next that restores nothing."""
    calls, raised = 0, False

    def trace(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls, raised
        code = frame.f_code
        ours = "/executor/" in code.co_filename and "/tests/" not in code.co_filename
        calls += ours
        # PyTorch calls __torch_dispatch__ where C++ lets no exception through (for a tensor's device).
        undoing = {"restore", "restored", "__torch_dispatch__"}
        if (
            ours
            and calls >= point
            and not raised
            and not undoing & {f.name for f in traceback.extract_stack(frame)[-8:]}
        ):
            raised = True
            raise Injected

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        fit_it()
    except Exception:
        assert raised
    finally:
        sys.settrace(before)
    return raised


@pytest.mark.parametrize(
    "points", [range(50, 20000, 2000), pytest.param(range(1, 15000, 100), marks=pytest.mark.nightly)]
)
def test_a_fit_that_fails_anywhere_leaves_the_users_objects_as_they_were(points: range) -> None:
    reached = 0
    for point in points:
        name = list(CASES)[point % len(CASES)]
        twins = Twins(CASES[name])
        given, batch = twins.ours.given[0], twins.next_batch()
        reached += fails_at(point, lambda: fit(given, example_batch=batch, memory=0.8, planner="capuchin"))  # noqa: B023
        twins.go_on_eagerly(2)
        assert twins.ours.others() == twins.eager.others(), (name, point)
    assert reached >= len(points) // 4


def test_an_object_that_cannot_be_restored_does_not_keep_others_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(CASES["hidden_state"])
    restore = Owner.restore

    def failing(self: Owner, before: dict[Any, Any]) -> None:
        if self.path == "model.last":
            raise RuntimeError("stuck")
        restore(self, before)

    monkeypatch.setattr(Owner, "restore", failing)
    with pytest.raises(CaptureError, match="could not be restored"):
        fit(twins.ours.given[0], example_batch=twins.next_batch(), memory=1.0, check=False)
    assert type(twins.ours.model.first.weight) is nn.Parameter
    assert type(twins.ours.model.kept) is Tensor


# ------------------------------------------------------------------------------------------------------------ the batch


def test_a_number_of_the_batch_decides_what_a_step_does() -> None:
    model = Network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor, y: Tensor) -> Tensor:
        out = model(x) if (x > 0).all() else model(2 * x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    twin = copy.deepcopy(model)
    x, y = batch()
    planned = fit(step, example_batch=(x, y), memory=1.0)
    for sign in (x, x.abs(), x.abs(), x):
        torch.manual_seed(1)
        found = planned(sign, y)
        torch.manual_seed(1)
        out = twin(sign) if (sign > 0).all() else twin(2 * sign)
        loss = F.cross_entropy(out, y)
        loss.backward()
        torch.optim.SGD(twin.parameters(), 0.1).step()
        twin.zero_grad()
        assert torch.equal(found, loss.detach())
    assert len(planned.steps) == 1
    one = capture_step(step, x, y)
    with pytest.raises(
        StepError, match=r"a number of the batch, on which the step depends .* was False .* is True now"
    ):
        PlannedStep(one, Plan.of(one.program, (), "", one.program.peak_bytes, ""))(x.abs(), y)
