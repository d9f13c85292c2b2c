"""Helpers for tests of training under a plan: pairs of equal loops, random plans, and counts of live bytes."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor import Captured, PlannedStep, PlannedSteps, capture, capture_step
from simulator import Decision, Plan, Program, Recompute, Rerun, Swap
from simulator.plan import PlanError
from simulator.schedule import lower
from tests.executor.conftest import GPU, mlp
from tests.executor.networks import CLASSES, NETWORKS, images, sgd, small

SMALL = {"small": (small, images(16)), "mlp": (mlp, lambda: (torch.randn(8, 16), torch.randint(CLASSES, (8,))))}


@dataclass
class Loop:
    """A training loop.

    Attributes:
        capture_args: arguments of the capture: model, loss function and optimizer; or a custom step, None and None.
        options: options of the capture.
        micro: ``(i, *batch)`` -> result of micro-batch ``i`` of a step in eager PyTorch; the last one updates.
        batch: index of a batch -> the batch, drawn from the global random state.
        after: function called after step ``i``.
        others: function returning further state that both loops must share, compared by ``repr``.
        norm: gradient norm in the last eager step, if gradients are clipped.
    """

    capture_args: tuple[Any, Any, Any]
    models: list[nn.Module]
    optimizers: list[Optimizer]
    micro: Callable[..., Any]
    batch: Callable[[int], tuple[Any, ...]]
    options: dict[str, Any] = field(default_factory=dict)
    after: Callable[[int], object] = int
    others: Callable[[], object] = int
    norm: Tensor | None = None

    @property
    def model(self) -> Any:
        return self.models[0]

    @property
    def optimizer(self) -> Optimizer:
        return self.optimizers[0]

    @property
    def count(self) -> int:
        """Number of micro-batches per step."""
        return self.options.get("accumulate", 1)

    def state(self) -> tuple[list[dict], list[dict]]:
        return [m.state_dict() for m in self.models], [o.state_dict() for o in self.optimizers]


def standard(
    model: nn.Module,
    loss_fn: Any,
    optimizer: Optimizer,
    batch: Callable[[int], tuple[Any, ...]],
    loss: Callable[..., Any] | None = None,
    **options: Any,
) -> Loop:
    """Builds a loop for ``capture(model, loss_fn, optimizer, batch, **options)``.

    Args:
        loss: ``(model, *batch)`` -> the loss, or the loss and further results; ``loss_fn(model(x), y)`` by default.
    """
    compute = loss or (lambda model, *batch: loss_fn(model(*batch[:-1]), batch[-1]))
    autocast, scaler, clip = (options.get(key) for key in ("autocast", "scaler", "clip_norm"))

    def micro(i: int, *batch: Any) -> Any:
        if i == 0:
            optimizer.zero_grad()
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            result = compute(model, *batch)
        value, *rest = result if isinstance(result, tuple) else (result,)
        if loop.count > 1 and options.get("average", True):
            value = value / loop.count
        (scaler.scale(value) if scaler else value).backward()
        if i == loop.count - 1:
            update()
        return (value, *rest) if rest else value

    def update() -> None:
        if clip is not None:
            if scaler:
                scaler.unscale_(optimizer)
            loop.norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scaler:
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()

    loop = Loop((model, loss_fn, optimizer), [model], [optimizer], micro, batch, options)
    if scaler:
        loop.others = scaler.state_dict
    return loop


def custom(
    step: Callable[..., Any],
    models: list[nn.Module],
    optimizers: list[Optimizer],
    batch: Callable[[int], tuple[Any, ...]],
    **fields: Any,
) -> Loop:
    """Builds a loop for ``capture_step(step, *batch)``."""
    return Loop((step, None, None), models, optimizers, lambda i, *batch: step(*batch), batch, **fields)


def network(
    name: str | tuple[Callable[[], nn.Module], Callable[[], Any]],
    make_optimizer: Callable[..., Optimizer] = sgd,
    device: str = "cpu",
    **options: Any,
) -> Loop:
    """Builds a loop for a tiny network by name, or by functions that create a network and its batches."""
    make, batch = (NETWORKS | SMALL)[name] if isinstance(name, str) else name
    model = make().to(device)
    return standard(
        model, nn.CrossEntropyLoss(), make_optimizer(model), lambda _: tuple(t.to(device) for t in batch()), **options
    )


class Twins:
    """Two equal loops, one trained under a plan and one eagerly, with the same batches and random numbers.

    Args:
        loop: name of a network, or a function that builds a loop from the other arguments.
    """

    def __init__(self, loop: Callable[..., Loop] | str, *args: Any, **options: Any) -> None:
        self.ours, self.eager = (self._build(loop, *args, **options) for _ in range(2))
        self.seed = self.steps = 0  # random seed, also the index of the next batch; number of steps so far
        self.returned: list[tuple[Any, Any]] = []  # results of planned steps, and copies of them

    @staticmethod
    def _build(loop: Callable[..., Loop] | str, *args: Any, **options: Any) -> Loop:
        torch.manual_seed(0)
        return network(loop, *args, **options) if isinstance(loop, str) else loop(*args, **options)

    def next_batch(self, offset: int = 0) -> tuple[Any, ...]:
        with torch.random.fork_rng():
            torch.manual_seed(100 + self.seed + offset)
            return self.ours.batch(self.seed + offset)

    def captured(self, check: bool = False, **options: Any) -> Captured:
        """Captures our loop; ``check`` runs the differential check, too, which repeats what these tests compare."""
        (first, *rest), batch = self.ours.capture_args, self.next_batch()
        options = self.ours.options | {"check": check} | options
        if not isinstance(first, nn.Module):
            return capture_step(first, *batch, machine=GPU, **options)
        return capture(first, *rest, batch if len(batch) > 1 else batch[0], machine=GPU, **options)

    def steps_under(self, planner: Callable[..., Plan], limit: int | float = 2**30, **options: Any) -> PlannedSteps:
        return PlannedSteps(*self.ours.capture_args, GPU, limit, planner, **self.ours.options, **options)

    def eager_step(self) -> Any:
        """Runs the eager loop's next step, which has one micro-batch."""
        batch = self.next_batch()
        torch.manual_seed(self.seed)
        self.seed += 1
        return self.eager.micro(0, *batch)

    def micro(self, step: Callable[..., Any], i: int, ours: Sequence[Any], theirs: Sequence[Any]) -> None:
        """Runs micro-batch ``i`` in both loops and asserts equal results from equal random states."""
        self.at_once(step, [ours], [theirs], i)

    def at_once(self, step: Callable[..., Any], ours: Sequence[Any], theirs: Sequence[Any], first: int = 0) -> None:
        """Runs all micro-batches from ``first`` in one planned call; its result must be the sum of the eager ones."""
        torch.manual_seed(self.seed)
        result = step(*(ours if len(ours) > 1 else ours[0]))
        random_state = torch.get_rng_state()
        torch.manual_seed(self.seed)
        expected, *others = [self.eager.micro(i, *batch) for i, batch in enumerate(theirs, first)]
        equal(result, sum(others, expected) if others else expected)
        assert torch.equal(random_state, torch.get_rng_state())
        assert not any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(result))
        self.returned.append((result, copy.deepcopy(result)))
        self.seed += len(ours)

    def train(self, step: Callable[..., Any], steps: int = 1, at_once: bool = False, compare: bool = True) -> None:
        """Trains both loops and asserts equal results, batches, random states and trained state after each step.

        Args:
            at_once: whether to pass all micro-batches of a step in one call.
            compare: whether to compare the trained state, which is invalid within ``with step:``.
        """
        for _ in range(steps):
            ours = [self.next_batch(i) for i in range(self.ours.count)]
            theirs = copy.deepcopy(ours)
            if at_once:
                self.at_once(step, ours, theirs)
            else:
                for i, pair in enumerate(zip(ours, theirs, strict=True)):
                    self.micro(step, i, *pair)
            equal(ours, theirs)
            self.finish_step(step, compare)

    def finish_step(self, step: Any, compare: bool = True) -> None:
        """Compares both loops after a step."""
        if self.eager.norm is not None:
            equal(step.grad_norm, self.eager.norm)
        for loop in (self.ours, self.eager):
            loop.after(self.steps)
        self.steps += 1
        if compare:
            self.compare()

    def go_on_eagerly(self, steps: int = 1) -> None:
        """Trains both loops eagerly."""
        for _ in range(steps):
            batch = self.next_batch()
            for loop in (self.ours, self.eager):
                torch.manual_seed(self.seed)
                loop.micro(0, *batch)
                for model in loop.models:  # an optimizer may leave gradients of some parameters
                    model.zero_grad()
            self.seed += 1
        self.compare()

    def compare(self) -> None:
        for result, original in self.returned:
            equal(result, original)
        keep = self.ours.options.get("keep_grads", False)
        for model, twin in zip(self.ours.models, self.eager.models, strict=True):
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                equal(p.grad, q.grad if keep else None)
        equal_states(self.ours.state(), self.eager.state())
        assert repr(self.ours.others()) == repr(self.eager.others())


