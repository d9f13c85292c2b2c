"""Tests that times, plans and observations of ``GpuMemoryEdit-v1`` agree with the simulator."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

from agents.search import annealing
from envs.edit import columns as edit_columns, starts
from envs.edit.batch import EditBatch
from envs.edit.columns import BIN, GAP, N_CHANGES, PLAN, by_name, n_columns
from envs.edit.env import MemoryEditEnv, MemoryEditVectorEnv
from envs.edit.observation import RANGES, STATIC_RANGES, ranges_of
from envs.edit.task import EditTask
from envs.edit.walkers import MAX_EFFECT
from envs.memory_env import small_task
from simulator import Plan, simulate
from simulator.compiled.encoding import KIND, RECOMPUTE, decisions_of
from simulator.moves.gap_graph import BinColumns, BinState
from tests.programs import BYTE_PER_NS
from tests.simulator.test_classes import stack

SEEDS = range(3)


def episode(env: MemoryEditEnv, seed: int) -> Iterator[tuple[dict[str, Any], float, bool, bool, dict[str, Any]]]:
    """Yields the reset and the steps of an episode of uniformly drawn valid actions."""
    rng = np.random.default_rng(seed)
    observation, info = env.reset(seed=seed)
    terminated = truncated = False
    yield observation, 0.0, terminated, truncated, info
    while not terminated and not truncated:
        action = rng.choice(np.flatnonzero(observation["action_mask"]))
        observation, reward, terminated, truncated, info = env.step(action)
        yield observation, float(reward), terminated, truncated, info


@pytest.mark.parametrize("edits", ["neighbors", "gap"])
@pytest.mark.parametrize("accept", ["metropolis", "better", "always"])
@pytest.mark.parametrize("mode", ["swap", "joint"])
def test_episodes_agree_with_the_simulator(edits: str, accept: str, mode: str) -> None:
    env = MemoryEditEnv(limit=0.6, mode=mode, edits=edits, accept=accept, start="empty", neighbors=8, budget=60)
    task = env.tasks[0]
    for seed in SEEDS:
        steps = list(episode(env, seed))
        overheads = [info["overhead"] for *_, info in steps]
        best = [info["best_overhead"] for *_, info in steps]
        assert sum(reward for _, reward, *_ in steps) == pytest.approx(best[0] - best[-1])
        assert best == [min(overheads[: i + 1]) for i in range(len(overheads))]
        *_, terminated, truncated, final_info = steps[-1]
        assert terminated == (best[-1] <= 0) and truncated == (not terminated)
        assert final_info["calls"] == len(steps) - 1 <= 60
        timeline = simulate(task.program, final_info["plan"], task.machine, task.limit)
        assert timeline.overhead == pytest.approx(best[-1]) and timeline.peak_bytes <= task.limit
        for (*_, old), (*_, new) in zip(steps, steps[1:], strict=False):
            effect = 100 * new["effect_ns"] / task.ideal_ns
            change = 100 * (new["overhead"] - old["overhead"])
            assert change == pytest.approx(effect if new["accepted"] else 0.0)
            assert new["feasible"] or not new["accepted"]
            assert accept != "always" or new["accepted"] == new["feasible"]
            assert accept != "better" or not new["accepted"] or change <= 1e-9


@pytest.mark.parametrize("blocks", [6, 12])
def test_edits_of_classes_are_off_unless_asked_for(blocks: int) -> None:
    """They change more gaps at once, within the same observation; a program of few blocks has none."""
    program = stack(*[("attend", 200)] * blocks, path="layers.")
    make = partial(
        MemoryEditEnv, program, BYTE_PER_NS, limit=0.65, min_bytes=10, start="empty", neighbors=16, budget=100
    )
    envs = [make(), make(by_class=False), make(by_class=True)]
    assert envs[0].observation_space == envs[2].observation_space
    episodes = [[observation["edits"] for observation, *_ in episode(env, seed=0)] for env in envs]
    assert all(np.array_equal(*edits) for edits in zip(episodes[0], episodes[1], strict=True))
    changes = [float(np.mean([(edits >= 0).sum(1).mean() for edits in edits_of])) for edits_of in episodes]
    if blocks == 6:
        assert all(np.array_equal(*edits) for edits in zip(episodes[1], episodes[2], strict=True))
    else:
        assert changes[2] > 1.15 * changes[1]
        # A move of a class that is too large for an edit is replaced by one of a gap.
        masks = [[observation["action_mask"].mean() for observation, *_ in episode(env, seed=1)] for env in envs[1:]]
        assert np.mean(masks[1]) > np.mean(masks[0]) > 0.9


def test_observations_follow_the_plan() -> None:
    env = MemoryEditEnv(limit=0.6, neighbors=8, budget=60)
    for seed in SEEDS:
        for observation, *_, info in episode(env, seed):
            assert env.observation_space.contains(observation)
            assert (by_name(observation["gaps"], GAP)["choice"].sum(1) == 1).all()
            counts = (observation["edits"] >= 0).sum(1)
            assert ((counts > 0) == observation["action_mask"]).all() or not counts.any()
            assert (info["action_mask"] == observation["action_mask"]).all()
    # Trial columns are set for the gap and its change, and for no other gap.
    observation, _ = env.reset(seed=0)
    code = observation["edits"][0, 0]
    next_obs, *_ = env.step(np.int64(0))
    gap, change = divmod(int(code), N_CHANGES)
    trial_age = by_name(next_obs["gaps"], GAP)["trial_age"]
    assert 0 <= trial_age[gap, change] < 1 and (trial_age == 1).sum() >= trial_age.size - 10


def test_observed_columns_are_scaled_and_bounded() -> None:
    """Each column is the walkers' one divided by its range, so that the shipped networks read what they were fed."""
    env = MemoryEditEnv(limit=0.6, neighbors=8, budget=60, accept="always", start="empty")
    walkers = env._batch
    columns = {"gaps": GAP, "plan": PLAN, "bins": BIN}
    for observation, *_ in episode(env, 0):
        for name, kind in columns.items():
            raw = getattr(walkers, name)[0, ..., -n_columns(kind) :]
            scaled = observation[name][..., -n_columns(kind) :]
            np.testing.assert_allclose(scaled, (raw / ranges_of(kind)).clip(-1, 1), rtol=1e-6)
        assert all(np.abs(observation[name]).max() <= 1 for name in ("static", *columns))
    names = env.tasks[0].graph.columns
    static = dict(zip(names, observation["static"].T, strict=False))
    size = env.tasks[0].graph.nbytes / env.tasks[0].graph.excess
    np.testing.assert_allclose(static["log_size_by_excess"], np.log1p(10 * size) / 7, rtol=1e-5)
    np.testing.assert_allclose(observation["static"][:, -4:], env.tasks[0].static[:, -4:] / 3, rtol=1e-6)
    for name in ("GAP", "BIN", "PLAN"):  # no range of a column that does not exist
        kind = getattr(edit_columns, name)
        assert RANGES[kind].keys() <= set(kind.names)
    assert STATIC_RANGES.keys() <= {*names, *BinColumns._fields, *BinState._fields}


