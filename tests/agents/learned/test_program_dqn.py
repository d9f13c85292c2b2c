"""The DQN over programs: what it sees of a walk, its targets, learning, the same run again, files."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agents.learned.program_dqn import (
    DEAD_END,
    LEAST,
    MASKED,
    Case,
    Learner,
    ProgramDQNConfig,
    QNet,
    Seen,
    fresh,
)
from agents.learned.training_state import TrainingStateError, read_weights, save_weights
from agents.learned.walk_columns import ACTION, WALK
from envs.memory_env import small_task
from envs.task import KEEP
from simulator import simulate
from simulator.compiled.encoding import decisions_of
from simulator.files import FormatError
from simulator.limits import limit_bytes
from simulator.modes import KEPT, RECOMPUTED, STAYS, SWAPPED
from simulator.plan import Plan
from tests.oracle.walk import Walk

PROGRAM, MACHINE = small_task()
SMALL = ProgramDQNConfig(
    iterations=20, tasks=2, walks=8, guide_calls=40, batch_size=64, width=16, layers=2, learning_rate=3e-3
)


def cases() -> list[Case]:
    return [Case(PROGRAM, MACHINE, limit_bytes(limit, PROGRAM)) for limit in (0.7, 0.6)]


def test_gaps_are_those_of_the_graph() -> None:
    for case in cases():
        task = case.task
        assert [case.moves.gaps[i] for i in case.gap] == list(task.graph.gaps)
        assert case.acts[0].tolist() == [0, -1, STAYS]
        for node, gap, way in case.acts[1:].tolist():
            assert task.graph.action_gap[node] == gap
            assert task.graph.action_kind[node] == (SWAPPED if way == SWAPPED else RECOMPUTED)
        assert (case.acts[:, 2] == KEPT).sum() == len(task.removals) > 0
        for source, target in case.chain.T.tolist():  # an input of the producer of the first is away in the second
            made = PROGRAM.writes[task.tensor[source]][0]
            assert task.tensor[target] in PROGRAM.kernels[made].inputs


def test_what_is_looked_at_is_what_may_be_done() -> None:
    learner = Learner(cases(), SMALL, 0)
    case = np.repeat([0, 1], 8)
    learner.walk(case, np.full(16, 0.5))
    learner.batch.reset()
    learner.batch.reset(case == 0, 0)
    learner.batch.reset(case == 1, 1)
    rng, walks = np.random.default_rng(0), [Walk(learner.cases[i].task, "causal") for i in case]
    for _ in range(6):
        alive = np.flatnonzero([not walk.done for walk in walks])
        seen, act = learner.look(alive, case)
        assert seen.action.shape[0] == len(seen.of) and seen.walk.shape == (len(alive), WALK)
        actions = np.zeros(16, np.int64)
        for w, i in enumerate(alive.tolist()):
            task, mine = learner.cases[case[i]].task, act[seen.of == w]
            node, _, way = learner.cases[case[i]].acts[mine].T
            masks = walks[i].form_masks()
            assert sorted(node[way != KEPT]) == np.flatnonzero(masks[0]).tolist()
            assert sorted(node[way == KEPT]) == [n for n in np.flatnonzero(masks[KEEP]) if n in task.removals]
            left = np.maximum(walks[i].need - task.limit, 0)[walks[i].position :]
            lasts = task.duration_ns[walks[i].position :]
            for row, one, a in zip(
                seen.action[seen.of == w], way, learner.cases[case[i]].acts[mine, 1].tolist(), strict=True
            ):
                if one == STAYS:
                    assert not row[:ACTION].any()
                    continue
                k = np.arange(walks[i].position, len(task.live_bytes))
                inside = (k < task.before[a]) | (task.wraps[a] & (k > task.after[a]))
                useful = (np.minimum(left, task.nbytes[a]) * lasts)[inside].sum() / max((left * lasts).sum(), 1)
                assert row[0] == pytest.approx(useful, rel=1e-5)
                assert row[5] == (walks[i].stuck_at in k[inside])
            j = int(rng.integers(len(mine)))
            actions[i] = node[j] + learner.batch.size * KEEP * (way[j] == KEPT)
            walks[i].step(int(node[j]), KEEP if way[j] == KEPT else 0)
        learner.batch.step(actions)


def test_targets_are_what_followed_or_what_was_promised() -> None:
    learner = Learner(cases()[:1], replace(SMALL, tasks=1), 0)
    result, (episodes,) = learner.walk(np.zeros(4, np.int64), np.zeros(4))
    assert np.isfinite(result.overhead).all() and len(set(result.overhead)) == 1  # all are greedy
    scale = max(float(result.overhead[0]), LEAST)
    assert episodes.target[-4:] == pytest.approx(-result.overhead / scale)  # the last ones are the first steps'
    plan = Plan(decisions_of(result.plans[0]), PROGRAM.fingerprint)
    task = learner.cases[0].task
    assert simulate(PROGRAM, plan, MACHINE, task.limit).overhead == pytest.approx(result.overhead[0])

    none = Seen(*(np.zeros((4, *a.shape[1:]), a.dtype) for a in episodes.seen))
    costs = result._replace(overhead=np.array([0.02, 0.04, 0.06, np.inf]))  # the median is 0.04
    learner.batch.overhead[:4] = [0.02, 0.04, 0.06, 0.5]
    every, before, nobody = np.arange(4), np.zeros(4), np.full(4, MASKED)
    middle, promised = np.array([0.01, 0.01, 0.01, 0.5]), np.array([-0.1, -9.0, MASKED, MASKED])
    (found,) = learner.targets(costs, [(every, none, before, nobody), (every, none, middle, promised)])
    assert found.target[:4] == pytest.approx([-0.25, -0.75, -1.25, DEAD_END])
    assert found.target[4:] == pytest.approx([-0.25 - 0.1, -0.25 - 0.75, -0.25 - 1.25, DEAD_END - 12.5])


def test_a_walk_follows_its_guide() -> None:
    (case, _) = cases()
    rows, overhead = case.annealed(200, 0)
    assert overhead <= case.annealed(2, 0)[1]
    learner = Learner([case], replace(SMALL, tasks=1), 0)
    result, _ = learner.walk(np.zeros(2, np.int64), np.zeros(2), guides=[None, rows])
    planned = {(row[1], row[3]) for row in rows.tolist()}
    assert len(planned & {(row[1], row[3]) for row in result.plans[1].tolist()}) >= len(result.plans[1]) - 1


def test_learns_what_random_walks_do_not_find(tmp_path: Path) -> None:
    learner = Learner(cases(), SMALL, 0)
    rng_walks, _ = learner.walk(np.repeat([0, 1], 8), np.ones(16))
    learner = Learner(cases(), SMALL, 0)
    for i in range(SMALL.iterations):
        learner.iterate()
        if i == 15:
            learner.save(tmp_path / "state.pt")
    greedy, _ = learner.walk(np.array([0, 1]), np.zeros(2))
    for i in (0, 1):
        assert greedy.overhead[i] < np.median(rng_walks.overhead[rng_walks.case == i])
    again = Learner(cases(), SMALL, 0)
    again.load(tmp_path / "state.pt")
    while again.iteration < SMALL.iterations:
        again.iterate()
    for one, other in zip(learner.net.parameters(), again.net.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(TrainingStateError, match="another seed"):
        Learner(cases(), SMALL, 1).load(tmp_path / "state.pt")


def test_weights_are_checked_at_the_edge(tmp_path: Path) -> None:
    (case, _) = cases()
    net = fresh([case], SMALL, 0)
    save_weights(net, tmp_path / "net.pt")
    other = read_weights(tmp_path / "net.pt", QNet, "a program DQN")
    assert other.settings == net.settings
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True))
    (tmp_path / "bad.pt").write_bytes(b"nothing")
    torch.save({"settings": {**net.settings, "width": 17}, "weights": net.state_dict()}, tmp_path / "wide.pt")
    for name in ("bad.pt", "wide.pt"):
        with pytest.raises(
            FormatError, match=f"^weights: .*{name} holds no weights of a program DQN, or damaged ones$"
        ):
            read_weights(tmp_path / name, QNet, "a program DQN")
    with pytest.raises(FormatError, match=r"none\.pt: cannot be read"):
        read_weights(tmp_path / "none.pt", QNet, "a program DQN")


def test_config_is_checked() -> None:
    with pytest.raises(ValueError, match="walks, guided"):
        ProgramDQNConfig(walks=2, guided=2)
