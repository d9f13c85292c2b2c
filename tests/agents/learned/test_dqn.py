"""Tests DQN over edits: network, returns, training and planner; and the training loop shared with dqn_paper."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from omegaconf import OmegaConf
from torch import Tensor

import agents
from agents.learned.checkpoint import TrainingStateError, save_weights
from agents.learned.dqn import DQN, FineTuning, Observation, Rollout
from agents.learned.dqn_config import Args, PaperConfig
from agents.learned.dqn_paper import Trainer as PaperTrainer
from agents.learned.dqn_planner import RANKS, WEIGHTS
from agents.learned.edit_encoder import Encoder
from agents.learned.edit_net import EditNet, edit_graph, trained
from agents.learned.edit_walk import EMPTY, EditWalk, Ranking
from agents.learned.optimization import MASKED
from agents.learned.training import Episode, Trainer, train
from envs.edit import starts
from envs.edit.batch import EditBatch
from envs.edit.columns import MAX_CHANGES
from envs.edit.task import EditTask
from envs.memory_env import small_task
from experiments.common import cli
from simulator import FormatError, Plan, simulate
from simulator.compiled.encoding import decisions_of
from tests.agents.learned import test_dqn_paper
from tests.agents.planned import planned
from tests.agents.search.test_search import MACHINE as LINK, pyramid
from tests.oracle import enumeration
from tests.programs import BYTE_PER_NS
from tests.simulator.test_classes import stack

PROGRAM, MACHINE = small_task()
LIMIT = round(0.6 * PROGRAM.peak_bytes)
SMALL = Args(
    iterations=8,
    min_bytes=1,
    width=16,
    walkers=8,
    passes=8,
    tries=3,
    neighbors=16,
    least_calls=40,
    most_calls=200,
    buffer_size=40,
    learning_starts=2,
    batch_size=16,
    learning_rate=3e-3,
    target_every=30,
    greedy_calls=60,
    checkpoint_every=2,
)
Config = Args | PaperConfig


def pyramid_task() -> EditTask:
    """Returns a task with 93 gaps that can be swapped or recomputed, in chains."""
    program = pyramid(24, 0)
    return EditTask(program, LINK, int(0.6 * program.peak_bytes), "joint", 1, starts.empty)


# ------------------------------------------------------------------------------------------ network


@pytest.mark.parametrize("ranking", [Ranking.Q, Ranking.ADVANTAGE, Ranking.IMPROVES])
@pytest.mark.parametrize("message_passing", [True, False])
def test_compiled_ranking_equals_the_network(
    ranking: Ranking, message_passing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled Q omits the value and the mean advantage, which are equal for all edits of a plan."""
    task = pyramid_task()
    net = trained(WEIGHTS[message_passing])
    seen = list[Any]()
    encode: Any = Encoder.encode

    def spy(self: Encoder, *state: Any) -> Any:
        seen.append(tuple(torch.from_numpy(x[None].copy()) for x in state))
        return encode(self, *state)

    monkeypatch.setattr(Encoder, "encode", spy)
    walk = EditWalk(task, 1, net, 0, neighbors=24, first_draws=24, ranking=ranking)
    walk.begin(0, task.starts[0])
    graph = edit_graph(task)
    static_parts = net.static_parts(graph)
    accepted = 1
    while len(seen) < 12:
        if accepted:
            walk.encode(0)
        _, accepted = walk.walk(0, 1, 0.5)
        score = walk._pools[0].score
        tried = int(walk._pools[0].state["slot"][0])
        edits = torch.from_numpy(walk._walkers[0].codes[:1])
        with torch.no_grad():
            outputs = net.score(*net.encode(graph, *seen[-1], static_parts), edits)
        expected = outputs[0 if ranking == Ranking.Q else 2][0].double().numpy()
        if ranking == Ranking.ADVANTAGE:  # Q without the supervised part
            expected = outputs[0][0].double().numpy() - float(net.lift.detach()) * outputs[2][0].sigmoid().numpy()
        untried = np.flatnonzero(score > EMPTY)
        assert len(untried) > 8 and tried not in untried
        differences = score[untried] - expected[untried]
        assert differences == pytest.approx(differences[0] if ranking != Ranking.IMPROVES else 0.0, abs=1e-4)
        assert expected[untried].max() - expected[untried].min() > 1e-3
        assert expected[tried] >= expected[untried].max() - 1e-4  # the best edit is tried


