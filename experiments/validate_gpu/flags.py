"""How PyTorch is set while figures are made, and what stands beside them: its allocator, precision, determinism."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import deterministic as memory

NO_FORM = "does not have a deterministic implementation"  # PyTorch's words
# Set before PyTorch is imported (__main__.py): memory in segments that grow, so that a cap counts bytes and not
# fragments (the second name is that of 2.9 and later); a fixed workspace, without which cuBLAS may differ in bits.
ENVIRONMENT = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")


@contextmanager
def deterministic() -> Iterator[list[str]]:
    """Operators take their deterministic form, where they have one: for comparing bits, not for times.

    Yields:
        A list that is filled at the end: what operators said that have none.
    """
    found: list[str] = []
    cudnn = torch.backends.cudnn
    before = (cudnn.deterministic, cudnn.benchmark, torch.are_deterministic_algorithms_enabled(),
              torch.is_deterministic_algorithms_warn_only_enabled(), memory.fill_uninitialized_memory,
              torch.is_warn_always_enabled())  # fmt: skip
    try:
        cudnn.deterministic, cudnn.benchmark = True, False
        torch.use_deterministic_algorithms(True, warn_only=True)
        memory.fill_uninitialized_memory = False  # type: ignore[assignment]  # nobody reads what he has not written
        torch.set_warn_always(True)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            yield found
        found += sorted({str(w.message).split()[0] for w in heard if NO_FORM in str(w.message)})
    finally:
        cudnn.deterministic, cudnn.benchmark = before[:2]
        torch.use_deterministic_algorithms(before[2], warn_only=before[3])
        memory.fill_uninitialized_memory = before[4]  # type: ignore[assignment]
        torch.set_warn_always(before[5])


def report() -> dict[str, Any]:
    """What is set now, and on CUDA whether the allocator's segments really grow."""
    out: dict[str, Any] = {name: os.environ.get(name, "") for name in ENVIRONMENT}
    out |= {
        "matmul_precision": torch.get_float32_matmul_precision(), "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark, "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn": torch.backends.cudnn.version(), "cuda": torch.version.cuda,
    }  # fmt: skip
    if torch.cuda.is_available():
        segments = torch.cuda.memory_snapshot()
        out["expandable_segments"] = [bool(s.get("is_expandable")) for s in segments].count(True)
        out["other_segments"] = len(segments) - out["expandable_segments"]
    return out
