"""Planned residency: bytes in memory at each kernel, as if transfers took no time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def residency(load: NDArray[np.int64], where: NDArray[np.int64], nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the load per kernel with some gaps emptied.

    Args:
        load: (n,) bytes at each kernel with every gap filled.
        where: (m, 2) the gaps: the kernel after which each opens, the kernel before which it ends.
        nbytes: (m,) size of each gap's tensor.
    """
    after, before = where.T
    change = np.zeros(len(load) + 1, np.int64)
    np.subtract.at(change, after + 1, nbytes)
    np.add.at(change, before, nbytes)
    change[0] -= nbytes[after >= before].sum()
    left: NDArray[np.int64] = load + change[:-1].cumsum()
    return left
