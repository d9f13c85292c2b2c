"""The present iteration as it has gone so far: what ``reward="causal"`` is made of.

While the agent walks, compute runs the kernels that it passes, copies to the host go one after the other, and what a
passed kernel needs has come back. A kernel is run once, under the decisions taken until then, and nothing that has
happened is gone over again: this is the causal side of rules 2 to 8. What comes later in the iteration, and what later
decisions change in it, the simulation of the whole plan settles with the last step (walk.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from envs.walk import Task


class Clock:
    """Times are in ns; 0 is the start of the iteration."""

    def __init__(self, task: Task):
        self.task = task
        self.ended = np.zeros(len(task.start_ns), np.int64)  # when all kernels before k had ended
        self.out_free = self.in_free = -task.program.ideal_ns  # when the copy engines are
        self.out_end = np.zeros(len(task.tensor), np.int64)  # by gap: when its copy to the host is complete
        self.queue: list[int] = []  # gaps whose copies to the host are under way, in order

    def offload(self, g: int, issued: int, before_iteration: bool) -> None:
        """A copy is issued when kernel ``issued`` has ended, of this iteration or of the one before."""
        task = self.task
        ended, late = (task.start_ns, task.program.ideal_ns) if before_iteration else (self.ended, 0)
        self.out_free = max(self.out_free, int(ended[issued + 1]) - late) + int(task.d2h_ns[g])
        self.out_end[g] = self.out_free
        self.queue.append(g)

    def run(self, begin: int, end: int, need: NDArray[np.int64], swapped: NDArray[np.bool_]) -> None:
        """Runs kernels ``begin`` to ``end`` - 1.

        Args:
            need: planned residency.
            swapped: by gap, whether it is emptied by a swap.
        """
        task = self.task
        for k in range(begin, end):
            now = int(self.ended[k])
            # What was away until kernel k comes back, from when it fits by the planned residency (rules 5 and 6).
            for g in np.flatnonzero(swapped & (task.before == k)):
                first = 0 if task.wraps[g] else int(task.after[g]) + 1
                tight = np.flatnonzero(need[first:k] + task.nbytes[g] > task.limit)
                fits = int(self.ended[first + tight[-1] + 1]) if len(tight) else -task.program.ideal_ns
                self.in_free = max(self.in_free, int(self.out_end[g]), fits) + int(task.h2d_ns[g])
                now = max(now, self.in_free)
            # What has not left yet is there beside the planned residency (rule 8).
            while self.queue:
                leaves, under_way = int(self.out_end[self.queue[0]]), int(task.nbytes[self.queue].sum())
                if leaves > now and need[k] + under_way <= task.limit:
                    break
                now = max(now, leaves)
                self.queue.pop(0)
            self.ended[k + 1] = now + task.start_ns[k + 1] - task.start_ns[k]

    def stall_ns(self, position: int) -> int:
        """How long the kernels before ``position`` have waited in all."""
        return int(self.ended[position] - self.task.start_ns[position])