def test_a_stale_encoding_ranks_until_it_is_updated() -> None:
    """With ``accepts`` the walk continues over accepted edits, and the encoding changes only when asked for."""
    task = pyramid_task()
    walk = EditWalk(task, 1, trained(WEIGHTS[False]), 0, neighbors=16, first_draws=8)
    walk.begin(0, task.starts[0])
    walk.encode(0)
    first = walk._encodings[0][0]
    calls, accepted = walk.walk(0, 200, 0.5, accepts=200)
    assert calls == 200 and accepted > 10 and walk._encodings[0][0] is first
    walk.encode(0)
    assert not np.allclose(walk._encodings[0][0], first, atol=1e-2)
    assert walk.walk(0, 200, 0.5, accepts=3)[1] == 3


def test_edits_of_classes_have_more_changes_than_those_of_the_environment() -> None:
    program = stack(*[("attention", 1000), ("mlp", 1000)] * 12)
    limit = 2 * program.peak_bytes // 3
    task = EditTask(program, BYTE_PER_NS, limit, "swap", 10, starts.empty, by_class=True)
    assert task.moves.class_prob > 0
    walk = EditWalk(task, 1, trained(WEIGHTS[False]), 0)
    walk.begin(0, task.starts[0])
    walk.encode(0)
    most = 0
    while walk.walk(0, 20, 0.0)[0]:
        counts = walk._walkers[0].counts[0]
        most = max(most, int(counts.max()))
        if most > MAX_CHANGES or walk._walkers[0].state["steps"][0] > 400:
            break
    best = walk.best(0)
    assert most > MAX_CHANGES
    assert simulate(program, Plan(decisions_of(best.rows)), BYTE_PER_NS, limit).iteration_ns == best.iteration_ns


def states(task: EditTask, count: int = 4) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns random plans near the start plan, and their neighbors, as network inputs."""
    batch = EditBatch([task], count, 8, accept="always")
    rng = np.random.default_rng(0)
    for walker in range(count):
        batch.seed(walker, walker)
    batch.reset(np.ones(count, np.bool_), 0)
    for _ in range(10):
        batch.step(rng.integers(8, size=count))
    return Observation(batch.gaps, batch.bins[:, :, -7:], batch.plan, batch.edits).tensors()


def test_message_passing_reads_the_edges_and_the_flat_network_does_not() -> None:
    task = pyramid_task()
    state = states(task)
    graph = edit_graph(task)
    other_graph = graph._replace(edges=graph.edges[::-1])
    q_values = []
    for message_passing in (True, False):
        net = DQN([task], [0.0], replace(SMALL, message_passing=message_passing)).net
        with torch.no_grad():
            q = net(graph, *state)[0]
            other_q = net(other_graph, *state)[0]
        assert torch.equal(q, other_q) == (not message_passing)
        q_values.append(q)
    assert not torch.allclose(q_values[0], q_values[1], atol=1e-3)
    assert trained(WEIGHTS[True]).rounds and not trained(WEIGHTS[False]).rounds


def test_padding_edits_are_masked_and_do_not_affect_others() -> None:
    task = pyramid_task()
    *state, edits = states(task)
    edits[0, 0] = -1
    net = DQN([task], [0.0], SMALL).net
    graph = edit_graph(task)
    padded_edits = torch.cat([edits, torch.full_like(edits[:, :3], -1)], 1)
    with torch.no_grad():
        q = net(graph, *state, edits)[0]
        padded = net(graph, *state, padded_edits)[0]
    is_edit = edits[:, :, 0] >= 0
    assert is_edit.any() and not is_edit.all()
    assert torch.equal(q > MASKED, is_edit) and (q[~is_edit] == MASKED).all() and (padded[:, 8:] == MASKED).all()
    assert torch.allclose(padded[:, :8], q, atol=1e-6)


# ------------------------------------------------------------------------------------------ returns


@settings(max_examples=60)
@given(st.data(), st.integers(1, 4), st.integers(1, 5), st.integers(1, 4), st.sampled_from([0.0, 0.5, 0.97, 1.0]))
def test_returns_and_discounts(data: st.DataObject, n: int, passes: int, tries: int, gamma: float) -> None:
    """Compares with a loop over the tried edits of one walker."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**31)))
    length = passes + n - 1
    walkers = 2
    counts = rng.integers(1, tries + 1, (length, walkers))
    ends = rng.random((length, walkers)) < 0.25
    shape = length, walkers, tries
    rewards = rng.normal(size=shape).astype(np.float32)  # rewards of untried edits must be ignored
    seen = [Observation(*(np.full((walkers, 1), t) for _ in range(4))) for t in range(length + 1)]
    args = replace(SMALL, n_step=n, gamma=gamma, batch_size=16)
    rollout = Rollout(None, seen, np.zeros(shape, np.int64), rewards, rewards, counts, ends, args)
    for t, w, k in np.ndindex(passes, walkers, tries):
        assert rollout.tried[t, w, k] == (k < counts[t, w])
        if k >= counts[t, w]:
            continue
        total = 0.0
        factor = 1.0
        alive = 1.0
        for u in range(t, t + n):
            for j in range(k if u == t else 0, counts[u, w]):
                total += factor * rewards[u, w, j]
                factor *= gamma
            if ends[u, w]:
                alive = 0.0
                break
        assert rollout.returns[t, w, k] == pytest.approx(total, abs=1e-4)
        assert rollout.discount[t, w, k] == pytest.approx(alive * factor, abs=1e-5)
    _, states, next_states, batch = rollout.sample(rng)
    assert (next_states.gaps - states.gaps == n).all() and (batch["weight"][:, 0] > 0).all()


