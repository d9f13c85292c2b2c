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
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import torch
from torch import Tensor, fx, nn
from torch._dynamo.exc import ShortenTraceback
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch.optim import Optimizer
from torch.utils.checkpoint import CheckpointPolicy

from executor.capture.batches import Loss, compute_loss
from executor.capture.optimizers import STEP_HOOKS, step_without_hooks
from executor.capture.profile import Profile
from executor.compiled.copies import HostSlab
from executor.compiled.graph_report import CompiledReport, Graph, describe, frame_of
from executor.compiled.held import Held, Update, captured_update
from executor.compiled.joint import Joint, donatable
from executor.compiled.launches import choices, in_order, launches_of, sizes
from executor.compiled.measured import NAMED, CompiledGraph, calls_of, measured, profiled, with_measured
from executor.compiled.partition import partition
from executor.compiled.regions import Region, regions
from executor.compiled.search import Candidate, Search
from executor.compiled.updates import Updates, updated_early
from executor.fit import FitError, machine_of, planned_in_mode
from executor.memory import ALIGNMENT
from executor.training.issue_order import order
from simulator.compiled.engine import simulate
from simulator.limits import is_fraction, size_bytes
from simulator.machine import Machine
from simulator.modes import check_mode
from simulator.plan import Plan, Swap
from simulator.program import Program
from simulator.report import size
from simulator.schedule import lower

# Assumed FLOP rate and bandwidth of a server core: their ratio decides which kernels are recomputed on a CPU.
CPU = Machine("a CPU core", 2**40, 10**10, 10**10, flops_per_s={"float32": 50 * 10**9}, memory_bytes_per_s=8 * 10**9)
aten = torch.ops.aten
Planner = str | Callable[[Program, Machine, int], Plan]
Profiles = Literal["measure"] | Sequence[Profile] | None


class CompileError(ShortenTraceback):
    """Raised if a model cannot be compiled within the memory limit; the message is one sentence."""

    def __init__(self, message: str, *, first_useful_frame: Any = None) -> None:
        super().__init__(message, first_useful_frame=first_useful_frame)


