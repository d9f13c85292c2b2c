"""Fine-tuning of the DQN on one task: iterations of dqn.py, the best plan that was found, the greedy policy's plan."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

from agents.learned.dqn import DQN, Args
from agents.learned.dqn_planner import DQN as Planner
from agents.learned.training import Episode
from agents.learned.training_state import must_match, read_training_state, restoring, write_training_state
from agents.planner import Rows, infeasible
from envs.edit import starts
from envs.edit.task import EditTask
from simulator import Plan, simulate
from simulator.compiled.encoding import decisions_of
from simulator.machine import Machine
from simulator.program import Program

CURVE_CALLS = 200  # simulator calls of the greedy policy at a point of a curve


class Trainer:
    """Learns on one task (training.Trainer). Rewards are above the ideal time, since the floor is not known.

    Raises:
        Infeasible: no start plan fits the limit.
        FormatError: the pretrained weights cannot be read.
    """

    def __init__(self, program: Program, machine: Machine, limit: int, args: Args, seed: int) -> None:
        try:
            self.task = EditTask(program, machine, limit, args.mode, args.min_bytes, starts.policy)
        except ValueError:
            raise infeasible(Planner(min_bytes=args.min_bytes), program, limit, None) from None
        self.program, self.limit, self.args, self.seed = program, limit, args, seed
        self.checkpoint_every, self.history = args.checkpoint_every, list[Episode]()
        self.dqn = DQN([self.task], [0.0], args, seed)
        start = self.task.starts[0]  # or the best plan of the run that is resumed
        self.before = start.iteration_ns / self.task.ideal_ns - 1, self._plan_of(start.rows)

    @property
    def episodes(self) -> int:
        """Iterations so far."""
        return len(self.history)

    @property
    def simulator_calls(self) -> int:
        """Those of the start plans and of all walks."""
        return self.task.start_calls + self.dqn.calls

    @property
    def _found(self) -> tuple[float, Plan]:
        """Overhead and plan of the best so far."""
        walks = [(walk.best_overhead, walk.best) for walk in self.dqn.walks.values()]
        return min([self.before, *walks], key=lambda one: one[0])

    @property
    def best(self) -> Plan | None:
        """The best plan found so far."""
        return self._found[1]

    @property
    def done(self) -> bool:
        """Have there been enough iterations, or can no plan be better?"""
        return self.episodes >= self.args.iterations or self._found[0] <= 0

    def step(self) -> list[Episode]:
        """One iteration."""
        before = self.dqn.calls
        row = self.dqn.iterate()
        ended, epsilon = row.get("overhead", math.nan), float(self.dqn.walks[0].epsilon.mean())
        self.history.append(Episode(
            len(self.history) + 1, ended, True, self._found[0], epsilon, row.get("loss", math.nan),
            self.dqn.calls - before, self.simulator_calls,
        ))  # fmt: skip
        return self.history[-1:]

    def _plan_of(self, rows: Rows) -> Plan:
        return Plan.of(self.program, decisions_of(rows), "dqn", self.limit, self.task.machine.name)

    def _greedy(self, calls: int) -> Plan:
        args = self.args
        planner = Planner(calls, args.mode, min_bytes=args.min_bytes, seed=self.seed)
        made = self.task.engine.calls
        rows = planner.search(self.task, self.dqn.net.eval(), max(calls - self.task.start_calls - 1, 0))
        self.task.engine.calls = made
        return self._plan_of(rows)

    def greedy(self) -> Plan:
        """The plan of the greedy policy in ``greedy_calls`` simulator calls, those of the start plans included."""
        return self._greedy(self.args.greedy_calls)

    def greedy_overhead(self) -> float:
        """The greedy policy's overhead after CURVE_CALLS calls."""
        plan = self._greedy(self.task.start_calls + 1 + CURVE_CALLS)
        return simulate(self.program, plan, self.task.machine, self.limit).overhead

    def _identity(self) -> dict[str, object]:
        """What a checkpoint must agree with to be of this run; it may have more iterations."""
        return {"config": asdict(replace(self.args, iterations=1)), "seed": self.seed, "limit": self.limit,
                "program": self.program.fingerprint, "machine": json.dumps(self.task.machine.to_dict())}  # fmt: skip

    def save(self, path: Path) -> None:
        """Writes a checkpoint, whole or not at all. The replay buffer and the walkers are not kept."""
        overhead, plan = self._found
        write_training_state(path, {
            **self._identity(), **self.dqn.state(), "episodes": [list(e) for e in self.history],
            "best": json.dumps(plan.to_dict()), "best_overhead": overhead,
        })  # fmt: skip

    def load(self, path: Path) -> None:
        """Continues from a checkpoint; raises TrainingStateError if the file is of another run."""
        state = read_training_state(path)
        must_match(path, state, self._identity())
        with restoring(path):
            self.dqn.restore(state)
            self.history = [Episode(*e) for e in state["episodes"]]
            self.before = state["best_overhead"], Plan.from_dict(json.loads(state["best"]))
