"""One call for all of it: a training step within so much memory.

    step = fit(model, loss_fn, optimizer, (x, y), memory="24GiB")
    print(step.report())
    for x, y in loader:
        loss = step(x, y)

The step may also be a function of your own, with any models and optimizers: ``fit(train_step, example_batch=(x, y),
memory="24GiB")``. ``fit`` captures the step, gives its kernels durations (measured on a GPU, a roofline's elsewhere),
plans, and returns the step to train with, which does the same for batches of other shapes when it first sees them. This
is the one file of the executor that knows planners; they are imported by the first call.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, fx, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from executor.capture.batches import Loss, arguments
from executor.capture.captured import Captured
from executor.capture.optimizers import BUCKET_BYTES
from executor.capture.profile import Profile, measure, with_profile
from executor.card import Loop, card_peak
from executor.memory.pinned import available
from executor.report import report
from executor.training.bindings import device_of
from executor.training.planned_step import PlannedStep
from executor.training.planned_steps import PlannedSteps
from simulator.files import FormatError
from simulator.limits import is_fraction, limit_bytes, size_bytes
from simulator.machine import PRESETS, Machine
from simulator.plan import Plan
from simulator.program import Program
from simulator.report import KINDS, Report, size

OTHERS = ("ti", "super", "laptop")  # an RTX 3060 Ti is no RTX 3060


class FitError(ValueError):
    """The step cannot be planned; the message is one sentence."""


class FittedStep(PlannedStep):
    """A planned step of one shape that can tell what its plan does; ``floor_ns`` as in ``report``."""

    def __init__(
        self, captured: Captured, plan: Plan, machine: Machine, limit: int, floor_ns: int | None = None
    ) -> None:
        super().__init__(captured, plan, machine, limit)
        self.machine, self.floor_ns = machine, floor_ns

    def report(self) -> Report:
        """Where the peak sits, what the plan moves, the time that is predicted; ``str`` of it is a page."""
        return report(self.captured, self.machine, self.limit, self.plan, self.floor_ns)


class FittedSteps(PlannedSteps):
    """What ``fit`` returns: planned steps of all shapes, within one limit.

    Attributes:
        present: the step of the shape used last. ``captured``, ``program``, ``plan``, ``floor_ns`` and ``report()`` are
            its own.
    """

    def __init__(
        self, model: nn.Module | Callable[..., Any], loss_fn: Loss | None, optimizer: Optimizer | None,
        machine: Machine | None, memory: int | float | str, planner: str | Callable[[Program, Machine, int], Plan],
        profile: Literal["measure"] | Profile | None, seconds: float | None, keep: int, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(model, loss_fn, optimizer, cast(Any, machine), memory, cast(Any, planner), keep, **options)
        self._profile, self._seconds, self._device = profile, seconds, torch.device("cpu")

    def _make(self, pairs: tuple[Any, ...]) -> FittedStep:
        captured = self._capture(pairs)
        if self.limit is None:
            self._at(device_of(captured))
        machine, profile = self.machine, self._profile
        if profile == "measure":
            profile = measure(captured, self._device, machine.name)
        if profile is None:
            captured = captured.on(machine)
        else:
            try:
                captured = replace(captured, program=with_profile(captured.program, profile))
            except FormatError as error:
                if self.limit is None:
                    raise
                raise FitError(f"{error}: a batch of another shape needs one of its own, or 'measure'") from error
        limit = self.limit or self._limit(captured)
        plan, floor_ns = _plan(captured, machine, limit, self.planner, self._seconds)
        return FittedStep(captured, plan, machine, limit, floor_ns)

    def _at(self, device: torch.device) -> None:
        """The machine and the profile where nothing else was said, by the device on which the first step runs."""
        self._device = device
        if device.type != "cpu":
            self.machine = self.machine or machine_of(torch.cuda.get_device_name(device))
            self._profile = self._profile or "measure"
        self.machine = self.machine or Machine.load("gtx1080ti")

    def _limit(self, captured: Captured) -> int:
        """Of the tensors; a memory in bytes of a GPU is the card's."""
        if self._device.type == "cpu" or is_fraction(self._wanted):
            return limit_bytes(self._wanted, captured.program, "memory")
        memory = size_bytes(self._wanted, "memory")
        # The loop has what the last step returned until this one returns, and gradients until it begins.
        outputs = captured.outputs[1 : sum(captured.returned.tensors)]
        returned = tuple({captured.values[node] for node in outputs if node in captured.values})
        holds = captured.holds._replace(outputs=returned, until=len(captured.program.kernels))
        loop = Loop("start" if captured.returned.gradients else None, keeps_outputs=bool(returned))
        return card_peak(replace(captured, holds=holds), self.machine, loop, memory).limit

    @property
    def present(self) -> FittedStep:
        """The step of the shape used last."""
        return cast(FittedStep, next(reversed(self.steps.values())))

    @property
    def captured(self) -> Captured:
        """As PlannedStep's."""
        return self.present.captured

    @property
    def program(self) -> Program:
        """As PlannedStep's."""
        return self.present.program

    @property
    def plan(self) -> Plan:
        """As PlannedStep's."""
        return self.present.plan

    @property
    def floor_ns(self) -> int | None:
        """As in ``report``."""
        return self.present.floor_ns

    def report(self) -> Report:
        """As FittedStep's."""
        return self.present.report()


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
    check: bool = True,
) -> FittedSteps:
    """The training step of ``loss_fn(model(x), y)`` within ``memory``; what it does is eager's to the bit.

    Of a batch that is a mapping the step is ``loss_fn(model(**batch), batch)``, of another object
    ``loss_fn(model(batch), batch)``; without a ``loss_fn`` the model returns its loss. What ``loss_fn`` returns
    besides, ``(loss, …)``, the step returns, too. Such tensors live to the end of the step, and count so long.

    Batches of another shape than ``example_batch`` are captured and planned when they are first seen, for the same
    bytes. The errors below are then the call's, the model is as it was, and other shapes may follow.

    Args:
        model: or a function that does all of a step (any models, optimizers and losses); ``loss_fn`` and ``optimizer``
            are then left out, and it is called with the parts of ``example_batch``.
        example_batch: ``(x, y)``, ``(inputs…, y)``, a mapping or another object; only shapes and types matter. With
            ``accumulate`` it may be the pairs of a step (and is taken as these where x and y are pairs themselves).
        memory: bytes or a size such as ``"24GiB"``: on a GPU of the card, with what PyTorch's allocator, libraries and
            the CUDA context take (executor/card.py), on the CPU of tensors. Or a fraction (at most 1) of what
            the tensors of the example's step need without a plan.
        machine: a preset's name, a YAML file, or a Machine; by default the preset of the GPU, on the CPU gtx1080ti.
        planner: a name (``agents.PLANNERS``), or what makes a plan. Not asked where the step fits without one.
        profile: "measure": kernels are timed on the model's device, the default on a GPU; a Profile: they were, for
            this shape (others are refused). Without one their durations are the machine's roofline's, the default on
            the CPU.
        seconds: of planning, about, for each shape; the planner's own by default.
        keep, accumulate: as in PlannedSteps.
        average, clip_norm, keep_grads, autocast, scaler, bucket_bytes: as in ``capture``.
        check: run the step and its capture on few examples of the first batch, which must hold valid values then, and
            refuse it where they differ (executor/training/check.py).

    Raises:
        CaptureError: the step cannot be captured.
        FitError: there is no preset for the GPU, no plan for this memory, or the planner found none or lacks a library.
        FormatError: memory or machine is none.
        ValueError: there is no such planner, or an option is wrong.
        ProfileError, StepError: as in ``measure``, ``PlannedStep``.
    """
    if not (profile is None or profile == "measure" or isinstance(profile, Profile)):
        raise ValueError(f"profile: expected None, 'measure' or a Profile, got {profile!r}")
    if seconds is not None and not isinstance(planner, str):
        raise ValueError("seconds: is for a planner given by its name")
    if loss_fn is not None and isinstance(example_batch, Tensor):
        raise ValueError("example_batch: expected a pair (x, y) or an object that has both, got Tensor")
    if memory == "":
        raise ValueError("memory: missing; a size such as '24GiB', or a part of what the step needs (0.6)")
    if isinstance(planner, str):  # what is wrong is said before the capture
        import agents

        agents.make(planner, **({} if seconds is None else {"seconds": seconds}))
    steps = FittedSteps(
        model, loss_fn, optimizer, Machine.load(machine) if isinstance(machine, str) else machine, memory, planner,
        profile, seconds, keep, accumulate=accumulate, average=average, clip_norm=clip_norm, keep_grads=keep_grads,
        autocast=autocast, scaler=scaler, bucket_bytes=bucket_bytes,
        check=check,
    )  # fmt: skip
    steps.step_for(*arguments(example_batch))
    return steps