class Partitioner(CustomPartitionerFn):
    """Partitioner for ``config.custom_partitioner_fn``: PyTorch's partition if it fits the limit, else a plan's.

    Args:
        memory: A fraction (0.6) of the graph's peak as PyTorch partitions it, or bytes, or a size ("24GiB"). It limits
            what forward and backward allocate: saved and temporary tensors, the model's outputs, their gradients, and
            the gradients of parameters. If a graph is compiled again (a shorter batch, frozen layers), its limit is
            at least the previous one. Bytes also cover ``held`` tensors and those of the other graphs of a step.
        machine: A preset's name, a YAML file or a Machine, whose roofline gives kernel durations (default: the GPU's
            preset, or ``CPU``).
        planner: A name (``agents.PLANNERS``), or a function that returns a plan of the mode.
        seconds: Approximate planning time for each plan.
        mode: "recompute", "swap" or "joint". Copies use one stream per direction; on the CPU they go to a second pool.

    Attributes:
        in_order: Whether the graphs are compiled within ``launches.in_order``, which keeps copies in place, as
            ``compile`` does.
        held: Tensors that the caller holds throughout a step; set by ``compile``.
        updates: Updates to make in the backward pass; set by ``compile_step``.
        profiles: Durations of an earlier step, or None if steps are not to be measured; set by ``compile``.
        generated: Kernel calls of the code generated for each of ``graphs``, if steps are to be measured.
        region: Modules that the graph compiled next is for; set by ``compile``.
        slabs: Pinned memory of the plans with swaps.

    Raises:
        FormatError: If memory or machine is invalid.
        ValueError: If the mode is unknown.
        CompileError: When called: if copies are not kept ``in_order``, or no plan fits.
    """

    in_order = False

    def __init__(
        self,
        memory: int | float | str,
        machine: Machine | str | None = None,
        planner: Planner = "lp_round",
        seconds: float | None = 3.0,
        mode: str = "recompute",
    ) -> None:
        check_mode(mode)
        if not is_fraction(memory):
            size_bytes(memory, "memory")
        self.memory = memory
        self.planner = planner
        self.seconds = seconds
        self.mode = mode
        self.machine = Machine.load(machine) if isinstance(machine, str) else machine
        self.graphs: list[Graph] = []
        self.held = Held()
        self.updates: Updates | None = None
        self.profiles: tuple[Profile, ...] | None = None
        self.generated: dict[int, list[CompiledGraph]] = {}
        self.device = torch.device("cpu")
        self.region: Region | None = None
        self.slabs: list[HostSlab] = []
        self.keys: list[int | None] = []  # of the parameters among the inputs of the graph that is compiled now
        self._key = planner if isinstance(planner, str) else uuid4().hex  # a function may be another one next time

    def uuid(self) -> str:
        """Returns a hash of everything but the graph that affects the partition: this code and the arguments."""
        digest = hashlib.sha256()
        for path in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(path.read_bytes())
        digest.update(repr((self.memory, self.machine, self._key, self.seconds, self.mode, self.profiles)).encode())
        return digest.hexdigest()

    def __deepcopy__(self, memo: Any) -> Partitioner:
        """Returns itself: Inductor copies its configuration, and would copy the model with it."""
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the model, which Inductor would pickle for the key of its cache."""
        return {name: value for name, value in self.__dict__.items() if name not in ("held", "updates", "region")}

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
        skip_reason = cannot_be_planned(gm)
        forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        if overwritten := read_after_write(forward, backward):
            save_before_write(gm, overwritten)
            forward, backward = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        if self.updates is not None:
            updated_early(forward, backward, self.keys, self.updates.temporary)
        if skip_reason:
            self._skip(name, skip_reason)
            return forward, backward
        begin = time.process_time()
        self._scheduling_s = 0.0
        _serve_up_to(gm)
        region, copies = (self.region.name, len(self.region.modules)) if self.region else ("", 1)
        frame = region or frame_of(name)
        joint = self._schedule(forward, backward, kwargs["num_fwd_outputs"], copies)
        peak = joint.peak_bytes()
        self.device = device = _device(joint_inputs)
        machine = self._machine(device)
        held = {} if is_fraction(self.memory) else self.held.beside(frame, copies)
        limit = self._limit(frame, peak, held)
        program = joint.program(machine, f"graph {name}", self.mode != "recompute")
        retimed = with_measured(program, self.profiles) if self.profiles else None
        graph = Graph(
            name,
            limit,
            peak,
            peak,
            program=retimed or program,
            machine=machine,
            held=held,
            region=region,
            copies=copies,
            is_measured=retimed is not None,
        )
        # 1 % of the limit is left for scratch memory of convolutions (oneDNN), which no graph shows. A memory of 1.0
        # needs no plan all the same.
        aim = int(limit * 0.99) if joint.convolves else limit
        if peak > (limit if is_fraction(self.memory) else aim):
            if self.profiles and retimed is None:
                warnings.warn(
                    f"graph {name}: no profile is of this graph, so it is planned with the roofline; measure a step "
                    "that executes it",
                    stacklevel=2,
                )
            joint, graph = self._planned(joint, graph, aim)
        self.held.add(frame, joint.between_bytes(), copies)
        seconds = time.process_time() - begin - self._scheduling_s
        graph = replace(graph, seconds=seconds, looking_s=self._scheduling_s, other_bytes=joint.other_bytes())
        self.graphs.append(graph)
        return joint.forward, joint.backward

    def _planned(self, joint: Joint, graph: Graph, aim: int) -> tuple[Joint, Graph]:
        """Returns graphs of a plan whose peak, as Inductor schedules them, is at most ``aim`` bytes."""
        program = graph.program
        machine = graph.machine
        assert program is not None and machine is not None
        best, reason = Search(
            plan=lambda limit: self._candidate(joint, program, machine, limit),
            schedule=lambda chosen: self._partitioned(joint, program, chosen),
            aim=aim,
            enough=program.peak_bytes + joint.other_bytes(),
        ).run()
        if best is None:
            beside = f" beside {describe(graph.held)}" if graph.held else ""
            raise CompileError(f"graph {graph.name} does not fit into {size(graph.limit)}{beside}: {reason}")
        chosen = best.candidate
        return best.joint, replace(
            graph,
            peak_bytes=best.peak_bytes,
            plan=chosen.plan,
            iteration_ns=chosen.timeline.iteration_ns,
            ideal_ns=chosen.timeline.ideal_ns,
            floor_ns=chosen.floor_ns,
            host_bytes=chosen.order.host_slots(ALIGNMENT).footprint,
        )

    def _candidate(self, joint: Joint, program: Program, machine: Machine, limit: int) -> Candidate:
        """Returns a plan for ``limit`` bytes with its issue order and estimated peak; raises FitError."""
        if joint.copies == 1:
            plan, floor_ns = planned_in_mode(program, machine, limit, self.planner, self.seconds, self.mode)
        else:
            plan, limit = self._for_copies(joint, program, machine, limit)
            floor_ns = None  # the planner's is one for the limit on saved tensors
        kept = (d for d in plan.decisions if not isinstance(d, Swap) or program.tensors[d.tensor].name in joint.movable)
        plan = replace(plan, decisions=tuple(kept))
        schedule = lower(program, plan)
        feasible_limit = max(limit, schedule.required_bytes)
        timeline = simulate(program, plan, machine, feasible_limit, schedule=schedule)
        issued = order(schedule, timeline)
        return Candidate(plan, floor_ns, timeline, issued, joint.planned_bytes(schedule, issued.items))

    def _partitioned(self, joint: Joint, program: Program, chosen: Candidate) -> Joint:
        """Returns the graphs of a plan."""
        slots = chosen.order.host_slots(ALIGNMENT)
        blocks = chosen.order.schedule.blocks
        offsets = {block: slots.offsets.get(blocks[block].owner, 0) for block in range(len(blocks))}
        slab = HostSlab(slots.footprint)
        parts = partition(joint, program, chosen.order.items, slab.key, offsets)
        if slots.offsets:
            self.slabs.append(slab)
        return self._schedule(*parts, joint.outputs, joint.copies)

    def _for_copies(self, joint: Joint, program: Program, machine: Machine, limit: int) -> tuple[Plan, int]:
        """Returns a plan of one copy for a limit on all, and the copy's own limit; raises FitError.

        While one copy runs, each other one holds what it saved. The more they may hold, the less is left to that copy
        beside its own saved tensors: at first as much as without a plan, in the end enough to recompute all of them.
        """
        others = joint.copies - 1
        saved = joint.between_bytes()
        most = (limit - program.peak_bytes + saved) // joint.copies
        fewest = (limit - program.peak_bytes) // others
        reason: FitError | None = None
        for allowed in dict.fromkeys(min(max(n, joint.gradients), saved) for n in (most, (most + fewest) // 2, fewest)):
            own = limit - others * allowed
            kernels = list(program.kernels)
            position = next(i for i, kernel in enumerate(joint.kernels) if kernel[0] == joint.between)
            kernels[position] = replace(kernels[position], workspace=max(0, own - allowed))
            capped = replace(program, kernels=tuple(kernels))
            try:
                plan, _ = planned_in_mode(capped, machine, own, self.planner, self.seconds, self.mode)
            except FitError as error:
                reason = error
            else:
                return replace(plan, fingerprint="", structure=""), own
        assert reason is not None
        raise reason

    def _schedule(self, forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, copies: int) -> Joint:
        begin = time.process_time()
        first = launches_of(forward, False)
        names = [x.name if isinstance(x, fx.Node) else "" for x in forward.graph.output_node().args[0]]
        strides = {name: s for name, s in list(zip(names, first.strides, strict=True))[outputs:] if s is not None}
        second = launches_of(backward, True, donatable(forward, backward, outputs), strides)
        joint = Joint(forward, backward, first, second, outputs, copies, self.held.inputs.trained)
        self._scheduling_s += time.process_time() - begin
        return joint

    def _machine(self, device: torch.device) -> Machine:
        return self.machine or (CPU if device.type == "cpu" else machine_of(torch.cuda.get_device_name(device)))

    def _limit(self, frame: str, peak: int, held: dict[str, int]) -> int:
        """Returns the bytes that a graph with this peak may allocate beside ``held``; raises CompileError if none."""
        if not is_fraction(self.memory):
            memory = size_bytes(self.memory, "memory")
            # The update has all gradients, which it counts itself, and no activations.
            in_update = {kind: n for kind, n in held.items() if kind not in ("gradient", "activation")}
            left = memory - sum(in_update.values())
            if self.updates is None and left < self.held.in_update():
                raise CompileError(
                    f"memory: {self.memory} leave {size(max(0, left))} beside {describe(in_update)}, and gradients and "
                    f"temporary tensors of the update need {size(self.held.in_update())}: raise it"
                )
            return max(0, memory - sum(held.values()))
        # A graph that is compiled again may need less, but then its smallest peak is a larger fraction of it.
        previous = (graph.limit for graph in self.graphs if graph.frame == frame)
        is_single = self.region is not None and len(self.region.modules) == 1
        return max(peak if is_single else int(peak * _fraction(self.memory)), *previous, 0)

    def announce(self, seconds: float) -> None:
        """Warns if the graph that was compiled last had been compiled before for other inputs."""
        *earlier, graph = self.graphs or [None]
        name = str(torch._guards.CompileContext.current_compile_id())
        if graph is None or graph.name != name or graph.frame not in {g.frame for g in earlier}:
            return
        warnings.warn(
            f"graph {name} was planned and compiled again in {seconds:.1f} s of CPU time, for inputs of "
            f"{', '.join(map(str, self.held.inputs.shapes))}: with dynamic=True one plan for the largest batch, passed "
            "first, serves the smaller ones, and torch.compiler.set_stance('fail_on_recompile') refuses such calls",
            stacklevel=2,
        )

    def _skip(self, name: str, reason: str) -> None:
        graph = Graph(name, skip_reason=reason, region=self.region.name if self.region else "")
        self.graphs.append(graph)
        warnings.warn(str(graph), stacklevel=2)


def read_after_write(forward: fx.GraphModule, backward: fx.GraphModule) -> set[str]:
    """Returns the inputs (buffers) that the forward overwrites and the backward reads.

    torch.compile of PyTorch 2.13 passes the new values to the backward, which silently gives wrong gradients.
    """
    written = {str(node.args[0]) for node in forward.graph.find_nodes(op="call_function", target=aten.copy_.default)}
    return written & {node.name for node in backward.graph.find_nodes(op="placeholder")}


def save_before_write(gm: fx.GraphModule, names: set[str]) -> None:
    """Makes a joint graph read copies of the inputs ``names``, which the partitioner saves for the backward."""
    inputs = gm.graph.find_nodes(op="placeholder")
    for node in inputs:
        if node.name in names:
            with gm.graph.inserting_before(inputs[-1].next):
                copy = gm.graph.call_function(aten.clone.default, (node,))
            copy.meta = {**node.meta, "recompute": CheckpointPolicy.MUST_SAVE}
            node.replace_all_uses_with(copy, lambda user: user.target is not aten.copy_.default and user is not copy)  # noqa: B023
    gm.recompile()


def cannot_be_planned(gm: fx.GraphModule) -> str:
    """Returns the reason why a joint graph is left to PyTorch's partitioner, or ""."""
    from torch._functorch.partitioners import has_recomputable_ops
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if has_recomputable_ops(gm):
        return "it has checkpoint regions, or policies of selective checkpoints, of its own"
    for node in gm.graph.nodes:
        if free_unbacked_symbols(node.meta.get("val")):
            return f"its shapes depend on the values of tensors ({node.name})"
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return f"it calls {node.target}, whose parts have graphs of their own"
    return ""


