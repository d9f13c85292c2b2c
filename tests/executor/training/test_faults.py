"""A step that fails leaves a sound model, and what does not fit is refused in one sentence."""

import copy
import gc
import re
import signal
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from executor import Captured, PlannedStep, StepError, capture
from executor.memory import engines
from executor.memory.pinned import CUDA
from executor.training import memory_source
from executor.training.memory_source import slab
from simulator import Plan, Swap
from simulator.plan import PlanError
from simulator.schedule import OutOfMemory
from tests.executor.networks import adamw, sgd
from tests.executor.training.programs import (
    GPU,
    Bytes,
    Twins,
    equal_states,
    planned,
    random_plan,
    required,
    same,
    state,
    tight,
)

# ------------------------------------------------------------------------------------------------------------- faults


def break_kernel(step: PlannedStep, phase: str, action: Callable[[], None], which: int = 0.5) -> int:
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


def fails(twins: Twins, step: PlannedStep, error: type[BaseException], message: str) -> list[StorageWeakRef]:
    """A step that fails and is undone; returns the storages that were made meanwhile."""
    before = copy.deepcopy(state(twins.ours))
    torch.manual_seed(twins.seed)
    rng = torch.get_rng_state()
    batch = twins.next_batch()
    content = [t.clone() for t in batch]
    with Bytes(step, ()) as seen, pytest.raises(error, match=message) as caught:
        step(*batch)
    assert "\n" not in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(batch, content, strict=True))
    assert torch.equal(rng, torch.get_rng_state())
    if not before[1]["state"]:  # the first step has created it
        for values in state(twins.ours)[1]["state"].values():
            assert not any(v.any() for v in values.values())
        before[1]["state"] = copy.deepcopy(state(twins.ours)[1]["state"])
    equal_states(state(twins.ours), before)
    del batch, caught
    gc.collect()
    whole = sum(b.own.nbytes for b in {id(b.own.untyped_storage()): b for b in step.state.bindings}.values())
    assert seen.bytes() <= whole
    return list(seen.live)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("steps", [0, 2])
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
    fails(twins, step, StepError, f"the swap-{way} of .* failed: OSError: no link; the model is as before the step")
    twins.train(step, 2)


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_copy_that_fails_while_the_optimizer_runs_loses_nothing(way, monkeypatch):
    twins, step = planned()
    twins.train(step, 2)
    late = {
        b for item in step.order.items[step.state.commit + 1 :] for kind, b in item.before + item.after if kind == way
    }
    hosts = {step.state.blocks.blocks[step.order.schedule.blocks[b].owner].host.data_ptr() for b in late}
    began = []
    i = step.state.commit
    move, errors = engines.move, [OSError("no link")]
    work = step.state.work
    work[i] = work[i]._replace(after=(*work[i].after, (began.append, 0)))

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
    twins.seed += 1
    twins.compare()
    twins.train(step, 2)


def test_ctrl_c_before_the_optimizer_undoes_the_step():
    twins, step = planned()
    twins.train(step, 1)
    fired = []
    break_kernel(step, "backward", lambda: fired or (fired.append(1), signal.raise_signal(signal.SIGINT)))
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
    assert re.fullmatch(r"kernel \d+ \(.*\) was broken off; the optimizer had begun, .*", caught.value.__notes__[0])


def test_ctrl_c_while_the_optimizer_runs_waits_for_its_end():
    twins, step = planned()
    fired = []
    break_kernel(step, "optimizer", lambda: fired or (fired.append(1), signal.raise_signal(signal.SIGINT)))
    torch.manual_seed(twins.seed)
    with pytest.raises(KeyboardInterrupt):
        step(*twins.next_batch())
    twins.eager_step()
    twins.seed += 1
    twins.compare()
    twins.train(step, 2)


def test_a_handler_of_the_users_is_called_after_the_step():
    twins, step = planned("lstm")
    heard: list[int] = []
    fired = []
    break_kernel(step, "forward", lambda: fired or (fired.append(1), signal.raise_signal(signal.SIGINT)))
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        twins.train(step, 1)
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


