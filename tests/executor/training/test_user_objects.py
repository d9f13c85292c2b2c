"""Tests that a planned step changes the user's objects as the eager step does, or is refused by name."""

from __future__ import annotations

import itertools
import sys
import traceback
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from executor import CaptureError, PlannedStep, StepError, capture_step, fit
from executor.capture.effects import Effects
from executor.capture.reach import Owner
from executor.training import check
from executor.training.check import CheckNotRun, difference
from executor.training.memory_source import Block, Blocks
from simulator import Plan, Recompute, Swap
from tests.executor.networks import sgd
from tests.executor.training.programs import Loop, Twins, bit_identical, custom, under_every_plan
from tests.executor.training.test_equal_to_eager import net, trained
from tests.executor.training.test_random_steps import Program, Twin

CARRIED = {  # blocks of test_random_steps.py that rebind a tensor -> its holder
    "rebound buffer": "mean",
    "carried state": "hidden",
    "carried pair": "pair",
    "exchanged entries": "two",
    "state of an LSTM": "memory",
    "nonlocal mean": "running_mean",
    "boxed state": "box",
}
BLOCKS = (
    *CARRIED,
    "appended list",
    "cleared list",
    "recent tensors",
    "table of features",
    "late loss",
    "late record",
    "own generator",
    "table by parameter",
    "gradient hooks",
    "average of weights",
)
CASES = {name: (name, "adamw") for name in BLOCKS} | {
    "optimizer around another": ("layer", "lookahead of adamw"),
    "optimizer with lists and tables": ("layer", "preconditioned"),
}

NIGHTLY = {
    "rebound buffer",
    "carried pair",
    "exchanged entries",
    "cleared list",
    "late record",
    "table of features",
    "table by parameter",
    "average of weights",
}


def loop_of(block: str, optimizer: str = "adamw") -> Loop:
    """Builds a loop of one block, whose twin must hold equal values in every object."""
    program = Program(0, (block,), optimizer, 1.0, "", False, 0)
    twin = Twin(program)

    def held() -> dict[str, Any]:
        values = {name: value for name, value in twin.observed().items() if not name.startswith(".state")}
        return tree_map_only(Tensor, Tensor.tolist, values)

    return custom(twin.step, [twin.model], [twin.optimizer], program.batch, others=held)


def fitted(twins: Twins, memory: float = 1.0, **options: Any) -> Any:
    return fit(twins.ours.capture_args[0], example_batch=twins.next_batch(), memory=memory, **options)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.nightly] * (n in NIGHTLY)) for n in CASES])
def test_a_planned_step_has_the_side_effects_of_the_step(name: str) -> None:
    twins = Twins(loop_of, *CASES[name])
    under_every_plan(twins, twins.captured(check=True), zlib.crc32(name.encode()))


def test_what_the_loop_keeps_of_a_carried_state_stays_as_it_was() -> None:
    for name in ("carried state", "state of an LSTM"):
        twins = Twins(loop_of, name)
        step = fitted(twins, 0.8, planner="capuchin")
        references: list[list[Any]] = [[], []]
        for _ in range(3):
            twins.train(step, 1)
            for loop, values in zip((twins.ours, twins.eager), references, strict=True):
                values.append(getattr(loop.model[1][0], CARRIED[name]))
        assert all(map(bit_identical, *map(tree_leaves, references))), name
        assert len({id(values) for values in references[0]}) == 3
    references.clear()
    twins.train(step, 1)
    addresses = set()
    for _ in range(3):  # without kept references, nothing is copied
        twins.train(step, 1)
        addresses.add(twins.ours.model[1][0].memory[0].data_ptr())
    assert len(addresses) == 1


LEFT: list[Tensor] = []


class Hidden:
    """Object whose attributes come from ``__getattr__``, so that no search finds them."""

    def __getattr__(self, name: str) -> Any:
        return lambda value: globals()["LEFT"].append(value)


HIDDEN = Hidden()


def logged(h: Tensor) -> Tensor:
    HIDDEN.log(h.detach())
    return h


