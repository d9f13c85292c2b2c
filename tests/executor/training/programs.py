"""What the tests of training under a plan share: a model and its twin, plans of every kind, the bytes really alive."""

import random
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from executor import Captured, PlannedStep, capture
from simulator import Decision, Machine, Plan, Program, Recompute, Rerun, Swap
from simulator.plan import PlanError
from simulator.schedule import lower
from tests.executor.networks import NETWORKS, images, sgd, small

# Copies are about as slow as the kernels of these networks: 5 us a launch, 1 us + 1 ns a byte.
GPU = Machine("test", 2**34, 10**9, 10**9, 1000, flops_per_s={"float32": 10**13}, memory_bytes_per_s=4 * 10**11)
Parts = tuple[nn.Module, nn.Module, torch.optim.Optimizer]


class Twins:
    """Two equal models, one trained under a plan and one eagerly, on the same batches with the same random numbers."""

    def __init__(
        self, network: str, optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd, device: str = "cpu"
    ) -> None:
        model, self.batch = (NETWORKS | {"small": (small, images(16))})[network]
        self.device = device

        def parts() -> Parts:
            torch.manual_seed(0)
            made = model().to(device)
            return made, nn.CrossEntropyLoss(), optimizer(made)

        self.ours, self.eager = parts(), parts()
        self.rng = torch.Generator().manual_seed(1)
        self.seed = 0

    def next_batch(self) -> tuple[Tensor, Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(100 + self.seed)
            x, y = self.batch()
        return x.to(self.device), y.to(self.device)

    def captured(self) -> Captured:
        return capture(*self.ours, self.next_batch(), machine=GPU)

    def eager_step(self) -> Tensor:
        model, loss_fn, optimizer = self.eager
        x, y = self.next_batch()
        torch.manual_seed(self.seed)
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def train_within(self, step: Callable[..., Tensor], steps: int) -> None:
        """Both go on, in ``with step:``, where only the loss may be looked at; it is equal after each step."""
        for _ in range(steps):
            x, y = self.next_batch()
            torch.manual_seed(self.seed)
            assert same(step(x, y), self.eager_step())
            self.seed += 1

    def train(self, step: Callable[..., Tensor], steps: int = 1) -> None:
        """Both go on; the loss, the state and the random state are equal after each step."""
        for _ in range(steps):
            x, y = self.next_batch()
            before = x.clone(), y.clone()
            torch.manual_seed(self.seed)
            loss = step(x, y)
            drawn = torch.get_rng_state()
            assert torch.equal(x, before[0]) and torch.equal(y, before[1])
            assert same(loss, self.eager_step())
            assert torch.equal(drawn, torch.get_rng_state())
            self.seed += 1
        if steps:
            self.compare()

    def compare(self) -> None:
        assert all(p.grad is None for p in self.ours[0].parameters())
        equal_states(state(self.ours), state(self.eager))


def same(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, on whatever device."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    left, right = (t.detach().cpu().contiguous().flatten().view(torch.uint8) for t in (a, b))
    return torch.equal(left, right)


def state(parts: Parts) -> tuple[dict, dict]:
    return parts[0].state_dict(), parts[2].state_dict()


def equal_states(ours: tuple[dict, dict], theirs: tuple[dict, dict]) -> None:
    assert ours[1]["param_groups"] == theirs[1]["param_groups"]
    assert list(ours[0]) == list(theirs[0]) and list(ours[1]["state"]) == list(theirs[1]["state"])
    for p, values in theirs[1]["state"].items():
        assert list(values) == list(ours[1]["state"][p])
    for a, b in zip(tree_leaves(ours), tree_leaves(theirs), strict=True):
        assert same(a, b) if isinstance(a, Tensor) else a == b


def random_plan(program: Program, seed: int, nothing: float = 0.3) -> Plan:
    """Swaps (early copies, late ends, pinned or synchronous, wrapping gaps) and recomputations (early, too) that fit
    the program."""
    rng, more = random.Random(seed), random.Random(seed)
    n = len(program.kernels)
    decisions: list[Decision] = []
    for gap in program.gaps():
        if rng.random() < nothing:
            continue
        late = rng.randint(0, (gap.before - gap.after - 1) % n) if rng.random() < 0.3 else 0
        after = (gap.after + late) % n
        rest = (gap.before - after - 1) % n
        prefetch = (after + rng.randint(0, rest)) % n if rng.random() < 0.3 else None
        copy = (after - more.randint(0, n // 4)) % n if more.random() < 0.4 else None
        decision: Swap | Recompute = Swap(gap.tensor, after, gap.before, prefetch, rng.random() < 0.1, copy)
        if rng.random() < 0.4:
            at = after + 1 + more.randint(0, rest) if more.random() < 0.4 else None
            decision = Recompute(gap.tensor, after, gap.before, rng.random() < 0.5, at)
        if fits(program, [*decisions, decision]):
            decisions.append(decision)
        elif isinstance(decision, Swap) and fits(program, [*decisions, replace(decision, copy=None)]):
            decisions.append(replace(decision, copy=None))
    return Plan(tuple(decisions), program.fingerprint)


def random_reruns(program: Program, seed: int) -> Plan:
    """Kernels that run again one by one, some of them several times, beside swaps."""
    rng = random.Random(seed)
    recomputed = random_plan(program, seed).decisions
    chains = Plan(tuple(d for d in recomputed if isinstance(d, Recompute)))
    decisions = list[Decision](lower(program, chains).reruns)
    some = rng.sample(decisions, min(20, len(decisions)))
    several = [Rerun(d.kernel, rng.randint(d.kernel + 1, len(program.kernels) - 1)) for d in some]
    swaps = [d for d in recomputed if isinstance(d, Swap)]
    for extra in several + rng.sample(swaps, min(30, len(swaps))):
        if extra not in decisions and fits(program, [*decisions, extra], whole=True):
            decisions.append(extra)
    return Plan(tuple(decisions), program.fingerprint)


def fits(program: Program, decisions: list[Decision], whole: bool = False) -> bool:
    """``whole``: also what only the schedule sees."""
    plan = Plan(tuple(decisions))
    try:
        plan.check(program)
        if whole:
            lower(program, plan)
    except PlanError:
        return False
    return True


def required(program: Program, plan: Plan) -> int:
    return lower(program, plan).required_bytes


def tight(captured: Captured, plan: Plan, **options: bool) -> PlannedStep:
    """At the smallest limit at which the plan is feasible."""
    return PlannedStep(captured, plan, GPU, required(captured.program, plan), **options)


def planned(network: str = "small", seed: int = 0, optimizer=sgd, **options: bool) -> tuple[Twins, PlannedStep]:
    twins = Twins(network, optimizer)
    captured = twins.captured()
    return twins, tight(captured, random_plan(captured.program, seed), **options)


class Bytes(TorchDispatchMode):
    """Bytes of the storages that are really alive after every operator, host buffers and random states aside."""

    def __init__(self, step: PlannedStep, batch: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.host = {b.host.untyped_storage()._cdata for b in step.state.blocks.blocks.values()}
        self.live: set[StorageWeakRef] = set()
        self.peak = 0
        self._note([b.own for b in step.state.bindings] + list(batch))

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
