"""Expert iteration (Anthony et al., "Thinking Fast and Slow with Deep Learning and Tree Search", 2017) for the policy.

A ``Lesson`` is a task and the fastest plans that are known for it. The first teacher is annealing, which knows no
network (``first_plans``); the network learns what its plans do with every gap (``train``), and with it the search finds
faster ones (``better_plans``), which it learns in the next round. experiments/pretrain.py makes the tasks.

What the network is asked (``Example.item``): a task of which a random share of the gaps is decided as in one of the
plans, and what that plan does with the others; or nothing is decided, and what all plans do, the faster ones counting
more. A gap counts by how much of what is over the limit it can take away. The weights that are kept are those of the
epoch whose search, with few calls, is best on families that the network does not learn: cross-entropy does not tell
which network plans well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import swa_utils
from torch_geometric.data import HeteroData

from agents.learned.checkpoint import read_training_state, write_training_state
from agents.learned.optimisation import descend
from agents.learned.policy import Guided, decoded, halving
from agents.learned.policy_net import PolicyNet, batch_of, data_of
from agents.planner import MIB, Rows
from agents.search.annealing import everything
from agents.search.local_search import anneal
from simulator.compiled.encoding import BEFORE, TENSOR, way_of
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.modes import KEPT
from simulator.moves.gap_graph import STATE, UNDECIDED, GapGraph
from simulator.moves.moves import Moves
from simulator.program import Program

Plans = list[tuple[int, Rows]]  # iteration time in ns, and rows; the fastest first

ROOM, MOST_LIMIT = 1.15, 0.9
LEAST_CALLS, MOST_CALLS, WORK = 2_000, 12_000, 12_000_000  # of a teacher's search: WORK / kernels, within these
HOT, MILD, WARM, COLD = 1e-2, 3e-3, 1e-3, 3e-5
RUNS = ((0, HOT), (1, HOT), (2, MILD))  # seed and first temperature of the first teacher's
AGAIN = 2  # runs from its best plan, with half the calls
KEEP = 5  # plans of a lesson
MOST = 0.6  # overhead above which a plan teaches nothing of use
SPREAD = 0.004  # of the ideal time: a plan that is slower by so much counts 1/e
LEAST = 0.1  # what a gap counts of which the limit asks nothing
SURE = -12.0  # log-probabilities below this are no worse
NARROW = 0.05  # the least scale of a column
CALLS, CLIP = 1_000, 3.0  # of validation: simulator calls, and the most points that a task counts
AVERAGE = 0.995  # what a step leaves of the average of the weights, which is what is validated and kept


@dataclass(frozen=True)
class Lesson:
    """A task, and the fastest plans that are known for it."""

    program: Program
    machine: Machine
    limit: int
    mode: str
    plans: Plans

    @property
    def overhead(self) -> float:
        """Of the best plan, as a fraction of the ideal time."""
        return self.plans[0][0] / self.program.ideal_ns - 1

    @property
    def teaches(self) -> bool:
        """Is there anything to be learned?"""
        return bool(self.plans) and 0 < self.overhead < MOST


@dataclass(frozen=True)
class Training:
    """How the network is made and trained: AdamW, whose rate rises for ``warm_up`` steps, then falls to nothing.

    Raises:
        ValueError: a figure is out of range.
    """

    width: int = 64
    layers: int = 3
    epochs: int = 20
    batch_size: int = 8
    learning_rate: float = 2e-3
    weight_decay: float = 0.02
    warm_up: int = 100
    undecided: float = 0.4  # share of the items of which nothing is decided

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ValueError(f"{name}: expected a number above 0, got {value!r}")


# ------------------------------------------------------------------------------------------ the teachers


def reachable(program: Program, machine: Machine, limit: int, mode: str) -> int:
    """The limit, or where emptying every gap needs more: ``ROOM`` times that, but less than the peak."""
    score = Engine(program, machine, limit).score(everything(program, mode, MIB))
    return limit if score.feasible else min(int(ROOM * score.required_bytes), int(MOST_LIMIT * program.peak_bytes))


def first_plans(program: Program, machine: Machine, limit: int, mode: str) -> Plans:
    """Annealing's, from every gap emptied; none where that does not fit."""
    rows = everything(program, mode, MIB)
    engine = Engine(program, machine, limit)
    score = engine.score(rows)
    if not score.feasible:
        return []
    moves, calls = Moves(program, limit, mode, MIB, 0), teacher_calls(program)
    plans: Plans = []
    for seed, hot in RUNS:
        plans.append(_turned(anneal(moves, engine, rows, score.iteration_ns, calls, hot, COLD, seed)))
        if plans[-1][0] <= program.ideal_ns:
            break
    for seed in range(AGAIN):
        best_ns, best = min(plans, key=_speed)
        if best_ns > program.ideal_ns:
            plans.append(_turned(anneal(moves, engine, best, best_ns, calls // 2, WARM, COLD, len(RUNS) + seed)))
    return sorted(plans, key=_speed)


def better_plans(net: PolicyNet, lesson: Lesson, seed: int) -> Plans:
    """The lesson's plans and two that the search finds with the network: from its own plan, and from the best one."""
    found = Guided(
        Engine(lesson.program, lesson.machine, lesson.limit),
        Moves(lesson.program, lesson.limit, lesson.mode, MIB, seed),
    )
    decoded(net, found, lesson.mode)
    calls, (best_ns, best) = teacher_calls(lesson.program), lesson.plans[0]
    starts = [(best, best_ns, WARM)]
    starts += [(rows, ns, MILD) for ns, rows in found.plans[:1]]
    new = [
        _turned(anneal(found.moves, found.engine, rows, ns, calls, hot, COLD, seed + i))
        for i, (rows, ns, hot) in enumerate(starts)
    ]
    return sorted([*new, *lesson.plans], key=_speed)[:KEEP]


def teacher_calls(program: Program) -> int:
    """Simulator calls of one of the teacher's searches."""
    return max(LEAST_CALLS, min(MOST_CALLS, WORK // len(program.kernels)))


def _turned(found: tuple[Rows, int]) -> tuple[int, Rows]:
    return found[1], found[0]


def _speed(plan: tuple[int, Rows]) -> int:
    return plan[0]


# ---------------------------------------------------------------------------------------- what is learned


class Example:
    """A lesson as the network sees it.

    Attributes:
        graph: of G gaps.
        ways: (P, G), what each of the P plans does with them.
        shares: (P,), how much each plan counts.
        counts: (G,), how much each gap counts.
    """

    def __init__(self, lesson: Lesson) -> None:
        moves = Moves(lesson.program, lesson.limit, lesson.mode, MIB, 0)
        self.graph = GapGraph(lesson.program, lesson.machine, lesson.limit, moves, lesson.mode)
        self.ways = np.zeros((len(lesson.plans), len(self.graph)), np.int64)
        for ways, (_, rows) in zip(self.ways, lesson.plans, strict=True):
            for row in rows.tolist():
                ways[moves.index[row[TENSOR], row[BEFORE]]] = way_of(row)
        times = np.array([ns for ns, _ in lesson.plans], np.float64)
        likely = np.exp(-(times - times[0]) / (SPREAD * lesson.program.ideal_ns))
        self.shares: NDArray[np.float64] = likely / likely.sum()
        self.counts = (LEAST + np.minimum(1, self.graph.nbytes / self.graph.excess)).astype(np.float32)

    def item(self, rng: np.random.Generator, undecided: float) -> HeteroData:
        """The task with some gaps decided, beside what is asked: ``target`` (G, 4) and ``count`` (G,)."""
        gaps = len(self.graph)
        decided, target = np.full(gaps, UNDECIDED), np.zeros((gaps, KEPT + 1), np.float32)
        if rng.random() < undecided:
            for share, ways in zip(self.shares, self.ways, strict=True):
                target[np.arange(gaps), ways] += share
        else:
            ways = self.ways[rng.choice(len(self.ways), p=self.shares)]
            target[np.arange(gaps), ways] = 1
            decided = np.where(rng.random(gaps) < rng.random(), ways, UNDECIDED)
        out = data_of(self.graph, decided)
        out["gap"].target = torch.from_numpy(target)
        out["gap"].count = torch.from_numpy(self.counts * (decided == UNDECIDED))
        return out


def loss(net: PolicyNet, data: HeteroData) -> Tensor:
    """Cross-entropy with the targets, the mean over a task's gaps by what they count, then over tasks."""
    log_chance = net(data).log_softmax(-1).clamp(min=SURE)
    counts, of = data["gap"].count, data["gap"].batch
    each = -(data["gap"].target * log_chance).sum(-1) * counts
    tasks = int(of[-1]) + 1
    total, most = (torch.zeros(tasks).index_add(0, of, x) for x in (each, counts))
    return (total / most.clamp(min=1e-6)).mean()


def network(examples: Sequence[Example], settings: Training, seed: int) -> PolicyNet:
    """One that knows nothing but the columns' means and scales."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    items = [example.item(rng, settings.undecided) for example in examples]
    columns = torch.cat([item["gap"].x for item in items])
    net = PolicyNet(columns.shape[1], items[0]["bin"].x.shape[1], settings.width, settings.layers)
    fixed = columns.shape[1] - STATE  # what is decided is as it is
    net.mean[:fixed] = columns.mean(0)[:fixed]
    net.scale[:fixed] = columns.std(0).clamp(min=NARROW)[:fixed]
    return net


def validate(net: PolicyNet, lessons: Sequence[Lesson]) -> float:
    """Points of overhead above the best plans known, the mean over tasks, with few simulator calls."""
    above = []
    for lesson in lessons:
        engine = Engine(lesson.program, lesson.machine, lesson.limit)
        found = Guided(engine, Moves(lesson.program, lesson.limit, lesson.mode, MIB, 0))
        decoded(net, found, lesson.mode)
        if not found.plans:
            above.append(CLIP)
            continue
        ns, _ = halving(found, max(CALLS - engine.calls, 0), None, 1, MILD, COLD, 0)
        above.append(min(CLIP, 100 * (ns / lesson.program.ideal_ns - 1 - lesson.overhead)))
    return float(np.mean(above))


def train(
    net: PolicyNet, examples: Sequence[Example], held_out: Sequence[Lesson], settings: Training, seed: int,
    state: Path, watch: Callable[[dict[str, Any]], None],
) -> PolicyNet:  # fmt: skip
    """Trains ``net``; returns it with the weights of the epoch that validates best.

    The same to the bit for a seed, whether it was stopped or not.

    Args:
        state: where the training is kept after every epoch, and goes on from.
        watch: told of each epoch: its number, training loss and validation.
    """
    steps = -(-len(examples) // settings.batch_size)
    optimizer = torch.optim.AdamW(net.parameters(), settings.learning_rate, weight_decay=settings.weight_decay)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / settings.warm_up) * max(0.02, 1 - step / (steps * settings.epochs)),
    )
    ema = swa_utils.get_ema_multi_avg_fn(AVERAGE)  # type: ignore[no-untyped-call]
    average = swa_utils.AveragedModel(net, multi_avg_fn=ema)
    averaged = cast(PolicyNet, average.module)
    best, kept, first = float("inf"), net.state_dict(), 0
    if state.exists():
        found = read_training_state(state)
        net.load_state_dict(found["weights"])
        average.load_state_dict(found["average"])
        optimizer.load_state_dict(found["optimizer"])
        rate.load_state_dict(found["rate"])
        best, kept, first = found["best"], found["kept"], found["epoch"]
    for epoch in range(first, settings.epochs):
        rng = np.random.default_rng((seed, epoch))
        losses = []
        for batch in _batches(examples, settings.batch_size, rng):
            value = loss(net, batch_of([examples[i].item(rng, settings.undecided) for i in batch]))
            losses.append(descend(value, net, optimizer, 1.0))
            rate.step()
            average.update_parameters(net)
        validation = validate(averaged, held_out)
        if validation < best:
            best, kept = validation, {key: value.clone() for key, value in averaged.state_dict().items()}
        watch({"epoch": epoch, "loss": float(np.mean(losses)), "validation": validation})
        write_training_state(state, {
            "weights": net.state_dict(), "average": average.state_dict(), "optimizer": optimizer.state_dict(),
            "rate": rate.state_dict(), "best": best, "kept": kept, "epoch": epoch + 1,
        })  # fmt: skip
    net.load_state_dict(kept)
    return net.eval()


def _batches(examples: Sequence[Example], size: int, rng: np.random.Generator) -> list[list[int]]:
    """Examples of about the same size together, which leaves little padding."""
    blur = rng.random(len(examples)) * 60
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].graph) + blur[i])
    out = [order[i : i + size] for i in range(0, len(order), size)]
    return [out[i] for i in rng.permutation(len(out))]
