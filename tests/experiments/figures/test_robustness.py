"""figure=robustness: what it measures, and what it refuses."""

import numpy as np
import pytest

from agents.planner import Infeasible
from envs.memory_env import small_task
from experiments.figures import robustness
from experiments.figures.robustness import CLAIRVOYANT, LOOPS
from simulator import Plan, simulate
from simulator.jobs import Noise

PROGRAM, MACHINE = small_task()
LIMIT = int(0.6 * PROGRAM.peak_bytes)
SETTINGS = {"jitter": [0.0, 0.3], "drift": [-0.3], "tenant": [0.0, 0.8], "robust": {"jitter": 0.2, "tenant": 0.5},
            "robust_calls": 200, "longer": 2, "episodes": 64, "replan_calls": 20, "iterations": 10,
            "seeds": 2}  # fmt: skip
SINGLE = {"autoswap_doa", "tensile", "vdnn_all", "robust", "without_noise", "robust_longer", "walk_blind",
          "walk_robust_blind"}  # fmt: skip


def test_without_noise_it_is_the_simulators_overhead() -> None:
    plan = robustness.agents.make("autoswap_doa").plan(PROGRAM, MACHINE, LIMIT)
    found = robustness.overheads(PROGRAM, plan, MACHINE, LIMIT, Noise(), 5, 0)
    assert found[1:] == pytest.approx(simulate(PROGRAM, plan, MACHINE, LIMIT).overhead)
    # Against its own kernels: without a limit noise costs nothing.
    free = robustness.overheads(PROGRAM, Plan(), MACHINE, PROGRAM.peak_bytes, Noise(0.4, -0.2, 0.9), 6, 0)
    assert free == pytest.approx(np.zeros(6))


def test_what_is_measured() -> None:
    found = robustness.measure(PROGRAM, MACHINE, LIMIT, ["autoswap_doa", "tensile", "vdnn_all"], SETTINGS)
    assert not found["without_a_plan"] and set(found["noise"]["both"][0]["planners"]) == SINGLE | set(LOOPS)
    quiet, shared = (entry["planners"] for entry in found["noise"]["tenant"])
    assert set(quiet) == SINGLE and set(shared) == SINGLE | set(LOOPS)
    assert all(shared[name]["mean"] > quiet[name]["mean"] for name in quiet)
    assert all(one["p95"] >= one["mean"] - 1e-12 for one in quiet.values())
    # A plan made for the noise is no worse under it than those that it started from.
    both = {name: one["mean"] for name, one in found["noise"]["both"][0]["planners"].items()}
    given = ("autoswap_doa", "tensile", "vdnn_all")
    assert both["robust"] <= min(both[name] for name in given) + 0.01
    # Its control, which never saw noise, is no worse than those without it.
    still = {name: one["mean"] for name, one in found["noise"]["jitter"][0]["planners"].items()}
    assert still["without_noise"] <= min(still[name] for name in given) + 0.01
    # Who knows all is no worse than any single plan; a walk that sees no link does not answer it.
    for planners in robustness.largest(found).values():
        assert planners[CLAIRVOYANT]["mean"] <= min(planners[name]["mean"] for name in SINGLE) + 0.01
    assert shared["walk"] == shared["walk_blind"] != shared["walk_link"]
    walks = 4 * SETTINGS["seeds"] * SETTINGS["iterations"]
    assert {name: walks for name in ("walk", "walk_link", "walk_robust")} == {
        name: count for name, (_, count) in found["dead_ends"].items()
    }
    assert set(found["seconds"]) == SINGLE and set(found["each_ms"]) == set(LOOPS)
    again = found["recovery"][0]["planners"]
    assert set(again) == set(given)
    assert again["tensile"]["plans"] >= 1 and 0 <= again["tensile"]["iterations"] <= 5
    assert min(again["tensile"]["new"], again["tensile"]["kept"]) >= 0
    assert robustness.whole(found)["anew_s"] == pytest.approx(
        found["seconds"]["robust"] + SETTINGS["iterations"] * found["each_ms"]["replanned"] / 1000
    )
    heads, cells, notes = robustness.FIGURE.say([{**found, "network": "mlp", "limit": 0.6}])
    assert all(len(line) == len(heads) for line in cells) and "→" in cells[0][-1] and len(cells) == len(both)
    assert "planned anew after a drift of -0.3" in notes[-1]
    assert any(note.startswith("planned anew, clairvoyant against the best single plan of the case") for note in notes)


def test_what_a_loop_gains() -> None:
    def row(**means: float) -> dict[str, object]:
        planners = {name: {"mean": mean, "p95": mean} for name, mean in means.items()}
        return {"noise": {**{kind: [{"size": 0.5, "planners": planners}] for kind in robustness.KINDS},
                          "both": [{"jitter": 0.5, "tenant": 0.5, "planners": planners}]}}  # fmt: skip

    worse = row(tensile=0.02, walk_blind=0.01, walk=0.03, replanned=0.0005, clairvoyant=0.0)
    same = row(tensile=0.02, walk_blind=0.01, walk=0.0105, replanned=0.004, clairvoyant=0.0)
    walk, anew, all_known = robustness.verdicts([worse, same])
    assert (walk["better"], walk["worse"], walk["cases"]) == (0, 4, 8)
    assert [walk[key] for key in ("least", "median", "most")] == pytest.approx([0.05, 1.025, 2.0])
    assert (anew["better"], anew["worse"], anew["against"]) == (8, 0, "the best single plan of the case")
    assert all_known["most"] == pytest.approx(-1.0)


def test_no_plan_at_all_is_said() -> None:
    with pytest.raises(Infeasible, match="no planner has a plan"):
        robustness.measure(PROGRAM, MACHINE, LIMIT // 3, ["autoswap_doa"], SETTINGS)
