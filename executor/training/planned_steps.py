"""Trains under plans with batches of several shapes; each new shape is captured and planned when it first occurs.

    step = PlannedSteps(model, loss_fn, optimizer, machine, "24GiB", agents.make("lp_round").plan)
    for x, y in loader:                     # a short last batch, sequences of several lengths
        loss = step(x, y)

Batches are passed as in ``capture``: ``step(x, y)``, ``step((x, y))``, or ``step(batch)`` for a mapping or one object.
With ``accumulate=k``, pass micro-batches of any shapes in one call of up to k, or one in each of k calls; announce
differing shapes or fewer than k calls with ``step.begin(*batches)``. Group batches of one shape: a change of shape
first returns all persistent tensors to the device (``PlannedStep.finish``).
"""

# Between steps, the user's own tensors are the only state. The limit holds within the steps of every shape. Only the
# step used last holds pinned memory.

from __future__ import annotations

import inspect
import operator
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec

from executor.capture.ambient import Modes, ambient_modes, default_modes
from executor.capture.batches import Loss, arguments, constant_key, flatten, path_of, structure, tensors_in
from executor.capture.capture import StepOptions, capture, capture_step
from executor.capture.captured import Captured
from executor.capture.python_values import is_scalar
from executor.capture.reach import check_constant, check_dense
from executor.training.bindings import Binding, StepError
from executor.training.check import after_first_step
from executor.training.planned_step import PlannedStep
from simulator.limits import limit_bytes
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

MANY_CAPTURES = 3  # captures in a row because of a number, of which the user is warned
NUMBERS = (int, float, complex)


class Form(NamedTuple):
    """Key of a (micro-)batch; equal for batches with the same capture.

    Attributes:
        modes: Ambient modes.
        leaves: Shape, strides, … of each tensor, and type and value of each constant.
    """

    modes: Modes
    spec: TreeSpec
    leaves: tuple[Any, ...]


class StepKey(NamedTuple):
    """Forms of a step's (micro-)batches, and the numbers that the step's Python code reads from their tensors."""

    forms: tuple[Form, ...]
    numbers: tuple[Any, ...]


