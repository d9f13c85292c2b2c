"""Compares PyTorch's memory-saving methods with a planned step, each at the same measured peak.

    eager        no method: the reference for peak and time
    ours         fastest plan of OURS on the measured profile, executed by PlannedStep
    checkpoint   torch.utils.checkpoint around each of the first n blocks
    selective    selective checkpointing of the first n blocks that keeps the results of products and convolutions
    offload      activation offloading of the first n blocks to pinned memory (offload.py)
    compile      torch.compile with activation_memory_budget
    save_on_cpu  torch.autograd.graph.save_on_cpu(pin_memory=True) around the first n blocks: waits for every copy

The limit for a fraction f is eager's memory between steps plus f times the rise to its peak.
"""

# Choices:
# (a) A method's setting is the mildest whose measured peak is within the limit (bisection).
# (b) Each trial starts with a new model of the same seed and batch; ours lowers its limit up to ``tries`` times.
# (c) The search for a setting runs five steps. The final timing alternates ``steps`` steps with eager steps.
# (d) The peak is what PyTorch reserves over the measured steps, beyond what it reserved before, and a graph's memory
#     that PyTorch does not count. On the CPU it counts the storages that a dispatch mode sees (ours: its ledger).
#     Offloading saves device memory only on a GPU.
# (e) Baselines use PyTorch's default optimizers (``foreach``); ours updates in buckets of 64 MiB.

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import agents
from executor import CaptureError, PlannedStep, StepError
from executor.capture.captured import Captured
from executor.capture.profile import Cache, ProfileError, shape_of, with_profile
from executor.capture.profiler import measure
from executor.memory.pinned import CUDA
from experiments.common.bisection import largest
from experiments.measure.conditions import sampled_conditions
from experiments.measure.gpu.offload import Offload
from experiments.measure.networks import (
    Network,
    block_count,
    build,
    free_cache,
    get_planner,
    reserved_bytes,
    synchronize,
    time_in_turns,
    timed,
)
from simulator import Machine, Plan, Program, simulate

# Planners of the method "ours" with their options; the fastest of their plans runs.
OURS: dict[str, dict[str, int]] = {"annealing": {"iterations": 50}, "lp_round": {"calls": 2000}, "capuchin": {}}
BUDGETS = (1.0, 0.7, 0.5, 0.35, 0.2, 0.0)  # activation_memory_budget of torch.compile

