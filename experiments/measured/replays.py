"""Plans that were replayed on an H200, predicted by the simulator's rules and the costs of that executor.

The replays of the first GPU run issued every kernel and copy from Python, with a timed event behind each. Such an
executor has costs that a training step has not: ``KERNEL_NS`` for each kernel and ``COPY_NS`` for each copy, fitted to
the rows of ResNet-50 alone (least mean error, to 250 and 2,500 ns), so that those of GPT-2 and Llama test them. The
host's time and the queue were measured.

1. The program has its measured durations; each grows by KERNEL_NS.
2. Plans of ``lp_round`` and ``annealing`` were made again (``remade``), and the others are equal to those that ran: the
   rules of that time give the row's prediction to the nanosecond. The difference of the two is added.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from simulator import Engine, Machine, Plan, Program
from simulator.compiled.encoding import rows_of
from simulator.files import load_json

FOLDER = Path(__file__).parent.parent / "results" / "gpu_h200"
FITTED = "resnet50_imagenet_bf16"  # whose rows the two costs are fitted to
KERNEL_NS, COPY_NS = 5_000, 37_500
QUEUE_DEPTH = 510  # kernels, each with its event, before the host waits (probe.json, "queue")


class Replay(NamedTuple):
    """One replayed plan.

    Attributes:
        remade: the plan is not the one that ran, but one of the same planner.
        before_ns, predicted_ns, measured_ns: of an iteration: predicted then, predicted now, measured.
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
        """(predicted - measured) / measured."""
        return self.predicted_ns / self.measured_ns - 1


def replays(folder: Path = FOLDER) -> list[Replay]:
    """Predicts every replay whose plan is in ``folder``."""
    machine = Machine.load(folder / "machine.yaml")
    costs = replace(machine, d2h_latency_ns=COPY_NS, h2d_latency_ns=COPY_NS, queue_depth=QUEUE_DEPTH)
    rows = load_json(folder / "results.json", lambda data: data["rows"])  # type: ignore[index]
    out, programs = [], {}
    for row in rows:
        name = f"{row.get('workload')}-{row.get('fraction')}-{row.get('planner')}"
        path = folder / "replays" / f"plan-{name}.json.gz"
        workload = row.get("workload")
        if row["kind"] != "replay" or not path.exists():
            continue
        if workload not in programs:
            programs[workload] = Program.load(folder / "replays" / f"program-{workload}.json.gz")
        program, plan = programs[workload], Plan.load(path)
        limit, decisions = row["limit"], rows_of(plan.decisions)
        then = Engine(program, replace(machine, issue_ns=0), limit).score(decisions).iteration_ns
        kernels = [replace(k, duration_ns=k.duration_ns + KERNEL_NS * (k.duration_ns > 0)) for k in program.kernels]
        slower = replace(program, kernels=tuple(kernels))
        now = Engine(slower, costs, limit).score(decisions).iteration_ns
        before = row["predicted_ns"]
        out.append(
            Replay(workload, row["fraction"], row["planner"], then != before, before, now + before - then,
                   row["measured_ns"])
        )  # fmt: skip
    return out