def bit_identical(a: Tensor, b: Tensor) -> bool:
    """Returns True if two tensors are bit-identical, on any devices; NaN equals NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if a.is_floating_point() and a.isnan().any():
        return torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())
    left, right = (t.detach().cpu().contiguous().flatten().view(torch.uint8) for t in (a, b))
    return torch.equal(left, right)


def equal(ours: Any, theirs: Any) -> None:
    """Asserts that all leaves are equal, and tensors bit-identical."""
    for a, b in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        assert bit_identical(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else repr(a) == repr(b)


def equal_states(ours: tuple[list[dict], list[dict]], theirs: tuple[list[dict], list[dict]]) -> None:
    """Asserts equal states of models and optimizers; a plan's initial optimizer state of zeros equals no state."""
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert list(a) == list(b)
        equal(a, b)
    for a, b in zip(ours[1], theirs[1], strict=True):
        equal(a["param_groups"], b["param_groups"])
        if b["state"]:
            assert [(p, list(values)) for p, values in a["state"].items()] == [
                (p, list(values)) for p, values in b["state"].items()
            ]
            equal(a["state"], b["state"])
        assert b["state"] or not any(v.any() for v in tree_leaves(a["state"]) if isinstance(v, Tensor))


def random_plan(program: Program, seed: int, empty_share: float = 0.3) -> Plan:
    """Draws a random plan that is valid for the program.

    It contains swaps (early copies, late ends, pinned or synchronous, wrapping gaps) and recomputations.

    Args:
        empty_share: probability that a gap is left empty of decisions.
    """
    rng = random.Random(seed)
    extra_rng = random.Random(seed)
    n = len(program.kernels)
    decisions: list[Swap | Recompute] = []
    for gap in program.gaps():
        if rng.random() < empty_share:
            continue
        late = rng.randint(0, (gap.before - gap.after - 1) % n) if rng.random() < 0.3 else 0
        after = (gap.after + late) % n
        span = (gap.before - after - 1) % n
        prefetch = (after + rng.randint(0, span)) % n if rng.random() < 0.3 else None
        early = (after - extra_rng.randint(0, n // 4)) % n if extra_rng.random() < 0.4 else None
        decision: Swap | Recompute = Swap(gap.tensor, after, gap.before, prefetch, rng.random() < 0.1, early)
        if rng.random() < 0.4:
            position = after + 1 + extra_rng.randint(0, span) if extra_rng.random() < 0.4 else None
            decision = Recompute(gap.tensor, after, gap.before, rng.random() < 0.5, position)
        same = [d for d in decisions if d.tensor == gap.tensor]  # only these can conflict with it
        if fits(program, [*same, decision]):
            decisions.append(decision)
        elif isinstance(decision, Swap) and fits(program, [*same, replace(decision, copy=None)]):
            decisions.append(replace(decision, copy=None))
    return Plan(tuple(decisions), program.fingerprint)


def random_reruns(program: Program, seed: int) -> Plan:
    """Draws swaps and single-kernel recomputations, some of them repeated."""
    rng = random.Random(seed)
    recomputed = random_plan(program, seed).decisions
    chains = Plan(tuple(d for d in recomputed if isinstance(d, Recompute)))
    decisions = list[Decision](lower(program, chains).reruns)
    some = rng.sample(decisions, min(20, len(decisions)))
    several = [Rerun(d.kernel, rng.randint(d.kernel + 1, len(program.kernels) - 1)) for d in some]
    swaps = [d for d in recomputed if isinstance(d, Swap)]
    for extra in several + rng.sample(swaps, min(30, len(swaps))):
        if extra not in decisions and fits(program, [*decisions, extra], check_schedule=True):
            decisions.append(extra)
    return Plan(tuple(decisions), program.fingerprint)


KINDS = {"none": (), "swaps": (Swap,), "recompute": (Recompute,), "both": (Swap, Recompute)}


def plan_of(program: Program, kind: str, seed: int = 0, empty_share: float = 0.3) -> Plan:
    """Draws a random plan of one of ``KINDS``, or of kind ``reruns``."""
    if kind == "reruns":
        return random_reruns(program, seed)
    decisions = random_plan(program, seed, empty_share).decisions
    return Plan(tuple(d for d in decisions if isinstance(d, KINDS[kind])), program.fingerprint)


def moving(program: Program, *_: Any) -> Plan:
    """Returns a plan that evicts a tensor in nearly every gap."""
    return random_plan(program, 0, empty_share=0.1)


def swapping_the_batch(program: Program) -> Plan:
    """Swaps the batch's first tensor within the step and across its boundary."""
    x = next(i for i, t in enumerate(program.tensors) if t.name == "input0")
    uses = program.accesses[x]
    return Plan((Swap(x, uses[0], uses[-1]), Swap(x, uses[-1], uses[0])))


def fits(program: Program, decisions: list[Decision], check_schedule: bool = False) -> bool:
    """Returns True if the decisions are valid; ``check_schedule`` adds the checks of the schedule."""
    plan = Plan(tuple(decisions))
    try:
        plan.check(program)
        if check_schedule:
            lower(program, plan)
    except PlanError:
        return False
    return True


def required(program: Program, plan: Plan) -> int:
    return lower(program, plan).required_bytes


def tight(captured: Captured, plan: Plan, **options: bool) -> PlannedStep:
    """Creates a step at the smallest limit at which the plan is feasible."""
    return PlannedStep(captured, replace(plan, limit=required(captured.program, plan)), GPU, **options)


def over_the_boundary(captured: Captured, factor: float = 1.0, room: int = 0, **options: Any) -> PlannedStep:
    """Creates a step that swaps parameters and optimizer state across its boundary, some of them in flight there.

    Its limit is ``factor`` times what the plan needs, plus ``room`` bytes.
    """
    program = captured.program
    moved = [i for i, t in enumerate(program.tensors) if t.kind in ("parameter", "optimizer_state")]
    plan = Plan(tuple(Swap(*gap) for gap in program.gaps() if gap.after > gap.before and gap.tensor in moved))
    aim = int(1.02 * required(program, plan))
    step = PlannedStep(captured, replace(plan, limit=aim), GPU, int(factor * aim + room), **options)
    assert set(step.order.start.values()) == {"host", "out", "in"}
    return step


def drawn_at_night(count: int) -> list[Any]:
    """Returns parameters of 50 seeds each, from 0 on; with SEED=random, other ones in every run."""
    first = random.SystemRandom().randrange(2**30) if os.environ.get("SEED") == "random" else 0
    return [
        pytest.param(range(first + i, first + i + 50), marks=pytest.mark.nightly, id=f"{i}")
        for i in range(0, count, 50)
    ]


def planned(name: str = "small", make_optimizer=sgd, **options: bool) -> tuple[Twins, PlannedStep]:
    """Returns twins of a network and their step under a random plan."""
    twins = Twins(name, make_optimizer)
    captured = twins.captured()
    return twins, tight(captured, random_plan(captured.program, 0), **options)


class Bytes(TorchDispatchMode):
    """Counts bytes of live storages after every operator, without host buffers and random states."""

    def __init__(self, step: PlannedStep, batch: Sequence[Tensor]) -> None:
        super().__init__()
        self.host = {b.host.untyped_storage()._cdata for b in step.state.blocks.blocks.values()}
        self.live: set[StorageWeakRef] = set()
        self.peak = 0
        self._note([b.device_tensor for b in step.state.bindings] + list(batch))

    def _note(self, tensors: list) -> None:
        for x in tensors:
            if isinstance(x, Tensor) and x.dtype != torch.uint8 and x.untyped_storage()._cdata not in self.host:
                self.live.add(StorageWeakRef(x.untyped_storage()))

    def bytes(self) -> int:
        self.live = {r for r in self.live if not r.expired()}
        return sum(torch.UntypedStorage._new_with_weak_ptr(r.cdata).nbytes() for r in self.live)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self._note(tree_leaves(out))
        self.peak = max(self.peak, self.bytes())
        return out


def under_every_plan(twins: Twins, captured: Captured, seed: int, more: tuple[str, ...] = ()) -> None:
    """Trains twins under plans of every kind, each at its smallest feasible limit."""
    before = [p.detach().clone() for model in twins.ours.models for p in model.parameters()]
    for kind in (*KINDS, *more):
        plan = plan_of(captured.program, kind, seed, empty_share=0.1)
        assert {type(d) for d in plan.decisions} >= set(KINDS.get(kind, ()))
        step = tight(captured, plan)
        twins.train(step, 2)
        if twins.ours.count > 1:
            twins.train(step, 1, at_once=True)
            twins.train(step)
        assert step.peak_bytes == step.order.peak <= step.limit
        step.finish()
    if twins.ours.after is int:
        with step:
            twins.train(step, 2, compare=False)
        twins.compare()
    after = [p for model in twins.ours.models for p in model.parameters()]
    assert not twins.ours.optimizers or not all(map(bit_identical, before, after))
