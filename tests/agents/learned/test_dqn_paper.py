"""Tests the paper's DQN: equations against a plain loop, learning on a solved task, reproducibility, resume."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from agents.learned.checkpoint import TrainingStateError
from agents.learned.dqn_config import RENAMED, PaperConfig
from agents.learned.dqn_paper import ExperienceBuffer, State, Trainer
from agents.learned.structure2vec import Structure2Vec
from agents.learned.training import train
from envs.memory_env import small_task
from envs.task import Task
from envs.tasks import load
from experiments.common import cli

PROGRAM, MACHINE = small_task()
LIMIT = round(0.6 * PROGRAM.peak_bytes)
SMALL = PaperConfig(
    episodes=120,
    num_envs=4,
    features=8,
    embedding_size=8,
    message_passing_steps=3,
    pool="mean",
    mixing=True,
    n_step=1000,
    double=True,
    target_every=100,
    optimizer="adam",
    learning_rate=2e-3,
    reward_scale=10.0,
    buffer_size=2000,
    update_every=8,
    epsilon_end=0.02,
    explore=0.3,
    checkpoint_every=30,
)
SWAPS = replace(SMALL, mode="swap")


def test_equations_one_to_three_as_printed():
    """Compares with the paper's sums, written as loops over nodes and neighbors."""
    graph = Task(PROGRAM, MACHINE, LIMIT, mode="joint").graph
    torch.manual_seed(0)
    net = Structure2Vec(graph, features=6, embedding_size=4, message_passing_steps=3, pool="sum", mixing=False)
    n = len(graph)
    c = 5
    x = torch.rand(n, 1, 6)
    s = [torch.zeros(4) for _ in range(n)]
    edges = list(zip(*graph.edges.tolist(), graph.weights, strict=True))
    neighbors = [[(u, w) for u, v, w in edges if v == k] for k in range(n)]
    for _ in range(3):
        s = [
            torch.relu(
                net.w1.weight @ x[v, 0]
                + net.w2.weight @ sum(s[u] for u, _ in neighbors[v])
                + net.w3.weight @ sum(torch.relu(net.w4.weight @ torch.tensor([w])) for _, w in neighbors[v])
            )
            for v in range(n)
        ]
    g = torch.cat([net.w5.weight @ sum(s), net.w6.weight @ s[c]])
    actions = np.flatnonzero(graph.action_kind >= 0)
    expected = [
        float(net.w7.weight.detach()[0] @ torch.relu(torch.cat([g, net.w8.weight @ s[a]])).detach()) for a in actions
    ]
    got = net(x, torch.tensor([c]))[0][0].tolist()
    assert got == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "greedy", "mean"),
    [("dqn_paper", 0.31184237547892724, 0.17542330268199233), ("dqn_paper_tuned", 0.0, 0.059074431034482754)],
)
def test_training_gives_the_recorded_overheads(settings, greedy, mean):
    """Checks the overheads of the greedy policy after 40 episodes and of the episodes.

    As printed, the policy is worse than chance; with the tuned settings it is optimal.
    """
    config = cli.dataclass_from_config(PaperConfig, OmegaConf.load(cli.CONFIGS / "agent" / f"{settings}.yaml"), "agent")
    limit = round(0.7 * PROGRAM.peak_bytes)
    trainer = Trainer(PROGRAM, MACHINE, limit, replace(config, episodes=40, mode="swap"), 0)
    history = train(trainer).history
    assert trainer.greedy_overhead() == greedy
    assert np.mean([episode.overhead for episode in history]) == pytest.approx(mean, abs=1e-12)


def test_fine_tuning_begins_with_the_network_of_another_program(tmp_path):
    """Weights do not depend on program size: a network of one program initializes that of another."""
    source = Trainer(PROGRAM, MACHINE, LIMIT, replace(SWAPS, episodes=8), 0)
    train(source, checkpoint=tmp_path / "checkpoint.pt")
    other_task = load("vgg16")[0], MACHINE, load("vgg16")[0].peak_bytes // 2
    for weights in (tmp_path, tmp_path / "checkpoint.pt"):
        tuned = Trainer(*other_task, replace(SWAPS, weights=str(weights)), 1)
        for network in (tuned.q, tuned.target):
            assert all(torch.equal(a, b) for a, b in zip(network.parameters(), source.q.parameters(), strict=True))
    assert tuned.first_value() != Trainer(*other_task, SWAPS, 1).first_value()
    with pytest.raises(TrainingStateError, match=r"agent\.weights: .*embedding_size"):
        Trainer(*other_task, replace(SWAPS, embedding_size=4, weights=str(tmp_path)), 1)
    with pytest.raises(TrainingStateError, match=r"nothing\.pt"):
        Trainer(*other_task, replace(SWAPS, weights=str(tmp_path / "nothing.pt")), 1)


