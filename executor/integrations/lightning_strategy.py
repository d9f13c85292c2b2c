"""Lightning's automatic optimization under a memory limit: its loops, logs, checkpoints and callbacks, our steps.

    from executor.integrations import PlannedStrategy
    trainer = Trainer(strategy=PlannedStrategy("24GiB"), …)

The strategy's ``training_step`` does all of a step: the module's ``training_step``, the backward pass and, after the
last micro-batch, clipping and the optimizer's update; its ``backward`` and ``optimizer_step`` have nothing left to do.
What the module logs meanwhile is told by the step and logged after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from executor.capture.state import CaptureError
from executor.fit import FittedStep, FittedSteps, fit
from executor.integrations.numbers import Numbers, reached
from executor.training.bindings import StepError

# Between forward and update, where a planned step asks nobody.
REFUSED = "on_before_backward", "on_after_backward", "on_before_zero_grad", "optimizer_zero_grad", "backward"
COUNTERS = "current_epoch", "global_step"
Logged = tuple[str, str, tuple[Any, ...], dict[str, Any]]  # where, name, options of log
Told = tuple[list[Logged], list[str]]  # of a micro-batch: what it logs and the names of what it returns


class NoNumber:
    """The number of a batch while a step is captured, which is for batches of any number."""

    def _read(self, *_: Any) -> Any:
        raise CaptureError("training_step reads batch_idx, which would be the same in each step: do that elsewhere")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = __truediv__ = __pow__ = (
        _read
    )
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __int__ = __index__ = __float__ = _read
    __hash__ = __str__ = __repr__ = __format__ = _read  # type: ignore[assignment]


class TrainingStep(nn.Module):
    """A LightningModule's ``training_step`` as a module, its loss divided by the number of micro-batches. (What begins
    with an underscore is no part of a step's state.)"""

    def __init__(self, strategy: PlannedStrategy, module: LightningModule, arguments: int) -> None:
        super().__init__()
        self._strategy, self._arguments = (strategy,), arguments
        self.model = module
        self.told = Numbers(strategy.root_device)
        self.code, names = reached(type(module), "training_step", "lightning")
        self._names = names

    def forward(self, batch: Any) -> Tensor:
        logged: list[Logged] = []
        with self._telling(logged), self._strategy[0].precision_plugin.train_step_context():
            result = self.model.training_step(batch, *[NoNumber()] * (self._arguments - 1))
        results = dict(result) if isinstance(result, Mapping) else {"loss": result}
        for name, value in results.items():
            self._tell(f"training_step returns {name!r}", f"returned.{name}", value)
        self._strategy[0]._found.append((logged, list(results)))
        return results["loss"]

    def before_update(self, optimizer: Optimizer, *_: Any) -> None:
        """A hook of the optimizer: what Lightning does with gradients, ``configure_gradient_clipping`` included."""
        with self._telling(self._strategy[0]._found[-1][0]):
            self._strategy[0].precision_plugin._after_closure(self.model, optimizer)

    def _tell(self, what: str, name: str, value: Any) -> None:
        if not isinstance(value, Tensor) or value.numel() != 1:
            found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise CaptureError(
                f"{what}, which is {found}; a planned step tells tensors of one element: do it in on_train_batch_end"
            )
        self.told.write(name, value)

    @contextmanager
    def _telling(self, logged: list[Logged]) -> Iterator[None]:
        def log(name: str, value: Any, *more: Any, **options: Any) -> None:
            where = self.model._current_fx_name or "training_step"
            self._tell(f"{where} logs {name!r}", f"{where}.{name}", value)
            logged.append((where, name, more, options))

        vars(self.model)["log"] = log
        try:
            yield
        finally:
            vars(self.model).pop("log", None)


