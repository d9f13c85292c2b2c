"""Training under plans with batches of several shapes: a step for each, captured and planned when it is first seen.

    step = PlannedSteps(model, loss_fn, optimizer, machine, "24GiB", agents.make("lp_round").plan)
    for x, y in loader:                     # a short last batch, sequences of several lengths
        loss = step(x, y)

With ``accumulate=k`` it takes micro-batches: k calls of one pair, or one call with up to k pairs, of any shapes. Shapes
that differ, or fewer than k (the last of an epoch), one by one: ``step.begin(*pairs)`` says so beforehand.

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
from torch.utils._pytree import TreeSpec, tree_flatten, tree_structure

from executor.capture.capture import capture
from executor.capture.captured import Captured
from executor.training.bindings import StepError
from executor.training.planned_step import PlannedStep
from simulator.limits import limit_bytes
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

BUCKET_BYTES = 64 * 2**20
Form = Hashable  # of a (micro-)batch


class PlannedSteps:
    """Training steps under plans; calling it trains.

    Args:
        limit: bytes, a size such as ``"24GiB"``, or a fraction of the first shape's peak.
        planner: (program, machine, limit in bytes) -> its plan, as ``agents.make(name).plan``; what it raises where
            there is none is passed on, before anything has happened.
        keep: the most shapes whose steps are kept.
        undo: as in PlannedStep.
        accumulate: the most micro-batches of a step, and how many it has where nothing else is said.
        options: as in ``capture``; updates of many parameters are split into buckets of 64 MiB by default.

    Attributes:
        steps: by the forms of a step's (micro-)batches, the one used last at the end.
        limit: bytes; None before the first step.

    Raises:
        ValueError: keep or accumulate is less than 1.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], optimizer: Optimizer, machine: Machine,
        limit: int | float | str, planner: Callable[[Program, Machine, int], Plan], keep: int = 16, undo: bool = False,
        accumulate: int = 1, **options: Any,
    ) -> None:  # fmt: skip
        for name, value in (("keep", keep), ("accumulate", accumulate)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        self.parts, self.machine, self.planner, self.keep, self.undo = (
            (model, loss_fn, optimizer), machine, planner, keep, undo
        )  # fmt: skip
        self.accumulate, self.options = accumulate, {"bucket_bytes": BUCKET_BYTES, **options}
        self._wanted = limit
        self.limit: int | None = None
        self.steps: dict[tuple[Form, ...], PlannedStep] = {}
        self._current: PlannedStep | None = None
        self._open = self._told = False  # ``begin`` told which micro-batches the present step has
        self._structures: set[TreeSpec] = set()  # of pairs (x, y)

    def __call__(self, *batch: Any) -> Any:
        """One training step, or its next micro-batch.

        Args:
            batch: x, y; or, with ``accumulate``, all pairs (x, y) of a step, up to ``accumulate`` of any shapes. (Two
                pairs could be an x and a y that are pairs: they are if such ones have been seen.)

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

    def begin(self, *pairs: tuple[Any, Any]) -> None:
        """The next step is of these micro-batches, which then come one by one.

        Args:
            pairs: 1 to ``accumulate`` pairs (x, y); only their forms matter.

        Raises:
            CaptureError: such a step cannot be captured.
            StepError: a step is under way (it may go on), or the pairs are none.
        """
        self._go_to(pairs)
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
        """All (micro-)batches of a step, if it is not one of several."""
        if self.accumulate == 1:
            return (batch,)
        if tree_structure(batch) in self._structures or not all(map(_is_pair, batch)):
            return None
        return tuple(map(tuple, batch))

    def _go_to(self, pairs: tuple[Any, ...]) -> PlannedStep:
        if self.under_way:
            assert self._current is not None
            raise StepError(
                f"{self._current.done} of the step's {len(next(reversed(self.steps)))} micro-batches are done; it "
                "takes the next one, alone, or finish() undoes it"
            )
        if not 0 < len(pairs) <= self.accumulate or (self.accumulate > 1 and not all(map(_is_pair, pairs))):
            raise StepError(f"a step takes 1 to {self.accumulate} micro-batches, each a pair (x, y)")
        pairs, self._told = tuple(map(tuple, pairs)), False
        forms = tuple(map(_form, pairs))
        step = self.steps.get(forms)
        if step is None or step is not self._current:
            self._leave()
            self._current = None
            if step is None:
                step = self._make(pairs)
                self.limit = step.limit
                self._structures.update(map(tree_structure, pairs))
                while len(self.steps) >= self.keep:
                    del self.steps[next(iter(self.steps))]
            else:
                del self.steps[forms]
            self.steps[forms] = self._current = step
            if self._open:
                step.__enter__()
        return step

    def _capture(self, pairs: tuple[Any, ...]) -> Captured:
        several = {"accumulate": len(pairs), "others": pairs[1:]}
        return capture(*self.parts, pairs[0], machine=self.machine, **several, **self.options)  # type: ignore[arg-type]

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
        self._current = None

    def _leave(self) -> None:
        if self._current is not None:
            self._current.__exit__()

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


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2


def _form(batch: tuple[Any, ...]) -> Form:
    """Equal for batches that one capture is right for; raises StepError where something cannot be compared."""
    leaves, spec = tree_flatten(batch)
    seen: dict[int, int] = {}  # a tensor that stands in two places is another form
    form = spec, tuple(
        (tuple(v.shape), v.stride(), v.dtype, str(v.device), seen.setdefault(id(v), len(seen)))
        if isinstance(v, torch.Tensor) else v for v in leaves
    )  # fmt: skip
    try:
        hash(form)
    except TypeError as error:
        raise StepError(f"the batch has something that is no tensor and cannot be compared: {error}") from error
    return form
