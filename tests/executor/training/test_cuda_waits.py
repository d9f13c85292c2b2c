"""Tests that every wait of the CUDA path is needed: skipping any one causes an error on the double of torch.cuda.

The waits are found in the sources: calls of events, streams, the allocator and the engines.
"""

import ast
import gc
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from executor import Captured, PlannedStep, StepError
from executor.memory import addresses, engines, graph_memory, pinned
from executor.training import graph, memory_source, planned_step, progress
from simulator import Plan, Swap
from tests.executor.networks import sgd
from tests.executor.training import programs
from tests.executor.training.programs import Loop, Twins, bit_identical, random_plan, standard, tight
from tests.executor.training.test_faults import break_kernel, once
from tests.executor.training.test_graph import graphed, set_rate
from tests.fake_device.graphs import Driver, GraphDouble

ORDERS = {"wait_event", "wait_stream", "record_stream", "synchronize", "record", "_settle"}
OF_ENGINES = {"wait", "join", "borrow", "begin", "synchronize"}
MODULES = (engines, pinned, memory_source, planned_step, progress, graph, graph_memory, addresses)


class Site(NamedTuple):
    """A call in a source file: path, lines and text."""

    file: str
    first: int
    last: int
    text: str


def sites() -> Iterator[Site]:
    for module in MODULES:
        path = Path(str(module.__file__))
        tree = ast.parse(path.read_text())
        host = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == "Engines"]
        host_lines = {n for c in host for n in range(c.lineno, c.end_lineno + 1)}
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)) or node.lineno in host_lines:
                continue
            of_engines = ast.unparse(node.func.value).endswith("engines")
            if node.func.attr in (OF_ENGINES if of_engines else ORDERS):
                yield Site(str(path), node.lineno, node.end_lineno, f"{path.name}: {ast.unparse(node)}")


class Case(NamedTuple):
    """The double, with twins captured as a whole and in two micro-batches."""

    double: GraphDouble
    twins: Twins
    captured: Captured
    in_parts: Captured

    def step(self, plan: Plan | None = None) -> PlannedStep:
        return tight(self.captured, plan or random_plan(self.captured.program, 0, empty_share=0.0))

    def over_the_boundary(self, graph: bool = False) -> PlannedStep:
        """Returns a step with swap-outs and swap-ins in flight between two steps."""
        return programs.over_the_boundary(self.captured, 1 + graph, graph=graph)

    def run(self, step: PlannedStep) -> None:
        """Runs one step in both twins without comparing them."""
        step(*self.twins.next_batch())
        self.twins.eager_step()

    def drop_in_flight(self) -> int:
        """Drops a step while its copies are in flight, and returns its pinned bytes."""
        program = self.captured.program
        plan = Plan(tuple(Swap(*gap) for gap in program.gaps() if program.tensors[gap.tensor].kind == "activation"))
        step = self.step(plan)
        step(*self.twins.next_batch())
        return step.pinned_bytes


def what_is_shown_is_whole(case: Case) -> None:
    """The host reads host copies immediately after a step."""
    step = case.step()
    for _ in range(3):
        case.run(step)
        copies = [p.detach().clone() for p in case.twins.ours.model.parameters()]
        assert all(map(bit_identical, copies, case.twins.eager.model.parameters()))


def copies_over_the_boundary(case: Case) -> None:
    step = case.over_the_boundary()
    with step:
        for _ in range(3):
            case.run(step)
    case.twins.go_on_eagerly()


def a_fault(case: Case) -> None:
    step = case.over_the_boundary()
    case.run(step)
    before = [t.clone() for t in case.twins.ours.model.state_dict().values()]
    for phase, fraction in (("forward", 0), ("forward", 0.5), ("backward", 0.5)):
        break_kernel(step, phase, once(RuntimeError("bad luck")), fraction)
        with pytest.raises(StepError, match="bad luck"):
            step(*case.twins.next_batch())
        assert all(map(bit_identical, before, case.twins.ours.model.state_dict().values()))


def another_compute_stream(case: Case) -> None:
    step = case.step()
    now = torch.cuda.current_stream()
    for call in (lambda: case.run(step), step.finish, lambda: case.run(step)):
        other = torch.cuda.Stream()
        other.wait_stream(now)
        with torch.cuda.stream(other):
            call()
            assert torch.cuda.current_stream() is other
            case.twins.compare()
        now = other


def a_loaders_batch(case: Case) -> None:
    """The batch was created on another stream, which keeps allocating."""
    step = case.step(programs.swapping_the_batch(case.captured.program))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        batch = case.twins.next_batch()
    torch.cuda.current_stream().wait_stream(side)
    step(*batch)
    side.wait_stream(torch.cuda.current_stream())


