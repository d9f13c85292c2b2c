"""Measures the bytes that a step allocates, as the device's allocator counts them."""

from __future__ import annotations

from collections.abc import Callable

import torch


def allocated_peak(step: Callable[[], object], device: str = "cpu") -> int:
    """Returns the peak of bytes that ``step()`` allocates in addition to those in use before it.

    On the CPU the profiler records every tensor allocation and release, including those of Inductor's kernels, but not
    a library's own scratch memory. On a GPU the peak is ``max_memory_allocated``.
    """
    if device != "cpu":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    results = profiler.profiler.kineto_results
    changes = [(e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]"]
    now = peak = 0
    for _, nbytes in sorted(changes, key=lambda change: change[0]):
        now += nbytes
        peak = max(peak, now)
    return peak
