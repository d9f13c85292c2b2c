"""Graphs on the double of torch.cuda: captured by the real GraphPool, replayed, equal to eager; no wait is too many."""

import gc
from collections.abc import Callable
from functools import cache

import pytest
import torch

from executor import StepError
from executor.memory import graph_pool, segments
from executor.memory.graph_pool import need_of
from executor.training import graph
from tests.executor.cuda_capture import Driver, GraphDouble
from tests.executor.networks import sgd
from tests.executor.training.test_cuda_waits import ORDERS, Site, calls, rest_nightly
from tests.executor.training.test_faults import break_kernel, once
from tests.executor.training.test_graph import MIB, by_tensor, graphed, set_rate


def sites() -> list[Site]:
    """Waits in the files of graphs."""
    return sorted(s for module in (graph, graph_pool, segments) for _, name, s in calls(module) if name in ORDERS)


def replays(double: GraphDouble) -> None:
    """What is on the host is looked at before anything else is."""
    twins, step = graphed("small", by_tensor)
    for _ in range(4):
        x, y = twins.next_batch()
        torch.manual_seed(twins.seed)
        step(x, y)
        copies = [p.detach().clone() for p in twins.ours.model.parameters()]
        twins.eager_step()
        assert all(map(torch.equal, copies, twins.eager.model.parameters()))
    assert step.graph.captures == 1 and len(double.arenas) == 1
    made, need = step.graph.graph, need_of(graph.stays(step.order, step.state.blocks.blocks)[1])
    assert (made.pool_bytes, made.packed_bytes) == (need.arena, need.packed) and 0 < made.idle_bytes < made.pool_bytes
    assert step.graph.peak_bytes == step.state.blocks.used + need.arena > step.limit
    step(*twins.next_batch())
    step.graph.close()  # a replay is under way
    assert not double.arenas


def a_capture_that_fails(double: GraphDouble) -> None:
    """A kernel fails while copies are in no order with compute; the next step captures."""
    twins, step = graphed("mlp", sgd)
    twins.train(step)
    break_kernel(step, "backward", once(RuntimeError("bad luck")))
    with pytest.raises(StepError, match=r"captured: RuntimeError: bad luck; the model is as before the step") as caught:
        step(*twins.next_batch())
    assert caught.value.__cause__.__cause__ is None and not double.routes  # the capture has ended well
    del caught  # whose frames have tensors
    twins.train(step, 2)
    assert len(double.arenas) == 1
    step.graph.close()
    assert not double.arenas


def an_arena_of_a_thread_without_a_context(double: GraphDouble) -> None:
    """The driver knows no runtime's context until there is one."""
    segments.Segments.on_device(torch.device("cuda", 0), 4096).close()
    assert not double.arenas


SCENARIOS: list[Callable[[GraphDouble], None]] = [
    an_arena_of_a_thread_without_a_context,
    a_capture_that_fails,
    replays,
]


def wrong(scenario: Callable[[GraphDouble], None], omitted: Site | None) -> tuple[str, set[tuple[str, int]]]:
    """What is wrong in a scenario without a wait, and the calls that were made."""
    double = GraphDouble()
    with pytest.MonkeyPatch.context() as patch:
        double.install(patch)
        with double:
            double.omitted, raised = omitted and omitted[:3], ""
            try:
                scenario(double)
            except Exception as error:
                raised = f"{type(error).__name__}: {error}"
            gc.collect()  # graphs of a scenario that failed are given back here
    return raised or (double.found or [""])[0], double.called


@cache
def with_all_waits(scenario: Callable[[GraphDouble], None]) -> tuple[str, set[tuple[str, int]]]:
    return wrong(scenario, None)


@pytest.mark.nightly
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_graphs_on_the_double(scenario):
    assert with_all_waits(scenario)[0] == ""


@pytest.mark.nightly
@pytest.mark.parametrize("site", sites(), ids=lambda s: f"{s.first} {s.text}")
def test_every_wait_is_needed(site):
    made = [scenario for scenario in SCENARIOS if (site.file, site.first) in with_all_waits(scenario)[1]]
    assert any(wrong(scenario, site)[0] for scenario in made), "nothing is wrong without it"


def too_much() -> None:
    """An operator that takes more than its profile says."""
    torch.empty(2**30, dtype=torch.uint8)


FAULTS = {
    "invalidated": (
        lambda: torch.cuda.synchronize(),
        "operation not permitted when stream is capturing",
    ),  # its end fails, too
    "out of memory": (too_much, r"1,073,741,824 in one piece were not left"),
}


@pytest.mark.parametrize("fault", rest_nightly(list(FAULTS), str))
def test_a_capture_that_is_invalidated_gives_its_memory_back(fault, monkeypatch):
    """Whatever the reason, the next step captures."""
    double = GraphDouble()
    double.install(monkeypatch)
    does, named = FAULTS[fault]
    with double:
        twins, step = graphed("mlp", sgd)
        twins.train(step)
        errors = [0]
        break_kernel(step, "backward", lambda: errors and (errors.pop(), does()))
        with pytest.raises(
            StepError, match=f"cannot be captured: .*{named}.*; the model is as before the step"
        ) as caught:
            step(*twins.next_batch())
        del caught
        assert not double.routes and step.graph.graph is None
        twins.train(step, 2)
        set_rate(twins, 0.07)  # a number of Python's: the step is captured again
        twins.train(step)
        assert step.graph.captures == 2 and len(double.arenas) == 1
        assert step.graph.graph.pool_bytes >= 32 * MIB
        del step
        gc.collect()
        assert not double.arenas
    double.check()


@pytest.mark.nightly
def test_no_memory_for_an_arena_is_said(monkeypatch):
    double = GraphDouble()
    double.install(monkeypatch)
    with double:
        twins, step = graphed("mlp", sgd)
        twins.train(step)
        with monkeypatch.context() as patch:
            patch.setattr(Driver, "cuMemAlloc_v2", lambda self, found, nbytes: 2)
            with pytest.raises(StepError, match=r"the graph has no memory: .*error 2.*; the model is as before"):
                step(*twins.next_batch())
        twins.train(step, 2)
    double.check()