# ----------------------------------------------------------------------------------------- training


def test_the_temporal_difference_falls() -> None:
    """Trains from scratch. With a learning rate of 0 the final error is 0.85 of the initial one."""
    dqn = DQN([EditTask(PROGRAM, MACHINE, LIMIT, "joint", 1, starts.policy)], [0.0], replace(SMALL, iterations=24))
    initial = [x.clone() for x in dqn.net.parameters()]
    dqn.train()
    error = [row["td"] for row in dqn.history if "td" in row]
    assert len(error) == 23 and np.mean(error[-8:]) < 0.6 * np.mean(error[:8])
    assert all(not torch.equal(x, y) for x, y in zip(initial, dqn.net.parameters(), strict=True))


@pytest.mark.nightly
def test_edits_of_high_value_gain_more_than_random_ones() -> None:
    """Trains from scratch. With a learning rate of 0 they gain less than random edits, which are more diverse."""
    ratios: dict[float, list[float]] = {}
    for rate in (3e-3, 0.0):
        args = replace(SMALL, iterations=45, learning_rate=rate, uniform=0.5, hottest=1e-2, most_epsilon=0.1)
        for seed in range(2):
            dqn = DQN([pyramid_task()], [0.0], args, seed)
            dqn.train()
            greedy_gain, random_gain = (sum(row[key] for row in dqn.history) for key in ("gained", "gained_random"))
            ratios.setdefault(rate, []).append(greedy_gain / random_gain)
    learned, random = map(np.mean, ratios.values())
    assert learned > 1.15 and learned > 1.3 * random


def test_save_load_and_continue(tmp_path: Path) -> None:
    """Trains on several tasks; walkers and replay buffer start empty after loading."""
    tasks = [
        EditTask(PROGRAM, MACHINE, round(f * PROGRAM.peak_bytes), "joint", 1, starts.heuristic) for f in (0.55, 0.6)
    ]
    dqn = DQN(tasks, [0.0, 1.0], SMALL, 5)
    for _ in range(5):
        dqn.iterate()
    assert {row["task"] for row in dqn.history} == {0, 1}
    dqn.save(tmp_path / "dqn.pt")
    loaded = [DQN(tasks, [0.0, 1.0], SMALL, 5) for _ in range(2)]
    for copy in loaded:
        copy.load(tmp_path / "dqn.pt")
        assert (copy.history, copy.updates, copy.calls) == (dqn.history, dqn.updates, dqn.calls)
        for x, y in ((copy.net, dqn.net), (copy.target, dqn.target)):
            assert all(torch.equal(a, b) for a, b in zip(x.parameters(), y.parameters(), strict=True))
        copy.train()
        assert len(copy.history) == SMALL.iterations and copy.updates > dqn.updates
    assert loaded[0].history == loaded[1].history
    for args, seed, named in ((replace(SMALL, gamma=0.5), 5, "args"), (SMALL, 0, "seed")):
        with pytest.raises(TrainingStateError, match=f"a different {named}"):
            DQN(tasks, [0.0, 1.0], args, seed).load(tmp_path / "dqn.pt")


