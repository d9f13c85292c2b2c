"""``torch.compile`` under a memory limit: Inductor's own graphs, partitioned according to a plan.

    model = compile(model, memory=0.6)     # forward, backward, optimizer, loop: as with torch.compile
    loss = loss_fn(model(x), y)
    loss.backward()
    print(report(model))

Each Dynamo graph is first partitioned by PyTorch and scheduled by Inductor, which gives its peak memory. If the peak
exceeds the limit, a plan decides which forward kernels are recomputed and where, and the graph is partitioned
accordingly. The new graphs are scheduled as well, so the peak is known before any code is generated.
"""

from __future__ import annotations

import hashlib
import shutil
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch
from torch import fx
from torch._dynamo.exc import ShortenTraceback
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.utils.checkpoint import CheckpointPolicy

from executor.compiled.host_copies import on_the_cpu
from executor.compiled.joint import Joint, donatable
from executor.compiled.launches import choices, in_order, launches_of
from executor.compiled.partition import partition
from executor.fit import FitError, machine_of, planned_in_mode
from executor.training.issue_order import Item, order
from simulator.compiled.engine import simulate
from simulator.limits import is_fraction, size_bytes
from simulator.machine import Machine
from simulator.modes import check_mode
from simulator.plan import Plan, Swap
from simulator.program import Program
from simulator.report import size
from simulator.schedule import lower
from simulator.timeline import Timeline

PLANS, LOOKS = 6, 4  # most plans and most Inductor schedules per graph
SLACK = 0.05  # fraction of the limit: the search stops at a plan that leaves less unused
ABOUT = 0.01  # fraction of the limit: a plan whose estimate exceeds the limit by less may still fit
LIBRARIES = 0.01  # fraction of the limit reserved for scratch memory of convolutions (oneDNN), which no graph shows
# Assumed FLOP rate and bandwidth of a server core: their ratio decides which kernels are recomputed on a CPU.
CPU = Machine("a CPU core", 2**40, 10**10, 10**10, flops_per_s={"float32": 50 * 10**9}, memory_bytes_per_s=8 * 10**9)
COPY = torch.ops.aten.copy_.default
Planner = str | Callable[[Program, Machine, int], Plan]


class CompileError(ShortenTraceback):
    """Raised if a model cannot be compiled within the memory limit; the message is one sentence."""

    def __init__(self, message: str, *, first_useful_frame: Any = None) -> None:
        super().__init__(message, first_useful_frame=first_useful_frame)


@dataclass(frozen=True)
class Graph:
    """Result of planning one graph.

    Attributes:
        name: Dynamo's compilation id ("0/1" is the second compilation of the first graph).
        limit: Limit in bytes for the allocations of forward and backward.
        without_bytes: Peak of PyTorch's own partition, as Inductor schedules it.
        peak_bytes: Peak of the compiled graphs.
        left: Reason why the graph was left to PyTorch's partitioner; "" if it was planned or needs no plan.
        program, plan, machine: None or "" without a plan.
        iteration_ns, ideal_ns, floor_ns: Simulated times; the floor is None if the planner does not compute one.
        seconds: CPU time of planning and partitioning.
        looking_s: CPU time of Inductor's scheduling of candidate graphs.
    """

    name: str
    limit: int = 0
    without_bytes: int = 0
    peak_bytes: int = 0
    left: str = ""
    program: Program | None = None
    plan: Plan | None = None
    machine: str = ""
    iteration_ns: int = 0
    ideal_ns: int = 0
    floor_ns: int | None = None
    seconds: float = 0.0
    looking_s: float = 0.0

    def __str__(self) -> str:
        if self.left:
            return f"graph {self.name}: left as PyTorch partitions it, because {self.left}"
        line = f"graph {self.name}: limit {size(self.limit)}, peak {size(self.peak_bytes)}"
        if self.plan is None or self.program is None:
            return f"{line}, which needs no plan"
        again = [s.kernel for s in lower(self.program, self.plan).steps if s.again]
        took = sum(self.program.kernels[k].duration_ns for k in again)
        away = [self.program.tensors[d.tensor].nbytes for d in self.plan.decisions if isinstance(d, Swap)]
        swapped = f"; {len(away)} swaps, {size(sum(away))} each way" if away else ""
        plan = f"plan of {self.plan.planner}: {len(again)} kernels recomputed, {took / 1e6:.2f} ms on {self.machine}"
        ms, over = self.iteration_ns / 1e6, self.iteration_ns / self.ideal_ns - 1
        lines = [
            f"{line} ({size(self.without_bytes)} without a plan)",
            f"  {plan}{swapped}",
            f"  predicted: {ms:.2f} ms, {over:.2%} over the ideal",
        ]
        if self.floor_ns is not None:
            lines.append(f"  floor: no plan takes less than {self.floor_ns / 1e6:.2f} ms")
        return "\n".join(lines)