def another_stream_for_each_micro_batch(case: Case) -> None:
    captured = case.in_parts
    step = tight(captured, random_plan(captured.program, 1, empty_share=0.0))
    now = torch.cuda.current_stream()
    for _ in range(4):
        other = torch.cuda.Stream()
        other.wait_stream(now)
        with torch.cuda.stream(other):
            batch = case.twins.next_batch()
            step(*batch)
        now = other


def tensors_that_are_replaced(case: Case) -> None:
    """The user replaces tensors while copies are in flight."""
    step = case.over_the_boundary()
    with step:
        for _ in range(2):
            case.run(step)
            for loop in (case.twins.ours, case.twins.eager):
                for p in loop.model.parameters():
                    p.data = torch.ones_like(p)
                    loop.optimizer.state[p]["momentum_buffer"] = torch.ones_like(p)
        case.run(step)
    case.twins.compare()


def host_memory_that_serves_another(case: Case) -> None:
    memory = torch.frombuffer(engines.CUDA.take(case.drop_in_flight()), dtype=torch.uint8)
    memory.fill_(7)


def host_memory_that_is_unpinned(case: Case) -> None:
    case.drop_in_flight()
    engines.CUDA.drop()


def what_is_on_the_host_anyway(case: Case) -> None:
    """A host tensor is copied at once, here to a slot that a copy in flight still writes."""
    cuda = engines.CudaEngines(torch.device("cuda", 0))
    original = engines.on_host
    ((_, memory),) = cuda.pinned([128])
    place = torch.frombuffer(memory, dtype=torch.uint8)
    tensor = torch.zeros(128, dtype=torch.uint8)
    number = torch.ones(128, dtype=torch.uint8)
    event = cuda.event()
    cuda.begin()
    cuda.copy_out(place, tensor, event)
    engines.on_host = lambda tensor: True
    try:
        cuda.copy_out(place, number, cuda.event())
    finally:
        engines.on_host = original
    cuda.wait(event)


def an_arena_of_a_thread_without_a_context(case: Case) -> None:
    """The driver needs a context, which only a call of the runtime creates."""
    addresses.Arena.resident(torch.device("cuda", 0), 4096).close()
    assert not case.double.arenas


def a_capture_that_fails(case: Case) -> None:
    """A kernel fails while copies are unordered with compute; the next step is captured."""
    twins, step = graphed("mlp", sgd)
    twins.train(step)
    break_kernel(step, "backward", once(RuntimeError("bad luck")))
    with pytest.raises(StepError, match=r"captured: RuntimeError: bad luck; the model is as before the step") as caught:
        step(*twins.next_batch())
    assert caught.value.__cause__.__cause__ is None and not case.double.routes  # the capture ended properly
    del caught  # its frames hold tensors
    twins.train(step, 2)
    assert len(case.double.arenas) == 1
    step.graph.close()
    assert not case.double.arenas


def replays(case: Case) -> None:
    """The host reads host copies first after each replay."""
    step = case.over_the_boundary(graph=True)
    twins = case.twins
    for i in range(5):
        step(*twins.next_batch())
        copies = [state["momentum_buffer"].clone() for state in twins.ours.optimizer.state.values()]
        twins.eager_step()
        assert all(map(bit_identical, copies, (s["momentum_buffer"] for s in twins.eager.optimizer.state.values())))
        if i == 2:
            step.finish()  # swapped tensors must then be swapped out again
    assert step.graph.captures == 1 and len(case.double.arenas) == 1 and not case.double.aliased
    step(*twins.next_batch())
    step.graph.close()  # a replay is in flight
    assert not case.double.arenas


def replays_on_another_stream(case: Case) -> None:
    """Steps do not wait for copies within the ``with`` block."""
    step = case.over_the_boundary(graph=True)
    now = torch.cuda.current_stream()
    for _ in range(3):
        other = torch.cuda.Stream()
        other.wait_stream(now)
        with torch.cuda.stream(other):
            with step:
                case.run(step)
                case.run(step)
            case.twins.compare()
        now = other
    assert step.graph.captures == 1


SCENARIOS: list[Callable[[Case], None]] = [
    what_is_shown_is_whole,
    copies_over_the_boundary,
    a_fault,
    another_compute_stream,
    a_loaders_batch,
    another_stream_for_each_micro_batch,
    tensors_that_are_replaced,
    host_memory_that_serves_another,
    host_memory_that_is_unpinned,
    what_is_on_the_host_anyway,
    an_arena_of_a_thread_without_a_context,
    a_capture_that_fails,
    replays,
    replays_on_another_stream,
]


def three_layers() -> Loop:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    return standard(model, nn.CrossEntropyLoss(), sgd(model), lambda _: (torch.randn(8, 16), torch.randint(4, (8,))))


@cache
def captures() -> tuple[Twins, Captured, Captured]:
    twins = Twins(three_layers)
    twins.eager_step()
    return twins, twins.captured(), twins.captured(accumulate=2)


