"""The agent: equations against a plain loop, learning on a task with known optimum, same seed same run, resume."""

import copy
import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from agents.learned.dqn import Trainer, train
from agents.learned.dqn_config import RENAMED, DQNConfig, config_from
from agents.learned.experience_buffer import ExperienceBuffer, State
from agents.learned.structure2vec import Structure2Vec
from agents.learned.training_state import TrainingStateError
from agents.learned.transfer import Agent, TransferConfig, actions_of
from agents.planner import Infeasible
from envs.memory_env import small_task
from envs.task import Task
from envs.walk import Walk
from simulator import Engine, Program, Swap, simulate
from simulator.compiled.engine import rows_of

PROGRAM, MACHINE = small_task()
LIMIT = round(0.6 * PROGRAM.peak_bytes)
SMALL = DQNConfig(
    episodes=120,
    num_envs=4,
    embedding_size=8,
    message_passing_steps=3,
    buffer_size=2000,
    update_every=8,
    checkpoint_every=30,
)


def test_equations_one_to_three_as_printed():
    """Against the sums of the paper, written as loops over nodes and neighbours."""
    graph = Task(PROGRAM, MACHINE, LIMIT, mode="joint").graph
    torch.manual_seed(0)
    net = Structure2Vec(graph, features=6, embedding_size=4, message_passing_steps=3, pool="sum", mixing=False)
    n, c = len(graph), 5
    x = torch.rand(n, 1, 6)
    s = [torch.zeros(4) for _ in range(n)]
    edges = list(zip(*graph.edges.tolist(), graph.weights, strict=True))
    neighbours = [[(u, w) for u, v, w in edges if v == k] for k in range(n)]
    for _ in range(3):
        s = [
            torch.relu(
                net.w1.weight @ x[v, 0]
                + net.w2.weight @ sum(s[u] for u, _ in neighbours[v])
                + net.w3.weight @ sum(torch.relu(net.w4.weight @ torch.tensor([w])) for _, w in neighbours[v])
            )
            for v in range(n)
        ]
    g = torch.cat([net.w5.weight @ sum(s), net.w6.weight @ s[c]])
    actions = np.flatnonzero(graph.action_kind >= 0)
    expected = [
        float(net.w7.weight.detach()[0] @ torch.relu(torch.cat([g, net.w8.weight @ s[a]])).detach()) for a in actions
    ]
    got = net(x, torch.tensor([c]))[0].tolist()
    assert got == pytest.approx(expected, rel=1e-4)


def test_finds_the_optimum_of_a_small_task():
    """Against every subset of the gaps, all simulated."""
    task = Task(PROGRAM, MACHINE, LIMIT)
    engine = Engine(PROGRAM, MACHINE, LIMIT)
    rows = rows_of([Swap(*gap) for gap in task.graph.gaps])
    best = min(
        engine.score(rows[list(chosen)]).iteration_ns
        for size in range(len(rows) + 1)
        for chosen in itertools.combinations(range(len(rows)), size)
    )
    result = train(PROGRAM, MACHINE, LIMIT, SMALL, seed=0)
    assert engine.score(rows_of(result.best.decisions)).iteration_ns <= best


def overhead_at_random(task: Task, rng: np.random.Generator) -> float:
    walk = Walk(task)
    while not walk.done:
        walk.step(int(rng.choice(np.flatnonzero(walk.mask()))))
    assert not walk.dead_end
    return walk.overhead


def test_the_policy_learns():
    """The greedy policy after 120 episodes beside that of the same network before them, and beside random actions.

    Mutations are off, because they find good plans whatever the network says. Trained on the negated reward, or on
    none, six such policies were on average worse than half of what random actions cost.
    """
    config = replace(SMALL, mutations=0)
    task = Task(PROGRAM, MACHINE, round(0.7 * PROGRAM.peak_bytes))
    rng = np.random.default_rng(0)
    at_random = np.mean([overhead_at_random(task, rng) for _ in range(200)])
    before, after = [], []
    for seed in range(4):
        trainer = Trainer(task, config, seed)
        before.append(simulate(PROGRAM, trainer.greedy(), MACHINE, task.limit).overhead)
        while len(trainer.history) < config.episodes:
            trainer.step()
        after.append(simulate(PROGRAM, trainer.greedy(), MACHINE, task.limit).overhead)
    assert np.mean(after) < 0.3 * at_random < 0.3 * np.mean(before)


