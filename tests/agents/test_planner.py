"""What holds for every planner."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings, strategies as st

import agents
from agents.planner import Candidates, spans
from simulator import Gap, Kernel, Machine, Plan, Program, Tensor, simulate
from tests.strategies import machines, programs

FAST = {"random": {"calls": 20}, "annealing": {"calls": 60}}
PLANNERS = [
    ("none", {}), ("random", {}), ("autoswap_doa", {}), ("autoswap_aoa", {}), ("autoswap_wdoa", {}),
    ("autoswap_swdoa", {}), ("superneurons", {}), ("superneurons", {"mode": "swap"}),
    ("superneurons", {"always": True}), ("superneurons", {"early": True}),
    ("annealing", {}), ("annealing", {"mode": "joint"}), ("annealing", {"mode": "recompute"}),
]  # fmt: skip


def layers(program: Program) -> Program:
    """The program with kinds and phases that SuperNeurons' rules look at."""
    kinds = ("conv", "norm", "activation", "conv", "pool", "matmul")
    half = len(program.kernels) // 2
    kernels = tuple(
        Kernel(k.name, kinds[i % 6], "forward" if i < half else "backward", k.inputs, k.outputs, k.duration_ns,
               k.workspace, recomputable=k.recomputable)
        for i, k in enumerate(program.kernels)
    )  # fmt: skip
    return Program(program.name, program.tensors, kernels)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_no_planner_returns_a_plan_over_the_limit(data: st.DataObject) -> None:
    program = layers(data.draw(programs()))
    machine = data.draw(machines())
    limit = data.draw(st.integers(program.peak_bytes // 3, program.peak_bytes))
    for name, options in PLANNERS:
        planner = agents.make(name, min_bytes=1, **FAST.get(name, {}), **options)
        try:
            plan = planner.plan(program, machine, limit)
        except agents.Infeasible as error:
            assert limit < program.peak_bytes and f"within {limit:,} bytes" in str(error)
            continue
        timeline = simulate(program, plan, machine, limit)  # checks that the plan fits the program
        assert timeline.peak_bytes <= limit
        assert (plan.fingerprint, plan.planner, plan.limit) == (program.fingerprint, name, limit)
        assert 1 <= planner.simulator_calls <= FAST.get(name, {"calls": 10**6})["calls"]
        assert Plan.from_dict(plan.to_dict()) == plan


@pytest.mark.parametrize("name", agents.PLANNERS)
def test_every_planner_takes_the_common_options(name: str) -> None:
    assert agents.make(name, seed=3, min_bytes=1).name == name


def test_none_is_the_empty_plan_or_infeasible() -> None:
    program = Program("one", (Tensor("a", 7),), (Kernel("k", "other", "forward", (), (0,), 1),))
    machine = Machine("m", 10**6, 10**9, 10**9)
    assert agents.make("none").plan(program, machine, 7) == Plan((), program.fingerprint, "none", 7, "m")
    with pytest.raises(agents.Infeasible, match=r"none: 'one' cannot be planned within 6 bytes .* is 7 bytes"):
        agents.make("none").plan(program, machine, 6)


def test_unknown_names_and_options_name_the_nearest() -> None:
    with pytest.raises(ValueError, match="no planner 'autoswap_wdao'; the nearest is 'autoswap_wdoa'"):
        agents.make("autoswap_wdao")
    with pytest.raises(ValueError, match="'annealing' has no option 'call'; the nearest is 'calls'"):
        agents.make("annealing", call=3)
    with pytest.raises(ValueError, match="no option 'score'"):  # the name says it already
        agents.make("autoswap_doa", score="aoa")


def test_torch_is_imported_by_the_learned_planners_only() -> None:
    make = "import agents, sys; made = [agents.make(n) for n in agents.PLANNERS if not n.startswith('dqn')]"
    code = f"{make}; assert made and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_candidates_residency_is_the_load_less_the_open_gaps() -> None:
    kernels = tuple(Kernel(f"k{i}", "other", "forward", (0,) if i in (1, 4) else (), (), 1) for i in range(6))
    program = Program("persistent", (Tensor("w", 5, "parameter", True),), kernels)
    candidates = Candidates(program, [Gap(0, 1, 4), Gap(0, 4, 1)])
    assert candidates.residency(candidates.nbytes == 5).tolist() == [0, 5, 0, 0, 5, 0]
    assert candidates.least == 5
    load = candidates.loads.copy()
    candidates.empty(load, 1)
    assert load.tolist() == [0, 5, 5, 5, 5, 0]
    assert spans(4, 1, 6) == (slice(5, 6), slice(0, 1))
