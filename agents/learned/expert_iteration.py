"""Expert iteration for the policy.

A ``Lesson`` is a task with its fastest known plans. The first teacher is annealing without a network
(``first_plans``). The network learns the plans' decision for each gap (``train``); the search guided by it finds
faster plans (``better_plans``), which are the data of the next round. experiments/pretrain.py makes the tasks.
``validate`` selects the epoch by a short search on held-out families, because cross-entropy does not predict the
quality of plans.

Source: Anthony et al., "Thinking Fast and Slow with Deep Learning and Tree Search", 2017.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import swa_utils
from torch_geometric.data import HeteroData

from agents.learned.checkpoint import read_training_state, write_training_state
from agents.learned.optimization import descend
from agents.learned.policy import GuidedSearch, decode_plans, successive_halving
from agents.learned.policy_net import PolicyNet, batch_of, data_of
from agents.planner import MIB, Rows
from agents.search.annealing import everything
from agents.search.local_search import anneal
from simulator.compiled.encoding import BEFORE, TENSOR, choice_of
from simulator.compiled.engine import Engine
from simulator.machine import Machine
from simulator.modes import Choice
from simulator.moves.gap_graph import UNDECIDED, GapGraph, GapState
from simulator.moves.moves import Moves
from simulator.program import Program

Plans = list[tuple[int, Rows]]  # iteration time in ns and rows, fastest first


@dataclass(frozen=True)
class ExpertOptions:
    """Parameters of the teachers, the training data and the validation; temperatures as fractions of the ideal time."""

    # Tasks.
    room: float = 1.15  # an infeasible limit is raised to that multiple of the emptied plan's need
    max_limit: float = 0.9  # but at most to that fraction of the peak
    max_overhead: float = 0.6  # of the best plan; a task above it is not used
    max_plans: int = 5  # of a lesson
    # Calls of a teacher's search: those that simulate ``kernels`` kernels, within bounds.
    kernels: int = 12_000_000
    min_calls: int = 2_000
    max_calls: int = 12_000
    runs: tuple[tuple[int, float], ...] = ((0, 1e-2), (1, 1e-2), (2, 3e-3))  # seeds and first temperatures
    more_runs: int = 2  # from the best plan of these, with half the calls
    mild: float = 3e-3  # first temperature from a decoded plan
    warm: float = 1e-3  # first temperature from the best plan
    cold: float = 3e-5  # last temperature
    # Training.
    spread: float = 4e-3  # fraction of the ideal time by which a plan is slower if its weight is 1/e
    min_weight: float = 0.1  # of a gap
    min_log_prob: float = -12.0  # clip of log-probabilities, so that one gap cannot dominate a batch
    min_scale: float = 0.05  # of an input column, so that one that hardly varies is not blown up
    ema_decay: float = 0.995  # of the weight average, which is validated and kept
    # Validation.
    validation_calls: int = 1_000
    max_points: float = 3.0  # of a task: one without a plan must not decide the mean


OPTIONS = ExpertOptions()


@dataclass(frozen=True)
class Lesson:
    """Task with its fastest known plans."""

    program: Program
    machine: Machine
    limit: int
    mode: str
    plans: Plans

    @property
    def overhead(self) -> float:
        """Overhead of the best plan, as a fraction of the ideal time."""
        return self.plans[0][0] / self.program.ideal_ns - 1

    @property
    def is_useful(self) -> bool:
        """Whether the lesson is useful: it has plans, and the best one's overhead is above 0 and not too large."""
        return bool(self.plans) and 0 < self.overhead < OPTIONS.max_overhead


@dataclass(frozen=True)
class Training:
    """Hyperparameters of the policy: AdamW with linear warm-up over ``warm_up`` steps and linear decay.

    Raises:
        ValueError: if a value is not positive.
    """

    width: int = 64
    layers: int = 3
    epochs: int = 20
    batch_size: int = 8
    learning_rate: float = 2e-3
    weight_decay: float = 0.02
    warm_up: int = 100
    undecided: float = 0.4  # fraction of items without decided gaps

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ValueError(f"{name}: expected a number above 0, got {value!r}")


# ------------------------------------------------------------------------------------------ the teachers


def reachable(program: Program, machine: Machine, limit: int, mode: str) -> int:
    """Returns the limit, raised to what the fully emptied plan needs, with some room, if that plan does not fit."""
    score = Engine(program, machine, limit).score(everything(program, mode, MIB))
    if score.feasible:
        return limit
    return min(int(OPTIONS.room * score.required_bytes), int(OPTIONS.max_limit * program.peak_bytes))


