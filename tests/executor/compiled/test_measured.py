"""Tests of measured kernel durations: how events of the profiler are matched, and plans and reports with them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from executor import compiled
from executor.capture.profile import Profile, ProfileError
from executor.compiled import backend
from executor.compiled.measured import CompiledGraph, KernelCall, Run, measured, with_measured
from simulator.program import Kernel, Program
from tests.executor.compiled.test_compiled import QUICK, blocks, step

MS = 10**6


def kernel(name: str, ns: int) -> Kernel:
    return Kernel(name, "elementwise", "forward", (), (), ns)


PROGRAM = Program("graph 0/0", (), (kernel("a", 100), kernel("b", 300), kernel("c", 500), kernel("inlined", 700)))
# Kernel 2 is executed in step 3 and recomputed in step 4; one call executes kernels 0 and 1.
GRAPHS = (
    CompiledGraph("forward", (KernelCall("fused", ((1, 0), (2, 1))), KernelCall("aten::mm", ((3, 2),)))),
    CompiledGraph("backward", (KernelCall("aten::mm", ((4, 2),)), KernelCall("aten::mm", ()))),
)
FORWARD = Run("forward", (("fused", 800), ("aten::empty", 9), ("aten::mm", 10)))
BACKWARD = Run("backward", (("aten::mm", 30), ("aten::mm", 50)))


def profile_of(*runs: Run) -> Profile:
    return measured("0/0", PROGRAM, GRAPHS, runs, "a machine", "cpu")


def test_events_are_matched_by_name_and_order() -> None:
    profile = profile_of(Run("another model's", (("aten::mm", 7),)), FORWARD, BACKWARD)
    assert profile.durations_ns == (200, 600, 20, 700)
    assert profile.step_ns == 800 + 10 + 30 + 50
    slow = Run("backward", (("aten::mm", 1000), ("aten::mm", 50)))
    assert profile_of(FORWARD, BACKWARD, FORWARD, slow, FORWARD, BACKWARD) == profile  # medians
    later = Program("graph 0/1", PROGRAM.tensors, PROGRAM.kernels)
    retimed = with_measured(later, (profile,))
    assert retimed is not None and retimed.name == later.name
    assert [k.duration_ns for k in retimed.kernels] == [200, 600, 20, 700]
    assert with_measured(Program("graph 0/0", (), PROGRAM.kernels[:2]), (profile,)) is None


@pytest.mark.parametrize(
    ("runs", "message"),
    [
        ((FORWARD,), r"graph 0/0: the profiled step executed no kernel of its forward or backward; pass a function"),
        ((FORWARD, Run("backward", BACKWARD.events[:1])), r"calls aten::mm 2 times, and the profiler recorded 1; .*or"),
        ((Run("forward", ()), BACKWARD), r"calls fused 1 times, and the profiler recorded 0; compile without"),
        (
            [Run(run.label, tuple((name, 0) for name, _ in run.events)) for run in (FORWARD, BACKWARD)],
            r"the profiler recorded no time in its kernels; compile without profile= to plan with the roofline",
        ),
    ],
)
def test_a_kernel_without_its_events_is_refused(runs: Any, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        profile_of(*runs)


def test_wrong_uses_are_refused() -> None:
    with pytest.raises(ValueError, match="profile: expected None, 'measure' or what"):
        compiled.compile(blocks(1), memory=0.9, profile="measured")  # type: ignore[arg-type]
    model = compiled.compile(blocks(1), memory=0.9, profile="measure")
    with pytest.raises(ValueError, match="compile with profile='measure' and execute a step first"):
        compiled.measure(model, lambda: None)


class Timed:
    """The profiler's runs of generated code, with products of 1 ms and other kernels of 1 μs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.profiled = backend.profiled
        self.labels: list[str] = []
        monkeypatch.setattr(backend, "profiled", self.__call__)

    def __call__(self, step: Any, device: str) -> list[Run]:
        runs = self.profiled(step, device)
        self.labels += [run.label for run in runs]
        return [Run(run.label, tuple((n, MS if "mm" in n else MS // 1000) for n, _ in run.events)) for run in runs]


def planned(net: nn.Module, x: Tensor, mode: str, **options: Any) -> tuple[Any, list[Tensor]]:
    torch._dynamo.reset()
    model = compiled.compile(net, memory=0.7, planner=QUICK, mode=mode, **options)
    return model, step(model, net, x)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["recompute", "joint"])
def test_a_profiled_step_times_each_kernel_of_inductor(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock is read: the profiler's events count, with fixed durations."""
    timed = Timed(monkeypatch)
    net = blocks()
    x = torch.randn(4, 64, 32)
    model, expected = planned(net, x, mode, profile="measure")
    profiles = compiled.measure(model, lambda: step(model, net, x))
    (graph,) = compiled.report(model).graphs
    assert len(timed.labels) == 2 and graph.program is not None and not graph.is_measured
    times = {k.name: ns for k, ns in zip(graph.program.kernels, profiles[0].durations_ns, strict=True)}
    products = [ns for name, ns in times.items() if "mm" in name]
    assert len(products) == 12 and set(products) == {MS}  # 4 in the forward, 8 in the backward
    assert all(ns <= MS // 1000 for name, ns in times.items() if "mm" not in name)
    assert "kernels; predicted from the roofline" in str(compiled.report(model))

    again, found = planned(net, x, mode, profile=profiles)
    compiled.measure(again, lambda: step(again, net, x))
    (graph,) = compiled.report(again).graphs
    assert graph.is_measured and graph.program is not None and graph.peak_bytes <= graph.limit
    assert tuple(k.duration_ns for k in graph.program.kernels) == profiles[0].durations_ns
    assert "kernels; predicted from an earlier step" in str(compiled.report(again))
    assert graph.measured_ns == pytest.approx(graph.kernels_ns, rel=0.05)
    assert all(map(torch.equal, found, expected))
