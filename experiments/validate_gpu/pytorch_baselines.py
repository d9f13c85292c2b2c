"""What PyTorch offers against memory, beside a planned step, each at the same measured peak.

    eager        nothing; its peak and its time are what the others are compared with
    ours         the fastest of OURS' plans on the measured profile, run by PlannedStep
    checkpoint   torch.utils.checkpoint around each of the first n blocks
    selective    checkpoints that keep what products and convolutions return, around the first n blocks
    offload      what the first n blocks save goes to pinned memory on streams of its own (offload.py)
    compile      torch.compile with activation_memory_budget
    save_on_cpu  torch.autograd.graph.save_on_cpu(pin_memory=True) around the first n blocks: a straw man, since it
                 waits for every copy

A limit f is what eager holds between steps and f of what its peak has above it, by the device's own count. A method's
setting is the mildest whose measured peak is within the limit, by bisection. Choices:

(a) Each trial starts with a new model of the same seed and batch; for ours the limit is lowered up to TRIES times.
(b) To find the setting, STEPS steps are run. It is then timed over ``steps`` steps that take turns with eager's.
(c) The peak is that of the measured steps, PyTorch's allocator's ``allocated``.
(d) On the CPU storages seen by a dispatch mode are counted, for ours its ledger; offloading needs a GPU to gain.
(e) Optimizers are as PyTorch chooses (``foreach``); ours updates in buckets of 64 MiB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import agents
from executor import CaptureError, PlannedStep, StepError
from executor.capture.profile import Cache, ProfileError, measure, with_profile
from executor.memory.pinned import CUDA
from experiments.common.bisection import largest
from experiments.validate_gpu.conditions import watched
from experiments.validate_gpu.networks import Network, block_count, build, give_back, in_turns, made, timed
from experiments.validate_gpu.offload import Offload
from experiments.validate_gpu.record import Record
from experiments.validate_gpu.settings import Settings
from simulator import Machine, Plan, Program, simulate

STEPS, TRIES = 5, 4
CACHE: dict[str, Cache] = {"cuda": "cold", "cpu": "hot"}  # of profiles; the CPU's is too large to be emptied quickly
OURS: dict[str, dict[str, int]] = {"annealing": {"iterations": 50}, "lp_round": {"calls": 2000}, "capuchin": {}}
BUDGETS = (1.0, 0.7, 0.5, 0.35, 0.2, 0.0)  # of torch.compile

KEPT = [
    getattr(torch.ops.aten, name).default for name in (
        "convolution", "mm", "addmm", "bmm", "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
]  # fmt: skip


class Unreachable(Exception):
    """The method does not come down to the limit; the message says how far."""


@dataclass(frozen=True)
class Trial:
    """One setting of one method, measured: ns per step, bytes at the peak and between steps; ns of eager's steps that
    took turns with them, where some did."""

    ns: float
    peak: int
    between: int = 0
    setting: str = ""
    eager_ns: float | None = None


class Ready(NamedTuple):
    """What is known of a network before it is compared: eager steps, the program with its measured profile, and plans
    by limit, those for most bytes first."""

    eager: Trial
    program: Program
    plans: dict[float, list[Plan]]


def limit_at(f: float, eager: Trial) -> int:
    """Bytes of a limit."""
    return eager.between + round(f * (eager.peak - eager.between))


def compare(settings: Settings, machine: Machine, record: Record, ready: Mapping[str, Ready]) -> None:
    """Adds a row per workload, limit and method: ``measured_ns``, ``measured_peak``, ``limit``, ``setting``,
    ``eager_ns`` of the eager steps in between, ``overhead`` against them, ``clocks``; or ``failed``. A workload without
    blocks has one row, which says so. ``ready``: what need not be measured or planned again, by workload."""
    device = settings.device
    for name in settings.workloads:
        known = ready.get(name)
        key = {"workload": name, "method": "eager"}
        record.measure("compare", key, partial(_eager_row, name, device, known), fraction=1.0)
        for row in record.of("compare", **key):
            eager = Trial(row["measured_ns"], row["measured_peak"], row["between"])
            for method in settings.methods:
                if method == "eager":
                    continue
                search = _Ours(name, device, machine, known) if method == "ours" else Levels(name, device, method)
                for f in settings.limits:
                    key, limit = {"workload": name, "fraction": f, "method": method}, limit_at(f, eager)
                    record.measure("compare", key, partial(_row, search, f, limit, settings.steps), limit=limit)


def _eager_row(name: str, device: str, known: Ready | None) -> dict[str, Any]:
    """Raises Unreachable if the network has no blocks."""
    if not block_count(name):
        raise Unreachable("the network has no blocks to checkpoint")
    warm_up(name, device)
    eager = known.eager if known else trial(name, device)
    return {"measured_ns": eager.ns, "limit": eager.peak, "measured_peak": eager.peak, "between": eager.between,
            "overhead": 0.0, "setting": ""}  # fmt: skip


def _row(search: Levels | _Ours, f: float, limit: int, steps: int) -> dict[str, Any]:
    """Measures a method's mildest setting within a limit; raises Unreachable."""
    warm_up(search.name, search.device)
    chosen = search.within(limit, f)
    with watched(search.device) as clocks:
        found = search.timed(chosen, steps)
    assert found.eager_ns is not None
    return {"measured_ns": found.ns, "measured_peak": max(found.peak, chosen.peak), "eager_ns": found.eager_ns,
            "overhead": found.ns / found.eager_ns - 1, "setting": chosen.setting, "clocks": clocks}  # fmt: skip