@pytest.mark.parametrize("priority", [0.0, 0.6])
def test_same_seed_same_run_and_resume(tmp_path, priority):
    config = config_from({**SMALL.__dict__, "priority": priority, "n_step": 3, "episodes": 24, "checkpoint_every": 6})
    whole = train(PROGRAM, MACHINE, LIMIT, config, seed=3, checkpoint=tmp_path / "a.pt")
    assert repr(train(PROGRAM, MACHINE, LIMIT, config, seed=3)) == repr(whole)  # repr: losses may be nan
    assert train(PROGRAM, MACHINE, LIMIT, config, seed=4).history != whole.history

    class Killed(Exception):
        pass

    def kill(episode):
        if episode.episode == 15:
            raise Killed

    with pytest.raises(Killed):
        train(PROGRAM, MACHINE, LIMIT, config, seed=3, checkpoint=tmp_path / "b.pt", on_episode=kill)
    resumed = train(PROGRAM, MACHINE, LIMIT, config, seed=3, resume=tmp_path / "b.pt")
    assert repr(resumed) == repr(whole)


def test_checkpoints_are_checked(tmp_path):
    path = tmp_path / "c.pt"
    config = config_from({**SMALL.__dict__, "episodes": 8})
    train(PROGRAM, MACHINE, LIMIT, config, checkpoint=path)
    with pytest.raises(TrainingStateError, match=r"another seed"):
        train(PROGRAM, MACHINE, LIMIT, config, seed=1, resume=path)
    with pytest.raises(TrainingStateError, match=r"another agent\.embedding_size"):
        train(PROGRAM, MACHINE, LIMIT, config_from({**config.__dict__, "embedding_size": 9}), resume=path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(TrainingStateError, match="not a checkpoint"):
        train(PROGRAM, MACHINE, LIMIT, config, resume=path)
    with pytest.raises(TrainingStateError, match="cannot be read"):
        train(PROGRAM, MACHINE, LIMIT, config, resume=tmp_path / "none.pt")


def test_a_limit_below_reach_is_refused_at_once():
    with pytest.raises(Infeasible, match="cannot run in"):
        train(PROGRAM, MACHINE, PROGRAM.peak_bytes // 10, SMALL)
    words = r"cannot run in .* because every tensor that could leave is below min_bytes \(1,099,511,627,776 bytes\)"
    with pytest.raises(Infeasible, match=words):
        train(PROGRAM, MACHINE, int(PROGRAM.peak_bytes * 0.8), config_from({**SMALL.__dict__, "min_bytes": 2**40}))


def test_no_action_is_needed_above_the_peak():
    result = train(PROGRAM, MACHINE, PROGRAM.peak_bytes, SMALL)
    assert result.best.decisions == ()


@pytest.mark.parametrize("values", [
    {"sise": 8}, {"num_envs": "8"}, {"num_envs": 0}, {"pool": "max"}, {"mode": "both"}, {"belady_temperature": 0.0},
    {"num_envs": None},
])  # fmt: skip
def test_bad_configs_are_named(values):
    with pytest.raises(ValueError, match="agent." + next(iter(values))):
        config_from(values)


def test_keys_of_older_versions_are_named_anew(tmp_path):
    for old, new in RENAMED.items():
        with pytest.raises(ValueError, match=re.escape(f"agent.{old}: this key is agent.{new} now")):
            config_from({old: 1})
    config = config_from({**SMALL.__dict__, "episodes": 8})
    train(PROGRAM, MACHINE, LIMIT, config, checkpoint=tmp_path / "new.pt")
    state = torch.load(tmp_path / "new.pt", weights_only=True)
    names = {new.partition(" ")[0]: old for old, new in RENAMED.items()}
    older = {names.get(key, key): value for key, value in state["config"].items()}
    assert older["prior"] == 0.05
    torch.save({**state, "config": {**older, "prior": 20.0}}, tmp_path / "old.pt")
    train(PROGRAM, MACHINE, LIMIT, config, resume=tmp_path / "old.pt")
    torch.save({**state, "config": {**older, "prior": 0.0}}, tmp_path / "old.pt")
    with pytest.raises(TrainingStateError, match=r"another agent\.belady_temperature"):
        train(PROGRAM, MACHINE, LIMIT, config, resume=tmp_path / "old.pt")


def but(valid: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The mask without the action of the highest Q-value."""
    mask = valid.copy()
    mask[q.argmax()] = False
    return mask


def q_values(trainer: Trainer, network: Structure2Vec, state: State) -> np.ndarray:
    with torch.no_grad():
        return trainer._q(network, state.dynamic[None], np.array([state.current])).numpy()[0]


def test_an_invalid_action_is_never_taken():
    """Also where its Q-value is the highest."""
    trainer = Trainer(Task(PROGRAM, MACHINE, LIMIT), SMALL, 0)
    state = trainer._state(trainer.walks[0])
    q = q_values(trainer, trainer.q, state)
    state = state._replace(mask=but(np.ones(len(q), bool), q))
    best = np.flatnonzero(state.mask)[q[state.mask].argmax()]
    assert q[best] < q.max() and trainer.act([state] * 3, 0.0).tolist() == [best] * 3
    random = trainer.act([state] * 200, 1.0)
    assert state.mask[random].all() and len(set(random.tolist())) > 1
    only = state._replace(mask=np.arange(len(q)) == best)
    assert set(trainer.act([only] * 50, 1.0).tolist()) == {best}


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("target_every", [0, 100])
def test_an_invalid_action_never_enters_the_target(double, target_every):
    """Equation 5, and with ``double`` the value by the target network of the action that the network itself would
    take. The next state forbids the best action of both; with either, the target would be another number."""
    config = replace(SMALL, double=double, target_every=target_every, n_step=1, optimizer="sgd")
    trainer = Trainer(Task(PROGRAM, MACHINE, LIMIT), config, 0)
    trainer.target.load_state_dict(Trainer(trainer.task, config, 1).q.state_dict())
    for each in (trainer.q, trainer.target):
        each.w7.weight.data *= 300  # Q-values of untrained networks are near 0
    network = trainer.target if target_every else trainer.q
    walk = trainer.walks[0]
    first = trainer._state(walk)
    walk.step(int(trainer.actions[np.flatnonzero(first.mask)[0]]))
    second = trainer._state(walk)
    own, value = q_values(trainer, trainer.q, second), q_values(trainer, network, second)
    second = second._replace(mask=but(but(np.ones(len(own), bool), own), value))
    mask = second.mask
    action = np.flatnonzero(mask)[own[mask].argmax() if double else value[mask].argmax()]
    unmasked = value[own.argmax()] if double else value.max()
    assert abs(unmasked - value[action]) > 0.1
    reward, last = 0.5, 0.25
    trainer.buffer.add([(first, 1, reward), (second, 2, last)], 1)
    errors = np.array([reward + value[action] - q_values(trainer, trainer.q, first)[1], last - own[2]])
    drawn = trainer.buffer.sample(config.batch_size, copy.deepcopy(trainer.rng)).place  # as ``update`` will draw
    assert set(drawn) == {0, 1}
    assert trainer.update() == pytest.approx(float(np.mean(errors[drawn] ** 2)), rel=1e-5)


def test_replay_n_step_returns():
    replay = ExperienceBuffer(16, nodes=2, actions=3, priority=0.0)
    zero = np.zeros((2, 3), np.float16)
    trail = [(State(zero + i, i, np.ones(3, bool)), i, 10.0**i) for i in range(4)]
    replay.add(trail, n_step=2)
    assert replay.arrays["reward"][:4].tolist() == [11, 110, 1100, 1000]
    assert replay.arrays["ahead"][:4].tolist() == [2, 2, 0, 0]
    batch = replay.sample(200, np.random.default_rng(0))
    assert (batch.next_current[batch.more] == batch.current[batch.more] + 2).all()
    assert (batch.more == (batch.current < 2)).all()


# ------------------------------------------------------------------------------------- carrying over

LEARN = DQNConfig(num_envs=4, embedding_size=8, message_passing_steps=3, buffer_size=2000, batch_size=8, mutations=1)
TRANSFER = TransferConfig(first=8, episodes=4, kernels=8_000, most=500, updates=2)


def limits_of(program, *fractions):
    return [round(f * program.peak_bytes) for f in fractions]


def test_a_sweep_is_a_monotone_envelope_of_plans_that_fit():
    limits = limits_of(PROGRAM, 0.58, 0.9, 0.65, 0.6, 0.3)
    agent = Agent(LEARN, TRANSFER)
    swaps = agent.sweep(PROGRAM, MACHINE, limits, "swap")
    both = agent.sweep(PROGRAM, MACHINE, limits, "joint", swaps)
    for found in (swaps, both):
        assert [f.limit for f in found] == sorted(limits, reverse=True)
        overheads = [f.overhead for f in found if f.plan is not None]
        assert overheads == sorted(overheads)
        for f in found:
            if f.plan is not None:
                timeline = simulate(PROGRAM, f.plan, MACHINE, f.plan.limit)
                assert f.plan.limit <= f.limit
                assert timeline.overhead == pytest.approx(f.overhead, abs=1e-12)
    # A plan of swaps is one of swaps and recomputations.
    assert all(b.overhead <= s.overhead for s, b in zip(swaps, both, strict=True) if s.plan is not None)
    assert all(isinstance(d, Swap) for f in swaps if f.plan for d in f.plan.decisions)


def test_a_sweep_says_where_nothing_fits():
    found = Agent(LEARN, TRANSFER).sweep(PROGRAM, MACHINE, limits_of(PROGRAM, 0.7, 0.1), "swap")
    assert found[0].plan is not None and found[1].plan is None and np.isnan(found[1].overhead)


def test_same_seed_same_sweep():
    limits = limits_of(PROGRAM, 0.6, 0.58)
    one, again, other = (Agent(LEARN, TRANSFER, seed).sweep(PROGRAM, MACHINE, limits, "joint") for seed in (1, 1, 2))
    assert repr(one) == repr(again)
    assert repr(one) != repr(other)


def test_the_network_goes_from_program_to_program(monkeypatch):
    """Its weights do not depend on the graph: what it learned of one program is where it begins with the next."""
    agent = Agent(LEARN, TRANSFER)
    agent.sweep(PROGRAM, MACHINE, limits_of(PROGRAM, 0.6), "swap")
    learned = {k: v.clone() for k, v in agent.weights.items()}
    shorter = Program("shorter", PROGRAM.tensors, PROGRAM.kernels[:-2])
    seen = []
    step = Trainer.step

    def watched(self):
        seen.append({k: v.clone() for k, v in self.q.state_dict().items()})
        return step(self)

    monkeypatch.setattr(Trainer, "step", watched)
    agent.sweep(shorter, MACHINE, limits_of(shorter, 0.58), "joint")
    assert all(torch.equal(seen[0][k], v) for k, v in learned.items())
    assert any(not torch.equal(agent.weights[k], v) for k, v in learned.items())  # and it goes on learning


def test_nothing_is_spent_where_a_carried_plan_costs_nothing():
    limits = limits_of(PROGRAM, 0.9)
    swaps = Agent(LEARN, TRANSFER).sweep(PROGRAM, MACHINE, limits, "swap")
    assert swaps[0].overhead == 0
    both = Agent(LEARN, TRANSFER).sweep(PROGRAM, MACHINE, limits, "joint", swaps)
    # Two walks of a few decisions, and a score: another episode would be hundreds of calls with its mutations.
    assert both[0].overhead == 0 and both[0].simulator_calls < 40


@pytest.mark.parametrize("mode", ["swap", "joint"])
def test_a_plan_becomes_the_walk_that_makes_it(mode):
    task = Task(PROGRAM, MACHINE, LIMIT, mode=mode)
    rng = np.random.default_rng(0)
    repeated = 0
    for _ in range(20):
        walk = Walk(task)
        while not walk.done:
            walk.step(int(rng.choice(np.flatnonzero(walk.mask()))))
        nodes = actions_of(task, walk.rows)
        again = Walk(task)
        for node in nodes:
            again.step(node)  # raises where the action is not valid
        emptied = {(kind, t, before) for kind, t, _, before, *_ in again.rows.tolist()}
        assert emptied <= {(kind, t, before) for kind, t, _, before, *_ in walk.rows.tolist()}
        repeated += again.done and not again.dead_end
    assert repeated >= 15  # taken as early as they may, a few actions no longer make the plan fit


def test_a_carried_walk_is_followed_and_learned_from():
    task = Task(PROGRAM, MACHINE, LIMIT)
    trainer = Trainer(task, SMALL, 0)
    walk = trainer.search.repeat([])
    steps, overhead = trainer.buffer.size, walk.overhead
    assert steps > 0 and trainer.search.elites[0][0] == overhead == trainer.search.best_overhead
    trainer.search.repeat(trainer.search.elites[0][1])
    assert trainer.buffer.size == 2 * steps and trainer.search.elites[1][0] == overhead


@pytest.mark.parametrize("change", [{"first": -1}, {"most": 0}, {"epsilon": 1.5}])
def test_bad_budgets_are_named(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        TransferConfig(**change)
