"""Training under plans with batches of several shapes: a step for each, captured and planned when it is first seen.

    step = PlannedSteps(model, loss_fn, optimizer, machine, "24GiB", agents.make("lp_round").plan)
    for x, y in loader:                     # a short last batch, sequences of several lengths
        loss = step(x, y)

Between steps there is one state, the user's own tensors. The limit holds within the steps of every shape. A step of
another shape than the last begins with all persistent tensors on the device (``PlannedStep.finish``), so batches of one
shape are best in a row. Only the steps of the last ``keep`` shapes are kept: each has pinned memory of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten

from executor.capture.capture import capture
from executor.training.bindings import StepError
from executor.training.planned_step import PlannedStep
from simulator.limits import limit_bytes
from simulator.machine import Machine
from simulator.plan import Plan
from simulator.program import Program

BUCKET_BYTES = 64 * 2**20


class PlannedSteps:
    """Training steps under plans; calling it trains.

    Args:
        limit: bytes, a size such as ``"24GiB"``, or a fraction of the first shape's peak.
        planner: (program, machine, limit in bytes) -> its plan, as ``agents.make(name).plan``; what it raises where
            there is none is passed on, before anything has happened.
        keep: the most shapes whose steps are kept.
        undo: as in PlannedStep.
        options: as in ``capture``; updates of many parameters are split into buckets of 64 MiB by default.

    Attributes:
        steps: by form of the batch, the one used last at the end.
        limit: bytes; None before the first step.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], optimizer: Optimizer, machine: Machine,
        limit: int | float | str, planner: Callable[[Program, Machine, int], Plan], keep: int = 16, undo: bool = False,
        **options: Any,
    ) -> None:  # fmt: skip
        if keep < 1:
            raise ValueError(f"keep: expected at least 1, got {keep}")
        self.parts, self.machine, self.planner, self.keep, self.undo = (
            (model, loss_fn, optimizer), machine, planner, keep, undo
        )  # fmt: skip
        self.options = {"bucket_bytes": BUCKET_BYTES, **options}
        self._wanted = limit
        self.limit: int | None = None
        self.steps: dict[Hashable, PlannedStep] = {}
        self._current: PlannedStep | None = None
        self._open = False

    def __call__(self, *batch: Any) -> Any:
        """One training step.

        Args:
            batch: x, y; or as many pairs as ``accumulate`` says.

        Raises:
            CaptureError: a step of this shape cannot be captured.
            StepError: as in PlannedStep.
        """
        return self.step_for(*batch)(*batch)

    def step_for(self, *batch: Any) -> PlannedStep:
        """The step for batches of this form, which is the present one from now on."""
        form = _form(batch)
        step = self.steps.get(form)
        if step is None or step is not self._current:
            self.finish()
            self._current = None
            if step is None:
                step = self._make(batch)
                while len(self.steps) >= self.keep:
                    del self.steps[next(iter(self.steps))]
            else:
                del self.steps[form]
            self.steps[form] = self._current = step
            if self._open:
                step.__enter__()
        return step

    def _make(self, batch: tuple[Any, ...]) -> PlannedStep:
        several = self.options.get("accumulate", 1) > 1
        if several and (len(batch) != self.options["accumulate"] or len({_form(pair) for pair in batch}) > 1):
            raise StepError(f"a step takes {self.options['accumulate']} micro-batches (x, y) of one shape")
        example = batch[0] if several else batch
        captured = capture(*self.parts, example, machine=self.machine, **self.options)
        limit = self.limit or limit_bytes(self._wanted, captured.program)
        plan = self.planner(captured.program, self.machine, limit)
        step = PlannedStep(captured, plan, self.machine, limit, self.undo)
        self.limit = limit
        return step

    def finish(self) -> None:
        """All of the user's tensors are on the device again, and no copy is under way. Steps may follow."""
        if self._current is not None:
            if self._open:
                self._current.__exit__()
            else:
                self._current.finish()

    @property
    def peak_bytes(self) -> int:
        """Largest number of bytes in use at any kernel of any step of the shapes that are kept."""
        return max((step.peak_bytes for step in self.steps.values()), default=0)

    def __enter__(self) -> PlannedSteps:
        """Until the end of the ``with``, copies run on over the boundary of steps of one shape."""
        self._open = True
        if self._current is not None:
            self._current.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()
        self._open = False


def _form(batch: Any) -> Hashable:
    """Equal for batches that one capture is right for."""
    leaves, spec = tree_flatten(batch)
    seen: dict[int, int] = {}  # a tensor that stands in two places is another form
    return spec, tuple(
        (tuple(v.shape), v.stride(), v.dtype, str(v.device), seen.setdefault(id(v), len(seen)))
        if isinstance(v, torch.Tensor) else v for v in leaves
    )  # fmt: skip