@cache
def warm_up(name: str, device: str) -> None:
    """Lets libraries take the memory that they keep, once in a process (CUDA)."""
    if device == "cuda":
        trial(name, device)


def trial(
    name: str, device: str, prepare: Callable[[Network], Callable[[Tensor], Any] | None] = lambda network: None,
    setting: str = "", steps: int = 0,
) -> Trial:  # fmt: skip
    """Trains a new network as ``prepare`` leaves it; what it returns is run in the place of the model. ``steps``: so
    many, in turns with eager's; 0: STEPS alone."""
    give_back()
    beside = eager_beside(name, device) if steps else None
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    network = build(name, device)
    forward = prepare(network)
    return replace(_measured(device, lambda: network.step(forward), before, beside, steps), setting=setting)


def _measured(
    device: str, step: Callable[[], Any], before: int, beside: Callable[[], Any] | None = None, steps: int = 0
) -> Trial:
    """Time and peak of a step; ``beside``: an eager one that takes turns with it, ``steps`` times, then without bytes
    on the CPU."""
    torch.manual_seed(1)
    cuda, counter = device == "cuda", Counter()
    step()  # compilers and optimizers make what they keep
    if beside:
        _, times, eager, peak = in_turns(step, beside, steps, device, before)
        return Trial(median(times), peak, eager_ns=median(eager))
    if cuda:
        step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    else:
        with counter:
            step()
    between = torch.cuda.memory_allocated() - before if cuda else counter.count()
    _, times = timed(step, STEPS, device)
    peak = torch.cuda.max_memory_allocated() - before if cuda else counter.peak
    return Trial(median(times), peak, between)


def eager_beside(name: str, device: str) -> Callable[[], Any]:
    """An eager step that has made all that it keeps."""
    network = build(name, device)
    network.step()
    if device == "cuda":
        torch.cuda.synchronize()
    return network.step


