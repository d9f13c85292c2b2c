"""An agent that carries over between limits, modes and networks instead of starting anew.

``Agent.sweep`` plans one program under many limits, from the loosest to the tightest and then back up. Nothing is
spent at a limit where a carried plan has no overhead. What carries over, after section 4.4.2 of the DQN paper ("train
a DQN on a small graph and fine-tune on a large graph") and beyond it (reasons, and what each is worth, in README.md):

1. Weights: one network goes through all limits, modes and programs; the experience buffer begins anew at each.
2. Walks: plans of the limit before, and of another sweep at this limit, are repeated as walks and become elites.
3. Refinement: local search (local_search.py) improves the best walk and the carried plans; the network learns from it.
4. Envelope: on the way back up a faster plan of a tighter limit replaces a slower one; overheads never fall.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from agents.learned.dqn import Trainer, check_reachable
from agents.learned.dqn_config import DQNConfig
from agents.planner import Infeasible, Rows
from agents.search.local_search import Floats, Moves, anneal
from envs.graph import NOTHING, OFFLOAD, REMOVE
from envs.task import Task
from envs.walk import Walk
from simulator import Engine, Machine, Plan, Program
from simulator.compiled.encoding import AFTER, BEFORE, NEVER, RECOMPUTE, decisions_of, rows_of
from simulator.modes import KEPT, RECOMPUTED, SWAPPED

HOT, COLD = (1e-2, 3e-3, 1e-3), 1e-5  # temperatures of the refinement's runs, of the ideal time
EXPLORE = 0.2  # weight of a gap and way that no elite has; one that all have weighs 1 more


@dataclass(frozen=True)
class TransferConfig:
    """How much is spent at each limit.

    Attributes:
        first: episodes at the first limit that asks for any.
        episodes: episodes at every other.
        epsilon: probability of a random action that these begin with.
        kernels, most: the refinement makes as many simulator calls as simulate ``kernels`` kernels, at most ``most``.
        updates: minibatches that the network learns from the refined plan.
        visits: nodes that the network sees at a limit, over all states, before the episodes end early: a state of a
            program with thousands of tensors costs as much as a hundred of a small one.
    """

    first: int = 48
    episodes: int = 8
    epsilon: float = 0.3
    kernels: int = 60_000_000
    most: int = 100_000
    updates: int = 20
    visits: int = 3_000_000

    def __post_init__(self) -> None:
        for name in ("first", "episodes", "updates", "visits"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: expected at least 0, got {getattr(self, name)}")
        for name in ("kernels", "most"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not 0 <= self.epsilon <= 1:
            raise ValueError(f"epsilon: expected 0 to 1, got {self.epsilon}")


class LimitResult(NamedTuple):
    """What an agent found at one limit."""

    limit: int
    plan: Plan | None  # None: none that fits. Its own limit may be a tighter one (4)
    overhead: float  # of the plan, under its own limit; nan without one, as the next two
    walked: float  # of the best walk, before it was refined
    greedy: float  # of the network's own walk
    simulator_calls: int

    def or_better(self, other: LimitResult) -> LimitResult:
        """With the plan of ``other``, which fits the limit, where that is faster."""
        if other.plan is None or self.overhead <= other.overhead:
            return self
        return self._replace(plan=other.plan, overhead=other.overhead)


class Agent:
    """One network, and the weights it has learned so far.

    Args:
        config: its ``episodes``, ``epsilon_start`` and ``mode`` are replaced at every limit.
    """

    def __init__(self, config: DQNConfig, transfer: TransferConfig, seed: int = 0):
        self.config, self.transfer, self.seed = config, transfer, seed
        self.weights: dict[str, Any] | None = None  # a state_dict

    def sweep(
        self, program: Program, machine: Machine, limits: Iterable[int], mode: str, also: Sequence[LimitResult] = ()
    ) -> list[LimitResult]:
        """Plans a program under many limits (bytes).

        Args:
            also: results of a sweep of the same program in a mode that this one includes.

        Returns:
            one per limit, the loosest first; the overheads never fall.
        """
        found: list[LimitResult] = []
        for limit in sorted(set(limits), reverse=True):
            given = [f for f in also if f.limit == limit]
            plans = [f.plan for f in (*found[-1:], *given) if f.plan is not None]
            found.append(self._at(program, machine, limit, mode, plans))
            for other in given:
                found[-1] = found[-1].or_better(other)
        for i in range(len(found) - 2, -1, -1):
            found[i] = self._with_tighter(program, machine, mode, found[i], found[i + 1])
        return found

    def _with_tighter(
        self, program: Program, machine: Machine, mode: str, own: LimitResult, tighter: LimitResult
    ) -> LimitResult:
        """Where the plan of a tighter limit is faster: that plan, refined within the limit."""
        if tighter.plan is None or own.overhead <= tighter.overhead:
            return own
        engine = Engine(program, machine, own.limit)
        moves = Moves(program, own.limit, mode, self.config.min_bytes, self.seed)
        rows, ns = rows_of(tighter.plan.decisions), round((1 + tighter.overhead) * program.ideal_ns)
        rows, ns = anneal(moves, engine, rows, ns, self._calls(program) // 4, HOT[-1], COLD, self.seed)
        own = own._replace(simulator_calls=own.simulator_calls + engine.calls)
        refined = own._replace(plan=self._plan(program, machine, own.limit, rows), overhead=ns / program.ideal_ns - 1)
        return own.or_better(tighter).or_better(refined)

    def _at(self, program: Program, machine: Machine, limit: int, mode: str, carried: list[Plan]) -> LimitResult:
        """One limit: learns, refines, learns from the refined plan."""
        transfer, fresh = self.transfer, self.weights is None
        episodes, epsilon = (transfer.first, 1.0) if fresh else (transfer.episodes, transfer.epsilon)
        config = replace(self.config, mode=mode, episodes=episodes, epsilon_start=epsilon)
        task = Task(program, machine, limit, config.min_bytes, mode)
        nothing = LimitResult(limit, None, math.nan, math.nan, math.nan, task.engine.calls)
        try:
            check_reachable(task, config.min_bytes)
        except Infeasible:
            return nothing
        trainer = Trainer(task, config, self.seed)
        if self.weights is not None:
            trainer.q.load_state_dict(self.weights)
            trainer.target.load_state_dict(self.weights)
        starts = [rows_of(plan.decisions) for plan in carried]
        for start in starts:
            trainer.search.repeat(actions_of(task, start))
        if not starts:
            trainer.search.repeat([])
        visits = 0
        while len(trainer.history) < episodes and visits < transfer.visits and not trainer.search.best_overhead <= 0:
            trainer.step()
            visits += len(trainer.walks) * len(task.graph)
        # The policy of another limit may end in dead ends only: its mutations are more random.
        for _ in range(transfer.first):
            if trainer.best is not None:
                break
            trainer.search.repeat([])
        if trainer.best is not None:
            starts.append(rows_of(trainer.best.decisions))
        walked = trainer.search.best_overhead
        rows, ns = self._refine(trainer, starts)
        if rows is None:
            return nothing._replace(simulator_calls=task.engine.calls)
        if not trainer.search.best_overhead <= 0:
            trainer.search.repeat(actions_of(task, rows))
            if trainer.buffer.size >= config.batch_size:
                for _ in range(transfer.updates):
                    trainer.update()
            self.weights = trainer.q.state_dict()
        alone = trainer.greedy()
        greedy_ns = task.engine.score(rows_of(alone.decisions)).iteration_ns if alone is not None else float("nan")
        return LimitResult(
            limit, self._plan(program, machine, limit, rows), ns / task.ideal_ns - 1, walked,
            greedy_ns / task.ideal_ns - 1, task.engine.calls,
        )  # fmt: skip

    def _calls(self, program: Program) -> int:
        return min(self.transfer.kernels // max(len(program.kernels), 1), self.transfer.most)

    def _plan(self, program: Program, machine: Machine, limit: int, rows: Rows) -> Plan:
        return Plan.of(program, decisions_of(rows), "dqn", limit, machine.name)

    def _refine(self, trainer: Trainer, starts: list[Rows]) -> tuple[Rows | None, int]:
        """Rows and iteration time of the best plan near the ``starts``; None, NEVER where none fits."""
        task, calls = trainer.task, self._calls(trainer.task.program)
        program, engine = task.program, task.engine
        scored = sorted(((engine.score(rows), rows) for rows in starts), key=lambda s: s[0].iteration_ns)
        if not scored:
            return None, NEVER
        best, best_ns = scored[0][1], scored[0][0].iteration_ns
        weights = self._weights(trainer)

        def run(start: Rows, start_ns: int, calls: int, hot: float, seed: int) -> None:
            nonlocal best, best_ns
            if best_ns > program.ideal_ns:
                moves = Moves(program, task.limit, task.mode, self.config.min_bytes, seed, weights)
                rows, ns = anneal(moves, engine, start, start_ns, calls, hot, COLD, seed)
                if ns < best_ns:
                    best, best_ns = rows, ns

        for score, rows in scored:
            run(rows, score.iteration_ns, calls // 2 // len(scored), HOT[0], self.seed)
        for i, hot in enumerate(HOT[1:], 1):
            run(best, best_ns, calls // 2 // (len(HOT) - 1), hot, self.seed + i)
        return (best if best_ns < NEVER else None), best_ns

    def _weights(self, trainer: Trainer) -> Floats:
        """float64[m, 4] for ``Moves``: how many of the elites empty each of ``program.gaps`` in each way."""
        graph, gaps = trainer.task.graph, trainer.task.program.gaps(self.config.min_bytes)
        at = {gap: i for i, gap in enumerate(gaps)}
        weights = np.full((len(gaps), KEPT + 1), EXPLORE)
        for _, nodes in trainer.search.elites:
            for node in nodes:
                if graph.action_kind[node] != NOTHING:
                    ways = [SWAPPED] if graph.action_kind[node] == OFFLOAD else [RECOMPUTED, KEPT]
                    weights[at[graph.gaps[graph.action_gap[node]]], ways] += 1 / len(trainer.search.elites)
        return weights


def actions_of(task: Task, rows: Rows) -> list[int]:
    """The nodes of a walk that makes the plan of ``rows`` where the environment's actions allow it: each action as
    soon as it is valid, and "do nothing" while none is."""
    graph = task.graph
    node_of = {(int(graph.action_kind[i]), graph.gaps[graph.action_gap[i]][::2]): i
               for i in np.flatnonzero(graph.action_gap >= 0).tolist()}  # fmt: skip
    ordered = sorted(
        rows.tolist(), key=lambda row: (row[AFTER] < row[BEFORE], row[AFTER])
    )  # those that wrap are open first
    wanted = [(REMOVE if kind == RECOMPUTE else OFFLOAD, (t, before)) for kind, t, _, before, *_ in ordered]
    todo = [node_of[key] for key in wanted if key in node_of]
    walk, nodes = Walk(task), []
    while not walk.done:
        mask = walk.mask()
        node = next((i for i in todo if mask[i]), 0)
        if not mask[node]:
            break  # the limit is tighter than the plan's
        if node:
            todo.remove(node)
        nodes.append(node)
        walk.step(node)
    return nodes