def test_a_masked_action_is_a_rejected_trial() -> None:
    env = MemoryEditEnv(limit=0.6, edits="gap", start="empty", budget=9)
    observation, first = env.reset(seed=0)
    action = int(np.flatnonzero(observation["action_mask"] == 0)[0])
    _, reward, terminated, truncated, info = env.step(action)
    assert (reward, terminated, truncated) == (0, False, False)
    assert info["invalid"] and not info["accepted"] and not info["feasible"] and not first["invalid"]
    assert (info["overhead"], info["calls"]) == (first["overhead"], 1)


def test_the_rendering_shows_the_plan() -> None:
    """Bars are the simulated residency of the current plan; no step or simulator call is taken."""
    make = partial(MemoryEditEnv, limit=0.6, neighbors=8, budget=60, start="empty")
    env, unseen = make(render_mode="ansi"), make()
    assert env.metadata["render_modes"] == ["ansi", "rgb_array"]
    task = env.tasks[0]
    for (*step, info), (*expected, _) in zip(episode(env, 0), episode(unseen, 0), strict=True):
        np.testing.assert_equal(step, expected)
        title, caption, *bars = env.render().splitlines()
        assert title == "small on small, 60% of the memory"
        assert caption.startswith(f"simulator call {info['calls']}, overhead {info['overhead']:.2%}, best ")
        rows = env._batch.plan_rows(0)
        assert f"recomputed {int((rows[:, KIND] == RECOMPUTE).sum())} of {len(task.graph)} gaps" in caption
        limit_line = next(i for i, bar in enumerate(bars) if "the limit" in bar)
        assert "#" not in "".join(bars[:limit_line]) and "." in "".join(bars)  # the plan fits
    assert task.engine.calls == unseen.tasks[0].engine.calls


