"""The tests of steps, faults and micro-batches once more, on a double of torch.cuda that checks every order.

Of each test the first case; with copies as late as anything allows, or done by chance. A sample runs with all tests,
the others in ``make extras``. Left out are those that put something else in the engines' place.
"""

import inspect
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from executor import StepError
from executor.memory import engines
from tests.executor.cuda_double import CudaDouble
from tests.executor.training import test_faults, test_micro_batches, test_planned_step
from tests.executor.training.programs import planned

SAMPLE = {
    "test_equal_to_eager_under_random_plans", "test_changes_between_steps_count",
    "test_without_a_barrier_between_steps", "test_a_kernel_that_fails_is_as_if_the_step_had_not_been",
    "test_ctrl_c_before_the_optimizer_undoes_the_step", "test_a_swapped_batch_needs_memory_of_its_own",
    "test_one_memory_for_two_swapped_micro_batches_is_refused", "test_a_loss_that_the_plan_frees_at_once",
}  # fmt: skip
THREADS = "test_a_step_that_nobody_holds_returns_threads_and_memory_at_once"


def cases() -> list[Any]:
    found = []
    for module in (test_planned_step, test_faults, test_micro_batches):
        for name, function in vars(module).items():
            if (
                not name.startswith("test_")
                or getattr(function, "__module__", "") != module.__name__
                or name == THREADS
            ):
                continue
            marks = getattr(function, "pytestmark", [])
            if "monkeypatch" in inspect.signature(function).parameters or any(mark.name == "gpu" for mark in marks):
                continue
            given: dict[str, Any] = {}
            for mark in marks:
                if mark.name == "parametrize":
                    names, values = mark.args[0], next(iter(mark.args[1]))
                    given |= {names: values} if isinstance(names, str) else dict(zip(names, values, strict=True))
            found.append(pytest.param(function, given, id=name, marks=() if name in SAMPLE else pytest.mark.nightly))
    return found


@pytest.fixture
def double(request, monkeypatch):
    seed = zlib.crc32(request.node.name.encode())
    made = CudaDouble(seed if seed % 2 else None)
    made.install(monkeypatch)
    with made:
        yield made
    made.check()


@pytest.mark.parametrize(("function", "given"), cases())
def test_on_the_double(function: Callable[..., None], given, double):
    function(**given)


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_copy_that_fails_when_it_is_issued(way, double):
    """Before the optimizer the step is undone; from then on it goes on, and nothing is lost."""
    twins, step = planned()
    twins.train(step, 2)
    blocks, memory = step.state.blocks.blocks, step.order.schedule.blocks
    hosts = {b.host.data_ptr() for b in blocks.values() if not b.persistent}
    errors = [0]

    def fails(target, source):
        return bool((target if way == "out" else source).data_ptr() in hosts and errors and not errors.pop())

    double.fails = fails
    says = f"the swap-{way} of .* failed: RuntimeError: CUDA error: no link; the model is as before the step"
    test_faults.fails(twins, step, StepError, says)
    twins.train(step)
    i, work = step.state.commit, step.state.work
    late = {b for item in step.order.items[i + 1 :] for kind, b in item.before + item.after if kind == way}
    hosts = {blocks[memory[b].owner].host.data_ptr() for b in late}
    work[i] = work[i]._replace(after=(*work[i].after, (lambda _: errors.append(0), 0)))
    torch.manual_seed(twins.seed)
    with pytest.raises(StepError, match=f"swap-{way} of .*no link; the step went on to its end, and the model is as "):
        step(*twins.next_batch())
    double.fails = lambda target, source: False
    twins.eager_step()
    twins.seed += 1
    twins.compare()
    twins.train(step, 2)


def test_streams_come_round_and_memory_is_its_streams(double):
    """The double itself: 32 streams in turn; a block goes to who asks next on its stream, or when others are over."""
    streams = [torch.cuda.Stream(0) for _ in range(33)]
    assert streams[0] is streams[32] and len(set(streams)) == 32
    first, second = streams[:2]
    with torch.cuda.stream(first):
        x = torch.zeros(100)
    where = double.memory.of(x).at
    x.record_stream(second)
    second.put((second, second.issued))  # it has something to do
    with torch.cuda.stream(first):
        del x
        busy = torch.zeros(100)
        second.run(second.issued)
        free = torch.zeros(100)
    assert double.memory.of(busy).at != where
    assert double.memory.of(free).at == where
    with torch.cuda.stream(second):
        free.add_(1)  # nobody has waited
    assert "neither waits for the other" in double.found.pop()
    with torch.cuda.stream(first):
        assert torch.empty(7).isnan().all()


def test_a_copy_is_done_when_it_is_waited_for_and_reads_what_is_there_then(double):
    host = torch.frombuffer(engines.CUDA.take(400), dtype=torch.uint8)
    x, side = torch.ones(100), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        host.copy_(x.view(torch.uint8), non_blocking=True)
    assert not host.any() and side.queue  # and what reads it now comes too early
    assert "aten.any.default and a copy on stream" in double.found.pop()
    x.untyped_storage().resize_(0)
    assert "memory that was given back" in double.found.pop()
    torch.cuda.synchronize()
    assert (host == 255).all()
