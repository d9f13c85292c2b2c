"""Hugging Face's Trainer under a memory limit: its data, schedule, logs, checkpoints and callbacks, with planned steps.

    from executor.integrations import PlannedTrainer          # for: from transformers import Trainer
    trainer = PlannedTrainer(model, arguments, train_dataset=…, memory="24GiB")

``training_step`` performs the whole step: forward, loss, backward and, after the last micro-batch, gradient norm,
clipping and update. The loop's own ``optimizer.step()`` then does nothing. All else is the Trainer's own code. Each
combination of shapes in a step is planned when it first occurs, so pad to few lengths.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import Trainer

from executor.capture.python_values import SCALARS, names_of
from executor.capture.reach import CaptureError
from executor.fit import FittedSteps, fit
from executor.training.bindings import StepError

# Attributes that a Trainer's loop uses and a loss does not.
LOOPS = {
    "accelerator",
    "args",
    "model",
    "model_wrapped",
    "optimizer",
    "lr_scheduler",
    "state",
    "control",
    "planned",
    "callback_handler",
    "train_dataset",
    "eval_dataset",
    "data_collator",
    "processing_class",
}


class Updated:
    """Wrapper whose ``step`` does nothing, because the update is done; other attributes are the optimizer's own."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer

    def step(self, closure: Any = None) -> None:
        """Marks the update as done for the learning-rate scheduler."""
        vars(self._optimizer)["_opt_called"] = True  # PyTorch's schedulers check for an update

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


class TrainersLoss(nn.Module):
    """Module that computes the Trainer's loss of a batch, with the attributes that ``compute_loss`` reads.

    Attributes whose names begin with an underscore are not part of a step's state.
    """

    norm: Tensor

    def __init__(self, trainer: PlannedTrainer, model: nn.Module) -> None:
        super().__init__()
        self._trainer = (trainer,)
        self.model = model
        self.register_buffer("norm", torch.zeros((), dtype=torch.float64, device=trainer.args.device))
        self._norm_dtype = torch.float32
        self.code, names = reachable_code(type(trainer), "compute_loss")
        self.trainer = Named(vars(trainer), names - LOOPS)
        for part in ("args", "state"):
            table = vars(getattr(trainer, part))
            setattr(self, part, Named(table, names & {k for k, v in table.items() if isinstance(v, SCALARS)}))

    def forward(self, batch: dict[str, Any]) -> Tensor:
        """Returns the Trainer's loss of a batch that includes ``num_items_in_batch``."""
        inputs = {key: value for key, value in batch.items() if key != "num_items_in_batch"}
        trainer = self._trainer[0]
        loss = trainer.compute_loss(self.model, inputs, num_items_in_batch=batch["num_items_in_batch"])
        trainer._problem_type = getattr(getattr(trainer.model, "config", None), "problem_type", None)
        return loss

    def before_update(self, *_: Any) -> None:
        """Computes the gradient norm and clips gradients as the Trainer does; a hook of the optimizer."""
        max_norm = self._trainer[0].args.max_grad_norm
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), max_norm if max_norm > 0 else math.inf)
        self._norm_dtype = norm.dtype
        with torch.no_grad():
            self.norm.copy_(norm)

    def last_norm(self) -> Tensor:
        """Returns the norm of the last step's gradients before clipping."""
        return self.norm.to(self._norm_dtype)