@dataclass(frozen=True)
class CompiledReport:
    """Graphs of a compiled model in compilation order; ``str`` formats them as text."""

    graphs: tuple[Graph, ...]

    @property
    def peak_bytes(self) -> int:
        """Largest peak among the graphs."""
        return max((graph.peak_bytes for graph in self.graphs), default=0)

    def __str__(self) -> str:
        return "\n".join(map(str, self.graphs)) or "nothing compiled yet: call the model, with gradients"


class _Draft(NamedTuple):
    """A plan whose graphs Inductor has not scheduled yet."""

    plan: Plan
    floor_ns: int | None
    timeline: Timeline
    items: tuple[Item, ...]
    nbytes: int


class _Tried(NamedTuple):
    """A plan whose graphs Inductor has scheduled, with their peak in bytes."""

    draft: _Draft
    joint: Joint
    needs: int


def search(
    draft: Callable[[int], _Draft], look: Callable[[_Draft], Joint], aim: int, most: int
) -> tuple[_Tried | None, str]:
    """Re-plans with successively adjusted limits until the scheduled peak is close to ``aim``.

    Args:
        draft: Returns a plan for a limit in bytes; raises FitError.
        look: Partitions a plan's graphs and schedules them with Inductor.
        aim: Largest peak that fits, in bytes.
        most: Limit in bytes from which the program needs no plan.

    Returns:
        The fastest plan that fits and "", or None and the reason.
    """
    tried: list[_Tried] = []
    waiting: list[_Draft] = []  # not scheduled yet
    limit, planned, off, why = aim, 0, 0, ""  # planned: last feasible limit; off: Inductor's peak minus the estimate

    def seen(made: _Draft) -> _Tried:
        joint = look(made)
        return _Tried(made, joint, joint.peak_bytes())

    def fitting() -> list[_Tried]:
        return [one for one in tried if one.needs <= aim]

    for _ in range(PLANS):
        try:
            made = draft(limit)
        except FitError as error:
            why = str(error)
            if not planned or fitting() or abs(planned - limit) < ABOUT * limit:
                break
            limit = (limit + planned) // 2  # Inductor's peak may be below the estimate
            continue
        planned, needs = limit, made.nbytes + off
        if limit >= most or -ABOUT * aim <= aim - needs < SLACK * aim:
            tried.append(seen(made))
            needs = tried[-1].needs
            off = needs - made.nbytes
            if limit >= most or len(tried) == LOOKS or 0 <= aim - needs < SLACK * aim:
                break
        else:
            waiting.append(made)
        # Lower the limit by at least 1 %, or the planner may return the same plan.
        limit += aim - needs if needs <= aim else min(aim - needs, -aim // 100)
    for made in sorted(waiting, key=lambda one: one.nbytes)[: LOOKS - len(tried)]:
        if fitting():
            break
        tried.append(seen(made))
    if fitting():
        return min(fitting(), key=lambda one: one.draft.timeline.iteration_ns), ""
    least = min((one.needs for one in tried), default=None)
    needed = f"as Inductor schedules what was tried, it needs {size(least)}" if least else ""
    return None, f"{why} ({needed})" if why and needed else why or needed


class Partitioner(CustomPartitionerFn):
    """Partitioner for ``config.custom_partitioner_fn``: PyTorch's partition if it fits the limit, else a plan's.

    Args:
        memory: Bytes, a size ("24GiB"), or a fraction (0.6) of the graph's peak as PyTorch partitions it. It limits
            what forward and backward allocate: saved and temporary tensors, the model's outputs, their gradients, and
            the gradients of parameters. Tensors that the caller holds anyway do not count.
        machine: A preset's name, a YAML file or a Machine, whose roofline gives kernel durations (default: the GPU's
            preset, or ``CPU``).
        planner: A name (``agents.PLANNERS``), or a function that returns a plan of the mode.
        seconds: Approximate planning time for each plan.
        mode: "recompute", "swap" or "joint". Copies use one stream; on the CPU they go to a second pool.

    Attributes:
        in_order: Whether the graphs are compiled within ``launches.in_order``, which keeps copies in place, as
            ``compile`` does.

    Raises:
        FormatError: If memory or machine is invalid.
        ValueError: If the mode is unknown.
        CompileError: If the mode copies and this PyTorch lacks the operators. When called: if copies are not kept
            ``in_order``, or no plan fits.
    """

    in_order = False

    def __init__(
        self, memory: int | float | str, machine: Machine | str | None = None, planner: Planner = "lp_round",
        seconds: float | None = 3.0, mode: str = "recompute",
    ) -> None:  # fmt: skip
        check_mode(mode)
        if mode != "recompute":
            needs_operators(mode)
        if not is_fraction(memory):
            size_bytes(memory, "memory")
        self.memory, self.planner, self.seconds, self.mode = memory, planner, seconds, mode
        self.machine = Machine.load(machine) if isinstance(machine, str) else machine
        self.graphs: list[Graph] = []
        self._key = planner if isinstance(planner, str) else uuid4().hex  # a function may be another one next time

    def uuid(self) -> str:
        """Returns a hash of everything but the graph that affects the partition: this code and the arguments."""
        digest = hashlib.sha256()
        for path in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(path.read_bytes())
        digest.update(repr((self.memory, self.machine, self._key, self.seconds, self.mode)).encode())
        return digest.hexdigest()

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Splits a joint graph into forward and backward; part of PyTorch's interface."""
        from torch._functorch.partitioners import min_cut_rematerialization_partition

        if self.mode != "recompute" and not self.in_order:
            raise CompileError(
                f"mode: {self.mode!r} is for executor.compiled.compile, or for compiling within launches.in_order: "
                "otherwise Inductor waits for each copy immediately"
            )
        name = str(torch._guards.CompileContext.current_compile_id() or len(self.graphs))
        left = cannot_be_planned(gm)
        if not left:
            self._check_several(name)
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        if overwritten := read_after_write(forward, backward):
            save_before_write(gm, overwritten)
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        if left:
            self._leave(name, left)
            return forward, backward
        begin, self._looking_s = time.process_time(), 0.0
        joint = self._look(forward, backward, kwargs["num_fwd_outputs"])
        without = joint.peak_bytes()
        limit = int(without * _part(self.memory)) if is_fraction(self.memory) else size_bytes(self.memory, "memory")
        graph = Graph(name, limit, without, without)
        aim = int(limit * (1 - LIBRARIES)) if joint.convolves else limit
        if without > (limit if is_fraction(self.memory) else aim):  # memory=1.0 needs no plan despite LIBRARIES
            joint, graph = self._planned(joint, graph, aim, _device(joint_inputs))
        seconds = time.process_time() - begin - self._looking_s
        self.graphs.append(replace(graph, seconds=seconds, looking_s=self._looking_s))
        return joint.forward, joint.backward

    def _planned(self, joint: Joint, graph: Graph, aim: int, device: torch.device) -> tuple[Joint, Graph]:
        """Returns graphs of a plan whose peak, as Inductor schedules them, is at most ``aim`` bytes."""
        machine = self.machine or (CPU if device.type == "cpu" else machine_of(torch.cuda.get_device_name(device)))
        swaps = self.mode != "recompute"
        if swaps:
            machine = machine.with_one_copy_stream()
            if device.type == "cpu":
                on_the_cpu()
        program = joint.program(machine, f"graph {graph.name}", swaps)
        found, why = search(
            lambda limit: self._draft(joint, program, machine, limit),
            lambda draft: self._look(*partition(joint, program, draft.items), joint.outputs),
            aim, program.peak_bytes,
        )  # fmt: skip
        if found is None:
            raise CompileError(f"graph {graph.name} does not fit into {size(graph.limit)}: {why}")
        draft = found.draft
        return found.joint, replace(
            graph, peak_bytes=found.needs, program=program, plan=draft.plan, machine=machine.name,
            iteration_ns=draft.timeline.iteration_ns, ideal_ns=draft.timeline.ideal_ns, floor_ns=draft.floor_ns,
        )  # fmt: skip

    def _draft(self, joint: Joint, program: Program, machine: Machine, limit: int) -> _Draft:
        """Returns a plan for ``limit`` bytes with its issue order and estimated peak; raises FitError."""
        plan, floor_ns = planned_in_mode(program, machine, limit, self.planner, self.seconds, self.mode)
        done = (d for d in plan.decisions if not isinstance(d, Swap) or program.tensors[d.tensor].name in joint.movable)
        plan = replace(plan, decisions=tuple(done))
        schedule = lower(program, plan)
        within = max(limit, schedule.required_bytes)
        timeline = simulate(program, plan, machine, within, schedule=schedule)
        items = order(schedule, timeline).items
        return _Draft(plan, floor_ns, timeline, items, joint.planned_bytes(schedule, items))

    def _look(self, forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> Joint:
        begin = time.process_time()
        first = launches_of(forward, False)
        names = [x.name if isinstance(x, fx.Node) else "" for x in forward.graph.output_node().args[0]]
        strides = {name: s for name, s in list(zip(names, first.strides, strict=True))[outputs:] if s is not None}
        second = launches_of(backward, True, donatable(forward, backward, outputs), strides)
        joint = Joint(forward, backward, first, second, outputs)
        self._looking_s += time.process_time() - begin
        return joint

    def _check_several(self, name: str) -> None:
        """Raises CompileError if ``memory`` is in bytes and the model has a second graph, whose peak is unknown."""
        frames = {graph.name.split("/")[0] for graph in self.graphs if not graph.left}
        again = name.split("/")[0] not in frames or any(graph.name == name for graph in self.graphs)
        if frames and again and not is_fraction(self.memory):
            raise CompileError(
                f"memory: {self.memory} are for a model of one graph, and this one has a second ({name}): give a "
                "fraction such as 0.6 of each graph's peak, or find the graph break with torch.compile(fullgraph=True)"
            )

    def _leave(self, name: str, why: str) -> None:
        graph = Graph(name, left=why)
        self.graphs.append(graph)
        warnings.warn(str(graph), stacklevel=2)


def read_after_write(forward: fx.GraphModule, backward: fx.GraphModule) -> set[str]:
    """Returns the inputs (buffers) that the forward overwrites and the backward reads.

    torch.compile of PyTorch 2.13 passes the new values to the backward, which silently gives wrong gradients.
    """
    written = {str(node.args[0]) for node in forward.graph.find_nodes(op="call_function", target=COPY)}
    return written & {node.name for node in backward.graph.find_nodes(op="placeholder")}


def save_before_write(gm: fx.GraphModule, names: set[str]) -> None:
    """Makes a joint graph read copies of the inputs ``names``, which the partitioner saves for the backward."""
    inputs = gm.graph.find_nodes(op="placeholder")
    for node in inputs:
        if node.name in names:
            with gm.graph.inserting_before(inputs[-1].next):
                copy = gm.graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta = {**node.meta, "recompute": CheckpointPolicy.MUST_SAVE}
            node.replace_all_uses_with(copy, lambda user: user.target is not COPY and user is not copy)  # noqa: B023
    gm.recompile()


def cannot_be_planned(gm: fx.GraphModule) -> str:
    """Returns the reason why a joint graph is left to PyTorch's partitioner, or ""."""
    from torch._functorch.partitioners import has_recomputable_ops, is_sym_node

    if has_recomputable_ops(gm):
        return "it has checkpoint regions, or policies of selective checkpoints, of its own"
    for node in gm.graph.nodes:
        if is_sym_node(node):
            return f"its shapes are not fixed ({node.name}): compile with dynamic=False"
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return f"it calls {node.target}, whose parts have graphs of their own"
    return ""


def compile(
    model: Any, *, memory: int | float | str, machine: Machine | str | None = None, planner: Planner = "lp_round",
    seconds: float | None = 3.0, mode: str = "recompute", fullgraph: bool = False,
    options: dict[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Returns ``torch.compile(model)`` whose forward and backward allocate at most ``memory``.

    Loss, optimizer and training loop stay unchanged. Shapes are fixed (``dynamic=False``): a new shape is compiled and
    planned when it first occurs. A fraction applies to each graph's own peak. ``report`` returns the plans.

    Args:
        model: A module or a function.
        memory, machine, planner, seconds, mode: As in ``Partitioner``.
        fullgraph, options: As in torch.compile.

    Raises:
        CompileError: If the mode copies and this PyTorch lacks the operators. At the first call with gradients: if no
            C++ compiler is found (on the CPU), or no plan fits.
        FormatError: If memory or machine is invalid.
        ValueError: If the mode is unknown.
    """
    partitioner = Partitioner(memory, machine, planner, seconds, mode)
    partitioner.in_order = True

    def backend(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner
        from torch._inductor.virtualized import V

        def inner(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:  # the backward is compiled at its first call
            with V.set_choices_handler(choices()), in_order(gm):
                return compile_fx_inner(gm, *args, **kwargs)

        if not any(isinstance(x, torch.Tensor) and x.device.type != "cpu" for x in inputs):
            needs_compiler()
        # Buffer reuse would keep memory allocated that the plan counts as free.
        patches = {"allow_buffer_reuse": False, **(options or {}), "custom_partitioner_fn": partitioner}
        # A cached joint graph has no report, and its plan may be for another machine.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            return compile_fx(gm, list(inputs), inner_compile=inner, config_patches=patches)

    compiled = torch.compile(model, backend=backend, dynamic=False, fullgraph=fullgraph)
    _PARTITIONERS[compiled] = partitioner
    return compiled


_PARTITIONERS: weakref.WeakKeyDictionary[Any, Partitioner] = weakref.WeakKeyDictionary()


def report(compiled: Any) -> CompiledReport:
    """Returns the report on the graphs of a model that ``compile`` returned.

    Raises:
        ValueError: If ``compile`` did not return the model.
    """
    if compiled not in _PARTITIONERS:
        raise ValueError("compiled: expected a model that executor.compiled.compile returned")
    return CompiledReport(tuple(_PARTITIONERS[compiled].graphs))


def allocated_peak(step: Callable[[], object], device: str = "cpu") -> int:
    """Returns the peak of bytes that ``step()`` allocates in addition to those in use before it.

    On the CPU the profiler records every tensor allocation and release, including those of Inductor's kernels, but not
    a library's own scratch memory. On a GPU the peak is ``max_memory_allocated``.
    """
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    results = profiler.profiler.kineto_results
    changes = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    now = peak = 0
    for _, nbytes in sorted(changes, key=lambda change: change[0]):
        now += nbytes
        peak = max(peak, now)
    return peak


def needs_operators(mode: str) -> None:
    """Raises CompileError if PyTorch cannot copy within a graph or cannot restore a tensor's layout."""
    try:
        from torch._functorch._activation_offloading import offload_ops  # noqa: F401 (makes the operators)

        there = "original_stride" in str(torch.ops.ao.reload.default._schema)
    except ImportError:
        there = False
    if not there:
        raise CompileError(
            f"mode: {mode!r} needs the ao operators of PyTorch 2.13, and this is {torch.__version__}: "
            "mode='recompute' does without"
        )


def needs_compiler() -> None:
    """Raises CompileError if Inductor would find no C++ compiler."""
    names = [name for name in torch._inductor.config.cpp.cxx if name]
    if not any(map(shutil.which, names)):
        raise CompileError(
            f"torch.compile needs a C++ compiler on the CPU, and none of {', '.join(names)} was found: install g++"
        )


def _part(memory: int | float | str) -> float:
    text = str(memory).strip()
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


def _device(inputs: Sequence[object]) -> torch.device:
    leaves = torch.utils._pytree.tree_leaves(inputs)
    devices = [x.device for x in leaves if isinstance(x, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
