"""A deep Q-network that learns on many programs, machines and limits at once, and plans those it has never seen.

The DQN paper, section 4.4.2: "we can train a DQN on a small graph and fine-tune on a large graph". A task is encoded
once an episode, by the trunk of policy_net.py with nothing decided; a light head gives the Q-value of each valid action
at each step, from that and from what has changed (walk_columns.py). Fitted Q-iteration (equations 4 and 5): episodes
with the network as it is (``walk``), whose values are in the targets (``targets``), then the network is fitted to them
(``fit``). Read on in ``Learner.iterate``. Beside what dqn.py does (γ = 1, masks), and why:

- Targets are whole returns. Where a walk left the policy, they go on by what followed or by what the policy promised,
  the larger: the simulator is deterministic, so that the best return is no less than one that was seen.
- The walks of a task differ by how often they explore; some follow the best plan known of the task, for a while.
- Costs are over the median of a task's walks, so that tasks in which every plan is slow do not outweigh the others.
- A removal may keep what its chain recovers: an action is a gap and a way (simulator/modes.py).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from agents.learned.gap_graph import BINS, UNDECIDED, GapGraph
from agents.learned.optimisation import MASKED, descend, one_thread
from agents.learned.policy_net import WAYS, PolicyNet, batch_of, data_of
from agents.learned.training_state import must_match, read_training_state, restoring, write_training_state
from agents.learned.walk_columns import ACTION, WALK, Floats, Ints, columns, tables_of
from agents.planner import MIB, Rows, way_of
from agents.search.annealing import everything
from agents.search.local_search import Moves, anneal
from envs.batch import Batch
from envs.columns import POSITION
from envs.graph import OBSERVED
from envs.task import KEEP, Task
from simulator.compiled.encoding import BEFORE, TENSOR
from simulator.machine import Machine
from simulator.modes import KEPT, RECOMPUTED, STAYS, SWAPPED
from simulator.program import Program

LEAST = 0.01  # overhead below which tasks count alike
UNIFORM = 1e4  # temperature at which Q-values do not count
DEAD_END = -4.0  # reward, in the median cost of the task's walks
HOT, COLD = 3e-3, 3e-5  # temperatures of the first plans' annealing


@dataclass(frozen=True)
class ProgramDQNConfig:
    """Hyperparameters.

    Attributes:
        iterations: of walking and fitting.
        tasks, walks: of an iteration, and the walks of each task: the first is greedy, ``guided`` follow a plan, the
            others explore, with probabilities from ``epsilon`` to ``epsilon_least`` a step.
        leave: probability that a walk stops following the plan, at each step; the first of them never does.
        guide_calls: simulator calls of the local search that makes the first such plan; 0: the best walk's.
        temperature: of half of the explored actions, in the median cost; the others are uniform.
        remembered: iterations whose walks are fitted.
        updates, batch_tasks, batch_size: minibatches an iteration, the tasks in each, transitions of each task.
        width, layers, encoder: of PolicyNet.
    """

    iterations: int = 400
    tasks: int = 16
    walks: int = 8
    guided: int = 3
    leave: float = 0.05
    guide_calls: int = 500
    epsilon: float = 0.3
    epsilon_least: float = 0.01
    temperature: float = 0.1
    remembered: int = 4
    updates: int = 24
    batch_tasks: int = 8
    batch_size: int = 256
    learning_rate: float = 1e-3
    width: int = 48
    layers: int = 3
    encoder: str = "structure2vec"

    def __post_init__(self) -> None:
        if self.walks < self.guided + 1 or self.guided < 0:
            raise ValueError(f"walks, guided: expected a greedy walk beside those, got {self.walks} and {self.guided}")


class Case:
    """A task as both the walk and the encoder see it. Raises ValueError as ``Task``."""

    def __init__(
        self, program: Program, machine: Machine, limit: int, mode: str = "joint", min_bytes: int = MIB
    ) -> None:
        self.task = task = Task(program, machine, limit, min_bytes, mode)
        self.moves = Moves(program, limit, mode, min_bytes, 0)
        graph = GapGraph(program, machine, limit, self.moves, mode)
        index = {gap: i for i, gap in enumerate(graph.gaps)}
        self.gap = np.array([index[gap] for gap in task.graph.gaps], np.int64)  # the graph's, of each of the walk's
        self.gaps = len(graph)
        self.data = data_of(graph, np.full(len(graph), UNDECIDED))
        self.bin = np.minimum(task.start_ns * BINS // task.ideal_ns, BINS - 1)  # (K + 1,)
        mine = np.full(len(graph), -1)
        mine[self.gap] = np.arange(len(self.gap))
        self.chain = mine[graph.chain][:, (mine[graph.chain] >= 0).all(0)]
        ways = ((SWAPPED, task.offloads, task.offload_gap), (RECOMPUTED, task.removals, task.removal_gap),
                (KEPT, task.removals, task.removal_gap))  # fmt: skip
        self.acts = np.concatenate(
            [[[0, -1, STAYS]], *(np.stack([node, gap, np.full(len(gap), way)], 1) for way, node, gap in ways)]
        )  # (A, 3): node, gap (-1: do nothing) and way of the actions
        self.everything = everything(program, mode, min_bytes)

    def annealed(self, calls: int, seed: int, start: Rows | None = None) -> tuple[Rows, float]:
        """The best plan that local search finds, from one that fits or from every gap emptied; and its overhead.

        Args:
            calls: simulator calls, the start's included.
        """
        start, task = self.everything if start is None else start, self.task
        first = task.engine.score(start)
        rows, ns = anneal(self.moves.fork(seed), task.engine, start, first.iteration_ns, calls - 1, HOT, COLD, seed)
        return rows, ns / task.ideal_ns - 1

    def wanted(self, rows: Rows) -> Floats:
        """(A,) how much a walk that follows the plan ``rows`` wants each action: those of the plan most, then the other
        way to recompute a gap that it recomputes, then doing nothing."""
        index = {(gap.tensor, gap.before): i for i, gap in enumerate(self.task.graph.gaps)}
        way = np.zeros(len(index) + 1, np.int64)
        for row in rows.tolist():
            gap = index.get((row[TENSOR], row[BEFORE]), -1)  # the last of ``way`` is nobody's
            way[gap] = way_of(row)
        way[-1] = STAYS
        mine, planned = self.acts[:, 2], way[self.acts[:, 1]]
        also = (mine >= RECOMPUTED) & (planned >= RECOMPUTED)
        return np.where(mine == STAYS, 1.0, np.where(mine == planned, 3.0, np.where(also, 2.0, 0.0))).astype(np.float32)


class Seen(NamedTuple):
    """Actions of walks as the head sees them: V actions, W walks.

    Attributes:
        of: (V,) the walk. gap: (V,) of the graph, -1 for "do nothing". kind: (V,) the way. action: (V, columns).
        place: (W,) bin of time. walk: (W, WALK).
    """

    of: Ints
    gap: Ints
    kind: Ints
    action: Floats
    place: Ints
    walk: Floats


class Episodes(NamedTuple):
    """Walks of one task: its number, the actions taken (each of a "walk" of its own), and their targets."""

    case: int
    seen: Seen
    target: Floats


class Result(NamedTuple):
    """Walks that have ended: of which task each, its overhead (inf: a dead end) and its plan."""

    case: Ints
    overhead: NDArray[np.float64]
    plans: list[Rows]


class QNet(nn.Module):
    """Q-values of actions. The arguments are those of PolicyNet."""

    def __init__(self, features: int, bin_features: int, width: int, layers: int, encoder: str) -> None:
        super().__init__()
        self.settings = {"features": features, "bin_features": bin_features, "width": width, "layers": layers,
                         "encoder": encoder}  # fmt: skip
        self.trunk = PolicyNet(features, bin_features, width, layers, encoder)
        self.trunk.out = nn.Sequential()  # what it would decide is not asked
        self.nothing = nn.Parameter(torch.zeros(width))
        self.gap, self.place = nn.Linear(width, WAYS * width), nn.Linear(width, width)
        self.action, self.walk = nn.Linear(ACTION + OBSERVED, width), nn.Linear(WALK, width)
        self.advantage, self.value = (
            nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)) for _ in range(2)
        )

    def encode(self, cases: Sequence[Case]) -> tuple[Tensor, Tensor, Ints]:
        """What the head needs of the tasks: of gaps (G + 1, WAYS, width), the last of "do nothing"; of bins
        (tasks · BINS, width); and where each task's gaps begin."""
        gaps, bins = self.trunk.encode(batch_of([case.data for case in cases]))
        gaps = self.gap(torch.cat([gaps, self.nothing[None]])).unflatten(1, (WAYS, -1))
        bins = self.place(bins + bins.mean(1, keepdim=True)).flatten(0, 1)
        return gaps, bins, np.cumsum([0] + [case.gaps for case in cases])

    def forward(self, encoded: tuple[Tensor, Tensor, Ints], task: Ints, seen: Seen) -> Tensor:
        """(V,) Q-values; ``task`` (W,): of each walk, by its place in ``encoded``."""
        gaps, bins, begins = encoded
        at = np.where(seen.gap < 0, len(gaps) - 1, seen.gap + begins[task][seen.of])
        states = bins[torch.from_numpy(task * BINS + seen.place)] + self.walk(torch.from_numpy(seen.walk))
        actions = gaps[torch.from_numpy(at), torch.from_numpy(seen.kind)] + self.action(torch.from_numpy(seen.action))
        of = torch.from_numpy(seen.of)
        q: Tensor = (self.value(states)[of] + self.advantage(actions + states[of]))[:, 0]
        return q


