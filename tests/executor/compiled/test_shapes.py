"""Tests of plans for several shapes: one for the largest, or one for each with a warning."""

import warnings

import pytest
import torch

from executor import compiled
from executor.compiled import Partitioner
from tests.executor.compiled.test_compiled import QUICK, blocks, graphs, peak, step


def test_a_plan_for_the_largest_batch_serves_smaller_ones() -> None:
    net = blocks()
    partitioner = Partitioner(0.7, planner=QUICK)
    model = graphs(net, partitioner, dynamic=True)
    for batch, length in ((4, 64), (3, 64), (2, 40)):
        x = torch.randn(batch, length, 32)
        torch.testing.assert_close(step(model, net, x), step(net, net, x))
    (graph,) = partitioner.graphs
    assert graph.plan is not None and graph.plan.decisions
    x = torch.randn(5, 64, 32)
    torch.testing.assert_close(step(model, net, x), step(net, net, x))
    assert len(partitioner.graphs) == 2


@pytest.mark.nightly
@pytest.mark.parametrize("dynamic", [True, False])
def test_another_shape_is_served_or_announced(dynamic: bool) -> None:
    net = blocks()
    model = compiled.compile(net, memory=0.7, planner=QUICK, dynamic=dynamic)
    peaks = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in (4, 3):
            x = torch.randn(batch, 64, 32)
            torch.testing.assert_close(step(model, net, x), step(net, net, x))
            peaks.append(peak(model, net, x))
    found = compiled.report(model).graphs
    assert found[0].plan is not None and found[0].plan.decisions
    assert peaks[1] < peaks[0] <= found[0].limit
    assert peaks[0] == pytest.approx(found[0].peak_bytes, rel=0.02)
    lines = [str(w.message) for w in caught if "planned and compiled again" in str(w.message)]
    if dynamic:
        assert len(found) == 1 and not lines
    else:
        assert len(found) == 2 and len(lines) == 1
        assert lines[0].startswith("graph 0/1 was planned") and "for inputs of (3, 64, 32): with dynamic" in lines[0]
