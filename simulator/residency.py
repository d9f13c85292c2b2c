"""Computes bytes in use with some gaps emptied, and whether inputs are still available.

``schedule.py`` adds the memory of recomputed kernels.
"""

from __future__ import annotations

from collections.abc import Set

import numpy as np
from numpy.typing import NDArray

from simulator.program import Gap, Program


def residency(load: NDArray[np.int64], bounds: NDArray[np.int64], nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the load per kernel with some gaps emptied, as if transfers took no time.

    Args:
        load: (n,) bytes at each kernel with nothing evicted.
        bounds: (m, 2) gaps: the kernel after which each opens, and the kernel before which it ends.
        nbytes: (m,) size of each gap's tensor.

    Returns:
        int64 (n,), bytes at each kernel.
    """
    after, before = bounds.T
    change = np.zeros(len(load) + 1, np.int64)
    np.subtract.at(change, after + 1, nbytes)
    np.add.at(change, before, nbytes)
    change[0] -= nbytes[after >= before].sum()
    remaining: NDArray[np.int64] = load + change[:-1].cumsum()
    return remaining


def is_available(program: Program, tensor: int, reader: int, kernel: int, dropped: Set[int]) -> bool:
    """Returns whether ``tensor`` is in memory or on the host at ``kernel``, with the content that ``reader`` read.

    Args:
        program: Program of the tensor and kernels.
        tensor: Tensor whose content is needed.
        reader: Kernel that read the content before.
        kernel: Kernel at which it is needed.
        dropped: Tensors that are evicted and must be recomputed.
    """
    return tensor not in dropped and kernel <= program.available_until[reader][tensor]


def reruns(program: Program, targets: Set[int], kernel: int, dropped: Set[int] = frozenset()) -> list[int]:
    """Returns the kernels that must be recomputed to restore ``targets`` before ``kernel`` (rule 7), in order.

    They are the writers of the targets and, recursively, of their inputs that are not present. With more tensors
    dropped, or later in the same gap, further kernels may be needed.

    Args:
        program: Program of the tensors and kernels.
        targets: Tensors to restore.
        kernel: Kernel before which they are restored.
        dropped: Further tensors that are evicted.

    Returns:
        Kernel indices, ascending.
    """
    dropped = dropped | targets
    chain: set[int] = set()
    pending = [w for t in targets for w in program.writes[t] if w < kernel]
    while pending:
        w = pending.pop()
        if w in chain:
            continue
        chain.add(w)
        for x in program.kernels[w].inputs:
            if not is_available(program, x, w, kernel, dropped):
                pending += [u for u in program.writes[x] if u < w]
    return sorted(chain)


def recompute_ns(program: Program, gap: Gap) -> int:
    """Returns the duration of the kernels that recompute a gap's tensor when nothing else is evicted."""
    return sum(program.kernels[k].duration_ns for k in reruns(program, {gap.tensor}, gap.before))
