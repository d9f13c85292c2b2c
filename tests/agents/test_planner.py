"""Tests properties of every planner."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

import agents
from agents.floor import floor
from agents.planner import Candidates, min_bytes_hint
from simulator import Kernel, Machine, Plan, Program, Swap, Tensor, simulate
from simulator.modes import MODES, least_residency
from tests import tiny
from tests.strategies import machines, networks, programs, reachable_limits

# Search methods with few simulator calls, for tiny programs.
FAST: dict[str, dict[str, object]] = {
    "random_search": {"calls": 20},
    "annealing": {"calls": 60},
    "lp_round": {"calls": 60},
    "dqn": {"calls": 60},
    "rerun_search": {"kicks": 1},
    "home": {"particles": 6, "iterations": 4, "jobs": 1},
    "autoswap_bo": {"evaluations": 6},
    "smartpool+autoswap": {"align": False},
}
TESTED = agents.untrained()
PLANNERS: list[tuple[str, dict[str, object]]] = [
    *((name, {}) for name in TESTED if "mode" not in agents.options(name)),
    *((name, {"mode": mode}) for name in TESTED if "mode" in agents.options(name) for mode in MODES),
    ("superneurons", {"always": True}),
    ("superneurons", {"early": True}),
]
pytestmark = pytest.mark.usefixtures("few_moves")


def layers(program: Program, mixed: bool = False) -> Program:
    """Builds the program with the kinds and phases that rule-based planners inspect.

    With ``mixed``, backward kernels precede forward ones.
    """
    kinds = ("conv", "norm", "activation", "conv", "pool", "matmul")
    half = len(program.kernels) // 2
    kernels = tuple(
        replace(k, kind=kinds[i % 6], phase="forward" if (7 * i % 5 < 3 if mixed else i < half) else "backward")
        for i, k in enumerate(program.kernels)
    )
    return replace(program, kernels=kernels)


@pytest.mark.parametrize(
    ("name", "options"), PLANNERS, ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v.values()))
)
@settings(max_examples=8)
@given(st.data())
def test_no_planner_is_over_the_limit_or_below_the_floor(
    name: str, options: dict[str, object], data: st.DataObject
) -> None:
    mixed = name.startswith("vdnn") and data.draw(st.booleans())
    program = data.draw(networks() | networks() | programs().map(lambda p: layers(p, mixed)))
    machine = data.draw(machines())
    limit = data.draw(reachable_limits(program) | st.integers(program.peak_bytes // 3, program.peak_bytes))
    planner = agents.make(name, min_bytes=1, **{**FAST.get(name, {}), **options})
    try:
        plan = planner.plan(program, machine, limit)
    except agents.Infeasible as error:
        # Packed blocks may not fit although their bytes do; and an unconditional recomputation chain needs memory.
        exempt = agents.PLANNERS[name].addressed or name.startswith("checkpoint_") or "always" in options
        assert (limit < program.peak_bytes or exempt) and f"within {limit:,} bytes" in str(error)
        return
    timeline = simulate(program, plan, machine, plan.limit)  # checks that the plan fits the program
    assert timeline.peak_bytes <= limit and timeline.period
    assert (plan.fingerprint, plan.planner) == (program.fingerprint, name)
    assert plan.limit == limit or (plan.limit < limit and agents.PLANNERS[name].addressed)
    assert planner.simulator_calls >= 1
    assert Plan.from_dict(plan.to_dict()) == plan
    kinds = {isinstance(d, Swap) for d in plan.decisions}
    moves = options.get("mode", agents.PLANNERS[name].moves)
    assert kinds <= {"": set(), "swap": {True}, "recompute": {False}, "joint": {True, False}}[str(moves)]
    for mode in ["joint"] + ["swap"] * (kinds <= {True}) + ["recompute"] * (kinds <= {False}):
        bound = floor(program, machine, limit, mode)
        assert bound.feasible and bound.iteration_ns <= timeline.iteration_ns


@pytest.mark.parametrize("name", agents.PLANNERS)
def test_every_planner_takes_the_common_options(name: str) -> None:
    assert agents.make(name, seed=3, min_bytes=1).name == name


def test_none_is_the_empty_plan_or_infeasible() -> None:
    program = Program("one", (Tensor("a", 7),), (Kernel("k", "other", "forward", (), (0,), 1),))
    machine = Machine("m", 10**6, 10**9, 10**9)
    assert agents.make("none").plan(program, machine, 7) == Plan((), program.fingerprint, "none", 7, "m")
    with pytest.raises(agents.Infeasible, match=r"none: 'one' cannot be planned within 6 bytes .* is 7 bytes"):
        agents.make("none").plan(program, machine, 6)


# Each of these values is refused by itself.
BAD_VALUES: dict[str, dict[str, object]] = {
    "vdnn_all": {"policy": "conv"},
    "geeps": {"mode": "joint"},
    "autoswap_doa": {"score": "aoa"},
    "smartpool+autoswap": {"pool": "cnmem", "score": "sum", "steps": 1, "evaluations": 3},
    "autoswap_bo": {"evaluations": 3, "random": -1},
    "activation_budget": {"runtime": "guess", "steps": 0},
    "capuchin": {"rounds": 0},
    "tensile": {"max_swap_ratio": 1.5},
    "superneurons": {"recompute": "fast"},
    "home": {"particles": 0, "jobs": 0, "iterations": 0, "calls": 1},
    "tflms": {"n_tensors": -1, "lower_bound": 0},
    "memonger": {"trials": 0},
    "random_search": {"calls": 1},
    "annealing": {"calls": 3, "seconds": 0},
    "lp_round": {"calls": 3, "seconds": 0},
    "rerun_search": {"seconds": 0, "kicks": -1},
    "dqn": {"calls": 1, "seconds": 0.0, "ranks": "mutation"},
}
REFUSED: list[tuple[str, dict[str, object]]] = [
    *((name, {option: value}) for name, values in BAD_VALUES.items() for option, value in values.items()),
    *((name, {"mode": "both"}) for name in agents.PLANNERS if "mode" in agents.options(name)),
    # The option that the refusal names is the last one.
    ("annealing", {"hot": 1e-05, "cold": 0.001}),
    ("lp_round", {"seconds": 1.0, "jobs": 0}),
    ("dqn", {"hot": 1e-05, "cold": 0.001}),
]


@pytest.mark.parametrize(("name", "options"), REFUSED)
def test_bad_options_are_named(name: str, options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=[*options][-1]):
        agents.make(name, **options)


def test_unknown_names_name_the_nearest() -> None:
    with pytest.raises(ValueError, match="autoswap_wdoa"):
        agents.make("autoswap_wdao")
    with pytest.raises(ValueError, match="'calls'"):
        agents.make("annealing", call=3)


def test_slow_imports_are_deferred() -> None:
    slow = {"torch", "torch_geometric", "sklearn", "scipy.optimize", "scipy.sparse", "gymnasium"}
    code = f"""if True:
        import agents, sys
        assert agents.PLANNERS and not {slow} & set(sys.modules), {slow} & set(sys.modules)
        assert [agents.make(name) for name in agents.untrained()]
        assert not {{"torch", "sklearn"}} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("limit", "min_bytes", "words"),
    [  # the gaps are of a1 and a2 (40 bytes), then of w (10): emptied, the peak of 180 is 110, then 100
        (150, 41, "every evictable tensor is smaller than min_bytes (41 bytes): try min_bytes=40"),
        (105, 41, "every evictable tensor is smaller than min_bytes (41 bytes): try min_bytes=10"),
        (99, 41, "every evictable tensor is smaller than min_bytes (41 bytes): the largest has 40 bytes"),
        (105, 40, "some evictable tensors are smaller than min_bytes (40 bytes): try min_bytes=10"),
        (110, 40, ""),
        (99, 40, ""),
        (105, 10, ""),
        (99, 1, ""),
    ],
)
def test_an_error_names_min_bytes_where_it_is_the_cause(limit: int, min_bytes: int, words: str) -> None:
    assert min_bytes_hint(tiny.PROGRAM, limit, min_bytes) == (words and f", because {words}")
    for name in ("autoswap_doa", "lp_round", "superneurons"):
        planner = agents.make(name, min_bytes=min_bytes, **FAST.get(name, {}))
        if words:
            with pytest.raises(agents.Infeasible) as caught:
                planner.plan(tiny.PROGRAM, tiny.MACHINE, limit)
            assert str(caught.value).endswith(words)


@given(programs(), st.integers(1, 200))
def test_the_least_residency_is_that_of_every_gap_emptied(program: Program, min_bytes: int) -> None:
    assert least_residency(program, min_bytes) == Candidates(program, program.gaps(min_bytes)).least_bytes
