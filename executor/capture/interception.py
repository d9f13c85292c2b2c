"""Intercepts PyTorch calls of a traced step that are not operators.

These are optimizer steps, ``zero_grad``, GradScaler, assignments to ``data``, and reads and writes of random states.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.grad_scaler import GradScaler
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, set_proxy_slot
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from executor.capture.optimizers import captured_form, changed_number, numbers_of, patch_attrs, split_groups
from executor.capture.reach import CaptureError
from executor.capture.recorder import Recorder

Change = tuple[Any, str, Any]  # of ``patch_attrs``


@contextmanager
def traced_calls(
    recorder: Recorder,
    groups: dict[Optimizer, tuple[dict[str, Any], ...]],
    bucket_bytes: int | None,
    starting: set[int],
    errors: list[str],
) -> Iterator[None]:
    """Intercepts PyTorch calls that are not operators while a step is traced, and reports them to the recorder.

    Optimizer steps get the captured form.

    Args:
        groups: Options of each optimizer at capture time.
        bucket_bytes: As in ``capture``; for optimizers of ``torch.optim``.
        starting: ids of optimizers whose first step is traced.
        errors: Receives a sentence for each Python number that an optimizer's step changes.
    """
    stack: list[tuple[ExitStack, dict[tuple[Any, ...], Any]]] = []

    def enter(optimizer: Optimizer, *_: Any) -> None:
        with ExitStack() as context:  # unwinds on an exception
            context.enter_context(captured_form(optimizer))
            if optimizer in groups:
                context.enter_context(recorder.numbers.symbolic(optimizer, groups[optimizer]))
            # An optimizer of the user's may treat its groups differently, as one that steps the first group only.
            if bucket_bytes and type(optimizer).step.__module__.startswith("torch.optim"):
                context.enter_context(split_groups(optimizer, bucket_bytes))
            numbers = numbers_of(optimizer)
            stack.append((context.pop_all(), numbers))
        recorder.record_gradients(p for group in optimizer.param_groups for p in group["params"])
        recorder.is_stepping = True

    def leave(optimizer: Optimizer, *_: Any) -> None:
        _, before = stack[-1]  # stays until nothing here can raise: what remains is unwound below
        if (key := changed_number(before, optimizer, id(optimizer) in starting)) is not None:
            errors.append(
                f"{type(optimizer).__name__} has {key[-1]} as a Python number, which each step changes and the graph "
                "cannot: use an optimizer that keeps it in a tensor, as those of torch.optim do"
            )
        stack.pop()[0].close()
        recorder.is_stepping = False

    changes = (
        *_scalers(recorder),
        *_zero_grads(recorder),
        *_random_states(recorder),
        *_eager_answers(),
        *_data(recorder),
    )
    hooks = [register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave)]
    try:
        with patch_attrs(*changes):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        while stack:  # the step raised
            stack.pop()[0].close()


def _eager_answers() -> Iterator[Change]:
    """Makes libraries that check for tracing behave as in eager mode.

    Checkpoints call ``_is_compiling``. transformers calls ``is_tracing`` and keeps masks that eager mode drops. The
    function's code object is replaced, because modules have already imported the function.
    """
    yield torch.utils.checkpoint._is_compiling, "__code__", (lambda func, args, kwargs: False).__code__
    if (transformers := sys.modules.get("transformers.utils.import_utils")) and hasattr(transformers, "is_tracing"):
        yield transformers.is_tracing, "__code__", (lambda tensor=None: False).__code__


def _zero_grads(recorder: Recorder) -> Iterator[Change]:
    """Reports ``zero_grad`` calls to the recorder."""

    def recording(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
            recorder.zero_grad_index = len(recorder.ops)
            original(self, *args, **kwargs)

        return zero_grad

    for owner in (Optimizer, nn.Module):
        yield owner, "zero_grad", recording(owner.zero_grad)


def _scalers(recorder: Recorder) -> Iterator[Change]:
    """Captures a GradScaler's step as taken; the number that would skip it is read when the graph executes.

    Eager PyTorch reads on the host whether a gradient is not finite, and then skips ``optimizer.step()``. Fused updates
    check on the device and need no interception. The program is that of a step that is not skipped.
    """
    update = GradScaler.update

    def take_step(self: GradScaler, optimizer: Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        found_inf = list(state["found_inf_per_device"].values())
        if len(found_inf) != 1:
            raise NotImplementedError("a GradScaler of gradients on several devices")
        with recorder.optional(found_inf[0]):
            return optimizer.step(*args, **kwargs)

    yield GradScaler, "_maybe_opt_step", take_step
    yield GradScaler, "update", torch.no_grad()(update)  # no_grad, as in optimizers


def _data(recorder: Recorder) -> Iterator[Change]:
    """Lets a tensor to whose ``data`` another is assigned stand for that tensor's node from then on."""
    data = torch._C.TensorBase.data

    def assign(tensor: Tensor, value: Tensor) -> None:
        if isinstance(tensor, FakeTensor) and not isinstance(value, FakeTensor):
            raise CaptureError(
                "the step assigns to data a tensor that is not in its arguments, modules, optimizers or closure "
                f"({recorder.places.line()}): make it a buffer (register_buffer), or pass it to the step"
            )
        data.__set__(tensor, value)
        if isinstance(tensor, FakeTensor):
            mode = get_proxy_mode()
            assert mode is not None
            set_proxy_slot(tensor, mode.tracer, get_proxy_slot(value, mode.tracer))
            tensor.constant = tensor.item_memo = None

    yield Tensor, "data", property(data.__get__, assign)


def _random_states(recorder: Recorder) -> Iterator[Change]:
    """Tracks random states that a step saves and restores, as ``torch.utils.checkpoint`` does for recomputation.

    The recorder associates each state with the operator after which it was saved. States of several generators are
    assumed to be saved and restored together, as in checkpoints.
    """
    saved_states: list[tuple[Tensor, int]] = []

    def recording_get(get: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            state = get(*args, **kwargs)
            saved_states.append((state, recorder.draw_index))
            return state

        return call

    def tracking_set(put: Callable[..., None]) -> Callable[..., None]:
        def call(state: Tensor, *args: Any, **kwargs: Any) -> None:
            put(state, *args, **kwargs)
            recorder.draw_index = next((draw for saved, draw in saved_states if saved is state), recorder.draw_index)

        return call

    for module in (torch, torch.random, torch.cuda, torch.cuda.random):
        yield module, "get_rng_state", recording_get(module.get_rng_state)
        yield module, "set_rng_state", tracking_set(module.set_rng_state)
