"""Deep Q-learning over edits of complete plans (``GpuMemoryEdit-v1``), trained on the tasks of many programs.

DQN (Mnih et al., 2015) with double Q-learning (van Hasselt et al., 2016), dueling heads (Wang et al., 2016), n-step
returns and prioritized replay (Schaul et al., 2016), as in Rainbow (Hessel et al., 2018). Differences from DQN:

1. A rejected edit leaves the state unchanged, so one forward pass ranks up to ``tries`` edits, which are tried in this
   order until one is accepted. Each is a transition; n counts forward passes.
2. A batch is of one task, because programs differ in size; tasks alternate.
3. Two auxiliary losses on tried edits: the effect, and whether the plan improves. The second enters Q (edit_net.py).
4. Exploration is Boltzmann and ε-greedy with different parameters per walker; some walkers act randomly.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from agents.learned.checkpoint import must_match, read_training_state, read_weights, restoring, write_training_state
from agents.learned.dqn_config import Args
from agents.learned.dqn_planner import DQN as Planner, WEIGHTS
from agents.learned.edit_net import EditGraph, EditNet, edit_graph
from agents.learned.optimization import MASKED, descend, one_thread
from agents.learned.training import Episode, Trainer
from agents.planner import Rows, infeasible
from envs.edit import starts
from envs.edit.batch import EditBatch
from envs.edit.task import EditTask
from simulator import Plan, simulate
from simulator.compiled.encoding import decisions_of
from simulator.machine import Machine
from simulator.program import Program

Floats = NDArray[np.float32]
CURVE_CALLS = 200  # simulator calls of the greedy policy per point of the learning curve


class Observation(NamedTuple):
    """States of B walkers of one task: gaps (B, G, …), bins (B, BINS, …), plan (B, …), edits (B, M, …)."""

    gaps: NDArray[Any]
    bins: NDArray[Any]
    plan: Floats
    edits: NDArray[Any]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns the network's inputs."""
        gaps, bins, plan = (torch.from_numpy(np.asarray(x, np.float32)) for x in self[:3])
        return gaps, bins, plan, torch.from_numpy(self.edits.astype(np.int64))


