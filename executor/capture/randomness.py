"""Random states that a step keeps and puts back, as ``torch.utils.checkpoint`` does before it recomputes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from executor.capture.recorder import Recorder


@contextmanager
def traced_states(recorder: Recorder) -> Iterator[None]:
    """While a step is traced: the recorder knows after which operator the random state is that a step puts back.

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