def hidden() -> Loop:
    model = net(8)
    return trained(model, [sgd(model)], lambda x, y: [nn.functional.cross_entropy(logged(model(x)), y)])


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ("another shape", r"changes .*grown from .* keep one shape"),
        ("another list", r"new list of .*two.* change it in place"),
        ("data of a parameter", r"layer\.weight other memory .*write into it"),
        ("numbers in a list", r"changes .*kept from \(\) to \(3\.0"),
        ("set", r"set .*unordered.*make it a list"),
        ("", "leaves a tensor in LEFT.*pass it as an argument"),
    ],
)
def test_unrepeatable_changes_are_refused(block: str, message: str) -> None:
    twins = Twins(loop_of, block) if block else Twins(hidden)
    with pytest.raises((CaptureError, StepError), match=message):
        fitted(twins, 0.9)
    assert not LEFT
    twins.go_on_eagerly(2)
    LEFT.clear()


# ------------------------------------------------------------------------------------------------------------ the check


def test_the_check_names_what_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drops the step's effects, as if the capture had missed them."""
    monkeypatch.setattr(Effects, "compare", lambda self, owner, before: None)
    twins = Twins(loop_of, "carried state")
    with pytest.raises(CaptureError, match=r"changes [\w.]+ differently from the eager step \(by up to"):
        fitted(twins)
    twins.go_on_eagerly(2)
    fitted(twins, check=False)


def test_a_check_that_cannot_run_is_reported() -> None:
    table = nn.Embedding(4, 4)

    def step(i: Tensor) -> Tensor:
        return table(i).sum().detach()

    with pytest.warns(CheckNotRun, match="not compared with the eager step: .* IndexError"):
        capture_step(step, torch.tensor([9]))


class Injected(Exception): ...


def fails_at(point: int, fit_it: Callable[[], object]) -> bool:
    """Raises within call number ``point`` of the executor's functions, or the next call that restores nothing."""
    calls = 0
    raised = False
    # PyTorch calls __torch_dispatch__ where C++ lets no exception through (for a tensor's device).
    undoing = {"restore", "restored", "__torch_dispatch__"}

    def trace(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls, raised
        path = frame.f_code.co_filename
        if raised or "/executor/" not in path or "/tests/" in path:
            return
        calls += 1
        if calls >= point and not undoing & {f.name for f in traceback.extract_stack(frame)[-8:]}:
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
    "points", [range(50, 20000, 4000), pytest.param(range(1, 15000, 300), marks=pytest.mark.nightly)]
)
def test_a_fit_that_fails_anywhere_leaves_the_users_objects_as_they_were(points: range) -> None:
    reached = 0
    for point in points:
        name = list(CASES)[point % len(CASES)]
        twins = Twins(loop_of, *CASES[name])
        reached += fails_at(point, lambda: fitted(twins, 0.8, planner="capuchin"))  # noqa: B023
        twins.go_on_eagerly(2)
        assert twins.ours.others() == twins.eager.others(), (name, point)
    assert reached >= len(points) // 4


def test_an_object_that_cannot_be_restored_does_not_keep_others_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins(loop_of, "carried state")
    restore = Owner.restore

    def failing(self: Owner, before: dict[Any, Any]) -> None:
        if self.path.endswith("model.2"):
            raise RuntimeError("stuck")
        restore(self, before)

    monkeypatch.setattr(Owner, "restore", failing)
    with pytest.raises(CaptureError, match="could not be restored"):
        fitted(twins, check=False)
    first, (block,), _ = twins.ours.model
    assert type(first.weight) is nn.Parameter and type(block.hidden) is Tensor


def test_a_number_of_the_batch_decides_what_a_step_does() -> None:
    twins = Twins(loop_of, "branch on the batch")
    x, y = twins.next_batch()
    negative = -x.abs()
    positive = x.abs()
    step = fit(twins.ours.capture_args[0], example_batch=(negative, y), memory=1.0)
    for sign in (negative, positive, positive, negative):
        twins.at_once(step, [(sign, y)], [(sign.clone(), y)])
        twins.finish_step(step)
    assert len(step.steps) == 2
    one = capture_step(twins.ours.capture_args[0], negative, y)
    with pytest.raises(
        StepError, match=r"a number of the batch, on which the step depends .* was False .* is True now"
    ):
        PlannedStep(one, Plan.of(one.program, (), "", one.program.peak_bytes, ""))(positive, y)