def test_a_training_resumed_with_its_replay_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """The file is written amid the training, after the replay buffer is full."""
    tasks = [
        EditTask(PROGRAM, MACHINE, round(f * PROGRAM.peak_bytes), "joint", 1, starts.heuristic) for f in (0.55, 0.6)
    ]
    args = replace(SMALL, buffer_size=4, iterations=10)
    file = tmp_path / "dqn.pt"

    def save(trainer: DQN) -> None:
        if len(trainer.history) == 6:
            trainer.save(file, **trainer.replay_state(), mark="six")

    dqn = DQN(tasks, [0.0, 1.0], args, 5)
    net = dqn.train(save)
    resumed = DQN(tasks, [0.0, 1.0], args, 5)
    assert resumed.load(file, mark="six")["mark"] == "six"
    assert len(resumed.replay) == 4 and len(resumed.walkers) == 2
    resumed_net = resumed.train()
    assert resumed.history == dqn.history
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), resumed_net.parameters(), strict=True))
    assert {k: walk.best for k, walk in resumed.walkers.items()} == {k: walk.best for k, walk in dqn.walkers.items()}
    with pytest.raises(TrainingStateError, match="a different mark"):
        DQN(tasks, [0.0, 1.0], args, 5).load(file, mark="seven")


# ------------------------------------------------------------------------------------------ planner


def test_plans_improve_with_calls_and_depend_on_seed_and_ranking() -> None:
    program = pyramid(40, 5)
    distinct = set()
    limit = program.peak_bytes // 2
    choices = [*((ranks, False) for ranks in RANKS), ("q", True), ("improves", True)]
    for ranks, message_passing in choices:
        options = {"min_bytes": 1, "ranks": ranks, "message_passing": message_passing}
        plans = []
        for calls, seed in ((20, 0), (400, 0), (400, 0), (400, 1)):
            planner = agents.make("dqn", calls=calls, seed=seed, **options)
            plans.append(planner.plan(program, LINK, limit))
            assert planner.simulator_calls == calls
        few, many, repeated, reseeded = plans
        assert many == repeated != reseeded
        ns = [simulate(program, plan, LINK, limit).iteration_ns for plan in (few, many)]
        assert ns[1] < ns[0]
        distinct.add(many.decisions)
    assert len(distinct) == len(choices)


def test_claimed_times_equal_simulated_times() -> None:
    task = pyramid_task()
    walk = EditWalk(task, 2, trained(WEIGHTS[True]), 0)
    for i in range(2):
        walk.begin(i, task.starts[0])
        for _ in range(3):
            walk.encode(i)
            assert walk.walk(i, 50, 0.0)[0] <= 50
        best = walk.best(i)
        timeline = simulate(task.program, Plan(decisions_of(best.rows)), LINK, task.limit)
        assert timeline.iteration_ns == best.iteration_ns < task.starts[0].iteration_ns


def test_weights_of_a_file(tmp_path: Path) -> None:
    program = pyramid(24, 0)
    (weights, cut_weights) = (tmp_path / "mine.pt", tmp_path / "other.pt")
    limit = int(0.6 * program.peak_bytes)
    save_weights(EditNet(**trained(WEIGHTS[False]).settings), weights)
    custom, bundled = (
        planned("dqn", program, LINK, limit, calls=100, **options) for options in ({"weights": weights}, {})
    )
    assert custom != bundled
    cut_weights.write_bytes(weights.read_bytes()[:500])
    with pytest.raises(FormatError, match=r"other\.pt"):
        planned("dqn", program, LINK, limit, calls=100, weights=cut_weights)


# ------------------------------------------------------------------------------------- both trainers

BOTH = pytest.mark.parametrize("small", [SMALL, test_dqn_paper.SMALL], ids=["dqn", "paper"])


def trainer(config: Config, limit: int = LIMIT, seed: int = 0) -> Trainer:
    kind = FineTuning if isinstance(config, Args) else PaperTrainer
    return kind(PROGRAM, MACHINE, limit, config, seed)


@BOTH
def test_finds_the_optimum_of_a_small_task(small: Config) -> None:
    result = train(trainer(small))
    plans = [result.best]
    if isinstance(small, Args):
        plans.append(result.greedy)
    for plan in plans:
        iteration_ns = simulate(PROGRAM, plan, MACHINE, LIMIT).iteration_ns
        assert iteration_ns <= enumeration.shortest_ns(PROGRAM, MACHINE, LIMIT, "swap")


