"""Plans and runs a training step within a memory limit in one call.

    step = fit(model, loss_fn, optimizer, (x, y), memory="24GiB")
    print(step.report())
    for x, y in loader:
        loss = step(x, y)

The step may also be a function of your own: ``fit(train_step, example_batch=(x, y), memory="24GiB")``. ``fit`` captures
the step, times its kernels (measured on a GPU, else a roofline), plans, and returns a callable step. Batches of other
shapes are captured and planned on first use. Only this file of the executor imports planners, on the first call.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, fx, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from executor.capture.ambient import default_modes
from executor.capture.batches import Loss, arguments
from executor.capture.captured import Captured
from executor.capture.early_update import InBackward, with_early_update
from executor.capture.optimizers import BUCKET_BYTES, rates_as_tensors
from executor.capture.profile import Profile, ProfileError, with_profile
from executor.capture.profiler import measure
from executor.capture.python_values import preserve_random_states
from executor.device_memory import Loop, card_peak
from executor.memory.pinned import available
from executor.training.bindings import device_of
from executor.training.graph import NoGraph, OverLimit, beside_bytes, not_by_default
from executor.training.planned_step import PlannedStep
from executor.training.planned_steps import PlannedSteps
from executor.training.replay_time import replay_ns
from simulator.compiled.engine import simulate
from simulator.files import FormatError
from simulator.limits import check_limit, is_fraction, limit_bytes, size_bytes
from simulator.machine import PRESETS, Machine
from simulator.plan import Plan
from simulator.pool.device_memory import DevicePeak, under_plan
from simulator.pool.packed import DoesNotPack, first_that_packs, lower_limits, packed_bytes
from simulator.program import Program
from simulator.report import KINDS, Report, report as reported, size
from simulator.schedule import OutOfMemory
from simulator.timeline import Timeline

FLOOR_S = 10.0  # approximate time in s for the floor of a report
FREE = 1.001  # planned over unplanned time of a plan that another order of the kernels need not improve
LINK_MARGIN = 0.8  # of the link that plans use: simulated steps of an H200 lose nothing down to this speed
REPLANS = 3  # maximum number of re-plans if a CUDA graph exceeds the limit


class FitError(ValueError):
    """Raised if the step cannot be planned; the message is one sentence."""


def report(
    source: Captured | Program,
    machine: Machine,
    limit: int,
    plan: Plan | None = None,
    floor_ns: int | None = None,
    issued: str = "",
) -> Report:
    """Returns the report of ``plan`` on a step, or of the unplanned step.

    Args:
        source: the step, captured or as a program.
        machine: machine to simulate.
        limit: memory limit in bytes.
        plan: plan for the step; None: the step runs without a plan.
        floor_ns: as in ``agents.floor.floor``.
        issued: how the step runs; "" if it is not executed.

    Returns:
        the report, of the step without a plan if ``plan`` is None.

    Raises:
        PlanError: the plan is for another program.
        OutOfMemory: the plan is infeasible at the limit.
    """
    program = source if isinstance(source, Program) else source.program
    unplanned = simulate(program, Plan(), machine, program.peak_bytes)
    planned = simulate(program, plan, machine, limit) if plan and (plan.decisions or plan.variants) else None
    origins = source.origins if isinstance(source, Captured) else None
    packed = packed_bytes(planned or unplanned, limit, machine.alignment)
    return reported(program, machine, limit, packed, unplanned, planned, plan, floor_ns, origins, issued)


class FittedStep(PlannedStep):
    """Planned step for one batch shape, with a report of its plan.

    Args:
        captured, plan, machine, limit: as in PlannedStep.
        certifies: whether the planner computes floors.

    Attributes:
        packed_bytes: simulated packed size of the plan; the limit if no plan packs into it.
        replans: number of re-plans because its CUDA graph exceeded the limit.
    """

    def __init__(self, captured: Captured, plan: Plan, machine: Machine, limit: int, certifies: bool = False) -> None:
        super().__init__(captured, plan, machine, limit)
        self.machine = machine
        self.certifies = certifies
        self.packed_bytes = limit
        self.replans = 0

    @cached_property
    def floor_ns(self) -> int | None:
        """Certified lower bound of the iteration time, in ns; None if the planner computes none.

        The planner's own bound is for a slower link, of which the margin is a part.
        """
        if not self.certifies:
            return None
        from agents.floor import refined_floor

        return refined_floor(self.program, self._executing_machine(), self.limit, seconds=FLOOR_S).iteration_ns

    def _executing_machine(self) -> Machine:
        return self.machine if self.not_graph else self.machine.in_graph()

    def _replay_ns(self) -> int:
        machine = self._executing_machine()
        schedule = self.order.schedule
        timeline = simulate(self.captured.program, self.plan, machine, self.order.limit, schedule=schedule)
        return replay_ns(self.order, timeline, machine)[0]

    def _falls_back(self, error: NoGraph) -> bool:
        return not (isinstance(error, OverLimit) and self.replans < REPLANS) and super()._falls_back(error)

    def report(self) -> Report:
        """Returns the report: memory peak, moved tensors and predicted time; ``str`` renders it as a page."""
        issued = ("with its update in the backward pass, " if self.captured.early_update else "") + self.issued
        if self.graph is not None:
            issued += f", and {self._replay_ns() / 1e6:.2f} ms with its copies joined at the end"
        return report(self.captured, self._executing_machine(), self.limit, self.plan, self.floor_ns, issued)


class _Attempt(NamedTuple):
    """A plan for one order of a step's kernels; fields as in FittedStep."""

    captured: Captured
    plan: Plan
    packed_bytes: int
    certifies: bool
    iteration_ns: int


