"""A step that fails leaves a sound model: undone before the optimizer has begun, explained afterwards."""

import copy
import gc
import re
import signal
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from executor import PlannedStep, StepError
from executor.memory import engines
from executor.memory.pinned import CUDA
from executor.training import memory_source
from executor.training.memory_source import slab
from simulator import Plan
from tests.executor.networks import adamw
from tests.executor.training.programs import (
    GPU,
    Bytes,
    Twins,
    equal,
    equal_states,
    planned,
    random_plan,
    required,
    same,
    tight,
)


def break_kernel(step: PlannedStep, phase: str, action: Callable[[], object], which: float = 0.5) -> int:
    """``action`` before the operator of a kernel in the middle of a phase."""
    items = [i for i, item in enumerate(step.order.items)
             if step.program.kernels[item.step.kernel].phase == phase and step.state.work[i].calls]  # fmt: skip
    i = items[int(which * len(items))]
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


def fails(twins: Twins, step: PlannedStep, error: type[BaseException], message: str) -> None:
    """A step that fails and is undone; no memory is held that was not there before."""
    before = copy.deepcopy(twins.ours.state())
    torch.manual_seed(twins.seed)
    rng = torch.get_rng_state()
    batch = twins.next_batch()
    content = copy.deepcopy(batch)
    with Bytes(step, ()) as seen, pytest.raises(error, match=message) as caught:
        step(*batch)
    assert "\n" not in str(caught.value)
    equal(batch, content)
    assert torch.equal(rng, torch.get_rng_state())
    equal_states(twins.ours.state(), before)
    del batch, caught
    gc.collect()
    whole = sum(b.own.nbytes for b in {id(b.own.untyped_storage()): b for b in step.state.bindings}.values())
    assert seen.bytes() <= whole


@pytest.mark.parametrize(("phase", "steps"), [("forward", 0), ("forward", 2), ("backward", 0), ("backward", 2)])
def test_a_kernel_that_fails_is_as_if_the_step_had_not_been(phase, steps):
    twins, step = planned()
    twins.train(step, steps)
    break_kernel(step, phase, once(RuntimeError("bad\nluck")))
    fails(twins, step, StepError, r"kernel \d+ \(aten.* failed: RuntimeError: bad; the model is as before the step")
    twins.train(step, 2)


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_copy_that_fails_is_as_if_the_step_had_not_been(way, monkeypatch):
    twins, step = planned()
    twins.train(step, 2)
    hosts = {b.host.data_ptr(): b for b in step.state.blocks.blocks.values() if not b.persistent}
    move, errors = engines.move, [OSError("no link")]

    def failing(target: Tensor, source: Tensor) -> None:
        if (target if way == "out" else source).data_ptr() in hosts and errors:
            raise errors.pop()
        move(target, source)

    monkeypatch.setattr(engines, "move", failing)
    fails(twins, step, StepError, f"swap-{way} of .* failed: OSError: no link; the model is as before the step")
    twins.train(step, 2)


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_copy_that_fails_while_the_optimizer_runs_loses_nothing(way, monkeypatch):
    twins, step = planned()
    twins.train(step, 2)
    i, work, began = step.state.commit, step.state.work, []
    late = {b for item in step.order.items[i + 1 :] for kind, b in item.before + item.after if kind == way}
    hosts = {step.state.blocks.blocks[step.order.schedule.blocks[b].owner].host.data_ptr() for b in late}
    work[i] = work[i]._replace(after=(*work[i].after, (began.append, 0)))
    move, errors = engines.move, [OSError("no link")]

    def failing(target: Tensor, source: Tensor) -> None:
        if (target if way == "out" else source).data_ptr() in hosts and began and errors:
            raise errors.pop()
        move(target, source)

    monkeypatch.setattr(engines, "move", failing)
    torch.manual_seed(twins.seed)
    with pytest.raises(StepError, match=f"swap-{way} of .*no link; the step went on to its end, and the model is as "):
        step(*twins.next_batch())
    assert not errors
    twins.eager_step()
    twins.compare()
    twins.train(step, 2)


def test_ctrl_c_before_the_optimizer_undoes_the_step():
    twins, step = planned()
    twins.train(step, 1)
    break_kernel(step, "backward", ctrl_c())
    fails(twins, step, KeyboardInterrupt, "^$")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    twins.train(step, 2)


