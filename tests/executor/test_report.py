"""Tests of reports: tensors at the peak add up to it by kind and by module, and the page describes the plan."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from executor import capture, report
from simulator import Machine, Program, Swap, simulate
from simulator.plan import Plan
from simulator.report import Moved, Place, Rerun
from simulator.schedule import lower
from tests.executor.networks import NETWORKS, ResNet, adamw
from tests.strategies import machines, plans, programs
from tests.tiny import LIMIT, MACHINE, PROGRAM, RECOMPUTE_PLAN, SWAP_PLAN


@given(st.data())
def test_the_peaks_are_the_simulators_and_their_parts_add_up(data: st.DataObject) -> None:
    program: Program = data.draw(programs())
    plan: Plan = data.draw(plans(program))
    machine: Machine = data.draw(machines())
    limit = lower(program, plan).required_bytes
    page = report(program, machine, limit, plan)
    timeline = simulate(program, plan, machine, limit)
    assert page.without.nbytes == sum(page.without.kinds.values()) == program.peak_bytes
    assert page.under.nbytes == sum(page.under.kinds.values())
    assert page.under.nbytes == (timeline.peak_bytes if page.planner else program.peak_bytes)
    assert page.iteration_ns == timeline.iteration_ns or not page.planner


def test_by_hand() -> None:
    """The peak of tests/tiny.py is at b4 without a plan and at b3 with one."""
    page = report(PROGRAM, MACHINE, LIMIT, SWAP_PLAN, floor_ns=125)
    assert (page.without.kernel, page.without.name, page.without.phase) == (4, "b4", "backward")
    assert page.without.kinds == {"parameter": 10, "activation": 160, "gradient": 10}
    assert (page.under.kernel, page.under.nbytes) == (5, 150)
    assert page.under.kinds == {"parameter": 10, "activation": 120, "gradient": 20}
    assert page.swapped == {"activation": Moved(1, 40, 40)} and page.rerun == {}
    recomputing = report(PROGRAM, MACHINE, LIMIT, RECOMPUTE_PLAN)
    assert recomputing.rerun == {"matmul": Rerun(1, 10)} and recomputing.swapped == {} and recomputing.floor_ns is None
    assert (page.iteration_ns, recomputing.iteration_ns, page.ideal_ns) == (170, 130, 120)
    assert "  swap activations: 1 tensor; per step 40 B swapped out, 40 B swapped in" in str(page)
    assert "41.67% over the ideal 120 ns (waits for memory 30 ns, waits for data 20 ns)" in str(page)
    assert "  recompute: 1 kernel (1 matmul 10 ns)" in str(recomputing)
    assert "the step fits without a plan" in str(report(PROGRAM, MACHINE, 180))
    assert "the step does not fit without a plan, and no plan is given" in str(report(PROGRAM, MACHINE, LIMIT))


def test_modules_add_up_to_the_peak_with_workspaces() -> None:
    model = nn.Sequential(*(nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)))
    x = torch.empty(2, 8, 32, 32)
    captured = capture(model, nn.functional.mse_loss, adamw(model), (x, x.clone()))
    kernels = (replace(k, workspace=5000 if k.kind == "conv" else 0) for k in captured.program.kernels)
    program = replace(captured.program, kernels=tuple(kernels))
    captured = replace(captured, program=program)
    gap = max(program.gaps(), key=lambda gap: (program.tensors[gap.tensor].nbytes, gap.before - gap.after))
    plan = Plan((Swap(*gap),))
    page = report(captured, Machine.load("gtx1080ti"), lower(program, plan).required_bytes, plan)
    for peak in (page.without, page.under):
        assert sum(peak.modules.values()) == sum(peak.kinds.values()) == peak.nbytes
        assert peak.kinds["workspace"] == 5000
        assert peak.place and peak.modules[peak.place.module] >= peak.kinds["workspace"]
    assert page.planner == "the caller"


def test_parameters_their_gradients_and_state_are_in_their_modules() -> None:
    """At a peak with few activations, a layer's module holds four times its parameters."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 2, bias=False))
    _, batch = NETWORKS["lstm"]
    x = batch()[0].new_zeros(1, 64).float()
    captured = capture(model, nn.functional.mse_loss, adamw(model), (x, x[:, :2]), keep_grads=True)
    peak = report(captured, Machine.load("gtx1080ti"), captured.program.peak_bytes).without
    assert peak.phase == "optimizer" and peak.place == Place("optimizer", "")
    assert peak.modules["0"] == 4 * 64 * 64 * 4 + 4  # and the count of steps
    assert peak.kinds["gradient"] >= 64 * 64 * 4


def modules_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[str]:
    """Returns the module column of the report's page."""
    captured = capture(model, nn.CrossEntropyLoss(), adamw(model), (x, y))
    lines = str(report(captured, Machine.load("gtx1080ti"), captured.program.peak_bytes)).splitlines()
    assert len(lines) <= 40
    begin = next(i for i, line in enumerate(lines) if line.startswith("peak by module"))
    return [line.split("  ")[0] for line in lines[begin + 1 : lines.index("", begin)]]


@pytest.mark.nightly
def test_a_page_has_fifteen_modules_and_forty_lines_at_most() -> None:
    x, y = NETWORKS["resnet"][1]()
    few = modules_of(ResNet(2, 2), x, y)
    assert "blocks.0.body" in few and "blocks.1.short" in few and "(others)" not in few
    x = torch.empty(2, 8)
    pairs = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)) for _ in range(18)]
    # With two names there are more than fifteen, with one "blocks" would have nearly all.
    model = nn.Sequential(OrderedDict(stem=nn.Linear(8, 8), blocks=nn.Sequential(*pairs)))
    many = modules_of(model, x, y)
    assert len(many) == 15 and many[-1] == "(others)" and "blocks.0" in many and "blocks" not in many
    thirds = nn.Sequential(OrderedDict((name, nn.Sequential(*(nn.Linear(8, 8) for _ in range(9)))) for name in "abc"))
    model = nn.Sequential(OrderedDict(parts=thirds))
    assert {"parts.a", "parts.b", "parts.c"} <= set(modules_of(model, x, y))
