"""Both DQNs as planners: DQN edits complete plans with pretrained weights, DQNPaper trains on the program it plans.

Start plans are decoded from the policy; with more calls, the best heuristic's plan is added. A small budget goes to one
walker, a larger one to several with a start plan each, by policy_search's successive halving. A walker draws edits,
ranks them with the Q-network, and simulates the best (edit_walk.py). The network is evaluated after every accepted edit
if calls are limited, and for a share of the time if only time is limited.

Controls rank without Q-values: ``ranks="policy"`` draws by the policy's probabilities, ``ranks="uniform"`` draws
uniformly, ``ranks="improves"`` uses the supervised head of the same network, and ``ranks="q_only"`` the advantage
without that head's part.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agents.learned.dqn_config import PaperConfig
from agents.learned.policy import smoothed
from agents.planner import LEAST, NO_ROWS, PlannerInfo, Rows, RowsPlanner, at_least, infeasible, one_of, positive
from agents.search.annealing import half_way, start
from agents.search.budgeted import budgeted
from agents.search.local_search import check_heat
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.modes import MODES, evictions
from simulator.plan import Plan
from simulator.program import Program

if TYPE_CHECKING:  # PyTorch and Gymnasium take seconds to import
    from agents.learned.edit_net import EditNet
    from agents.learned.edit_walk import EditWalk
    from envs.edit.task import EditTask

TITLE = '"GPU memory management for neural networks using deep Q-network"'
RANKS = ("q", "q_only", "improves", "policy", "uniform")
WEIGHTS = {  # with message passing, and without
    True: Path(__file__).parent / "dqn.pt",
    False: Path(__file__).parent / "dqn_flat.pt",
}


@dataclass(frozen=True)
class DQNOptions:
    """Division of the budget among start plans, walkers and the network."""

    calls: int = 1_000  # by default
    heuristic_calls: int = 1_000  # calls from which the best heuristic's plan is a start, too
    heuristic_s: float = 10.0  # the same under a time budget
    few_samples: int = 24  # plans drawn from the policy for one walker
    many_samples: int = 64  # plans drawn from the policy for several walkers
    many_walkers_calls: int = 600  # calls from which several walkers are used
    walkers: tuple[int, ...] = (6, 3, 1)  # of each rung of successive halving
    # Progress of the temperature, in the exponent, at the start of each rung and at the end.
    fall: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0)
    neighbors: int = 64  # of the pool, if calls are limited
    timed_neighbors: int = 16  # of the pool, if only time is limited
    draws: int = 8  # neighbors drawn per call
    network_share: float = 0.15  # of the time, if only time is limited; else after every accepted edit
    tick_s: float = 2e-3  # maximum time between updates of clock and temperature
    tick_calls: int = 32  # the same in calls, if calls are limited
    max_tick_calls: int = 4096  # the same, if only time is limited


OPTIONS = DQNOptions()


@dataclass(eq=False)
class DQN(RowsPlanner):
    """Planner ``agents.make("dqn")``: learned ranking of edits.

    Args:
        calls: simulator calls, including those of the start plans and the final check; None: ``DQNOptions.calls``, or
            as many as fit into ``seconds``.
        mode: "swap", "recompute" or "joint".
        hot, cold: first and last temperature, as fractions of the ideal time.
        seconds: wall-clock budget on one core. The plan then depends on the computer.
        ranks: ranking of the neighbors: "q", or a control (see the module).
        message_passing: if True, uses the network with structure2vec, which is slower.
        weights: file of ``experiments.pretrain agent=dqn`` or ``train_dqn``; None: the shipped weights.
    """

    facts = PlannerInfo("dqn", "DQN", f"after {TITLE}", family="learned", slot=0, place=250, moves="joint", slow=1)

    calls: int | None = at_least(LEAST, None)
    mode: str = one_of(MODES, "joint")
    hot: float = 3e-3
    cold: float = 3e-5
    seconds: float | None = positive(None)
    ranks: str = one_of(RANKS, "q")
    message_passing: bool = False
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
        if not any(evictions(program, gap, self.mode) for gap in program.gaps(self.min_bytes)):
            raise infeasible(self, program, limit, None)
        from agents.learned.edit_net import trained
        from agents.learned.optimization import on_one_thread
        from envs.edit.task import EditTask

        with on_one_thread():
            network = self.ranks in ("q", "q_only", "improves")
            net = trained(Path(self.weights or WEIGHTS[self.message_passing])) if network else None
            task = EditTask(
                program,
                machine,
                limit,
                self.mode,
                self.min_bytes,
                lambda task: self._starts(task, calls, until),
                by_class=True,
            )
            best = self.search(task, net, None if calls is None else max(calls - 1 - task.engine.calls, 0), until)
        return self.finish(task.engine, best)

    def search(self, task: EditTask, net: EditNet | None, calls: int | None, until: float | None = None) -> Rows:
        """Returns the best rows that walkers find from the task's start plans within ``calls`` or ``until``."""
        from agents.learned.edit_walk import EditWalk, Ranking

        rankings = {"improves": Ranking.IMPROVES, "q_only": Ranking.ADVANTAGE}
        if task.starts[0].iteration_ns <= task.ideal_ns:
            return task.starts[0].rows
        if self.ranks == "uniform":
            task.moves.weights = np.where(task.moves.weights > 0, 1.0, 0.0)
        has_many_walkers = calls is None or task.engine.calls + calls >= OPTIONS.many_walkers_calls - 1
        counts = OPTIONS.walkers if has_many_walkers else (1,)
        fall = OPTIONS.fall if has_many_walkers else (0.0, 1.0)
        walk = EditWalk(
            task,
            counts[0],
            net,
            self.seed,
            neighbors=OPTIONS.timed_neighbors if calls is None else OPTIONS.neighbors,
            draws=OPTIONS.draws,
            first_draws=OPTIONS.draws if calls is None else OPTIONS.neighbors,
            ranking=rankings.get(self.ranks, Ranking.Q),
            hot=self.hot,
            cold=self.cold,
        )
        if has_many_walkers:
            walk.weights = smoothed(task.moves.weights, counts[0])
        plans = [task.starts[0], *(plan for plan in task.starts if plan.rows is self._heuristic), *task.starts[1:]]
        best = [plans[i % len(plans)] for i in range(counts[0])]
        walkers = list(range(counts[0]))
        calls_made = 0
        for rung, count in enumerate(counts):
            walkers = sorted(walkers, key=lambda i: best[i].iteration_ns)[:count]
            rungs_left = len(counts) - rung
            walker_calls = None if calls is None else (calls - calls_made) // rungs_left // count
            now = time.monotonic()
            rung_s = None if until is None else (until - now) / rungs_left
            for turn, i in enumerate(walkers, 1):
                walk.begin(i, best[i])
                deadline = None if rung_s is None else now + rung_s * turn / count
                calls_made += self._run(walk, i, walker_calls, deadline, fall[rung], fall[rung + 1])
                best[i] = min(best[i], walk.best(i), key=lambda plan: plan.iteration_ns)
        task.engine.calls += walk.simulated
        return min(best, key=lambda plan: plan.iteration_ns).rows

    def _run(self, walk: EditWalk, i: int, calls: int | None, deadline: float | None, hot: float, cold: float) -> int:
        """Runs walker i while the progress of the temperature goes from ``hot`` to ``cold``; returns the calls made."""
        begin = time.monotonic()
        calls_made = 0
        if calls is not None:
            accepted = 1
            while calls_made < calls and not walk.has_ideal_plan(i):
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    break
                if accepted:
                    walk.encode(i)
                spent = calls_made / calls
                if deadline is not None:
                    spent = max(spent, (now - begin) / (deadline - begin))
                max_calls = min(OPTIONS.tick_calls, calls - calls_made)
                made, accepted = walk.walk(i, max_calls, hot + (cold - hot) * spent)
                calls_made += made
            return calls_made
        assert deadline is not None
        now = begin
        tick_calls = 1
        while now < deadline and not walk.has_ideal_plan(i):
            walk.encode(i)
            encoded = time.monotonic()
            stop = min(encoded + (encoded - now) * (1 / OPTIONS.network_share - 1), deadline)
            now = encoded
            while now < stop:
                progress = hot + (cold - hot) * (now - begin) / (deadline - begin)
                calls_made += walk.walk(i, tick_calls, progress, accepts=tick_calls)[0]
                last = now
                now = time.monotonic()
                is_late = now - last > min(OPTIONS.tick_s, (stop - last) / 4)
                tick_calls = max(tick_calls // 2, 1) if is_late else min(2 * tick_calls, OPTIONS.max_tick_calls)
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
