"""Predicts plans that were replayed on an H200, with the simulator's rules and the costs of that executor.

The replays of the first GPU run issued every kernel and copy from Python with a timed event after each. This adds
costs that a training step does not have: ``kernel_ns`` per kernel and ``copy_ns`` per copy. Both are fitted to the
ResNet-50 rows only, so GPT-2 and Llama test them. The host's issue time and the queue depth were measured.

1. The program has measured durations, each increased by kernel_ns.
2. Plans of ``lp_round`` and ``annealing`` are recomputed (``remade``); the others are the replayed plans. The
   difference between the earlier prediction and today's prediction under the old rules is added.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from simulator import Engine, Machine, Plan, Program
from simulator.compiled.encoding import rows_of
from simulator.files import load_json

FOLDER = Path(__file__).resolve().parents[2] / "results" / "gpu_h200"
FITTED = "resnet50_imagenet_bf16"  # network whose rows the two costs are fitted to


class Replay(NamedTuple):
    """One replayed plan.

    Attributes:
        fraction: limit as a fraction of the peak.
        remade: whether the plan was recomputed by the same planner instead of being the replayed one.
        before_ns: iteration time predicted at the time of the replay.
        predicted_ns: iteration time predicted with the executor's costs.
        measured_ns: measured iteration time.
    """

    workload: str
    fraction: float
    planner: str
    remade: bool
    before_ns: float
    predicted_ns: float
    measured_ns: float

    @property
    def error(self) -> float:
        """Relative error: (predicted - measured) / measured."""
        return self.predicted_ns / self.measured_ns - 1


def replays(
    folder: Path = FOLDER, kernel_ns: int = 5_000, copy_ns: int = 37_500, queue_depth: int = 510
) -> list[Replay]:
    """Predicts every replay whose plan is in ``folder``.

    Args:
        folder: results of the run.
        kernel_ns, copy_ns: costs of the executor per kernel and per copy.
        queue_depth: pending kernels, each with its event, until the host blocks (probe.json, "queue").

    Returns:
        one prediction per plan.
    """
    machine = Machine.load(folder / "machine.yaml")
    costs = replace(machine, d2h_latency_ns=copy_ns, h2d_latency_ns=copy_ns, queue_depth=queue_depth)
    rows = load_json(folder / "results.json", lambda data: data["rows"])
    out = []
    programs = {}
    for row in rows:
        workload = row.get("workload")
        path = folder / "replays" / f"plan-{workload}-{row.get('fraction')}-{row.get('planner')}.json.gz"
        if row["kind"] != "replay" or not path.exists():
            continue
        if workload not in programs:
            programs[workload] = Program.load(folder / "replays" / f"program-{workload}.json.gz")
        program = programs[workload]
        limit = row["limit"]
        decisions = rows_of(Plan.load(path).decisions)
        old_ns = Engine(program, replace(machine, issue_ns=0), limit).score(decisions).iteration_ns
        slower = program.with_durations([k.duration_ns + kernel_ns * (k.duration_ns > 0) for k in program.kernels])
        new = Engine(slower, costs, limit).score(decisions)
        before = row["predicted_ns"]
        measured = row["measured_ns"]
        predicted = new.iteration_ns + before - old_ns
        out.append(Replay(workload, row["fraction"], row["planner"], old_ns != before, before, predicted, measured))
    return out