EDITS = replace(SMALL, passes=4, updates=3)
PAPER = replace(test_dqn_paper.SMALL, n_step=3, episodes=24, checkpoint_every=6)


@pytest.mark.parametrize(("config", "fraction", "stop"), [(EDITS, 0.55, 5), (PAPER, 0.6, 15)], ids=["dqn", "paper"])
def test_same_seed_same_run_and_resume(config: Config, fraction: float, stop: int, tmp_path: Path) -> None:
    limit = round(fraction * PROGRAM.peak_bytes)
    full = train(trainer(config, limit, 3))
    assert len(full.history) > 1 and repr(train(trainer(config, limit, 3))) == repr(full)  # losses may be NaN
    assert train(trainer(config, limit, 4)).history != full.history

    def kill(episode: Episode) -> None:
        if episode.episode == stop:
            raise KeyboardInterrupt

    path = tmp_path / "run.pt"
    stopped = trainer(config, limit, 3)
    with pytest.raises(KeyboardInterrupt):
        train(stopped, path, on_episode=kill)
    loaded = trainer(config, limit, 3)
    loaded.load(path)
    n_done = len(loaded.history)  # a step of dqn_paper may end several episodes
    assert repr(loaded.history) == repr(full.history[:n_done]) and loaded.best == stopped.best
    assert loaded.simulator_calls == stopped.simulator_calls >= loaded.history[-1].simulator_calls
    resumed = train(trainer(config, limit, 3), resume=path)
    if isinstance(config, PaperConfig):
        assert repr(resumed) == repr(full)
    else:  # walkers and replay buffer start empty
        assert len(resumed.history) == config.iterations and resumed.simulator_calls > stopped.simulator_calls
        assert repr(resumed.history[:n_done]) == repr(full.history[:n_done])
        extended = train(trainer(replace(config, iterations=10), limit, 3), resume=path)
        assert len(extended.history) == 10
    for wrong, named in (
        (trainer(config, limit, 1), "seed"),
        (trainer(config, limit + 1, 3), "limit"),
        (trainer(replace(config, min_bytes=2), limit, 3), r"agent\.min_bytes"),
    ):
        with pytest.raises(TrainingStateError, match=f"a different {named}"):
            train(wrong, resume=path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(TrainingStateError, match="not a checkpoint"):
        train(trainer(config, limit, 3), resume=path)
    with pytest.raises(TrainingStateError, match="cannot be read"):
        train(trainer(config, limit, 3), resume=tmp_path / "none.pt")


@BOTH
def test_limits_below_reach_and_above_the_peak(small: Config) -> None:
    with pytest.raises(agents.Infeasible, match=r"small.* cannot (run in|be planned within) 6,606,028 bytes"):
        train(trainer(small, PROGRAM.peak_bytes // 10))
    with pytest.raises(agents.Infeasible, match="min_bytes"):
        train(trainer(replace(small, min_bytes=2**40), int(PROGRAM.peak_bytes * 0.8)))
    for limit in (PROGRAM.peak_bytes, PROGRAM.peak_bytes + 1):
        assert train(trainer(small, limit)).best.decisions == ()


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (Args, {"init": "trained"}),
        (Args, {"walkers": 0}),
        (Args, {"n_step": 0}),
        (Args, {"most_calls": 99}),
        (Args, {"greedy_calls": 3}),
        (Args, {"mode": "both"}),
        (Args, {"elites": 33}),
        (Args, {"features": 8}),
        (Args, {"gamma": "0.9"}),
        (Args, {"message_passing": 1}),
        (PaperConfig, {"sise": 8}),
        (PaperConfig, {"num_envs": "8"}),
        (PaperConfig, {"num_envs": 0}),
        (PaperConfig, {"pool": "max"}),
        (PaperConfig, {"mode": "both"}),
        (PaperConfig, {"num_envs": None}),
    ],
)
def test_bad_configs_are_named(kind: type[Config], values: dict[str, object]) -> None:
    with pytest.raises(cli.UsageError, match=r"agent(\.|: )" + next(iter(values))):
        cli.dataclass_from_config(kind, OmegaConf.create(values), "agent")
