"""Intercepts PyTorch calls of a traced step that are not operators.

These are optimizer steps, ``zero_grad``, GradScaler, and reads and writes of random states.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from executor.capture.optimizers import bucketed, captured_form, moved, numbers_of, patched
from executor.capture.recorder import Recorder

Change = tuple[Any, str, Any]  # of ``patched``
MODULE_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
TENSOR_HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"


def tables(modules: Iterable[nn.Module]) -> list[dict[int, Any]]:
    """Returns the existing dictionaries in which PyTorch keeps hooks of modules and their parameters."""
    of_module = [getattr(m, which) for m in modules for which in MODULE_HOOKS]
    of_tensor = [getattr(p, which, None) for m in modules for p in m._parameters.values() if p is not None
                 for which in TENSOR_HOOKS]  # fmt: skip
    return [table for table in (*of_module, *of_tensor) if table is not None]


def count(modules: Iterable[nn.Module]) -> int:
    """Returns the number of hooks of modules and their parameters."""
    return sum(map(len, tables(modules)))


@contextmanager
def traced(
    recorder: Recorder, groups: dict[Optimizer, tuple[dict[str, Any], ...]], bucket_bytes: int | None, undone: list[str]
) -> Iterator[None]:
    """Reports these calls to the recorder while a step is traced, and puts optimizer steps into the captured form.

    Args:
        groups: Options of each optimizer at capture time.
        bucket_bytes: As in ``capture``.
        undone: Receives a sentence for each Python number that an optimizer's step changes.
    """
    stack: list[tuple[ExitStack, dict[tuple[Any, ...], Any]]] = []

    def enter(optimizer: Optimizer, *_: Any) -> None:
        with ExitStack() as context:  # unwinds on an exception
            context.enter_context(captured_form(optimizer))
            if optimizer in groups:
                context.enter_context(recorder.numbers.symbolic(optimizer, groups[optimizer]))
            if bucket_bytes:
                context.enter_context(bucketed(optimizer, bucket_bytes))
            numbers = numbers_of(optimizer)
            stack.append((context.pop_all(), numbers))
        recorder.note_gradients(p for group in optimizer.param_groups for p in group["params"])
        recorder.stepping = True

    def leave(optimizer: Optimizer, *_: Any) -> None:
        _, was = stack[-1]  # stays until nothing here can raise: what remains is unwound below
        if (key := moved(was, optimizer)) is not None:
            undone.append(
                f"{type(optimizer).__name__} has {key[-1]} as a Python number, which each step changes and the graph "
                "cannot: use an optimizer that keeps it in a tensor, as those of torch.optim do"
            )
        stack.pop()[0].close()
        recorder.stepping = False

    hooks = [register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave)]
    changes = (*_scalers(recorder), *_zero_grads(recorder), *_random_states(recorder), *_answers_of_eager())
    try:
        with patched(*changes):
            yield
    finally:
        for hook in hooks:
            hook.remove()
        while stack:  # the step raised
            stack.pop()[0].close()


def _answers_of_eager() -> Iterator[Change]:
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
            recorder.zeroed = len(recorder.ops)
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

    def taken(self: GradScaler, optimizer: Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        found = list(state["found_inf_per_device"].values())
        if len(found) != 1:
            raise NotImplementedError("a GradScaler of gradients on several devices")
        with recorder.optional(found[0]):
            return optimizer.step(*args, **kwargs)

    yield GradScaler, "_maybe_opt_step", taken
    yield GradScaler, "update", torch.no_grad()(update)  # no_grad, as in optimizers


def _random_states(recorder: Recorder) -> Iterator[Change]:
    """Tracks random states that a step saves and restores, as ``torch.utils.checkpoint`` does for recomputation.

    The recorder associates each state with the operator after which it was saved. States of several generators are
    assumed to be saved and restored together, as in checkpoints.
    """
    known: list[tuple[Tensor, int]] = []

    def getting(get: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **kwargs: Any) -> Tensor:
            state = get(*args, **kwargs)
            known.append((state, recorder.drawing))
            return state

        return call

    def setting(put: Callable[..., None]) -> Callable[..., None]:
        def call(state: Tensor, *args: Any, **kwargs: Any) -> None:
            put(state, *args, **kwargs)
            recorder.drawing = next((at for kept, at in known if kept is state), recorder.drawing)

        return call

    for module in (torch, torch.random, torch.cuda, torch.cuda.random):
        yield module, "get_rng_state", getting(module.get_rng_state)
        yield module, "set_rng_state", setting(module.set_rng_state)
