"""Ambient modes of PyTorch, which a step reads from its surroundings: autocast, gradients, backends and precision.

A capture holds for the modes in which it was made. ``ambient_modes`` reads them in about a microsecond, since it is
called before every step. ``torch.backends.cudnn.benchmark`` is no such mode: PyTorch chooses algorithms when kernels
run, with and without a plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import call
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

Modes = tuple[Any, ...]  # values of ``_NAMES``

_BINDINGS: Any = torch._C
_READERS: dict[str, Callable[[], Any]] = {
    "torch.is_inference_mode_enabled()": torch.is_inference_mode_enabled,
    "torch.is_grad_enabled()": torch.is_grad_enabled,
    "torch.get_default_dtype()": torch.get_default_dtype,
    "torch.is_autocast_cache_enabled()": torch.is_autocast_cache_enabled,
    "the flash backend of sdpa_kernel": _BINDINGS._get_flash_sdp_enabled,
    "the memory-efficient backend of sdpa_kernel": _BINDINGS._get_mem_efficient_sdp_enabled,
    "the math backend of sdpa_kernel": _BINDINGS._get_math_sdp_enabled,
    "the cuDNN backend of sdpa_kernel": _BINDINGS._get_cudnn_sdp_enabled,
    "the overrideable backend of sdpa_kernel": _BINDINGS._get_overrideable_sdp_enabled,
    "torch.are_deterministic_algorithms_enabled()": _BINDINGS._get_deterministic_algorithms,
    "torch.is_deterministic_algorithms_warn_only_enabled()": _BINDINGS._get_deterministic_algorithms_warn_only,
    "torch.backends.cudnn.deterministic": _BINDINGS._get_cudnn_deterministic,
    "torch.backends.mkldnn.deterministic": _BINDINGS._get_mkldnn_deterministic,
    "torch.backends.cudnn.enabled": _BINDINGS._get_cudnn_enabled,
    "torch.backends.mkldnn.enabled": _BINDINGS._get_mkldnn_enabled,
    "the number of TorchFunctionModes (torch.set_default_device)": _BINDINGS._len_torch_function_stack,
}
_CALLS = tuple(_READERS.values())
_NAMES = (
    "torch.autocast",
    "TF32 for matrix products (torch.set_float32_matmul_precision)",
    "TF32 for convolutions (torch.backends.cudnn.conv.fp32_precision)",
    "the order of backends of sdpa_kernel",
    "whether torch.autograd.graph.saved_tensors_hooks surround the step",
    *_READERS,
)
_AUTOCAST_DEVICES = "cpu", "cuda"


def ambient_modes() -> Modes:
    """Returns the current modes, which are equal if a step does the same in both."""
    precision = _BINDINGS._get_fp32_precision_getter  # ``torch.get_float32_matmul_precision`` raises for newer flags
    return (
        _autocasts() if _BINDINGS._is_any_autocast_enabled() else (),
        precision("cuda", "matmul") == "tf32",
        precision("cuda", "conv") == "tf32",
        tuple(_BINDINGS._get_sdp_priority_order()),
        saved_tensors_hooks() is not None,
        *map(call, _CALLS),
    )


def saved_tensors_hooks() -> Any:
    """Returns the functions that pack and unpack activations around the step, or None."""
    return _BINDINGS._autograd._top_saved_tensors_default_hooks(False)


def _autocasts() -> tuple[tuple[str, torch.dtype], ...]:
    return tuple((d, torch.get_autocast_dtype(d)) for d in _AUTOCAST_DEVICES if torch.is_autocast_enabled(d))


@contextmanager
def default_modes() -> Iterator[None]:
    """Shields planners, which may run networks of their own, from the modes around the user's step."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch._C._DisableAutocast(),
            _BINDINGS.DisableTorchFunction(),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)


def mode_change(captured: Modes, current: Modes) -> str:
    """Returns a sentence about the first mode that differs, or ""."""
    for name, old, new in zip(_NAMES, captured, current, strict=True):
        if old != new:
            before, now = map(_describe, (old, new))
            return (
                f"{name} was {before} at the capture and is {now} now: call the step in the mode of its capture, or "
                "capture it again in this one (fit and PlannedSteps capture each mode by themselves)"
            )
    return ""


def _describe(mode: Any) -> str:
    if mode == () or (isinstance(mode, tuple) and isinstance(mode[0], tuple)):
        return " and ".join(f"{dtype} on {device}" for device, dtype in mode) or "off"
    return str(mode)


STALE_WEIGHTS = (
    "autocast keeps the weights that it cast before the last step, as its context has not ended since: open a "
    "torch.autocast context for each step, within the step, or with cache_enabled=False"
)


class CastWeights:
    """Weights that a step casts under an autocast context around it.

    Autocast keeps cast weights until its outermost context ends. A step that runs after an update in the same context
    therefore computes with the old weights, which a capture does not repeat. PyTorch does not tell contexts apart, so
    each update casts a probe, whose copy dies with the context.

    Args:
        device: Device of the step.
        cast: Weights that the step casts, by id.
        updated: Those of them that it updates.
    """

    _updates: ClassVar[list[tuple[StorageWeakRef, set[int]]]] = []  # of all steps, with the probe's copy

    def __init__(self, device: torch.device, cast: set[int], updated: set[int]) -> None:
        with torch.inference_mode(False):
            self._probe = torch.zeros(1, 1, device=device, requires_grad=True)
        self._cast = cast
        self._updated = updated

    @classmethod
    def stale(cls) -> set[int]:
        """Returns the weights, by id, that the current context has cast before their last update."""
        cls._updates[:] = [(copy, weights) for copy, weights in cls._updates if not copy.expired()]
        return set().union(*(weights for _, weights in cls._updates))

    def are_stale(self) -> bool:
        """Returns whether the current context has cast a weight of the step before its last update."""
        return not self._cast.isdisjoint(self.stale())

    def remember(self) -> None:
        """Records the step's update."""
        if not self._updated:
            return
        with torch.inference_mode(False):  # with gradients, which keep the copy that the product reads
            product: Any = torch.mm(self._probe, self._probe)
        cast: Tensor = product.grad_fn._saved_mat2
        self._updates.append((StorageWeakRef(cast.untyped_storage()), self._updated))
