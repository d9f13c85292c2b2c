"""Policy as a planner: a network trained on other programs (experiments/pretrain.py) that plans without training.

``Policy`` decodes the most likely plan and samples more (policy_net.py), and returns the fastest. ``PolicySearch``
continues from these plans with the local search of annealing (local_search.py), which chooses gaps and eviction kinds
by the network's probabilities. ``guide=False`` is the same search without the network: from the fully emptied
plan, with uniform probabilities.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from agents.planner import LEAST as LEAST_CALLS, PlannerInfo, Rows, RowsPlanner, at_least, one_of, positive
from agents.search.annealing import everything, half_way, start
from agents.search.budgeted import budgeted
from agents.search.local_search import anneal, check_heat
from simulator.compiled.engine import Engine, cores, side_by_side
from simulator.machine import Machine
from simulator.modes import MODES
from simulator.moves.moves import Moves
from simulator.plan import Plan
from simulator.program import Program

if TYPE_CHECKING:  # PyTorch takes seconds to import
    from agents.learned.policy_net import PolicyNet
    from simulator.moves.gap_graph import GapGraph

WEIGHTS = Path(__file__).parent / "policy.pt"
SAMPLES = 128  # sampled plans in addition to the most likely one


@dataclass(frozen=True)
class PolicyOptions:
    """Parameters of the guided search."""

    calls: int = 5_000  # by default
    max_kernels: int = 12_000_000  # kernels that the default calls simulate at most
    starts: int = 6
    # Progress of the temperature, in the exponent, at the start of each rung of successive halving, and at the end.
    fall: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0)
    min_smoothing: float = 0.03  # added to every probability, so that the search can make unlikely moves
    max_smoothing: float = 1.0  # the same in the run that trusts the network least
    gap_s: float = 3e-5  # approximate seconds of the network and its input per gap
    pair_s: float = 3e-9  # and per gap times kernel


OPTIONS = PolicyOptions()

Run = tuple[int, Rows, Moves]  # iteration time and rows of its best plan, and its moves


@dataclass
class GuidedSearch:
    """Start of a guided search on one task.

    Attributes:
        engine: simulator of the task.
        moves: moves weighted by the network's probabilities.
        plans: iteration time and rows of the fastest feasible plans, at most ``PolicyOptions.starts``, fastest first.
    """

    engine: Engine
    moves: Moves
    plans: list[tuple[int, Rows]] = field(default_factory=list)

    def offer(self, rows: Rows) -> None:
        """Adds a plan to the starts if it is feasible, fast enough, and no start has the same time."""
        score = self.engine.score(rows)
        if score.feasible and all(score.iteration_ns != ns for ns, _ in self.plans):
            self.plans = sorted([*self.plans, (score.iteration_ns, rows)], key=lambda plan: plan[0])[: OPTIONS.starts]


def decode_plans(
    net: PolicyNet,
    search: GuidedSearch,
    mode: str,
    samples: int = SAMPLES,
    rounds: int = 1,
    seed: int = 0,
    until: float | None = None,
    graph: GapGraph | None = None,
) -> None:
    """Offers the network's plans as starts and sets its probabilities as weights of the moves.

    Args:
        net: the policy's network.
        search: start of the search, which is updated.
        mode: "swap", "recompute" or "joint".
        samples: sampled plans in addition to the most likely one.
        rounds: decoding rounds of the most likely plan.
        seed: seed of the samples.
        until: time.monotonic() after which no more plans are offered.
        graph: the task's graph, if it exists already.
    """
    from agents.learned.policy_net import decode, fit, sample
    from simulator.moves.gap_graph import GapGraph

    engine = search.engine
    moves = search.moves
    rng = np.random.default_rng(seed)
    if graph is None:
        graph = GapGraph(engine.program, engine.machine, engine.limit, moves, mode)
    kinds, priors, confidences = decode(net, graph, rounds)
    for likely, candidate in [(confidences, kinds), *((priors, sample(priors, rng)) for _ in range(samples))]:
        if search.plans and until is not None and time.monotonic() > until:
            break
        rows = fit(engine, graph, candidate, likely)
        if rows is not None:
            search.offer(rows)
    moves.weights = np.where(moves.weights > 0, priors.astype(np.float64) + OPTIONS.min_smoothing, 0.0)


def smoothed(weights: NDArray[np.float64], count: int) -> list[NDArray[np.float64]]:
    """Returns weights of moves for ``count`` runs that trust the network less and less.

    Args:
        weights: (m, 4), with ``PolicyOptions.min_smoothing`` added already, as after ``decode_plans``.

    Returns:
        One float64 (m, 4) per run.
    """
    added = np.geomspace(OPTIONS.min_smoothing, OPTIONS.max_smoothing, count) - OPTIONS.min_smoothing
    return [np.where(weights > 0, weights + smoothing, 0.0) for smoothing in added]


def successive_halving(
    search: GuidedSearch, calls: int | None, until: float | None, jobs: int, hot: float, cold: float, seed: int
) -> tuple[int, Rows]:
    """Runs annealing from several starts with successive halving until one run is left.

    The runs trust the network to different degrees (``min_smoothing`` to ``max_smoothing``).

    Args:
        search: start plans and weighted moves.
        calls: simulator calls of all runs together; None: limited by ``until`` only.
        until: time.monotonic() at which to stop.
        jobs: parallel runs. They do not change the result of a search with ``calls``.
        hot, cold: first and last temperature, as fractions of the ideal time.
        seed: random seed.

    Returns:
        Iteration time (ns) and rows of the best plan.

    Source: "Non-stochastic best arm identification" (Jamieson and Talwalkar, 2016).
    """
    main = search.engine
    moves = search.moves
    count = OPTIONS.starts
    engines = [main, *(Engine(main.program, main.machine, main.limit) for _ in range(1, min(jobs, count)))]
    runs = []
    for i, weights in enumerate(smoothed(moves.weights, count)):
        run_moves = moves.fork(seed + i)
        run_moves.weights = weights
        runs.append((*search.plans[i % len(search.plans)], run_moves))
    rungs = len(OPTIONS.fall) - 1
    heat = [hot * (cold / hot) ** share for share in OPTIONS.fall]
    for rung in range(rungs):
        run_calls = None if calls is None else calls // rungs // len(runs)
        now = time.monotonic()
        deadline = None if until is None else now + (until - now) / (rungs - rung)
        runs = _anneal_runs(engines, runs, run_calls, now, deadline, heat[rung], heat[rung + 1], seed + rung * count)
        runs = sorted(runs, key=lambda run: run[0])[: max(len(runs) // 2, 1)]
    main.calls = sum(engine.calls for engine in engines)
    return runs[0][:2]


def _anneal_runs(
    engines: list[Engine],
    runs: list[Run],
    calls: int | None,
    now: float,
    stop: float | None,
    hot: float,
    cold: float,
    seed: int,
) -> list[Run]:
    """Anneals all runs with ``calls`` each until ``stop``, distributed over the engines."""
    results = list(runs)
    stopped = Event()

    def work(worker: int) -> None:
        indices = range(worker, len(runs), len(engines))
        for turn, i in enumerate(indices, 1):
            until = None if stop is None else now + (stop - now) * turn / len(indices)
            ns, rows, moves = runs[i]
            rows, ns = anneal(moves, engines[worker], rows, ns, calls, hot, cold, seed + i, 0, until, stopped)
            results[i] = ns, rows, moves

    try:
        side_by_side([partial(work, worker) for worker in range(min(len(engines), len(runs)))])
    except BaseException:  # Ctrl-C or TimeUp, which reach this thread only
        stopped.set()
        raise
    return results


def _too_large(moves: Moves, until: float | None) -> bool:
    """Returns whether the network would take more than half of the remaining time."""
    network_s = OPTIONS.gap_s * len(moves.gaps) + OPTIONS.pair_s * len(moves.gaps) * len(moves.load)
    return until is not None and 2 * network_s > until - time.monotonic()


@dataclass(eq=False)
class Policy(RowsPlanner):
    """Decodes plans from the network; falls back to the best heuristic's plan if none of them fits.

    Args:
        mode: "swap", "recompute" or "joint".
        samples: sampled plans in addition to the most likely one.
        rounds: forward passes for the most likely plan.
        weights: file of experiments.pretrain; None: the shipped weights.
    """

    facts = PlannerInfo("policy", "policy", family="learned", slot=4, place=270, slow=1)

    mode: str = one_of(MODES, "joint")
    samples: int = at_least(0, SAMPLES)
    rounds: int = at_least(1, 1)
    weights: str | Path | None = None

    def choose(self, engine: Engine) -> Rows:
        """Returns the fastest decoded plan; raises Infeasible if none fits, FormatError if ``weights`` is no policy."""
        return self._start(engine, self.samples).plans[0][1]

    def _start(self, engine: Engine, samples: int, guide: bool = True, until: float | None = None) -> GuidedSearch:
        """Returns the start of the search with at least one feasible plan; raises Infeasible."""
        task = engine.program, engine.machine, engine.limit
        search = GuidedSearch(engine, Moves(engine.program, engine.limit, self.mode, self.min_bytes, self.seed))
        if not guide:
            search.offer(everything(engine.program, self.mode, self.min_bytes))
        elif search.moves.gaps and not _too_large(search.moves, until):
            from agents.learned.policy_net import trained

            net = trained(Path(self.weights or WEIGHTS))
            decode_plans(net, search, self.mode, samples, self.rounds, self.seed, half_way(until))
        if not search.plans:
            rows, _, required = start(*task, engine, self.mode, self.min_bytes, until)
            if rows is None:
                raise self.beyond_reach(engine, required if self.mode == "swap" else None)
            search.offer(rows)
        return search


@dataclass(eq=False)
class PolicySearch(Policy):
    """Local search from the decoded plans, guided by the network's probabilities.

    Args:
        calls: simulator calls, including those of the start and the final check; None: ``PolicyOptions.calls``, fewer
            for programs with many kernels, or as many as fit into ``seconds``.
        hot, cold: first and last temperature, as fractions of the ideal time.
        seconds: wall-clock budget. The plan then depends on the computer.
        jobs: parallel runs, one per core; None: all cores.
        guide: if False, searches without the network.
        mode, samples, rounds, weights: see ``Policy``.
    """

    facts = PlannerInfo("policy_search", "policy and search", family="learned", slot=5, place=280, slow=1)

    calls: int | None = at_least(LEAST_CALLS, None)
    hot: float = 3e-3
    cold: float = 3e-5
    seconds: float | None = positive(None)
    jobs: int | None = at_least(1, None)
    guide: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_heat(self.hot, self.cold)

    @budgeted
    def plan(self, program: Program, machine: Machine, limit: int) -> Plan:
        """Returns the best plan found; raises as in ``Policy.choose``."""
        until = time.monotonic() + self.seconds if self.seconds is not None else None
        max_calls = self.calls
        if max_calls is None:
            max_calls = min(OPTIONS.calls, OPTIONS.max_kernels // max(len(program.kernels), 1))
        # The most likely plan and the final check take a call each.
        samples = self.samples if self.calls is None else min(self.samples, max(self.calls - 2, 0))
        engine = Engine(program, machine, limit)
        search = self._start(engine, samples, self.guide, until)
        calls = None if until is not None and self.calls is None else max(max_calls - 1 - engine.calls, 0)
        _, best = successive_halving(search, calls, until, self.jobs or cores(), self.hot, self.cold, self.seed)
        return self.finish(engine, best)