def test_where_plans_start() -> None:
    program, machine = small_task()
    limit = int(0.6 * program.peak_bytes)
    overheads = {}
    for start in ("policy", "heuristic", "empty"):
        env = MemoryEditEnv(program, machine, limit, start=start)
        overheads[start] = env.reset(seed=0)[1]["overhead"]
        assert env.tasks[0].start_calls > 0
        assert np.allclose(env.tasks[0].priors.sum(1), 1)
    assert overheads["heuristic"] <= overheads["empty"]
    env = MemoryEditEnv(program, machine, limit, start="empty")
    env.reset(seed=0)
    continued = MemoryEditEnv(program, machine, limit, start=env.best_plan)
    assert continued.reset(seed=0)[1]["overhead"] == overheads["empty"]


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("start", "nowhere"),
        ("edits", "tensors"),
        ("accept", "never"),
        ("reward", "paper"),
        ("budget", 0),
        ("neighbors", 0),
        ("cold", 1.0),
        ("mode", "both"),
        ("limit", 0.01),
        ("start", Plan((), "another", "none")),
    ],
)
def test_refusals_name_the_option(option: str, value: Any) -> None:
    named = {"limit": "fits|below", "start": "start|another program"}.get(option, option)
    with pytest.raises(Exception, match=named) as caught:
        MemoryEditEnv(**{"limit": 0.6, option: value})
    assert type(caught.value).__name__ in ("ValueError", "PlanError")


FORMER_OPTIONS = {"program": None, "limit": 0.6, "neighbours": 8, "edits": "neighbours"}


@pytest.mark.parametrize(
    "make",
    [
        partial(MemoryEditEnv, **FORMER_OPTIONS),
        partial(MemoryEditVectorEnv, 2, **FORMER_OPTIONS),
        partial(gymnasium.make, "GpuMemoryEdit-v1", **FORMER_OPTIONS),
        partial(gymnasium.make_vec, "GpuMemoryEdit-v1", 2, vectorization_mode="vector_entry_point", **FORMER_OPTIONS),
    ],
    ids=["env", "vector", "make", "make_vec"],
)
def test_the_former_spelling_is_accepted_with_a_warning(make: Callable[[], Any]) -> None:
    with pytest.warns(DeprecationWarning, match="'neighbours' is now spelled 'neighbors'") as warned:
        env = make()
    assert len([w for w in warned if w.category is DeprecationWarning]) == 2  # the option and the value
    observation, _ = env.reset(seed=0)
    assert observation["action_mask"].shape[-1] == 8
    with pytest.raises(TypeError, match="neighbours"):
        MemoryEditEnv(neighbors=8, neighbours=8)


def batch(count: int, **options: Any) -> EditBatch:
    """Returns walkers of the small task at the start of an episode."""
    program, machine = small_task()
    task = EditTask(program, machine, int(0.6 * program.peak_bytes), "joint", 1, starts.heuristic)
    walkers = EditBatch([task], count, 8, **options)
    for i in range(count):
        walkers.seed(i, i)
    walkers.reset(np.ones(count, np.bool_))
    return walkers


def budgets(walkers: EditBatch) -> np.ndarray:
    """Returns the episode budgets from the fraction used after one call."""
    walkers.step(np.argmax(walkers.mask, 1))
    return np.round(1 / by_name(walkers.plan, PLAN)["progress"]).astype(int)


