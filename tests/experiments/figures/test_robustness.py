"""figure=robustness: what it measures, and what it refuses."""

import numpy as np
import pytest

from agents.planner import Infeasible
from envs.memory_env import small_task
from experiments.figures import robustness
from simulator import Plan, simulate
from simulator.jobs import Noise

PROGRAM, MACHINE = small_task()
LIMIT = int(0.6 * PROGRAM.peak_bytes)
SETTINGS = {"jitter": [0.0, 0.3], "drift": [-0.3], "tenant": [0.0, 0.8], "robust": {"jitter": 0.2, "tenant": 0.5},
            "robust_calls": 200, "iterations": 10, "seeds": 2}  # fmt: skip


def test_without_noise_it_is_the_simulators_overhead() -> None:
    plan = robustness.agents.make("autoswap_doa").plan(PROGRAM, MACHINE, LIMIT)
    found = robustness.overheads(PROGRAM, plan, MACHINE, LIMIT, Noise(), 5, 0)
    assert found[1:] == pytest.approx(simulate(PROGRAM, plan, MACHINE, LIMIT).overhead)
    # Against its own kernels: without a limit noise costs nothing.
    free = robustness.overheads(PROGRAM, Plan(), MACHINE, PROGRAM.peak_bytes, Noise(0.4, -0.2, 0.9), 6, 0)
    assert free == pytest.approx(np.zeros(6))


def test_what_is_measured() -> None:
    found = robustness.measure(PROGRAM, MACHINE, LIMIT, ["autoswap_doa", "tensile", "vdnn_all"], SETTINGS)
    assert set(found["noise"]["both"][0]["planners"]) | set(found["without_a_plan"]) == {
        "autoswap_doa", "tensile", "vdnn_all", "robust", "without_noise",
    }  # fmt: skip
    quiet, shared = (entry["planners"] for entry in found["noise"]["tenant"])
    assert all(shared[name]["mean"] > quiet[name]["mean"] for name in quiet)
    assert all(one["p95"] >= one["mean"] - 1e-12 for one in quiet.values())
    # A plan made for the noise is no worse under it than those that it started from.
    both = {name: one["mean"] for name, one in found["noise"]["both"][0]["planners"].items()}
    assert both["robust"] <= min(value for name, value in both.items() if name != "without_noise") + 0.01
    # Its control, which never saw noise, is no worse than those without it.
    still = {name: one["mean"] for name, one in found["noise"]["jitter"][0]["planners"].items()}
    assert still["without_noise"] <= min(still.values()) + 0.01
    again = found["recovery"][0]["planners"]["tensile"]
    assert again["plans"] >= 1 and 0 <= again["iterations"] <= 5 and min(again["new"], again["kept"]) >= 0
    heads, cells, notes = robustness.FIGURE.say([{**found, "network": "mlp", "limit": 0.6}])
    assert all(len(line) == len(heads) for line in cells) and "→" in cells[0][-1] and len(cells) == len(both)
    assert "planned anew after a drift of -0.3" in notes[-1]


def test_no_plan_at_all_is_said() -> None:
    with pytest.raises(Infeasible, match="no planner has a plan"):
        robustness.measure(PROGRAM, MACHINE, LIMIT // 3, ["autoswap_doa"], SETTINGS)
