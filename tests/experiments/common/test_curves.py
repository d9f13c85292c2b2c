"""Tests learning curves: the scalars of every trainer by simulator calls, and the file that stores them."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from envs.memory_env import small_task
from experiments.common.curves import BEST, GREEDY, LAST, OVERHEAD, Curve
from experiments.examples import dqn_single_file, ppo_single_file
from experiments.figures import learning
from experiments.figures.core import WITHOUT
from simulator import FormatError, Machine
from simulator.files import write_json
from tests.experiments.conftest import Run

PROGRAM, _ = small_task()
MACHINE = Machine("slow", 2**30, 10**9, 10**9)
LIMIT = int(0.7 * PROGRAM.peak_bytes)


def test_running_means_are_over_the_last_episodes() -> None:
    curve = Curve(None, PROGRAM, MACHINE, LIMIT, "swap", {}, 100)
    assert all(math.isnan(value) for value in curve.running_means().values())
    for overhead in (0.3, math.inf, *[0.1] * (LAST - 2)):
        curve.add_episode(overhead)
    mean = (0.3 + 0.1 * (LAST - 2)) / (LAST - 1)
    assert curve.running_means() == pytest.approx({OVERHEAD: mean, "episode/feasible": (LAST - 1) / LAST, BEST: 0.1})
    curve.add_episode(0.2, best=0.05)  # 0.3 leaves the window
    assert curve.running_means()[OVERHEAD] == pytest.approx((0.1 * (LAST - 2) + 0.2) / (LAST - 1))
    assert curve.running_means()[BEST] == 0.05


def test_a_point_is_made_when_it_is_time_and_kept(tmp_path: Path) -> None:
    logged: list[tuple[int, Mapping[str, float]]] = []

    def made(resumed: Path | None = None) -> Curve:
        return Curve(
            tmp_path / "curve.json",
            PROGRAM,
            MACHINE,
            LIMIT,
            "swap",
            {"agent": "a", "seed": 3},
            100,
            lambda calls, values: logged.append((calls, values)),
            resumed,
        )

    curve = made()
    curve.add_episode(0.5)
    for calls in (99, 130, 180, 230, 300):
        curve.add_point_if_due(calls, lambda: 0.25)
    assert [calls for calls, _ in logged] == [130, 230]
    assert logged[0][1]["greedy/gap"] == pytest.approx(0.25 - curve.bound.overhead) and curve.bound.overhead > 0
    kept = json.loads((tmp_path / "curve.json").read_text())
    assert kept["agent"] == "a" and kept["seed"] == 3 and kept["floor"] == curve.bound.overhead
    assert [point["calls"] for point in kept["points"]] == [130, 230]
    resumed = made(tmp_path / "curve.json")  # resumed after 200 calls
    resumed.resume(200)
    resumed.add_point_if_due(299, lambda: 0.1)
    resumed.add_point(340, math.nan)
    kept = json.loads((tmp_path / "curve.json").read_text())
    assert [(point["calls"], point[GREEDY]) for point in kept["points"]] == [(130, 0.25), (340, None)]


def test_every_trainer_writes_the_same_scalars(run: Run, program_file: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / name / "curve.json" for name in ("train_dqn", "train_sb3", "dqn", "ppo")}
    words = (f"program={program_file}", "limit=0.6", "planners=null", "greedy_every=50")
    agent = ("agent=dqn_paper", "agent.episodes=32", "agent.mode=swap")
    run("train_dqn", *words, *agent, f"out={files['train_dqn'].parent}").ok()
    run("train_sb3", *words, "steps=300", "algo.n_steps=16", f"out={files['train_sb3'].parent}").ok()
    dqn_single_file.main(dqn_single_file.Args(steps=600, warm_up=200, greedy_every=200, curve=str(files["dqn"])))
    ppo = ppo_single_file.Args("GpuMemory-v1", 256, num_envs=4, num_steps=16, greedy_every=64, curve=str(files["ppo"]))
    ppo_single_file.main(ppo)
    for name, file in files.items():
        kept = json.loads(file.read_text())
        points = kept["points"]
        assert kept["mode"] == ("swap" if name == "train_dqn" else "joint")
        assert {"agent", "seed", "floor", "workload", "machine", "limit_fraction", "mode", "reward"} <= set(kept)
        assert len(points) > 2 and all(
            set(point) == {"calls", OVERHEAD, "episode/feasible", BEST, GREEDY, "greedy/gap"} for point in points
        )
        calls = [point["calls"] for point in points]
        assert calls == sorted(calls) and len({point[OVERHEAD] for point in points}) > 1
        best = [point[BEST] for point in points if point[BEST] is not None]
        assert best == sorted(best, reverse=True) and points[-1][GREEDY] is not None


def test_the_figure_is_over_simulator_calls(tmp_path: Path) -> None:
    about = {"workload": "w", "machine": "m", "mode": "swap", "limit_fraction": 0.5, "reward": "paper", "floor": 0.1}
    for seed, calls in enumerate(([10, 40], [20, 30, 60])):
        points = [{"calls": c, GREEDY: c / 100 if c != 30 else None, OVERHEAD: 0.5, BEST: 0.2} for c in calls]
        file = tmp_path / str(seed) / "curve.json"
        file.parent.mkdir()
        write_json(file, kept := {**about, "agent": "a", "seed": seed, "points": points})
    config = OmegaConf.create({"runs": str(tmp_path)})
    rows = learning.Learning().tasks(config)
    at, gaps = learning.over_seeds(rows, GREEDY)
    assert at == [20, 30, 40]  # common to all seeds
    assert gaps == pytest.approx(np.array([[0, 10], [0, WITHOUT], [30, WITHOUT]]))
    end = learning.Learning().template_values(rows)["ends"][0]
    assert (end["calls"], end["greedy"]) == (40, pytest.approx((30 + WITHOUT) / 2))
    write_json(file, {**kept, "points": [{"calls": 90, GREEDY: 0.3, OVERHEAD: 0.3, BEST: 0.3}]})
    assert (
        learning.Learning().template_values(learning.Learning().tasks(config))["ends"] == []
    )  # no common number of calls
    for wrong in ({"points": []}, {"agent": "$x^2$"}, {"workload": "\x1b[2J"}, {"floor": "low"}):
        write_json(file, {**kept, **wrong})
        with pytest.raises(FormatError, match=r"curve\.json"):
            learning.Learning().tasks(config)
