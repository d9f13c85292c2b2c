"""What a step calls of PyTorch's outside of operators, seen while it is traced: optimizers, ``zero_grad``, GradScaler,
random states."""

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

from executor.capture.optimizers import bucketed, capturable, moved, numbers_of, symbolic_extremes, takes_capturable
from executor.capture.recorder import Recorder

MODULE_HOOKS = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
TENSOR_HOOKS = "_backward_hooks", "_post_accumulate_grad_hooks"


def tables(modules: Iterable[nn.Module]) -> list[dict[int, Any]]:
    """Where PyTorch keeps the hooks of modules and of their parameters, as far as there are any tables."""
    of_module = [getattr(m, which) for m in modules for which in MODULE_HOOKS]
    of_tensor = [getattr(p, which, None) for m in modules for p in m._parameters.values() if p is not None
                 for which in TENSOR_HOOKS]  # fmt: skip
    return [table for table in (*of_module, *of_tensor) if table is not None]


def count(modules: Iterable[nn.Module]) -> int:
    """How many hooks there are."""
    return sum(map(len, tables(modules)))


@contextmanager
def traced(
    recorder: Recorder, groups: dict[Optimizer, tuple[dict[str, Any], ...]], bucket_bytes: int | None, undone: list[str]
) -> Iterator[None]:
    """While a step is traced, the recorder is told of all of these; ``groups``, ``bucket_bytes``, ``undone``:
    traced_optimizers."""
    with (
        traced_optimizers(recorder, groups, bucket_bytes, undone),
        traced_scalers(recorder),
        traced_zero_grad(recorder),
        traced_states(recorder),
        answers_of_eager(),
    ):
        yield


@contextmanager
def answers_of_eager() -> Iterator[None]:
    """Libraries that ask whether they are traced, and then do something else, get the answer that they get in eager.

    Checkpoints ask ``_is_compiling``; transformers asks ``is_tracing``, and keeps masks that eager drops.
    """
    asked = [(torch.utils.checkpoint._is_compiling, lambda func, args, kwargs: False)]
    if (transformers := sys.modules.get("transformers.utils.import_utils")) and hasattr(transformers, "is_tracing"):
        asked.append((transformers.is_tracing, lambda tensor=None: False))
    before = [(function, function.__code__) for function, _ in asked]
    try:
        for function, answer in asked:  # the code: modules have imported the function
            function.__code__ = answer.__code__
        yield
    finally:
        for function, code in before:
            function.__code__ = code


@contextmanager
def traced_optimizers(
    recorder: Recorder, groups: dict[Optimizer, tuple[dict[str, Any], ...]], bucket_bytes: int | None, undone: list[str]
) -> Iterator[None]:
    """Tells the recorder when an optimizer's step runs, in the form that it is to be captured in. ``undone``: takes a
    sentence for what such a step changes of Python's numbers."""
    stack: list[tuple[ExitStack, dict[tuple[Any, ...], Any]]] = []

    def enter(optimizer: Optimizer, *_: Any) -> None:
        with ExitStack() as context:  # which undoes what is begun if this raises
            context.enter_context(capturable(takes_capturable(optimizer)))
            context.enter_context(symbolic_extremes())
            if optimizer in groups:
                context.enter_context(recorder.numbers.symbolic(optimizer, groups[optimizer]))
            if bucket_bytes:
                context.enter_context(bucketed(optimizer, bucket_bytes))
            numbers = numbers_of(optimizer)
            stack.append((context.pop_all(), numbers))
        recorder.note_gradients(p for group in optimizer.param_groups for p in group["params"])
        recorder.stepping = True

    def leave(optimizer: Optimizer, *_: Any) -> None:
        context, was = stack.pop()
        if (key := moved(was, optimizer)) is not None:
            undone.append(
                f"{type(optimizer).__name__} has {key[-1]} as a number of Python's, which each step changes and no "
                "graph would: take an optimizer that keeps it in a tensor, as torch.optim's do"
            )
        context.close()
        recorder.stepping = False

    hooks = [register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        while stack:  # the step raised
            stack.pop()[0].close()


@contextmanager
def traced_zero_grad(recorder: Recorder) -> Iterator[None]:
    """Tells the recorder when gradients are given back."""

    def noting(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
            recorder.zeroed = len(recorder.ops)
            original(self, *args, **kwargs)

        return zero_grad

    classes: tuple[Any, ...] = (Optimizer, nn.Module)
    originals = [c.zero_grad for c in classes]
    for c, original in zip(classes, originals, strict=True):
        c.zero_grad = noting(original)
    try:
        yield
    finally:
        for c, original in zip(classes, originals, strict=True):
            c.zero_grad = original


@contextmanager
def traced_scalers(recorder: Recorder) -> Iterator[None]:
    """While a step is traced, a GradScaler's step is captured as taken; the number that would skip it is asked when the
    graph runs.

    Eager PyTorch reads on the host whether a gradient was not finite, and leaves out ``optimizer.step()``; fused
    updates ask on the device, and need nothing here. The program is that of the normal step.
    """
    maybe, update = GradScaler._maybe_opt_step, GradScaler.update

    def taken(self: GradScaler, optimizer: Optimizer, state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        found = list(state["found_inf_per_device"].values())
        if len(found) != 1:
            raise NotImplementedError("a GradScaler of gradients on several devices")
        with recorder.optional(found[0]):
            return optimizer.step(*args, **kwargs)

    def updated(self: GradScaler, *args: Any, **kwargs: Any) -> None:
        with torch.no_grad():  # as all that an optimizer does
            update(self, *args, **kwargs)

    GradScaler._maybe_opt_step, GradScaler.update = taken, updated  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        GradScaler._maybe_opt_step, GradScaler.update = maybe, update  # type: ignore[method-assign]


@contextmanager
def traced_states(recorder: Recorder) -> Iterator[None]:
    """Random states that a step keeps and puts back, as ``torch.utils.checkpoint`` does before it recomputes: the
    recorder knows after which operator the state is.

    The states of several generators are kept and put back together, as checkpoints do.
    """
    known: list[tuple[Tensor, int]] = []
    undo: list[tuple[Any, str, Callable[..., Any]]] = []

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
        for name, make in (("get_rng_state", getting), ("set_rng_state", setting)):
            undo.append((module, name, getattr(module, name)))
            setattr(module, name, make(getattr(module, name)))
    try:
        yield
    finally:
        for module, name, function in undo:
            setattr(module, name, function)