def fresh(twins: Twins) -> None:
    for loop in (twins.ours, twins.eager):
        torch.manual_seed(0)
        for p in loop.model.parameters():
            p.data = torch.randn(p.shape)
            p.grad = None
        for values in loop.optimizer.state.values():
            values["momentum_buffer"] = torch.zeros_like(values["momentum_buffer"])


def run_scenario(scenario: Callable[[Case], None], omitted: Site | None) -> tuple[str, set[tuple[str, int]]]:
    """Returns the error of a scenario with one wait skipped, and the calls that were made."""
    double = GraphDouble()
    case_parts = captures()
    message = ""
    with pytest.MonkeyPatch.context() as patch:
        double.install(patch)
        for name in OF_ENGINES:
            call = getattr(engines.CudaEngines, name)
            patch.setattr(engines.CudaEngines, name, lambda *a, call=call: None if double.left_out() else call(*a))
        with double:
            fresh(case_parts[0])
            double.omitted = omitted and omitted[:3]
            try:
                scenario(Case(double, *case_parts))
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
            gc.collect()  # releases graphs of a failed scenario
            double.omitted = None
    return message or (double.found or [""])[0], double.called


@cache
def with_all_waits(scenario: Callable[[Case], None]) -> tuple[str, set[tuple[str, int]]]:
    return run_scenario(scenario, None)


def first_by_day(cases: Sequence[Any], name: Callable[[Any], str]) -> list[Any]:
    """Marks all cases but the first as nightly."""
    return [pytest.param(case, id=name(case), marks=[pytest.mark.nightly] * (i > 0)) for i, case in enumerate(cases)]


@pytest.mark.parametrize("scenario", first_by_day(SCENARIOS, lambda s: s.__name__))
def test_nothing_is_wrong_with_all_waits(scenario):
    assert with_all_waits(scenario)[0] == ""


@pytest.mark.parametrize("site", first_by_day([*sites()], lambda s: f"{s.first} {s.text}"))
def test_every_wait_is_needed(site):
    """At least one scenario fails without the wait."""
    lines = {(site.file, line) for line in range(site.first, site.last + 1)}
    relevant = (scenario for scenario in SCENARIOS if lines & with_all_waits(scenario)[1])
    assert any(run_scenario(scenario, site)[0] for scenario in relevant), "nothing is wrong without it"


# ------------------------------------------------------------------------------------------------- captures that fail


def another_size() -> None:
    """Allocates another size that rounds to the same segment."""
    torch.empty(700, dtype=torch.uint8)


def too_much() -> None:
    torch.empty(2**30, dtype=torch.uint8)


FAULTS = {  # fault in a kernel, and in which of a step's two captures; in the first, ending it fails, too
    "invalidated": (lambda: torch.cuda.synchronize(), 0, "operation not permitted when stream is capturing"),
    "invalidated late": (lambda: torch.cuda.synchronize(), 1, "operation not permitted when stream is capturing"),
    "more memory": (too_much, 1, "an operator asks for 1,073,741,824 bytes, which it did not in the dry capture"),
    "less memory": (another_size, 0, "an operator asks for .* bytes, which it did not|have not asked for the memory"),
    "other memory": (another_size, 1, "an operator asks for .* bytes, which it did not|have not asked for the memory"),
    "over the limit": (too_much, 0, "as a graph the step takes 1,.* bytes, the limit is .*: plan it for"),
}


@pytest.mark.parametrize("fault", first_by_day(list(FAULTS), str))
def test_a_capture_that_is_invalidated_gives_its_memory_back(fault, double):
    """The next step is captured after any fault."""
    action, capture_index, pattern = FAULTS[fault]
    twins, step = graphed("mlp", sgd)
    twins.train(step)
    captures = iter(range(3))
    break_kernel(step, "backward", lambda: action() if next(captures, None) == capture_index else None)
    with pytest.raises(StepError, match=f"({pattern}).*; the model is as before the step") as caught:
        step(*twins.next_batch())
    del caught  # whose frames have tensors
    double.empty_cache()
    addresses.sweep()
    assert not double.routes and not double.aliased and not double.arenas and step.graph.graph is None
    twins.train(step, 2)
    set_rate(twins, 0.07)  # a number of Python's: the step is captured again
    twins.train(step)
    assert step.graph.captures == 2 and len(double.arenas) == 1
    del step
    gc.collect()
    assert not double.arenas


@pytest.mark.nightly
def test_no_memory_for_an_arena_is_said(double, monkeypatch):
    twins, step = graphed("mlp", sgd)
    twins.train(step)
    with monkeypatch.context() as patch:
        patch.setattr(Driver, "cuMemAlloc_v2", lambda self, found, nbytes: 2)
        with pytest.raises(StepError, match=r"captured: the device has no .*error 2.*; the model is as before"):
            step(*twins.next_batch())
    twins.train(step, 2)