def first_plans(program: Program, machine: Machine, limit: int, mode: str) -> Plans:
    """Returns annealing's plans from the fully emptied plan, fastest first; no plans if that one does not fit."""
    rows = everything(program, mode, MIB)
    engine = Engine(program, machine, limit)
    score = engine.score(rows)
    if not score.feasible:
        return []
    moves = Moves(program, limit, mode, MIB, 0)
    calls = teacher_calls(program)
    plans: Plans = []
    for seed, hot in OPTIONS.runs:
        result = anneal(moves, engine, rows, score.iteration_ns, calls, hot, OPTIONS.cold, seed)
        plans.append(_time_first(result))
        if plans[-1][0] <= program.ideal_ns:
            break
    for seed in range(len(OPTIONS.runs), len(OPTIONS.runs) + OPTIONS.more_runs):
        best_ns, best = min(plans, key=itemgetter(0))
        if best_ns > program.ideal_ns:
            result = anneal(moves, engine, best, best_ns, calls // 2, OPTIONS.warm, OPTIONS.cold, seed)
            plans.append(_time_first(result))
    return sorted(plans, key=itemgetter(0))


def better_plans(net: PolicyNet, lesson: Lesson, seed: int) -> Plans:
    """Returns the fastest of the lesson's plans and two that the guided search finds, up to ``max_plans``.

    The guided search starts from the lesson's best plan and from the best decoded one.
    """
    guided = GuidedSearch(
        Engine(lesson.program, lesson.machine, lesson.limit),
        Moves(lesson.program, lesson.limit, lesson.mode, MIB, seed),
    )
    decode_plans(net, guided, lesson.mode)
    calls = teacher_calls(lesson.program)
    (best_ns, best) = lesson.plans[0]
    starts = [(best, best_ns, OPTIONS.warm)]
    starts += [(rows, ns, OPTIONS.mild) for ns, rows in guided.plans[:1]]
    improved = [
        _time_first(anneal(guided.moves, guided.engine, rows, ns, calls, hot, OPTIONS.cold, seed + i))
        for i, (rows, ns, hot) in enumerate(starts)
    ]
    return sorted([*improved, *lesson.plans], key=itemgetter(0))[: OPTIONS.max_plans]


def teacher_calls(program: Program) -> int:
    """Returns the simulator calls of one search of the teacher."""
    return max(OPTIONS.min_calls, min(OPTIONS.max_calls, OPTIONS.kernels // len(program.kernels)))


def _time_first(result: tuple[Rows, int]) -> tuple[int, Rows]:
    return result[1], result[0]


# ------------------------------------------------------------------------------------------- training data


class Example:
    """Lesson as training data of the network.

    Attributes:
        graph: gap graph with G gaps.
        kinds: (P, G), eviction kind of each gap in each of the P plans.
        shares: (P,), weight of each plan.
        counts: (G,), weight of each gap.
    """

    def __init__(self, lesson: Lesson) -> None:
        moves = Moves(lesson.program, lesson.limit, lesson.mode, MIB, 0)
        self.graph = GapGraph(lesson.program, lesson.machine, lesson.limit, moves, lesson.mode)
        self.kinds = np.zeros((len(lesson.plans), len(self.graph)), np.int64)
        for kinds, (_, rows) in zip(self.kinds, lesson.plans, strict=True):
            for row in rows.tolist():
                kinds[moves.index[row[TENSOR], row[BEFORE]]] = choice_of(row)
        times = np.array([ns for ns, _ in lesson.plans], np.float64)
        weights = np.exp(-(times - times[0]) / (OPTIONS.spread * lesson.program.ideal_ns))
        self.shares: NDArray[np.float64] = weights / weights.sum()
        share = np.minimum(1, self.graph.nbytes / self.graph.excess)
        self.counts = (OPTIONS.min_weight + share).astype(np.float32)

    def item(self, rng: np.random.Generator, undecided: float) -> HeteroData:
        """Returns a training item with ``target`` (G, 4) and ``count`` (G,).

        With probability ``undecided`` no gap is decided, and the target is the weighted mean over plans. Otherwise a
        random fraction of the gaps is decided as in one plan, and the target is that plan.
        """
        gaps = len(self.graph)
        decided = np.full(gaps, UNDECIDED)
        target = np.zeros((gaps, len(Choice)), np.float32)
        if rng.random() < undecided:
            for share, kinds in zip(self.shares, self.kinds, strict=True):
                target[np.arange(gaps), kinds] += share
        else:
            kinds = self.kinds[rng.choice(len(self.kinds), p=self.shares)]
            target[np.arange(gaps), kinds] = 1
            decided = np.where(rng.random(gaps) < rng.random(), kinds, UNDECIDED)
        data = data_of(self.graph, decided)
        data["gap"].target = torch.from_numpy(target)
        data["gap"].count = torch.from_numpy(self.counts * (decided == UNDECIDED))
        return data


def loss(net: PolicyNet, data: HeteroData) -> Tensor:
    """Returns the cross-entropy with the targets: weighted mean over a task's gaps, then mean over tasks."""
    log_probs = net(data).log_softmax(-1).clamp(min=OPTIONS.min_log_prob)
    counts = data["gap"].count
    task_index = data["gap"].batch
    gap_losses = -(data["gap"].target * log_probs).sum(-1) * counts
    tasks = int(task_index[-1]) + 1
    total, weights = (torch.zeros(tasks).index_add(0, task_index, x) for x in (gap_losses, counts))
    return (total / weights.clamp(min=1e-6)).mean()


def network(examples: Sequence[Example], settings: Training, seed: int) -> PolicyNet:
    """Returns an untrained network whose inputs are normalized by the examples' means and scales."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    items = [example.item(rng, settings.undecided) for example in examples]
    columns = torch.cat([item["gap"].x for item in items])
    net = PolicyNet(columns.shape[1], items[0]["bin"].x.shape[1], settings.width, settings.layers)
    fixed = columns.shape[1] - len(GapState._fields)  # columns of decisions are not normalized
    net.mean[:fixed] = columns.mean(0)[:fixed]
    net.scale[:fixed] = columns.std(0).clamp(min=OPTIONS.min_scale)[:fixed]
    return net


def validate(net: PolicyNet, lessons: Sequence[Lesson]) -> float:
    """Returns the mean gap in points between plans of a short search and the best known plans."""
    points = []
    for lesson in lessons:
        engine = Engine(lesson.program, lesson.machine, lesson.limit)
        guided = GuidedSearch(engine, Moves(lesson.program, lesson.limit, lesson.mode, MIB, 0))
        decode_plans(net, guided, lesson.mode)
        if not guided.plans:
            points.append(OPTIONS.max_points)
            continue
        calls = max(OPTIONS.validation_calls - engine.calls, 0)
        ns, _ = successive_halving(guided, calls, None, jobs=1, hot=OPTIONS.mild, cold=OPTIONS.cold, seed=0)
        points.append(min(OPTIONS.max_points, 100 * (ns / lesson.program.ideal_ns - 1 - lesson.overhead)))
    return float(np.mean(points))


def train(
    net: PolicyNet,
    examples: Sequence[Example],
    held_out: Sequence[Lesson],
    settings: Training,
    seed: int,
    state: Path,
    watch: Callable[[dict[str, Any]], None],
) -> PolicyNet:
    """Trains ``net`` and returns it with the weights of the epoch that validates best.

    For a fixed seed the result is bit-identical, whether or not training was interrupted.

    Args:
        net: network to train.
        examples: training data.
        held_out: lessons for validation.
        settings: hyperparameters.
        seed: random seed.
        state: file of the training state, written after every epoch and resumed from.
        watch: called after each epoch with its number, training loss and validation.
    """
    steps = -(-len(examples) // settings.batch_size)
    optimizer = torch.optim.AdamW(net.parameters(), settings.learning_rate, weight_decay=settings.weight_decay)
    rate = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / settings.warm_up) * max(0.02, 1 - step / (steps * settings.epochs)),
    )
    ema = swa_utils.get_ema_multi_avg_fn(OPTIONS.ema_decay)
    average = swa_utils.AveragedModel(net, multi_avg_fn=ema)
    averaged = cast(PolicyNet, average.module)
    best = float("inf")
    best_weights = net.state_dict()
    first_epoch = 0
    if state.exists():
        checkpoint = read_training_state(state)
        net.load_state_dict(checkpoint["weights"])
        average.load_state_dict(checkpoint["average"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        rate.load_state_dict(checkpoint["rate"])
        best = checkpoint["best"]
        best_weights = checkpoint["kept"]
        first_epoch = checkpoint["epoch"]
    for epoch in range(first_epoch, settings.epochs):
        rng = np.random.default_rng((seed, epoch))
        losses = []
        for batch in _batches(examples, settings.batch_size, rng):
            value = loss(net, batch_of([examples[i].item(rng, settings.undecided) for i in batch]))
            losses.append(descend(value, net, optimizer, 1.0))
            rate.step()
            average.update_parameters(net)
        validation = validate(averaged, held_out)
        if validation < best:
            best = validation
            best_weights = {key: value.clone() for key, value in averaged.state_dict().items()}
        watch({"epoch": epoch, "loss": float(np.mean(losses)), "validation": validation})
        write_training_state(
            state,
            {
                "weights": net.state_dict(),
                "average": average.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rate": rate.state_dict(),
                "best": best,
                "kept": best_weights,
                "epoch": epoch + 1,
            },
        )
    net.load_state_dict(best_weights)
    return net.eval()


def _batches(examples: Sequence[Example], size: int, rng: np.random.Generator) -> list[list[int]]:
    """Returns batches of examples of similar size, which need little padding."""
    blur = rng.random(len(examples)) * 60
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].graph) + blur[i])
    batches = [order[i : i + size] for i in range(0, len(order), size)]
    return [batches[i] for i in rng.permutation(len(batches))]