class PlannedSteps:
    """Training steps under plans for batches of several shapes; call it to train.

    Args:
        model: the model, or a custom step function as for ``capture_step``; ``loss_fn`` and ``optimizer`` are then
            None, and calls take the arguments of the function.
        loss_fn: loss function as in ``capture``.
        optimizer: the optimizer.
        machine: machine that plans are made for.
        limit: memory limit: bytes, a size such as ``"24GiB"``, or a fraction of the first shape's peak.
        planner: (program, machine, limit in bytes) -> plan, such as ``agents.make(name).plan``; its errors propagate
            before the step has any effect.
        keep: maximum number of steps that are kept, one per shape and number of the batch; the least recently used is
            discarded first.
        undo: as in PlannedStep.
        accumulate: maximum and default number of micro-batches per step.
        options: further options of ``capture`` or ``capture_step``.

    Attributes:
        steps: steps by the forms and numbers of their (micro-)batches, the most recently used one last.
        limit: memory limit in bytes; None before the first step.

    Raises:
        ValueError: keep or accumulate is less than 1, or an option applies only to steps that are not custom.
    """

    def __init__(
        self,
        model: nn.Module | Callable[..., Any],
        loss_fn: Loss | None,
        optimizer: Optimizer | None,
        machine: Machine,
        limit: int | float | str,
        planner: Callable[[Program, Machine, int], Plan],
        keep: int = 16,
        undo: bool = False,
        accumulate: int = 1,
        **options: Any,
    ) -> None:
        for name, value in (("keep", keep), ("accumulate", accumulate)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        self.parts = (model, loss_fn, optimizer)
        self.machine = machine
        self.planner = planner
        self.keep = keep
        self.undo = undo
        self.accumulate = accumulate
        self.options = options
        self._requested_limit = limit
        self.limit: int | None = None
        self.steps: dict[StepKey, PlannedStep] = {}
        self._number_captures: int | None = 0  # captures in a row that only a number has caused; None: the user knows
        self._current: PlannedStep | None = None
        self._kept_gradients: list[Binding] = []  # of the step before the current one
        self._is_custom = not isinstance(model, nn.Module)
        if self._is_custom:
            requested = {"loss_fn": loss_fn, "optimizer": optimizer, "accumulate": accumulate, **options}
            own = {"loss_fn": None, "optimizer": None, **asdict(StepOptions())}  # what a custom step does itself
            for name, default in own.items():
                if requested.get(name, default) != default:
                    raise ValueError(f"{name}: a custom step must do this itself; remove the option")
            self.options = {name: value for name, value in options.items() if name not in own}
        self._open = False
        self._is_announced = False  # whether ``begin`` has announced the step's micro-batches
        self._has_run = False  # whether a step has run since the last selection
        self._modes: set[Modes] = set()  # ambient modes whose first form was captured, and checked
        self._structures: set[TreeSpec] = set()  # structures of (micro-)batches seen so far

    def __call__(self, *batch: Any) -> Any:
        """Runs one training step, or its next micro-batch.

        Args:
            batch: x, y, or one object; or, with ``accumulate``, all micro-batches of a step, up to ``accumulate`` of
                any shapes. Two pairs count as an x and a y only if a batch of that structure has been seen.

        Returns:
            As PlannedStep. Losses of micro-batches are divided by their number unless ``average=False``.

        Raises:
            CaptureError: a step of this shape cannot be captured.
            StepError: as in PlannedStep, or a micro-batch has another shape than announced (the step can continue).
        """
        if pairs := self._pairs(batch):
            result = self._select_step(pairs)(*(pairs if len(pairs) > 1 else pairs[0]))
            self._has_run = True
            return result
        form = _form(batch)
        if not (self._is_announced or self.in_progress):
            self._select_step((batch,) * self.accumulate)
        step = self._current
        was_announced = self._is_announced
        assert step is not None
        done = step.done
        forms = next(reversed(self.steps)).forms
        try:
            loss = step(*batch)
        except StepError as error:
            if form == forms[done]:
                raise
            raise StepError(
                f"micro-batch {done + 1} of {len(forms)} has another form than the step's first call: {error}; "
                "announce all forms with begin(*pairs), or undo the step with finish()"
            ) from error
        self._has_run = True
        self._is_announced = was_announced and step.done > 0
        return loss

    def begin(self, *pairs: Any) -> None:
        """Announces the shapes of the next step's micro-batches, which are then passed one by one.

        Args:
            pairs: 1 to ``accumulate`` batches; only their structure and shapes matter.

        Raises:
            CaptureError: such a step cannot be captured.
            StepError: another step is in progress (it can continue), or the batches are invalid.
        """
        self._select_step(tuple(map(arguments, pairs)))
        self._is_announced = True

    def step_for(self, *batch: Any) -> PlannedStep:
        """Returns the step for batches of this form and makes it the current one; raises as in ``begin``.

        A single micro-batch stands for a step of ``accumulate`` such batches.
        """
        return self._select_step(self._pairs(batch) or (batch,) * self.accumulate)

    @property
    def in_progress(self) -> bool:
        """Whether a step has finished some, but not all, of its micro-batches."""
        return self._current is not None and self._current.done > 0

    def _pairs(self, batch: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Returns all (micro-)batches of a step as arguments, or None if ``batch`` is one of several."""
        if self.accumulate == 1:
            return (batch if self._is_custom or len(batch) != 1 else arguments(batch[0]),)
        if len(batch) == 1 and not isinstance(batch[0], (tuple, list)):
            return None
        if structure(batch) in self._structures:
            return None
        batches = tuple(map(arguments, batch))
        return batches if all(len(b) == 2 or structure(b) in self._structures for b in batches) else None

    def _select_step(self, pairs: tuple[Any, ...]) -> PlannedStep:
        if self.in_progress:
            assert self._current is not None
            count = len(next(reversed(self.steps)).forms)
            raise StepError(
                f"{self._current.done} of the step's {count} micro-batches are done; pass the next one alone, or undo "
                "the step with finish()"
            )
        if not 0 < len(pairs) <= self.accumulate or not (self._is_custom or all(pairs)):
            raise StepError(f"a step takes 1 to {self.accumulate} micro-batches, each a pair (x, y) or one object")
        self._is_announced = False
        if self._has_run:
            self._has_run = False
            self.steps = {key: step for key, step in self.steps.items() if not step.captured.is_first}
        forms = tuple(map(_form, pairs))
        key, step = self._find(forms, pairs)
        if step is None or step is not self._current:
            if self._current is not None and self._current.graph is not None:
                self._current.graph.close()  # frees its memory for the other shape
            self._exit_current()
            self._current = None
            if step is None:
                captured = self._capture(pairs)
                if captured.is_first:
                    after_first_step(captured, lambda: self._look_ahead(pairs))
                step = self._make(captured)
                self.limit = step.limit
                self._structures.update(map(structure, pairs))
                key = key._replace(numbers=tuple(constant_key(read.value) for read in step.captured.reads))
                self._count_capture(key, step.captured)
                while len(self.steps) >= self.keep:
                    del self.steps[next(iter(self.steps))]
            else:
                del self.steps[key]
            step.kept_gradients = self._kept_gradients
            self.steps[key] = self._current = step
            if self._open:
                step.__enter__()
        return step

    def _find(self, forms: tuple[Form, ...], pairs: tuple[Any, ...]) -> tuple[StepKey, PlannedStep | None]:
        """Returns the step that these micro-batches can use, with its key, or a key without numbers and None."""
        args = pairs if len(pairs) > 1 else pairs[0]
        for key, step in reversed(self.steps.items()):
            if key.forms == forms and (not key.numbers or step.captured.numbers_of(args) == key.numbers):
                return key, step
        return StepKey(forms, ()), None

    def _count_capture(self, key: StepKey, captured: Captured) -> None:
        """Warns once, if only a number of the batch has caused the third capture in a row."""
        if self._number_captures is None:
            return
        changes = (self._changed_number(old, key, captured) for old in reversed(self.steps))
        number = next(filter(None, changes), "")
        self._number_captures = self._number_captures + 1 if number else 0
        if self._number_captures == MANY_CAPTURES:
            self._number_captures = None
            warnings.warn(
                f"{number} has caused {MANY_CAPTURES} captures in a row: each of its values is captured and planned "
                f"again, and at most {self.keep} are kept; make it a tensor that the step does not read as a number",
                stacklevel=4,
            )

    def _changed_number(self, old: StepKey, new: StepKey, captured: Captured) -> str:
        """Returns the name of a number of the batch if two steps differ only in numbers, else ""."""
        if old.forms == new.forms:
            reads = (
                read
                for read, number in zip(captured.reads, old.numbers, strict=False)
                if constant_key(read.value) != number
            )
            return next((f"a number of the batch ({read.where})" for read in reads), "")
        kinds = ([form._replace(leaves=()) for form in key.forms] for key in (old, new))
        if operator.ne(*kinds):
            return ""
        name = ""
        for before, now in zip(old.forms, new.forms, strict=True):
            for i, (a, b) in enumerate(zip(before.leaves, now.leaves, strict=True)):
                if a == b:
                    continue
                if a[0] not in NUMBERS or b[0] not in NUMBERS:
                    return ""
                name = name or f"the number {b[1]} in the batch (argument {self._argument(now.spec, i)})"
        return name

    def _argument(self, spec: TreeSpec, leaf: int) -> str:
        """Returns the name of a step's argument, and the path of the leaf in it."""
        first, *rest = path_of(spec, leaf)
        names: list[str] = []
        with suppress(TypeError, ValueError):  # built-in functions have no signature
            parameters = inspect.signature(self.parts[0]).parameters.values() if self._is_custom else ()
            names = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]
        name = names[first] if first < len(names) else str(first)
        return name + "".join(f"[{part!r}]" for part in rest)

    def _capture(self, pairs: tuple[Any, ...]) -> Captured:
        modes = ambient_modes()
        options = {**self.options, "first_step": True}
        options["check"] = self.options.get("check", True) and modes not in self._modes
        if self._is_custom:
            captured = capture_step(self.parts[0], *pairs[0], machine=self.machine, **options)
        else:
            settings: dict[str, Any] = {"accumulate": len(pairs), "others": pairs[1:], **options}
            captured = capture(*self.parts, pairs[0], machine=self.machine, **settings)
        if captured.python.unrepeatable:  # raised before planning
            raise StepError(captured.python.unrepeatable)
        self._modes.add(modes)
        return captured

    def _look_ahead(self, pairs: tuple[Any, ...]) -> None:
        """Captures and plans the step that follows the first one, to which a limit applies that is a fraction."""
        captured = self._capture(pairs)
        if captured.is_first:
            raise StepError("each step differs from the one before it, so that no capture repeats: use no plan")
        self.limit = self._make(captured).limit

    def _make(self, captured: Captured) -> PlannedStep:
        """Plans a captured step."""
        limit = self.limit or limit_bytes(self._requested_limit, captured.program)
        with default_modes():
            plan = self.planner(captured.program, self.machine, limit)
        return PlannedStep(captured, plan, self.machine, limit, self.undo)

    def finish(self) -> None:
        """Returns all of the user's tensors to the device and waits for copies; more steps may follow.

        A step with unfinished micro-batches is undone.
        """
        self._is_announced = False
        if self._current is not None:
            self._current.finish()

    def recapture(self) -> None:
        """Discards all captures; call it after changing the model's modules or Python values.

        The next step is captured and planned again, with the same limit in bytes.

        Raises:
            StepError: a step is in progress.
        """
        if self.in_progress:
            raise StepError("a step is in progress: call recapture() between steps")
        self._exit_current()
        self.steps.clear()
        self._current = None

    def _exit_current(self) -> None:
        if self._current is not None:
            self._kept_gradients = self._current.kept_gradients
            self._current.__exit__()

    @property
    def grad_norm(self) -> Tensor | None:
        """``PlannedStep.grad_norm`` of the last step."""
        return None if self._current is None else self._current.grad_norm

    @property
    def peak_bytes(self) -> int:
        """Peak bytes in use at any kernel, over the steps of all kept shapes."""
        return max((step.peak_bytes for step in self.steps.values()), default=0)

    def __enter__(self) -> Self:
        """Lets copies continue across the boundaries of steps of one shape until the end of the ``with`` block."""
        self._open = True
        if self._current is not None:
            self._current.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._open = self._is_announced = False
        self._exit_current()


def _form(batch: tuple[Any, ...]) -> Form:
    """Returns the form of a batch; raises StepError for leaves that are no tensors and not hashable."""
    leaves, spec = flatten(batch)
    for i, value in enumerate(leaves):
        if isinstance(value, torch.Tensor):
            check_dense(value, f"tensor {i} of the batch")
        else:
            check_constant(value, i)
    seen: dict[int, int] = {}  # repeated tensors and shared storages are part of the form
    form = Form(
        ambient_modes(),
        spec,
        tuple(
            (
                tuple(v.shape),
                v.stride(),
                v.dtype,
                v.requires_grad,
                v.is_inference(),
                str(v.device),
                seen.setdefault(id(v), len(seen)),
                seen.setdefault(v.untyped_storage()._cdata, len(seen)),
            )
            if isinstance(v, torch.Tensor)
            else _constant(v)
            for v in leaves
        ),
    )
    try:
        hash(form)
    except TypeError as error:
        raise StepError(
            f"the batch has a non-tensor value that is not hashable: {error}; make it a tensor, a number or a string"
        ) from error
    return form


def _constant(value: Any) -> tuple[type, Any]:
    """Returns a non-tensor leaf as part of a form; raises StepError if it contains tensors unknown to pytree."""
    if not is_scalar(value) and next(tensors_in(value), None) is not None:
        raise StepError(
            f"the batch has a {type(value).__name__}, whose tensors cannot be found: pass a dict of them, or register "
            "the type with torch.utils._pytree.register_pytree_node"
        )
    return constant_key(value)