class FittedSteps(PlannedSteps):
    """Planned steps for all batch shapes within one limit, as returned by ``fit``.

    Attributes:
        current: step of the shape used last; ``captured``, ``program``, ``plan``, ``floor_ns`` and ``report()`` use it.
    """

    def __init__(
        self,
        model: nn.Module | Callable[..., Any],
        loss_fn: Loss | None,
        optimizer: Optimizer | None,
        machine: Machine | None,
        memory: int | float | str,
        planner: str | Callable[[Program, Machine, int], Plan],
        profile: Literal["measure"] | Profile | None,
        seconds: float | None,
        keep: int,
        optimizer_in_backward: InBackward,
        link_margin: float,
        **options: Any,
    ) -> None:
        # The device of the first step gives a missing machine. A planner is called in `_plan`, also by its name.
        super().__init__(
            model,
            loss_fn,
            optimizer,
            machine=cast(Machine, machine),
            limit=memory,
            planner=cast(Callable[[Program, Machine, int], Plan], planner),
            keep=keep,
            **options,
        )
        self._profile = profile
        self._seconds = seconds
        self._in_backward = optimizer_in_backward
        self._link_margin = link_margin
        self._device = torch.device("cpu")

    def _make(self, captured: Captured) -> FittedStep:
        if self.limit is None:
            self._set_defaults(device_of(captured))
        machine = self.machine
        profile = self._profile
        if profile == "measure":
            profile = _measured(captured, self._device, machine.name)
        if profile is None:
            captured = captured.on(machine)
        else:
            try:
                captured = replace(captured, program=with_profile(captured.program, profile))
            except FormatError as error:
                if self.limit is None:
                    raise
                raise FitError(f"{error}: a profile covers one batch shape; pass profile='measure'") from error
        card = self._card(captured)
        limit = self.limit or (card.limit if card else limit_bytes(self._requested_limit, captured.program, "memory"))
        room = limit - beside_bytes(captured)
        early = with_early_update(captured, self._in_backward)
        orders = (early,) if self._in_backward is True else (captured,)
        # A function that returns a stored plan knows one order only.
        if self._in_backward == "auto" and isinstance(self.planner, str) and captured.program.peak_bytes > limit:
            orders = tuple(dict.fromkeys((captured, early)))
        return self._fitted(orders, limit, room, card)

    def _fitted(
        self, orders: tuple[Captured, ...], limit: int, room: int, card: DevicePeak | None = None
    ) -> FittedStep:
        """Returns a step whose plan packs into ``room`` bytes: the fastest of these orders of its kernels.

        Args:
            orders: the step with its kernels in different orders.
            limit: limit of the tensors in bytes.
            room: bytes of the packed plan, if the step runs as a graph.
            card: memory of the device without a plan, which PyTorch's allocator must not exceed if the step does not.

        A later order is not planned if the first one costs next to no time.
        """
        attempts = list[_Attempt]()
        error: FitError | None = None
        seconds = self._seconds and self._seconds / len(orders)
        for captured in orders:
            if attempts and attempts[0].iteration_ns <= FREE * captured.program.ideal_ns:
                break
            try:
                attempts.append(self._attempt(captured, limit, room, seconds, card))
            except FitError as reason:
                error = reason
        if error and not attempts:
            raise error
        best = min(attempts, key=lambda attempt: attempt.iteration_ns)
        step = FittedStep(best.captured, best.plan, self.machine, limit, best.certifies)
        step.packed_bytes = best.packed_bytes
        return step

    def _attempt(
        self, captured: Captured, limit: int, room: int, seconds: float | None, card: DevicePeak | None
    ) -> _Attempt:
        """Plans a step for a part of the link, so that it packs into ``room`` bytes; the times are of the whole link.

        If steps do not run as graphs, PyTorch's allocator chooses addresses: the plan is the first for the limit or
        less that it serves within ``card``.
        """
        in_graph = not not_by_default(captured, undo=False)
        machine = self.machine.in_graph() if in_graph else self.machine
        narrow = self.machine.with_link(self._link_margin)
        certifies = False

        def make_plan(nbytes: int) -> Plan:
            nonlocal certifies
            plan, floor_ns = _plan(captured, narrow, nbytes, self.planner, seconds)
            certifies |= floor_ns is not None
            return plan

        def attempt(nbytes: int) -> tuple[Plan, Timeline]:
            plan = make_plan(nbytes)
            return plan, simulate(captured.program, plan, machine, nbytes)

        plan = None
        packed = limit
        if in_graph:
            with suppress(DoesNotPack, FitError, OutOfMemory):  # it may still run without a graph
                plan, packed = first_that_packs(max(room, 1), attempt, machine.alignment, stops=(FitError, OutOfMemory))
        elif card is not None:
            plan = _first_served(attempt, limit, card)
        plan = plan or make_plan(limit)
        iteration_ns = simulate(captured.program, plan, machine, limit).iteration_ns
        return _Attempt(captured, plan, packed, certifies, iteration_ns)

    def __call__(self, *batch: Any) -> Any:
        """Runs the step as PlannedSteps does; re-plans with a lower limit if its graph would exceed the limit."""
        while True:
            try:
                return super().__call__(*batch)
            except OverLimit as error:
                self._replan(error.excess)

    def _replan(self, excess: int) -> None:
        """Replaces the current step, whose state is as before the call."""
        previous = self.current
        previous.finish()
        # The graph's overhead over the packed size is previous.limit + excess - previous.packed_bytes.
        step = self._fitted((previous.captured,), previous.limit, previous.packed_bytes - excess)
        if step.packed_bytes == previous.limit:
            previous.replans = REPLANS  # no plan packs into less: continue without a graph
            return
        step.replans = previous.replans + 1
        self.steps[next(reversed(self.steps))] = self._current = step
        if self._open:
            step.__enter__()

    def _set_defaults(self, device: torch.device) -> None:
        """Sets the default machine and profile by the device of the first step."""
        self._device = device
        if device.type != "cpu":
            self.machine = self.machine or machine_of(torch.cuda.get_device_name(device))
            self._profile = self._profile or "measure"
        if self.machine is None:
            self.machine = Machine.load("gtx1080ti")
            warnings.warn(
                f"the model is on the CPU and machine= is not given: times and copies are those of {self.machine.name}",
                stacklevel=6,
            )

    def _card(self, captured: Captured) -> DevicePeak | None:
        """Returns the device memory of the step without a plan if the memory is that of a GPU, else None."""
        if self._device.type == "cpu" or is_fraction(self._requested_limit):
            return None
        memory = size_bytes(self._requested_limit, "memory")
        # The loop holds returned tensors until the next return, and gradients until the next step.
        outputs = captured.outputs[1 : sum(captured.returned.tensors)]
        returned = tuple({captured.values[node] for node in outputs if node in captured.values})
        holds = captured.holds._replace(outputs=returned, outputs_end=len(captured.program.kernels))
        loop = Loop("start" if captured.returned.gradients else None, keeps_outputs=bool(returned))
        return card_peak(replace(captured, holds=holds), self.machine, loop, memory)

    @property
    def current(self) -> FittedStep:
        """Step of the shape used last."""
        return cast(FittedStep, next(reversed(self.steps.values())))

    @property
    def captured(self) -> Captured:
        """Captured step, as in PlannedStep."""
        return self.current.captured

    @property
    def program(self) -> Program:
        """Program, as in PlannedStep."""
        return self.current.program

    @property
    def plan(self) -> Plan:
        """Plan, as in PlannedStep."""
        return self.current.plan

    @property
    def floor_ns(self) -> int | None:
        """Certified lower bound of the iteration time, as in ``report``."""
        return self.current.floor_ns

    def report(self) -> Report:
        """Returns the report of the current step, as FittedStep."""
        return self.current.report()