def test_the_difference_of_values() -> None:
    a = torch.tensor([1.0, 2.0])
    assert difference(a, a.clone()) == 0 == difference("x", "x")
    assert difference(a, a + 0.25) == 0.25
    assert difference(a, a.double()) == difference(a, a[:1]) == difference(1, 2) == float("inf")
    assert difference(a, a * float("nan")) == float("inf")


@torch.library.custom_op("headroom_tests::jittered", mutates_args=())
def _jittered(x: Tensor, size: float) -> Tensor:
    """Adds noise that differs in each call, as the order of additions does on CUDA."""
    return x + size * torch.from_numpy(_NOISE.random(x.shape, np.float32))


_NOISE = np.random.default_rng(0)
_jittered.register_fake(lambda x, size: torch.empty_like(x))
_jittered.register_autograd(lambda context, gradient: (gradient, None))


@pytest.mark.parametrize(
    ("exact", "hidden", "message"),
    [
        (False, False, None),
        (True, False, "from the eager step"),
        (False, True, "from the eager step"),
    ],
)
def test_kernels_that_do_not_repeat_themselves_may_differ_as_much_as_eager_steps(
    monkeypatch: pytest.MonkeyPatch, exact: bool, hidden: bool, message: str | None
) -> None:
    """A step that also reads hidden state is refused on every device."""
    monkeypatch.setattr(check, "repeats", lambda device: exact)
    layer = nn.Linear(8, 8)
    optimizer = sgd(layer)
    calls = itertools.count()

    def step(x: Tensor) -> Tensor:
        loss = _jittered(layer(x), 1e-6).square().mean() * (1 + hidden * next(calls))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    with pytest.raises(CaptureError, match=message) if message else nullcontext():
        capture_step(step, torch.randn(4, 8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_step_with_atomic_additions_is_captured_on_a_gpu() -> None:
    """The backward kernel of ``grid_sample`` adds to few pixels in another order each time."""
    image = nn.Parameter(torch.randn(1, 4, 16, 16, device="cuda"))
    optimizer = torch.optim.SGD([image], lr=0.1)

    def step(x: Tensor) -> Tensor:
        loss = nn.functional.grid_sample(image, x, align_corners=True).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    grid = torch.rand(1, 512, 512, 2, device="cuda") * 0.01
    captured = capture_step(step, grid)
    with PlannedStep(captured, Plan.of(captured.program, (), "", captured.program.peak_bytes, "")) as planned:
        assert torch.isfinite(planned(grid))


def test_the_check_swaps_and_recomputes(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[Plan] = []
    prepare = PlannedStep.__init__

    def recorded(self: PlannedStep, captured: Any, plan: Plan, *args: Any, **options: Any) -> None:
        plans.append(plan)
        prepare(self, captured, plan, *args, **options)

    monkeypatch.setattr(PlannedStep, "__init__", recorded)
    Twins("small").captured(check=True)
    assert [{type(d) for d in plan.decisions} for plan in plans] == [{Swap, Recompute}]


def test_a_fault_of_the_planned_path_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Swaps in other content than was swapped out."""
    swap_out = Blocks.swap_out

    def broken(self: Blocks, block: Block) -> None:
        assert block.bytes is not None
        block.bytes.zero_()
        swap_out(self, block)

    monkeypatch.setattr(Blocks, "swap_out", broken)
    with pytest.raises(CaptureError, match=r"differently from the eager step|differs from the eager step"):
        Twins("small").captured(check=True)


def test_few_tokens_are_those_that_differ() -> None:
    tokens = torch.zeros(2, 100, dtype=torch.int64)
    tokens[:, 60:90] = torch.arange(60).view(2, 30)
    ignored = tokens.clone()
    ignored[:, :70] = -100
    batch = {"input_ids": tokens, "labels": ignored, "kinds": torch.tensor([0, 1])}
    cut = check.few_tokens(batch)
    assert cut["input_ids"].tolist() == tokens[:, 69:85].tolist() and cut["kinds"] is batch["kinds"]
    images = (torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))
    assert check.few_tokens(images) is images
    lengths = (tokens, ignored[:, 1:])
    assert check.few_tokens(lengths) is lengths