def test_a_budget_is_drawn_from_a_range() -> None:
    """Budgets are drawn log-uniformly per episode, and an episode ends with its last call."""
    many = batch(20, budget=(10, 1000))
    rows = []
    for _ in range(20):
        rows.append(budgets(many))
        many.reset(np.ones(20, np.bool_))
    samples = np.array(rows)
    assert samples.min() >= 10 and samples.max() <= 1000 and len(np.unique(samples[:, 0])) > 10
    assert np.median(samples) == pytest.approx(100, rel=0.25)  # 505 if it were uniform
    quarters = np.quantile(np.log(samples), [0.25, 0.75])
    assert quarters == pytest.approx(np.log([10**1.5, 10**2.5]), abs=0.3)
    few = batch(6, budget=(5, 9))
    max_calls = budgets(few)
    while not few.has_ended.all():
        few.step(np.argmax(few.mask, 1), ~few.has_ended)
        assert (few.has_ended == (few.calls >= max_calls))[~few.terminated & (few.edits[:, :, 0] >= 0).any(1)].all()
    with pytest.raises(ValueError, match="budget"):
        batch(1, budget=(0, 9))


def test_redraw_changes_the_neighbors_and_nothing_else() -> None:
    walkers = batch(4)
    for _ in range(3):
        walkers.step(np.argmax(walkers.mask, 1))
    prev = {key: getattr(walkers, key).copy() for key in ("gaps", "bins", "plan", "overhead", "calls", "edits", "mask")}
    mask = np.array([True, False, True, False])
    walkers.redraw(mask)
    for key, old in prev.items():
        new = getattr(walkers, key)
        if key in ("edits", "mask"):
            np.testing.assert_array_equal(new[~mask], old[~mask])
        else:
            np.testing.assert_array_equal(new, old)
    assert (walkers.edits[mask] != prev["edits"][mask]).any(axis=(1, 2)).all()
    assert ((walkers.edits[:, :, 0] >= 0) == (walkers.mask > 0)).all()
    assert walkers.edits.max() < N_CHANGES * walkers.gaps.shape[1]
    walkers.step(np.argmax(walkers.mask, 1))  # a redrawn edit can be tried


def test_effects_are_those_that_the_observation_shows() -> None:
    """Covers improvements, losses and infeasible plans."""
    walkers = batch(4, accept="always", budget=200)
    seen = []
    rng = np.random.default_rng(0)
    for _ in range(60):
        actions = np.array([rng.choice(np.flatnonzero(mask)) for mask in walkers.mask])
        codes = walkers.edits[np.arange(4), actions]
        walkers.step(actions)
        for i, effect in enumerate(walkers.effects().tolist()):
            gap, change = divmod(int(codes[i, 0]), N_CHANGES)
            assert effect == pytest.approx(by_name(walkers.gaps, GAP)["effect"][i, gap, change], abs=1e-6)
            assert np.isfinite(walkers.effect_ns[i]) or effect == pytest.approx(np.log1p(20 * MAX_EFFECT) / 3)
            seen.append(effect)
    assert min(seen) < -0.1 and max(seen) > 0.1 and np.abs(seen).max() <= np.log1p(20 * MAX_EFFECT) / 3 + 1e-6


def test_a_start_that_is_a_function() -> None:
    program, machine = small_task()
    limit = int(0.6 * program.peak_bytes)
    heuristic = EditTask(program, machine, limit, "joint", 1, starts.heuristic).starts[0].rows
    calls = []

    def start(task: EditTask) -> list[Any]:
        calls.append(task)
        return [annealing.everything(program, task.mode, 1), heuristic, heuristic[:0]]

    task = EditTask(program, machine, limit, "joint", 1, start)
    assert calls == [task] and len(task.starts) == 2 and task.start_calls == 3  # the empty plan does not fit
    first, second = (entry.iteration_ns for entry in task.starts)
    assert first <= second and task.starts[0].rows is heuristic
    assert simulate(program, Plan(decisions_of(heuristic)), machine, limit).iteration_ns == first
    with pytest.raises(ValueError, match="start"):
        EditTask(program, machine, limit, "joint", 1, lambda _: [])
