"""Tests Fig. 5 of the DQN paper, on handmade rows and on the environment's small task."""

import json
import math

import pytest
from omegaconf import OmegaConf

from envs.memory_env import small_task
from experiments import figures
from experiments.figures import dqn_fig5 as fig
from simulator import simulate

PROGRAM, MACHINE = small_task()
SETTINGS = {
    "groups": [["kmeans"], ["vgg16", "vgg19"]],
    "changes": {"vgg19": {"batch_size": 8}},
    "limits": [0.6, 0.9],
    "seeds": [3, 5],
    "min_bytes": 2**20,
    "floor_kernels": 100,
    "calls": 60,
    "trained": {
        "networks": ["vgg16"],
        "limits": [0.6],
        "lines": {
            "Algorithm 1 as printed": {"episodes": 3},
            "random walks": {"episodes": 3, "agent": {"epsilon_end": 1.0, "update_every": 1000}},
        },
    },
}


def points(*pairs):
    """Returns sweep points of (limit, overhead); the plan's overhead doubles and the controls' triple."""
    searches = {key: 3 if key != "planned" else 2 for key in fig.SEARCHES}
    return [{"limit": limit, "overhead": o, **{key: slow * o for key, slow in searches.items()}} for limit, o in pairs]


def row(seed, swap, joint, floor=()):
    """Returns one network's row; TFLMS has plans at 90, 60 and 55 % of the peak, memonger at 90 and 60 %."""
    baselines = {"tflms": [[0.9, 0.0], [0.6, 0.04], [0.55, 0.5]], "memonger": [[0.9, 0.2], [0.6, 0.2]]}
    empty = {key: [] for key in fig.BASELINES if key not in baselines}
    result = {
        "peak": 2**30,
        "ideal_ns": 1000,
        "kernels": 10,
        "transfer_ns": 250,
        "baselines": {**baselines, **empty},
        "dqn": {"swap": points(*swap), "joint": points(*joint)},
        "floor": list(floor),
        "trained": {
            "Algorithm 1 as printed": [{"limit": 0.6, "overhead": 0.05 if seed else 0.3, "calls": 90}],
            "random walks": [{"limit": 0.6, "overhead": None if seed else 0.03, "calls": 110}],
        },
    }
    return {"networks": ["vgg16"], "seed": seed, "limits": [0.9, 0.6], "calls": 60, "found": {"vgg16": result}}


GOOD = [
    row(0, [(0.9, 0.0), (0.6, 0.02), (0.55, 0.1)], [(0.9, 0.0), (0.6, 0.01), (0.55, 0.03)], [[0.9, 0.0], [0.6, 0.004]]),
    row(1, [(0.9, 0.0), (0.6, 0.03), (0.55, 0.1)], [(0.9, 0.0), (0.6, 0.02), (0.55, 0.03)]),
]


def test_every_pair_at_one_limit_is_compared():
    (net,) = fig.results_by_network(GOOD)
    duels = list(fig.duels(net))
    # Swap against TFLMS at three limits; joint against TFLMS at three and memonger at two.
    assert len(duels) == 3 + 3 + 2
    duel = next(d for d in duels if (d["mode"], d["baseline"], d["limit"]) == ("joint", "tflms", 0.6))
    assert (duel["mean"], duel["worst"], duel["theirs"]) == (pytest.approx(0.015), 0.02, 0.04)
    assert not any(d["worst"] > d["theirs"] + fig.SAME for d in duels)
    _, cells, _ = fig.Fig5().format_text(GOOD)
    assert cells == [
        ["VGG16, DQN over edits, swap", "0.00%", "2.50%"],
        ["VGG16, DQN over edits, swap and recompute", "0.00%", "1.50%"],
        ["VGG16, best baseline", "0.00%, TFLMS", "4.00%, TFLMS"],
    ]
    # A seed without a plan loses against a baseline with a plan.
    rows = [GOOD[0], row(1, [(0.9, 0.0), (0.6, 0.03)], [(0.9, 0.0), (0.6, 0.02), (0.55, 0.03)])]
    lost = [d for d in fig.duels(fig.results_by_network(rows)[0]) if d["worst"] > d["theirs"] + fig.SAME]
    assert [(d["mode"], d["baseline"], d["limit"]) for d in lost] == [("swap", "tflms", 0.55)]
    assert math.isinf(lost[0]["mean"])