class Learner:
    """Fitted Q-iteration over tasks.

    Args:
        net: goes on from it; None: from a new one.
    """

    def __init__(self, cases: Sequence[Case], config: ProgramDQNConfig, seed: int, net: QNet | None = None) -> None:
        self.cases, self.config, self.seed = cases, config, seed
        one_thread()
        self.rng = np.random.default_rng(seed)
        self.net = net or fresh(cases, config, seed)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), config.learning_rate)
        self.tables = tables_of([(case.task, case.chain) for case in cases])
        self.batch = Batch([c.task for c in cases], config.tasks * config.walks, "causal", actions="full", threads=1)
        self.acts, self.gaps, self.bins = (
            padded([vars(case)[name] for case in cases]) for name in ("acts", "gap", "bin")
        )  # fmt: skip
        self.memory: deque[list[Episodes]] = deque(maxlen=config.remembered)
        self.order: list[int] = []  # of the tasks that come next, the last one first
        self.guides: dict[int, tuple[float, Rows]] = {}  # overhead and plan, the best known of each task
        self.iteration = 0
        self.loss = float("nan")

    def iterate(self) -> Result:
        """Walks, and fits the network to what followed."""
        c = self.config
        while len(self.order) < c.tasks:
            self.order = self.rng.permutation(len(self.cases)).tolist() + self.order
        case = np.repeat([self.order.pop() for _ in range(c.tasks)], c.walks)
        turn = np.tile(np.arange(c.walks), c.tasks)
        guides = [self.guide(i) if 0 < j <= c.guided else None for i, j in zip(case.tolist(), turn, strict=True)]
        rank = (turn - c.guided - 1) / max(c.walks - c.guided - 2, 1)
        epsilon = np.where(turn > c.guided, c.epsilon * (c.epsilon_least / c.epsilon) ** rank, 0.0)
        result, episodes = self.walk(case, epsilon, guides=guides, leave=np.where(turn == 1, 0.0, c.leave))
        for i, overhead, plan in zip(case.tolist(), result.overhead.tolist(), result.plans, strict=True):
            if overhead < self.guides.get(i, (np.inf,))[0]:
                self.guides[i] = overhead, plan
        self.memory.append(episodes)
        for group in self.optimizer.param_groups:
            group["lr"] = c.learning_rate * (1.1 - self.iteration / c.iterations)
        self.loss = float(np.mean([self.fit() for _ in range(c.updates)]))
        self.iteration += 1
        return result

    def guide(self, i: int) -> Rows | None:
        """The best plan known of task i."""
        if i not in self.guides and self.config.guide_calls:
            rows, overhead = self.cases[i].annealed(self.config.guide_calls, self.seed)
            self.guides[i] = overhead, rows
        return self.guides[i][1] if i in self.guides else None

    @torch.no_grad()
    def walk(
        self, case: Ints, epsilon: NDArray[np.float64], heat: NDArray[np.float64] | float = 0.0,
        guides: Sequence[Rows | None] = (), leave: NDArray[np.float64] | float = 0.0,
    ) -> tuple[Result, list[Episodes]]:  # fmt: skip
        """Episodes of the tasks ``case`` (W,), no more than the batch has.

        Args:
            epsilon: (W,) probability of an action that is not the policy's.
            heat: (W,) other actions are drawn by their Q-values over this; 0: the best one is taken.
            guides: plans to follow, by the walk; ``leave`` (W,): the probability of leaving it for good, at each step.
        """
        batch, count = self.batch, len(case)
        chosen, task = np.unique(case, return_inverse=True)
        for i in chosen.tolist():
            batch.reset(np.pad(case == i, (0, batch.count - count)), i)
        encoded = self.net.encode([self.cases[i] for i in chosen])
        wish = np.zeros((count, self.acts.shape[1]), np.float32)
        for i, rows in enumerate(guides):
            if rows is not None:
                wanted = self.cases[case[i]].wanted(rows)
                wish[i, : len(wanted)] = wanted
        follows, heat = wish.any(1), np.broadcast_to(heat, count)
        steps, alive, actions = [], np.arange(count), np.zeros(batch.count, np.int64)
        while len(alive):
            seen, act = self.look(alive, case)
            q = self.net(encoded, task[alive], seen).numpy()
            values = np.full((len(alive), self.acts.shape[1]), MASKED, np.float32)
            values[seen.of, act] = q
            policy = values.argmax(1)
            warmth = np.where(self.rng.random(len(alive)) < 0.5, self.config.temperature, UNIFORM)
            warmth = np.where(self.rng.random(len(alive)) < epsilon[alive], warmth, heat[alive])
            follows &= self.rng.random(count) >= leave
            urge = wish[alive[seen.of], act] * np.where(follows[alive], 1e3, 0.0)[seen.of]
            values[seen.of, act] = q + urge + warmth[seen.of] * self.rng.gumbel(size=len(q))
            taken = values.argmax(1)
            at = np.flatnonzero(act == taken[seen.of])
            mine = Seen(np.arange(len(at)), seen.gap[at], seen.kind[at], seen.action[at], seen.place, seen.walk)
            promised = np.maximum.reduceat(q, np.flatnonzero(np.diff(seen.of, prepend=-1)))
            steps.append((alive, mine, batch.overhead[alive], np.where(taken == policy, MASKED, promised)))
            actions[:] = 0
            node, _, way = self.acts[case[alive], taken].T
            actions[alive] = node + batch.size * KEEP * (way == KEPT)
            batch.step(actions)
            alive = alive[~batch.terminated[alive]]
        overhead = np.where(batch.feasible[:count], batch.overhead[:count], np.inf)
        result = Result(case, overhead, [batch.plan_rows(i).copy() for i in range(count)])
        return result, self.targets(result, steps)

    def look(self, alive: Ints, case: Ints) -> tuple[Seen, Ints]:
        """What is seen of the valid actions of the walks ``alive``; and which of the task's actions each is."""
        batch, mine = self.batch, case[alive]
        node, gap, way = self.acts[mine].transpose(2, 0, 1)
        of, act = np.nonzero(np.take_along_axis(batch.mask[alive], np.maximum(node, 0), 1) * (way >= 0))
        node, gap, way = node[of, act], gap[of, act], way[of, act]
        action, walk = columns(batch, self.tables, alive, mine, of, gap, way)
        action = np.concatenate([action, batch.nodes[alive[of], :, node]], 1)
        shown = np.where(gap < 0, -1, self.gaps[mine[of], gap])
        return Seen(of, shown, way, action, self.bins[mine, batch.walks[alive, POSITION]], walk), act

    def targets(self, result: Result, steps: list[tuple[Any, ...]]) -> list[Episodes]:
        """Equation 5 along the walks, from their ends.

        Args:
            steps: of each, the walks that took it, what was seen of the actions, the overhead before, and what the
                policy promised where it was left (else MASKED).
        """
        count, finite = len(result.case), np.isfinite(result.overhead)
        scale = np.ones(count)
        for i in np.unique(result.case):
            costs = result.overhead[(result.case == i) & finite]
            scale[result.case == i] = max(float(np.median(costs)), LEAST) if len(costs) else 1.0
        value, after, parts = np.where(finite, 0.0, DEAD_END), self.batch.overhead[:count].copy(), []
        for alive, seen, before, promised in reversed(steps):
            value[alive] += (before - after[alive]) / scale[alive]
            parts.append((result.case[alive], seen, value[alive].astype(np.float32)))
            value[alive], after[alive] = np.maximum(value[alive], promised), before
        case, target = (np.concatenate([part[j] for part in parts]) for j in (0, 2))
        gap, kind, action, place, walk = (np.concatenate([p[1][j] for p in parts]) for j in range(1, 6))
        out = []
        for i in np.unique(case).tolist():
            at = np.flatnonzero(case == i)
            seen = Seen(np.arange(len(at)), gap[at], kind[at], action[at], place[at], walk[at])
            out.append(Episodes(i, seen, target[at]))
        return out

    def fit(self) -> float:
        """One minibatch of equation 4, with Huber loss; returns the loss."""
        c, every = self.config, [e for episodes in self.memory for e in episodes]
        drawn = self.rng.choice(len(every), min(c.batch_tasks, len(every)), replace=False)
        rows = [self.rng.integers(len(every[i].target), size=c.batch_size) for i in drawn]
        parts = [[column[at] for column in every[i].seen[1:]] for i, at in zip(drawn, rows, strict=True)]
        seen = Seen(np.arange(len(drawn) * c.batch_size), *(np.concatenate(p) for p in zip(*parts, strict=True)))
        target = np.concatenate([every[i].target[at] for i, at in zip(drawn, rows, strict=True)])
        encoded = self.net.encode([self.cases[every[i].case] for i in drawn])
        q = self.net(encoded, np.repeat(np.arange(len(drawn)), c.batch_size), seen)
        return descend(F.huber_loss(q, torch.from_numpy(target)), self.net, self.optimizer, 1.0)

    # ---------------------------------------------------------------------------------- checkpoints

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with to be of this run."""
        tasks = [[c.task.program.fingerprint, c.task.limit, c.task.mode] for c in self.cases]
        return {"config": asdict(self.config), "seed": self.seed, "tasks": tasks, "settings": self.net.settings}

    def save(self, path: Path) -> None:
        """Writes everything that the rest of the run depends on; the file appears whole or not at all."""
        memory = [[[e.case, [torch.from_numpy(a) for a in (*e.seen, e.target)]] for e in one] for one in self.memory]
        guides = [[i, overhead, torch.from_numpy(rows)] for i, (overhead, rows) in self.guides.items()]
        write_training_state(path, {
            **self._identity(), "weights": self.net.state_dict(), "optimizer": self.optimizer.state_dict(),
            "rng": json.dumps(self.rng.bit_generator.state), "order": self.order, "iteration": self.iteration,
            "memory": memory, "guides": guides,
        })  # fmt: skip

    def load(self, path: Path) -> None:
        """Continues where ``save`` was called; raises TrainingStateError where the file is none of this run."""
        state = read_training_state(path)
        must_match(path, state, self._identity())
        with restoring(path):
            self.net.load_state_dict(state["weights"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.rng.bit_generator.state = json.loads(state["rng"])
            self.order, self.iteration = state["order"], state["iteration"]
            self.guides = {i: (overhead, rows.numpy()) for i, overhead, rows in state["guides"]}
            for one in state["memory"]:
                arrays = [(case, [a.numpy() for a in all_of]) for case, all_of in one]
                self.memory.append([Episodes(case, Seen(*a[:-1]), a[-1]) for case, a in arrays])


def padded(arrays: Sequence[Ints]) -> Ints:
    """Arrays as one, filled up with -1."""
    out = np.full((len(arrays), max(len(a) for a in arrays), *arrays[0].shape[1:]), -1)
    for i, array in enumerate(arrays):
        out[i, : len(array)] = array
    return out


def fresh(cases: Sequence[Case], config: ProgramDQNConfig, seed: int) -> QNet:
    """A network that has learned nothing, its columns centred on those of the tasks."""
    torch.manual_seed(seed)
    gaps = torch.cat([case.data["gap"].x for case in cases])
    net = QNet(gaps.shape[1], cases[0].data["bin"].x.shape[1], config.width, config.layers, config.encoder)
    net.trunk.mean.copy_(gaps.mean(0))
    net.trunk.scale.copy_(gaps.std(0).clamp(min=0.05))
    return net
