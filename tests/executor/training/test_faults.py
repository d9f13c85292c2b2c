"""Tests that a failed step leaves a consistent model: undone before the optimizer starts, reported afterwards."""

import copy
import gc
import re
import signal
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from executor import PlannedStep, StepError
from executor.memory import engines
from executor.training import memory_source
from simulator import Plan
from tests.executor.networks import adamw
from tests.executor.training import programs
from tests.executor.training.programs import GPU, Bytes, Twins, planned, random_plan, required


def break_kernel(step: PlannedStep, phase: str, action: Callable[[], object], fraction: float = 0.5) -> int:
    """Runs ``action`` before the operator of a kernel in the middle of a phase."""
    items = [
        i
        for i, item in enumerate(step.order.items)
        if step.program.kernels[item.step.kernel].phase == phase and step.state.work[i].calls
    ]
    i = items[int(fraction * len(items))]
    work = step.state.work
    (out, function, get, options), *rest = work[i].calls

    def broken(*args, **kwargs):
        action()
        return function(*args, **kwargs)

    work[i] = work[i]._replace(calls=((out, broken, get, options), *rest))
    return i


def once(error: BaseException) -> Callable[[], None]:
    errors = [error]

    def act() -> None:
        if errors:
            raise errors.pop()

    return act


def ctrl_c() -> Callable[[], object]:
    fired: list[int] = []
    return lambda: fired or (fired.append(1), signal.raise_signal(signal.SIGINT))


UNDONE = r"kernel \d+ \(aten.* failed: RuntimeError: bad; the model is as before the step"


def fails(twins: Twins, step: PlannedStep, error: type[BaseException], message: str) -> None:
    """Asserts that a step fails and is undone without holding additional memory."""
    before = copy.deepcopy(twins.ours.state())
    torch.manual_seed(twins.seed)
    rng = torch.get_rng_state()
    batch = twins.next_batch()
    content = copy.deepcopy(batch)
    with Bytes(step, ()) as seen, pytest.raises(error, match=message) as caught:
        step(*batch)
    assert "\n" not in str(caught.value)
    programs.equal(batch, content)
    assert torch.equal(rng, torch.get_rng_state())
    programs.equal_states(twins.ours.state(), before)
    del batch, caught
    gc.collect()
    whole = sum(
        b.device_tensor.nbytes for b in {id(b.device_tensor.untyped_storage()): b for b in step.state.bindings}.values()
    )
    assert seen.bytes() <= whole


@pytest.mark.parametrize(
    ("phase", "steps", "make_action", "error", "message"),
    [
        ("forward", 0, lambda: once(RuntimeError("bad\nluck")), StepError, UNDONE),
        ("backward", 2, lambda: once(RuntimeError("bad\nluck")), StepError, UNDONE),
        ("backward", 1, ctrl_c, KeyboardInterrupt, "^$"),
        ("backward", 1, lambda: once(SystemExit(3)), SystemExit, "^3$"),
    ],
    ids=["forward", "backward", "Ctrl-C", "SystemExit"],
)
def test_a_failed_kernel_undoes_the_step(phase, steps, make_action, error, message):
    twins, step = planned()
    twins.train(step, steps)
    break_kernel(step, phase, make_action())
    fails(twins, step, error, message)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    twins.train(step, 2)


Fails = Callable[[Callable[[Tensor, Tensor], bool]], None]  # installs a predicate for failing copies (target, source)


@pytest.fixture
def moves(monkeypatch) -> Fails:
    def install(fails: Callable[[Tensor, Tensor], bool]) -> None:
        def move(target: Tensor, source: Tensor) -> None:
            if fails(target, source):
                raise OSError("no link")
            original(target, source)

        monkeypatch.setattr(engines, "move", move)

    original = engines.move
    return install


