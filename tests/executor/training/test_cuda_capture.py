"""Graphs on the double of torch.cuda: captured by the real GraphPool, replayed, equal to eager; no wait is too many."""

import gc
from collections.abc import Callable
from functools import cache

import pytest
import torch

from executor import StepError
from executor.memory import graph_pool, segments
from executor.training import graph
from tests.executor.cuda_capture import GraphDouble
from tests.executor.networks import sgd
from tests.executor.training.test_cuda_waits import ORDERS, Site, calls
from tests.executor.training.test_faults import break_kernel, once
from tests.executor.training.test_graph import by_tensor, graphed


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
        copies = [p.detach().clone() for p in twins.ours[0].parameters()]
        twins.eager_step()
        twins.seed += 1
        assert all(map(torch.equal, copies, twins.eager[0].parameters()))
    assert step.graph.captures == 1 and len(double.arenas) == 1
    step(*twins.next_batch())
    step.graph.close()  # a replay is under way
    assert not double.arenas


def a_capture_that_fails(double: GraphDouble) -> None:
    """A kernel fails while copies are in no order with compute; the next step captures."""
    twins, step = graphed("small", sgd)
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


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_graphs_on_the_double(scenario):
    assert with_all_waits(scenario)[0] == ""


@pytest.mark.nightly  # half a minute
@pytest.mark.parametrize("site", sites(), ids=lambda s: f"{s.first} {s.text}")
def test_every_wait_is_needed(site):
    made = [scenario for scenario in SCENARIOS if (site.file, site.first) in with_all_waits(scenario)[1]]
    assert any(wrong(scenario, site)[0] for scenario in made), "nothing is wrong without it"


def test_a_capture_that_is_invalidated_gives_its_memory_back(monkeypatch):
    """By a wait of the host in the middle: its end fails before the allocation to the pool ends."""
    double = GraphDouble()
    double.install(monkeypatch)
    with double:
        twins, step = graphed("small", sgd)
        twins.train(step)
        errors = [0]
        break_kernel(step, "backward", lambda: errors and (errors.pop(), torch.cuda.synchronize()))
        says = "operation not permitted when stream is capturing; the model is as before"
        with pytest.raises(StepError, match=says) as caught:
            step(*twins.next_batch())
        del caught
        assert not double.routes
        twins.train(step, 2)
        assert len(double.arenas) == 1
        step.graph.close()
        assert not double.arenas
    double.check()
