"""The policy as a planner: a network that was trained once, on other programs (experiments/pretrain.py), plans at once.

``Policy`` decodes what the network says (decoding.py) and searches nothing. ``PolicySearch`` goes on from there by the
local search of annealing (local_search.py), which picks gaps and their ways by the network's probabilities.

The control is the same search from every gap emptied, with all gaps and ways alike: ``guide=False``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from agents.planner import MIB, Facts, Rows, check_budget, finish, infeasible
from agents.search.annealing import everything, on_all_cores, start
from agents.search.local_search import Moves, anneal
from simulator.compiled.encoding import NEVER
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program
from simulator.ways import check_mode

if TYPE_CHECKING:  # PyTorch takes seconds to import
    from agents.learned.policy_net import PolicyNet

WEIGHTS = Path(__file__).parent / "policy.pt"
CALLS = 5_000
ROUNDS = (1, 6)  # decodings, of so many rounds each
EVEN = 0.03  # added to every probability: the search may do what the network does not expect


@dataclass
class Guided:
    """Where the search of a task begins.

    Attributes:
        rows, iteration_ns: of the plan that it starts from; rows None where there is none that fits.
        moves: with the network's probabilities for weights.
    """

    engine: Engine
    moves: Moves
    rows: Rows | None = None
    iteration_ns: int = NEVER

    def offer(self, rows: Rows) -> None:
        """Starts from these rows where they fit and are the fastest."""
        score = self.engine.score(rows)
        if score.feasible and score.iteration_ns < self.iteration_ns:
            self.rows, self.iteration_ns = rows, score.iteration_ns


def decoded(net: PolicyNet, found: Guided, mode: str) -> None:
    """Offers the network's plans, and makes its probabilities the weights of the search."""
    from agents.learned.decoding import decode, fitted
    from agents.learned.gap_graph import GapGraph

    engine, moves = found.engine, found.moves
    graph = GapGraph(engine.program, engine.machine, engine.limit, moves, mode)
    for rounds in ROUNDS:
        ways, first, last = decode(net, graph, rounds)
        rows = fitted(engine, graph, ways, last)
        if rows is not None:
            found.offer(rows)
    moves.weights = np.where(moves.weights > 0, first + EVEN, 0.0)


class Policy:
    """What the network says, decoded; the best heuristic's plan where that does not fit.

    Args:
        mode: swap, recompute or joint.
        min_bytes: tensors below this size stay.
        weights: a file of experiments.pretrain; None: the one that comes with the package.
    """

    facts = Facts("policy", "policy", family="learned", slot=4, place=270, slow=1)
    name = facts.key
    guide = True

    def __init__(
        self, mode: str = "joint", min_bytes: int = MIB, seed: int = 0, weights: str | Path | None = None
    ) -> None:  # fmt: skip
        self.mode, self.min_bytes, self.seed = check_mode(mode), min_bytes, seed
        self.weights = WEIGHTS if weights is None else Path(weights)
        self.simulator_calls = 0

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """The decoded plan; raises Infeasible where neither it nor a heuristic's fits, FormatError for ``weights``."""
        found = self._begin(program, machine, limit)
        assert found.rows is not None
        return finish(self, program, machine, limit, found.engine, found.rows)

    def _begin(self, program: Program, machine: Machine, limit: int, until: float | None = None) -> Guided:
        """A plan that fits; raises Infeasible where there is none."""
        found = Guided(Engine(program, machine, limit), Moves(program, limit, self.mode, self.min_bytes, self.seed))
        if not self.guide:
            found.offer(everything(program, self.mode, self.min_bytes))
        elif found.moves.gaps:
            from agents.learned.policy_net import trained

            decoded(trained(self.weights), found, self.mode)
        if found.rows is None:
            rows, _, required = start(program, machine, limit, found.engine, self.mode, self.min_bytes, until)
            if rows is None:
                self.simulator_calls = found.engine.calls
                raise infeasible(self, program, limit, required if self.mode == "swap" else None)
            found.offer(rows)
        return found


class PolicySearch(Policy):
    """Local search from the decoded plan, by the network's probabilities.

    Args:
        calls: simulator calls, those of the start and the final check included; None: ``CALLS``, or as many as fit
            into ``seconds``.
        hot, cold: the first and the last temperature, as fractions of the ideal time.
        seconds: of wall-clock time. With them the plan depends on the computer.
        jobs: runs side by side, each on a core, where there are ``seconds``; None: all.
        guide: False: the same search without the network.
    """

    facts = Facts("policy_search", "policy and search", family="learned", slot=5, place=280, slow=1)
    name = facts.key

    def __init__(
        self,
        calls: int | None = None,
        mode: str = "joint",
        hot: float = 3e-3,
        cold: float = 3e-5,
        min_bytes: int = MIB,
        seed: int = 0,
        seconds: float | None = None,
        jobs: int | None = None,
        guide: bool = True,
        weights: str | Path | None = None,
    ) -> None:
        super().__init__(mode, min_bytes, seed, weights)
        check_budget(calls, seconds, jobs)
        if not 0 < cold <= hot:
            raise ValueError(f"hot, cold: expected 0 < cold <= hot, got {hot} and {cold}")
        self.calls, self.seconds, self.jobs, self.guide = calls, seconds, jobs, guide
        self.hot, self.cold = hot, cold

    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """The best plan found; raises as ``Policy.plan``."""
        until = time.monotonic() + self.seconds if self.seconds is not None else None
        found = self._begin(program, machine, limit, until)
        assert found.rows is not None
        engine, best = found.engine, found.rows
        left = max((CALLS if self.calls is None else self.calls) - 1 - engine.calls, 0)
        how = self.hot, self.cold, self.seed
        if until is None:
            best, _ = anneal(found.moves, engine, best, found.iteration_ns, left, *how)
        elif time.monotonic() < until:
            calls = None if self.calls is None else left
            best = on_all_cores(found.moves, engine, best, found.iteration_ns, until, *how, self.jobs, calls=calls)
        return finish(self, program, machine, limit, engine, best)