class Counter(TorchDispatchMode):
    """Bytes of the storages that operators have met and that are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.known: dict[StorageWeakRef, int] = {}
        self.bytes = self.peak = 0  # of all known, some of which may be gone; of those that were there at once

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            if isinstance(x, Tensor) and x.device.type == "cpu":
                ref, nbytes = StorageWeakRef(x.untyped_storage()), x.untyped_storage().nbytes()
                self.bytes += nbytes - self.known.get(ref, 0)
                self.known[ref] = nbytes
        if self.bytes > self.peak:  # only then it matters what is gone
            self.peak = max(self.peak, self.count())
        return out

    def count(self) -> int:
        """Bytes now."""
        self.known = {s: n for s, n in self.known.items() if not s.expired()}
        self.bytes = sum(self.known.values())
        return self.bytes


# ------------------------------------------------------------------------------------------- PyTorch's own


class Levels:
    """A method with settings from mild to strong; each is measured once."""

    def __init__(self, name: str, device: str, method: str):
        self.name, self.device, self.method = name, device, method
        self.count = len(BUDGETS) if method == "compile" else block_count(name) + 1
        self.known: dict[int, Trial] = {}

    def within(self, limit: int, f: float = 0.0) -> Trial:
        """The mildest setting within the limit, which is ``f`` of the activations; raises Unreachable."""
        most = self.count - 1
        if self.at(most).peak > limit:
            raise Unreachable(f"at its strongest it needs {self.at(most).peak:,} bytes, over the limit of {limit:,}")
        milder = largest(lambda n: self.at(most - n).peak <= limit, (most + 1) // 2, most) if most else 0
        return self.at(most - milder)

    def at(self, level: int) -> Trial:
        """One setting."""
        if level not in self.known:
            setting = f"budget {BUDGETS[level]}" if self.method == "compile" else f"{level} of {self.count - 1} blocks"
            self.known[level] = trial(self.name, self.device, lambda network: self.prepare(network, level), setting)
        return self.known[level]

    def timed(self, chosen: Trial, steps: int) -> Trial:
        """One of the known settings, in turns with eager."""
        level = next(i for i, known in self.known.items() if known is chosen)
        return trial(self.name, self.device, lambda network: self.prepare(network, level), chosen.setting, steps)

    def prepare(self, network: Network, level: int) -> Callable[[Tensor], Any] | None:
        """Puts the method around the first ``level`` blocks."""
        if self.method == "compile":
            from torch._functorch import config

            torch._dynamo.reset()
            config.activation_memory_budget = BUDGETS[level]
            return torch.compile(network.model)
        if self.device == "cuda" and self.method in ("offload", "save_on_cpu"):
            CUDA.drop()  # they pin memory of their own
        selected = partial(create_selective_checkpoint_contexts, KEPT)
        wrap: Callable[[Any], Any] = {
            "offload": Offload(network.model, self.device).wrap,
            "checkpoint": lambda inner: partial(checkpoint, inner, use_reentrant=False),
            "selective": lambda inner: partial(checkpoint, inner, use_reentrant=False, context_fn=selected),
            "save_on_cpu": _saved_on_cpu,
        }[self.method]
        for block in network.blocks[:level]:
            block.forward = wrap(block.forward)  # type: ignore[method-assign]
        return None


def _saved_on_cpu(inner: Callable[..., Any]) -> Callable[..., Any]:
    def forward(x: Tensor, *rest: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=x.device.type == "cuda"):
            return inner(x, *rest)

    return forward


# ------------------------------------------------------------------------------------------- ours


class _Ours:
    """Plans on the measured profile: those that are there, then others, as long as what they really take is over."""

    def __init__(self, name: str, device: str, machine: Machine, ready: Ready | None = None):
        self.name, self.device, self.machine, self.ready = name, device, machine, ready
        self.program = ready.program if ready else None
        self.aim = 0  # of the last ``at``
        self.plans: dict[int, Plan] = {}  # by aim

    def within(self, limit: int, f: float = 0.0) -> Trial:
        """A planned step within the limit; raises Unreachable."""
        plans = self.ready.plans.get(f, []) if self.ready else []
        self.plans |= {plan.limit: plan for plan in plans}
        aim, aims = limit, [plan.limit for plan in plans]
        for _ in range(len(plans) + TRIES):
            aim = aims.pop(0) if aims else aim
            found = self.at(aim)
            if found.peak <= limit:
                return found
            aim -= found.peak - limit + limit // 200
        raise Unreachable(f"{found.setting}: its measured peak is {found.peak:,} bytes, over the limit of {limit:,}")

    def timed(self, chosen: Trial, steps: int) -> Trial:
        """The last step, in turns with eager."""
        return self.at(self.aim, steps)

    def at(self, aim: int, steps: int = 0) -> Trial:
        """A step planned for ``aim`` bytes; ``steps``: so many, in turns with eager's."""
        give_back()
        self.aim, beside = aim, eager_beside(self.name, self.device) if steps else None
        before = torch.cuda.memory_allocated() if self.device == "cuda" else 0
        n = build(self.name, self.device)
        try:
            captured = n.captured(self.machine)
            if self.program is None:
                profile = measure(captured, self.device, self.machine.name, cache=CACHE[self.device])
                self.program = with_profile(captured.program, profile)
            plan = self.plans[aim] = self.plans.get(aim) or best_plan(self.program, self.machine, aim)
            step = PlannedStep(replace(captured, program=self.program), plan, self.machine, aim, graph=False)
            with step:
                found = _measured(self.device, lambda: step(*n.batch), before, beside, steps)
        except (CaptureError, ProfileError, StepError) as error:
            raise Unreachable(str(error)) from error
        setting = f"{plan.planner}, planned for {aim:,} bytes"
        return replace(found, setting=setting, peak=found.peak if self.device == "cuda" else step.peak_bytes)


def best_plan(program: Program, machine: Machine, limit: int) -> Plan:
    """The fastest of OURS' plans, simulated; raises Unreachable where none has one."""
    plans, reasons = [], []
    for planner, options in OURS.items():
        try:
            plans.append(made(planner, program, **options).plan(program, machine, limit))
        except agents.Infeasible as error:
            reasons.append(str(error))
        except ImportError as error:
            reasons.append(f"{planner} needs {error.name}, which is not here")
    if not plans:
        raise Unreachable("; ".join(reasons))
    return min(plans, key=lambda plan: simulate(program, plan, machine, limit).iteration_ns)
