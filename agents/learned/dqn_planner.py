"""Both DQNs as planners. DQN's greedy policy edits whole plans, with weights that were learned on other programs;
DQNPaper trains when it is asked for a plan.

Start plans are decoded from the policy, with more calls also the best heuristic's. Few calls go to one walker; more
go to ``WALKERS`` with a start each, then to the best of them. Q soon has no edits left that it ranks high, so of many
calls policy_search's annealing makes those between: it begins at the walkers' plans, and the last walk at its best.

The network reads a plan once for each accepted edit, and ranks drawn neighbours in compiled code (edit_walk.py).
Controls rank without it: ``ranks="policy"`` draws by the policy's probabilities, ``ranks="uniform"`` all alike;
``ranks="improves"`` asks the supervised head of the same network.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from agents.learned.dqn_config import PaperConfig
from agents.learned.policy import Guided, halving
from agents.planner import MIB, PlannerInfo, Rows, check_budget, finish, infeasible
from agents.search.annealing import half_way, start
from agents.search.in_time import in_time
from agents.search.local_search import check_heat
from simulator.compiled.encoding import rows_of
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.modes import check_mode
from simulator.moves.moves import Moves
from simulator.plan import Plan
from simulator.program import Program

if TYPE_CHECKING:  # PyTorch and Gymnasium take seconds to import
    from agents.learned.edit_net import EditNet
    from agents.learned.edit_walk import EditWalk
    from envs.edit.task import EditTask, Start

HERE = Path(__file__).parent
WEIGHTS = {True: HERE / "dqn.pt", False: HERE / "dqn_flat.pt"}  # with message passing, and without
RANKS = ("q", "improves", "policy", "uniform")
CALLS = 1_000  # simulator calls by default
SEVERAL = 600  # calls from which there are several walkers
HEURISTIC_CALLS = 1_000  # calls from which the best heuristic's plan is a start
FEW, MANY = 24, 64  # plans drawn from the policy, for one walker and for several
WALKERS, SHARE, SHORT = 6, 0.4, 300  # several walkers, their share of the calls, and calls of one of them at most
HALVED, LAST = 1_000, 700  # calls of the annealing between, at least, and of the last walk then
REST = 5  # of the seconds that are left, the part of the last walk
WARM = 0.3  # how far the temperature has fallen, in the exponent, when they begin
CLOCK = 10.0  # seconds from which a heuristic's plan is a start
LOOK = 32  # calls between two looks at the clock, and at the temperature
TITLE = '"GPU memory management for neural networks using deep Q-network"'


class DQN:
    """``agents.make("dqn")``.

    Args:
        calls: simulator calls, those of the start and the final check included; None: ``CALLS``, or as many as fit into
            ``seconds``.
        mode: swap, recompute or joint.
        hot, cold: first and last temperature, as fractions of the ideal time.
        min_bytes: tensors below this size stay.
        seconds: of wall-clock time, on one core. With them the plan depends on the computer.
        ranks: what ranks the neighbours: "q", or a control (see the module).
        message_passing: False: the network without structure2vec's rounds, which is faster.
        weights: a file of ``experiments.pretrain agent=dqn`` or ``train_dqn``; None: the one of the package.
    """

    facts = PlannerInfo("dqn", "DQN", f"after {TITLE}", family="learned", slot=0, place=250, moves="joint", slow=1)
    name = facts.key

    def __init__(
        self, calls: int | None = None, mode: str = "joint", hot: float = 3e-3, cold: float = 3e-5,
        min_bytes: int = MIB, seed: int = 0, seconds: float | None = None, ranks: str = "q",
        message_passing: bool = True, weights: str | Path | None = None,
    ) -> None:  # fmt: skip
        check_budget(calls, seconds)
        check_heat(hot, cold)
        if ranks not in RANKS:
            raise ValueError(f"ranks: expected one of {', '.join(RANKS)}, got {ranks!r}")
        self.calls, self.seconds, self.mode, self.hot, self.cold = calls, seconds, check_mode(mode), hot, cold
        self.min_bytes, self.seed, self.ranks = min_bytes, seed, ranks
        self.weights = WEIGHTS[message_passing] if weights is None else Path(weights)
        self.simulator_calls = 0
        self._heuristic: Rows | None = None

    @in_time
    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """The best plan found; raises Infeasible if no start plan fits, FormatError for ``weights``."""
        until = None if self.seconds is None else time.monotonic() + self.seconds
        calls = CALLS if self.calls is None and until is None else self.calls
        if program.peak_bytes <= limit:
            return finish(self, program, machine, limit, Engine(program, machine, limit), rows_of(()))
        if not Moves(program, limit, self.mode, self.min_bytes, 0).gaps:
            raise infeasible(self, program, limit, None, 0)
        from agents.learned.optimisation import on_one_thread
        from envs.edit.task import EditTask

        with on_one_thread():
            net = self._net()
            try:
                task = EditTask(
                    program, machine, limit, self.mode, self.min_bytes, lambda it: self._starts(it, calls, until)
                )
            except NoStart as error:
                raise infeasible(self, program, limit, error.required, error.calls) from None
            best = self.search(task, net, None if calls is None else max(calls - 1 - task.engine.calls, 0), until)
        return finish(self, program, machine, limit, task.engine, best)

    def search(self, task: EditTask, net: EditNet | None, calls: int | None, until: float | None = None) -> Rows:
        """The best rows that walkers find from the task's start plans."""
        from agents.learned.edit_walk import IMPROVES, EditWalk, Q

        if task.starts[0].iteration_ns <= task.ideal_ns:
            return task.starts[0].rows
        if self.ranks == "uniform":
            task.moves.weights = np.where(task.moves.weights > 0, 1.0, 0.0)
        several = calls is None or task.engine.calls + calls >= SEVERAL - 1
        count, share = (WALKERS, SHARE) if several else (1, 1.0)
        column = IMPROVES if self.ranks == "improves" else Q
        walk = EditWalk(task, count, net, self.seed, column=column, hot=self.hot, cold=self.cold)
        plans = [task.starts[0], *(one for one in task.starts if one.rows is self._heuristic), *task.starts[1:]]
        found: list[Start] = []
        begin, used = time.monotonic(), 0
        for i in range(count):
            walk.begin(i, plans[i % len(plans)])
            end = None if until is None else begin + share * (until - begin) * (i + 1) / count
            each = SHORT if calls is None else int(share * calls) // count
            used += self._run(walk, i, min(each, SHORT) if several else each, end, 0.0)
            found.append(walk.best(i))
        best = min(found, key=lambda plan: plan.iteration_ns)
        if several:
            now = time.monotonic()
            if calls is not None:
                left = calls - used
                last = left if left < HALVED + LAST else LAST
            else:  # a call of the annealing takes a fraction of the time
                assert until is not None
                left = int(used * (until - now) / max(now - begin, 1e-9))
                last = left if left < LAST else left // REST
            if last < left:
                end = None if until is None else until - (until - now) * last / left
                best = self._halve(task, found, None if calls is None else left - last, end)
            walk.begin(0, best)
            self._run(walk, 0, last if calls is not None else None, until, WARM)
            best = min(best, walk.best(0), key=lambda plan: plan.iteration_ns)
        task.engine.calls += walk.simulated
        return best.rows

    def _halve(self, task: EditTask, found: list[Start], calls: int | None, until: float | None) -> Start:
        """The best plan that policy_search's runs of annealing make of these, half of which go on at a time."""
        from envs.edit.task import Start

        plans = sorted(((plan.iteration_ns, plan.rows) for plan in found), key=lambda plan: plan[0])
        guided, warm = Guided(task.engine, task.moves, plans), self.hot * (self.cold / self.hot) ** WARM
        return Start(*halving(guided, calls, until, 1, warm, self.cold, self.seed))

    def _run(self, walk: EditWalk, i: int, calls: int | None, end: float | None, fallen: float) -> int:
        """Walker i goes on while the temperature falls the rest of its way; returns the calls it made."""
        begin, made = time.monotonic(), 0
        while calls is None or made < calls:
            now = time.monotonic()
            if end is not None and now >= end:
                break
            share = made / calls if calls else 0.0
            if end is not None:
                share = max(share, (now - begin) / max(end - begin, 1e-9))
            most = LOOK if calls is None else min(LOOK, calls - made)
            made += walk.walk(i, most, fallen + (1 - fallen) * share)
        return made

    def _starts(self, task: EditTask, calls: int | None, until: float | None) -> list[Rows]:
        """Rows of the policy's plans, and of the best heuristic's if there is the time, or nothing else fits."""
        from envs.edit.starts import policy_plans

        samples = FEW if calls is not None and calls < SEVERAL else MANY
        plans = policy_plans(task, samples if calls is None else min(samples, calls // 3), self.seed, half_way(until))
        clock = until is None or (self.seconds is not None and self.seconds >= CLOCK)
        if not plans or (clock and (calls is None or calls >= HEURISTIC_CALLS)):
            rows, _, required = start(
                task.program, task.machine, task.limit, task.engine, self.mode, self.min_bytes, half_way(until)
            )
            if rows is None and not plans:
                raise NoStart(required if self.mode == "swap" else None, task.engine.calls)
            plans, self._heuristic = plans if rows is None else [*plans, rows], rows
        return plans

    def _net(self) -> EditNet | None:
        """The network that ranks; None if it is not asked."""
        from agents.learned.edit_net import trained

        return trained(self.weights) if self.ranks in ("q", "improves") else None


class NoStart(Exception):
    """No start plan fits; the least bytes that one would need (mode swap), and the simulator calls that were made."""

    def __init__(self, required: int | None, calls: int) -> None:
        super().__init__()
        self.required, self.calls = required, calls


class DQNPaper:
    """``agents.make("dqn_paper")``: the paper's DQN. ``config`` stands for all other options but ``seed``."""

    facts = PlannerInfo(
        "dqn_paper", "DQN, as in the paper", TITLE, family="learned", slot=2, place=260, moves="joint", learned=True
    )  # fmt: skip
    name = facts.key

    def __init__(
        self, seed: int = 0, min_bytes: int = MIB, mode: str | None = None, episodes: int | None = None,
        config: PaperConfig | None = None,
    ):  # fmt: skip
        given: dict[str, Any] = {"mode": mode, "episodes": episodes, "min_bytes": min_bytes}
        self.seed = seed
        self.config = config or PaperConfig(**{key: value for key, value in given.items() if value is not None})
        self.simulator_calls = 0

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """Trains and returns the best plan found; raises Infeasible."""
        from agents.learned import dqn_paper
        from agents.learned.training import train

        result = train(dqn_paper.Trainer(program, machine, limit, self.config, self.seed))
        self.simulator_calls = result.simulator_calls
        return result.best