class TaskWalkers:
    """Walkers of one task, kept across training iterations."""

    def __init__(self, task: EditTask, args: Args, reference: float, rng: np.random.Generator) -> None:
        self.task = task
        self.args = args
        self.rng = rng
        self.graph = edit_graph(task)
        self.batch = EditBatch(
            [task],
            args.walkers,
            args.neighbors,
            budget=(args.least_calls, args.most_calls),
            reward="log",
            shaping=args.shaping,
            reference=[reference],
        )
        for i in range(args.walkers):
            self.batch.seed(i, int(rng.integers(2**31)))
        fraction = np.linspace(0, 1, args.walkers)
        self.temperature = np.exp(np.interp(fraction, (0, 1), np.log((args.coldest, args.hottest))))
        self.epsilon = np.where(
            fraction > 1 - args.uniform, 1.0, np.interp(fraction[::-1], (0, 1), (args.least_epsilon, args.most_epsilon))
        )
        self.best = Plan()
        self.best_overhead = float("inf")
        self.begin(np.ones(args.walkers, np.bool_))
        self.update_best()

    def begin(self, mask: NDArray[np.bool_]) -> None:
        """Starts episodes of the walkers in ``mask`` from randomly drawn start plans."""
        for i in np.flatnonzero(mask):
            walker_mask = np.zeros_like(mask)
            walker_mask[i] = True
            self.batch.reset(walker_mask, 0, int(self.rng.integers(len(self.task.starts))))

    def update_best(self) -> None:
        """Updates the best plan so far."""
        i = int(self.batch.best_overhead.argmin())
        if self.batch.best_overhead[i] < self.best_overhead:
            self.best, self.best_overhead = self.batch.best_plan(i, "dqn"), float(self.batch.best_overhead[i])

    def state(self) -> dict[str, Any]:
        """Returns the walkers' state for ``restore``."""
        batch = {name: torch.from_numpy(value.copy()) for name, value in self.batch.state().items()}
        return {"batch": batch, "best": json.dumps(self.best.to_dict()), "best_overhead": self.best_overhead}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what ``state`` returned."""
        self.batch.restore({name: value.numpy() for name, value in state["batch"].items()})
        self.best = Plan.from_dict(json.loads(state["best"]))
        self.best_overhead = state["best_overhead"]

    def observe(self) -> Observation:
        """Returns a copy of the current observations."""
        batch = self.batch
        return Observation(
            batch.gaps.astype(np.float16),
            batch.bin_state.astype(np.float16),
            batch.plan.copy(),
            batch.edits.astype(np.int16),
        )

    def order(self, q: Floats) -> NDArray[np.int64]:
        """Returns the edits in the order in which the exploring policies try them, (W, tries). ``q``: (W, M)."""
        z = q / self.temperature[:, None] + self.rng.gumbel(size=q.shape)
        random = self.rng.random(len(q)) < self.epsilon
        z[random] = self.rng.gumbel(size=q.shape)[random]
        z[q <= MASKED] = -np.inf
        order: NDArray[np.int64] = np.argsort(-z, axis=1)[:, : self.args.tries]
        return order


class Rollout:
    """``passes`` + n - 1 states of the walkers of a task, with the tried edits and their returns.

    Attributes, for T = ``passes`` states, W walkers and K tries:
        order, returns, discount, effects: (T, W, K).
        tried: bool (T, W, K).
        observed: T + n states.
        priority: (T * W,).
    """

    ARRAYS = "order", "effects", "tried", "returns", "discount", "priority"
    order: NDArray[np.int64]
    effects: Floats
    tried: NDArray[np.bool_]
    returns: Floats
    discount: Floats
    priority: Floats

    def __init__(
        self,
        graph: EditGraph,
        observed: list[Observation],
        order: NDArray[np.int64],
        rewards: Floats,
        effects: Floats,
        counts: NDArray[np.int64],
        ends: NDArray[np.bool_],
        args: Args,
    ) -> None:
        n = args.n_step
        gamma = args.gamma
        length = len(order) - n + 1
        tries = np.arange(order.shape[2])
        tried = tries < counts[:, :, None]
        tail = np.zeros((*counts.shape, len(tries) + 1), np.float32)  # discounted rewards from a try to its pass's end
        for k in tries[::-1]:
            tail[:, :, k] = np.where(tried[:, :, k], rewards[:, :, k] + gamma * tail[:, :, k + 1], 0)
        future = np.zeros((length, counts.shape[1]))
        alive = 1.0 - ends[:length]
        calls = np.zeros(counts[:length].shape)
        for u in range(1, n):
            future += gamma**calls * alive * tail[u : u + length, :, 0]
            calls += counts[u : u + length]
            alive = alive * (1.0 - ends[u : u + length])
        to_end = gamma ** np.maximum(counts[:length, :, None] - tries, 0)
        self.graph = graph
        self.args = args
        self.observed = Observation(*(np.stack(x) for x in zip(*observed, strict=True)))
        self.order = order[:length]
        self.effects = effects[:length]
        self.tried = tried[:length]
        self.returns = (tail[:length, :, :-1] + to_end * future[:, :, None]).astype(np.float32)
        self.discount = (to_end * (gamma**calls * alive)[:, :, None]).astype(np.float32)
        self.priority = (np.abs(self.returns) * self.tried).max(2).ravel() + 0.02

    def state(self) -> dict[str, Any]:
        """Returns the arrays for ``restored``."""
        observed = [torch.from_numpy(value) for value in self.observed]
        return {"observed": observed} | {name: torch.from_numpy(getattr(self, name)) for name in self.ARRAYS}

    @classmethod
    def restored(cls, graph: EditGraph, args: Args, state: dict[str, Any]) -> Rollout:
        """Returns the rollout whose ``state`` is given."""
        rollout = cls.__new__(cls)
        rollout.graph = graph
        rollout.args = args
        rollout.observed = Observation(*(value.numpy() for value in state["observed"]))
        for name in cls.ARRAYS:
            setattr(rollout, name, state[name].numpy())
        return rollout

    def sample(self, rng: np.random.Generator) -> tuple[NDArray[np.int64], Observation, Observation, dict[str, Tensor]]:
        """Draws a batch of states by priority.

        Returns:
            Positions of the states, the states, the states n passes later, and tensors of the tried edits.
        """
        p = self.priority**self.args.priority_exponent
        p /= p.sum()
        index = rng.choice(len(p), self.args.batch_size, p=p)
        weight = (len(p) * p[index]) ** -self.args.importance_exponent
        t, w = np.divmod(index, self.returns.shape[1])
        states, next_states = (Observation(*(x[u, w] for x in self.observed)) for u in (t, t + self.args.n_step))
        tries = {
            "edit": self.order[t, w],
            "return": self.returns[t, w],
            "discount": self.discount[t, w],
            "effect": self.effects[t, w],
            "weight": (self.tried[t, w] * (weight / weight.max())[:, None]).astype(np.float32),
        }
        return index, states, next_states, {key: torch.from_numpy(value) for key, value in tries.items()}


class DQN:
    """Trainer of a Q-network over edits on several tasks.

    Args:
        tasks: tasks with start plans.
        references: overhead in points of each task, above which the logarithmic reward is measured.
        args: hyperparameters.
        seed: random seed.

    Attributes:
        net: the Q-network.
        history: one row per iteration (``iterate``).
    """

    def __init__(self, tasks: Sequence[EditTask], references: Sequence[float], args: Args, seed: int = 0) -> None:
        one_thread()
        torch.manual_seed(seed)
        self.args = args
        self.seed = seed
        self.rng = np.random.default_rng(seed)
        self.tasks = list(tasks)
        self.references = list(references)
        self.net = self._network()
        self.target = EditNet(**self.net.settings)
        self.target.load_state_dict(self.net.state_dict())
        self.optimizer = torch.optim.AdamW(self.net.parameters(), args.learning_rate, weight_decay=args.weight_decay)
        self.walkers: dict[int, TaskWalkers] = {}
        self.replay: list[Rollout] = []
        self.history: list[dict[str, float]] = []
        self.updates = self.calls = 0

    def _network(self) -> EditNet:
        if self.args.init == "pretrained":
            return read_weights(WEIGHTS[self.args.message_passing], EditNet, "the DQN")
        static = torch.from_numpy(np.concatenate([task.static for task in self.tasks]))
        rounds = 2 if self.args.message_passing else 0  # of structure2vec
        net = EditNet(static.shape[1], self.tasks[0].static_bins.shape[1], self.args.width, rounds)
        net.mean.copy_(static.mean(0))
        net.scale.copy_(static.std(0, unbiased=False).clamp(min=0.05))
        return net

    def collect(self, walk: TaskWalkers) -> tuple[Rollout, dict[str, float]]:
        """Collects a rollout of ``passes`` forward passes with the exploring policies, and its statistics."""
        args = self.args
        batch = walk.batch
        length = args.passes + args.n_step - 1
        count = args.walkers
        shape = length, count, args.tries
        order = np.zeros(shape, np.int64)
        rewards = np.zeros(shape, np.float32)
        effects = np.zeros(shape, np.float32)
        counts = np.zeros(shape[:2], np.int64)
        episode_ends = np.zeros(shape[:2], np.bool_)
        observed = []
        hits = np.zeros(count)
        gain = np.zeros(count)
        final_overheads = list[float]()
        static_parts = self.net.static_parts(walk.graph)
        for t in range(length):
            observed.append(walk.observe())
            gaps, bins, plan, edits = observed[-1].tensors()
            h, plan_state = self.net.encode(walk.graph, gaps, bins, plan, static_parts)
            order[t] = walk.order(self.net.score(h, plan_state, edits)[0].numpy())
            valid = np.take_along_axis(batch.mask, order[t], 1) > 0
            active = np.ones(count, np.bool_)
            for k in range(args.tries):
                active &= valid[:, k] if k else True
                if not active.any():
                    break
                old_overhead = batch.best_overhead.copy()
                batch.step(order[t, :, k], active)
                rewards[t, active, k] = batch.rewards[active]
                counts[t, active] = k + 1
                effects[t, active, k] = batch.effects()[active]
                hits += active & (batch.effect_ns < 0)
                gain += np.where(active, old_overhead - batch.best_overhead, 0)
                episode_ends[t] |= active & batch.has_ended
                active &= ~(batch.accepted | batch.has_ended)
            final_overheads += batch.best_overhead[episode_ends[t]].tolist()
            walk.update_best()
            walk.begin(episode_ends[t])
            batch.redraw(~episode_ends[t])
        observed.append(walk.observe())
        trials = counts.sum(0)
        self.calls += int(trials.sum())
        greedy = walk.epsilon < 1
        row = {
            "hits": hits[greedy].sum() / trials[greedy].sum(),
            "reward": float(rewards.sum() / trials.sum()),
            "gained": 1e5 * gain[greedy].sum() / trials[greedy].sum(),
        }
        if not greedy.all():
            row |= {
                "hits_random": hits[~greedy].sum() / trials[~greedy].sum(),
                "gained_random": 1e5 * gain[~greedy].sum() / trials[~greedy].sum(),
            }
        if final_overheads:
            row["overhead"] = float(np.mean(final_overheads))
        return Rollout(walk.graph, observed, order, rewards, effects, counts, episode_ends, args), row

    def update(self, rollout: Rollout) -> dict[str, float]:
        """Performs one gradient step on a batch of a rollout and updates its priorities; returns the losses."""
        index, states, next_states, tries = rollout.sample(self.rng)
        with torch.no_grad():
            td_target = tries["return"]
            if self.args.gamma > 0:
                next_edits = self.net(rollout.graph, *next_states.tensors())[0].argmax(1, keepdim=True)
                next_q = self.target(rollout.graph, *next_states.tensors())[0].gather(1, next_edits)
                td_target = td_target + tries["discount"] * next_q.clamp(min=-5)
        q, effect, improves = self.net(rollout.graph, *states.tensors())
        tried_q = q.gather(1, tries["edit"]).clamp(min=-5)
        weight = tries["weight"]
        mask = tries["weight"] > 0
        loss = (weight * F.smooth_l1_loss(10 * tried_q, 10 * td_target, reduction="none") / 10).sum() / weight.sum()
        observed_effects = tries["effect"][mask]
        aux_loss = F.smooth_l1_loss(effect.gather(1, tries["edit"])[mask], observed_effects)
        aux_loss = aux_loss + F.binary_cross_entropy_with_logits(
            improves.gather(1, tries["edit"])[mask], (observed_effects < -0.003).float()
        )
        descend(loss + self.args.auxiliary * aux_loss, self.net, self.optimizer, 1.0)
        self.updates += 1
        if self.updates % self.args.target_every == 0:
            self.target.load_state_dict(self.net.state_dict())
        error = (tried_q.detach() - td_target).abs() * mask
        rollout.priority[index] = error.max(1).values.numpy() + 0.02
        return {"loss": float(loss.detach()), "side": float(aux_loss.detach()), "td": float(error.sum() / mask.sum())}

    def iterate(self) -> dict[str, float]:
        """Collects a rollout of one task and updates the network.

        Returns:
            Hit rates, reward and gain per call, losses, and calls.
        """
        args = self.args
        rng = self.rng
        progress = len(self.history) / args.iterations
        for group in self.optimizer.param_groups:
            group["lr"] = args.learning_rate * (0.05 + 0.95 * (1 - min(progress, 1.0)))
        k = int(rng.integers(len(self.tasks)))
        if k not in self.walkers:
            self.walkers[k] = TaskWalkers(self.tasks[k], args, self.references[k], rng)
        with torch.no_grad():
            rollout, row = self.collect(self.walkers[k])
        self.replay.append(rollout)
        if len(self.replay) > args.buffer_size:
            self.replay.pop(int(rng.integers(len(self.replay) // 2)))
        losses = []
        if len(self.replay) >= args.learning_starts:
            total = np.array([entry.priority.sum() for entry in self.replay])
            for u in range(args.updates):
                index = -1 if u == 0 else int(rng.choice(len(total), p=total / total.sum()))
                losses.append(self.update(self.replay[index]))
        row |= {key: float(np.mean([entry[key] for entry in losses])) for key in (losses[0] if losses else {})}
        self.history.append({key: float(value) for key, value in row.items()} | {"calls": self.calls, "task": k})
        return self.history[-1]

    def train(self, on_iteration: Callable[[DQN], None] = lambda _: None) -> EditNet:
        """Runs the remaining iterations and returns the network."""
        while len(self.history) < self.args.iterations:
            self.iterate()
            on_iteration(self)
        return self.net.eval()

    def state(self) -> dict[str, Any]:
        """Returns the state for ``restore``, without the replay buffer and the walkers, which start empty after it."""
        return {
            "net": self.net.state_dict(),
            "target": self.target.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "history": self.history,
            "updates": self.updates,
            "calls": self.calls,
        }

    def replay_state(self) -> dict[str, Any]:
        """Returns replay buffer, walkers and random state, without which a resumed training takes another course."""
        task_of = {id(walk.graph): k for k, walk in self.walkers.items()}
        return {
            "walkers": {k: walk.state() for k, walk in self.walkers.items()},
            "replay": [{"task": task_of[id(rollout.graph)], **rollout.state()} for rollout in self.replay],
            "random": json.dumps(self.rng.bit_generator.state),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the training state that ``state`` returned, and that of ``replay_state`` if it is part of it."""
        self.net.load_state_dict(state["net"])
        self.target.load_state_dict(state["target"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.history = state["history"]
        self.updates = state["updates"]
        self.calls = state["calls"]
        self.rng = np.random.default_rng([self.seed, len(self.history)])
        if "replay" not in state:
            return
        for k, walkers in state["walkers"].items():
            self.walkers[k] = TaskWalkers(self.tasks[k], self.args, self.references[k], self.rng)
            self.walkers[k].restore(walkers)
        self.replay = [Rollout.restored(self.walkers[row["task"]].graph, self.args, row) for row in state["replay"]]
        self.rng.bit_generator.state = json.loads(state["random"])

    def save(self, path: Path, **entries: Any) -> None:
        """Writes the training state to a file for ``load``, with further entries."""
        write_training_state(path, {"args": asdict(self.args), "seed": self.seed, **self.state(), **entries})

    def load(self, path: Path, **identity: Any) -> dict[str, Any]:
        """Restores the training state of a file and returns all its entries.

        Args:
            path: file of ``save``.
            identity: further entries that a file of the same run has.

        Raises:
            TrainingStateError: if the file belongs to another run.
        """
        state = read_training_state(path)
        must_match(path, state, {"args": asdict(self.args), "seed": self.seed, **identity})
        with restoring(path):
            self.restore(state)
        return state


class FineTuning(Trainer):
    """Trains on one task. The reward's reference is the ideal time, because the floor is unknown.

    Raises:
        Infeasible: if no start plan fits the limit.
        FormatError: if the pretrained weights cannot be read.
    """

    def __init__(self, program: Program, machine: Machine, limit: int, args: Args, seed: int) -> None:
        super().__init__(program, machine, limit, args, seed, "iterations", "episodes")
        try:
            self.task = EditTask(program, machine, limit, args.mode, args.min_bytes, starts.policy)
        except ValueError:
            raise infeasible(Planner(min_bytes=args.min_bytes), program, limit, None) from None
        self.dqn = DQN([self.task], [0.0], args, seed)
        start = self.task.starts[0]
        self.best = self._plan_of(start.rows)
        self.best_overhead = start.iteration_ns / self.task.ideal_ns - 1

    @property
    def simulator_calls(self) -> int:
        """Simulator calls of start plans and walks."""
        return self.task.start_calls + self.dqn.calls

    @property
    def done(self) -> bool:
        """Whether all iterations are done or the best plan has no overhead."""
        return super().done or self.best_overhead <= 0

    def step(self) -> list[Episode]:
        """Runs one iteration."""
        calls_before = self.dqn.calls
        row = self.dqn.iterate()
        walk = self.dqn.walkers[0]
        if walk.best_overhead < self.best_overhead:
            self.best = walk.best
            self.best_overhead = walk.best_overhead
        self.history.append(
            Episode(
                len(self.history) + 1,
                row.get("overhead", math.nan),
                True,
                self.best_overhead,
                float(walk.epsilon.mean()),
                row.get("loss", math.nan),
                self.dqn.calls - calls_before,
                self.simulator_calls,
            )
        )
        return self.history[-1:]

    def _plan_of(self, rows: Rows) -> Plan:
        return Plan.of(self.program, decisions_of(rows), "dqn", self.limit, self.machine.name)

    def _greedy(self, calls: int) -> Plan:
        planner = Planner(calls, self.config.mode, min_bytes=self.config.min_bytes, seed=self.seed)
        saved_calls = self.task.engine.calls
        rows = planner.search(self.task, self.dqn.net.eval(), max(calls - self.task.start_calls - 1, 0))
        self.task.engine.calls = saved_calls
        return self._plan_of(rows)

    def greedy(self) -> Plan:
        """Returns the greedy policy's plan with ``greedy_calls`` simulator calls, including the start plans'."""
        return self._greedy(self.config.greedy_calls)

    def greedy_overhead(self) -> float:
        """Returns the greedy policy's overhead after CURVE_CALLS calls."""
        plan = self._greedy(self.task.start_calls + 1 + CURVE_CALLS)
        return simulate(self.program, plan, self.machine, self.limit).overhead

    def state(self) -> dict[str, Any]:
        """Returns the training state without the replay buffer and the walkers."""
        return self.dqn.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Restores the training state that ``state`` returned."""
        self.dqn.restore(state)