def test_a_kernel_of_the_optimizer_that_fails():
    """Undone where the step keeps what it overwrites; else the error says what the model is."""
    twins, step = planned(optimizer=adamw, undo=True)
    twins.train(step, 2)
    break_kernel(step, "optimizer", once(RuntimeError("bad luck")))
    fails(twins, step, StepError, "bad luck; the model is as before the step")
    twins.train(step, 2)
    twins, step = planned()
    break_kernel(step, "optimizer", once(RuntimeError("bad luck")))
    with pytest.raises(StepError, match="the optimizer had begun, and what it updated before this kernel is a "):
        step(*twins.next_batch())
    assert step.state.blocks.used <= sum(t.nbytes for t in step.program.tensors if t.persistent)


def test_host_memory_that_cannot_be_had(monkeypatch):
    twins = Twins("lstm")
    captured = twins.captured()
    plan = random_plan(captured.program, 0)

    def none(self, nbytes: int) -> engines.Bytes:
        raise engines.TransferError(f"{nbytes:,} bytes of host memory cannot be pinned")

    monkeypatch.setattr(engines.HostEngines, "pinned", none)
    with pytest.raises(StepError, match=r"^the plan cannot be run: [\d,]+ bytes of host memory cannot be pinned$"):
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
    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    monkeypatch.setattr(engines, "copy_streams", lambda index, compute: (None, None))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 512 * (device == 2))
    monkeypatch.setattr(torch.cuda, "synchronize", settled.append)
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
    with pytest.raises(engines.TransferError, match=r"bytes of host memory cannot be pinned: .* are available"):
        cuda.pinned(2**62)
    del again, other
    CUDA.drop()
    assert not pinned


# ------------------------------------------------------------------------------------------------- errors at the edge


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (lambda x, y: (x[:1], y), r"tensor 0 of the batch has shape \(1, 9\), at the capture it had \(3, 9\)"),
        (lambda x, y: (x, y.int()), "tensor 1 of the batch has type torch.int32"),
        (lambda x, y: (x.to("meta"), y), "tensor 0 of the batch has device meta, at the capture it had cpu"),
        (lambda x, y: (x.t().contiguous().t(), y), "tensor 0 of the batch has stride"),
        (lambda x, y: (x, y, y), "the batch is .*, the step was captured with"),
        (lambda x, y: (x, 3), "tensor 1 of the batch is a int, not a tensor"),
    ],
)
def test_a_batch_that_does_not_fit(batch, message):
    twins, step = planned("lstm", optimizer=sgd)
    with pytest.raises(StepError, match=message) as caught:
        step(*batch(*twins.next_batch()))
    assert len(str(caught.value).splitlines()) == 1
    twins.train(step)


def swapping_the_batch(twins: Twins) -> tuple[Captured, PlannedStep]:
    """Its first tensor, within the step and over its boundary."""
    captured = twins.captured()
    (x,) = (i for i, t in enumerate(captured.program.tensors) if t.name == "input0")
    uses = captured.program.accesses[x]
    return captured, tight(captured, Plan((Swap(x, uses[0], uses[-1]), Swap(x, uses[-1], uses[0]))))


def test_a_swapped_batch_needs_memory_of_its_own():
    twins = Twins("small")
    captured, step = swapping_the_batch(twins)
    twins.train(step, 2)
    data, y = torch.randn(8, 3, 16, 16), twins.next_batch()[1]
    with pytest.raises(StepError, match="clone it"):
        step(data[2:4], y)
    with pytest.raises(StepError, match="clone it"):
        step(torch.from_numpy(data[2:4].numpy()), y)
    model, loss_fn, _ = twins.eager
    torch.manual_seed(3)
    want = loss_fn(model(data[2:4]), y).detach()
    torch.manual_seed(3)
    assert same(PlannedStep(captured, Plan())(data[2:4], y), want)