def a_copy_fails(way: str, hosts: set[int], install: Fails, armed: list[int]) -> None:
    """Lets one copy to or from these host slots fail once ``armed`` is not empty."""
    install(
        lambda target, source: (
            (target if way == "out" else source).data_ptr() in hosts and bool(armed) and not armed.pop()
        )
    )


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_failed_copy_undoes_the_step(way, moves):
    twins, step = planned()
    twins.train(step, 2)
    hosts = {b.host.data_ptr() for b in step.state.blocks.blocks.values() if not b.persistent}
    a_copy_fails(way, hosts, moves, [0])
    fails(twins, step, StepError, f"swap-{way} of .* failed: .*no link; the model is as before the step")
    twins.train(step, 2)


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_copy_that_fails_while_the_optimizer_runs_loses_nothing(way, moves):
    twins, step = planned()
    twins.train(step, 2)
    i = step.state.commit
    work = step.state.work
    armed = list[int]()
    late = {b for item in step.order.items[i + 1 :] for kind, b in item.before + item.after if kind == way}
    hosts = {step.state.blocks.blocks[step.order.schedule.blocks[b].owner].host.data_ptr() for b in late}
    work[i] = work[i]._replace(after=(*work[i].after, (armed.append, 0, None)))
    a_copy_fails(way, hosts, moves, armed)
    torch.manual_seed(twins.seed)
    with pytest.raises(StepError, match=f"swap-{way} of .*no link; the step finished, and the model is as "):
        step(*twins.next_batch())
    moves(lambda target, source: False)
    twins.eager_step()
    twins.compare()
    twins.train(step, 2)


def test_ctrl_c_while_the_optimizer_runs_waits_for_its_end():
    twins, step = planned()
    break_kernel(step, "optimizer", ctrl_c())
    torch.manual_seed(twins.seed)
    with pytest.raises(KeyboardInterrupt):
        step(*twins.next_batch())
    twins.eager_step()
    twins.compare()
    twins.train(step, 2)


def test_a_handler_of_the_users_is_called_after_the_step():
    twins, step = planned()
    received: list[int] = []
    break_kernel(step, "forward", ctrl_c())
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        twins.train(step, 1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert received == [signal.SIGINT]


def test_a_kernel_of_the_optimizer_that_fails():
    """The step is undone if it keeps undo copies; otherwise the error describes the model's state."""
    twins, step = planned(make_optimizer=adamw, undo=True)
    twins.train(step, 2)
    break_kernel(step, "optimizer", once(RuntimeError("bad luck")))
    fails(twins, step, StepError, "bad luck; the model is as before the step")
    twins.train(step, 2)
    twins, step = planned()
    break_kernel(step, "optimizer", once(RuntimeError("bad luck")))
    with pytest.raises(StepError, match="the optimizer had begun"):
        step(*twins.next_batch())
    assert step.state.blocks.used <= sum(t.nbytes for t in step.program.tensors if t.persistent)
    break_kernel(step, "optimizer", once(SystemExit(3)))
    with pytest.raises(SystemExit) as caught:
        step(*twins.next_batch())
    assert re.match(r"kernel \d+ .*the optimizer had begun", caught.value.__notes__[0])


def test_host_memory_that_cannot_be_had(monkeypatch):
    captured = Twins("mlp").captured()
    plan = random_plan(captured.program, 0)

    def none(self, cuts: list[int]) -> list[tuple[int, engines.Bytes]]:
        raise engines.TransferError(f"{cuts[-1]:,} bytes of host memory cannot be pinned")

    monkeypatch.setattr(engines.Engines, "pinned", none)
    with pytest.raises(StepError, match=r"[\d,]+ bytes of host memory cannot be pinned$"):
        PlannedStep(captured, plan, GPU, required(captured.program, plan))
    with pytest.raises(StepError, match="no memory to undo a step"):
        PlannedStep(captured, Plan(), undo=True)


@pytest.mark.parametrize("failed", [False, True])
def test_an_unreferenced_step_frees_its_memory_at_once(failed):
    """Memory is freed without the garbage collector; host copies that the user still holds stay valid."""
    gc.collect()
    gc.disable()
    try:
        twins, step = planned()
        twins.train(step, 2)
        if failed:
            break_kernel(step, "backward", once(RuntimeError("bad luck")))
            try:
                step(*twins.next_batch())
            except StepError:
                pass
        memory = {StorageWeakRef(b.host.untyped_storage()) for b in step.state.blocks.blocks.values()}
        away = {
            StorageWeakRef(b.user.untyped_storage())
            for b in step.state.bindings
            if b.block and b.block.place is memory_source.Place.HOST
        }
        assert away and away < memory
        del step
        assert {s for s in memory if not s.expired()} == away
        twins.compare()
    finally:
        gc.enable()
