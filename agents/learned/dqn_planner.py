"""Both DQNs as planners: DQN edits complete plans with pretrained weights, DQNPaper trains on the program it plans.

Start plans are decoded from the policy; with more calls, the best heuristic's plan is added. A small budget goes to one
walker. A larger one goes to several walkers with a start plan each, and then to the best of them. The Q-network
soon ranks no edit high, so with many calls policy_search's annealing runs in between, starting from the walkers' plans.

The network is evaluated once per accepted edit and ranks drawn neighbors in compiled code (edit_walk.py). Controls
rank without Q-values: ``ranks="policy"`` draws by the policy's probabilities, ``ranks="uniform"`` draws uniformly, and
``ranks="improves"`` uses the supervised head of the same network.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agents.learned.dqn_config import PaperConfig
from agents.learned.policy import GuidedSearch, successive_halving
from agents.planner import LEAST, NO_ROWS, PlannerInfo, Rows, RowsPlanner, at_least, infeasible, one_of, positive
from agents.search.annealing import half_way, start
from agents.search.budgeted import budgeted
from agents.search.local_search import check_heat
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.modes import MODES
from simulator.moves.moves import Moves
from simulator.plan import Plan
from simulator.program import Program

if TYPE_CHECKING:  # PyTorch and Gymnasium take seconds to import
    from agents.learned.edit_net import EditNet
    from agents.learned.edit_walk import EditWalk
    from envs.edit.task import EditTask, Start

TITLE = '"GPU memory management for neural networks using deep Q-network"'
RANKS = ("q", "improves", "policy", "uniform")
WEIGHTS = {  # with message passing, and without
    True: Path(__file__).parent / "dqn.pt",
    False: Path(__file__).parent / "dqn_flat.pt",
}


@dataclass(frozen=True)
class DQNOptions:
    """Division of the simulator calls among start plans, walkers, annealing and the last walk."""

    calls: int = 1_000  # by default
    heuristic_calls: int = 1_000  # calls from which the best heuristic's plan is a start, too
    heuristic_s: float = 10.0  # the same under a time budget
    few_samples: int = 24  # plans drawn from the policy for one walker
    many_samples: int = 64  # plans drawn from the policy for several walkers
    many_walkers_calls: int = 600  # calls from which several walkers are used
    walkers: int = 6
    walkers_share: float = 0.4  # of the calls, for all walkers
    walker_calls: int = 300  # maximum per walker
    min_halving_calls: int = 1_000  # of the annealing between the walkers and the last walk; with fewer it is omitted
    last_calls: int = 700  # of the last walk
    last_divisor: int = 5  # the last walk gets this part of the remaining time
    warm_progress: float = 0.3  # progress of the temperature, in the exponent, after the walkers
    clock_calls: int = 32  # between updates of clock and temperature


OPTIONS = DQNOptions()


@dataclass(eq=False)
class DQN(RowsPlanner):
    """Planner ``agents.make("dqn")``.

    Args:
        calls: simulator calls, including those of the start plans and the final check; None: ``DQNOptions.calls``, or
            as many as fit into ``seconds``.
        mode: "swap", "recompute" or "joint".
        hot, cold: first and last temperature, as fractions of the ideal time.
        seconds: wall-clock budget on one core. The plan then depends on the computer.
        ranks: ranking of the neighbors: "q", or a control (see the module).
        message_passing: if False, uses the network without structure2vec, which is faster.
        weights: file of ``experiments.pretrain agent=dqn`` or ``train_dqn``; None: the shipped weights.
    """

    facts = PlannerInfo("dqn", "DQN", f"after {TITLE}", family="learned", slot=0, place=250, moves="joint", slow=1)

    calls: int | None = at_least(LEAST, None)
    mode: str = one_of(MODES, "joint")
    hot: float = 3e-3
    cold: float = 3e-5
    seconds: float | None = positive(None)
    ranks: str = one_of(RANKS, "q")
    message_passing: bool = True
    weights: str | Path | None = None
    _heuristic: Rows | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heat(self.hot, self.cold)

    @budgeted
    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """Returns the best plan found; raises Infeasible if no start plan fits, FormatError for ``weights``."""
        until = None if self.seconds is None else time.monotonic() + self.seconds
        calls = OPTIONS.calls if self.calls is None and until is None else self.calls
        if program.peak_bytes <= limit:
            return self.finish(Engine(program, machine, limit), NO_ROWS)
        if not Moves(program, limit, self.mode, self.min_bytes, 0).gaps:
            raise infeasible(self, program, limit, None)
        from agents.learned.edit_net import trained
        from agents.learned.optimization import on_one_thread
        from envs.edit.task import EditTask

        with on_one_thread():
            network = self.ranks in ("q", "improves")
            net = trained(Path(self.weights or WEIGHTS[self.message_passing])) if network else None
            task = EditTask(
                program, machine, limit, self.mode, self.min_bytes, lambda task: self._starts(task, calls, until)
            )
            best = self.search(task, net, None if calls is None else max(calls - 1 - task.engine.calls, 0), until)
        return self.finish(task.engine, best)

    def search(self, task: EditTask, net: EditNet | None, calls: int | None, until: float | None = None) -> Rows:
        """Returns the best rows that walkers find from the task's start plans within ``calls`` or ``until``."""
        from agents.learned.edit_walk import EditWalk, Ranking

        if task.starts[0].iteration_ns <= task.ideal_ns:
            return task.starts[0].rows
        if self.ranks == "uniform":
            task.moves.weights = np.where(task.moves.weights > 0, 1.0, 0.0)
        many_walkers = calls is None or task.engine.calls + calls >= OPTIONS.many_walkers_calls - 1
        count = OPTIONS.walkers if many_walkers else 1
        share = OPTIONS.walkers_share if many_walkers else 1.0
        ranking = Ranking.IMPROVES if self.ranks == "improves" else Ranking.Q
        walk = EditWalk(task, count, net, self.seed, ranking=ranking, hot=self.hot, cold=self.cold)
        plans = [task.starts[0], *(plan for plan in task.starts if plan.rows is self._heuristic), *task.starts[1:]]
        best_plans: list[Start] = []
        start_s = time.monotonic()
        calls_made = 0
        for i in range(count):
            walk.begin(i, plans[i % len(plans)])
            deadline = None if until is None else start_s + share * (until - start_s) * (i + 1) / count
            walker_calls = OPTIONS.walker_calls
            if calls is not None:
                walker_calls = int(share * calls) // count
            if many_walkers:
                walker_calls = min(walker_calls, OPTIONS.walker_calls)
            calls_made += self._run(walk, i, walker_calls, deadline, 0.0)
            best_plans.append(walk.best(i))
        best = min(best_plans, key=lambda plan: plan.iteration_ns)
        if many_walkers:
            now = time.monotonic()
            if calls is not None:
                remaining_calls = calls - calls_made
                can_halve = remaining_calls >= OPTIONS.min_halving_calls + OPTIONS.last_calls
                last_calls = OPTIONS.last_calls if can_halve else remaining_calls
            else:  # a call of the annealing takes a fraction of the time
                assert until is not None
                remaining_calls = int(calls_made * (until - now) / max(now - start_s, 1e-9))
                can_halve = remaining_calls >= OPTIONS.last_calls
                last_calls = remaining_calls // OPTIONS.last_divisor if can_halve else remaining_calls
            if last_calls < remaining_calls:
                deadline = None if until is None else until - (until - now) * last_calls / remaining_calls
                best = self._halve(task, best_plans, None if calls is None else remaining_calls - last_calls, deadline)
            walk.begin(0, best)
            self._run(walk, 0, last_calls if calls is not None else None, until, OPTIONS.warm_progress)
            best = min(best, walk.best(0), key=lambda plan: plan.iteration_ns)
        task.engine.calls += walk.simulated
        return best.rows

    def _halve(self, task: EditTask, starts: list[Start], calls: int | None, until: float | None) -> Start:
        """Returns the best plan of policy_search's annealing with successive halving, started from ``starts``."""
        from envs.edit.task import Start

        plans = sorted(((plan.iteration_ns, plan.rows) for plan in starts), key=lambda plan: plan[0])
        guided = GuidedSearch(task.engine, task.moves, plans)
        warm = self.hot * (self.cold / self.hot) ** OPTIONS.warm_progress
        iteration_ns, rows = successive_halving(guided, calls, until, jobs=1, hot=warm, cold=self.cold, seed=self.seed)
        return Start(iteration_ns, rows)

    def _run(self, walk: EditWalk, i: int, calls: int | None, deadline: float | None, first_progress: float) -> int:
        """Runs walker i while the temperature falls from ``first_progress`` to the end; returns the number of calls."""
        start_s = time.monotonic()
        calls_made = 0
        while calls is None or calls_made < calls:
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                break
            progress = calls_made / calls if calls else 0.0
            if deadline is not None:
                progress = max(progress, (now - start_s) / max(deadline - start_s, 1e-9))
            max_calls = OPTIONS.clock_calls if calls is None else min(OPTIONS.clock_calls, calls - calls_made)
            calls_made += walk.walk(i, max_calls, first_progress + (1 - first_progress) * progress)
        return calls_made

    def _starts(self, task: EditTask, calls: int | None, until: float | None) -> list[Rows]:
        """Returns rows of the policy's plans, and of the best heuristic's if time allows or no other plan fits."""
        from envs.edit.starts import policy_plans

        samples = OPTIONS.many_samples
        if calls is not None and calls < OPTIONS.many_walkers_calls:
            samples = OPTIONS.few_samples
        if calls is not None:
            samples = min(samples, calls // 3)
        plans = policy_plans(task, samples, self.seed, half_way(until))
        has_time = until is None or (self.seconds is not None and self.seconds >= OPTIONS.heuristic_s)
        if not plans or (has_time and (calls is None or calls >= OPTIONS.heuristic_calls)):
            rows, _, required = start(
                task.program, task.machine, task.limit, task.engine, self.mode, self.min_bytes, half_way(until)
            )
            if rows is None and not plans:
                raise self.beyond_reach(task.engine, required if self.mode == "swap" else None)
            plans = plans if rows is None else [*plans, rows]
            self._heuristic = rows
        return plans


@dataclass(eq=False)
class DQNPaper(RowsPlanner):
    """Planner ``agents.make("dqn_paper")``: the paper's DQN. ``config`` replaces all options except ``seed``."""

    facts = PlannerInfo(
        "dqn_paper", "DQN, as in the paper", TITLE, family="learned", slot=2, place=260, moves="joint", learned=True
    )

    mode: str | None = None
    episodes: int | None = None
    config: PaperConfig = None  # type: ignore[assignment]  # set in __post_init__

    def __post_init__(self) -> None:
        super().__post_init__()
        options = {"mode": self.mode, "episodes": self.episodes, "min_bytes": self.min_bytes}
        overrides: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
        self.config = self.config or PaperConfig(**overrides)

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """Trains on the program and returns the best plan found; raises Infeasible if it found none."""
        import torch

        from agents.learned import dqn_paper
        from agents.learned.optimization import on_one_thread
        from agents.learned.training import train

        with on_one_thread(), torch.random.fork_rng(devices=[]):  # the trainer seeds the global generator
            result = train(dqn_paper.Trainer(program, machine, limit, self.config, self.seed))
        self.simulator_calls = result.simulator_calls
        return result.best