@pytest.mark.parametrize("phase", ["backward", "optimizer"])
def test_what_ends_the_program_is_not_made_an_error(phase):
    twins, step = planned()
    twins.train(step, 1)
    break_kernel(step, phase, once(SystemExit(3)))
    if phase == "backward":
        fails(twins, step, SystemExit, "^3$")
        return twins.train(step, 2)
    with pytest.raises(SystemExit) as caught:
        step(*twins.next_batch())
    assert re.match(r"kernel \d+ .*the optimizer had begun", caught.value.__notes__[0])


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
    heard: list[int] = []
    break_kernel(step, "forward", ctrl_c())
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        twins.train(step, 1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


def test_a_kernel_of_the_optimizer_that_fails():
    """Undone where the step keeps what it overwrites; else the error says what the model is."""
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


def test_host_memory_that_cannot_be_had(monkeypatch):
    captured = Twins("mlp").captured()
    plan = random_plan(captured.program, 0)

    def none(self, nbytes: int) -> engines.Bytes:
        raise engines.TransferError(f"{nbytes:,} bytes of host memory cannot be pinned")

    monkeypatch.setattr(engines.HostEngines, "pinned", none)
    with pytest.raises(StepError, match=r"[\d,]+ bytes of host memory cannot be pinned$"):
        PlannedStep(captured, plan, GPU, required(captured.program, plan))
    with pytest.raises(StepError, match="no memory to undo a step"):
        PlannedStep(captured, Plan(), undo=True)


@pytest.mark.parametrize("failed", [False, True])
def test_a_step_that_nobody_holds_returns_threads_and_memory_at_once(failed):
    """Without the garbage collector; what the user still sees of the memory on the host stays right."""
    gc.collect()
    gc.disable()
    try:
        before = set(threading.enumerate())
        twins, step = planned()
        twins.train(step, 2)
        if failed:
            break_kernel(step, "backward", once(RuntimeError("bad luck")))
            try:
                step(*twins.next_batch())
            except StepError:
                pass
        made = [t for t in threading.enumerate() if t not in before and t.name in ("d2h", "h2d")]
        assert len(made) == 2
        memory = {StorageWeakRef(b.host.untyped_storage()) for b in step.state.blocks.blocks.values()}
        away = {StorageWeakRef(b.user.untyped_storage()) for b in step.state.bindings
                if b.block and b.block.place is memory_source.Place.HOST}  # fmt: skip
        assert away and away < memory
        del step
        for thread in made:
            thread.join(60)
            assert not thread.is_alive()
        assert {s for s in memory if not s.expired()} == away
        twins.compare()
    finally:
        gc.enable()


def test_what_cuda_pins_serves_the_next_step(monkeypatch):
    """The driver's calls, seen from outside: whole pages, another's only when no tensor shows the memory any more."""
    pinned: dict[int, int] = {}

    class Runtime:
        def cudaHostRegister(self, address, size, flags):
            assert not any(a < address + size and address < a + n for a, n in pinned.items())
            pinned[address] = size
            return 0

        def cudaHostUnregister(self, address):
            del pinned[address]

    settled = []
    monkeypatch.setattr(engines, "copy_streams", lambda index, compute: (None, None))
    for name, value in {
        "cudart": Runtime, "current_stream": lambda device: None, "Event": lambda: None, "current_device": lambda: 1,
        "device_count": lambda: 4, "memory_reserved": lambda device: 512 * (device == 2), "synchronize": settled.append,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    cuda = engines.CudaEngines(torch.device("cpu"))
    places = slab(cuda, {3: 5000, 4: 10})  # 5,120 and 512 bytes: two pages
    assert list(pinned.values()) == [8192] and next(iter(pinned)) % 4096 == 0
    assert next(iter(pinned)) == places[3].data_ptr() and places[4].data_ptr() == places[3].data_ptr() + 5120
    last = places[4].view(torch.int16)
    other = slab(cuda, {0: 1})
    del places
    assert list(pinned.values()) == [8192, 4096] and not settled
    again = slab(cuda, {0: 4000})
    assert list(pinned.values()) == [8192, 4096, 4096]
    where = last.data_ptr() - 5120
    del last
    assert slab(cuda, {0: 5000})[0].data_ptr() == where
    assert settled == [1, 2]  # what its last owner has copied, on any device
    with pytest.raises(engines.TransferError, match=r"bytes of host memory cannot be pinned"):
        cuda.pinned(2**62)
    del again, other
    CUDA.drop()
    assert not pinned


def swapping_the_batch(device: str = "cpu") -> tuple[Twins, PlannedStep]:
    twins = Twins("small", device=device)
    captured = twins.captured()
    step = tight(captured, random_plan(captured.program, 0, nothing=0.1))
    assert step.state.swapped_inputs()
    return twins, step


def test_what_is_freed_is_borrowed_first(monkeypatch):
    """On CUDA a batch, or a parameter, may be another stream's memory, which goes on at once unless it is told."""
    told, freed = [], []
    give = memory_source.Storages.give
    monkeypatch.setattr(engines.HostEngines, "borrow", lambda self, t: told.append((t.data_ptr(), t.nbytes)))
    monkeypatch.setattr(
        memory_source.Storages, "give", lambda self, b: (freed.append((b.bytes.data_ptr(), b.nbytes)), give(self, b))
    )
    twins, step = swapping_the_batch()
    assert any(block.persistent for block in step.state.blocks.blocks.values())
    twins.train(step, 2)
    assert told == freed


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_swapped_batch_of_another_stream(monkeypatch):
    """That stream goes on allocating while compute has not come to the batch."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    twins, step = swapping_the_batch("cuda")
    side = torch.cuda.Stream()
    for _ in range(3):
        with torch.cuda.stream(side):
            x, y = twins.next_batch()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda._sleep(100_000_000)
        torch.manual_seed(twins.seed)
        loss = step(x, y)
        with torch.cuda.stream(side):
            torch.full_like(x, torch.nan)
        assert same(loss, twins.eager_step())
