"""Training under plans with batches of several shapes: a step for each, captured and planned when it is first seen.

    step = PlannedSteps(model, loss_fn, optimizer, machine, "24GiB", agents.make("lp_round").plan)
    for x, y in loader:                     # a short last batch, sequences of several lengths
        loss = step(x, y)

Batches are as in ``capture``: ``step(x, y)`` or ``step((x, y))``, ``step(batch)`` of a mapping or one object.
With ``accumulate=k`` it takes micro-batches: k calls of one, or one call with up to k, of any shapes. Shapes
that differ, or fewer than k (the last of an epoch), one by one: ``step.begin(*batches)`` says so beforehand.

Between steps there is one state, the user's own tensors. The limit holds within the steps of every shape. A step of
another shape than the last begins with all persistent tensors on the device (``PlannedStep.finish``), so batches of one
shape are best in a row. Only the steps of the last ``keep`` shapes are kept; pinned memory has the one used last.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import TreeSpec

from executor.capture.batches import Loss, arguments, flatten, structure, tensors_in
from executor.capture.capture import capture, capture_step
from executor.capture.captured import Captured
from executor.capture.python_values import is_scalar
from executor.capture.reach import check_dense
from executor.training import check as _check  # noqa: F401  (captures are checked)
from executor.training.bindings import StepError
from executor.training.planned_step import PlannedStep
from simulator.limits import limit_bytes
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

Form = Hashable  # of a (micro-)batch
_IN_STEP = {"loss_fn": None, "optimizer": None, "accumulate": 1, "average": True, "clip_norm": None, "autocast": None,
            "scaler": None}  # what a step of one's own does itself  # fmt: skip


class PlannedSteps:
    """Training steps under plans; calling it trains.

    Args:
        model: or a step of any form, as ``capture_step`` takes it; ``loss_fn`` and ``optimizer`` are then None, and it
            is called as that is.
        limit: bytes, a size such as ``"24GiB"``, or a fraction of the first shape's peak.
        planner: (program, machine, limit in bytes) -> its plan, as ``agents.make(name).plan``; what it raises where
            there is none is passed on, before anything has happened.
        keep: the most shapes whose steps are kept.
        undo: as in PlannedStep.
        accumulate: the most micro-batches of a step, and how many it has where nothing else is said.
        options: as in ``capture`` (``capture_step``).

    Attributes:
        steps: by the forms of a step's (micro-)batches, the one used last at the end.
        limit: bytes; None before the first step.

    Raises:
        ValueError: keep or accumulate is less than 1, or there is an option that a step of one's own does itself.
    """

    def __init__(
        self, model: nn.Module | Callable[..., Any], loss_fn: Loss | None, optimizer: Optimizer | None,
        machine: Machine, limit: int | float | str, planner: Callable[[Program, Machine, int], Plan], keep: int = 16,
        undo: bool = False, accumulate: int = 1, **options: Any,
    ) -> None:  # fmt: skip
        for name, value in (("keep", keep), ("accumulate", accumulate)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        self.parts, self.machine, self.planner, self.keep, self.undo = (
            (model, loss_fn, optimizer), machine, planner, keep, undo
        )  # fmt: skip
        self.accumulate, self.options = accumulate, options
        self._wanted = limit
        self.limit: int | None = None
        self.steps: dict[tuple[Form, ...], PlannedStep] = {}
        # Steps of one form whose batches differ in the numbers that the step's Python reads, by these.
        self._variants: dict[tuple[Form, ...], dict[tuple[Any, ...], PlannedStep]] = {}
        self._current: PlannedStep | None = None
        self._own = not isinstance(model, nn.Module)  # a step of one's own
        if self._own:
            asked = {"loss_fn": loss_fn, "optimizer": optimizer, "accumulate": accumulate, **options}
            for name, plain in _IN_STEP.items():
                if asked.get(name, plain) != plain:
                    raise ValueError(f"{name}: a step of your own does that itself")
            self.options = {name: value for name, value in self.options.items() if name not in _IN_STEP}
        self._open = self._told = False  # ``begin`` told which micro-batches the present step has
        self._structures: set[TreeSpec] = set()  # of (micro-)batches

    def __call__(self, *batch: Any) -> Any:
        """One training step, or its next micro-batch.

        Args:
            batch: x, y, or one object; or, with ``accumulate``, all batches of a step, up to ``accumulate`` of any
                shapes. (Two pairs could be an x and a y that are pairs: they are if such ones have been seen.)

        Returns:
            As PlannedStep. Losses of micro-batches are divided by how many the step has, if not ``average=False``.

        Raises:
            CaptureError: a step of this shape cannot be captured.
            StepError: as in PlannedStep; a micro-batch is of another shape than the step began with (it may go on).
        """
        if pairs := self._pairs(batch):
            return self._go_to(pairs)(*(pairs if len(pairs) > 1 else pairs[0]))
        form = _form(batch)
        if not (self._told or self.under_way):
            self._go_to((batch,) * self.accumulate)
        step, told = self._current, self._told
        assert step is not None
        done, forms = step.done, next(reversed(self.steps))
        try:
            loss = step(*batch)
        except StepError as error:
            if form == forms[done]:
                raise
            raise StepError(
                f"micro-batch {done + 1} of {len(forms)} is not of the shape that the step began with: {error}; "
                "begin(*pairs) tells a step all of its shapes, finish() undoes it"
            ) from error
        self._told = told and step.done > 0
        return loss

    def begin(self, *pairs: Any) -> None:
        """The next step is of these micro-batches, which then come one by one.

        Args:
            pairs: 1 to ``accumulate`` batches; only their forms matter.

        Raises:
            CaptureError: such a step cannot be captured.
            StepError: a step is under way (it may go on), or the batches are none.
        """
        self._go_to(tuple(map(arguments, pairs)))
        self._told = True

    def step_for(self, *batch: Any) -> PlannedStep:
        """The step for batches of this form (one micro-batch: for as many as ``accumulate`` says), the present one
        from now on; raises as ``begin``."""
        return self._go_to(self._pairs(batch) or (batch,) * self.accumulate)

    @property
    def under_way(self) -> bool:
        """Some micro-batches of a step are done, and others are not."""
        return self._current is not None and self._current.done > 0

    def _pairs(self, batch: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """All (micro-)batches of a step, as arguments, if it is not one of several."""
        if self.accumulate == 1:
            return (batch if self._own or len(batch) != 1 else arguments(batch[0]),)
        if len(batch) == 1 and not isinstance(batch[0], (tuple, list)):
            return None
        if structure(batch) in self._structures:
            return None
        several = tuple(map(arguments, batch))
        return several if all(len(b) == 2 or structure(b) in self._structures for b in several) else None

    def _go_to(self, pairs: tuple[Any, ...]) -> PlannedStep:
        if self.under_way:
            assert self._current is not None
            raise StepError(
                f"{self._current.done} of the step's {len(next(reversed(self.steps)))} micro-batches are done; it "
                "takes the next one, alone, or finish() undoes it"
            )
        if not 0 < len(pairs) <= self.accumulate or not (self._own or all(pairs)):
            raise StepError(f"a step takes 1 to {self.accumulate} micro-batches, each a pair (x, y) or one object")
        self._told = False
        forms = tuple(map(_form, pairs))
        step = self.steps.get(forms)
        if step is not None and step.captured.reads:
            variants = self._variants.setdefault(forms, {})
            variants[tuple(read.value for read in step.captured.reads)] = step
            step = variants.get(step.captured.numbers_of(pairs if len(pairs) > 1 else pairs[0]))
        if step is None or step is not self._current:
            if self._current is not None and self._current.graph is not None:
                self._current.graph.close()  # its memory is the other shape's
            self._leave()
            self._current = None
            if step is None:
                step = self._make(pairs)
                self.limit = step.limit
                self._structures.update(map(structure, pairs))
                self.steps.pop(forms, None)
                while len(self.steps) >= self.keep:
                    oldest = next(iter(self.steps))
                    del self.steps[oldest]
                    self._variants.pop(oldest, None)
            else:
                del self.steps[forms]
            self.steps[forms] = self._current = step
            if self._open:
                step.__enter__()
        return step

    def _capture(self, pairs: tuple[Any, ...]) -> Captured:
        options = {**self.options, "check": self.options.get("check", True) and self.limit is None}
        if self._own:
            captured = capture_step(self.parts[0], *pairs[0], machine=self.machine, **options)
        else:
            several: dict[str, Any] = {"accumulate": len(pairs), "others": pairs[1:], **options}
            captured = capture(*self.parts, pairs[0], machine=self.machine, **several)
        if captured.python.undone:  # before it is planned
            raise StepError(captured.python.undone)
        return captured

    def _make(self, pairs: tuple[Any, ...]) -> PlannedStep:
        """The step of these micro-batches, with its limit."""
        captured = self._capture(pairs)
        limit = self.limit or limit_bytes(self._wanted, captured.program)
        plan = self.planner(captured.program, self.machine, limit)
        return PlannedStep(captured, plan, self.machine, limit, self.undo)

    def finish(self) -> None:
        """All of the user's tensors are on the device again, and no copy is under way. Steps may follow.

        A step of which only some micro-batches are done is undone.
        """
        self._told = False
        if self._current is not None:
            self._current.finish()

    def recapture(self) -> None:
        """Forgets all captures: what they took for constant (the model's parts, Python's values) may have changed. The
        next step is captured and planned anew, within the same bytes; raises StepError where one is under way."""
        if self.under_way:
            raise StepError("a step is under way: recapture() is for between steps")
        self._leave()
        self.steps.clear()
        self._variants.clear()
        self._current = None

    def _leave(self) -> None:
        if self._current is not None:
            self._current.__exit__()

    @property
    def grad_norm(self) -> Tensor | None:
        """As PlannedStep's, of the last step."""
        return None if self._current is None else self._current.grad_norm

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes in use at any kernel of any step of the shapes that are kept."""
        return max((step.peak_bytes for step in self.steps.values()), default=0)

    def __enter__(self) -> Self:
        """Until the end of the ``with``, copies run on over the boundary of steps of one shape."""
        self._open = True
        if self._current is not None:
            self._current.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._open = self._told = False
        self._leave()


def _form(batch: tuple[Any, ...]) -> Form:
    """Equal for batches that one capture is right for; raises StepError where something cannot be compared."""
    leaves, spec = flatten(batch)
    for i, value in enumerate(leaves):
        if isinstance(value, torch.Tensor):
            check_dense(value, f"tensor {i} of the batch")
    seen: dict[int, int] = {}  # a tensor that stands in two places is another form, and so are two in one memory
    form = spec, tuple(
        (tuple(v.shape), v.stride(), v.dtype, str(v.device), seen.setdefault(id(v), len(seen)),
         seen.setdefault(v.untyped_storage()._cdata, len(seen)))
        if isinstance(v, torch.Tensor) else _constant(v) for v in leaves
    )  # fmt: skip
    try:
        hash(form)
    except TypeError as error:
        raise StepError(f"the batch has something that is no tensor and cannot be compared: {error}") from error
    return form


def _constant(value: Any) -> Any:
    """What a form has of a leaf that is no tensor: itself; raises StepError where it has tensors that nobody finds."""
    if not is_scalar(value) and next(tensors_in(value), None) is not None:
        raise StepError(
            f"the batch has a {type(value).__name__}, whose tensors are not known: give a dict of them, or register it "
            "with torch.utils._pytree.register_pytree_node"
        )
    return value
