"""Mutation search: walks through the environment (envs/walk.py) that repeat one of the best with random changes.

The environment is deterministic, so that what is repeated stays good, and a change explores near it, as Go-Explore
does. A walk repeats the valid actions of an elite in their order. At each step it leaves them with probability
``rate``: it takes an action drawn by the proposals, half of the time in the place of the elite's. Where the result is
no worse it takes that elite's place; every ``MIGRATE`` mutations the best elite takes the worst one's. Of the first
walks, and of one in ``FRESH`` later, every action is drawn. Proposals:

1. "uniform": every valid action alike.
2. "belady": nine times in ten with weight exp(time of next use / ideal time / ``temperature``), Belady's rule softened.
3. Any callable: the DQN's (agents/learned/dqn.py), whose training makes these mutations, asks its network, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from agents.planner import MIB, Candidates, PlannerInfo, Rows, check_budget, finish, infeasible
from agents.search.in_time import in_time
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.modes import check_mode, least_residency
from simulator.plan import Plan
from simulator.program import Program

if TYPE_CHECKING:  # it imports Gymnasium
    from envs.task import Task
    from envs.walk import Walk

CALLS = 20_000
FIRST = 8  # walks before the mutations
FRESH = 40  # walks of which one repeats nothing: about as many as between two of the DQN's own
BY_RULE = 0.9  # share of the draws that follow Belady's rule
MIGRATE = 400  # mutations between two replacements of the worst elite by the best
NOTED = 0.2  # share of the mutations that are noted: they are much alike


class Draws:
    """Draws a valid action: the later its tensor is next used, the likelier; uniformly without a ``temperature``."""

    def __init__(self, task: Task, rng: np.random.Generator, temperature: float | None) -> None:
        self.rng, self.temperature = rng, temperature
        gap = task.graph.action_gap
        self.next_use = np.where(gap >= 0, np.append(task.start_ns[task.before], 0)[gap] / task.ideal_ns, 0.0)  # (N,)

    def among(self, valid: NDArray[np.int64]) -> int:
        """An index into the ``valid`` nodes."""
        by_rule = self.rng.random() < BY_RULE
        weight = 1 / self.temperature if by_rule and self.temperature is not None else 0.0
        next_use = self.next_use[valid % len(self.next_use)]  # of the node, whatever the form
        return int((weight * next_use + self.rng.gumbel(size=len(valid))).argmax())

    def __call__(self, walk: Walk) -> int:
        """A valid node."""
        valid = np.flatnonzero(walk.mask())
        return int(valid[self.among(valid)])


class Mutations:
    """The best walks of a task, and those that repeat them with changes.

    Args:
        walk: it makes all of them.
        propose: the node that a changed step takes, or one where there is nothing to repeat.
        keep: how many elites.
        rate: probability that a mutation leaves its elite at a step.
        note: takes a step of the walk in the place of ``Walk.step``, in ``NOTED`` of the mutations and in ``repeat``.
        spent: ends a walk before its time.
    """

    def __init__(
        self, walk: Walk, rng: np.random.Generator, propose: Callable[[Walk], int], keep: int, rate: float,
        note: Callable[[Walk, int], Any] | None = None, spent: Callable[[], bool] = lambda: False,
    ) -> None:  # fmt: skip
        self.walk, self.rng, self.propose, self.keep, self.rate = walk, rng, propose, keep, rate
        self.note, self.spent = note, spent
        self.elites: list[tuple[float, list[int]]] = []  # overhead, nodes; the best first
        self.mutated = 0
        self.best: Rows | None = None
        self.best_overhead = float("nan")

    def repeat(self, plan: list[int]) -> Walk:
        """A walk that takes the valid actions of ``plan`` in their order, and goes on by the proposals where they end.

        It competes with the elites. The returned walk is valid until the next one.
        """
        self.offer(self.walk, self._follow(plan, np.zeros(1, np.bool_), self.note is not None))
        return self.walk

    def mutate(self) -> None:
        """Repeats an elite with random changes."""
        self.mutated += 1
        if self.mutated % MIGRATE == 0:
            self.elites[-1] = self.elites[0]
        which = int(self.rng.integers(len(self.elites)))
        overhead, plan = self.elites[which]
        leaves = self.rng.random(4 * len(plan) + 1) < self.rate
        nodes = self._follow(plan, leaves, self.note is not None and self.rng.random() < NOTED)
        if fits(self.walk) and self.walk.overhead <= overhead:
            self.elites[which] = (self.walk.overhead, nodes)
        self._compare(self.walk)

    def offer(self, walk: Walk, nodes: list[int]) -> None:
        """A walk that took these ``nodes`` becomes an elite if it is among the best."""
        if fits(walk):
            self.elites.append((walk.overhead, nodes))
        self._compare(walk)
        del self.elites[self.keep :]

    def _compare(self, walk: Walk) -> None:
        """Keeps the plan if no earlier one was as good."""
        if fits(walk) and not walk.overhead >= self.best_overhead:  # the first one compares with nan
            self.best, self.best_overhead = walk.rows.copy(), walk.overhead
        self.elites.sort(key=lambda elite: elite[0])

    def _follow(self, plan: list[int], leaves: NDArray[np.bool_], noted: bool) -> list[int]:
        """Repeats ``plan``, except at the steps where ``leaves`` is true; returns the nodes it took."""
        walk = self.walk
        walk.reset()
        at = 0
        nodes: list[int] = []
        while not walk.done and not self.spent():
            mask = walk.mask()
            node = None
            if not leaves[min(len(nodes), len(leaves) - 1)]:
                while at < len(plan) and not mask[plan[at]]:
                    at += 1
                if at < len(plan):
                    node = plan[at]
                    at += 1
            elif self.rng.random() < 0.5:
                at += 1  # skip one
            if node is None:
                node = self.propose(walk)
            nodes.append(node)
            if noted and self.note is not None:
                self.note(walk, node)
            else:
                walk.step(node)
        return nodes


def fits(walk: Walk) -> bool:
    """Has it ended with a plan?"""
    return walk.done and not walk.dead_end


class Mutation:
    """``FIRST`` walks by the proposals, then mutations of the best; one walk in ``FRESH`` is by the proposals again.

    Args:
        calls: simulator calls, the final check included; None: ``CALLS``, or as many as fit into ``seconds``.
        seconds: of wall-clock time. With them the plan depends on the computer.
        mode: swap, recompute or joint.
        min_bytes: tensors below this size stay.
        proposals: uniform or belady.
        temperature: of Belady's rule.
        elites: how many of the best walks are mutated.
        rate: probability that a mutation leaves its walk at a step.
        actions: as Walk's.
    """

    facts = PlannerInfo(
        "mutation", "mutation search", "", family="search", slot=6, place=215, moves="joint", slow=1,
    )  # fmt: skip
    name = facts.key

    def __init__(
        self, calls: int | None = None, seconds: float | None = None, mode: str = "joint", min_bytes: int = MIB,
        seed: int = 0, proposals: str = "belady", temperature: float = 0.05, elites: int = 4, rate: float = 0.015,
        actions: str = "paper",
    ) -> None:  # fmt: skip
        if calls is not None and calls < 2:
            raise ValueError(f"calls: expected at least 2 (one of a walk and the final check), got {calls}")
        check_budget(seconds=seconds)
        if proposals not in ("uniform", "belady"):
            raise ValueError(f"proposals: expected uniform or belady, got {proposals!r}")
        if not temperature > 0:
            raise ValueError(f"temperature: expected more than 0, got {temperature}")
        if elites < 1 or not 0 < rate <= 1:
            raise ValueError(f"elites, rate: expected at least 1, and more than 0 up to 1, got {elites} and {rate}")
        self.calls = CALLS if calls is None and seconds is None else calls
        self.seconds, self.mode, self.min_bytes, self.seed = seconds, check_mode(mode), min_bytes, seed
        self.temperature = temperature if proposals == "belady" else None
        self.elites, self.rate, self.actions = elites, rate, actions
        self.simulator_calls = 0

    @in_time
    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """The best plan found; raises Infeasible where no walk found one, or none can."""
        from envs.task import Task
        from envs.walk import Walk

        until = time.monotonic() + self.seconds if self.seconds is not None else None
        if program.peak_bytes <= limit:
            engine = Engine(program, machine, limit)
            return finish(self, program, machine, limit, engine, Candidates(program, []).rows)
        least = least_residency(program, self.min_bytes)
        if least > limit:
            raise infeasible(self, program, limit, least)
        task = Task(program, machine, limit, self.min_bytes, self.mode)
        engine = task.engine

        def spent() -> bool:
            over = self.calls is not None and engine.calls >= self.calls - 1  # the last one is the final check
            return over or (until is not None and time.monotonic() >= until)

        rng = np.random.default_rng(self.seed)
        draws = Draws(task, rng, self.temperature)
        search = Mutations(Walk(task, actions=self.actions), rng, draws, self.elites, self.rate, spent=spent)
        walks = 0
        while not spent() and not search.best_overhead <= 0:  # nan: no plan yet
            if walks < FIRST or walks % FRESH == 0 or not search.elites:
                search.repeat([])
            else:
                search.mutate()
            walks += 1
            if not engine.calls:
                break  # nothing can leave
        if search.best is None:
            raise infeasible(self, program, limit, None, engine.calls)
        return finish(self, program, machine, limit, engine, search.best)