Step = Callable[[], Any]
SAVED_OPERATORS = [
    getattr(torch.ops.aten, name).default
    for name in (
        "convolution",
        "mm",
        "addmm",
        "bmm",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
]


class Unreachable(Exception):
    """Raised if a method cannot reach the limit; the message has its smallest peak."""


@dataclass(frozen=True)
class Trial:
    """Measurement of one setting of one method.

    Attributes:
        ns: median step time.
        peak: peak memory in bytes.
        between: memory between steps in bytes.
        setting: the setting, in words.
        eager_ns: median time of the eager steps that alternated with these, if any.
    """

    ns: float
    peak: int
    between: int = 0
    setting: str = ""
    eager_ns: float | None = None


def limit_at(f: float, eager: Trial) -> int:
    """Returns the limit in bytes for the fraction ``f`` of eager's activation peak."""
    return eager.between + round(f * (eager.peak - eager.between))


def eager_row(name: str, device: str, eager: Trial | None) -> dict[str, Any]:
    """Returns the row of eager steps, measured unless ``eager`` is given; raises Unreachable without blocks."""
    if not block_count(name):
        raise Unreachable("the network has no blocks to checkpoint; choose one of transformer or residual blocks")
    warm_up(name, device)
    eager = eager or trial(name, device)
    return {
        "measured_ns": eager.ns,
        "limit": eager.peak,
        "measured_peak": eager.peak,
        "between": eager.between,
        "overhead": 0.0,
        "setting": "",
    }


def row(search: Levels | Ours, limit: int, plans: Sequence[Plan], steps: int) -> dict[str, Any]:
    """Measures a method's mildest setting within a limit and returns the row; raises Unreachable.

    Args:
        search: the method, or the planned step.
        limit: limit of the measured peak in bytes.
        plans: known plans for this limit, in descending order of planned bytes.
        steps: measured steps, which alternate with as many eager ones.
    """
    warm_up(search.name, search.device)
    chosen = search.within(limit, plans)
    with sampled_conditions(search.device) as clocks:
        final = search.timed(chosen, steps)
    assert final.eager_ns is not None
    return {
        "measured_ns": final.ns,
        "measured_peak": max(final.peak, chosen.peak),
        "eager_ns": final.eager_ns,
        "overhead": final.ns / final.eager_ns - 1,
        "setting": chosen.setting,
        "clocks": clocks,
    }


@cache
def warm_up(name: str, device: str) -> None:
    """Runs one trial per process so that libraries allocate their persistent CUDA memory before measurements."""
    if device == "cuda":
        trial(name, device)


def trial(
    name: str,
    device: str,
    prepare: Callable[[Network], Step] = lambda network: network.step,
    setting: str = "",
    steps: int = 0,
) -> Trial:
    """Trains a new network under a method and measures its time and peak.

    Args:
        name: network.
        device: "cuda" or "cpu".
        prepare: applies the method to the network and returns its step.
        setting: label of the setting.
        steps: measured steps that alternate with eager steps (on the CPU without a peak); 0: five steps without them.

    Returns:
        the measured time and peak.
    """
    free_cache()
    eager_step = build_eager_step(name, device) if steps else None
    bytes_before = reserved_bytes(device)
    step = prepare(build(name, device))
    torch.manual_seed(1)
    step()  # compiles the model and creates the optimizer state
    if eager_step:
        times, eager, peak = time_in_turns(step, eager_step, steps, device, bytes_before, reserved=True)
        return Trial(median(times), peak, setting=setting, eager_ns=median(eager))
    if device == "cuda":
        step()
        torch.cuda.synchronize()
        free_cache()
        torch.cuda.reset_peak_memory_stats()
        between = reserved_bytes(device) - bytes_before
        times = timed(step, 5, device)
        peak = torch.cuda.max_memory_reserved() - bytes_before
    else:
        with Counter() as counter:
            step()
        between = counter.count()
        times = timed(step, 5, device)
        peak = counter.peak
    return Trial(median(times), peak, between, setting)


def build_eager_step(name: str, device: str) -> Step:
    """Returns an eager step function of a new network whose optimizer state exists already."""
    network = build(name, device)
    network.step()
    synchronize(device)
    return network.step


def build_eager_graph(name: str) -> Step:
    """Returns a function that replays an eager step as a CUDA graph, without the host's time per kernel."""
    network = build(name, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # libraries allocate their memory, the optimizer its state
        for _ in range(3):
            network.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = network.step()

    def replay() -> Tensor:
        graph.replay()
        return loss

    return replay


class Counter(TorchDispatchMode):
    """Counts the bytes of live CPU storages that operators have used."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[StorageWeakRef, int] = {}
        self.bytes = self.peak = 0  # ``bytes`` may include freed storages; ``peak`` does not

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            if isinstance(x, Tensor) and x.device.type == "cpu":
                ref = StorageWeakRef(x.untyped_storage())
                nbytes = x.untyped_storage().nbytes()
                self.bytes += nbytes - self.sizes.get(ref, 0)
                self.sizes[ref] = nbytes
        if self.bytes > self.peak:  # drop freed storages only when they could change the peak
            self.peak = max(self.peak, self.count())
        return out

    def count(self) -> int:
        """Returns the bytes of the storages that are live now."""
        self.sizes = {s: n for s, n in self.sizes.items() if not s.expired()}
        self.bytes = sum(self.sizes.values())
        return self.bytes


# ------------------------------------------------------------------------------------------- PyTorch's own


@dataclass
class Levels:
    """Settings of one method, from mild to strong, each measured at most once."""

    name: str
    device: str
    method: str
    trials: dict[int, Trial] = field(default_factory=dict)  # by level

    @property
    def count(self) -> int:
        """Number of settings."""
        return len(BUDGETS) if self.method == "compile" else block_count(self.name) + 1

    def within(self, limit: int, plans: Sequence[Plan] = ()) -> Trial:
        """Returns the mildest setting whose peak is within ``limit`` bytes; raises Unreachable."""
        last = self.count - 1
        if self.at(last).peak > limit:
            raise Unreachable(
                f"at its strongest it needs {self.at(last).peak:,} bytes, over the limit of {limit:,}: raise it"
            )
        milder = largest(lambda n: self.at(last - n).peak <= limit, (last + 1) // 2, last) if last else 0
        return self.at(last - milder)

    def at(self, level: int) -> Trial:
        """Returns the measurement of one setting."""
        if level not in self.trials:
            setting = f"budget {BUDGETS[level]}" if self.method == "compile" else f"{level} of {self.count - 1} blocks"
            self.trials[level] = trial(self.name, self.device, lambda network: self.prepare(network, level), setting)
        return self.trials[level]

    def timed(self, chosen: Trial, steps: int) -> Trial:
        """Times a measured setting again, in ``steps`` steps that alternate with eager steps."""
        level = next(i for i, measured in self.trials.items() if measured is chosen)
        return trial(self.name, self.device, lambda network: self.prepare(network, level), chosen.setting, steps)

    def prepare(self, network: Network, level: int) -> Step:
        """Applies the method to the first ``level`` blocks, or compiles with a budget; returns the step."""
        if self.method == "compile":
            from torch._functorch import config

            torch._dynamo.reset()
            config.activation_memory_budget = BUDGETS[level]
            return partial(network.step, torch.compile(network.model))
        if self.device == "cuda" and self.method in ("offload", "save_on_cpu"):
            CUDA.drop()  # these methods pin their own memory
        selected = partial(create_selective_checkpoint_contexts, SAVED_OPERATORS)
        wrap: Callable[[Any], Any] = {
            "offload": Offload(network.model, self.device).wrap,
            "checkpoint": lambda inner: partial(checkpoint, inner, use_reentrant=False),
            "selective": lambda inner: partial(checkpoint, inner, use_reentrant=False, context_fn=selected),
            "save_on_cpu": _saved_on_cpu,
        }[self.method]
        for block in network.blocks[:level]:
            block.forward = wrap(block.forward)  # type: ignore[method-assign]
        return network.step


def _saved_on_cpu(inner: Callable[..., Any]) -> Callable[..., Any]:
    def forward(x: Tensor, *others: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=x.device.type == "cuda"):
            return inner(x, *others)

    return forward


# ------------------------------------------------------------------------------------------- ours


@dataclass
class Ours:
    """Runs planned steps on the measured profile: tries known plans first, then plans for lower limits.

    Attributes:
        name: network.
        device: "cuda" or "cpu".
        machine: machine to plan for.
        program: the step with measured durations; None: measured before the first plan.
        graph: whether the step runs as a CUDA graph.
        tries: number of plans for lower limits, besides the known plans.
        limit: limit in bytes of the last call of ``within``, which a graph may need in full.
        aim: planned bytes of the last call of ``at``.
        plans: plans by planned bytes.
        note: addition to the setting if the known plans were not used.
    """

    name: str
    device: str
    machine: Machine
    program: Program | None
    graph: bool = False
    tries: int = 4
    limit: int = 0
    aim: int = 0
    plans: dict[int, Plan] = field(default_factory=dict)
    note: str = ""

    def within(self, limit: int, plans: Sequence[Plan] = ()) -> Trial:
        """Returns a planned step whose measured peak is within ``limit`` bytes; raises Unreachable."""
        self.limit = limit
        self.plans |= {plan.limit: plan for plan in plans}
        aim = limit
        aims = [plan.limit for plan in plans]
        for _ in range(len(plans) + self.tries):
            aim = aims.pop(0) if aims else aim
            try:
                result = self.at(aim)
            except Unreachable:
                if not aims:
                    raise
                continue  # as a graph the plan needs more than the limit
            if result.peak <= limit:
                return result
            aim -= result.peak - limit + limit // 200
        raise Unreachable(f"{result.setting}: its measured peak is {result.peak:,} bytes, over the limit of {limit:,}")

    def timed(self, chosen: Trial, steps: int) -> Trial:
        """Times the last planned step in ``steps`` steps that alternate with eager steps."""
        return self.at(self.aim, steps)

    def at(self, aim: int, steps: int = 0) -> Trial:
        """Measures a step planned for ``aim`` bytes; with ``steps``, alternating with as many eager steps.

        Raises:
            Unreachable: No plan reaches ``aim``, or the step cannot be captured, profiled or run.
        """
        self.aim = aim

        def prepare(network: Network) -> Step:
            captured = network.captured(self.machine)
            if self.program and shape_of(captured.program).fingerprint != shape_of(self.program).fingerprint:
                self.program = None
                self.plans.clear()
                self.note = ", planned here: the captured step differs from the committed program"
            if self.program is None:
                self.program = with_measured_durations(captured, self.device, self.machine).program
            plan = self.plans[aim] = self.plans.get(aim) or best_plan(self.program, self.machine, aim)
            step = PlannedStep(
                replace(captured, program=self.program),
                plan,
                self.machine,
                max(aim, self.limit) if self.graph else aim,
                graph=self.graph,
            )
            opened.append(stack.enter_context(step))
            return lambda: step(*network.batch)

        opened: list[PlannedStep] = []
        try:
            with ExitStack() as stack:
                result = trial(self.name, self.device, prepare, steps=steps)
                outside = uncounted_bytes(opened[0])
        except (CaptureError, ProfileError, StepError) as error:
            raise Unreachable(str(error)) from error
        setting = f"{self.plans[aim].planner}, planned for {aim:,} bytes{self.note}"
        peak = result.peak + outside if self.device == "cuda" else opened[0].peak_bytes
        return replace(result, setting=setting, peak=peak)


def uncounted_bytes(step: PlannedStep) -> int:
    """Returns the memory in bytes of a step's CUDA graph that PyTorch's allocator does not count."""
    graph = step.graph.graph if step.graph else None
    return graph.footprint - graph.counted_bytes if graph else 0


def with_measured_durations(captured: Captured, device: str, machine: Machine, **options: int) -> Captured:
    """Returns the captured step with the durations of its kernels on this device; ``options`` as in ``measure``."""
    cache: Cache = "cold" if device == "cuda" else "hot"  # flushing a CPU's cache takes too long
    profile = measure(captured, device, machine.name, cache=cache, **options)
    return replace(captured, program=with_profile(captured.program, profile))


def best_plan(program: Program, machine: Machine, limit: int) -> Plan:
    """Returns the plan of OURS with the shortest simulated step; raises Unreachable if no planner finds one."""
    plans = []
    reasons = []
    for planner, options in OURS.items():
        try:
            plans.append(get_planner(planner, program, **options).plan(program, machine, limit))
        except agents.Infeasible as error:
            reasons.append(str(error))
        except ImportError as error:
            reasons.append(f"{planner} needs {error.name}, which is not installed")
    if not plans:
        raise Unreachable("; ".join(reasons))
    return min(plans, key=lambda plan: simulate(program, plan, machine, limit).iteration_ns)