class Named(dict[str, Any]):
    """Subset of a dictionary with the entries that some code names.

    A capture thus finds the tensors, modules and numbers that the code reads, and nothing else of a large object.
    """

    def __init__(self, table: dict[str, Any], names: set[str]) -> None:
        super().__init__({name: table[name] for name in table.keys() & names})
        self._table = table

    def __getitem__(self, name: str) -> Any:
        return self._table[name]

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self._table[name] = value

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Updates this dictionary and the table."""
        super().update(*args, **kwargs)
        self._table.update(*args, **kwargs)


def reachable_code(owner: type, start: str) -> tuple[list[FunctionType], set[str]]:
    """Returns the functions that a user's method reaches by name, and all attribute names in their code.

    Functions of transformers are left out.
    """
    functions: list[FunctionType] = []
    names = set[str]()
    pending = [start]
    while pending:
        method = inspect.getattr_static(owner, pending.pop(), None)
        method = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
        method = inspect.unwrap(method) if callable(method) else method
        if isinstance(method, FunctionType) and method not in functions:
            if method.__module__.partition(".")[0] != "transformers":
                functions.append(method)
            elif functions or names:
                continue
            code_names = names_of(method.__code__)
            names = names | code_names
            pending = [*pending, *code_names]
    return functions, names


class PlannedTrainer(Trainer):
    """Trainer whose steps fit into ``memory``; ``options`` as in ``fit``.

    Attributes:
        planned: The planned steps; None before the first one.

    Raises:
        FitError, CaptureError, StepError: As in ``fit`` and its steps, also from ``train``.
    """

    def __init__(self, *args: Any, memory: int | float | str, options: dict[str, Any] | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.memory = memory
        self.options = options or {}
        self.planned: FittedSteps | None = None
        self._loss: TrainersLoss | None = None
        self._problem_type: str | None = None  # the model's value in the capture
        self._undo: list[Callable[[], None]] = []  # restore the optimizer after training
        self._next: list[tuple[dict[str, Any], None]] = []  # micro-batches of the next step

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Tensor | int | None]:
        """Returns all micro-batches of a step; the last step of an epoch may have fewer, and shapes may differ."""
        samples, count = super().get_batch_samples(*args, **kwargs)
        self._next = [self._pair(inputs, count) for inputs in samples]
        return samples, count

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Executes the next micro-batch of a planned step; the last one includes the update."""
        model.train()
        if self._next:
            if self.planned is None:
                self.planned = self._fit(model, num_items_in_batch is not None)
                if not self._readers():
                    self.planned.__enter__()
            self.planned.begin(*self._next)
            self._next = []
        assert self.planned is not None
        scaler = self.accelerator.scaler
        scale = scaler.get_scale() if scaler is not None else 0.0
        loss = self.planned(*self._pair(inputs, num_items_in_batch))
        if scaler is not None:
            self.optimizer._is_overflow = scaler.get_scale() < scale
        return loss

    def _pair(self, inputs: dict[str, Any], count: Tensor | int | None) -> tuple[dict[str, Any], None]:
        return {**self._prepare_inputs(inputs), "num_items_in_batch": count}, None

    def _fit(self, model: nn.Module, has_count: bool) -> FittedSteps:
        self._check_supported()
        k = self.args.gradient_accumulation_steps
        # As in the Trainer: a loss already divided by the items of all micro-batches is not divided by their number.
        scaled = (self.model_accepts_loss_kwargs and has_count) or self.compute_loss_func is not None
        if (is_scaled := getattr(self, "loss_is_scaled_for_ga", None)) is not None:
            scaled = is_scaled
        wrapped = self.optimizer
        optimizer = wrapped.optimizer
        scaler = wrapped.scaler
        self._loss = TrainersLoss(self, model)
        hook = optimizer.register_step_pre_hook(self._loss.before_update)
        wrapped.optimizer = Updated(optimizer)
        wrapped.scaler = None

        def undo() -> None:
            hook.remove()
            wrapped.optimizer = optimizer
            wrapped.scaler = scaler

        self._undo.append(undo)
        fit_step = partial(
            fit,
            self._loss,
            _identity,
            optimizer,
            tuple(self._next) if k > 1 else self._next[0],
            self.memory,
            accumulate=k,
            average=not scaled,
            scaler=scaler,
            clip_norm=None if scaler is None else math.inf,  # so gradients are unscaled before the hook, fused or not
            **self.options,
        )
        try:
            return fit_step()
        except StepError:  # a classifier whose first step sets its problem type
            if self._problem_type is None or getattr(self.model.config, "problem_type", None) is not None:
                raise
            self.model.config.problem_type = self._problem_type
            return fit_step()

    def _readers(self) -> list[str]:
        """Returns the names of user code that runs between steps and may read parameters.

        Without any, copies continue across the boundaries of steps, and no step waits for them.
        """
        subclasses = type(self).__mro__[: type(self).__mro__.index(PlannedTrainer)]
        methods = [name for owner in subclasses for name, value in vars(owner).items() if callable(value)]
        callbacks = [type(callback) for callback in self.callback_handler.callbacks]
        foreign = [owner.__name__ for owner in callbacks if owner.__module__.partition(".")[0] != "transformers"]
        return [name for name in methods if name not in ("__init__", "compute_loss")] + foreign

    def _check_supported(self) -> None:
        """Raises CaptureError if this Trainer's configuration is not supported."""
        args = self.args
        for feature, is_used in (
            ("DeepSpeed", self.is_deepspeed_enabled),
            ("FSDP", self.is_fsdp_enabled),
            (f"{args.world_size} processes", args.world_size > 1),
            (f"{args.n_gpu} GPUs", args.n_gpu > 1),
            (f"the optimizer {args.optim}, which updates within the backward pass", "lomo" in args.optim),
        ):
            if is_used:
                raise CaptureError(
                    f"the Trainer trains with {feature}, PlannedTrainer on one device by itself: take Trainer"
                )

    def _clip_grad_norm(self, *_: Any) -> Tensor:
        """Returns the norm from the planned step, which has already clipped and released the gradients."""
        assert self._loss is not None
        return self._loss.last_norm()

    def _get_grad_norm(self, *_: Any, **__: Any) -> Tensor:
        return self._clip_grad_norm()

    def finish(self) -> None:
        """Brings all parameters to the device to evaluate, save or change the model; training may continue."""
        if self.planned is not None:
            self.planned.finish()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the Trainer's evaluation loop after ``finish``."""
        self.finish()
        return super().evaluation_loop(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Saves the model as the Trainer does, after ``finish``; every checkpoint starts here."""
        self.finish()
        super().save_model(*args, **kwargs)
        if self.planned is not None:  # saving writes a dtype to the model's configuration: the step does not change
            for step in self.planned.steps.values():
                step.captured.python.restore()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trains as the Trainer does, with newly planned steps."""
        self.planned = None  # the optimizer may be new
        try:
            return super().train(*args, **kwargs)
        finally:
            if self.planned is not None:
                self.planned.__exit__()
            while self._undo:
                self._undo.pop()()


def _identity(loss: Tensor, _: None) -> Tensor:
    return loss