def machine_of(device: str) -> Machine:
    """The preset whose name the GPU's own contains, with as much of the host's memory as may be pinned.

    Raises:
        FitError: there is none.
    """
    words = re.findall("[a-z0-9]+", device.lower())
    runs = {"".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
    names = sorted(path.stem for path in PRESETS.glob("*.yaml"))
    for name in names:
        others = [word for word in OTHERS if word in words and not name.endswith(word)]
        if all(part in runs for part in name.split("_")) and not others:
            machine = Machine.load(name)
            return replace(machine, host_bytes=min(machine.host_bytes, available()[0] * 3 // 4))
    raise FitError(
        f"no preset is of {device!r} (there are {', '.join(names)}): give machine=, the nearest of them or a file that "
        "`python -m executor.calibrate FILE.yaml` has measured"
    )


def _plan(
    captured: Captured, machine: Machine, limit: int, planner: str | Callable[[Program, Machine, int], Plan],
    seconds: float | None,
) -> tuple[Plan, int | None]:  # fmt: skip
    """The plan, and a floor where the planner has one; the empty plan where that fits."""
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
    return _asked(program, machine, limit, planner, least, min_bytes=min_bytes, seconds=seconds)


def planned_in_mode(
    program: Program, machine: Machine, limit: int, planner: str | Callable[[Program, Machine, int], Plan],
    seconds: float | None, mode: str = "recompute",
) -> tuple[Plan, int | None]:  # fmt: skip
    """A plan of a mode, and a floor under its time where the planner has one (executor/compiled).

    Raises:
        FitError: there is none, none was found, or a library that the planner needs is not here.
        PlanError: the planner does what the mode has not.
    """
    from agents.planner import small
    from simulator.modes import KINDS_OF, least_residency

    min_bytes = small(program)
    least = least_residency(program, min_bytes, mode)
    if least > limit:
        what = "that only runs kernels again " if mode == "recompute" else ""
        raise FitError(f"no plan {what}needs less than {least:,} bytes ({size(least)})")
    plan, floor_ns = _asked(program, machine, limit, planner, least, min_bytes=min_bytes, mode=mode, seconds=seconds)
    plan.only("torch.compile", *KINDS_OF[mode])
    return plan, floor_ns


def _asked(
    program: Program, machine: Machine, limit: int, planner: str | Callable[[Program, Machine, int], Plan],
    least: int, **options: Any,
) -> tuple[Plan, int | None]:  # fmt: skip
    """What a planner says, which is given those of the options that it has; no plan needs less than ``least`` bytes."""
    import agents

    made = None
    if isinstance(planner, str):
        known = agents.options(planner)
        made = agents.make(planner, **{k: v for k, v in options.items() if k in known and v is not None})
    try:
        plan = made.plan(program, machine, limit) if made is not None else planner(program, machine, limit)  # type: ignore[operator]
    except agents.Infeasible as error:
        raise FitError(f"no plan was found, though there may be some from {least:,} bytes on: {error}") from error
    except ImportError as error:
        if made is None:
            raise
        way = "install it, or choose another planner (planner='capuchin' needs nothing)"
        raise FitError(f"planner {planner!r} needs {error.name}, which is not here: {way}") from error
    floor = getattr(made, "floor", None)
    return plan, floor.iteration_ns if floor is not None else None


def _too_small(captured: Captured, limit: int, least: int) -> str:
    program = captured.program
    persistent: dict[str, int] = {}
    for t in program.tensors:
        if t.persistent:
            persistent[t.kind] = persistent.get(t.kind, 0) + t.nbytes
    parts = ", ".join(f"{KINDS[kind]} {size(nbytes)}" for kind, nbytes in persistent.items())
    at_once = [sum(program.tensors[t].nbytes for t in k.accesses) + k.workspace for k in program.kernels]
    k = max(range(len(at_once)), key=at_once.__getitem__)
    name, module = program.kernels[k].name, captured.places[k].module or "the model itself"
    what = f"are held at once in {module}" if name == "marker" else f"{name} of {module} uses at once"
    kept = sum(persistent.values())
    shapes = (str(list(leaf.meta["tensor_meta"].shape)) for leaf in captured.leaves if isinstance(leaf, fx.Node))
    of = ", ".join(dict.fromkeys(shapes))
    return (
        f"{program.name} does not fit into {size(limit)} with a batch of {of}: the smallest memory that has a plan "
        f"is {least:,} bytes ({size(least)}), {size(at_once[k])} of which {what}; {size(kept)} are there from step "
        f"to step ({parts}), and the step needs {size(program.peak_bytes)} without a plan"
    )