def _serve_up_to(gm: fx.GraphModule) -> None:
    """Makes Dynamo compile a graph again for sizes above those that it is planned for."""
    for node in gm.graph.find_nodes(op="placeholder"):
        size = node.meta.get("val")
        if isinstance(size, torch.SymInt):
            assert size <= sizes([size])[0]  # the comparison adds the guard


class WithLoss(nn.Module):
    """Module that returns the loss of a batch in one graph with the model."""

    def __init__(self, model: Any, loss_fn: Loss | None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn

    def forward(self, *batch: Any) -> Any:
        """Returns the loss."""
        return compute_loss(self.model, self.loss_fn, lambda output: output, *batch)


def compile(
    model: Any,
    loss_fn: Loss | None = None,
    *,
    memory: int | float | str,
    optimizer: Optimizer | None = None,
    machine: Machine | str | None = None,
    planner: Planner = "lp_round",
    seconds: float | None = 3.0,
    mode: str = "recompute",
    dynamic: bool = False,
    regional: bool = False,
    profile: Profiles = None,
    fullgraph: bool = False,
    options: dict[str, Any] | None = None,
) -> Any:
    """Returns ``torch.compile(model)`` whose training steps need at most ``memory``.

    Optimizer and training loop stay unchanged. ``report`` returns the plans. Graphs compiled again, for another shape
    for example, are announced by a warning with the time that it took.

    Args:
        model: A module or a function.
        loss_fn: If given, the result takes the batch of ``fit`` (``model(x, y)`` for a pair) and returns
            ``loss_fn(model(x), y)``, so that the plan covers what lives between forward and backward, as the logits.
        memory: A fraction of what forward and backward allocate, as in ``Partitioner``. Or bytes, which also count
            parameters, buffers, gradients, the batch, optimizer state and the update's temporary tensors, and are
            shared by all graphs of the model. On a GPU they are bytes of tensors, without the CUDA context.
        optimizer: Its state and temporary tensors count if ``memory`` is in bytes.
        machine, planner, seconds, mode: As in ``Partitioner``.
        dynamic: Whether one plan serves all shapes: start with the largest batch, as each graph and its plan then serve
            all smaller sizes above 1, in less memory. Otherwise each shape is compiled and planned at its first call.
        regional: Whether equal blocks of a ``torch.nn.ModuleList`` or ``torch.nn.Sequential`` are planned and compiled
            once, so that the time to compile does not grow with their number. A fraction is of what all blocks need.
            The model is compiled in place (``nn.Module.compile``), and what it computes between its submodules and
            ``loss_fn`` is neither planned nor counted. Without swaps.
        profile: "measure" prepares the model for ``measure``, whose profiles passed here give kernel durations in place
            of the roofline's.
        fullgraph, options: As in torch.compile.

    Returns:
        The compiled model; with ``loss_fn``, a callable that takes a batch and returns what ``loss_fn`` returns.

    Raises:
        CaptureError: If the optimizer's update cannot be traced.
        CompileError: At the first call with gradients: if no C++ compiler is found (on the CPU), or no plan fits.
        FormatError: If memory or machine is invalid.
        ValueError: If mode or profile is unknown, or the model has no equal blocks or would swap them.
    """
    partitioner = Partitioner(memory, machine, planner, seconds, mode)
    partitioner.profiles = _profiles(profile)
    partitioner.held = Held(model, None if is_fraction(memory) else optimizer)
    if not regional:
        target = WithLoss(model, loss_fn) if loss_fn is not None else model
        return _compiled(target, partitioner, dynamic, fullgraph, options)
    if mode != "recompute":
        raise ValueError(f"regional: expected mode 'recompute', got {mode!r}")
    for region in regions(model):
        backend = _backend(partitioner, options, region)
        for module in region.modules:
            module.compile(backend=backend, dynamic=dynamic, fullgraph=fullgraph)
    target = model
    if loss_fn is not None:
        backend = _backend(partitioner, options, Region("loss_fn", (nn.Identity(),)))
        target = WithLoss(model, torch.compile(loss_fn, backend=backend, dynamic=dynamic, fullgraph=fullgraph))
    _PARTITIONERS[target] = partitioner
    return target


class CompiledStep:
    """Training step that ``compile_step`` returns."""

    def __init__(self, model: Any, optimizer: Optimizer) -> None:
        self.model = model
        self.optimizer = optimizer

    def __call__(self, *batch: Any) -> Tensor:
        """Trains on a batch and returns its loss."""
        loss: Tensor = self.model(*batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if any(p.grad is not None for group in self.optimizer.param_groups for p in group["params"]):
            step_without_hooks(self.optimizer)  # gradients that are no result of their own, such as shared ones
            self.optimizer.zero_grad()
        return loss.detach()

    def report(self) -> CompiledReport:
        """Returns the report on the step's graph."""
        return report(self.model)


def compile_step(
    model: nn.Module,
    loss_fn: Loss | None,
    optimizer: Optimizer,
    *,
    memory: int | float | str,
    machine: Machine | str | None = None,
    planner: Planner = "lp_round",
    seconds: float | None = 3.0,
    mode: str = "recompute",
    dynamic: bool = False,
    profile: Profiles = None,
    options: dict[str, Any] | None = None,
) -> CompiledStep:
    """Returns a compiled training step whose backward pass updates each parameter once its gradient is final.

    Gradients do not live at once, and the trained bits are those of ``compile`` with ``optimizer.step()`` after the
    backward pass. Learning rates are read in each step. No gradient reaches ``p.grad``.

    Args:
        model, loss_fn: As in ``compile``; without ``loss_fn`` the model returns its loss.
        optimizer: Must update each parameter from its own gradient and state alone.
        memory, machine, planner, seconds, mode, dynamic, profile, options: As in ``compile``. The model must be one
            graph.

    Returns:
        A callable that takes a batch, updates the parameters and returns the loss, detached.

    Raises:
        CaptureError: If the update cannot be traced, or needs several gradients at once (as in ``fit``).
        CompileError: As in ``compile``, or if parameters or the optimizer have hooks.
        FormatError: If memory or machine is invalid.
        ValueError: If mode or profile is unknown.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters) or any(
        getattr(optimizer, name) for name in STEP_HOOKS
    ):
        raise CompileError(
            "optimizer: hooks of parameters or of the optimizer would not be called: remove them, or use compile"
        )
    update = Update.of(captured_update(model, optimizer, bucket_bytes=1, early=True))
    partitioner = Partitioner(memory, machine, planner, seconds, mode)
    partitioner.profiles = _profiles(profile)
    partitioner.held = Held(model)
    partitioner.held.update = update
    partitioner.updates = Updates(optimizer, update.per_byte)
    step = CompiledStep(_compiled(WithLoss(model, loss_fn), partitioner, dynamic, True, options), optimizer)
    _PARTITIONERS[step] = partitioner
    return step


def _compiled(
    model: Any, partitioner: Partitioner, dynamic: bool, fullgraph: bool, options: dict[str, Any] | None
) -> Any:
    backend = _backend(partitioner, options)
    compiled = torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=fullgraph)
    _PARTITIONERS[compiled] = partitioner
    return compiled


def _backend(
    partitioner: Partitioner, options: dict[str, Any] | None, region: Region | None = None
) -> Callable[..., Any]:
    """Returns a backend of torch.compile: Inductor with this partitioner."""
    partitioner.in_order = True
    updates = partitioner.updates

    def backend(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx, compile_fx_inner
        from torch._inductor.debug import reset_provenance_globals
        from torch._inductor.virtualized import V

        index = len(partitioner.graphs)

        def inner(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:  # the backward is compiled at its first call
            with V.set_choices_handler(choices()), in_order(gm), reset_provenance_globals():
                run = compile_fx_inner(gm, *args, **kwargs)
                if partitioner.profiles is not None and index < len(partitioner.graphs):
                    partitioner.generated.setdefault(index, []).append(calls_of(gm, run))
            return run

        if not any(isinstance(x, torch.Tensor) and x.device.type != "cpu" for x in inputs):
            require_compiler()
        partitioner.held.add_inputs(gm, inputs)
        partitioner.region = region
        if updates is not None:
            partitioner.keys = [updates.key_of(x) if isinstance(x, nn.Parameter) else None for x in inputs]
        # Buffer reuse would keep memory allocated that the plan counts as free.
        patches = {"allow_buffer_reuse": False, **(options or {}), "custom_partitioner_fn": partitioner}
        patches |= {} if partitioner.profiles is None else NAMED
        # A cached joint graph has no report, and its plan may be for another machine.
        begin = time.process_time()
        with torch._functorch.config.patch(enable_autograd_cache=False):
            run = compile_fx(gm, list(inputs), inner_compile=inner, config_patches=patches)
        partitioner.announce(time.process_time() - begin)
        return run

    return backend


_PARTITIONERS: weakref.WeakKeyDictionary[Any, Partitioner] = weakref.WeakKeyDictionary()


def report(compiled: Any) -> CompiledReport:
    """Returns the report on the graphs of a model that ``compile`` returned.

    Raises:
        ValueError: If ``compile`` did not return the model.
    """
    return CompiledReport(tuple(_partitioner(compiled).graphs))


def measure(compiled: Any, step: Callable[[], object]) -> tuple[Profile, ...]:
    """Executes one training step under PyTorch's profiler and returns the durations of the planned graphs' kernels.

    The report then contains them beside the predicted ones. Passed as ``profile=`` when the model is compiled again,
    they give plans in place of the roofline.

    Args:
        compiled: A model that ``compile`` or ``compile_step`` returned with ``profile=``, after its first step.
        step: Executes forward and backward of one training step, or of several, whose medians count.

    Returns:
        One profile per graph with a plan.

    Raises:
        ProfileError: If a kernel of the generated code is missing in the profile.
        ValueError: If the model was compiled otherwise, or no graph has a plan.
    """
    partitioner = _partitioner(compiled)
    planned = {i: graph for i, graph in enumerate(partitioner.graphs) if graph.plan and i in partitioner.generated}
    if not planned:
        raise ValueError(
            "measure: no graph has a plan and named kernels: compile with profile='measure' and execute a step first"
        )
    device = partitioner.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    runs = profiled(step, device.type)
    profiles = []
    for i, graph in planned.items():
        assert graph.program is not None and graph.machine is not None
        profile = measured(graph.name, graph.program, partitioner.generated[i], runs, graph.machine.name, name)
        partitioner.graphs[i] = replace(graph, measured_ns=profile.step_ns)
        profiles.append(profile)
    return tuple(profiles)


def _partitioner(compiled: Any) -> Partitioner:
    if compiled not in _PARTITIONERS:
        raise ValueError("compiled: expected a model that executor.compiled.compile returned")
    return _PARTITIONERS[compiled]


def _profiles(profile: Profiles) -> tuple[Profile, ...] | None:
    if isinstance(profile, str):
        if profile != "measure":
            raise ValueError(
                f"profile: expected None, 'measure' or what executor.compiled.measure returns, got {profile!r}"
            )
        return ()
    return None if profile is None else tuple(profile)


def allocated_peak(step: Callable[[], object], device: str = "cpu") -> int:
    """Returns the peak of bytes that ``step()`` allocates in addition to those in use before it.

    On the CPU the profiler records every tensor allocation and release, including those of Inductor's kernels, but not
    a library's own scratch memory. On a GPU the peak is ``max_memory_allocated``.
    """
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        bytes_before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - bytes_before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    results = profiler.profiler.kineto_results
    changes = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    now = peak = 0
    for _, nbytes in sorted(changes, key=lambda change: change[0]):
        now += nbytes
        peak = max(peak, now)
    return peak


def require_compiler() -> None:
    """Raises CompileError if Inductor would find no C++ compiler."""
    names = [name for name in torch._inductor.config.cpp.cxx if name]
    if not any(map(shutil.which, names)):
        raise CompileError(
            f"torch.compile needs a C++ compiler on the CPU, and none of {', '.join(names)} was found: install g++"
        )


def _fraction(memory: int | float | str) -> float:
    text = str(memory).strip()
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


def _device(inputs: Sequence[object]) -> torch.device:
    leaves = torch.utils._pytree.tree_leaves(inputs)
    devices = [x.device for x in leaves if isinstance(x, torch.Tensor)]
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))