class PlannedStrategy(SingleDeviceStrategy):
    """A strategy for one device whose steps fit into ``memory``; ``options`` as in ``fit``.

    Attributes:
        planned: the steps; None before the first one.

    Raises:
        FitError, CaptureError, StepError: as ``fit`` and its steps; in ``Trainer.fit``, too.
    """

    strategy_name = "planned"

    def __init__(self, memory: int | float | str, options: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.memory, self.options = memory, options or {}
        self.planned: FittedSteps | None = None
        self._step: TrainingStep | None = None
        self._found: list[Told] = []  # by the capture under way
        self._logged: WeakKeyDictionary[FittedStep, list[Told]] = WeakKeyDictionary()
        self._counters: dict[str, int] = {}
        self._hook: RemovableHandle | None = None
        self._updating, self._micro, self._coming = False, 0, 0  # of a step's micro-batches those that are to come
        self._devices: list[torch.device] = []

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Those of the Trainer: one."""
        return self._devices

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) != 1:
            raise CaptureError(f"PlannedStrategy trains on one device, not on {len(devices)}: say devices=1")
        self._devices, self._root_device = devices, devices[0]

    def setup(self, trainer: Trainer) -> None:
        """As the strategy's; raises CaptureError where the step is no automatic optimization by itself."""
        super().setup(trainer)
        module = self.lightning_module
        if trainer.state.fn != TrainerFn.FITTING or module is None:
            return
        self._end()
        self.planned = None
        if not module.automatic_optimization:
            raise CaptureError("manual optimization has no step to plan: PlannedStrategy is for automatic optimization")
        if len(self.optimizers) != 1:
            raise CaptureError(f"PlannedStrategy trains with one optimizer, not with {len(self.optimizers)}")
        if getattr(module, "_compiler_ctx", None) is not None:
            raise CaptureError("the module is compiled (torch.compile), and only what is not can be captured")
        for one, base, more in ((module, LightningModule, ()), *((c, Callback, ("on_before_optimizer_step",))
                                                                 for c in trainer.callbacks)):  # fmt: skip
            for name in (*REFUSED, *more):
                if getattr(type(one), name, None) is not getattr(base, name, None):
                    raise CaptureError(
                        f"{type(one).__name__} has {name}, which a planned step does not call: take another hook"
                    )

    def training_step(self, *args: Any, **_: Any) -> dict[str, Any]:
        """The next micro-batch of a planned step; with the last one the update is done.

        Raises:
            StepError: Lightning updates after another micro-batch than the step was planned for; a number that
                training_step reads has changed.
        """
        module = self.lightning_module
        assert module is not None
        trainer, batch = module.trainer, args[0]
        if self._coming == 0:  # a step begins
            k, index = trainer.accumulate_grad_batches, trainer.fit_loop.epoch_loop.batch_idx
            self._micro = self._coming = int(min(k - index % k, trainer.num_training_batches - index))
            self._begin(module, [(batch, k)] * self._micro, len(args))
        self._coming -= 1
        if self._updating is not (self._coming == 0):
            self._coming = 0
            raise StepError(
                "the optimizer's step is not where accumulate_grad_batches and the length of an epoch have it"
            )
        assert self.planned is not None and self._step is not None
        self.planned(batch, trainer.accumulate_grad_batches)
        logged, returned = self._logged[self.planned.present][self._micro - 1 - self._coming]
        told, where = self._step.told, module._current_fx_name
        for at, name, more, options in logged:
            module._current_fx_name = at
            module.log(name, told.read(f"{at}.{name}"), *more, **options)
        module._current_fx_name = where
        return {name: told.read(f"returned.{name}") for name in returned}

    def _begin(self, module: LightningModule, pairs: list[tuple[Any, int]], arguments: int) -> None:
        if self.planned is None:
            self._step = TrainingStep(self, module, arguments)
            self._counters = {name: getattr(module, name) for name in COUNTERS if name in self._step._names}
            optimizer, k = self.optimizers[0], module.trainer.accumulate_grad_batches
            self._hook = optimizer.register_step_pre_hook(self._step.before_update)
            self.planned = fit(
                self._step, _part, optimizer, tuple(pairs) if k > 1 else pairs[0], self.memory, accumulate=k,
                average=False, scaler=getattr(self.precision_plugin, "scaler", None), **self.options,
            )  # fmt: skip
        for name, was in self._counters.items():
            if (now := getattr(module, name)) != was:
                raise StepError(
                    f"training_step reads {name}, which was {was} at the capture and is {now} now: make it a buffer"
                )
        self.planned.begin(*pairs)
        if self._found:  # a capture; one that was repeated has them twice
            self._logged[self.planned.present], self._found = self._found[-len(pairs) :], []

    def backward(self, closure_loss: Tensor, *_: Any, **__: Any) -> Tensor:
        """The step has done it."""
        return closure_loss

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], *_: Any, **__: Any) -> Any:
        """All of the last micro-batch; the step has updated."""
        self._updating = True
        try:
            result = closure()
        finally:
            self._updating = False
        vars(optimizer)["_opt_called"] = True  # for PyTorch's schedules, which look whether there was an update
        return result

    def finish(self) -> None:
        """All parameters are on the device: to evaluate, save or change the model. Training may go on.

        Raises:
            StepError: some micro-batches of a step are done, and others are not.
        """
        if self.planned is not None:
            if self._coming:
                raise StepError(
                    "within a step of several micro-batches no model can be seen: validate and save between steps"
                )
            self.planned.finish()

    def on_validation_start(self) -> None:
        """As the strategy's."""
        self.finish()

    def on_train_end(self) -> None:
        """As the strategy's."""
        self.finish()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """As the strategy's; so begins every checkpoint."""
        self.finish()
        return super().lightning_module_state_dict()

    def on_exception(self, exception: BaseException) -> None:
        """A step under way is undone."""
        self._end()

    def teardown(self) -> None:
        """As the strategy's."""
        self._end()
        super().teardown()

    def _end(self) -> None:
        self._coming = 0
        self.finish()
        if self._hook is not None:
            self._hook.remove()


def _part(loss: Tensor, micro_batches: int) -> Tensor:
    return loss / micro_batches