def fit(
    model: nn.Module | Callable[..., Any],
    loss_fn: Loss | None = None,
    optimizer: Optimizer | None = None,
    example_batch: Any = (),
    memory: int | float | str = "",
    *,
    machine: Machine | str | None = None,
    planner: str | Callable[[Program, Machine, int], Plan] = "best",
    profile: Literal["measure"] | Profile | None = None,
    seconds: float | None = None,
    keep: int = 16,
    accumulate: int = 1,
    average: bool = True,
    clip_norm: float | None = None,
    keep_grads: bool = False,
    autocast: torch.dtype | None = None,
    scaler: GradScaler | None = None,
    bucket_bytes: int | None = BUCKET_BYTES,
    optimizer_in_backward: InBackward = "auto",
    link_margin: float = LINK_MARGIN,
    tensor_lr: bool = False,
    check: bool = True,
) -> FittedSteps:
    """Returns the training step of ``loss_fn(model(x), y)`` within ``memory``, bit-identical to the eager step.

    For a mapping the step is ``loss_fn(model(**batch), batch)``, for other objects ``loss_fn(model(batch), batch)``.
    Without ``loss_fn`` the model returns its loss. If ``loss_fn`` returns ``(loss, …)``, the step returns all of it;
    these tensors live to the end of the step and count toward its memory.

    Batches of other shapes than ``example_batch`` are captured and planned on first use, within the same limit. Errors
    then occur in that call; the model is unchanged, and other shapes may follow. If the first step differs from later
    ones (an optimizer averages from its first gradient on), the second call captures and plans again.

    Args:
        model: a module, or a function that performs a whole step (any models, optimizers and losses). The function is
            called with the parts of ``example_batch``, without ``loss_fn`` and ``optimizer``.
        loss_fn: loss of model output and target; None: see above.
        optimizer: optimizer of the parameters; None: the step computes no update.
        example_batch: ``(x, y)``, ``(inputs…, y)``, a mapping or another object; only shapes and types matter. With
            ``accumulate`` it may hold the pairs of a step (assumed if x and y are pairs themselves).
        memory: bytes or a size such as ``"24GiB"``: on a GPU device memory, including allocator, libraries and CUDA
            context (executor/device_memory.py), on the CPU tensors only. Or a fraction (at most 1) of the tensor memory
            that the example's step needs without a plan.
        machine: preset name, YAML file or Machine; default: the GPU's preset, on the CPU gtx1080ti.
        planner: name in ``agents.PLANNERS``, or a function that returns a plan; not called if the step fits as is.
        profile: "measure" times kernels on the model's device (default on a GPU), in a step without a plan if the
            device has the memory, else one by one; a Profile holds times for this shape only. None on the CPU: roofline
            durations of the machine.
        seconds: approximate planning time per shape; default: the planner's.
        keep: maximum number of steps that are kept, one per shape and number of the batch; the least recently used is
            discarded first.
        accumulate: maximum and default number of micro-batches per step; the optimizer steps after the last one.
        average: whether each micro-batch's loss is divided by their number; False if ``loss_fn`` normalizes it.
        clip_norm: maximum norm of the gradients, to which they are clipped before the update; None: not clipped.
        keep_grads: whether gradients stay in ``p.grad`` after the step until the next one begins.
        autocast: dtype of the ``torch.autocast`` context around the forward pass and the loss; None: no context.
        scaler: GradScaler that scales the loss and makes the update, or skips it.
        bucket_bytes: maximum bytes of parameters per kernel of a multi-tensor update, which is split into buckets so
            that it need not have all optimizer state in memory; None: one kernel. Results are bit-identical.
        optimizer_in_backward: whether each bucket of the update follows the last kernel that uses its weights or
            gradients, so that not all gradients live at once. Results are bit-identical, but a step that fails after
            its first update cannot be undone. "auto": if this makes the planned step faster; a planner that is no name
            plans the order of the model. Clipping by a norm, a GradScaler and ``keep_grads`` need all gradients first.
        link_margin: part of the link's speed that the plan uses, in (0, 1]: the step loses no time while copies reach
            it, whatever slows them (a CUDA graph, a distant NUMA node, another process). Predictions are for the whole
            link.
        tensor_lr: replaces the optimizer's learning rates by float32 tensors, so that a schedule changes them without
            another CUDA graph (a Python number is a constant of a graph). It needs ``fused`` or ``capturable``; results
            are bit-identical to those of the optimizer with tensors.
        check: compares the step with its capture on a few examples of the first batch, which must then hold valid
            values, and rejects a step that differs (executor/training/check.py).

    Returns:
        a callable that trains one step on a batch and returns what ``loss_fn`` returned; its ``report`` describes the
        plan.

    Raises:
        CaptureError: the step cannot be captured, or its update needs all gradients first and
            ``optimizer_in_backward`` is True.
        FitError: the GPU has no preset, no plan fits or was found, or the planner lacks a library.
        FormatError: memory or machine is malformed.
        ValueError: the planner is unknown, or an option is invalid.
        ProfileError, StepError: as in ``measure``, ``PlannedStep``.
    """
    if not (profile is None or profile == "measure" or isinstance(profile, Profile)):
        raise ValueError(f"profile: expected None, 'measure' or a Profile, got {profile!r}")
    if seconds is not None and not isinstance(planner, str):
        raise ValueError("seconds: requires a planner given by name")
    if loss_fn is not None and isinstance(example_batch, Tensor):
        raise ValueError("example_batch: expected a pair (x, y) or an object that has both, got Tensor")
    if memory == "":
        raise ValueError("memory: missing; pass a size such as '24GiB', or a fraction of the step's peak (0.6)")
    if not 0 < link_margin <= 1:
        raise ValueError(f"link_margin: expected a number in (0, 1], got {link_margin!r}")
    if tensor_lr and optimizer is None:
        raise ValueError("tensor_lr: requires an optimizer")
    check_limit(memory, "memory")
    if tensor_lr:
        rates_as_tensors(cast(Optimizer, optimizer))
    if isinstance(planner, str):  # fail before the capture
        import agents

        agents.make(planner, **({} if seconds is None else {"seconds": seconds}))
    steps = FittedSteps(
        model,
        loss_fn,
        optimizer,
        Machine.load(machine) if isinstance(machine, str) else machine,
        memory,
        planner,
        profile,
        seconds,
        keep,
        optimizer_in_backward,
        link_margin,
        accumulate=accumulate,
        average=average,
        clip_norm=clip_norm,
        keep_grads=keep_grads,
        autocast=autocast,
        scaler=scaler,
        bucket_bytes=bucket_bytes,
        check=check,
    )
    steps.step_for(*arguments(example_batch))
    return steps