def test_keys_of_older_checkpoints_are_renamed(tmp_path):
    for old in RENAMED:
        with pytest.raises(cli.UsageError, match=f"agent.{old}: .*{RENAMED[old]}"):
            cli.dataclass_from_config(PaperConfig, OmegaConf.create({old: 1}), "agent")
    config = replace(SMALL, episodes=8)
    train(Trainer(PROGRAM, MACHINE, LIMIT, config, 0), checkpoint=tmp_path / "new.pt")
    state = torch.load(tmp_path / "new.pt", weights_only=True)
    names = {new: old for old, new in RENAMED.items()}
    newer = ("gamma", "weights")
    older = {names.get(key, key): value for key, value in state["config"].items() if key not in newer}
    torch.save({**state, "config": older}, tmp_path / "old.pt")
    train(Trainer(PROGRAM, MACHINE, LIMIT, config, 0), resume=tmp_path / "old.pt")


def without_best(valid: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Returns the mask without the action of the highest Q-value."""
    mask = valid.copy()
    mask[q.argmax()] = False
    return mask


def q_values(trainer: Trainer, network: Structure2Vec, state: State) -> np.ndarray:
    with torch.no_grad():
        return trainer._q(network, state.dynamic[None], np.array([state.current])).numpy()[0]


def test_an_invalid_action_is_never_taken():
    """Covers invalid actions with the highest Q-value."""
    trainer = Trainer(PROGRAM, MACHINE, LIMIT, SWAPS, 0)
    state = trainer._state(trainer.walks[0])
    q = q_values(trainer, trainer.q, state)
    state = state._replace(mask=without_best(np.ones(len(q), bool), q))
    best = np.flatnonzero(state.mask)[q[state.mask].argmax()]
    assert q[best] < q.max() and trainer.act([state] * 3, 0.0).tolist() == [best] * 3
    random = trainer.act([state] * 200, 1.0)
    assert state.mask[random].all() and len(set(random.tolist())) > 1
    single = state._replace(mask=np.arange(len(q)) == best)
    assert set(trainer.act([single] * 50, 1.0).tolist()) == {best}


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("target_every", [0, 100])
def test_an_invalid_action_never_enters_the_target(double, target_every):
    """Checks equation 5, and with ``double`` the target network's value of the online network's action.

    The next state forbids the best action of both networks; with either, the target would differ.
    """
    config = replace(SWAPS, double=double, target_every=target_every, n_step=1, gamma=0.5, optimizer="sgd")
    trainer = Trainer(PROGRAM, MACHINE, LIMIT, config, 0)
    trainer.target.load_state_dict(Trainer(PROGRAM, MACHINE, LIMIT, config, 1).q.state_dict())
    for net in (trainer.q, trainer.target):
        net.w7.weight.data *= 300  # Q-values of untrained networks are near 0
    network = trainer.target if target_every else trainer.q
    walk = trainer.walks[0]
    first = trainer._state(walk)
    walk.step(int(trainer.actions[np.flatnonzero(first.mask)[0]]))
    second = trainer._state(walk)
    online_q = q_values(trainer, trainer.q, second)
    target_q = q_values(trainer, network, second)
    second = second._replace(mask=without_best(without_best(np.ones(len(online_q), bool), online_q), target_q))
    mask = second.mask
    action = np.flatnonzero(mask)[online_q[mask].argmax() if double else target_q[mask].argmax()]
    unmasked = target_q[online_q.argmax()] if double else target_q.max()
    assert abs(unmasked - target_q[action]) > 0.1
    reward = 0.5
    end = 0.25
    trainer.buffer.add([(first, 1, reward), (second, 2, end)], 1)
    errors = np.array([reward + 0.5 * target_q[action] - q_values(trainer, trainer.q, first)[1], end - online_q[2]])
    samples = copy.deepcopy(trainer.rng).integers(2, size=config.batch_size)  # the draw of ``update``
    assert set(samples) == {0, 1}
    assert trainer.update() == pytest.approx(float(np.mean(errors[samples] ** 2)), rel=1e-5)


def test_replay_n_step_returns():
    replay = ExperienceBuffer(16, nodes=2, actions=3)
    zero = np.zeros((2, 3), np.float16)
    trail = [(State(zero + i, i, np.ones(3, bool)), i, 10.0**i) for i in range(4)]
    replay.add(trail, n_step=2, gamma=0.5)
    assert replay.ring["reward"][:4].tolist() == [6, 60, 600, 1000]
    assert replay.ring["ahead"][:4].tolist() == [2, 2, 0, 0]
    sampled, following = replay.sample(200, np.random.default_rng(0))
    assert (following["current"] == sampled["current"] + sampled["ahead"]).all() and set(sampled["ahead"]) == {0, 2}