def test_what_is_freed_is_borrowed_first(monkeypatch):
    """On CUDA a batch, or a parameter, may be another stream's memory, which goes on at once unless it is told."""
    told, freed = [], []
    give = memory_source.Storages.give
    monkeypatch.setattr(engines.HostEngines, "borrow", lambda self, t: told.append((t.data_ptr(), t.nbytes)))
    monkeypatch.setattr(
        memory_source.Storages, "give", lambda self, b: (freed.append((b.bytes.data_ptr(), b.nbytes)), give(self, b))
    )
    twins = Twins("small")
    step = swapping_the_batch(twins)[1]
    x, y = twins.next_batch()
    at = x.data_ptr(), x.nbytes
    step(x, y)
    assert told == freed and told[0] == at
    twins, step = planned()
    twins.train(step, 2)
    assert told == freed and any(block.persistent for block in step.state.blocks.blocks.values())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_a_swapped_batch_of_another_stream(monkeypatch):
    """That stream goes on allocating while compute has not come to the batch."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    twins = Twins("small", device="cuda")
    step = swapping_the_batch(twins)[1]
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
        twins.seed += 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p[0].to(torch.float64), "words.weight has type torch.float64, at the capture it had torch.float32"),
        (lambda p: setattr(p[0].out, "weight", nn.Parameter(torch.ones(10, 16))), "out.weight was replaced by another"),
        (lambda p: p[2].param_groups[0].update(nesterov=True), "the optimizer's nesterov was False at the capture"),
        (lambda p: p[2].add_param_group({"params": [nn.Parameter(torch.ones(1))]}), "other parameter groups"),
        (lambda p: setattr(p[0], "out", nn.Linear(16, 10)), "module LSTM has other parts than at the capture"),
        (lambda p: p[0].eval(), "module LSTM is in eval mode, at the capture it was in train mode"),
        (lambda p: p[0].out.bias.requires_grad_(False), "out.bias was frozen or unfrozen after the capture"),
        (lambda p: setattr(p[0].out.bias, "grad", torch.ones(10)), "out.bias has a gradient"),
        (lambda p: p[0].share_memory(), "the plan swaps .*, which is in memory shared with other processes"),
        (
            lambda p: [setattr(q, "data", torch.cat([q.data, q.data])[: len(q)]) for q in p[0].parameters()],
            "is part of other memory than at the capture",
        ),
    ],
)
def test_a_model_that_is_not_the_captured_one(change, message):
    twins, step = planned("lstm")
    twins.train(step)
    change(twins.ours)
    for _ in range(2):
        with pytest.raises(StepError, match=message) as caught:
            step(*twins.next_batch())
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("place", [memory_source.Place.DEVICE, memory_source.Place.HOST])
def test_state_that_becomes_shared_is_refused_wherever_it_is(place):
    twins, step = planned("lstm")
    twins.train(step)
    b = next(b for b in step.state.bindings if b.block and b.block.place is place)
    user = b.user
    user.share_memory_()
    for _ in range(2):
        with pytest.raises(StepError, match=f"the plan swaps {b.name}, which is in memory shared with other processes"):
            step(*twins.next_batch())
    user.data = user.data.clone()
    twins.train(step, 2)


def test_plans_that_do_not_fit():
    captured = Twins("lstm").captured()
    program = captured.program
    with pytest.raises(PlanError, match="another program"):
        PlannedStep(captured, Plan((), "0" * 64))
    with pytest.raises(OutOfMemory):
        PlannedStep(captured, Plan(), GPU, program.peak_bytes - 1)
    with torch.device("meta"):
        model = nn.Linear(4, 4)
        x = torch.ones(2, 4)
    with pytest.raises(StepError, match="weight has device meta, at the capture it had cpu"):
        PlannedStep(capture(model, nn.MSELoss(), sgd(model), (x, x)), Plan())
    model = nn.Linear(4, 4)
    damped = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    x = torch.ones(2, 4)
    with pytest.raises(StepError, match="dampening"):
        PlannedStep(capture(model, nn.MSELoss(), damped, (x, x)), Plan())


def test_a_tensor_of_another_size_than_the_programs_is_refused():
    """Where a real operator makes something else than its trace (they differ in few)."""
    twins, step = planned()
    block = next(b for b in step.state.blocks.blocks.values() if not b.persistent)
    block.nbytes += 4
    with pytest.raises(StepError, match=r"has .* bytes, the program says .*the model is as before the step"):
        step(*twins.next_batch())
    block.nbytes -= 4
    twins.train(step, 2)