def _measured(captured: Captured, device: torch.device, machine: str) -> Profile:
    """Returns times of kernels in a step without a plan, or of single kernels if the device cannot hold that step."""
    try:
        return measure(captured, device, machine, cache="step")
    except ProfileError as error:
        warnings.warn(f"kernels are timed one by one, not in a step: {error}", stacklevel=2)
        return measure(captured, device, machine, cache="cold")
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # the unplanned step's memory is no part of the planned one's


def machine_of(device: str) -> Machine:
    """Returns the preset whose name occurs in the GPU's, with the host memory that can be pinned.

    Args:
        device: name of the GPU, such as "NVIDIA H200".

    Raises:
        FitError: no preset matches.
    """
    words = re.findall("[a-z0-9]+", device.lower())
    runs = {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
    names = sorted(path.stem for path in PRESETS.glob("*.yaml"))
    for name in names:
        # An RTX 3060 Ti is not an RTX 3060, and an RTX 4090 D not an RTX 4090.
        has_other_suffix = any(word in words and not name.endswith(word) for word in ("ti", "super", "laptop", "d"))
        if all(part in runs for part in name.split("_")) and not has_other_suffix:
            machine = Machine.load(name)
            return replace(machine, host_bytes=min(machine.host_bytes, available()[0] * 3 // 4))
    raise FitError(
        f"no preset for {device!r} (known: {', '.join(names)}): pass machine=, the most similar one or a file written "
        "by `python -m executor.calibrate FILE.yaml`"
    )


def _first_served(attempt: Callable[[int], tuple[Plan, Timeline]], limit: int, card: DevicePeak) -> Plan | None:
    """Returns the first plan, from ``limit`` down, that PyTorch's allocator serves; the first one if it serves none."""
    first: Plan | None = None
    with suppress(FitError, OutOfMemory):
        for nbytes in lower_limits(limit):
            plan, timeline = attempt(nbytes)
            if under_plan(card, timeline)[1]:
                return plan
            first = first or plan
    if first is not None:
        warnings.warn(
            "kernel by kernel PyTorch's allocator may need more than the memory for every plan that was found, because "
            "of holes between tensors: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, or plan for less",
            stacklevel=3,
        )
    return first


def _plan(
    captured: Captured,
    machine: Machine,
    limit: int,
    planner: str | Callable[[Program, Machine, int], Plan],
    seconds: float | None,
) -> tuple[Plan, int | None]:
    """Returns the plan and the floor if the planner has one; an empty plan if the step fits as is."""
    import agents
    from agents.planner import small
    from simulator.modes import least_residency

    program = captured.program
    if program.peak_bytes <= limit:
        return Plan.of(program, (), "", limit, machine.name), None
    min_bytes = small(program) if isinstance(planner, str) and "min_bytes" in agents.options(planner) else 0
    least = least_residency(program, min_bytes)
    if least > limit:
        raise FitError(_too_small(captured, limit, least))
    return _invoke(program, machine, limit, planner, least, min_bytes=min_bytes, seconds=seconds)


def planned_in_mode(
    program: Program,
    machine: Machine,
    limit: int,
    planner: str | Callable[[Program, Machine, int], Plan],
    seconds: float | None,
    mode: str = "recompute",
) -> tuple[Plan, int | None]:
    """Returns a plan of a mode, and a certified lower bound of its time if the planner has one (executor/compiled).

    Args:
        program: program to plan.
        machine: machine to plan for.
        limit: memory limit in bytes.
        planner: name of a planner, or a function.
        seconds: time for a named planner; None: its default.
        mode: mode of the plan.

    Raises:
        FitError: no plan exists or was found, or the planner lacks a library.
        PlanError: the plan has decisions outside the mode.
    """
    from agents.planner import small
    from simulator.modes import KINDS_OF, least_residency

    min_bytes = small(program)
    least = least_residency(program, min_bytes, mode)
    if least > limit:
        scope = "without swaps " if mode == "recompute" else ""
        raise FitError(f"every plan {scope}needs at least {least:,} bytes ({size(least)}): raise memory=")
    plan, floor_ns = _invoke(program, machine, limit, planner, least, min_bytes=min_bytes, mode=mode, seconds=seconds)
    plan.only("torch.compile", *KINDS_OF[mode])
    return plan, floor_ns


def _invoke(
    program: Program,
    machine: Machine,
    limit: int,
    planner: str | Callable[[Program, Machine, int], Plan],
    least: int,
    **options: Any,
) -> tuple[Plan, int | None]:
    """Calls the planner with the options it supports; every plan needs at least ``least`` bytes."""
    import agents

    registered = None
    if isinstance(planner, str):
        accepted = agents.options(planner)
        registered = agents.make(planner, **{k: v for k, v in options.items() if k in accepted and v is not None})
    try:
        with preserve_random_states(), default_modes():  # planning must not change what the training draws
            plan = (registered.plan if registered is not None else planner)(program, machine, limit)
    except agents.Infeasible as error:
        raise FitError(
            f"no plan was found, although plans may exist from {least:,} bytes: {error}; raise memory=, or choose "
            "another planner"
        ) from error
    except ImportError as error:
        if registered is None:
            raise
        advice = "install it, or choose another planner (planner='capuchin' has no dependencies)"
        raise FitError(f"planner {planner!r} needs {error.name}, which is not installed: {advice}") from error
    floor = getattr(registered, "floor", None)
    return plan, floor.iteration_ns if floor is not None else None


def _too_small(captured: Captured, limit: int, least: int) -> str:
    program = captured.program
    persistent: dict[str, int] = {}
    for t in program.tensors:
        if t.persistent:
            persistent[t.kind] = persistent.get(t.kind, 0) + t.nbytes
    parts = ", ".join(f"{KINDS[kind]} {size(nbytes)}" for kind, nbytes in persistent.items())
    kernel_bytes = [sum(program.tensors[t].nbytes for t in k.accesses) + k.workspace for k in program.kernels]
    k = max(range(len(kernel_bytes)), key=kernel_bytes.__getitem__)
    name = program.kernels[k].name
    module = captured.places[k].module or "the model itself"
    usage = f"are held at once in {module}" if name == "marker" else f"{name} of {module} uses at once"
    persistent_bytes = sum(persistent.values())
    shapes = (str(list(leaf.meta["tensor_meta"].shape)) for leaf in captured.leaves if isinstance(leaf, fx.Node))
    batch_shapes = ", ".join(dict.fromkeys(shapes))
    return (
        f"{program.name} does not fit into {size(limit)} with a batch of {batch_shapes}: the smallest feasible memory "
        f"is {least:,} bytes ({size(least)}), {size(kernel_bytes[k])} of which {usage}; {size(persistent_bytes)} are "
        f"persistent ({parts}), and the step needs {size(program.peak_bytes)} without a plan"
    )