def test_the_papers_agent_is_compared_with_baselines_and_random_walks():
    printed, walks, edits = fig.trained_lines(fig.results_by_network(GOOD), calls=60)
    # At 60 %, TFLMS has 4 % and memonger 20 %; the worst seed counts, and a seed without a plan is above both.
    assert (printed["above"], printed["below"], printed["pairs"]) == (2, 0, 2)
    assert (walks["above"], walks["plans"], walks["runs"]) == (2, 1, 2)
    assert (edits["below"], edits["above"], edits["mean"], edits["calls"]) == (2, 0, pytest.approx(1.5), 60)
    assert (printed["mean"], printed["calls"], walks["calls"]) == (pytest.approx(17.5), 90, 110)
    claims = [claim for claim in fig.Fig5().claims(GOOD) if "best episode" in claim.claim]
    assert [claim.verdict for claim in claims] == ["refuted", "refuted"]


def test_the_smallest_limit_of_a_baseline():
    grid = [round(f * PROGRAM.peak_bytes) for f in (0.9, 0.7, 0.3)]
    end = fig.smallest_limit("tflms", PROGRAM, MACHINE, grid, 2**20)
    assert end is not None and grid[2] < end <= grid[1]
    assert fig.overhead("tflms", PROGRAM, MACHINE, end, 2**20) is not None
    assert fig.overhead("tflms", PROGRAM, MACHINE, end - round(fig.Fig5.close * PROGRAM.peak_bytes) - 1, 2**20) is None
    assert fig.smallest_limit("tflms", PROGRAM, MACHINE, grid[2:], 2**20) is None


def test_run_on_a_small_program(monkeypatch):
    monkeypatch.setattr(figures, "program", lambda name, machine, **changes: PROGRAM)
    tasks = fig.Fig5().tasks(OmegaConf.create(SETTINGS))
    assert [(t["networks"], t["seed"]) for t in tasks] == [
        (["kmeans"], 3),
        (["vgg16", "vgg19"], 3),
        (["kmeans"], 5),
        (["vgg16", "vgg19"], 5),
    ]
    assert [t["floor_kernels"] for t in tasks] == [100, 100, 0, 0]  # the floor does not depend on the seed
    task = fig.Fig5().tasks(OmegaConf.create({**SETTINGS, "groups": [["vgg16"]]}))[0]
    out = fig.Fig5().run(task, MACHINE)
    assert json.loads(json.dumps(out)) == out
    result = out["found"]["vgg16"]
    for label, (point,) in result["trained"].items():
        assert label in SETTINGS["trained"]["lines"] and point["limit"] == pytest.approx(0.6, abs=1e-6)
        assert point["calls"] >= 3 and (point["overhead"] is None or point["overhead"] >= 0)
    limits = {share for points in result["baselines"].values() for share, _ in points}
    assert limits <= {p["limit"] for p in result["dqn"]["swap"]}  # the DQN has a plan wherever a baseline does
    assert result["baselines"]["tflms"] and len(result["floor"]) == len(result["dqn"]["joint"])
    for share, overhead in result["baselines"]["tflms"]:
        limit = round(share * PROGRAM.peak_bytes)
        plan = fig.agents.make("tflms").plan(PROGRAM, MACHINE, limit)
        assert simulate(PROGRAM, plan, MACHINE, limit).overhead == overhead
    for (share, bound), point in zip(result["floor"], result["dqn"]["joint"], strict=True):
        assert share == point["limit"] and bound <= point["overhead"] + 1e-9
