"""The DQN that plans one program: Q-values that begin as the policy's log-odds and are then learned from walks.

A walk is an episode of the DQN paper's environment (envs/walk.py) with all forms of actions and the causal reward; it
takes the valid action of the highest Q-value at each step. Q is a table: a value for each action (a gap and a way to
empty it), and 0 for "do nothing". Before any walk it is what a network that was trained on other programs says
(policy_net.py, run once a program): the log-odds of the way against staying, moved to the plans that are decoded from
them (decoding.py), the fastest first (``init="pretrained"``).

The values are learned on the program itself as embeddings are in efficient active search (Hottung et al., 2022): noise
is put on them (parameter space noise, Plappert et al., 2018), and they are kept by their greedy walk. Read on in
``Trainer.step``. How this differs from the paper, and what each part is worth, is in README.md.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from agents.learned.dqn_config import DQNConfig
from agents.learned.optimisation import one_thread
from agents.learned.policy import WEIGHTS, Guided, decoded
from agents.learned.policy_net import batch_of, data_of, trained
from agents.learned.q_walk import play
from agents.learned.training import Episode
from agents.learned.training_state import must_match, read_training_state, restoring, write_training_state
from agents.planner import Rows
from envs.batch import Batch
from envs.task import COPY, EARLY, KEEP, PLAIN, Task
from simulator.compiled.encoding import BEFORE, TENSOR, way_of
from simulator.modes import KEPT, RECOMPUTED, STAYS, SWAPPED
from simulator.moves.gap_graph import UNDECIDED, GapGraph
from simulator.moves.moves import Moves
from simulator.plan import Plan

FORMS = ((PLAIN, SWAPPED), (COPY, SWAPPED), (PLAIN, RECOMPUTED), (KEEP, KEPT), (EARLY, RECOMPUTED))
CLIP = 30.0  # log-odds at most, and what an action gets that is not to be taken
NEAR, EDGE = 1.0, 0.1  # log-odds: how far they are moved to a plan; from 0, beyond which they then are at least
SCALE = 5.0  # of the noise, in log-odds: about as far as the policy's odds are from one another
NOISE, FILLS, OTHERWISE = 0.6, 0.77, 0.88  # of changes: noise; a gap stays; it leaves otherwise; else another leaves
MORE = (0.4, 0.75, 0.9)  # probability of one more change, by the walk
EACH = 512  # episodes for which there is a set of Q-values more, up to ``elites``
ANEW = 16  # of so many walks one changes the first values, not an elite's: it goes where elites do not come from theirs
MIGRATE = 16  # steps between two replacements of the worst elite by the best

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


class Elite(NamedTuple):
    """Q-values (A,), the overhead of their greedy walk (inf: a dead end), and the actions that it takes."""

    overhead: float
    values: Floats
    taken: Ints


class Trainer:
    """Learns the Q-values of one task. One ``step`` is ``num_envs`` walks.

    Attributes, of A actions, the first of which is to do nothing:
        code: (A,) what the environment calls each. gap, way: (A,) the gap (-1) that it empties, and how.
        priors: (A,) each, Q-values before any walk, of one elite after the other; none where they are drawn.
    """

    def __init__(self, task: Task, config: DQNConfig, seed: int, planner: str = "dqn") -> None:
        self.task, self.config, self.seed, self.planner = task, config, seed, planner
        self.rng = np.random.default_rng(seed)
        size, columns = len(task.graph), [(np.zeros(1, np.int64), np.full(1, -1, np.int64), np.zeros(1, np.int64))]
        for form, way in FORMS:
            nodes, gaps = (task.offloads, task.offload_gap) if way == SWAPPED else (task.removals, task.removal_gap)
            columns.append((nodes + size * form, gaps, np.full(len(gaps), way)))
        self.code, self.gap, self.way = (np.concatenate(column) for column in zip(*columns, strict=True))
        self.of_gap = [np.flatnonzero(self.gap == g) for g in range(len(task.tensor))]
        self.priors = self._priors() if config.init == "pretrained" else []
        self.batch = Batch([task], config.num_envs, "causal", actions="full", threads=1)
        self.actions, self.lengths = np.zeros((2, config.num_envs), np.int64)
        self.trace = np.zeros((config.num_envs, len(self.code) + len(task.live_bytes) + 1), np.int64)
        self.elites: list[Elite] = []
        self.best: Plan | None = None
        self.best_overhead = float("nan")
        self.episodes = 0
        self.history: list[Episode] = []

    def _priors(self) -> list[Floats]:
        """(A,) each: the policy's log-odds of each action's way against staying: moved to its fastest plan, not moved,
        and moved to its other plans."""
        task, mode = self.task, self.task.mode
        if len(self.code) == 1:
            return [np.zeros(1, np.float32)]
        one_thread()
        moves = Moves(task.program, task.limit, mode, self.config.min_bytes, 0)
        graph = GapGraph(task.program, task.machine, task.limit, moves, mode)
        index = {gap: i for i, gap in enumerate(graph.gaps)}
        mine = np.array([index.get(gap, 0) for gap in task.graph.gaps])  # those that cannot be emptied are no action's
        net = trained(WEIGHTS)
        with torch.no_grad():
            logits = net(batch_of([data_of(graph, np.full(len(graph), UNDECIDED))])).numpy()[mine]
        odds = np.clip(logits - logits[:, :1], -CLIP, CLIP)
        unmoved: Floats = np.where(self.gap < 0, 0.0, odds[self.gap, self.way]).astype(np.float32)
        found = Guided(task.engine, moves)
        decoded(net, found, mode, self.config.samples, seed=self.seed)
        moved = [self.moved(unmoved, rows) for _, rows in found.plans]
        return [*moved[:1], unmoved, *moved[1:]]

    def moved(self, values: Floats, rows: Rows) -> Floats:
        """Q-values moved to where a greedy walk takes the plan of ``rows`` as far as it can, and no further."""
        ways = {(row[TENSOR], row[BEFORE]): way_of(row) for row in rows.tolist()}
        plan = np.array([ways.get((gap.tensor, gap.before), STAYS) for gap in self.task.graph.gaps])
        taken = (self.gap >= 0) & (self.way == plan[self.gap])
        out: Floats = np.where(taken, np.maximum(values + NEAR, EDGE), np.minimum(values - NEAR, -EDGE))
        out[self.gap < 0] = 0.0
        return out.astype(np.float32)

    @property
    def done(self) -> bool:
        """Have there been enough episodes, or can none be better?"""
        return self.episodes >= self.config.episodes or self.best_overhead <= 0

    def walk(self, values: Floats) -> NDArray[np.float64]:
        """Overheads of the greedy walks of Q-values (W, A), inf in a dead end; at most ``num_envs``. What they took
        is in ``trace``, up to ``lengths``."""
        batch, count, at, resume = self.batch, len(values), 0, False
        batch.reset()
        self.lengths[:] = 0
        (work,) = batch._works
        while at >= 0:
            at = play(
                at, count, resume, self.code, values, batch._given, batch._state, work.arrays(), batch._shown,
                (self.actions, batch._nobody, batch._drawn), self.trace, self.lengths,
            )  # fmt: skip
            if at >= 0:
                batch._settle(at, at + 1, work)
                resume = True
        return np.where(batch.feasible[:count], batch.overhead[:count], np.inf)

    def step(self) -> list[Episode]:
        """Changes the elites' values and walks by them; each elite is replaced by the best that came of it, where that
        is no worse. The first walk of all is by the values before anything was learned."""
        c = self.config
        count, sets = min(c.num_envs, c.episodes - self.episodes), min(c.elites, c.episodes // EACH)
        parents = self.elites or [Elite(np.inf, self._first(i), np.zeros(0, np.int64)) for i in range(max(sets, 1))]
        of = np.arange(count) % len(parents)
        values = np.stack([parents[p].values for p in of])
        for i in range(ANEW - 1, count if self.elites and self.priors else 0, ANEW):
            values[i] = self._first(int(of[i]))
        for i in range(0 if self.elites else min(len(parents), count), count):
            self.change(values[i], parents[of[i]].taken)
        overheads = self.walk(values)
        children = [Elite(float(o), values[i], np.unique(self.trace[i, : self.lengths[i]]))
                    for i, o in enumerate(overheads)]  # fmt: skip
        first = int(overheads.argmin())
        if np.isfinite(overheads[first]) and not overheads[first] >= self.best_overhead:
            self.best, self.best_overhead = self.batch.plan(first, self.planner), float(overheads[first])
        if c.elites or not self.elites:
            found = [min([parent, *children[p :: len(parents)]][::-1], key=lambda elite: elite.overhead)
                     for p, parent in enumerate(parents)]  # fmt: skip
            self.elites = found if c.elites else children[:1]
        if len(self.history) % MIGRATE == MIGRATE - 1:
            self.elites.sort(key=lambda elite: elite.overhead)
            self.elites[-1] = self.elites[0]
        self.episodes += count
        self.task.engine.calls += count
        middle = float(np.median(overheads))
        fits = bool(np.isfinite(middle))
        self.history.append(Episode(
            self.episodes, middle if fits else float("nan"), fits, self.best_overhead, 0.0, float("nan"),
            int(self.lengths[:count].sum()), self.task.engine.calls,
        ))  # fmt: skip
        return self.history[-1:]

    def _first(self, elite: int) -> Floats:
        """Values of an elite before any walk."""
        if self.priors:
            return self.priors[elite % len(self.priors)].copy()
        return self.rng.normal(size=len(self.code)).astype(np.float32)

    def change(self, values: Floats, taken: Ints) -> None:
        """Changes the values of some gaps, in place: by noise; or so that one that the walk emptied stays, or leaves in
        another way, or that any other leaves."""
        rng, emptied = self.rng, taken[taken > 0]
        more, going = MORE[rng.integers(len(MORE))], len(self.of_gap) > 0
        while going:
            how, mine = rng.random(), self.of_gap[rng.integers(len(self.of_gap))]
            if NOISE <= how < OTHERWISE and len(emptied):
                mine = self.of_gap[self.gap[emptied[rng.integers(len(emptied))]]]
            if how < NOISE:
                values[mine] += SCALE * (rng.normal() + 0.3 * rng.normal(size=len(mine)))
            elif how < FILLS:
                values[mine] = -CLIP - rng.random()
            else:
                above = max(float(values[mine].max()), 0.0) if how < OTHERWISE else 0.0
                values[mine[rng.integers(len(mine))]] = above + rng.exponential(SCALE)
            going = rng.random() < more

    def greedy(self) -> Plan | None:
        """The plan of the greedy walk of the values that are kept; None where it ends in a dead end."""
        best = min(self.elites, key=lambda elite: elite.overhead).values if self.elites else self._first(0)
        overhead = self.walk(best[None])[0]
        return self.batch.plan(0, self.planner) if np.isfinite(overhead) else None

    def greedy_overhead(self) -> float:
        """That of the greedy walk, NaN in a dead end."""
        found = min((elite.overhead for elite in self.elites), default=np.inf)
        return found if np.isfinite(found) else float("nan")

    # ---------------------------------------------------------------------------------- checkpoints

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint must agree with to be of this run."""
        task = self.task
        return {"config": asdict(self.config), "seed": self.seed, "limit": task.limit,
                "program": task.program.fingerprint, "machine": json.dumps(task.machine.to_dict())}  # fmt: skip

    def save(self, path: Path) -> None:
        """Writes everything that the rest of the run depends on; the file appears whole or not at all."""
        write_training_state(path, {
            **self._identity(), "rng": json.dumps(self.rng.bit_generator.state), "episodes": self.episodes,
            "elites": [[e.overhead, torch.from_numpy(e.values), torch.from_numpy(e.taken)] for e in self.elites],
            "history": [list(e) for e in self.history], "calls": self.task.engine.calls,
            "best": json.dumps(self.best.to_dict()) if self.best else "", "best_overhead": self.best_overhead,
        })  # fmt: skip

    def load(self, path: Path) -> None:
        """Continues where ``save`` was called; raises TrainingStateError where the file is none of this run."""
        state = read_training_state(path)
        if isinstance(state.get("config"), dict):
            state["config"] = {**state["config"], "episodes": self.config.episodes}  # it may have more
        must_match(path, state, self._identity())
        with restoring(path):
            self.rng.bit_generator.state = json.loads(state["rng"])
            self.elites = [Elite(o, values.numpy(), taken.numpy()) for o, values, taken in state["elites"]]
            self.history = [Episode(*e) for e in state["history"]]
            self.best = Plan.from_dict(json.loads(state["best"])) if state["best"] else None
            self.episodes, self.best_overhead = state["episodes"], state["best_overhead"]
            self.task.engine.calls = state["calls"]
